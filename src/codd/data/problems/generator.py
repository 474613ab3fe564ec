"""Problems by index: a pure function of the split, the seed and the index."""

from collections.abc import Iterator
from numbers import Integral
from random import Random
from typing import Literal, get_args
from zlib import crc32

from codd.data.problems.problem import Problem
from codd.data.problems.stories import stories
from codd.data.problems.writer import write
from codd.errors import InvalidInput, shown

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
