"""The cells of a run as sections of its report: right answers, continued text."""

from collections.abc import Mapping, Sequence

from codd.evaluation.page import Cell, Section
from codd.evaluation.report.findings import GAIN, LOSS, WEAK_GAIN, WEAK_LOSS, Comparison, chance_of
from codd.evaluation.report.parts import NOTHING, Part, estimate, number, scaled
from codd.evaluation.report.ways import (
    ACCURACY,
    MAUVE,
    TRUE_MAUVE,
    Estimate,
    Quality,
    by_task,
    measured,
    named,
    pace,
    sampler,
    settings,
    varying,
)
from codd.evaluation.runs import Result
from codd.evaluation.text.measures import MEANINGS

MEASURES = ("ppl", "nll", "rep_2", "rep_4", "distinct_2", "diversity")
TITLES = {
    "ppl": "PPL",
    "nll": "NLL",
    "rep_2": "Rep-2, %",
    "rep_4": "Rep-4, %",
    "distinct_2": "distinct-2, %",
    "diversity": "diversity, %",
}
DISTANCES = {MAUVE: "MAUVE to one token a step", TRUE_MAUVE: "MAUVE to true text"}
TONES = {GAIN: "good", LOSS: "bad"}
WORDS = {
    GAIN: "survives the control",
    LOSS: "worse than the control",
    WEAK_GAIN: "chance, counting all",
    WEAK_LOSS: "chance, counting all",
}

Found = Mapping[str, Comparison]
"""Comparisons by the name of the cell's folder."""


def task_parts(results: Sequence[Result], found: Found) -> list[Part]:
    """A table of right answers for each task."""
    judged = {task: own for task, own in by_task(results).items() if any(map(ACCURACY.of, own))}
    if not judged:
        return []
    head = Section(
        "Right answers",
        [
            "Below each share is its Wilson interval (95%). The difference is to the null circuit under identical "
            "settings on the same problems, with a bootstrap interval over problems and McNemar's exact test; behind "
            "the p value that after Holm's correction for all comparisons of this run. Gained and lost: problems that "
            "only this way, or only the null circuit, solved. Seconds are a sample's share of its batch."
        ],
    )
    return [Part(head), *(Part(_task(task, own, found)) for task, own in judged.items())]


def _task(task: str, results: Sequence[Result], found: Found) -> Section:
    names = varying(result.cell for result in results)
    header = ["circuit", "sampler", "pace", *(["settings"] if names else [])]
    header += ["right, %", "against null, points", "gained / lost", "calls", "tokens", "seconds"]
    rows = []
    for result in results:
        cell, pair = result.cell, found.get(result.folder.name)
        lead = [named(cell.circuit), sampler(cell) or "-", pace(cell)]
        rows.append(
            [
                *map(Cell, [*lead, *([settings(cell, names) or "-"] if names else [])]),
                estimate(ACCURACY.of(result), 1),
                difference(pair, 1),
                NOTHING if pair is None or pair.gained is None else Cell(f"{pair.gained} / {pair.lost}"),
                Cell(number(result.calls, 1)),
                Cell(number(result.tokens, 1)),
                Cell(number(result.seconds, 2)),
            ]
        )
    problems = sorted({result.problems for result in results})
    metric = " or ".join(sorted({result.metric or "-" for result in results}))
    return Section(
        task,
        [f"{' or '.join(map(str, problems))} problems, right by {metric}."],
        header,
        rows,
        level=3,
        names=header.index("right, %"),
    )


def difference(pair: Comparison | None, digits: int) -> Cell:
    """To the control: figure, interval, p values, and the verdict in words as well as in colour."""
    if pair is None:
        return NOTHING
    below = [Cell(f"{number(pair.low, digits, sign=True)} to {number(pair.high, digits, sign=True)}", "faint")]
    if pair.p is not None:
        held = "" if pair.adjusted is None else f", Holm {chance_of(pair.adjusted).removeprefix('p ')}"
        below.append(Cell(chance_of(pair.p) + held, "faint"))
    tone = TONES.get(pair.verdict, "plain")
    below += [Cell(WORDS[pair.verdict], tone)] if pair.verdict in WORDS else []
    return Cell(number(pair.difference, digits, sign=True), tone, below)


def text_parts(results: Sequence[Result], found: Found) -> list[Part]:
    """Continued text by what a judge says of it, and by how much it repeats itself."""
    judged = {task: [each for each in own if each.judged] for task, own in by_task(results).items()}
    judged = {task: own for task, own in judged.items() if own}
    if not judged:
        return []
    meanings = "; ".join(f"{TITLES[name].removesuffix(', %')}: {MEANINGS.get(name, '')}" for name in MEASURES)
    head = Section(
        "Continued text",
        [
            f"{meanings}. MAUVE: distance to the model's own samples of one token a step in the same order, and below "
            "it what a second such sample reaches (the ceiling); and distance to how the texts really go on, of which "
            "the last row is. An NLL below that of true text is no virtue. Intervals are of 95%, by bootstrap over "
            "texts; p by exchanging the two texts of a prefix by chance."
        ],
    )
    return [Part(head), *(Part(_texts(task, own, found)) for task, own in judged.items())]


def _texts(task: str, results: Sequence[Result], found: Found) -> Section:
    names = varying(result.cell for result in results)
    distances = {quality: title for quality, title in DISTANCES.items() if any(map(quality.of, results))}
    header = ["circuit", "sampler", "pace", *(["settings"] if names else []), *(TITLES[name] for name in MEASURES)]
    header += ["NLL against null", *distances.values(), "calls", "seconds"]
    rows = []
    for result in results:
        cell, said = result.cell, result.judged or {}
        lead = [named(cell.circuit), sampler(cell) or "-", pace(cell)]
        figures = said.get("measures") or {}
        rows.append(
            [
                *map(Cell, [*lead, *([settings(cell, names) or "-"] if names else [])]),
                *(_measure(name, measured(figures.get(name))) for name in MEASURES),
                difference(found.get(result.folder.name), 3),
                *(_mauve(result, quality) for quality in distances),
                Cell(number(result.calls, 1)),
                Cell(number(result.seconds, 2)),
            ]
        )
    true = next((true["measures"] for each in results if (true := (each.judged or {}).get("true"))), None)
    if true is not None:
        own = {TITLES[name]: _measure(name, measured(true.get(name))) for name in MEASURES}
        rows.append([Cell("true text"), *(own.get(title, NOTHING) for title in header[1:])])
    judges = dict.fromkeys(_judge(result) for result in results)
    texts = " or ".join(map(str, sorted({result.problems for result in results})))
    about = f"{texts} texts. Judge: {'; '.join(judges)}."
    return Section(task, [about], header, rows, level=3, names=header.index(TITLES[MEASURES[0]]))


def _measure(name: str, found: Estimate | None) -> Cell:
    """Shares in per cent, as is customary; their unit stands in the header."""
    if found is None or name in ("ppl", "nll"):
        return estimate(found, 1 if name == "ppl" else 3)
    return estimate(scaled(found), 1)


def _judge(result: Result) -> str:
    judge = (result.judged or {}).get("judge") or {}
    return ": ".join(filter(None, [judge.get("name"), judge.get("description")])) or "not named"


def _mauve(result: Result, quality: Quality) -> Cell:
    found, said = quality.of(result), ((result.judged or {}).get("mauve") or {})
    if found is None:
        return NOTHING
    ceiling = said.get("ceiling") if quality is MAUVE else None
    below = [] if ceiling is None else [Cell(f"of {number(ceiling)}", "faint")]
    return Cell(number(found.value), below=below)
