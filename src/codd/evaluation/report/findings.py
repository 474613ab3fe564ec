"""What a run says: every circuit against the null circuit under identical settings, and which gains survive that."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from codd.errors import InvalidInput
from codd.evaluation.report.ways import order, pace, sampler, varying, way
from codd.evaluation.runs import Result, compared, control_of
from codd.evaluation.statistics import Floats, bootstrap_interval, ratio_of_sums
from codd.evaluation.tasks.cells import CONTROLS

LEVEL = 0.05
UNEQUAL = 0.05
"""From which share on a difference of network calls is told: a threshold commits more tokens where more are sure."""
SWAPS = 9999

GAIN, LOSS, WEAK_GAIN, WEAK_LOSS, NOTHING = "gain", "loss", "weak gain", "weak loss", "no difference"
"""Verdicts; weak is what chance explains once all comparisons are counted."""


@dataclass(frozen=True)
class Comparison:
    """A circuit against its control, on one task at one pace."""

    result: Result
    control: Result
    unit: str
    """ "points" of right answers, where more is better, or "nats a token", where less is."""
    problems: int
    difference: float
    low: float
    high: float
    p: float | None
    gained: int | None = None
    lost: int | None = None
    adjusted: float | None = None
    """The p value after Holm's correction for all comparisons of the run."""

    @property
    def verdict(self) -> str:
        """By the corrected p value; by the interval where there is no test."""
        up = (self.difference > 0) == (self.unit == "points")
        if self.p is None or self.adjusted is None:
            return NOTHING if self.low <= 0 <= self.high else GAIN if up else LOSS
        if self.adjusted < LEVEL:
            return GAIN if up else LOSS
        if self.p < LEVEL:
            return WEAK_GAIN if up else WEAK_LOSS
        return NOTHING

    def __str__(self) -> str:
        """Difference, interval and p value in words."""
        d = 1 if self.unit == "points" else 3
        chance = "" if self.p is None else f", {chance_of(self.p)}"
        mine, other = self.result.calls, self.control.calls
        if abs(mine - other) > UNEQUAL * other:
            chance += f", {mine:.1f} calls against {other:.1f}"
        return f"{self.difference:+.{d}f} {self.unit}, 95% {self.low:+.{d}f} to {self.high:+.{d}f}{chance}"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        cell = self.result.cell
        names = ("unit", "problems", "difference", "low", "high", "p", "gained", "lost", "verdict")
        return {
            "task": cell.task,
            "circuit": cell.circuit,
            "sampler": sampler(cell),
            "pace": pace(cell),
            "cell": self.result.folder.name,
            "control": self.control.folder.name,
            **{name: getattr(self, name) for name in names},
            "holm": self.adjusted,
        }


def chance_of(p: float) -> str:
    """A p value for people."""
    return "p < 0.0001" if p < 1e-4 else f"p {p:.1g}" if p < 0.01 else f"p {p:.2g}"


def holm(ps: Sequence[float]) -> list[float]:
    """P values corrected for their number, step down: each at most 0.05 keeps all errors together below 5%."""
    adjusted, worst = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = worst
    return adjusted


def swap_test(mine: Floats, theirs: Floats, counts: Floats, others: Floats, rng: np.random.Generator) -> float:
    """Two-sided test of equal means per token: each text's two versions change places by chance."""
    observed = abs(mine.sum() / counts.sum() - theirs.sum() / others.sum())
    swapped = rng.random((SWAPS, len(mine))) < 0.5
    totals = np.where(swapped, theirs, mine).sum(1), np.where(swapped, mine, theirs).sum(1)
    lengths = np.where(swapped, others, counts).sum(1), np.where(swapped, counts, others).sum(1)
    found = np.abs(totals[0] / lengths[0] - totals[1] / lengths[1])
    return float((1 + (found >= observed - 1e-12).sum()) / (1 + SWAPS))


def comparisons(results: Sequence[Result]) -> list[Comparison]:
    """Of every circuit that has its control in the run, corrected together."""
    circuits = [result for result in results if result.cell.circuit not in CONTROLS]
    found = [each for result in circuits if (each := against_control(result, results)) is not None]
    tested = [number for number, each in enumerate(found) if each.p is not None]
    for number, adjusted in zip(tested, holm([found[i].p or 0.0 for i in tested]), strict=True):
        found[number] = replace(found[number], adjusted=adjusted)
    return sorted(found, key=lambda each: (each.result.cell.task, *order(each.result.cell)))


