"""How a report names, groups and orders the configs of a run (task, circuit, sampler, budget, other options)."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from codd.decoding.options import CIRCUIT_OPTIONS, DEFAULTS, OPTIONS, RULE
from codd_lab.runs import Result, Sample
from codd_lab.tasks import templates
from codd_lab.tasks.configs import NONE, NULL, TRAINED, EvalConfig

KINDS = ("steps", "threshold", "joint threshold", "entropy budget")
"""Kinds of budget. The joint threshold is the any-order sampler's: it knows which tokens are safe together."""


def circuit_label(circuit: str) -> str:
    """A circuit in words, as "null circuit"."""
    return {NONE: "network alone", NULL: "null circuit"}.get(circuit, f"{circuit} circuit")


def kind(config: EvalConfig) -> str:
    """The kind of budget, one of `KINDS`: what decides how many tokens a step commits."""
    name = next(iter(config.decoding.commit_rule))
    joint = "joint " if name == "threshold" and option(config, "sampler") == "any_order" else ""
    return joint + name.replace("_", " ")


def budget(config: EvalConfig) -> str:
    """The budget with its value, as "16 steps" or "joint threshold 0.9"."""
    if config.decoding.commit_rule == {"steps": None}:
        return "one token a step"
    return f"joint {config.budget}" if kind(config) == "joint threshold" else config.budget


def option(config: EvalConfig, name: str) -> Any:
    """The value of a decoding option; None for a circuit's option where there is no circuit."""
    if config.circuit == NONE and name in CIRCUIT_OPTIONS:
        return None
    return getattr(config.decoding, name)


def sampler(config: EvalConfig) -> str:
    """The sampler in words; empty without a circuit, where there is no choice."""
    return str(option(config, "sampler") or "").replace("_", " ")


def rest(config: EvalConfig) -> dict[str, Any]:
    """All settings beside task, split, circuit, sampler and budget."""
    options = {name: option(config, name) for name in OPTIONS if name not in (*RULE, "sampler", "seed", "hooks")}
    others = {name: getattr(config, name) for name in ("problems", "seed", "model", "dtype", "device")}
    return {**options, **others, "template": templates.label(config.template)}


def shared(config: EvalConfig) -> str:
    """A key of the settings that do not concern circuits: equal for configs that may be compared across circuits."""
    return json.dumps(
        {name: value for name, value in rest(config).items() if name not in CIRCUIT_OPTIONS}, sort_keys=True
    )


def varying(configs: Iterable[EvalConfig]) -> list[str]:
    """Names of the remaining settings (see `rest`) that differ between configs, where they have an effect."""
    seen: dict[str, set[str]] = {}
    for config in configs:
        for name, value in rest(config).items():
            if _has_effect(config, name):
                seen.setdefault(name, set()).add(json.dumps(value))
    return [name for name, values in seen.items() if len(values) > 1]


def _has_effect(config: EvalConfig, name: str) -> bool:
    return config.circuit != NONE or name not in CIRCUIT_OPTIONS


def settings(config: EvalConfig, names: Sequence[str], *, defaults: bool = False) -> str:
    """The remaining settings of these names in words; those at their default are omitted unless ``defaults``."""
    values = rest(config)
    names = [name for name in names if _has_effect(config, name)]
    if not defaults:
        names = [name for name in names if not (hasattr(DEFAULTS, name) and values[name] == getattr(DEFAULTS, name))]
    return ", ".join(f"{name.replace('_', ' ')} {_value(name, values[name])}" for name in names)


def _value(name: str, value: Any) -> str:
    if value is None:
        return {"activation": "always", "problems": "all", "model": "bundled"}.get(name, "none")
    return f"{value:g}" if isinstance(value, float) else str(value).replace("_", " ")


def label(config: EvalConfig, names: Sequence[str], *, with_budget: bool = True) -> str:
    """A config in one line: circuit, sampler, budget, and the settings of these names."""
    words = [
        circuit_label(config.circuit),
        sampler(config),
        budget(config) if with_budget else "",
        settings(config, names),
    ]
    return ", ".join(filter(None, words))


def order(config: EvalConfig) -> tuple[Any, ...]:
    """A key to sort by: budget first; at one budget the network alone, then each circuit beside its control."""
    kinds = {"steps": 0, "threshold": 1, "joint threshold": 1, "entropy budget": 2}
    circuit = {NONE: 0, TRAINED: 1, NULL: 9}.get(config.circuit, 5)
    value = next(iter(config.decoding.commit_rule.values()))
    slowness = float("inf") if value is None else float(value)  # one token a step is slower than any number of steps
    others = json.dumps(rest(config), sort_keys=True) if circuit else ""
    return kinds[kind(config)], slowness, sampler(config), others, circuit, config.circuit


def grouped(results: Iterable[Result], key: Callable[[EvalConfig], str]) -> dict[str, list[Result]]:
    """Results by a key of their config, in the order in which the keys first occur."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result.config), []).append(result)
    return groups


def by_task(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The results of each task, sorted by `order`."""
    ordered = sorted(results, key=lambda each: (each.config.task, *order(each.config)))
    return grouped(ordered, lambda config: config.task)


def judges(results: Iterable[Result]) -> str:
    """Who judged the texts of these results, each judge once."""
    found = [(result.judged or {}).get("judge") or {} for result in results]
    named = [": ".join(filter(None, [judge.get("name"), judge.get("description")])) for judge in found]
    return "; ".join(dict.fromkeys(name or "not named" for name in named))


def answers(sample: Sample) -> str:
    """What each filter of the task extracted from a text."""
    return ", ".join(f"{name}: {answer}" for name, answer in sample.answers.items())


def p_value(p: float) -> str:
    """A p value with one or two digits, as "p 0.034" or "p < 0.0001"."""
    return "p < 0.0001" if p < 1e-4 else f"p {p:.1g}" if p < 0.01 else f"p {p:.2g}"
