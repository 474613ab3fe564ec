"""Models that know the answers, or guess, in the place of the bundled one; all else is the path of ``codd eval``.

``python -m tests.support.oracles KIND FOLDER eval ...`` is ``codd eval ...`` with such a model, for tests in other
processes.
"""

import csv
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from random import Random
from unittest import mock

import torch

import codd
from codd.cli import main
from codd.decoding.model import Generation
from codd_lab.problems import problems
from codd_lab.tasks.catalogue import PROBLEM_SEED

PUBLISHED = ("gsm8k", "minerva_math500", "gpqa_main_generative_n_shot", "mbpp_instruct")


@dataclass(frozen=True)
class StandIn(codd.Model):
    """The bundled model's tokenizer and device, but answers of a function of the prompt and the seed."""

    reply: Callable[[str, int], str] = lambda prompt, seed: ""

    def generate(self, prompts: Sequence[Sequence[int]], options: codd.Options) -> Generation:
        sequences = []
        for ids, seed in zip(prompts, options.seed, strict=True):
            prompt = self.tokenizer.decode(ids, skip_special_tokens=False)
            answer = [*self.tokenizer.encode(self.reply(prompt, seed)), self.tokenizer.eos_id]
            sequences.append(torch.tensor([*ids, *answer]))
        counts = [1] * len(prompts)
        return Generation(None, sequences, [len(ids) for ids in prompts], counts, counts, [], [], [])


def truths(root: Path) -> dict[str, Callable[[str], str]]:
    """For every question of the data what answers the prompt that has it."""
    replies: dict[str, Callable[[str], str]] = {}
    for path, question, answer in (
        ("gsm8k/test.jsonl", "question", "answer"),
        ("math/math500.jsonl", "problem", "solution"),
        ("mbpp/mbpp.jsonl", "text", "code"),
        ("my.jsonl", "question", "answer"),
    ):
        for line in (root / path).read_text().splitlines() if (root / path).exists() else ():
            replies[json.loads(line)[question]] = partial(_constant, json.loads(line)[answer])
    with (root / "gpqa" / "gpqa_main.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            replies[row["Question"]] = partial(_letter, row["Correct Answer"])
    for problem in problems(10, split="test", seed=PROBLEM_SEED):
        replies[problem.question] = partial(_constant, f"#### {problem.answer}")
    return replies


def _constant(answer: object, prompt: str) -> str:
    return str(answer)


def _letter(correct: str, prompt: str) -> str:
    """The letter before the right choice, as this prompt has them."""
    [letter] = set(re.findall(rf"\(([A-D])\) {re.escape(correct)}", prompt))  # a template may ask twice
    return f"The answer is ({letter})."


def oracle(root: Path) -> StandIn:
    known = truths(root)

    def reply(prompt: str, seed: int) -> str:
        question = max((each for each in known if each in prompt), key=len)
        return known[question](prompt)

    return stand_in(reply)


def guesser(root: Path) -> StandIn:
    """Any letter, any number: what chance scores."""

    def reply(prompt: str, seed: int) -> str:
        drawn = Random(seed)
        return f"({drawn.choice('ABCD')})" if "Choices:" in prompt else f"#### {drawn.randrange(10**6)}"

    return stand_in(reply)


KINDS = {"oracle": oracle, "guesser": guesser}


def stand_in(reply: Callable[[str, int], str]) -> StandIn:
    model = codd.load(circuit=None, device="cpu")
    return StandIn(**{each.name: getattr(model, each.name) for each in fields(codd.Model)}, reply=reply)


def run(model: codd.Model, arguments: Sequence[str]) -> int:
    """``codd`` with this model in the place of any that would be loaded; the exit code."""
    with mock.patch("codd.decoding.load", return_value=model):
        return main([*arguments])


if __name__ == "__main__":
    kind, folder, *rest = sys.argv[1:]
    sys.exit(run(KINDS[kind](Path(folder)), rest))
