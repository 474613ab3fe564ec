"""Quality against cost as a section of a report: figures, and the calls that circuits save."""

from collections.abc import Sequence

from codd.evaluation.page import Cell, Section
from codd.evaluation.report.figures import Chart, Panel
from codd.evaluation.report.frontier import COSTS, Line, Saving, lines, savings
from codd.evaluation.report.parts import NOTHING, Part, curve, look
from codd.evaluation.report.ways import ACCURACY, KINDS, MAUVE, NLL, QUALITIES, TRUE_MAUVE, Quality, by_task
from codd.evaluation.runs import Result

MANY = 10
"""Lines from which a frontier is drawn for each sampler by itself."""


def frontier_parts(results: Sequence[Result]) -> tuple[list[Part], list[Saving]]:
    """Quality against calls and seconds for every task, and the calls that circuits save."""
    parts, saved = [], []
    for task, own in by_task(results).items():
        for quality in QUALITIES:
            drawn = lines(own, quality)
            if drawn:
                charts = [chart for group in _groups(drawn) for chart in _frontier(task, group, quality)]
                parts.append(Part(_frontier_section(task, quality), charts))
                table = savings(own, quality)
                saved += table
                parts.append(Part(_savings_section(quality, table)))
    head = Section(
        "The frontier: quality against cost",
        [
            "One line for each circuit, sampler and kind of pace. Colour is the circuit, the dash is the kind of pace. "
            "Up and to the left is better, for NLL down and to the left. Few network calls and few seconds are not the "
            "same: a circuit takes time of its own. Bars are 95% intervals, where there is room for them.",
            "The tables say how many network calls a circuit needs to be as good as the network alone at some number "
            "of steps, and how many fewer that is: than the network alone, than the null circuit with the same sampler "
            "and kind of pace, and than the network alone at the best of its thresholds or entropy budgets (adaptive). "
            "By linear interpolation in calls between neighbouring points, never beyond the measured ones; 'at most': "
            "the fastest pace is good enough already. The points have errors, so these figures have, too.",
        ],
    )
    return ([Part(head), *parts] if parts else []), saved


def _groups(drawn: Sequence[Line]) -> list[list[Line]]:
    """All lines, or those of each sampler beside the network alone."""
    samplers = list(dict.fromkeys(line.sampler for line in drawn if line.sampler))
    if len(drawn) <= MANY or len(samplers) < 2:
        return [list(drawn)]
    return [[line for line in drawn if line.sampler in ("", name)] for name in samplers]


def _frontier(task: str, drawn: Sequence[Line], quality: Quality) -> list[Chart]:
    panels = []
    kinds: dict[tuple[str, str, str], int] = {}
    for line in drawn:
        kinds.setdefault((line.circuit, line.sampler, line.settings), len(kinds))
    for cost, x in COSTS.items():
        curves = [
            curve(
                line.label(),
                line.costs(cost),
                line.values,
                look(line.circuit, kinds[line.circuit, line.sampler, line.settings], KINDS.index(line.kind)),
            )
            for line in drawn
        ]
        panels.append(Panel(x, quality.title, curves, ratio_axis=True))
    samplers = {line.sampler for line in drawn if line.sampler}
    several = f", {next(iter(samplers))}" if len(samplers) == 1 else ""
    name = "-".join(filter(None, ["frontier", task, quality.name, *(s.replace(" ", "_") for s in sorted(samplers))]))
    title = f"{task}{several}: {quality.title} against network calls and seconds"
    return [Chart(name, title, panels)]


def _frontier_section(task: str, quality: Quality) -> Section:
    said = {
        NLL.name: ["Lower is better; but a text that repeats itself is also easy to predict, so see Rep-2 and Rep-4."],
        MAUVE.name: ["Distance of two sets of texts; 1 is the same. The ceiling stands in the table of texts."],
        TRUE_MAUVE.name: ["The same to how the texts really go on."],
    }
    return Section(f"{task}: {quality.word}", said.get(quality.name, []), level=3)


def _savings_section(quality: Quality, table: Sequence[Saving]) -> Section:
    title = f"Calls for the {quality.word} of the network alone"
    if not table:
        said = "Not known: it takes a circuit and the network alone by steps, under the same settings, in one run."
        return Section(title, [said], level=4)
    digits = 1 if quality.name == ACCURACY.name else 3
    rows = [
        [
            Cell(saving.target, below=[Cell(f"{saving.value:.{digits}f}, {saving.network:.1f} calls", "faint")]),
            Cell(saving.way),
            _needed(saving.calls, saving.bound),
            Cell(fewer(saving.calls, saving.network)),
            _needed(saving.null, there=saving.has_null),
            Cell(fewer(saving.calls, saving.null)),
            _needed(saving.threshold, there=saving.has_threshold),
            Cell(fewer(saving.calls, saving.threshold)),
        ]
        for saving in table
    ]
    header = [
        "network alone at",
        "way",
        "its calls",
        "fewer",
        "null circuit",
        "fewer",
        "network alone, adaptive",
        "fewer",
    ]
    return Section(title, [], header, rows, level=4, names=2)


def _needed(calls: float | None, bound: bool = False, there: bool = True) -> Cell:
    if not there:
        return Cell("not measured", "faint")
    return Cell("not reached", "faint") if calls is None else Cell(f"{'at most ' if bound else ''}{calls:.1f}")


def fewer(calls: float | None, other: float | None) -> str:
    """How many fewer one is than the other, in per cent; more has a plus."""
    return NOTHING.text if calls is None or not other else f"{round(100 * (calls / other - 1)):+d}%"
