"""The figures of a run as lines of JSON, one for each step that is logged."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from codd import files
from codd.errors import FormatError, shown
from codd.training import text_files, typed

METRICS = "metrics.jsonl"


class Progress(NamedTuple):
    """What the loop tells about a step."""

    step: int
    metrics: dict[str, float]
    """Empty for a step that is not logged."""


class Log:
    """Writes them; a run that goes on drops the lines that it will write again."""

    def __init__(self, out: Path, step: int):
        """``step`` is the one that the run goes on from."""
        self.path = out / METRICS
        kept = [line for line in read_metrics(self.path) if line["step"] <= step] if self.path.exists() else []
        with files.replacing(out, METRICS) as (temporary,):
            files.write_text(temporary, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append one line."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")


def read_metrics(path: Path) -> Iterator[dict[str, float | int]]:
    """The figures of each line, its step among them; half a line at the end is what a killed run was writing."""
    for where, line in text_files.json_lines(path, unfinished=True):
        for name, value in line.items():
            if type(value) not in (int, float) or (type(value) is int and abs(value) >= typed.LARGEST):
                raise FormatError(f"{where}: {name[:100]!r} is {shown(value)}, which is no number of a run.")
        if "step" not in line:
            raise FormatError(f"{where}: is not an object with a step.")
        yield line
