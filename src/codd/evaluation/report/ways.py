"""Ways of decoding, as a report names, groups and orders them; and how good each was."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from codd.decoding.options import CIRCUIT_OPTIONS, DEFAULTS, OPTIONS, PACES
from codd.evaluation.runs import Result
from codd.evaluation.statistics import share_interval
from codd.evaluation.tasks.cells import NONE, NULL, TRAINED, Cell

NAMES = {NONE: "network alone", NULL: "null circuit"}
KINDS = ("steps", "threshold", "joint threshold", "entropy budget")
"""Kinds of pace. The joint threshold is the any-order sampler's: it knows which tokens are safe together."""


class Estimate(NamedTuple):
    """A figure and its 95% interval, where there is one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Quality:
    """Something that says how good a way is."""

    name: str
    word: str
    """In a sentence."""
    title: str
    """For an axis, with its unit."""
    higher: bool
    """Whether more is better."""
    of: Callable[[Result], Estimate | None]

    def better(self, one: float, other: float) -> bool:
        """Whether the first is at least as good, but for rounding."""
        return (one - other if self.higher else other - one) >= -1e-12


def named(circuit: str) -> str:
    """A circuit in words."""
    return NAMES.get(circuit, f"{circuit} circuit")


def kind(cell: Cell) -> str:
    """What says how many tokens a step commits."""
    [name] = cell.decoding.pace
    joint = "joint " if name == "threshold" and option(cell, "sampler") == "any_order" else ""
    return joint + name.replace("_", " ")


def pace(cell: Cell) -> str:
    """The same with its value."""
    if cell.decoding.pace == {"steps": None}:
        return "one token a step"
    return f"joint {cell.pace}" if kind(cell) == "joint threshold" else cell.pace


def pace_value(cell: Cell) -> float:
    """Of the pace; one token a step is slower than any number of steps."""
    [value] = cell.decoding.pace.values()
    return float("inf") if value is None else float(value)


def option(cell: Cell, name: str) -> Any:
    """What decoding was told; None where nothing heeds it."""
    if cell.circuit == NONE and name in CIRCUIT_OPTIONS:
        return None
    return getattr(cell.decoding, name)


def sampler(cell: Cell) -> str:
    """In words; without a circuit there is none."""
    return str(option(cell, "sampler") or "").replace("_", " ")


def rest(cell: Cell) -> dict[str, Any]:
    """All that was told beside task, split, circuit, sampler and pace."""
    told = {name: option(cell, name) for name in OPTIONS if name not in (*PACES, "sampler", "seed", "hooks")}
    return {**told, **{name: getattr(cell, name) for name in ("problems", "seed", "model", "dtype", "device")}}


def shared(cell: Cell) -> str:
    """What a way with a circuit has in common with the network alone, to be compared with it."""
    return json.dumps(
        {name: value for name, value in rest(cell).items() if name not in CIRCUIT_OPTIONS}, sort_keys=True
    )


def varying(cells: Iterable[Cell]) -> list[str]:
    """What of the rest is not the same everywhere; what a cell does not heed does not count."""
    seen: dict[str, set[str]] = {}
    for cell in cells:
        for name, value in rest(cell).items():
            if not (cell.circuit == NONE and name in CIRCUIT_OPTIONS):
                seen.setdefault(name, set()).add(json.dumps(value))
    return [name for name, values in seen.items() if len(values) > 1]


def settings(cell: Cell, names: Sequence[str], *, defaults: bool = False) -> str:
    """Those of the rest that are named, in words; without ``defaults`` only those that are not as they always are."""
    told = rest(cell)
    heeded = [name for name in names if not (cell.circuit == NONE and name in CIRCUIT_OPTIONS)]
    if not defaults:
        heeded = [name for name in heeded if not (hasattr(DEFAULTS, name) and told[name] == getattr(DEFAULTS, name))]
    return ", ".join(f"{name.replace('_', ' ')} {_value(name, told[name])}" for name in heeded)


def _value(name: str, value: Any) -> str:
    if value is None:
        return {"activation": "always", "problems": "all", "model": "bundled"}.get(name, "none")
    return f"{value:g}" if isinstance(value, float) else str(value).replace("_", " ")


def way(cell: Cell, names: Sequence[str], *, with_pace: bool = True) -> str:
    """One line for a cell."""
    words = [named(cell.circuit), sampler(cell), pace(cell) if with_pace else "", settings(cell, names)]
    return ", ".join(filter(None, words))


def order(cell: Cell) -> tuple[Any, ...]:
    """By pace; at one pace the network alone, then each circuit beside its control."""
    kinds = {"steps": 0, "threshold": 1, "joint threshold": 1, "entropy budget": 2}
    circuits = {NONE: 0, TRAINED: 1, NULL: 9}
    circuit = circuits.get(cell.circuit, 5)
    told = json.dumps(rest(cell), sort_keys=True) if circuit else ""
    return kinds[kind(cell)], pace_value(cell), sampler(cell), told, circuit, cell.circuit


def plain(cell: Cell) -> Cell:
    """Without options that say what is the default anyway: so cells are equal that were told the same."""
    told = {name: value for name, value in cell.options.items() if value != getattr(DEFAULTS, name)}
    kept = {name: value for name, value in told.items() if name not in (*PACES, "sampler")}
    chosen = {} if cell.circuit == NONE else {"sampler": cell.decoding.sampler}
    return replace(cell, options={**kept, **chosen, **cell.decoding.pace})


def by_task(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The results of each task, in order."""
    found: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda each: (each.cell.task, *order(each.cell))):
        found.setdefault(result.cell.task, []).append(result)
    return found


def _accuracy(result: Result) -> Estimate | None:
    if result.accuracy is None:
        return None
    right = result.correct
    if not right or set(right) - {0.0, 1.0}:
        return Estimate(100 * result.accuracy)
    low, high = share_interval(int(sum(right)), len(right))
    return Estimate(100 * result.accuracy, 100 * low, 100 * high)


def measured(found: Mapping[str, Any] | None) -> Estimate | None:
    """From {"mean" or "value" or "median", "low", "high"} of a file."""
    names = ("mean", "value", "median", "mauve")
    value = next((value for name in names if (value := _number(found, name)) is not None), None)
    return None if value is None else Estimate(value, _number(found, "low"), _number(found, "high"))


def _number(found: Any, name: str) -> float | None:
    value = found.get(name) if isinstance(found, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def _nll(result: Result) -> Estimate | None:
    return measured(((result.judged or {}).get("measures") or {}).get("nll"))


def _mauve(result: Result) -> Estimate | None:
    return measured((result.judged or {}).get("mauve"))


def _true_mauve(result: Result) -> Estimate | None:
    return measured((result.judged or {}).get("true"))


ACCURACY = Quality("accuracy", "accuracy", "right answers (%)", True, _accuracy)
NLL = Quality("nll", "NLL", "NLL under the judge (nats a token)", False, _nll)
MAUVE = Quality("mauve", "MAUVE", "MAUVE against one token a step", True, _mauve)
TRUE_MAUVE = Quality("true-mauve", "MAUVE to true text", "MAUVE against true text", True, _true_mauve)
QUALITIES = (ACCURACY, NLL, MAUVE, TRUE_MAUVE)


def quality_of(results: Sequence[Result]) -> Quality | None:
    """By what a task is judged first."""
    return next((quality for quality in QUALITIES if any(map(quality.of, results))), None)
