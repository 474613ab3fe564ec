"""The folder of an evaluation: configurations, every sample, the results. All of it JSON, readable years later.

RUN/cells/<slug>/cell.json       one configuration (`EvalConfig`); files of format 1 call it a cell
RUN/cells/<slug>/answers.*.jsonl while it runs: the answers so far, a line per request, a file per process
RUN/cells/<slug>/samples.jsonl   when it is done: a line per problem
RUN/cells/<slug>/result.json     when it is done: accuracy and cost
RUN/cells/<slug>/judged.json     of continued text: the scores of a judge
RUN/studies/<name>.json          likelihoods, costs
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from codd import validation
from codd.data.text_files import json_lines
from codd.errors import FormatError, InvalidInput
from codd.evaluation.statistics import Paired, paired
from codd.files import read_json, read_json_object, replacing, write_text
from codd.folders import check_own
from codd.validation import Section, Whole
from codd_lab.tasks.configs import NULL, EvalConfig

MARK = "codd-evaluation.json"
"""The file that marks the folder of an evaluation."""
FORMAT = 1
CONFIGS, CONFIG = "cells", "cell.json"
"""Names on the disk, which stay those of format 1."""


@dataclass(frozen=True)
class Sample(Section):
    """One problem, the answer to it, and its cost."""

    doc_id: Whole
    prompt: str
    target: str
    text: str
    """The answer, cut at the first stop string."""
    tokens: Whole
    """Tokens of the answer, end marks not counted."""
    calls: Whole
    """Network evaluations."""
    seconds: float
    """Its share of the batch that it was in: comparable within a run, not with a batch of one."""
    seed: Whole
    correct: float | None = None
    """1 or 0 by the task's metric; None where a judge scores the text later."""
    answers: Mapping[str, str] = field(default_factory=dict)
    """What each filter extracted."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Every metric, as "metric,filter"."""


class Scored(NamedTuple):
    """The samples of a configuration, and what they are scored by."""

    metric: str | None
    """The metric that decides whether a sample is correct; None for continued text."""
    metrics: Mapping[str, float]
    """The mean of every metric of the task."""
    samples: list[Sample]


@dataclass(frozen=True)
class Figures(Section):
    """The fields of result.json beside the configuration."""

    metric: str | None
    """The metric that decides whether a sample is correct, as "metric,filter"; None for continued text."""
    accuracy: float | None
    metrics: Mapping[str, float]
    """The mean of every metric of the task."""
    problems: Whole
    calls: float
    tokens: float
    """Network evaluations and tokens per problem, means over problems."""
    seconds: float
    """Seconds per problem: the median, so that the batch in which kernels were compiled does not count."""
    settings: Mapping[str, Any]
    """The prompt's parts, the options in full, stop strings, batch."""
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class Result(Figures):
    """The figures of a configuration that is done."""

    config: EvalConfig
    folder: Path

    @cached_property
    def samples(self) -> list[Sample]:
        """The samples in the order of the problems."""
        lines = json_lines(self.folder / "samples.jsonl")
        samples: list[Sample] = [validation.build(Sample, line, where) for where, line in lines]
        return sorted(samples, key=lambda sample: sample.doc_id)

    @cached_property
    def judged(self) -> Mapping[str, Any] | None:
        """The scores of a judge; None if there was none yet."""
        path = self.folder / "judged.json"
        if not path.exists():
            return None
        judged: Mapping[str, Any] = read_json(path)
        validation.build(_Judged, judged, str(path))
        return judged

    @property
    def correct(self) -> list[float]:
        """The score of every problem: 1 is right, 0 is wrong."""
        return [float(sample.correct or 0) for sample in self.samples]


