import json
from pathlib import Path

import pytest

from codd.cli import main
from codd_lab.runs import Run
from tests.support.cli import refused
from tests.support.small_evaluations import add, pattern


@pytest.fixture
def folder(tmp_path) -> Path:
    run = Run(tmp_path / "run", create=True)
    for circuit, right in (("trained", 6), ("null", 5)):
        add(run, "gsm8k", circuit, {"steps": 16}, correct=pattern(right, 8), texts=["\x1b[31mone"] * 8)
    return run.folder


def test_a_page_and_pictures(folder, capsys):
    assert main(["report", str(folder)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    words = " ".join(printed.out.split())
    assert words.startswith("One comparison of a circuit with the null circuit under identical settings")
    assert "gsm8k, trained circuit, any order: at 16 steps (+12.5 points" in words
    assert f"written: {folder / 'report.html'}" in printed.out
    assert "gsm8k" in (folder / "report.html").read_text(encoding="utf-8")
    assert [path.suffix for path in (folder / "figures").iterdir()] == [".png"]


def test_json_and_another_place(folder, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert main(["report", str(folder), "--json", "--no-png", "--samples", "1", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["page"] == str(out)
    assert found["figures"] == []
    [compared] = found["comparisons"]
    assert (compared["task"], compared["circuit"], compared["pace"]) == ("gsm8k", "trained", "16 steps")
    assert (compared["difference"], compared["gained"], compared["lost"]) == (12.5, 1, 0)
    assert found["calls_saved"] == []
    assert not (folder / "figures").exists()
    assert not (folder / "report.html").exists()
    text = out.read_text(encoding="utf-8")
    assert "gsm8k, problem 5" in text, "the first on which they differ"
    assert "gsm8k, problem 0" not in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "is no folder of an evaluation"),
        (["run", "--out", "nowhere/page.html"], "nowhere/page.html: No such file or directory"),
    ],
)
def test_errors_are_one_line(folder, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(folder.parent)
    assert said in refused(capsys, "report", *arguments)
    assert not (folder.parent / "nowhere").exists()


def test_a_negative_number_of_samples(folder, capsys):
    assert main(["report", str(folder), "--samples", "-1"]) == 2
    assert "--samples" in capsys.readouterr().err
