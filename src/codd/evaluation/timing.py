"""Times of several functions on a machine that other people use too."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The three quartiles of some numbers."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper)


@dataclass(frozen=True)
class Timing:
    """The seconds that one function took, a number for each round."""

    seconds: tuple[float, ...]

    @property
    def milliseconds(self) -> Spread:
        """Median and quartiles of one call."""
        return Spread.of([1e3 * s for s in self.seconds])

    def over(self, other: "Timing") -> Spread:
        """How many times longer than another function's calls of the same rounds: pairs, so that drifts cancel."""
        return Spread.of([a / b for a, b in zip(self.seconds, other.seconds, strict=True)])


def interleaved(functions: Mapping[str, Callable[[], object]], rounds: int = 30, warmup: int = 3) -> dict[str, Timing]:
    """Call all functions in turn, round after round, starting with another one each round.

    What slows the machine down for a while then slows all of them alike. A turn is one call without a clock and one
    with it: the caches, and the threads that a previous library leaves spinning, then belong to the function timed.
    Functions that work in the background must wait for their own results.
    """
    if rounds < 1 or warmup < 0:
        raise ValueError(f"expected rounds >= 1 and warmup >= 0, found {rounds} and {warmup}")
    names = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(warmup):
        for function in functions.values():
            function()
    for turn in range(rounds):
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
            function = functions[name]
            function()
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(times)) for name, times in seconds.items()}
