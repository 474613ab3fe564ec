"""Quality against cost: the lines that each way of decoding draws as its pace changes, and where they meet."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from codd.evaluation.report.ways import (
    KINDS,
    Estimate,
    Quality,
    kind,
    order,
    pace,
    rest,
    sampler,
    settings,
    shared,
    varying,
    way,
)
from codd.evaluation.runs import Result
from codd.evaluation.tasks.cells import CONTROLS, NONE, NULL, TRAINED

COSTS = {"calls": "network calls a sample", "seconds": "seconds a sample"}
"""What a sample costs, and how an axis names it."""


@dataclass(frozen=True)
class Line:
    """One way of decoding at several paces, by cost."""

    circuit: str
    sampler: str
    kind: str
    settings: str
    """What else is special about it in this run."""
    family: str
    """Equal for lines that differ in the circuit only."""
    shared: str
    """Equal for lines that may be compared with the network alone."""
    results: tuple[Result, ...]
    values: tuple[Estimate, ...]

    def costs(self, name: str) -> list[float]:
        """Calls or seconds of its points."""
        return [float(getattr(result, name)) for result in self.results]

    def label(self) -> str:
        """For a legend."""
        first = self.results[0].cell
        return ", ".join(filter(None, [way(first, [], with_pace=False), f"by {self.kind}", self.settings]))


class Saving(NamedTuple):
    """How many calls a circuit needs for the quality that the network alone has at some number of steps."""

    task: str
    quality: str
    target: str
    """The pace of the network alone."""
    value: float
    """Its quality."""
    network: float
    """Its calls."""
    way: str
    calls: float | None
    """Of the circuit; None: not reached at any pace that was measured."""
    bound: bool
    """Whether its fastest pace reaches it already, so that fewer might do."""
    null: float | None
    """Calls of the null circuit by the same rule."""
    threshold: float | None
    """Calls of the network alone by the best of its adaptive paces."""
    has_null: bool
    has_threshold: bool
    """Whether there are such lines at all."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return self._asdict()


def lines(results: Sequence[Result], quality: Quality) -> list[Line]:
    """One a circuit, sampler, kind of pace, and what else differs."""
    names = varying(result.cell for result in results)
    groups: dict[tuple[str, str, str, str], list[Result]] = {}
    for result in sorted(results, key=lambda each: order(each.cell)):
        if quality.of(result) is not None:
            cell = result.cell
            told = json.dumps(rest(cell), sort_keys=True)
            groups.setdefault((cell.circuit, sampler(cell), kind(cell), told), []).append(result)
    found = []
    for (circuit, how, pace_kind, told), group in groups.items():
        group = sorted(group, key=lambda each: each.calls)
        cell, values = group[0].cell, tuple(value for each in group if (value := quality.of(each)) is not None)
        family = json.dumps([how, pace_kind, told])
        found.append(Line(circuit, how, pace_kind, settings(cell, names), family, shared(cell), tuple(group), values))
    return sorted(found, key=_rank)


def _rank(line: Line) -> tuple[int, str, int, str]:
    """The network alone first."""
    ranks = {NONE: 0, TRAINED: 1, "static": 2}
    return ranks.get(line.circuit, 9), line.circuit, KINDS.index(line.kind), line.label()


def reached(costs: Sequence[float], values: Sequence[float], target: float, quality: Quality) -> float | None:
    """The least cost at which a line is as good as ``target``, straight between neighbouring points, never beyond.

    None: nowhere on it. Costs must not fall.
    """
    points = list(zip(costs, values, strict=True))
    for number, (cost, value) in enumerate(points):
        if quality.better(value, target):
            if number == 0:
                return cost
            before, worse = points[number - 1]
            return before + (cost - before) * (target - worse) / (value - worse)
    return None


def savings(results: Sequence[Result], quality: Quality) -> list[Saving]:
    """Of every circuit, for every number of steps of the network alone under the same settings."""
    drawn = lines(results, quality)
    alone = [line for line in drawn if line.circuit == NONE and line.kind == "steps"]
    return [
        _saving(goal, number, line, drawn, quality)
        for goal in alone
        for number in range(len(goal.results))
        for line in drawn
        if line.circuit not in CONTROLS and line.shared == goal.shared
    ]


def _saving(goal: Line, number: int, line: Line, drawn: Sequence[Line], quality: Quality) -> Saving:
    target = goal.values[number].value

    def least(others: Sequence[Line]) -> float | None:
        found = [reached(each.costs("calls"), [v.value for v in each.values], target, quality) for each in others]
        return min((cost for cost in found if cost is not None), default=None)

    nulls = [each for each in drawn if each.circuit == NULL and each.family == line.family]
    alone = [each for each in drawn if each.circuit == NONE and each.kind != "steps" and each.shared == goal.shared]
    cell = goal.results[number].cell
    return Saving(
        task=cell.task,
        quality=quality.name,
        target=pace(cell),
        value=target,
        network=goal.results[number].calls,
        way=line.label(),
        calls=least([line]),
        bound=quality.better(line.values[0].value, target),
        null=least(nulls),
        threshold=least(alone),
        has_null=bool(nulls),
        has_threshold=bool(alone),
    )
