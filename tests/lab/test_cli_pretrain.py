import json
import os
from pathlib import Path

import pytest

from codd import folders
from codd.cli import main
from tests.support import PROBLEMS, cli

FEW = [
    "--set=steps=2",
    "--set=batch_rows=2",
    f"--set=data=[{{kind: qa, name: problems, path: {PROBLEMS}/train.jsonl, count: 20}}]",
    f"--set=validation=[{{kind: qa, name: problems, path: {PROBLEMS}/test.jsonl, count: 3}}]",
]


def arguments(out: Path, *more: str, recipe: str | Path = "tiny") -> list[str]:
    return ["pretrain", str(recipe), "--out", str(out), "--device", "cpu", *FEW, *more]


def pretrain(out: Path, *more: str) -> int:
    return main(arguments(out, *more))


def refused(capsys, out: Path, *more: str, recipe: str | Path = "tiny") -> str:
    return cli.refused(capsys, *arguments(out, *more, recipe=recipe))


def test_a_second_process_is_kept_out_of_the_folder(tmp_path, capsys):
    with folders.exclusive(tmp_path):
        for more in ([], ["--fresh"]):
            message = refused(capsys, tmp_path, *more)
            assert f"{tmp_path}: the process {os.getpid()} is writing into this folder" in message


def test_help_teaches(capsys):
    assert main(["pretrain", "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    words = ("codd pretrain tiny", "torchrun", "--set", "--fresh", "--data", "checkpoints", "model-int8")
    for word in (*words, "tiny, mini, blocks, or the path", "where this command is run"):
        assert word in printed


def test_text(tmp_path, capsys):
    out = tmp_path / "new" / "tiny"
    assert pretrain(out) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"trained: {out / 'model'}\n")
    assert f"codd info {out / 'model'}" in printed.out
    assert "validation/problems" in printed.out
    assert printed.err.startswith("tiny: 2 steps of 2 x 384 tokens, on cpu\nstep 2: ")
    before = (out / "model" / "model.safetensors").read_bytes()
    assert pretrain(out) == 0
    assert capsys.readouterr().out.startswith("trained: ")  # a finished run says so again
    assert (out / "model" / "model.safetensors").read_bytes() == before


def test_json(tmp_path, capsys):
    assert pretrain(tmp_path, "--json", "--seed", "5") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["recipe"], found["steps"], found["out"]) == ("tiny", 2, str(tmp_path))
    assert (found["settings"]["seed"], found["settings"]["optimizer"]["lr"]) == (5, 0.02)
    assert 4 < found["validation/problems"] < 8
    assert found["loss"] > 0


def test_the_folder_is_named_after_the_recipe_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "tiny", "--device", "cpu", *FEW]) == 0
    assert (tmp_path / "runs" / "tiny" / "model" / "model.safetensors").is_file()


def test_data_is_looked_for_where_it_is_said_to_be(tmp_path, capsys):
    changes = ["--set=data=[{kind: text, name: t, path: t.txt}]", "--set=row_length=16", "--set=validation=[]"]
    message = refused(capsys, tmp_path / "out", *changes, "--data", str(tmp_path))
    assert (
        message
        == f"codd: {tmp_path / 't.txt'}: there is no such file (source t). Give the data's folder with --data.\n"
    )
    (tmp_path / "t.txt").write_text("A text of some length, said again and again. " * 20)
    assert pretrain(tmp_path / "out", *changes, "--data", str(tmp_path)) == 0


def test_another_recipe_needs_fresh(tmp_path, capsys):
    assert pretrain(tmp_path) == 0
    (tmp_path / "notes.txt").write_text("mine")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert "is of another recipe (seed differ). Give another --out, or --fresh" in refused(capsys, tmp_path, "--seed=1")
    assert pretrain(tmp_path, "--seed=1", "--fresh") == 0
    assert (tmp_path / "model" / "model.safetensors").read_bytes() != before
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert pretrain(tmp_path, "--fresh") == 0
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_out_that_is_a_file(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert "file: is a file; --out must be a folder" in refused(capsys, tmp_path / "file")


@pytest.mark.parametrize("more", [[], ["--fresh"]])
@pytest.mark.parametrize("name", ["data/mine.txt", "model/mine.txt", "tokenizer/mine.txt", "mine.txt"])
def test_out_that_holds_something_else_is_left_alone(tmp_path, capsys, name, more):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    assert "holds something else than a run" in refused(capsys, tmp_path, *more)
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [path]


def test_a_run_that_failed_early_can_be_started_again(tmp_path, capsys):
    out = tmp_path / "out"
    refused(capsys, out, "--set=validation=[{kind: text, name: t, path: no.txt}]")
    assert os.listdir(out)
    assert pretrain(out) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set=steps=many"], "steps must be a whole number, found 'many'"),
        (["--set=stepz=1"], "unknown field stepz"),
        (["--set=steps"], "expected NAME=VALUE"),
        (["--seed=-1"], "seed must be at least 0, found -1"),
        (["--device=tpu9"], "there is no device 'tpu9'"),
        (["--set=tokenizer.vocab_size=100"], "vocab_size is 100"),
        (["--set=row_length=16"], "row_length is 16 tokens"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, more, message):
    assert message in refused(capsys, tmp_path / "out", *more)


def test_recipes_that_cannot_be_read(tmp_path, capsys):
    assert "no.yaml: cannot be read (No such file" in refused(capsys, tmp_path / "out", recipe=tmp_path / "no.yaml")
    (tmp_path / "bad.yaml").write_text("name: [")
    assert "bad.yaml: is not YAML" in refused(capsys, tmp_path / "out", recipe=tmp_path / "bad.yaml")
    assert "it is no regular file" in refused(capsys, tmp_path / "out", recipe=tmp_path)
    message = refused(capsys, tmp_path / "out", recipe="tinny")
    assert "'tinny': there is no recipe of this name here; there are tiny, mini, blocks. A recipe of your" in message
