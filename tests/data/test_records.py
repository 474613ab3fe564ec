import json
import lzma
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from codd.data import records
from codd.data.records import HubDataset, locate, read_records
from codd.data.sources import QuestionAnswer, Source, find_sources, read_chunks, read_pairs
from codd.errors import MissingDependency

ROWS = [
    {"instruction": f'How many is {n}, "{{[]}}" é?', "output": f"It is\n{n}.", "source": "x", "n": n} for n in range(9)
]
PAIRS = [QuestionAnswer(row["instruction"], row["output"]) for row in ROWS]


def write(path: Path, rows=ROWS) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=4)
        return path
    lines = path.name.startswith("lines")
    text = "\n".join(map(json.dumps, rows)) if lines else json.dumps(rows, indent=1)
    path.write_bytes(lzma.compress(text.encode()) if path.suffix == ".xz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["lines.jsonl", "a.json", "a.JSON", "a.json.xz", "lines.json", "a.parquet"])
def test_pairs_of_every_format(tmp_path, name, monkeypatch):
    path = write(tmp_path / name)
    (source,) = find_sources([path], None)
    assert (source.kind, source.fields) == ("qa", ("instruction", "output"))
    assert list(read_pairs(source, Path())) == PAIRS
    assert list(read_pairs(Source("qa", "a", path=name, fields=("output", "source"), count=2), tmp_path)) == [
        QuestionAnswer("It is\n0.", "x"),
        QuestionAnswer("It is\n1.", "x"),
    ]
    for size in (1, 7, 64):  # wherever the pieces end that a file is read by
        monkeypatch.setattr(records, "_AT_ONCE", size)
        monkeypatch.setattr(records, "BATCH_ROWS", size)
        assert [record for _, record in read_records(path)] == ROWS


@pytest.mark.parametrize("name", ["a.json", "a.parquet"])
def test_documents_of_every_format(tmp_path, name):
    texts = ["one\n\ntwo", "three"]
    write(tmp_path / name, [{"text": text} for text in texts])
    (source,) = find_sources([tmp_path / name], None)
    assert source.kind == "text"
    assert [(chunk.text, chunk.ends) for chunk in read_chunks(source, Path())] == [(text, True) for text in texts]


@pytest.mark.parametrize(
    ("keys", "known"),
    [
        (("query", "response", "type", "original_question"), ("query", "response")),  # MetaMathQA
        (("source", "output", "instruction"), ("instruction", "output")),  # MathInstruct
        (("problem", "level", "solution"), ("problem", "solution")),
        (("question", "answer"), ("question", "answer")),
    ],
)
def test_the_fields_of_known_datasets_are_found(tmp_path, keys, known):
    write(tmp_path / "a.json", [dict.fromkeys(keys, "x")])
    (source,) = find_sources([tmp_path / "a.json"], None)
    assert (source.kind, source.fields) == ("qa", known)
    (source,) = find_sources([tmp_path / "a.json"], [keys[0]])
    assert (source.kind, source.fields) == ("text", (keys[0],))


def test_an_array_is_not_in_memory_as_a_whole(tmp_path):
    with (tmp_path / "a.json").open("w") as file:
        file.write(
            "[" + ",\n".join(json.dumps({"text": "word " * 1000})[:-1] + f', "n": {n}}}' for n in range(4000)) + "]"
        )
    assert (tmp_path / "a.json").stat().st_size > 20e6
    tracemalloc.start()
    assert sum(1 for _ in read_records(tmp_path / "a.json")) == 4000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3e6


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("TIGER-Lab/MathInstruct", ("TIGER-Lab/MathInstruct", None, "train")),
        ("a/b:test", ("a/b", None, "test")),
        ("openai/gsm8k:main:test[:10%]", ("openai/gsm8k", "main", "test[:10%]")),
        ("a/b.c:train[-500:]", ("a/b.c", None, "train[-500:]")),
    ],
)
def test_names_of_the_hub(tmp_path, name, found):
    assert locate(name, tmp_path) == HubDataset(*found)
    (tmp_path / "a").mkdir()
    assert str(locate(name, tmp_path)) in (name, f"{name}:train")


def test_a_file_comes_before_the_hub(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").touch()
    assert locate("a/b", tmp_path) == tmp_path / "a" / "b"


HUB = """
import sys
from pathlib import Path
from codd.data.records import content_digest, locate
from codd.data.sources import find_sources, read_pairs
(source,) = find_sources([Path(sys.argv[1])], None)
print(source.kind, *source.fields)
for pair in read_pairs(source, Path("/nowhere")):
    print(pair.question)
assert content_digest(locate(source.path, Path())) == content_digest(locate(source.path, Path()))
"""


def test_a_dataset_of_the_hub(tmp_path):
    """As the package datasets has it after a download; without one, there is no connection in tests."""
    made = tmp_path / "made"
    code = "import sys, datasets; datasets.load_dataset('json', data_files=sys.argv[1], cache_dir=sys.argv[2])"
    array = str(write(tmp_path / "a.json"))
    environment = {"PATH": "", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    environment["PYTHONPATH"] = str(Path(records.__file__).parents[2])
    subprocess.run([sys.executable, "-c", code, array, str(made)], check=True, env=environment)
    (folder,) = made.glob("json/*/*/*/")
    kept = tmp_path / "home" / "datasets" / "TIGER-Lab___math_instruct" / "default" / "0.0.0" / folder.name
    kept.parent.mkdir(parents=True)
    shutil.copytree(folder, kept)
    (kept / "json-train.arrow").rename(kept / "math_instruct-train.arrow")
    info = json.loads((kept / "dataset_info.json").read_text())
    info |= {"dataset_name": "math_instruct", "config_name": "default"}
    info["splits"]["train"]["dataset_name"] = "math_instruct"
    (kept / "dataset_info.json").write_text(json.dumps(info))

    def read(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", HUB, name], env=environment, capture_output=True, text=True)

    done = read("TIGER-Lab/MathInstruct:train[2:5]")
    assert done.stdout.splitlines() == ["qa instruction output", *(pair.question for pair in PAIRS[2:5])], done.stderr
    wrong = read("TIGER-Lab/Missing")
    assert "TIGER-Lab/Missing:train: there is no such file, and the hub gave no such dataset" in wrong.stderr


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a/b", "datasets")])
def test_what_is_not_installed_is_named(tmp_path, monkeypatch, name, package):
    write(tmp_path / "a.parquet")
    for module in ("pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependency, match=rf"needs the package {package}: pip install 'codd-lm\[data\]'"):
        list(read_records(locate(name, tmp_path)))
