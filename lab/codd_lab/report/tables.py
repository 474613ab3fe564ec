"""What the tables of a report hold beside results and comparisons: ablation, studies, samples, provenance."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from codd_lab import measures
from codd_lab.measures import TemplateSpread, template_spreads
from codd_lab.report.comparisons import Comparison
from codd_lab.report.figures import Chart, Curve, Panel, look
from codd_lab.report.labels import by_task, circuit_label, grouped, label, order, rest, shared, varying
from codd_lab.report.quality import Estimate, Quality, measured, quality_of
from codd_lab.runs import Result, Sample
from codd_lab.tasks.configs import NONE, NULL, EvalConfig
from codd_lab.tasks.tuning import TUNED, best, tuned_values

HEAT = 6
"""How many colours a map has: the classes heat0 to heat5 of the style sheet."""
GAP, CONTINUATIONS, COST = "gap", "continuations", "cost"
SCORES = {
    "factorized": "network alone, all at once",
    "sequential": "network alone, one at a time, random order",
    "left_to_right": "network alone, one at a time, left to right",
    "dcd": "DCD (causal model and network)",
}

Estimates = dict[str, list[Estimate | None]]


class HeatMap(NamedTuple):
    """A quality of results that differ in activation (rows) and circuit temperature (columns) only."""

    results: Mapping[tuple[float, float], Result]
    heats: Mapping[tuple[float, float], int]
    """The colour of each, from 0, the worst, to `HEAT` - 1."""
    activations: dict[str, float]
    temperatures: dict[str, float]
    """Both in words and as numbers, ascending; an infinite activation: the circuit acts always."""
    chosen: Result


def ablations(validation: Sequence[Result], tests: Sequence[Result]) -> list[dict[str, Any]]:
    """For each task of the validation split its maps, and each chosen result with the same config on the test split."""
    tables = []
    for task, results in by_task(each for each in validation if each.config.circuit != NONE).items():
        quality = quality_of(results)
        if quality is not None:
            names = [name for name in varying(each.config for each in results) if name not in TUNED]
            maps = [_map(grid, quality) for grid in grouped(results, _fixed).values()]
            chosen = sorted((each.chosen for each in maps), key=lambda each: order(each.config))
            choices = [(each, on_test(each, tests)) for each in chosen]
            tables.append({"task": task, "quality": quality, "names": names, "maps": maps, "choices": choices})
    return tables


def _fixed(config: EvalConfig) -> str:
    """Equal for configs that differ only in what is tuned."""
    fixed = {name: value for name, value in rest(config).items() if name not in TUNED}
    return json.dumps([fixed, label(config, [])], sort_keys=True)


def _map(grid: Sequence[Result], quality: Quality) -> HeatMap:
    results = {tuned_values(each.config): each for each in grid}
    values = {place: estimate.value for place, each in results.items() if (estimate := quality.of(each))}
    low, high = min(values.values()), max(values.values())
    shares = {place: (value - low) / (high - low) if high > low else 0.0 for place, value in values.items()}
    heats = {place: round((HEAT - 1) * (each if quality.higher else 1 - each)) for place, each in shares.items()}
    activations, temperatures = (
        {"always" if value == inf else f"{value:g}": value for value in sorted(set(axis))}
        for axis in zip(*results, strict=True)
    )
    return HeatMap(results, heats, activations, temperatures, best(grid, quality.worth))


def on_test(result: Result, tests: Sequence[Result]) -> Result | None:
    """The same config on the test split; the number of problems and the seed may differ."""
    wanted = result.config
    for test in tests:
        config = replace(test.config, split=wanted.split, problems=wanted.problems, seed=wanted.seed)
        if config.task == wanted.task and label(config, []) == label(wanted, []) and rest(config) == rest(wanted):
            return test
    return None


class Speed(NamedTuple):
    """A result with its tokens per forward and tokens per second."""

    result: Result
    tokens_per_forward: float
    tokens_per_second: float


def parallelism(answered: Mapping[str, Sequence[Result]]) -> dict[str, dict[str, Any]]:
    """By task, the speed of every result and AUP of every circuit."""
    return {
        task: {
            "speeds": [
                Speed(each, measures.tokens_per_forward(each.samples), measures.tokens_per_second(each.samples))
                for each in results
            ],
            "ways": measures.parallelism(results),
        }
        for task, results in answered.items()
    }


def over_templates(tests: Sequence[Result]) -> dict[str, list[TemplateSpread]]:
    """By task, the spread of every configuration that was run under several prompt templates."""
    spreads = sorted(template_spreads(tests), key=lambda spread: (spread.config.task, *order(spread.config)))
    return {
        task: [spread for spread in spreads if spread.config.task == task]
        for task in dict.fromkeys(spread.config.task for spread in spreads)
    }


class Likelihood(NamedTuple):
    """Log-likelihood of one corpus in nats a token, by mask ratio or by length of context."""

    study: str
    corpus: str
    about: Mapping[str, Any]
    """As stored: numbers of blocks, texts and tokens; and how continuations were scored."""
    points: list[tuple[float, Any]]
    """The mask ratio or tokens of context, and the masked tokens if they are known."""
    scores: Estimates
    closed: Estimates
    """The share of the gap that each circuit closes."""
    charts: list[Chart]


def likelihoods(name: str, study: Mapping[str, Any]) -> list[Likelihood]:
    """The study of mask ratios or of continuations. Raises LookupError, TypeError etc. for another form."""
    group, key, x, about = {
        GAP: ("ratios", "ratio", "share of the block that is masked", "masked tokens against the share that is masked"),
        CONTINUATIONS: ("contexts", "context", "context (tokens)", "true continuations by the length of their context"),
    }[name]
    scoring = (study.get("settings") or {}).get("scoring")
    corpora = []
    for corpus, data in study["data"].items():
        points = [(float(entry[key]), entry.get("tokens", "-")) for entry in data[group]]
        scores = {_score_label(each): own for each, own in _estimates(data[group], "scores").items()}
        closed = {circuit_label(each): own for each, own in _estimates(data[group], "gap_closed").items()}
        panels = _panels(x, [point for point, _ in points], data[group])
        charts = [Chart(f"{name}-{corpus}", f"{corpus}: log-likelihood of {about}", panels)] if panels else []
        corpora.append(Likelihood(name, corpus, {"scoring": scoring, **data}, points, scores, closed, charts))
    return corpora


def _estimates(entries: Sequence[Mapping[str, Any]], group: str) -> Estimates:
    """For every name that any entry has in this group, the estimates of all entries."""
    names = dict.fromkeys(name for entry in entries for name in (entry.get(group) or {}))
    return {name: [measured((entry.get(group) or {}).get(name)) for entry in entries] for name in names}


def _score_label(name: str) -> str:
    return circuit_label(name.removeprefix("circuit:")) if name.startswith("circuit:") else SCORES.get(name, name)


def _panels(x: str, xs: Sequence[float], entries: Sequence[Mapping[str, Any]]) -> list[Panel]:
    scores, closed = _estimates(entries, "scores"), _estimates(entries, "gap_closed")
    shares = {f"circuit:{name}": [each and each.in_percent() for each in own] for name, own in closed.items()}
    names = list(dict.fromkeys([*scores, *shares]))
    looks = {name: look(name.removeprefix("circuit:"), place, place % 4) for place, name in enumerate(names)}
    panels = []
    for y, group in (("log-likelihood (nats a token)", scores), ("gap closed (%)", shares)):
        known = {name: [(at, y) for at, y in zip(xs, own, strict=True) if y] for name, own in group.items()}
        curves = [Curve(_score_label(name), points, looks[name]) for name, points in known.items() if points]
        panels += [Panel(x, y, curves, bands=True)] if curves else []
    return panels


def costs(study: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds a sample at equal steps. Raises LookupError, TypeError etc. for a study of another form."""
    rows = []
    for row in sorted(study["data"]["rows"], key=lambda each: each.get("steps") or 0):
        labels = [row["way"], circuit_label(str(row.get("circuit"))), row.get("steps", "-"), row.get("tokens", "-")]
        rows.append((labels, measured(row["seconds"]), measured(row.get("overhead"))))
    how = study.get("settings") or {}
    words = ", ".join(f"{name} {how[name]}" for name in ("batch", "rounds", "warmup", "gen_length") if name in how)
    return {"rows": rows, "machine": (study.get("provenance") or {}).get("machine"), "settings": words}


