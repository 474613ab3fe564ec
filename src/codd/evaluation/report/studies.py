"""The studies of a run as sections of its report: likelihoods, cost, and whatever else was stored."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from codd.evaluation.page import Cell, Section
from codd.evaluation.report.figures import Chart, Panel
from codd.evaluation.report.parts import NOTHING, Part, curve, estimate, estimates, flat, look, scaled
from codd.evaluation.report.ways import measured, named

GAP, CONTINUATIONS, COST = "gap", "continuations", "cost"
LIKELIHOOD = "log-likelihood (nats a token)"
CLOSED = "gap closed (%)"
WAYS = {
    "factorized": "network alone, all at once",
    "sequential": "network alone, one at a time, random order",
    "left_to_right": "network alone, one at a time, left to right",
    "dcd": "DCD (causal model and network)",
}


def likelihood_parts(studies: Mapping[str, Any]) -> list[Part]:
    """By mask ratio and by context."""
    found = [part for name in (GAP, CONTINUATIONS) if name in studies for part in _tolerant(name, studies[name])]
    return [Part(_likelihood_head()), *found] if found else []


def cost_parts(studies: Mapping[str, Any]) -> list[Part]:
    """Seconds and overhead."""
    return _tolerant(COST, studies[COST]) if COST in studies else []


def other_parts(studies: Mapping[str, Any]) -> list[Part]:
    """Studies that this report does not know."""
    return [
        part for name in sorted(set(studies) - {GAP, CONTINUATIONS, COST}) for part in _tolerant(name, studies[name])
    ]


def _tolerant(name: str, study: Any) -> list[Part]:
    """A study that is not as expected is shown as it is stored."""
    known: dict[str, Callable[[Mapping[str, Any]], list[Part]]] = {
        GAP: _gap,
        CONTINUATIONS: _continuations,
        COST: _cost,
    }
    if name not in known:
        return [_stored(name, study, "This report knows no study of this name; here is what was stored.")]
    try:
        return known[name](study)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        found = f"{type(error).__name__}: {error}"
        return [_stored(name, study, f"This study is not stored as expected ({found}); here is all of it.")]


def _stored(name: str, study: Any, why: str) -> Part:
    rest = study if isinstance(study, Mapping) else {"study": study}
    rows = [[Cell(key), Cell(value)] for key, value in flat(rest.get("settings") or {}).items() if key]
    text = json.dumps(rest.get("data", rest), indent=1, ensure_ascii=False)
    rows.append([Cell("data"), Cell(text)])
    return Part(Section(f"Study: {name}", [why], ["setting", "value"], rows, prose=True))


def _likelihood_head() -> Section:
    return Section(
        "Likelihood",
        [
            "Log-likelihood of true text, higher is better, in nats for each masked token. Nothing is sampled here, so "
            "that no order, temperature or threshold plays a part. Bands and the small figures are 95% intervals by "
            "bootstrap over blocks or texts."
        ],
    )


def _scored(name: str) -> str:
    return named(name.removeprefix("circuit:")) if name.startswith("circuit:") else WAYS.get(name, name)


def _chart(name: str, title: str, x: str, xs: Sequence[float], entries: Sequence[Mapping[str, Any]]) -> list[Chart]:
    scores, closed = estimates(entries, "scores"), estimates(entries, "gap_closed")
    keys = dict.fromkeys([*scores, *(f"circuit:{each}" for each in closed)])
    looks = {each: look(each.removeprefix("circuit:"), place, place % 4) for place, each in enumerate(keys)}
    shares = {f"circuit:{each}": [value and scaled(value) for value in found] for each, found in closed.items()}
    panels = []
    for y, group in ((LIKELIHOOD, scores), (CLOSED, shares)):
        drawn = [curve(_scored(each), xs, found, looks[each]) for each, found in group.items()]
        drawn = [each for each in drawn if each.xs]
        panels += [Panel(x, y, drawn, bands=True)] if drawn else []
    return [Chart(name, title, panels)] if panels else []


def _gap(study: Mapping[str, Any]) -> list[Part]:
    parts = []
    for corpus, found in study["data"].items():
        entries = found["ratios"]
        xs = [float(entry["ratio"]) for entry in entries]
        title = f"{corpus}: log-likelihood of masked tokens against the share that is masked"
        charts = _chart(f"gap-{corpus}", title, "share of the block that is masked", xs, entries)
        size = f"{found.get('blocks', '?')} blocks."
        rows = [_points(f"{entry['ratio']:g}", entry, entries) for entry in entries]
        names = [_scored(name) for name in estimates(entries, "scores")]
        scores = Section("Log-likelihood", [], ["masked", "tokens", *names], rows, level=4)
        parts += [Part(Section(f"{corpus}: by mask ratio", [size], level=3), charts), Part(scores), _closed(entries)]
    return parts


def _points(label: str, entry: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> list[Cell]:
    cells = [Cell(label), Cell(str(entry.get("tokens", "-")))]
    return cells + [estimate(measured((entry.get("scores") or {}).get(name))) for name in estimates(entries, "scores")]


def _closed(entries: Sequence[Mapping[str, Any]]) -> Part:
    closed = estimates(entries, "gap_closed")
    if not closed:
        return Part(Section("Gap closed", ["Not measured: it needs the sequential score and a circuit."], level=4))
    rows = [
        [Cell(f"{entry['ratio']:g}"), *(estimate(found[i], 1, percent=True) for found in closed.values())]
        for i, entry in enumerate(entries)
    ]
    said = "Of the distance from all tokens at once to one at a time, the share that a circuit makes up."
    return Part(Section("Gap closed", [said], ["masked", *map(named, closed)], rows, level=4))


def _continuations(study: Mapping[str, Any]) -> list[Part]:
    parts = []
    scoring = (study.get("settings") or {}).get("scoring")
    for corpus, found in study["data"].items():
        entries = found["contexts"]
        xs = [float(entry["context"]) for entry in entries]
        title = f"{corpus}: log-likelihood of true continuations by the length of their context"
        charts = _chart(f"continuations-{corpus}", title, "context (tokens)", xs, entries)
        size = f"{found.get('texts', '?')} texts, continued for {found.get('continuation', '?')} tokens."
        before = [size, f"Scored {scoring}."] if scoring else [size]
        names = estimates(entries, "scores")
        rows = [
            [Cell(f"{entry['context']:g}"), *(estimate(each[i]) for each in names.values())]
            for i, entry in enumerate(entries)
        ]
        header = ["context", *map(_scored, names)]
        parts.append(Part(Section(f"{corpus}: true continuations", before, level=3), charts))
        parts.append(Part(Section("Log-likelihood by context", [], header, rows, level=4)))
    return parts


def _cost(study: Mapping[str, Any]) -> list[Part]:
    rows = []
    for row in sorted(study["data"]["rows"], key=lambda each: each.get("steps") or 0):
        overhead = measured(row.get("overhead"))
        rows.append(
            [
                Cell(str(row["way"])),
                Cell(named(str(row.get("circuit")))),
                Cell(str(row.get("steps", "-"))),
                Cell(str(row.get("tokens", "-"))),
                estimate(measured(row["seconds"])),
                NOTHING if overhead is None else estimate(overhead, 1, percent=True, sign=True),
            ]
        )
    told = study.get("settings") or {}
    how = ", ".join(f"{name} {told[name]}" for name in ("batch", "rounds", "warmup", "gen_length") if name in told)
    machine = (study.get("provenance") or {}).get("machine")
    before = [
        "Seconds for one sample at equal numbers of network calls; the overhead is against the network alone in the "
        "same round. Medians, and the quartiles below them.",
        " ".join(filter(None, [f"Measured on {machine}." if machine else "", f"Settings: {how}." if how else ""])),
    ]
    header = ["way", "circuit", "steps", "tokens", "seconds a sample", "overhead"]
    return [Part(Section("Cost at equal steps", [each for each in before if each], header, rows, names=2))]
