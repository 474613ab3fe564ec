"""A run as one HTML page: what it says, tables, figures, samples, and where everything comes from."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from codd import files
from codd.coupling.gap import NO_GAP
from codd.errors import CoddError
from codd_lab.report import figures, labels, quality, tables
from codd_lab.report.comparisons import Comparison, against_control, comparisons, few, findings, unpaired
from codd_lab.report.figures import Chart
from codd_lab.report.frontier import Saving, frontiers
from codd_lab.report.page import template
from codd_lab.report.tables import CONTINUATIONS, COST, GAP, Likelihood
from codd_lab.runs import Result, Run
from codd_lab.tasks.configs import CONTROLS
from codd_lab.tasks.tuning import TUNED
from codd_lab.text.measures import MEANINGS

VALIDATION = "validation"
SAMPLES = 4
PAGE, PICTURES, NOTES = "report.html", "figures", "notes.txt"


class Section(NamedTuple):
    """A part of the page: its title, the template that shows it, and what that is given as ``data``."""

    title: str
    template: str
    data: Any


@dataclass(frozen=True)
class Report:
    """All figures of a run that its page shows."""

    title: str
    findings: Sequence[str]
    """In sentences: a summary, then each task and circuit."""
    comparisons: Sequence[Comparison]
    savings: Sequence[Saving]
    missing: Sequence[str]
    """What the run does not hold, or what could not be read."""
    sections: Sequence[Section]
    charts: Sequence[Chart]
    """All charts of the sections."""
    pairs: Mapping[str, Comparison]
    """Comparisons with the null circuit by the name of the result's folder, those of the network alone among them."""

    def as_json(self) -> dict[str, Any]:
        """The findings and the figures behind them, for ``--json``."""
        return {
            "finding": " ".join(self.findings),
            "comparisons": [pair.as_json() for pair in self.comparisons],
            "calls_saved": [saving._asdict() for saving in self.savings],
            "missing": list(self.missing),
        }


def make_report(run: Run, samples: int = SAMPLES) -> Report:
    """Compute all figures of a run; ``samples`` problems of each task are shown. What cannot be read is named."""
    results, notes = _readable(run)
    studies = run.studies()
    likelihood, cost, others = _studies(studies)
    tests = [each for each in results if each.config.split != VALIDATION]
    validation = [each for each in results if each.config.split == VALIDATION]
    compared = comparisons(tests)
    alone = [against_control(result, tests) for result in tests if result.config.circuit in CONTROLS]
    missing = [*notes, *unpaired(tests, compared), *_missing(tests, validation, studies)]
    sentences, frontier, tasks = findings(compared), frontiers(tests), labels.by_task(tests)
    answered = {task: own for task, own in tasks.items() if any(map(quality.ACCURACY.of, own))}
    problems = tables.sample_tables(tests, compared, samples)
    summary = {"findings": sentences, "notes": _notes(run), "missing": missing}
    sections = [
        Section("What this run says", "summary", summary),
        Section("Right answers", "answers", answered),
        Section("Parallelism", "parallelism", tables.parallelism(answered)),
        Section("Prompt templates", "prompt_templates", tables.over_templates(tests)),
        Section("The frontier: quality against cost", "frontier", frontier),
        Section("Likelihood", "likelihood", likelihood),
        Section("Continued text", "texts", labels.by_task(result for result in tests if result.judged)),
        Section("Cost at equal steps", "cost", cost),
        Section("Ablation: activation and circuit temperature", "ablation", tables.ablations(validation, tests)),
        *others,
        Section("Samples side by side", "samples", {"count": samples, "problems": problems} if problems else {}),
        Section("Settings and provenance", "provenance", tables.provenance(results, studies)),
    ]
    return Report(
        title=f"Evaluation: {run.folder.resolve().name}",
        findings=sentences,
        comparisons=compared,
        savings=[saving for each in frontier for saving in each.savings],
        missing=missing,
        sections=[section for section in sections if section.data],
        charts=list(chain(*(each.charts for each in frontier), *(each.charts for each in likelihood))),
        pairs={pair.result.folder.name: pair for pair in [*alone, *compared] if pair is not None},
    )


