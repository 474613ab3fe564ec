"""A run as one page: what it says, tables, figures, samples, and where everything comes from."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from codd import files
from codd.errors import CoddError, FormatError
from codd.evaluation.page import Section, page
from codd.evaluation.report import figures
from codd.evaluation.report.ablation import ablation_parts
from codd.evaluation.report.details import provenance_parts, sample_parts
from codd.evaluation.report.figures import Chart
from codd.evaluation.report.findings import Comparison, against_control, comparisons, few, finding, unpaired
from codd.evaluation.report.frontier import Saving
from codd.evaluation.report.frontier_parts import frontier_parts
from codd.evaluation.report.parts import Part
from codd.evaluation.report.studies import CONTINUATIONS, COST, GAP, cost_parts, likelihood_parts, other_parts
from codd.evaluation.report.tables import task_parts, text_parts
from codd.evaluation.report.ways import ACCURACY, NLL, plain
from codd.evaluation.runs import Result, Run
from codd.evaluation.tasks.cells import CONTROLS, Cell

VALIDATION = "validation"
SAMPLES = 4
PAGE, PICTURES, NOTES = "report.html", "figures", "notes.txt"


@dataclass(frozen=True)
class Report:
    """What there is to say about a run."""

    title: str
    findings: Sequence[str]
    """In sentences: all of it first, then each task and circuit."""
    comparisons: Sequence[Comparison]
    savings: Sequence[Saving]
    missing: Sequence[str]
    """What the run does not hold, or what could not be read."""
    parts: Sequence[Part]

    @property
    def charts(self) -> list[Chart]:
        """All of them, in order."""
        return [chart for part in self.parts for chart in part.charts]

    def as_json(self) -> dict[str, Any]:
        """The findings, for programs."""
        return {
            "finding": " ".join(self.findings),
            "comparisons": [each.as_json() for each in self.comparisons],
            "calls_saved": [each.as_json() for each in self.savings],
            "missing": list(self.missing),
        }


def make_report(run: Run, samples: int = SAMPLES) -> Report:
    """Read a run and put it into words; ``samples`` problems of each task are shown."""
    stored, notes = _readable(run)
    results = _distinct(stored)
    studies = run.studies()
    with _naming(run.folder / "studies"):
        figures_of = [likelihood_parts(studies), cost_parts(studies), other_parts(studies)]
    tests = [each for each in results if each.cell.split != VALIDATION]
    validation = [each for each in results if each.cell.split == VALIDATION]
    found = comparisons(tests)
    alone = [against_control(result, tests) for result in tests if result.cell.circuit in CONTROLS]
    pairs = {each.result.folder.name: each for each in [*alone, *found] if each is not None}
    frontier, saved = frontier_parts(tests)
    missing = [*notes, *unpaired(tests, found), *_missing(tests, validation, studies)]
    gaps = [f"Not in this report: {' '.join(missing)}"] if missing else []
    sentences = finding(found)
    parts = [
        Part(_summary(sentences, [*_written(run), *gaps])),
        *task_parts(tests, pairs),
        *frontier,
        *figures_of[0],
        *text_parts(tests, pairs),
        *figures_of[1],
        *ablation_parts(validation, tests, pairs),
        *figures_of[2],
        *sample_parts(tests, found, samples),
        *provenance_parts(stored, studies),
    ]
    title = f"Evaluation: {run.folder.resolve().name}"
    return Report(title, sentences, found, saved, missing, parts)


@contextmanager
def _naming(where: Path) -> Iterator[None]:
    """Studies have forms of their own, which nobody has checked: whatever goes wrong is the file's fault."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise FormatError(
            f"{where}: a file holds other figures than a study of codd eval writes ({files.brief(error)}). Remove it."
        ) from error


def _readable(run: Run) -> tuple[list[Result], list[str]]:
    """Cells with problems whose samples can be read, and what is wrong with the others."""
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
    open_ = [folder.name for folder in begun if not (folder / "result.json").exists()]
    return kept, notes + ([f"Not finished: {few(open_)}."] if open_ else [])


def _distinct(results: Sequence[Result]) -> list[Result]:
    """Each way once: of cells that were told the same, in more or fewer words, the one with the fewest."""
    found: dict[Cell, Result] = {}
    for result in sorted(results, key=lambda each: len(each.cell.options)):
        cell = plain(result.cell)
        found.setdefault(cell, replace(result, cell=cell))
    return list(found.values())


def _missing(tests: Sequence[Result], validation: Sequence[Result], studies: dict[str, Any]) -> list[str]:
    checks = {
        "no task with right and wrong answers": any(map(ACCURACY.of, tests)),
        "no continued text with a judge's figures": any(map(NLL.of, tests)),
        "no likelihood by mask ratio (study gap)": GAP in studies,
        "no likelihood of continuations (study continuations)": CONTINUATIONS in studies,
        "no seconds at equal steps (study cost)": COST in studies,
        "no ablation (cells of the validation split)": bool(validation),
    }
    return [f"This run has {name}." for name, there in checks.items() if not there]


def _written(run: Run) -> list[str]:
    """What whoever made the run wants its readers to know: the paragraphs of notes.txt."""
    path = run.folder / NOTES
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [f"Note: {' '.join(part.split())}" for part in text.split("\n\n") if part.strip()]


def _summary(sentences: Sequence[str], after: Sequence[str]) -> Section:
    method = (
        "How to read this: the null circuit is the control. It goes through the same code with the same temperature, "
        "order, precision and seeds, and changes nothing by itself; only what a circuit gains over it is its own."
    )
    return Section("What this run says", [*sentences, method, *after])


def render(report: Report, advance: Callable[[int], None] = lambda count: None) -> str:
    """The page, with its figures drawn into it; ``advance`` is told of each."""
    sections = []
    for part in report.parts:
        drawn = []
        for chart in part.charts:
            drawn.append(figures.svg(chart))
            advance(1)
        sections.append(replace(part.section, figure="\n".join([part.section.figure, *drawn]).strip()))
    return page(report.title, sections, contents=True)


def write_pictures(report: Report, folder: Path, advance: Callable[[int], None] = lambda count: None) -> list[Path]:
    """Every chart as a PNG; where they are."""
    paths = []
    for chart in report.charts:
        paths.append(folder / f"{file_name(chart.name)}.png")
        figures.write_png(chart, paths[-1])
        advance(1)
    return paths


def file_name(name: str) -> str:
    """Of a chart: letters, digits, dashes, no more than every file system takes."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:60]


def write_page(text: str, path: Path) -> None:
    """A page that is whole or not there."""
    with files.replacing(path.parent, path.name) as (temporary,):
        files.write_text(temporary, text)
