import json
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set=tokenizer.vocab_size=100"], "vocab_size is 100"),
        (["--set=row_length=16"], "row_length is 16 tokens"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, more, message):
    assert message in refused(capsys, tmp_path / "out", *more)
