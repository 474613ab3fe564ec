"""The folder of an evaluation: what was asked, every sample, the results. All of it JSON, readable years later.

RUN/cells/<slug>/cell.json       what the cell was told
RUN/cells/<slug>/answers.*.jsonl while it runs: what the model wrote, a line a request, of each process
RUN/cells/<slug>/samples.jsonl   when it is done: a line a problem
RUN/cells/<slug>/result.json     and its figures
RUN/cells/<slug>/judged.json     of continued text: what a judge says
RUN/studies/<name>.json          likelihoods, costs
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from codd.errors import FormatError, InvalidInput, shown
from codd.evaluation.statistics import Paired, paired
from codd.evaluation.tasks.cells import NULL, Cell
from codd.files import replacing, write_text
from codd.training import typed
from codd.training.outputs import holds_something
from codd.training.text_files import json_lines, read_json

MARK = "codd-evaluation.json"
"""What makes a folder recognisable."""
FORMAT = 1


@dataclass(frozen=True)
class Sample:
    """What became of one problem."""

    doc_id: int
    prompt: str
    target: str
    text: str
    """What the model wrote, cut at a stop string."""
    tokens: int
    """How many it wrote, up to its end mark."""
    calls: int
    """Network evaluations."""
    seconds: float
    """Its share of the batch that it was in: comparable within a run, not with a batch of one."""
    seed: int
    correct: float | None = None
    """1 or 0 by the task's metric; None where a judge scores the text later."""
    answers: Mapping[str, str] = field(default_factory=dict)
    """What each filter extracted."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Every metric, as "metric,filter"."""


@dataclass(frozen=True)
class Result:
    """A cell that is done."""

    cell: Cell
    metric: str | None
    """By which a sample counts as correct; None for continued text."""
    accuracy: float | None
    metrics: Mapping[str, float]
    """All of the task's, averaged."""
    problems: int
    calls: float
    tokens: float
    """Means over problems."""
    seconds: float
    """The median: the batch in which kernels were compiled does not count."""
    settings: Mapping[str, Any]
    """The prompt's parts, the options in full, stop strings, batch."""
    provenance: Mapping[str, Any]
    folder: Path

    @cached_property
    def samples(self) -> list[Sample]:
        """In the order of the problems."""
        lines = json_lines(self.folder / "samples.jsonl")
        found: list[Sample] = [typed.build(Sample, line, where) for where, line in lines]
        return sorted(found, key=lambda sample: sample.doc_id)

    @cached_property
    def judged(self) -> Mapping[str, Any] | None:
        """What a judge says of the texts, if one was asked."""
        path = self.folder / "judged.json"
        if not path.exists():
            return None
        found: Mapping[str, Any] = read_json(path)
        typed.build(_Judged, found, str(path))
        return found

    @property
    def correct(self) -> list[float]:
        """Of every problem."""
        return [float(sample.correct or 0) for sample in self.samples]


class Run:
    """A folder of cells and studies."""

    def __init__(self, folder: str | os.PathLike[str], *, create: bool = False):
        """Open one; with ``create`` an empty or new folder becomes one."""
        self.folder = Path(folder)
        marked = (self.folder / MARK).is_file()
        if not marked and not create:
            raise FormatError(f"{self.folder}: is no folder of an evaluation (no {MARK}); codd eval --out makes one.")
        if os.path.exists(self.folder) and not self.folder.is_dir():
            raise InvalidInput(f"{self.folder}: is a file; an evaluation needs a folder.")
        if not marked and holds_something(self.folder):
            raise InvalidInput(f"{self.folder}: holds something else; give an empty or new folder, or an evaluation's.")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not marked:
            write_json(self.folder / MARK, {"format": FORMAT})

    def cell_folder(self, cell: Cell) -> Path:
        """Where a cell's files are; another cell never has the same."""
        folder = self.folder / "cells" / cell.slug
        told = folder / "cell.json"
        if not told.exists():
            write_json(told, cell.as_json())
        return folder

    def cells(self) -> list[Cell]:
        """All that were asked for, done or not, in order of their names."""
        paths = sorted((self.folder / "cells").glob("*/cell.json"))
        return [Cell.from_json(_read_object(path), str(path)) for path in paths]

    def result(self, cell: Cell) -> Result | None:
        """Of a cell that is done."""
        path = self.folder / "cells" / cell.slug / "result.json"
        return _read_result(path) if path.exists() else None

    def results(self) -> list[Result]:
        """Of all cells that are done, by task and name."""
        found = [_read_result(path) for path in sorted((self.folder / "cells").glob("*/result.json"))]
        return sorted(found, key=lambda result: (result.cell.task, result.cell.split, result.folder.name))

    def write_result(self, result: Result, samples: Sequence[Sample]) -> None:
        """Samples first, so that a result never stands without them; then the answers are not needed any more."""
        write_lines(result.folder / "samples.jsonl", [asdict(sample) for sample in samples])
        found = {name: value for name, value in vars(result).items() if name not in ("folder", "samples", "judged")}
        write_json(result.folder / "result.json", {**found, "cell": result.cell.as_json()})
        for path in result.folder.glob("answers.*.jsonl"):
            path.unlink()

    def write_study(self, name: str, found: Mapping[str, Any]) -> None:
        """One of the studies."""
        write_json(self.folder / "studies" / f"{name}.json", {"study": name, **found})

    def studies(self) -> dict[str, Any]:
        """All of them, by name."""
        return {path.stem: _read_object(path) for path in sorted((self.folder / "studies").glob("*.json"))}


