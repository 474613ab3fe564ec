"""What the sections of a report are made of."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from codd.evaluation.page import Cell, Section
from codd.evaluation.report.figures import Chart, Curve, Look
from codd.evaluation.report.ways import Estimate, measured

NOTHING = Cell("-", "faint")
COLOURS = {
    "trained": 0,
    "null": 1,
    "static": 2,
    "none": 6,
    "factorized": 6,
    "dcd": 3,
    "sequential": 4,
    "left_to_right": 4,
}
"""A circuit has one colour in all figures."""
OTHER = 5


class Part(NamedTuple):
    """A section and the charts that go with it."""

    section: Section
    charts: Sequence[Chart] = ()


def look(name: str, marker: int = 0, dash: int = 0) -> Look:
    """Of a circuit, or of a way of scoring."""
    return Look(COLOURS.get(name, OTHER), marker, dash, wide=name in ("none", "factorized"))


def number(value: float | None, digits: int = 3, *, sign: bool = False, percent: bool = False) -> str:
    """A figure for a table."""
    if value is None:
        return NOTHING.text
    return f"{100 * value if percent else value:{'+' if sign else ''}.{digits}f}{'%' if percent else ''}"


def estimate(found: Estimate | None, digits: int = 3, **how: Any) -> Cell:
    """A figure with its interval below."""
    if found is None:
        return NOTHING
    if found.low is None or found.high is None:
        return Cell(number(found.value, digits, **how))
    between = f"{number(found.low, digits, **how)} to {number(found.high, digits, **how)}"
    return Cell(number(found.value, digits, **how), below=[Cell(between, "faint")])


def scaled(found: Estimate) -> Estimate:
    """A share in per cent."""
    low, high = (None if value is None else 100 * value for value in found[1:])
    return Estimate(100 * found.value, low, high)


def curve(label: str, xs: Sequence[float], found: Sequence[Estimate | None], how: Look) -> Curve:
    """Of the points that have a value."""
    known = [(x, each) for x, each in zip(xs, found, strict=True) if each is not None]
    return Curve(
        label,
        [float(x) for x, _ in known],
        [float(each.value) for _, each in known],
        [each.low for _, each in known],
        [each.high for _, each in known],
        how,
    )


def flat(found: Any, name: str = "") -> dict[str, str]:
    """Nested settings as dotted names with values in words; nothing is left out."""
    if isinstance(found, Mapping) and found:
        pairs = [flat(value, f"{name}.{key}" if name else str(key)) for key, value in found.items()]
        return {key: value for each in pairs for key, value in each.items()}
    return {name: found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)}


def estimates(entries: Sequence[Mapping[str, Any]], group: str) -> dict[str, list[Estimate | None]]:
    """From a list of points, each with some named figures: of every name its figures."""
    names = dict.fromkeys(name for entry in entries for name in (entry.get(group) or {}))
    return {name: [measured((entry.get(group) or {}).get(name)) for entry in entries] for name in names}