def _studies(studies: Mapping[str, Any]) -> tuple[list[Likelihood], dict[str, Any], list[Section]]:
    """Likelihoods, cost, and a section for each study that is unknown or not stored as expected."""
    likelihood: list[Likelihood] = []
    cost: dict[str, Any] = {}
    others = []
    for name in sorted(studies, key=lambda name: (name != GAP, name)):
        why = "This report knows no study of this name; here is what was stored."
        try:
            if name in (GAP, CONTINUATIONS):
                likelihood += tables.likelihoods(name, studies[name])
                continue
            if name == COST:
                cost = tables.costs(studies[name])
                continue
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            why = f"This study is not stored as expected ({type(error).__name__}: {error}); here is all of it."
        others.append(_stored(name, studies[name], why))
    return likelihood, cost, others


def _stored(name: str, study: Mapping[str, Any], why: str) -> Section:
    settings = {key: value for key, value in tables.flat(study.get("settings") or {}).items() if key}
    text = json.dumps(study.get("data", study), indent=1, ensure_ascii=False)
    return Section(f"Study: {name}", "study", {"why": why, "settings": settings, "text": text})


def _readable(run: Run) -> tuple[list[Result], list[str]]:
    """Results with problems whose samples can be read, and a note on each of the others."""
    kept, notes = [], []
    for result in run.results():
        try:
            count = len(result.samples)
            _ = result.judged
        except (OSError, TypeError, CoddError) as error:
            notes.append(f"{result.folder.name}: left out, its samples cannot be read ({files.brief(error)}).")
            continue
        if count:
            kept.append(result)
        else:
            notes.append(f"{result.folder.name}: left out, it has no problems.")
    begun = sorted(path.parent for path in (run.folder / "cells").glob("*/cell.json"))
    unfinished = [folder.name for folder in begun if not (folder / "result.json").exists()]
    return kept, notes + ([f"Not finished: {few(unfinished)}."] if unfinished else [])


def _missing(tests: Sequence[Result], validation: Sequence[Result], studies: Mapping[str, Any]) -> list[str]:
    checks = {
        "no task with right and wrong answers": any(map(quality.ACCURACY.of, tests)),
        "no continued text with a judge's figures": any(map(quality.NLL.of, tests)),
        "no likelihood by mask ratio (study gap)": GAP in studies,
        "no likelihood of continuations (study continuations)": CONTINUATIONS in studies,
        "no seconds at equal steps (study cost)": COST in studies,
        "no ablation (cells of the validation split)": bool(validation),
    }
    return [f"This run has {name}." for name, there in checks.items() if not there]


def _notes(run: Run) -> list[str]:
    """The paragraphs of notes.txt, a file that the maker of a run may add for its readers."""
    path = run.folder / NOTES
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def render(report: Report, advance: Callable[[int], None] = lambda count: None) -> str:
    """The page, with its figures drawn into it; ``advance`` is called with 1 after each."""

    def draw(chart: Chart) -> list[Markup]:
        panels = figures.svg(chart)
        advance(1)
        return panels

    return template("report.html").render(
        vars(report), draw=draw, labels=labels, qualities=quality, meanings=MEANINGS, no_gap=NO_GAP, tuned=TUNED
    )


def write_pictures(report: Report, folder: Path, advance: Callable[[int], None] = lambda count: None) -> list[Path]:
    """Write every chart as a PNG file; returns their paths."""
    paths = []
    for chart in report.charts:
        name = "".join(c if c.isalnum() or c in "-_." else "_" for c in chart.name)[:60]
        paths.append(folder / f"{name}.png")
        figures.write_png(chart, paths[-1])
        advance(1)
    return paths


def write_page(text: str, path: Path) -> None:
    """Write a page; the file appears whole or not at all."""
    with files.replacing(path.parent, path.name) as (temporary,):
        files.write_text(temporary, text)
