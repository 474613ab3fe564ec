"""The end of a report: what was written, and where every figure comes from."""

from collections.abc import Mapping, Sequence
from typing import Any

from codd.evaluation.page import Cell, Section
from codd.evaluation.report.findings import Comparison
from codd.evaluation.report.parts import Part, flat
from codd.evaluation.report.ways import (
    by_task,
    shared,
    varying,
    way,
)
from codd.evaluation.runs import Result, Sample
from codd.evaluation.tasks.cells import NONE, NULL

LONGEST = 2500
"""Characters of a text that are shown."""


def sample_parts(results: Sequence[Result], comparisons: Sequence[Comparison], count: int) -> list[Part]:
    """What each way wrote on some problems of every task, chosen by rule."""
    parts = []
    for task, own in by_task(results).items():
        pairs = [each for each in comparisons if each.result.cell.task == task]
        if not pairs or count < 1:
            continue
        pair = min(
            pairs, key=lambda each: (1.0 if each.p is None else each.p, each.result.calls, each.result.folder.name)
        )
        ways = _beside(pair, own)
        for number in differing(pair, count):
            parts.append(Part(_sample(task, number, ways, varying(each.cell for each in own))))
    head = Section(
        "Samples side by side",
        [
            f"Of each task the first {count} problems, in the order of the task, on which circuit and null circuit "
            "differ (one right and one wrong; for continued text, any difference), in the comparison with the smallest "
            "p value. Where fewer differ, the first problems follow. Characters that cannot be shown are written as "
            "escapes."
        ],
    )
    return [Part(head), *parts] if parts else []


def differing(pair: Comparison, count: int) -> list[int]:
    """The problems that are shown: those that differ first, then the others, in order."""
    theirs = {sample.doc_id: sample for sample in pair.control.samples}
    both = [(each, theirs[each.doc_id]) for each in pair.result.samples if each.doc_id in theirs]

    def same(one: Sample, other: Sample) -> bool:
        return one.correct == other.correct if one.correct is not None else one.text == other.text

    ordered = sorted(both, key=lambda two: (same(*two), two[0].doc_id))
    return [one.doc_id for one, _ in ordered[:count]]


def _beside(pair: Comparison, own: Sequence[Result]) -> list[Result]:
    """The compared two, other circuits under the same settings, and the network alone at the same pace."""
    family, cell = pair.control.cell, pair.result.cell
    return [
        each
        for each in own
        if each.cell.with_circuit(NULL) == family
        or (each.cell.circuit == NONE and each.cell.pace == cell.pace and shared(each.cell) == shared(cell))
    ]


def _sample(task: str, number: int, ways: Sequence[Result], names: Sequence[str]) -> Section:
    rows, first = [], None
    for result in ways:
        sample = next((each for each in result.samples if each.doc_id == number), None)
        if sample is None:
            continue
        first = first or sample
        rows.append([Cell(way(result.cell, names), below=[_cost(sample)]), _written(sample)])
    prompt, target = (cut(first.prompt), cut(first.target)) if first else ("", "")
    rows = [[Cell("prompt"), Cell(prompt)], [Cell("target"), Cell(target)], *rows]
    return Section(f"{task}, problem {number}", [], ["", "text"], rows, prose=True, level=3)


def _cost(sample: Sample) -> Cell:
    return Cell(f"{sample.calls} calls, {sample.tokens} tokens, {sample.seconds:.2f} s", "faint")


def _written(sample: Sample) -> Cell:
    if sample.correct is None:
        return Cell(cut(sample.text))
    answers = ", ".join(f"{name}: {answer}" for name, answer in sample.answers.items())
    mark = ("right" if sample.correct else "wrong") + (f" ({cut(answers, 300)})" if answers else "")
    return Cell(cut(sample.text), below=[Cell(mark, "good" if sample.correct else "bad")])


def cut(text: str, longest: int = LONGEST) -> str:
    """The beginning of a long text, which says how much is left out."""
    return text if len(text) <= longest else f"{text[:longest]} [... {len(text) - longest} more characters]"


def provenance_parts(results: Sequence[Result], studies: Mapping[str, Any]) -> list[Part]:
    """All that was stored about how the figures came to be: what is common once, what differs for each."""
    cells = {
        each.folder.name: flat({"cell": each.cell.as_json(), "settings": each.settings, **each.provenance})
        for each in results
    }
    told = {
        name: flat({key: study.get(key) for key in ("settings", "provenance") if study.get(key) is not None})
        for name, study in studies.items()
        if isinstance(study, Mapping)
    }
    parts = [*_listing("cells", cells), *_listing("studies", told)]
    head = Section(
        "Settings and provenance", ["Machine, precision, versions, revision, command, seeds and all options."]
    )
    return [Part(head), *parts] if parts else []


def _listing(what: str, entries: Mapping[str, Mapping[str, str]]) -> list[Part]:
    if not entries:
        return []
    everywhere = _common(list(entries.values()))
    rows = [[Cell(name), Cell(value)] for name, value in everywhere.items()]
    parts = [Part(Section(f"Common to all {len(entries)} {what}", [], ["name", "value"], rows, prose=True, level=3))]
    own = [
        [Cell(name), Cell("\n".join(f"{key}: {value}" for key, value in told.items() if key not in everywhere))]
        for name, told in entries.items()
    ]
    if any(row[1].text for row in own):
        title = f"What differs between {what}"
        parts.append(Part(Section(title, [], ["name", "settings"], own, prose=True, level=3)))
    return parts


def _common(entries: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {name: value for name, value in entries[0].items() if all(each.get(name) == value for each in entries)}
