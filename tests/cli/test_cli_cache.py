import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from codd.circuits import HMM
from codd.cli import main
from codd.training.logit_cache.reader import LogitCache
from codd_lab.problems import problems
from tests.support import FIXTURES, cli
from tests.support.checkpoints import save_network
from tests.support.cli import kill_codd
from tests.support.small_runs import small_tokenizer
from tests.support.two_processes import run_in_two_processes

pytestmark = pytest.mark.usefixtures("one_thread")  # here as in the processes that are started: the same bits
WINDOW = 8
SMALL = ["--window", str(WINDOW), "--row-length", "384", "--device", "cpu"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A small denoiser, a small causal model, questions and prose."""
    root = tmp_path_factory.mktemp("root")
    made = list(problems(60))
    save_network(root / "mini", small_tokenizer())
    save_network(root / "causal", small_tokenizer(), causal=True)
    lines = [json.dumps({"question": p.question, "answer": p.solution}) for p in made]
    (root / "train.jsonl").write_text("\n".join(lines) + "\n")
    (root / "prose.txt").write_text("\n\n".join(p.question for p in made) * 3)
    return root


@pytest.fixture(autouse=True)
def here(root, monkeypatch):
    monkeypatch.chdir(root)


def arguments(out: Path, *more: str, backbone: str = "mini") -> list[str]:
    return ["cache", "--backbone", backbone, "--out", str(out), *SMALL, *more]


def cache(out: Path, *more: str, backbone: str = "mini") -> int:
    return main(arguments(out, *more, backbone=backbone))


def refused(capsys, out: Path, *more: str, backbone: str = "mini") -> str:
    return cli.refused(capsys, *arguments(out, *more, backbone=backbone))


def shards(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("shard-*"))}


def windows(out: Path) -> list[list[int]]:
    """The tokens of all windows, and what the network says of each."""
    shown = LogitCache.open(out).load("cpu")
    return [shown.tokens.tolist(), shown.windows(torch.arange(len(shown))).factorized_log_prob().tolist()]


def test_text(tmp_path, capsys):
    assert cache(tmp_path, "--data", "train.jsonl", "--top-k", "40") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"cached: {tmp_path}\n")
    assert "bytes_per_token" in printed.out
    assert "dense_bytes_per_token  800\n" in printed.out
    table = [line.split() for line in printed.err.splitlines()[1:]]
    assert [line[0] for line in table] == ["16", "32", "40"]
    assert table[-1][2:] == ["<-", "kept"]
    assert float(table[0][1]) > float(table[-1][1]) > 0


def test_json(tmp_path, capsys):
    assert cache(tmp_path, "--data", "train.jsonl", "--tolerance", "0.01", "--windows", "150", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    opened = LogitCache.open(tmp_path)
    assert found["windows"] == len(opened) == pytest.approx(150, rel=0.2)
    assert found["top_k"] == opened.index.top_k == found["measured"][-1]["k"]
    assert found["change"] == found["measured"][-1]["change"] < 0.01
    assert found["bytes"] == sum(len(data) for name, data in shards(tmp_path).items() if not name.endswith(".json"))
    assert found["bytes_per_token"] == found["bytes"] / found["masked_tokens"]
    assert found["dense_bytes_per_token"] == 800
    assert opened.settings.window.length == WINDOW


def test_features_are_kept_only_if_asked_for(tmp_path, capsys):
    more = ["--data", "train.jsonl", "--windows", "40"]
    assert cache(tmp_path / "with", *more, "--top-k", "400", "--features") == 0
    assert "note: this is no smaller than dense logits" in capsys.readouterr().err
    assert cache(tmp_path / "without", *more, "--top-k", "4") == 0
    assert "note:" not in capsys.readouterr().err
    found = LogitCache.open(tmp_path / "with").load().features
    assert found is not None
    assert found.shape[1:] == (WINDOW, 16)
    assert LogitCache.open(tmp_path / "without").load().features is None


def test_every_kind_of_data(tmp_path):
    more = ["--data", "train.jsonl,prose.txt"]
    assert cache(tmp_path, *more, "--top-k", "4", "--weights", "1", "--weights", "1") == 0
    found = LogitCache.open(tmp_path)
    assert [name.split()[0] for name in found.settings.data] == ["0-train.jsonl", "1-prose.txt"]
    assert all(name.endswith(" x 1") for name in found.settings.data)
    assert len(found) > 50
    assert (
        cache(tmp_path / "marks", "--data", "train.jsonl", "--windows", "20", "--top-k", "4", "--strip", "gsm8k") == 0
    )
    assert LogitCache.open(tmp_path / "marks").settings.data[0].split()[1] != found.settings.data[0].split()[1]


def test_a_folder_of_data_gives_its_training_files(tmp_path, root, capsys):
    (tmp_path / "data").mkdir()
    shutil.copy(root / "prose.txt", tmp_path / "data" / "test.txt")
    few = ["--top-k", "4", "--windows", "10", "--data", str(tmp_path / "data")]
    assert cache(tmp_path / "one", *few) == 0
    assert LogitCache.open(tmp_path / "one").settings.data[0].startswith("0-test.txt")
    shutil.copy(root / "train.jsonl", tmp_path / "data")
    assert cache(tmp_path / "two", *few) == 0
    assert [name.split()[0] for name in LogitCache.open(tmp_path / "two").settings.data] == ["0-train.jsonl"]


def test_the_backbones_own_circuit_measures(tmp_path, root, capsys):
    own = shutil.copytree(root / "mini", tmp_path / "own")
    HMM.neutral(2, 400).save(own / "circuit")
    few = ["--data", "train.jsonl", "--windows", "40", "--json"]
    assert cache(tmp_path / "a", *few, backbone=str(own)) == 0
    assert json.loads(capsys.readouterr().out)["top_k"] == 16  # to it the truth is enough
    other = HMM.random(8, 400, scale=3.0).save(tmp_path / "other")
    assert cache(tmp_path / "b", *few, "--circuit", str(other), backbone=str(own)) == 0
    assert json.loads(capsys.readouterr().out)["top_k"] > 16
    wrong = HMM.neutral(2, 401).save(tmp_path / "wrong")
    message = refused(capsys, tmp_path / "c", *few, "--circuit", str(wrong))
    assert "the circuit is over 401 tokens, the backbone over 400" in message


MANY = ["--data", "train.jsonl", "--windows", "500", "--shard-windows", "20", "--top-k", "16", "--batch-rows", "2"]


@pytest.fixture(scope="module")
def whole(root, tmp_path_factory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "cache"
    before = Path.cwd()
    os.chdir(root)
    assert cache(out, *MANY) == 0
    os.chdir(before)
    return out


def test_kill_9_and_restart_gives_the_same_bytes(whole, tmp_path, capsys):
    out = tmp_path / "killed"
    kill_codd(arguments(out, *MANY), (out / "shard-00002.json").exists)
    finished = {path.with_suffix(".safetensors"): 0 for path in out.glob("shard-*.json")}
    finished = {path: path.stat().st_mtime_ns for path in finished}
    assert 3 <= len(finished) < LogitCache.open(whole).settings.shards
    assert cache(out, *MANY) == 0
    assert shards(out) == shards(whole)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert not list(out.glob(".*"))
    damaged = out / "shard-00003.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-3] + b"odd")
    capsys.readouterr()
    assert cache(out, *MANY) == 0
    assert f"{damaged}: is damaged, it has not the size and checksum of its record; it is made again" in (
        capsys.readouterr().err
    )
    assert "is a cache of other settings (seed was 0, is 1" in refused(capsys, out, *MANY, "--seed", "1")
    assert shards(out) == shards(whole)
    assert cache(out, *MANY, "--seed", "1", "--fresh") == 0
    assert LogitCache.open(out).settings.seed == 1


def test_two_processes_make_what_one_makes(whole, tmp_path):
    stdout, _ = run_in_two_processes(*arguments(tmp_path / "two", *MANY))
    assert stdout.count("cached: ") == 1
    assert shards(tmp_path / "two") == shards(whole)


def test_data_that_cannot_be_used(tmp_path, capsys):
    """What else is refused: tests/data."""
    out = tmp_path / "out"
    assert "there is no data: give files" in refused(capsys, out)
    (tmp_path / "odd.jsonl").write_text('{"a": "x", "b": "y"}\n')
    odd = ["--data", str(tmp_path / "odd.jsonl")]
    assert "has the keys a, b; say with --fields" in refused(capsys, out, *odd)
    assert "expected a text under 'c'" in refused(capsys, out, *odd, "--fields", "a,c")
    assert "weights must be 1 numbers" in refused(capsys, out, "--data", "prose.txt", "--weights", "1,2")
    assert cache(out, "--data", "train.jsonl", "--windows", "20", "--top-k", "4") == 0  # what failed is no obstacle


def test_backbones_that_cannot_be_used(tmp_path, root, capsys):
    out, data = tmp_path / "out", ["--data", "train.jsonl"]
    assert "is a causal model" in refused(capsys, out, *data, backbone="causal")
    llada = str(FIXTURES / "llada_mha")
    assert "llada_mha: has no tokenizer files" in refused(capsys, out, *data, "--row-length", "96", backbone=llada)
    silent = Path(shutil.copytree(root / "mini", tmp_path / "silent"))
    config = json.loads((silent / "config.json").read_text())
    (silent / "config.json").write_text(json.dumps({**config, "mask_token_id": None}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (silent / name).write_text((silent / name).read_text().replace("<|mask|>", "<|blank|>"))
    named = json.loads((silent / "tokenizer_config.json").read_text())
    (silent / "tokenizer_config.json").write_text(json.dumps({**named, "mask_token": None}))
    assert "does not say which token is the mask; give its id" in refused(capsys, out, *data, backbone=str(silent))
    assert "--mask-id 400 is not one of the 400" in refused(capsys, out, *data, "--mask-id=400", backbone=str(silent))
    more = ["--mask-id", str(config["mask_token_id"]), "--windows", "20", "--top-k", "4"]
    assert cache(out, *data, *more, backbone=str(silent)) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--top-k=500"], "top_k must be from 1 to the 400 tokens, found 500"),
        (["--block-share=2"], "block_share must be at most 1, found 2"),
        (["--minimum=0"], "minimum must be above 0, found 0"),
        (["--window=340"], "rows has the 340 tokens of a window"),
        (["--window=500"], "rows of 384 tokens hold no window of 500"),
        (["--device=tpu9"], "there is no device 'tpu9'"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, more, message):
    assert message in refused(capsys, tmp_path / "out", "--data", "train.jsonl", *more)
