"""Records of data: objects of JSON files, rows of parquet files and of datasets on the hub, one after the other.

Files may be anyone's. What is in memory at a time is one line or object of JSON, one batch of rows of a parquet file; a
dataset of the hub lies on the disk, where the package datasets keeps it.
"""

import importlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from codd import files
from codd.data import text_files
from codd.errors import FormatError, MissingDependency

LINES, ARRAY, PARQUET, PROSE = ".jsonl", ".json", ".parquet", (".txt", ".md")
TABLE, FASTA = ".tsv", (".fasta", ".fa", ".faa")
SEQUENCES = (TABLE, *FASTA)
"""Endings of files of sequences; in a .txt file they stand one per line, if the source says so."""
_PLAIN = (LINES, ARRAY, *PROSE, *SEQUENCES)
ENDINGS = (*_PLAIN, *(f"{ending}.xz" for ending in _PLAIN), PARQUET)
"""Endings of the names of files that codd reads as data."""
BATCH_ROWS = 1024
"""Rows of a parquet file that are in memory at a time."""
_AT_ONCE = 2**16
_BETWEEN = " \t\r\n,[]"
"""What may stand between objects."""
_DECODER = json.JSONDecoder()
_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+)(?=:))?(?::(\w[\w.+-]*(?:\[[^][]*\])?))?")

Record = tuple[str, dict[str, Any]]
"""Where the record is (file and line, for messages), and its fields."""


class HubDataset(NamedTuple):
    """A split of a dataset on the hub, written ``owner/name``, ``owner/name:split`` or ``owner/name:config:split``."""

    repo: str
    config: str | None
    split: str
    """As the package datasets takes it, with a slice or without: ``train``, ``test[:100]``."""

    def __str__(self) -> str:
        """The name in the form that `locate` reads."""
        return ":".join(part for part in self if part is not None)

    def load(self) -> Any:
        """The rows, downloaded if they were not before; FormatError if there are none of this name."""
        library = _library("datasets", str(self))
        try:
            return library.load_dataset(self.repo, self.config, split=self.split)
        except Exception as error:  # the hub's own errors, those of the package, and those of whatever reads the files
            raise FormatError(
                f"{self}: there is no such file, and the hub gave no such dataset ({files.brief(error)}). Check the "
                "name, or the connection; a dataset is named owner/name, owner/name:split or owner/name:config:split."
            ) from error


Place = Path | HubDataset


def locate(name: str, root: Path) -> Place | None:
    """The file of this name under ``root``, else the dataset of the hub that it names; None if it is neither."""
    path = root / name
    if os.path.isfile(path):  # unlike Path.is_file, not an error for a name that is too long
        return path
    match = _HUB.fullmatch(name)
    return None if match is None or match[1].endswith(ENDINGS) else HubDataset(match[1], match[2], match[3] or "train")


def content_digest(place: Place) -> str:
    """Names what a file or dataset holds: the sha256 of a file, the fingerprint of a dataset."""
    return files.sha256(place) if isinstance(place, Path) else f"{place} {place.load()._fingerprint}"


def ending(path: Path) -> str:
    """A file's ending in small letters, without that of its compression."""
    return Path(path.name.removesuffix(".xz")).suffix.lower()


def is_prose(place: Place) -> bool:
    """Whether a file holds prose instead of records; FormatError for one that codd does not read."""
    if isinstance(place, HubDataset) or ending(place) in (LINES, ARRAY, PARQUET):
        return False
    if ending(place) in (*PROSE, ""):
        return True
    raise FormatError(
        f"{place}: codd does not read {ending(place)} files. Give .jsonl (one JSON object a line), .json (an array of "
        "them), .parquet, .txt (prose), .tsv or .fasta (sequences), or a dataset of the hub (TIGER-Lab/MathInstruct)."
    )


def read_records(place: Place, most: int | None = None) -> Iterator[Record]:
    """The records of a file or dataset, or ``most`` of them; FormatError for one that holds none."""
    found: Iterator[Record]
    if isinstance(place, HubDataset):
        found = ((f"{place}: row {number}", row) for number, row in enumerate(place.load(), start=1))
    elif is_prose(place):
        raise FormatError(
            f"{place}: has no fields to find questions and answers in. Give .jsonl, .json, .parquet or a dataset."
        )
    else:
        found = {PARQUET: _parquet_rows, LINES: text_files.json_lines, ARRAY: _objects}[ending(place)](place)
    return itertools.islice(found, most)


def _objects(path: Path) -> Iterator[Record]:
    """The objects of a JSON array, or objects one after the other, without the whole of them in memory."""
    with text_files.open_text(path) as file:
        text, number, marks = "", 0, set[str]()
        while True:
            while not (rest := text.lstrip(_BETWEEN)):
                marks |= set(text)
                if not (text := file.read(_AT_ONCE)):
                    if "[" in marks and "]" not in marks:
                        raise FormatError(f"{path}: ends before its array does. Download it again.")
                    return
            marks |= set(text[: len(text) - len(rest)])
            where, size = f"{path}: entry {number + 1}", _AT_ONCE
            if rest[0] != "{":
                raise FormatError(f"{where} is not a JSON object. Give an array of objects, or one object a line.")
            while True:
                try:
                    entry, end = _DECODER.raw_decode(rest)
                    break
                except (ValueError, RecursionError) as error:  # it may go on in what was not read yet
                    if len(rest) > text_files.LONGEST_LINE or not (more := file.read(size)):
                        raise FormatError(f"{where} is not JSON ({files.brief(error)}).") from error
                    rest, size = rest + more, 2 * size
            yield where, entry
            text, number = rest[end:], number + 1


def _parquet_rows(path: Path) -> Iterator[Record]:
    library = _library("pyarrow.parquet", str(path))
    with files.open_regular(path) as raw:
        try:
            rows = (row for batch in library.ParquetFile(raw).iter_batches(BATCH_ROWS) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                yield f"{path}: row {number}", row
        except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's own are among them
            raise FormatError(
                f"{path}: cannot be read as parquet ({files.brief(error)}). Download it again."
            ) from error


def _library(name: str, wanted_for: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingDependency(f"{wanted_for}: needs the package {package}: pip install 'codd-lm[data]'") from error