def control_of(result: Result, results: Sequence[Result]) -> Result | None:
    """The cell with the null circuit under identical settings."""
    wanted = result.cell.with_circuit(NULL)
    found = [other for other in results if other.cell == wanted]
    return found[0] if found and result.cell.circuit != NULL else None


def compared(result: Result, other: Result) -> Paired:
    """The difference of what two cells got right, problem by problem."""
    mine, theirs = ({sample.doc_id: sample for sample in each.samples} for each in (result, other))
    if set(mine) != set(theirs):
        raise InvalidInput(f"{result.cell.slug} and {other.cell.slug} are not about the same problems.")
    return paired(result.correct, other.correct)


class Log:
    """What was answered so far, a line at a time, so that a kill costs one batch."""

    def __init__(self, folder: Path | None, rank: int = 0):
        """Read what earlier processes left; write to a file of our own. Without a folder, only remember."""
        self._found: dict[str, dict[str, Any]] = {}
        self.path = None if folder is None else folder / f"answers.{rank}.jsonl"
        if folder is None or self.path is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("answers.*.jsonl")):
            for where, line in json_lines(path, unfinished=True):
                if not isinstance(line.get("key"), str):
                    raise FormatError(f"{where}: is no answer to a request. Remove the file to ask again.")
                self._found[line["key"]] = line
        _cut_unfinished(self.path)

    def get(self, key: str) -> dict[str, Any] | None:
        """What was answered to a request."""
        return self._found.get(key)

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Each has a "key"; on the disk when this returns."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(line)}\n" for line in lines)
                file.flush()
                os.fsync(file.fileno())
        self._found |= {line["key"]: dict(line) for line in lines}


def _cut_unfinished(path: Path) -> None:
    """A kill may leave half a line; the next one must not be written behind it."""
    if not path.exists():
        return
    found = path.read_bytes()
    if found and not found.endswith(b"\n"):
        with path.open("rb+") as file:
            file.truncate(found.rfind(b"\n") + 1)


class _Stored(NamedTuple):
    """A result as its file has it."""

    cell: Mapping[str, Any]
    metric: str | None
    accuracy: float | None
    metrics: Mapping[str, float]
    problems: int
    calls: float
    tokens: float
    seconds: float
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]


class _TrueText(NamedTuple):
    """How the texts really go on, before the same judge."""

    measures: Mapping[str, Mapping[str, float | None]]
    mauve: float | None = None
    """Of the samples to it."""
    mauve_deviation: float | None = None


class _Judged(NamedTuple):
    """What a judge says, as its file has it."""

    judge: Mapping[str, str]
    nats: Sequence[float]
    tokens: Sequence[int]
    measures: Mapping[str, Mapping[str, float | None]]
    bytes: Sequence[int] = ()
    true: _TrueText | None = None
    mauve: Mapping[str, Any] | None = None


def _read_result(path: Path) -> Result:
    found: _Stored = typed.build(_Stored, read_json(path), str(path))
    return Result(**{**found._asdict(), "cell": Cell.from_json(found.cell, str(path))}, folder=path.parent)


def _read_object(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise FormatError(f"{path}: expected a JSON object, found {shown(found)}.")
    return found


def write_json(path: Path, value: object) -> None:
    """A file that is whole or not there."""
    with replacing(path.parent, path.name) as (temporary,):
        write_text(temporary, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_lines(path: Path, values: Sequence[object]) -> None:
    """The same, a line each."""
    with replacing(path.parent, path.name) as (temporary,):
        write_text(temporary, "".join(json.dumps(value) + "\n" for value in values))
