"""Whether a difference is more than chance: exact tests and intervals, paired by problem."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codd.errors import InvalidInput

RESAMPLES = 2000

Floats = NDArray[np.floating[Any]]


def mcnemar(gained: int, lost: int) -> float:
    """p-value of McNemar's two-sided exact test, from the problems that only one of two methods solved."""
    total = gained + lost
    outcomes: int = sum(math.comb(total, k) for k in range(min(gained, lost) + 1))
    return min(1.0, float(2 * outcomes / 2**total))


def bootstrap_interval(
    statistic: Callable[[NDArray[np.int64]], Floats], n: int, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """The middle 95% of a statistic over resamples of ``n`` problems.

    ``statistic`` gets indices of shape (resamples, n) and gives a number for each row. One seed draws the same
    resamples for every statistic, so that two methods are always compared on the same problems.
    """
    if n < 1:
        raise InvalidInput("there is nothing to draw resamples from.")
    drawn = np.random.default_rng(seed).integers(n, size=(resamples, n))
    low, high = np.percentile(statistic(drawn), (2.5, 97.5))
    return float(low), float(high)


def share_interval(right: int, n: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share: it stays within 0 and 1, and is no point where all or none are right."""
    if n < 1:
        raise InvalidInput("there is no share of nothing.")
    z, share = 1.959964, right / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    width = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - width), min(1.0, middle + width)


@dataclass(frozen=True)
class Paired:
    """One method against another on the same problems."""

    problems: int
    gained: int
    """Problems that this method only solved."""
    lost: int
    """Problems that the other only solved."""
    difference: float
    """Difference of the mean scores."""
    low: float
    high: float
    p: float | None
    """McNemar's exact test; None where scores are not right or wrong."""

    def __str__(self) -> str:
        """The difference in points with its interval and p, for a table."""
        chance = "" if self.p is None else f", p {self.p:.2g}"
        return f"{100 * self.difference:+.1f} ({100 * self.low:+.1f} to {100 * self.high:+.1f}){chance}"


def paired(scores: Sequence[float | int], others: Sequence[float | int], seed: int = 0) -> Paired:
    """Compare scores problem by problem; right is 1 and wrong 0."""
    if len(scores) != len(others):
        raise InvalidInput(f"{len(scores)} scores cannot be paired with {len(others)}: not the same problems.")
    mine, theirs = np.asarray(scores, np.float64), np.asarray(others, np.float64)
    gaps = mine - theirs
    low, high = bootstrap_interval(lambda drawn: gaps[drawn].mean(-1), len(gaps), seed)
    gained, lost = int((gaps > 0).sum()), int((gaps < 0).sum())
    binary = bool(np.isin(np.concatenate([mine, theirs]), (0.0, 1.0)).all())
    p = mcnemar(gained, lost) if binary else None
    return Paired(len(gaps), gained, lost, float(gaps.mean()), low, high, p)


def ratio_of_sums(totals: Floats, counts: Floats) -> Callable[[NDArray[np.int64]], Floats]:
    """A mean over all tokens of some texts, as a statistic of which texts."""
    return lambda drawn: np.asarray(totals[drawn].sum(-1) / np.maximum(counts[drawn].sum(-1), 1))
