"""How fast answers are written, what that costs in right ones, and how much the wording of the prompt matters.

- **TPF**, tokens per forward: tokens written over network evaluations, of all problems together. It does not depend on
  the machine.
- **TPS**, tokens per second: the median over problems of tokens over seconds, at the run's batch size; so the batch in
  which kernels were compiled does not count. It depends on the machine and the batch.
- **AUP**, accuracy under parallelism (Qian et al. 2026, d3LLM): the area under accuracy against TPF, in which lower
  accuracy counts less.
- **Spread**: accuracy over several prompt templates of a task, and whether a gain has one sign under all of them.
"""

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from codd.decoding.options import RULE
from codd_lab.runs import Result, Sample, control_of
from codd_lab.tasks import templates
from codd_lab.tasks.configs import CONTROLS, NULL, EvalConfig

ALPHA = 3.0
"""How quickly accuracy below the best loses weight."""
TOLERATED = 5.0
"""Points of accuracy below that of the least parallel point, beyond which a point does not count."""


def tokens_per_forward(samples: Iterable[Sample]) -> float:
    """Tokens written over network evaluations; 0 where there were none."""
    found = list(samples)
    return sum(sample.tokens for sample in found) / max(1, sum(sample.calls for sample in found))


def tokens_per_second(samples: Iterable[Sample]) -> float:
    """The median over samples of tokens over seconds; 0 where no time was taken down."""
    rates = [sample.tokens / sample.seconds for sample in samples if sample.seconds > 0]
    return statistics.median(rates) if rates else 0.0


def accuracy_under_parallelism(points: Iterable[tuple[float, float]], best: float) -> float:
    """AUP of one or more points (TPF, accuracy in per cent), of one way at several paces.

    With the points in the order of their parallelism r_1 < r_2 < .., those with y_i < y_1 - `TOLERATED` left out, and
    ``best`` the highest accuracy that any way reaches on the task,

        AUP = r_1 y_1 + sum over i > 1 of (r_i - r_(i-1)) (y_i W(y_i) + y_(i-1) W(y_(i-1))) / 2
        W(y) = min(1, exp(-`ALPHA` (1 - y / best)))

    So tokens per forward count in full while accuracy stays at the best, and where it falls ever less. With one point
    it is r_1 y_1.
    """
    ordered = sorted(points)
    first_rate, first = ordered[0]
    kept = [(rate, accuracy) for rate, accuracy in ordered if accuracy >= first - TOLERATED]

    def weighted(accuracy: float) -> float:
        return accuracy * min(1.0, math.exp(-ALPHA * (1 - accuracy / best))) if best > 0 else 0.0

    area = first_rate * first
    for (before, lower), (rate, accuracy) in itertools.pairwise(kept):
        area += (rate - before) * (weighted(accuracy) + weighted(lower)) / 2
    return area


class Parallelism(NamedTuple):
    """AUP of a group of configurations that differ in their budget (steps, threshold, entropy_budget) and seed only."""

    config: EvalConfig
    """The first of these configurations in the run."""
    points: list[tuple[float, float]]
    """TPF and accuracy in per cent, ascending."""
    best: float
    """The best accuracy on the task in the run, in per cent."""
    aup: float
    null: float | None = None
    """AUP of the null circuit under the same settings; None if that was not run, or if this is it."""

    def as_json(self) -> dict[str, Any]:
        """All figures with their names, for ``--json``."""
        config = self.config
        return {
            **{name: getattr(config, name) for name in ("task", "split", "model", "circuit")},
            "template": templates.label(config.template),
            "options": {name: value for name, value in config.options.items() if name not in RULE},
            "points": [list(point) for point in self.points],
            "best": self.best,
            "aup": self.aup,
            "null": self.null,
        }


def parallelism(results: Sequence[Result]) -> list[Parallelism]:
    """AUP of every group of configurations, in the order of the results; continued text has none."""
    configs: dict[str, EvalConfig] = {}
    points: dict[str, list[tuple[float, float]]] = {}
    best: dict[tuple[str, str], float] = {}
    for result in results:
        if result.accuracy is not None and (rate := tokens_per_forward(result.samples)) > 0:
            config, accuracy = result.config, 100 * result.accuracy
            configs.setdefault(_way(config), config)
            points.setdefault(_way(config), []).append((rate, accuracy))
            best[config.task, config.split] = max(accuracy, best.get((config.task, config.split), 0.0))
    limits = {way: best[config.task, config.split] for way, config in configs.items()}
    areas = {way: accuracy_under_parallelism(points[way], limit) for way, limit in limits.items()}
    return [
        Parallelism(
            config,
            sorted(points[way]),
            limits[way],
            areas[way],
            None if config.circuit == NULL else areas.get(_way(config.with_circuit(NULL))),
        )
        for way, config in configs.items()
    ]


def _way(config: EvalConfig) -> str:
    """A key that is equal for configurations that differ in their budget and seed only."""
    options = {name: value for name, value in config.options.items() if name not in RULE}
    return json.dumps({**config.as_json(), "seed": 0, "options": options}, sort_keys=True)


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """TPF and TPS of every result, and AUP of every group of configurations; for JSON."""
    return {
        "speed": [
            {
                "cell": result.config.slug,
                "tokens_per_forward": tokens_per_forward(result.samples),
                "tokens_per_second": tokens_per_second(result.samples),
                "batch": result.settings.get("batch"),
            }
            for result in results
        ],
        "aup": [each.as_json() for each in parallelism(results)],
    }


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
        return {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}

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
