"""Quality against cost: the line that each circuit and sampler draws as its budget changes, and the calls it saves."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from codd_lab.report import labels
from codd_lab.report.figures import Chart, Curve, Panel, look
from codd_lab.report.quality import QUALITIES, Estimate, Quality
from codd_lab.runs import Result
from codd_lab.tasks.configs import CONTROLS, NONE, NULL, TRAINED, EvalConfig

COSTS = {"calls": "network calls a sample", "seconds": "seconds a sample"}
"""Attributes of a result, and how an axis names them."""
MANY = 10
"""With more lines than this, every sampler gets a chart of its own."""


@dataclass(frozen=True)
class Line:
    """One circuit and sampler at several budgets of one kind, in the order of network calls."""

    results: Sequence[Result]
    values: Sequence[Estimate]
    settings: str
    """Other settings that set it apart in this run, in words."""

    @property
    def config(self) -> EvalConfig:
        """The config of its first point: all but the value of the budget is that of the others, too."""
        return self.results[0].config

    @property
    def kind(self) -> str:
        """The kind of budget, one of `labels.KINDS`."""
        return labels.kind(self.config)

    @property
    def label(self) -> str:
        """The line's name in a legend."""
        name = labels.label(self.config, [], with_budget=False)
        return ", ".join(filter(None, [name, f"by {self.kind}", self.settings]))

    def costs(self, name: str) -> list[float]:
        """The cost of each point; ``name`` is "calls" or "seconds" per problem."""
        return [float(getattr(result, name)) for result in self.results]


class Saving(NamedTuple):
    """Network calls that a circuit needs for the quality of the network alone at some number of steps."""

    task: str
    quality: str
    target: str
    """The budget of the network alone."""
    value: float
    """The quality of the network alone at that budget."""
    network: float
    """The calls of the network alone at that budget."""
    way: str
    """The label of the circuit's line."""
    calls: float | None
    """Calls of the circuit; None: not reached at any budget that was measured."""
    bound: bool
    """Whether the circuit's fastest budget is good enough already, so that fewer calls might do."""
    null: float | None
    """Calls of the null circuit with the same sampler and kind of budget."""
    threshold: float | None
    """Calls of the network alone at the best of its adaptive budgets (thresholds, entropy budgets)."""
    has_null: bool
    has_threshold: bool
    """Whether there are such lines at all."""

    def fewer(self, other: float | None) -> str:
        """How many fewer calls than ``other`` in per cent, as "-50%"; more has a plus, "-" is unknown."""
        return "-" if self.calls is None or not other else f"{round(100 * (self.calls / other - 1)):+d}%"


class Frontier(NamedTuple):
    """Charts and calls saved of one task, by one measure of quality."""

    task: str
    quality: Quality
    charts: list[Chart]
    savings: list[Saving]


def frontiers(results: Sequence[Result]) -> list[Frontier]:
    """Charts and savings for every task and each of its qualities."""
    return [
        Frontier(task, quality, [_chart(task, group, quality) for group in _charted(drawn)], savings(own, quality))
        for task, own in labels.by_task(results).items()
        for quality in QUALITIES
        if (drawn := lines(own, quality))
    ]


def lines(results: Sequence[Result], quality: Quality) -> list[Line]:
    """One line per circuit, sampler, kind of budget and remaining settings; the network alone first."""
    names = labels.varying(result.config for result in results)
    known = sorted(filter(quality.of, results), key=lambda each: (each.calls, *labels.order(each.config)))
    drawn = []
    for group in labels.grouped(known, lambda config: f"{config.circuit} {_family(config)}").values():
        values = [value for each in group if (value := quality.of(each)) is not None]
        drawn.append(Line(group, values, labels.settings(group[0].config, names)))
    return sorted(drawn, key=_rank)


def _family(config: EvalConfig) -> str:
    """Equal for configs that differ in the circuit and the value of the budget only."""
    return json.dumps([labels.sampler(config), labels.kind(config), labels.rest(config)], sort_keys=True)


def _rank(line: Line) -> tuple[int, str, int, str]:
    circuit = line.config.circuit
    rank = {NONE: 0, TRAINED: 1, "static": 2}.get(circuit, 9)
    return rank, circuit, labels.KINDS.index(line.kind), line.label


def reached(costs: Sequence[float], values: Sequence[float], target: float, quality: Quality) -> float | None:
    """The least cost at which a line is as good as ``target``; None if no point of it is.

    Interpolates linearly between neighbouring points and never extrapolates. Costs must not fall.
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
    """Each circuit's saving at every number of steps of the network alone under the same settings."""
    drawn = lines(results, quality)
    alone = [line for line in drawn if line.config.circuit == NONE and line.kind == "steps"]
    return [
        _saving(goal, number, line, drawn, quality)
        for goal in alone
        for number in range(len(goal.results))
        for line in drawn
        if line.config.circuit not in CONTROLS and _comparable(line, goal)
    ]


def _comparable(line: Line, other: Line) -> bool:
    return labels.shared(line.config) == labels.shared(other.config)


def _saving(goal: Line, number: int, line: Line, drawn: Sequence[Line], quality: Quality) -> Saving:
    target = goal.values[number].value

    def least(others: Sequence[Line]) -> float | None:
        costs = [reached(each.costs("calls"), [v.value for v in each.values], target, quality) for each in others]
        return min((cost for cost in costs if cost is not None), default=None)

    family, config = _family(line.config), goal.results[number].config
    nulls = [each for each in drawn if each.config.circuit == NULL and _family(each.config) == family]
    alone = [each for each in drawn if each.config.circuit == NONE and each.kind != "steps" and _comparable(each, goal)]
    return Saving(
        task=config.task,
        quality=quality.name,
        target=labels.budget(config),
        value=target,
        network=goal.results[number].calls,
        way=line.label,
        calls=least([line]),
        bound=quality.better(line.values[0].value, target),
        null=least(nulls),
        threshold=least(alone),
        has_null=bool(nulls),
        has_threshold=bool(alone),
    )


def _chart(task: str, drawn: Sequence[Line], quality: Quality) -> Chart:
    """Quality against calls and against seconds. Colour is the circuit, dash the kind of budget."""
    markers: dict[tuple[str, str, str], int] = {}
    looks = []
    for line in drawn:
        marker = markers.setdefault((line.config.circuit, labels.sampler(line.config), line.settings), len(markers))
        looks.append(look(line.config.circuit, marker, labels.KINDS.index(line.kind)))
    panels = []
    for cost, x in COSTS.items():
        curves = [
            Curve(line.label, list(zip(line.costs(cost), line.values, strict=True)), how)
            for line, how in zip(drawn, looks, strict=True)
        ]
        panels.append(Panel(x, quality.title, curves, ratio_axis=True))
    samplers = _samplers(drawn)
    name = "-".join(["frontier", task, quality.name, *(each.replace(" ", "_") for each in sorted(samplers))])
    of = f"{task}, {samplers[0]}" if len(samplers) == 1 else task
    return Chart(name, f"{of}: {quality.title} against network calls and seconds", panels)


def _samplers(drawn: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(filter(None, (labels.sampler(line.config) for line in drawn))))


def _charted(drawn: list[Line]) -> list[list[Line]]:
    """The lines of each chart: all of them, or those of each sampler beside the network alone."""
    samplers = _samplers(drawn)
    if len(drawn) <= MANY or len(samplers) < 2:
        return [drawn]
    return [[line for line in drawn if labels.sampler(line.config) in ("", name)] for name in samplers]
