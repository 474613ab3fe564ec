"""Accuracy over several prompt templates of a task: mean, range, and whether a gain has one sign under all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from codd_lab.runs import Result, control_of
from codd_lab.tasks import templates
from codd_lab.tasks.configs import CONTROLS, EvalConfig


@dataclass(frozen=True)
class TemplateSpread:
    """One configuration under two or more templates."""

    config: EvalConfig
    """The configuration, with its template left out."""
    accuracies: Mapping[str, float]
    """Right answers in per cent, by the name of the template."""
    differences: Mapping[str, float]
    """Points more than the null circuit has under the same template; empty for the controls themselves."""

    @property
    def figures(self) -> dict[str, float]:
        """The mean, worst and best accuracy over templates, in per cent."""
        values = self.accuracies.values()
        return {"mean": fmean(values), "low": min(values), "high": max(values)}

    @property
    def same_sign(self) -> bool | None:
        """Whether circuit minus null circuit has one sign (+, - or 0) under all templates; None if one lacks a control.

        It says nothing about chance: each template's own test does.
        """
        if len(self.differences) < len(self.accuracies):
            return None
        return len({(value > 0) - (value < 0) for value in self.differences.values()}) == 1

    @property
    def verdict(self) -> str:
        """What `same_sign` says, in words."""
        if self.same_sign is None:
            return "-" if self.config.circuit in CONTROLS else "not known: no null circuit under some template"
        if not self.same_sign:
            return "the sign changes with the template"
        first = next(iter(self.differences.values()))
        return f"{'above' if first > 0 else 'below' if first < 0 else 'equal to'} the null circuit under all templates"

    def as_json(self) -> dict[str, Any]:
        """All figures with their names, for ``--json``."""
        kept = {name: value for name, value in self.config.as_json().items() if name in ("task", "split", "circuit")}
        own = {"accuracies": self.accuracies, "differences": self.differences, **self.figures}
        return {**kept, "options": dict(self.config.options), **own, "same_sign": self.same_sign}


def template_spreads(results: Sequence[Result]) -> list[TemplateSpread]:
    """The spread of every configuration that was run under two or more templates, the task's own prompt among them."""
    groups: dict[EvalConfig, list[Result]] = {}
    for result in results:
        if result.accuracy is not None:
            groups.setdefault(replace(result.config, template=None), []).append(result)
    return [_spread(config, group, results) for config, group in groups.items() if len(group) > 1]


def _spread(config: EvalConfig, group: Sequence[Result], results: Sequence[Result]) -> TemplateSpread:
    accuracies, differences = {}, {}
    for result in group:
        name, control = templates.label(result.config.template), control_of(result, results)
        accuracies[name] = 100 * (result.accuracy or 0.0)
        if control is not None and control.accuracy is not None:
            differences[name] = accuracies[name] - 100 * control.accuracy
    return TemplateSpread(config, accuracies, differences)
