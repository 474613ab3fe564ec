"""How settings were chosen: maps of what circuits are worth on the validation split, and the chosen ones on test."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from codd.evaluation.page import HEAT, Cell, Section
from codd.evaluation.report.findings import Comparison
from codd.evaluation.report.parts import NOTHING, Part, estimate
from codd.evaluation.report.tables import difference
from codd.evaluation.report.ways import (
    Quality,
    by_task,
    option,
    order,
    pace,
    quality_of,
    rest,
    sampler,
    settings,
    varying,
    way,
)
from codd.evaluation.runs import Result
from codd.evaluation.tasks.cells import NONE

TUNED = ("activation", "circuit_temperature")

Found = Mapping[str, Comparison]


def ablation_parts(validation: Sequence[Result], tests: Sequence[Result], found: Found) -> list[Part]:
    """Maps over activation and circuit temperature, what was chosen, and what that is worth on the test split."""
    parts = []
    for task, results in by_task(each for each in validation if each.cell.circuit != NONE).items():
        quality = quality_of(results)
        if quality is None:
            continue
        names = [name for name in varying(each.cell for each in results) if name not in TUNED]
        chosen = []
        for group in _grids(results):
            parts.append(Part(_map(task, group, quality, names)))
            chosen.append(best(group, quality))
        parts.append(Part(_chosen(task, chosen, tests, found, quality, names)))
    head = Section(
        "Ablation: activation and circuit temperature",
        [
            "Chosen on the validation split, reported on the test split. The circuit acts while the share of masks in "
            "its window is below the activation; the logits are divided by the circuit temperature before the product. "
            "The null circuit is tuned in the same way. Chosen is the best; of equals the one whose temperature is "
            "nearest to 1, then the one with the highest activation."
        ],
    )
    return [Part(head), *parts] if parts else []


def _grids(results: Sequence[Result]) -> list[list[Result]]:
    """Results that differ in what is tuned only."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        cell = result.cell
        fixed = {name: value for name, value in rest(cell).items() if name not in TUNED}
        key = json.dumps([fixed, cell.circuit, sampler(cell), pace(cell)], sort_keys=True)
        groups.setdefault(key, []).append(result)
    return list(groups.values())


def _activation(result: Result) -> float:
    value = option(result.cell, "activation")
    return inf if value is None else float(value)


def _temperature(result: Result) -> float:
    return float(option(result.cell, "circuit_temperature"))


def best(results: Sequence[Result], quality: Quality) -> Result:
    """The chosen one, by the rule that the report states."""
    known = [(found.value, each) for each in results if (found := quality.of(each)) is not None]
    sign = -1 if quality.higher else 1
    return min(known, key=lambda pair: (sign * pair[0], abs(_temperature(pair[1]) - 1), -_activation(pair[1])))[1]


def _map(task: str, group: Sequence[Result], quality: Quality, names: Sequence[str]) -> Section:
    activations, temperatures = sorted({*map(_activation, group)}), sorted({*map(_temperature, group)})
    values = {(_activation(each), _temperature(each)): found.value for each in group if (found := quality.of(each))}
    low, high = min(values.values()), max(values.values())
    chosen, digits = best(group, quality), 1 if quality.name == "accuracy" else 3
    mark = _activation(chosen), _temperature(chosen)

    def cell(place: tuple[float, float]) -> Cell:
        if place not in values:
            return NOTHING
        share = (values[place] - low) / (high - low) if high > low else 0.0
        tone = f"heat{round((HEAT - 1) * (share if quality.higher else 1 - share))}"
        return Cell(f"{values[place]:.{digits}f}", tone, [Cell("chosen")] if place == mark else ())

    rows = [
        [
            Cell("always" if activation == inf else f"{activation:g}"),
            *(cell((activation, t)) for t in temperatures),
        ]
        for activation in activations
    ]
    title = f"{task}, validation: {way(group[0].cell, names)}"
    said = f"{quality.title}; {group[0].problems} problems. Rows: activation; columns: circuit temperature."
    return Section(title, [said], ["activation", *(f"{t:g}" for t in temperatures)], rows, level=3)


def _chosen(
    task: str, chosen: Sequence[Result], tests: Sequence[Result], found: Found, quality: Quality, names: Sequence[str]
) -> Section:
    digits, rows = 1 if quality.name == "accuracy" else 3, []
    for result in sorted(chosen, key=lambda each: order(each.cell)):
        match = on_test(result, tests)
        rows.append(
            [
                Cell(way(result.cell, names)),
                Cell(settings(result.cell, TUNED, defaults=True)),
                estimate(quality.of(result), digits),
                Cell("not measured", "faint") if match is None else estimate(quality.of(match), digits),
                NOTHING if match is None else difference(found.get(match.folder.name), digits),
            ]
        )
    said = "The last column is against the null circuit with the settings that were chosen for the circuit."
    header = ["way", "chosen settings", "validation", "test", "test, against null"]
    return Section(f"{task}: chosen on validation, measured on test", [said], header, rows, level=3, names=2)


def on_test(result: Result, tests: Sequence[Result]) -> Result | None:
    """The same cell on the test split; the number of problems and the seed may differ."""
    wanted = result.cell
    for test in tests:
        cell = replace(test.cell, split=wanted.split, problems=wanted.problems, seed=wanted.seed)
        same = rest(cell) == rest(wanted) and (sampler(cell), pace(cell)) == (sampler(wanted), pace(wanted))
        if same and (cell.task, cell.circuit) == (wanted.task, wanted.circuit):
            return test
    return None
