"""What the scripts share: clocks, interleaved times on a machine that others use too, and the head of a report."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from codd_lab.provenance import machine


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


LONG = 0.02
"""A call of this many seconds needs no burst: what it finds in the caches no longer matters."""


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int = 30,
    warmup: int = 3,
    burst: int = 5,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Call all functions in turn, round after round, starting with another one each round.

    What slows the machine down for a while then slows all of them alike. A turn is ``burst`` calls without a clock and
    as many with it, of which the mean counts: so the caches, and the threads that a previous library leaves spinning,
    belong to the function that is timed, as they do in a loop over denoising steps. With a burst of one the caches are
    half cold. Functions that work in the background must wait for their own results. ``time.process_time`` as ``now``
    leaves out the time that other processes had the processor.
    """
    if rounds < 1 or warmup < 0 or burst < 1:
        raise ValueError(f"expected rounds, burst >= 1 and warmup >= 0, found {rounds}, {burst} and {warmup}")
    names = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(warmup):
        for function in functions.values():
            function()
    for turn in range(rounds):
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
            seconds[name].append(_turn(functions[name], burst, now))
    return {name: Timing(tuple(times)) for name, times in seconds.items()}


def _turn(function: Callable[[], object], burst: int, now: Callable[[], float]) -> float:
    """Seconds of one call, the mean of a burst after a burst without the clock."""
    start = now()
    function()
    calls = 1 if now() - start > LONG else burst
    for _ in range(calls - 1):
        function()
    start = now()
    for _ in range(calls):
        function()
    return (now() - start) / calls


def clock(device: torch.device | str) -> float:
    """Seconds: of the wall on a GPU, once its work is done; on a CPU, which others share, of this process's threads."""
    if torch.device(device).type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def milliseconds(function: Callable[[], object], rounds: int, device: torch.device | str, warmup: int = 4) -> float:
    """Median over calls; the first ones, which compile and capture, do not count."""
    times = []
    for _ in range(warmup + rounds):
        begun = clock(device)
        function()
        times.append(1e3 * (clock(device) - begun))
    return statistics.median(times[warmup:])


def head(args: argparse.Namespace, device: torch.device | str) -> dict[str, Any]:
    """How a report begins."""
    settings = {key: str(value) for key, value in vars(args).items()}
    return {"machine": machine(torch.device(device)), "torch": torch.__version__, "settings": settings}


def save(report: object, path: Path | None) -> None:
    """As JSON, if a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
