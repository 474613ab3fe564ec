"""Every circuit against the null circuit under identical settings, and the sentences that follow from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from codd.errors import InvalidInput
from codd.evaluation.statistics import Floats, bootstrap_interval, ratio_of_sums
from codd_lab.report.labels import budget, by_task, label, order, p_value, sampler, varying
from codd_lab.runs import Result, compared, control_of
from codd_lab.tasks.configs import CONTROLS

LEVEL = 0.05
UNEQUAL = 0.05
"""Network calls that differ by more than this share are mentioned: a threshold commits more where more is sure."""
SWAPS = 9999

GAIN, LOSS, WEAK_GAIN, WEAK_LOSS, NO_DIFFERENCE = "gain", "loss", "weak gain", "weak loss", "no difference"
"""Verdicts. Weak: p is below `LEVEL` but not after Holm's correction for all comparisons of the run."""


@dataclass(frozen=True)
class Comparison:
    """A circuit against its control, on one task at one budget."""

    result: Result
    control: Result
    unit: str
    """ "points" of right answers, where more is better, or "nats a token", where less is."""
    problems: int
    difference: float
    low: float
    high: float
    """The 95% interval of the difference."""
    p: float | None
    gained: int | None = None
    lost: int | None = None
    """Problems that only the circuit, or only the control, solved."""
    adjusted: float | None = None
    """The p value after Holm's correction for all comparisons of the run."""

    @property
    def verdict(self) -> str:
        """The verdict by the corrected p value; by the interval where there is no test."""
        up = (self.difference > 0) == (self.unit == "points")
        if self.p is None or self.adjusted is None:
            return NO_DIFFERENCE if self.low <= 0 <= self.high else GAIN if up else LOSS
        if self.adjusted < LEVEL:
            return GAIN if up else LOSS
        if self.p < LEVEL:
            return WEAK_GAIN if up else WEAK_LOSS
        return NO_DIFFERENCE

    def __str__(self) -> str:
        """Difference, interval and p value in words; the calls, too, where they are unequal."""
        d = 1 if self.unit == "points" else 3
        more = "" if self.p is None else f", {p_value(self.p)}"
        mine, other = self.result.calls, self.control.calls
        if abs(mine - other) > UNEQUAL * other:
            more += f", {mine:.1f} calls against {other:.1f}"
        return f"{self.difference:+.{d}f} {self.unit}, 95% {self.low:+.{d}f} to {self.high:+.{d}f}{more}"

    def as_json(self) -> dict[str, Any]:
        """All figures with their names, for ``--json``."""
        config = self.result.config
        names = ("unit", "problems", "difference", "low", "high", "p", "gained", "lost", "verdict")
        return {
            "task": config.task,
            "circuit": config.circuit,
            "sampler": sampler(config),
            "pace": budget(config),
            "cell": self.result.folder.name,
            "control": self.control.folder.name,
            **{name: getattr(self, name) for name in names},
            "holm": self.adjusted,
        }


def comparisons(results: Sequence[Result]) -> list[Comparison]:
    """All circuits that have their control in the run, with p values corrected together."""
    circuits = [result for result in results if result.config.circuit not in CONTROLS]
    pairs = [pair for result in circuits if (pair := against_control(result, results)) is not None]
    tested = [number for number, pair in enumerate(pairs) if pair.p is not None]
    for number, adjusted in zip(tested, holm([pairs[i].p or 0.0 for i in tested]), strict=True):
        pairs[number] = replace(pairs[number], adjusted=adjusted)
    return sorted(pairs, key=lambda pair: (pair.result.config.task, *order(pair.result.config)))


def against_control(result: Result, results: Sequence[Result]) -> Comparison | None:
    """A result against the null circuit; None if that is missing, or was measured on other problems."""
    control = control_of(result, results)
    if control is None:
        return None
    if result.metric is None:
        return _compare_texts(result, control)
    try:
        pair = compared(result, control)
    except InvalidInput:
        return None
    difference, low, high = (100 * value for value in (pair.difference, pair.low, pair.high))
    return Comparison(result, control, "points", pair.problems, difference, low, high, pair.p, pair.gained, pair.lost)


def _compare_texts(result: Result, control: Result) -> Comparison | None:
    """Continued texts by the judge's nats, paired by prefix; None if they cannot be paired."""
    mine, theirs = (_nats_and_tokens(each) for each in (result, control))
    if mine is None or theirs is None or len(mine[0]) != len(theirs[0]):
        return None
    if [each.doc_id for each in result.samples] != [each.doc_id for each in control.samples]:
        return None
    one, other = ratio_of_sums(*mine), ratio_of_sums(*theirs)
    n = len(mine[0])
    low, high = bootstrap_interval(lambda drawn: one(drawn) - other(drawn), n)
    difference = float(mine[0].sum() / mine[1].sum() - theirs[0].sum() / theirs[1].sum())
    p = swap_test(mine[0], theirs[0], mine[1], theirs[1], np.random.default_rng(0))
    return Comparison(result, control, "nats a token", n, difference, low, high, p)