class Problem(NamedTuple):
    """What several configs wrote on one problem."""

    task: str
    number: int
    rows: list[tuple[str, Sample]]
    """The label of each config, and its sample."""


def sample_tables(results: Sequence[Result], pairs: Sequence[Comparison], count: int) -> list[Problem]:
    """``count`` problems of every task, from the comparison with the smallest p value; see `differing`."""
    problems = []
    for task, own in by_task(results).items():
        candidates = [pair for pair in pairs if pair.result.config.task == task]
        if candidates and count > 0:
            pair = min(candidates, key=_significance)
            names, beside = varying(each.config for each in own), _beside(pair, own)
            for number in differing(pair, count):
                samples = [(label(each.config, names), sample) for each in beside for sample in each.samples]
                rows = [(name, sample) for name, sample in samples if sample.doc_id == number]
                problems.append(Problem(task, number, rows))
    return problems


def _significance(pair: Comparison) -> tuple[float, float, str]:
    return 1.0 if pair.p is None else pair.p, pair.result.calls, pair.result.folder.name


def differing(pair: Comparison, count: int) -> list[int]:
    """Ids of the problems to show: those on which circuit and control differ, then the others, in order."""
    theirs = {sample.doc_id: sample for sample in pair.control.samples}
    both = [(each, theirs[each.doc_id]) for each in pair.result.samples if each.doc_id in theirs]

    def same(one: Sample, other: Sample) -> bool:
        return one.correct == other.correct if one.correct is not None else one.text == other.text

    ordered = sorted(both, key=lambda two: (same(*two), two[0].doc_id))
    return [one.doc_id for one, _ in ordered[:count]]