def against_control(result: Result, results: Sequence[Result]) -> Comparison | None:
    """One way against the null circuit, if it is there and has the same problems."""
    control = control_of(result, results)
    if control is None:
        return None
    if result.metric is None:
        return _texts(result, control)
    try:
        pair = compared(result, control)
    except InvalidInput:
        return None
    difference, low, high = (100 * value for value in (pair.difference, pair.low, pair.high))
    return Comparison(result, control, "points", pair.problems, difference, low, high, pair.p, pair.gained, pair.lost)


def _texts(result: Result, control: Result) -> Comparison | None:
    """By what a judge says of the texts, paired by prefix."""
    if not result.judged or not control.judged:
        return None
    mine, theirs = (_judged(each) for each in (result, control))
    same = [each.doc_id for each in result.samples] == [each.doc_id for each in control.samples]
    if mine is None or theirs is None or not same or len(mine[0]) != len(theirs[0]):
        return None
    one, other = ratio_of_sums(*mine), ratio_of_sums(*theirs)
    n = len(mine[0])
    low, high = bootstrap_interval(lambda drawn: one(drawn) - other(drawn), n)
    difference = float(mine[0].sum() / mine[1].sum() - theirs[0].sum() / theirs[1].sum())
    p = swap_test(mine[0], theirs[0], mine[1], theirs[1], np.random.default_rng(0))
    return Comparison(result, control, "nats a token", n, difference, low, high, p)


def _judged(result: Result) -> tuple[Floats, Floats] | None:
    """Nats and tokens of every text, if there are any."""
    found = result.judged or {}
    nats, tokens = (np.asarray(found.get(name) or [], np.float64) for name in ("nats", "tokens"))
    return (nats, tokens) if len(nats) and len(nats) == len(tokens) and tokens.sum() > 0 else None


def finding(found: Sequence[Comparison]) -> list[str]:
    """The run in sentences: first all of it, then each task and circuit. Made by rule from the comparisons alone."""
    if not found:
        return ["No circuit stands beside the null circuit under identical settings, so this run shows no gain."]
    groups: dict[tuple[str, str], list[Comparison]] = {}
    tasks: dict[str, list[str]] = {}
    for task in dict.fromkeys(each.result.cell.task for each in found):
        tasks[task] = varying(each.result.cell for each in found if each.result.cell.task == task)
    for each in found:
        cell = each.result.cell
        groups.setdefault((cell.task, way(cell, tasks[cell.task], with_pace=False)), []).append(each)
    return [_summary(found), *(_sentence(*name, group, len(found)) for name, group in groups.items())]


def _summary(found: Sequence[Comparison]) -> str:
    verdicts = [each.verdict for each in found]
    gains, losses = verdicts.count(GAIN), verdicts.count(LOSS)
    kept = len(found) - gains - losses
    if len(found) == 1:
        outcome = "a gain" if gains else "a loss" if losses else "no difference beyond chance"
        return f"One comparison of a circuit with the null circuit under identical settings: it shows {outcome}."
    return (
        f"{len(found)} comparisons of a circuit with the null circuit under identical settings; corrected for their "
        f"number (Holm), {gains} {'shows' if gains == 1 else 'show'} a gain, {losses} a loss, "
        f"{kept} no difference beyond chance."
    )


def _sentence(task: str, name: str, group: Sequence[Comparison], total: int) -> str:
    """What becomes of one circuit on one task, over its paces."""
    said = []
    for verdict, words in {
        GAIN: "the gain survives the control at {}",
        LOSS: "the circuit does worse than the control at {}",
        WEAK_GAIN: "at {} there is a gain that does not survive the correction for {} comparisons",
        WEAK_LOSS: "at {} there is a loss that does not survive the correction for {} comparisons",
        NOTHING: "at {} there is no difference that {} could show",
    }.items():
        those = [each for each in group if each.verdict == verdict]
        if those:
            what = "texts" if those[0].unit != "points" else "problems"
            last = f"{those[0].problems} {what}" if verdict == NOTHING else str(total)
            said.append(words.format(_listed(f"{pace(each.result.cell)} ({each})" for each in those), last))
    return f"{task}, {name}: {'; '.join(said)}."


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def unpaired(results: Sequence[Result], found: Sequence[Comparison]) -> list[str]:
    """Circuits whose control is missing, in words: of these nothing can be said."""
    have = {each.result.folder for each in found}
    alone = [each for each in results if each.cell.circuit not in CONTROLS and each.folder not in have]
    names = varying(each.cell for each in results)
    if not alone:
        return []
    listed = few([f"{each.cell.task}, {way(each.cell, names)}" for each in alone])
    return [f"No null circuit under identical settings on the same problems, or no judge, beside: {listed}."]


def few(names: Sequence[str], most: int = 3) -> str:
    """The first of them, and how many more there are."""
    rest = len(names) - most
    return "; ".join(names[:most]) + (f"; and {rest} more" if rest > 0 else "")
