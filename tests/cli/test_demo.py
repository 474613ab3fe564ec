import re
from dataclasses import replace

import pytest

from codd.circuits import HMM
from codd.cli import demo, main
from codd.cli.demo import extract_answer, questions
from codd.decoding import Options, load
from codd_lab.problems import extract_answer as lab_answer
from codd_lab.problems import problems
from tests.support.cli import printed_json

BUNDLED = replace(load(device="cpu", circuit=None), circuit=HMM.random(4, 8192))
"""Loaded once, with a circuit that nobody trained."""


@pytest.fixture
def small(monkeypatch):
    """A demo of few steps."""
    monkeypatch.setattr(demo, "load", lambda circuit: BUNDLED)
    monkeypatch.setattr(demo, "CONTINUE", Options(gen_length=32, steps=2, temperature=1.0))
    monkeypatch.setattr(demo, "SOLVE", Options(gen_length=32, steps=2))


def results(capsys, *arguments: str) -> dict:
    return printed_json(capsys, "demo", *arguments)


def test_both_ways_have_equal_calls_and_right_answers_are_counted(small, capsys):
    found = results(capsys, "--problems", "3")
    for part, calls in (("filled", 2), ("continued", 2)):
        assert found[part]["calls"] == {"alone": calls, "circuit": calls}
    solved = found["problems"]
    assert solved["count"] == 3
    for way in solved["ways"].values():
        assert way["right"] == sum(way["answers"])
        assert len(way["answers"]) == 3
        assert way["seconds"] > 0
    assert solved["ways"]["alone"]["calls"] == solved["ways"]["circuit"]["calls"] == 3 * 2
    assert solved["ways"]["checked"]["calls"] > 0
    text = found["filled"]["texts"]["alone"]
    assert re.fullmatch(r"They walked.* the river, and in the evening.* the fire\.", text)


def test_the_seed_decides(small, capsys):
    first, again, other = (results(capsys, "--seed", seed, "--problems", "1")["continued"] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_the_screen(small, capsys):
    assert main(["demo", "--problems", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "\x1b" not in printed.out
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    for words in (
        "Masks filled in 2 network calls",
        "128 tokens of prose",
        "2 word problems at 16 steps",
        "drafts, checked by the causal twin",
        "codd serve",
    ):
        assert words in " ".join(printed.out.split())


def test_the_bundled_circuit_writes_other_text_than_the_network_alone():
    model = load(device="cpu")
    models = {"alone": model.with_circuit("null"), "circuit": model}
    found = demo._written(models, "She went to the", Options(gen_length=32, steps=2, temperature=1.0), 0)
    alone = model.with_circuit(None).generate("She went to the", gen_length=32, steps=2, temperature=1.0, chat=False)
    assert found["texts"]["alone"] == alone.texts[0].strip()
    assert found["texts"]["circuit"] != found["texts"]["alone"]


def test_questions_are_the_generators_and_no_training_saw_them():
    found = questions(0)
    wanted = list(problems(len(found), split="test", seed=200))
    assert [(each.question, each.answer, each.result) for each in found] == [
        (each.question, each.solution, each.answer) for each in wanted
    ]
    assert sorted(questions(3)) == sorted(found) != questions(3)
    assert questions(3) == questions(3)


@pytest.mark.parametrize("text", ["#### 42", "a\n#### $1,200 b", "#### x", "no", "#### 1\n#### -7"])
def test_answers_are_read_as_the_generator_writes_them(text):
    assert extract_answer(text) == lab_answer(text)