def _beside(pair: Comparison, own: Sequence[Result]) -> list[Result]:
    """The compared two, other circuits under the same settings, and the network alone at the same budget."""
    family, config = pair.control.config, pair.result.config
    return [
        each
        for each in own
        if each.config.with_circuit(NULL) == family
        or (
            each.config.circuit == NONE
            and each.config.budget == config.budget
            and shared(each.config) == shared(config)
        )
    ]


def provenance(results: Sequence[Result], studies: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All stored settings by dotted name, for cells and for studies: what is common, and what differs for each."""
    configs = {
        each.folder.name: flat({"cell": each.config.as_json(), "settings": each.settings, **each.provenance})
        for each in results
    }
    others = {
        name: flat({key: study[key] for key in ("settings", "provenance") if study.get(key) is not None})
        for name, study in studies.items()
    }
    tables = []
    for what, entries in (("cells", configs), ("studies", others)):
        if entries:
            first, *more = entries.values()
            common = {key: value for key, value in first.items() if all(each.get(key) == value for each in more)}
            own = {name: {k: v for k, v in entry.items() if k not in common} for name, entry in entries.items()}
            tables.append({"what": what, "common": common, "entries": own})
    return tables


def flat(settings: Any, name: str = "") -> dict[str, str]:
    """Nested settings as dotted names with values in words; nothing is left out."""
    if isinstance(settings, Mapping) and settings:
        parts = [flat(value, f"{name}.{key}" if name else str(key)) for key, value in settings.items()]
        return {key: value for part in parts for key, value in part.items()}
    return {name: settings if isinstance(settings, str) else json.dumps(settings, ensure_ascii=False)}
