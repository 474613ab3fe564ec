"""Problems by index: a pure function of the split, the seed and the index."""

from collections.abc import Iterator
from random import Random
from typing import Literal
from zlib import crc32

from codd.training.problems import (
    stories_compared,
    stories_listed,
    stories_nature,
    stories_people,
    stories_trade,
    stories_travel,
)
from codd.training.problems.problem import Problem
from codd.training.problems.writer import write

Split = Literal["train", "test"]

STORIES = (
    stories_trade.STORIES
    + stories_nature.STORIES
    + stories_people.STORIES
    + stories_travel.STORIES
    + stories_compared.STORIES
    + stories_listed.STORIES
)
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