def _nats_and_tokens(result: Result) -> tuple[Floats, Floats] | None:
    """The judge's nats and tokens of every text; None without a judge or without tokens."""
    judged = result.judged or {}
    nats, tokens = (np.asarray(judged.get(name) or [], np.float64) for name in ("nats", "tokens"))
    return (nats, tokens) if len(nats) and len(nats) == len(tokens) and tokens.sum() > 0 else None


def holm(ps: Sequence[float]) -> list[float]:
    """P values after Holm's step-down correction: rejecting those below 0.05 keeps the family-wise error below 5%."""
    adjusted, worst = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = worst
    return adjusted


def swap_test(mine: Floats, theirs: Floats, counts: Floats, others: Floats, rng: np.random.Generator) -> float:
    """Two-sided permutation test of equal nats per token: the two versions of each text are swapped at random.

    ``mine`` and ``theirs`` are nats, ``counts`` and ``others`` their tokens, one of each per text.
    """
    observed = abs(mine.sum() / counts.sum() - theirs.sum() / others.sum())
    swapped = rng.random((SWAPS, len(mine))) < 0.5
    totals = np.where(swapped, theirs, mine).sum(1), np.where(swapped, mine, theirs).sum(1)
    lengths = np.where(swapped, others, counts).sum(1), np.where(swapped, counts, others).sum(1)
    gaps = np.abs(totals[0] / lengths[0] - totals[1] / lengths[1])
    return float((1 + (gaps >= observed - 1e-12).sum()) / (1 + SWAPS))


def findings(pairs: Sequence[Comparison]) -> list[str]:
    """The run in sentences: a summary, then one for each task and circuit. Made by rule from the comparisons alone."""
    if not pairs:
        return [
            "Nothing to compare yet: no circuit has been scored beside the null circuit under identical settings "
            "(continued text is scored by codd eval --judge)."
        ]
    groups: dict[tuple[str, str], list[Comparison]] = {}
    names = {task: varying(each.config for each in own) for task, own in by_task(each.result for each in pairs).items()}
    for pair in pairs:
        config = pair.result.config
        groups.setdefault((config.task, label(config, names[config.task], with_budget=False)), []).append(pair)
    return [_summary(pairs), *(_sentence(*name, group, len(pairs)) for name, group in groups.items())]


def _summary(pairs: Sequence[Comparison]) -> str:
    verdicts = [pair.verdict for pair in pairs]
    gains, losses = verdicts.count(GAIN), verdicts.count(LOSS)
    if len(pairs) == 1:
        outcome = "a gain" if gains else "a loss" if losses else "no difference beyond chance"
        return f"One comparison of a circuit with the null circuit under identical settings: it shows {outcome}."
    return (
        f"{len(pairs)} comparisons of a circuit with the null circuit under identical settings; corrected for their "
        f"number (Holm), {gains} {'shows' if gains == 1 else 'show'} a gain, {losses} a loss, "
        f"{len(pairs) - gains - losses} no difference beyond chance."
    )


def _sentence(task: str, name: str, group: Sequence[Comparison], total: int) -> str:
    """One circuit on one task: its verdicts, each with the budgets that have it."""
    clauses = []
    for verdict, words in {
        GAIN: "the gain survives the control at {}",
        LOSS: "the circuit does worse than the control at {}",
        WEAK_GAIN: "at {} there is a gain that does not survive the correction for {} comparisons",
        WEAK_LOSS: "at {} there is a loss that does not survive the correction for {} comparisons",
        NO_DIFFERENCE: "at {} there is no difference that {} could show",
    }.items():
        pairs = [pair for pair in group if pair.verdict == verdict]
        if pairs:
            what = "texts" if pairs[0].unit != "points" else "problems"
            last = f"{pairs[0].problems} {what}" if verdict == NO_DIFFERENCE else str(total)
            clauses.append(words.format(_joined(f"{budget(pair.result.config)} ({pair})" for pair in pairs), last))
    return f"{task}, {name}: {'; '.join(clauses)}."


def _joined(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def unpaired(results: Sequence[Result], pairs: Sequence[Comparison]) -> list[str]:
    """A sentence that names the circuits whose control is missing; empty if there are none."""
    paired = {pair.result.folder for pair in pairs}
    alone = [each for each in results if each.config.circuit not in CONTROLS and each.folder not in paired]
    if not alone:
        return []
    names = varying(each.config for each in results)
    listed = few([f"{each.config.task}, {label(each.config, names)}" for each in alone])
    return [f"No null circuit under identical settings on the same problems, or no judge, beside: {listed}."]


def few(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return "; ".join([*names[:3], *([f"and {len(names) - 3} more"] if len(names) > 3 else [])])
