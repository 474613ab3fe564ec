"""Problems by index: a pure function of the split, the seed and the index."""

import json
import lzma
from collections.abc import Iterator
from numbers import Integral
from pathlib import Path
from random import Random
from typing import Literal, get_args
from zlib import crc32

from codd.errors import InvalidInput, shown
from codd_lab.problems.problem import Problem
from codd_lab.problems.stories import stories
from codd_lab.problems.writer import write

Split = Literal["train", "test"]

STORIES = stories()
PATTERNS: tuple[str, ...] = tuple(each.name for each in STORIES)
TEST_ONE_IN = 16
ATTEMPTS = 1000


def generate(index: int, *, split: Split = "train", seed: int = 0) -> Problem:
    """The problem with this index.

    The two splits never share a question, whatever the seeds: the checksum of its text says which one it belongs to.
    """
    rng = Random(f"codd-problems/{split}/{seed}/{index}")
    for _ in range(ATTEMPTS):
        problem = write(rng, STORIES)
        if (crc32(problem.question.encode()) % TEST_ONE_IN == 0) == (split == "test"):
            return problem
    raise RuntimeError(f"no problem of the {split} split was found in {ATTEMPTS} attempts")


def problems(count: int, *, split: Split = "train", seed: int = 0, start: int = 0) -> Iterator[Problem]:
    """The problems with the indices from ``start`` to ``start + count - 1``, one by one.

    InvalidInput for a split that is neither "train" nor "test", and for a count that is no whole number from 0 on.
    """
    if split not in get_args(Split):
        raise InvalidInput(f"split must be one of {', '.join(map(repr, get_args(Split)))}, found {shown(split)}.")
    number: object = count  # NumPy's whole numbers are some, too
    if not isinstance(number, Integral) or count < 0:
        raise InvalidInput(f"count must be a whole number of at least 0, found {shown(count)}.")
    return (generate(index, split=split, seed=seed) for index in range(start, start + count))


def write_problems(path: Path, count: int, *, split: Split = "train", seed: int = 0) -> None:
    """Write problems as JSON lines (.jsonl, .jsonl.xz): question, answer (the written-out solution), result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (lzma.open if path.suffix == ".xz" else open)(path, "wt", encoding="utf-8") as file:
        for each in problems(count, split=split, seed=seed):
            fields = {"question": each.question, "answer": each.solution, "result": each.answer}
            file.write(json.dumps(fields) + "\n")