class Run:
    """A run folder: configurations, their results, and studies."""

    def __init__(self, folder: str | os.PathLike[str], *, create: bool = False):
        """Open a run folder; ``create`` makes one of a new or empty folder. FormatError if it is none."""
        self.folder = Path(folder)
        marked = (self.folder / MARK).is_file()
        if not marked and not create:
            raise FormatError(f"{self.folder}: is no folder of an evaluation (no {MARK}); codd eval --out makes one.")
        check_own(self.folder, MARK, "an evaluation")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not marked:
            write_json(self.folder / MARK, {"format": FORMAT})

    def config_folder(self, config: EvalConfig) -> Path:
        """The folder of a configuration, made if it is not there; no two configurations share one."""
        folder = self.folder / CONFIGS / config.slug
        path = folder / CONFIG
        if not path.exists():
            write_json(path, config.as_json())
        return folder

    def configs(self) -> list[EvalConfig]:
        """All configurations of the run, done or not, by folder name."""
        paths = sorted((self.folder / CONFIGS).glob(f"*/{CONFIG}"))
        return [EvalConfig.from_json(read_json_object(path), str(path)) for path in paths]

    def result(self, config: EvalConfig) -> Result | None:
        """The result of a configuration; None if it is not done."""
        path = self.folder / CONFIGS / config.slug / "result.json"
        return _read_result(path) if path.exists() else None

    def results(self) -> list[Result]:
        """The results of all configurations that are done, by task, split and folder name."""
        results = [_read_result(path) for path in (self.folder / CONFIGS).glob("*/result.json")]
        return sorted(results, key=lambda result: (result.config.task, result.config.split, result.folder.name))

    def write_result(self, result: Result, samples: Sequence[Sample]) -> None:
        """Write samples, then the result, so that a result never lacks its samples; then delete the log of answers."""
        write_lines(result.folder / "samples.jsonl", [asdict(sample) for sample in samples])
        figures = {each.name: getattr(result, each.name) for each in fields(Figures)}
        write_json(result.folder / "result.json", {**figures, "cell": result.config.as_json()})
        for path in result.folder.glob("answers.*.jsonl"):
            path.unlink()

    def write_study(self, name: str, figures: Mapping[str, Any]) -> None:
        """Write what a study measured."""
        write_json(self.folder / "studies" / f"{name}.json", {"study": name, **figures})

    def studies(self) -> dict[str, Any]:
        """What all studies measured, by name."""
        return {path.stem: read_json_object(path) for path in sorted((self.folder / "studies").glob("*.json"))}


def control_of(result: Result, results: Sequence[Result]) -> Result | None:
    """The result of the null circuit under identical settings; None if there is none, or if this is it."""
    wanted = result.config.with_circuit(NULL)
    if result.config.circuit == NULL:
        return None
    return next((other for other in results if other.config == wanted), None)


def compared(result: Result, other: Result) -> Paired:
    """The difference in accuracy of two configurations, paired by problem; InvalidInput if the problems differ."""
    mine, theirs = ({sample.doc_id: sample for sample in each.samples} for each in (result, other))
    if set(mine) != set(theirs):
        raise InvalidInput(f"{result.config.slug} and {other.config.slug} are not about the same problems.")
    return paired(result.correct, other.correct)


class Log:
    """The answers so far, written line by line, so that a kill costs one batch."""

    def __init__(self, folder: Path, rank: int = 0):
        """Read the answers of all earlier processes; new ones go to this rank's file."""
        self._answers: dict[str, dict[str, Any]] = {}
        self.path = folder / f"answers.{rank}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("answers.*.jsonl")):
            for where, line in json_lines(path, unfinished=True):
                if not isinstance(line.get("key"), str):
                    raise FormatError(f"{where}: is no answer to a request. Remove the file to ask again.")
                self._answers[line["key"]] = line
        _cut_unfinished(self.path)

    def get(self, key: str) -> dict[str, Any] | None:
        """The answer to a request; None if there is none yet."""
        return self._answers.get(key)

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add answers, each with its "key"; they are on the disk when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        self._answers |= {line["key"]: dict(line) for line in lines}


def _cut_unfinished(path: Path) -> None:
    """Drop the half line that a kill may leave, so that the next one does not continue it."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("rb+") as file:
            file.truncate(content.rfind(b"\n") + 1)


class _TrueText(NamedTuple):
    """The same judge's scores of the true continuations."""

    measures: Mapping[str, Mapping[str, float | None]]
    mauve: float | None = None
    """MAUVE of the samples against the true continuations."""
    mauve_deviation: float | None = None


class _Judged(NamedTuple):
    """The fields of judged.json."""

    judge: Mapping[str, str]
    nats: Sequence[float]
    tokens: Sequence[Whole]
    measures: Mapping[str, Mapping[str, float | None]]
    bytes: Sequence[Whole] = ()
    true: _TrueText | None = None
    mauve: Mapping[str, Any] | None = None


def _read_result(path: Path) -> Result:
    stored = read_json_object(path)
    config = EvalConfig.from_json(stored.pop("cell", None), str(path))
    figures: Figures = validation.build(Figures, stored, str(path))
    return Result(**vars(figures), config=config, folder=path.parent)


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON; the file is whole or not there."""
    with replacing(path.parent, path.name) as (temporary,):
        write_text(temporary, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_lines(path: Path, values: Sequence[object]) -> None:
    """Write values as JSON lines; the file is whole or not there."""
    with replacing(path.parent, path.name) as (temporary,):
        write_text(temporary, "".join(json.dumps(value) + "\n" for value in values))
