"""Random choices made from ``Random.random`` alone.

Python promises that only this method gives the same numbers in every version; choice, randint and shuffle may change,
and with them what "the test problems" are.
"""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def pick(rng: Random, options: Sequence[T]) -> T:
    """One of the options, each as likely as the others."""
    return options[int(rng.random() * len(options))]


def between(rng: Random, low: int, high: int) -> int:
    """An integer from low to high, both included."""
    return low + int(rng.random() * (high - low + 1))


def distinct(rng: Random, options: Sequence[T], count: int) -> list[T]:
    """``count`` different options, in random order."""
    left = list(options)
    return [left.pop(int(rng.random() * len(left))) for _ in range(count)]
