"""Problems by index: a pure function of the split, the seed and the index."""

from collections.abc import Iterator
from random import Random
from typing import Literal
from zlib import crc32

from codd.data.problems.problem import Problem
from codd.data.problems.stories import stories
from codd.data.problems.writer import write

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
    """The problems with the indices from ``start`` to ``start + count - 1``, one by one."""
    for index in range(start, start + count):
        yield generate(index, split=split, seed=seed)
