"""Puzzles as tasks of codd eval: an oracle gets all right, one who repeats the question only what needs no change."""

import re

import pytest

from codd_lab.puzzles import KINDS, puzzles
from codd_lab.runs import Run
from codd_lab.tasks.catalogue import PROBLEM_SEED
from tests.support import oracles
from tests.support.small_data import data

SMALL = ["--circuit", "none", "--gen-length", "16", "--steps", "2", "--device", "cpu", "--problems", "6"]


@pytest.fixture(scope="module")
def known():
    return {each.question: each for kind in KINDS for each in puzzles(kind, 6, PROBLEM_SEED)}


def accuracies(model, out, *more):
    assert oracles.run(model, ["eval", "--tasks", ",".join(KINDS), *SMALL, *more, "--out", str(out)]) == 0
    return {result.config.task: result.accuracy for result in Run(out).results()}


def test_an_oracle_gets_all_right_by_any_right_answer(known, tmp_path):
    """The first of the right answers, or the last: the tasks accept both."""
    for which in (0, -1):

        def reply(prompt, seed, which=which):
            made = next(each for question, each in known.items() if question in prompt)
            answer = made.answers[which]
            return ", ".join(answer) if made.kind.startswith("lines") else "\n".join(map(" ".join, answer))

        found = accuracies(oracles.stand_in(reply), tmp_path / str(which), "--templates", "step-by-step")
        assert found == dict.fromkeys(KINDS, 1.0)
    [result, *_] = Run(tmp_path / "0").results()
    assert result.metric == "solved,none"
    assert result.metrics == {"solved,none": 1.0}


def test_one_who_repeats_the_question_solves_only_the_copy(known, tmp_path):
    data(tmp_path / "data")

    def reply(prompt, seed):
        line = re.search(r"in a line: ([^.]*)\.", prompt)
        return line[1] if line else "A B C D\n" * 4

    assert accuracies(oracles.stand_in(reply), tmp_path / "run") == {**dict.fromkeys(KINDS, 0.0), "lines_copy": 1.0}
