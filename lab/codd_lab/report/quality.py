"""Measures of how good a result is, with their 95% intervals."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from codd.evaluation.statistics import share_interval
from codd_lab.runs import Result


class Estimate(NamedTuple):
    """A figure and its 95% interval, where there is one."""

    value: float
    low: float | None = None
    high: float | None = None

    def in_percent(self) -> "Estimate":
        """The same estimate in per cent, if this is a share."""
        low, high = (None if value is None else 100 * value for value in self[1:])
        return Estimate(100 * self.value, low, high)


@dataclass(frozen=True)
class Quality:
    """A measure of how good a result is."""

    name: str
    word: str
    """As it is called in a sentence."""
    title: str
    """As it is called on an axis, with its unit."""
    higher: bool
    """Whether more is better."""
    of: Callable[[Result], Estimate | None]
    """Its value for a result; None if it was not measured."""

    @property
    def digits(self) -> int:
        """How many decimals a report shows."""
        return 1 if self.name == "accuracy" else 3

    def worth(self, result: Result) -> float:
        """A number that is greater for a better result; minus infinity where nothing was measured."""
        estimate = self.of(result)
        return -inf if estimate is None else estimate.value if self.higher else -estimate.value

    def better(self, one: float, other: float) -> bool:
        """Whether the first is at least as good, up to rounding."""
        return (one - other if self.higher else other - one) >= -1e-12


def measured(figure: Any) -> Estimate | None:
    """An estimate from {"mean" or "value" or "median" or "mauve", "low", "high"} of a file; None without a number."""
    values = (_number(figure, name) for name in ("mean", "value", "median", "mauve"))
    value = next((value for value in values if value is not None), None)
    return None if value is None else Estimate(value, _number(figure, "low"), _number(figure, "high"))


def _number(figure: Any, name: str) -> float | None:
    value = figure.get(name) if isinstance(figure, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _accuracy(result: Result) -> Estimate | None:
    if result.accuracy is None:
        return None
    right = result.correct
    if not right or set(right) - {0.0, 1.0}:
        return Estimate(100 * result.accuracy)
    low, high = share_interval(int(sum(right)), len(right))
    return Estimate(100 * result.accuracy, 100 * low, 100 * high)


def _judged(name: str) -> Callable[[Result], Estimate | None]:
    return lambda result: measured((result.judged or {}).get(name))


def _nll(result: Result) -> Estimate | None:
    return measured(((result.judged or {}).get("measures") or {}).get("nll"))


ACCURACY = Quality("accuracy", "accuracy", "right answers (%)", True, _accuracy)
NLL = Quality("nll", "NLL", "NLL under the judge (nats a token)", False, _nll)
MAUVE = Quality("mauve", "MAUVE", "MAUVE against one token a step", True, _judged("mauve"))
TRUE_MAUVE = Quality("true-mauve", "MAUVE to true text", "MAUVE against true text", True, _judged("true"))
QUALITIES = (ACCURACY, NLL, MAUVE, TRUE_MAUVE)


def quality_of(results: Sequence[Result]) -> Quality | None:
    """The first quality that was measured for any of these results."""
    return next((quality for quality in QUALITIES if any(map(quality.of, results))), None)
