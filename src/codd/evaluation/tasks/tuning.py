"""Settings chosen on one split and reported on another."""

from collections.abc import Sequence
from dataclasses import replace

from codd.evaluation.runs import Result
from codd.evaluation.tasks.cells import CONTROLS, NULL, Cell


def chosen(results: Sequence[Result], tuned: Sequence[str], *, problems: int | None, split: str = "test") -> list[Cell]:
    """For each circuit and pace the cell that got most right, to be run on another split, with its control beside it.

    The null circuit is tuned like every other, since temperature alone can help: the best of it is a rival of its own.
    Ties go to what comes first.
    """
    groups: dict[Cell, list[Result]] = {}
    for result in results:
        options = {name: value for name, value in result.cell.options.items() if name not in tuned}
        groups.setdefault(replace(result.cell, options=options), []).append(result)
    found: list[Cell] = []
    for group in groups.values():
        best = max(group, key=lambda result: result.accuracy or 0.0).cell  # of equals the first
        found.append(best)
        if best.circuit not in CONTROLS:
            found.append(best.with_circuit(NULL))
    return [replace(cell, split=split, problems=problems) for cell in dict.fromkeys(found)]
