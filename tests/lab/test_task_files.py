"""Questions of a user's own, and our own tasks, where lm-eval is not installed."""

import json
import subprocess
import sys

import pytest

from codd.cli import main
from codd_lab.runs import Run
from tests.support import oracles
from tests.support.small_data import data

SMALL = ["--circuit", "none", "--gen-length", "16", "--steps", "2", "--device", "cpu"]
LINES = [{"question": f"What is {n} times {n}?", "answer": n * n, "source": "me"} for n in range(2, 8)]
BLOCKED = """
import sys
sys.modules.update(dict.fromkeys(["lm_eval", "datasets"]))
from codd.cli import main
for arguments in {commands}:
    assert main(arguments) == 0
assert not any(name.startswith(("lm_eval.", "datasets.")) for name in sys.modules)
"""


def written(folder, lines=LINES, name="my.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def told(path, out, *more):
    return ["eval", "--task-file", str(path), *SMALL, *more, "--out", str(out)]


def replies(path, by_question):
    """A model that says this to the questions."""
    data(path)
    return oracles.stand_in(lambda prompt, seed: next(text for part, text in by_question.items() if part in prompt))


def test_an_oracle_gets_all_right_and_a_guesser_none(tmp_path):
    path = written(data(tmp_path / "data"))
    assert oracles.run(oracles.oracle(path.parent), told(path, tmp_path / "right")) == 0
    [right] = Run(tmp_path / "right").results()
    assert (right.config.task, right.metric, right.accuracy) == ("my", "exact_match,last-number", 1.0)
    assert [sample.target for sample in right.samples] == ["4", "9", "16", "25", "36", "49"]
    assert oracles.run(oracles.guesser(path.parent), told(path, tmp_path / "wrong", "--problems", "4")) == 0
    [wrong] = Run(tmp_path / "wrong").results()
    assert (wrong.accuracy, wrong.problems) == (0.0, 4)


@pytest.mark.parametrize(
    ("rule", "answers", "said", "accuracy"),
    [
        ([], ["B", "(C)"], ["it is (B).", "A"], 0.5),
        ([], ["Paris", "Rome"], ["paris.", "It is Rome"], 0.5),
        (["--answer-rule", "regex:is (\\w+)"], ["Paris", "Rome"], ["It is Paris, France", "It is Rome."], 1.0),
        (["--answer-rule", "last-number"], ["1,000", "2.50"], ["3 or $1000", "2.5 it is"], 1.0),
    ],
)
def test_answers_are_read_by_the_rule(tmp_path, rule, answers, said, accuracy):
    lines = [{"question": f"question {n}", "answer": answer} for n, answer in enumerate(answers)]
    model = replies(tmp_path / "data", {f"question {n}": text for n, text in enumerate(said)})
    assert oracles.run(model, told(written(tmp_path, lines), tmp_path / "run", *rule)) == 0
    [result] = Run(tmp_path / "run").results()
    assert result.accuracy == accuracy


def test_a_run_keeps_the_questions_and_a_changed_file_is_another_task(tmp_path):
    path = written(tmp_path)
    model = replies(tmp_path / "data", {"": "It is 16"})
    out = ["--out", str(tmp_path / "run")]
    assert oracles.run(model, told(path, tmp_path / "run", "--stage", "prepare")) == 0
    path.unlink()
    assert oracles.run(model, ["eval", "--stage", "answer", "--device", "cpu", *out]) == 0
    assert oracles.run(model, ["eval", "--stage", "score", *out]) == 0
    [result] = Run(tmp_path / "run").results()
    assert result.correct == [0, 0, 1, 0, 0, 0]
    assert oracles.run(model, told(written(tmp_path, LINES[2:]), tmp_path / "run")) == 0
    assert sorted(result.problems for result in Run(tmp_path / "run").results()) == [4, 6]


def test_without_lm_eval(tmp_path):
    """A subprocess that cannot import it: at once, and in stages."""
    root, out = data(tmp_path / "data"), str(tmp_path / "run")
    stages = ["eval", "--tasks", "word_problems", "--problems", "2", *SMALL, "--stage", "prepare", "--out", out]
    mine = ["--tasks", "word_problems,books_text", "--problems", "2", "--data", str(root)]
    commands = [
        told(written(tmp_path), tmp_path / "mine", *mine),
        stages,
        ["eval", "--stage", "answer", "--device", "cpu", "--out", out],
        ["eval", "--stage", "score", "--out", out],
    ]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(commands=commands)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert [result.config.task for result in Run(tmp_path / "mine").results()] == ["books_text", "my", "word_problems"]
    assert Run(out).results()[0].problems == 2


@pytest.mark.parametrize(
    ("lines", "more", "message"),
    [
        ([], [], "is empty; expected lines like"),
        ([{"question": "a"}], [], "my.jsonl: line 1: lacks the field answer"),
        ([{"question": 1, "answer": "a"}], [], "question"),
        ([{"question": "a", "answer": "b"}], ["--answer-rule", "last-number"], "reads nothing of 'b', answer 1"),
        ([{"question": "a", "answer": "b"}], ["--answer-rule", "first"], "there is no answer rule 'first'"),
        ([{"question": "a", "answer": "b"}], ["--split", "validation"], "has no split 'validation'"),
    ],
)
def test_errors_are_one_line(tmp_path, capsys, lines, more, message):
    assert main(told(written(tmp_path, lines), tmp_path / "run", *more)) == 1
    assert message in " ".join(capsys.readouterr().err.split())
