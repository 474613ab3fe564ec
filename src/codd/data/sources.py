"""Sources of text: files of prose, of questions and answers, and of sequences, such as proteins."""

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from codd.data import text_files
from codd.data.records import ENDINGS, FASTA, SEQUENCES, TABLE, Place, ending, is_prose, locate, read_records
from codd.errors import FormatError
from codd.validation import LONGEST_NAME, Count, FolderName, List, Natural, Positive, Section

CALCULATOR = re.compile(r"<<[^<>]*>>")
"""GSM8K's marks for a calculator, such as <<48/2=24>>: not part of what is said. Code has shifts that look alike."""
CHUNK_CHARACTERS = 2**20
"""Characters that a text file is read by."""
PARAGRAPH = re.compile(r"(?<=\n\n)(?=\S)")
LINE = re.compile(r"(?<=\n)(?=[^\S\n]*\S)")
SURROGATE = re.compile(r"[\ud800-\udfff]")
KNOWN_FIELDS = (
    ("question", "answer"),
    ("query", "response"),
    ("instruction", "output"),
    ("problem", "solution"),
    ("prompt", "completion"),
)
"""Keys under which entries are looked through for questions and answers."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Source(Section):
    """One set of data. Paths are relative to the folder given by ``--data``."""

    kind: Literal["text", "qa", "sequences"]
    """text: files of prose, packed into full rows. qa: questions and answers. sequences: one per line or FASTA record,
    each a row by itself, with what the tokenizer puts around a text."""
    name: FolderName
    path: Annotated[str, Field(min_length=1)]
    """A file (.jsonl, .json, .parquet, .txt; sequences: .txt, .tsv, .fasta), or a dataset of the hub
    (`codd.data.records.HubDataset`)."""
    weight: Positive = 1.0
    """Share of the rows of a batch, relative to the other sources."""
    fields: List[str] = ("question", "answer")
    """Keys of a JSON object: the question's and the answer's, or for text the one key."""
    count: Count | None = None
    """How many entries of the file to use at most; None: all."""
    rows: Count | None = None
    """Use at most this many rows: for validation."""
    strip: Literal["gsm8k"] | None = None
    """gsm8k: leave out that dataset's marks for a calculator, such as <<48/2=24>>, in answers."""
    begin: Natural | None = None
    """Of sequences: the token, counted from 0, with which the window begins; all outside of it is given. A window that
    would pass the end of its sequence begins earlier. None: windows anywhere."""
    begin_column: Count | None = None
    """The column of a .tsv file, counted from 1, that says it of each sequence. The sequence is in the first."""


class TextChunk(NamedTuple):
    """A part of a document: a whole one, or what is between two paragraphs of a long one."""

    text: str
    ends: bool
    """Whether the document ends here."""


class QuestionAnswer(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


def read_chunks(source: Source, root: Path, most: int | None = None) -> Iterator[TextChunk]:
    """Read the documents of a text source chunk by chunk, so that no long one is whole in memory.

    Reading ends with the chunk that reaches ``most`` characters. FormatError if the file or an entry is unusable.
    """
    place = source_place(source, root)
    if isinstance(place, Path) and is_prose(place):
        chunks = _file_chunks(place)
    else:
        key = source.fields[0] if len(source.fields) == 1 else "text"
        entries = read_records(place, source.count)
        chunks = (TextChunk(_field(entry, key, where), True) for where, entry in entries)
    return _take_until(chunks, lambda chunk: len(chunk.text), most)


def _file_chunks(path: Path) -> Iterator[TextChunk]:
    with text_files.open_text(path) as file:
        rest = ""
        while more := file.read(CHUNK_CHARACTERS - len(rest)):
            rest += more
            if len(rest) == CHUNK_CHARACTERS:
                at = _cut_at(rest)
                yield TextChunk(rest[:at], False)
                rest = rest[at:]
        yield TextChunk(rest, True)


def _cut_at(text: str) -> int:
    """The last place that no token crosses: before a paragraph, else a line, else a word; the end if there is none."""
    for boundary in (PARAGRAPH, LINE):
        if ends := [match.end() for match in boundary.finditer(text)]:
            return ends[-1]
    return max(text.rfind(" "), 0) or len(text)


def _take_until(items: Iterator[Item], size: Callable[[Item], int], most: int | None) -> Iterator[Item]:
    """Items up to the one with which their sizes reach ``most``; None: all."""
    taken = 0
    for item in items:
        yield item
        taken += size(item)
        if most is not None and taken >= most:
            return


def read_sequences(source: Source, root: Path, most: int | None = None) -> Iterator[tuple[str, int | None]]:
    """Each sequence of a source and where its window begins, up to the one that reaches ``most`` characters."""
    place = source_place(source, root)
    if not isinstance(place, Path):
        raise FormatError(f"source {source.name}: sequences are read from files, not from the hub.")
    column, table = source.begin_column, ending(place) == TABLE
    if column is not None and not table:
        raise FormatError(f"{place}: begin_column is for {TABLE} files; give begin, a position, or another file.")
    with text_files.open_text(place) as file:
        found = _records_of_fasta(file) if ending(place) in FASTA else (line.strip("\r\n") for line in file)
        lines = ((number, line) for number, line in enumerate(found, start=1) if line.strip())
        kept = itertools.islice(lines, source.count)
        read = (_sequence(source, f"{place}: entry {n}", x, table) for n, x in kept)
        yield from _take_until(read, lambda sequence: len(sequence[0]), most)


def _records_of_fasta(lines: Iterable[str]) -> Iterator[str]:
    """The sequence of each record, whose lines are joined; what stands before the first > is one without a name."""
    for header, group in itertools.groupby(lines, key=lambda line: line.startswith(">")):
        if not header:
            yield "".join(line.strip() for line in group)


def _sequence(source: Source, where: str, line: str, table: bool) -> tuple[str, int | None]:
    cells = line.split("\t") if table else [line]
    if source.begin_column is None:
        return cells[0].strip(), source.begin
    cell = "".join(cells[source.begin_column - 1 : source.begin_column]).strip()
    if not (cell.isascii() and cell.isdecimal()):
        raise FormatError(
            f"{where}: column {source.begin_column} should say where the window begins, found {cell!r:.60}."
        )
    return cells[0].strip(), int(cell)


def read_pairs(source: Source, root: Path, most: int | None = None) -> Iterator[QuestionAnswer]:
    """The pairs of a qa source, up to the one that reaches ``most`` characters."""
    place = source_place(source, root)
    if len(source.fields) != 2:
        raise FormatError(f"source {source.name}: fields must name the question's and the answer's key.")
    read = (_pair(source, entry, where) for where, entry in read_records(place, source.count))
    yield from _take_until(read, lambda pair: len(pair.question) + len(pair.answer), most)


def _pair(source: Source, entry: dict[str, Any], where: str) -> QuestionAnswer:
    question, answer = (_field(entry, key, where) for key in source.fields)
    if source.strip == "gsm8k":
        answer = CALCULATOR.sub("", answer)
    return QuestionAnswer(question.strip(), answer.strip())


def _field(entry: dict[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        keys = ", ".join(name[:40] for name in itertools.islice(entry, 8))
        raise FormatError(f"{where}: expected a text under {key!r}, found the keys {keys}.")
    if not value.isascii() and SURROGATE.search(value):
        raise FormatError(f"{where}: {key!r} holds half a character (a surrogate), which is no text.")
    return value


def source_place(source: Source, root: Path) -> Place:
    """The file of a source, or its dataset on the hub; FormatError if there is none."""
    if (place := locate(source.path, root)) is None:
        raise FormatError(
            f"{root / source.path}: there is no such file (source {source.name}). Give the data's folder with --data."
        )
    return place


def find_sources(
    paths: Sequence[Path],
    fields: Sequence[str] | None,
    strip: Literal["gsm8k"] | None = None,
    *,
    sequences: bool = False,
    begin: int | None = None,
    begin_column: int | None = None,
) -> list[Source]:
    """A source for each file or dataset of the hub; of a folder, its files whose names begin with train, or all if none
    does. ``sequences``: text files hold one per line.
    """
    sources: list[Source] = []
    for path in _data_files(paths):
        place = locate(str(path), Path()) or path
        kind, keys = _detect_kind(place, fields, sequences or begin is not None or begin_column is not None)
        short = re.sub(r"[^\w.-]", "_", path.name)[-40:].encode()[-LONGEST_NAME // 2 :].decode(errors="ignore")
        name = f"{len(sources)}-{short}"  # numbered: two folders may hold files of one name
        where = os.path.realpath(place) if isinstance(place, Path) else str(place)
        of_kind: dict[str, dict[str, Any]] = {
            "qa": {"strip": strip},
            "sequences": {"begin": begin, "begin_column": begin_column},
        }
        sources.append(Source(kind, name, path=where, fields=tuple(keys), **of_kind.get(kind, {})))
    return sources


def _data_files(paths: Sequence[Path]) -> Iterable[Path]:
    for path in paths:
        if not os.path.isdir(path):  # unlike Path.is_dir, not an error for a name that is too long
            yield path
            continue
        inside = sorted(each for each in path.iterdir() if each.is_file() and each.name.endswith(ENDINGS))
        if not inside:
            raise FormatError(f"{path}: holds no {', '.join(ENDINGS)} file. Give a folder with data, or files.")
        yield from [each for each in inside if each.name.startswith("train")] or inside


def _detect_kind(
    place: Place, fields: Sequence[str] | None, sequences: bool
) -> tuple[Literal["text", "qa", "sequences"], Sequence[str]]:
    """What a file or dataset holds, by its ending and by its first entry."""
    if isinstance(place, Path) and ending(place) in SEQUENCES:
        return "sequences", ("text",)
    if isinstance(place, Path) and not ending(place) and os.path.isfile(place):
        raise FormatError(
            f"{place}: its name does not say what it holds. Rename it to .txt, .jsonl, .json or .parquet."
        )
    if isinstance(place, Path) and is_prose(place):
        return ("sequences" if sequences else "text"), ("text",)
    if fields is not None:
        return ("qa" if len(fields) == 2 else "text"), tuple(fields)
    first = next(read_records(place, 1), None)
    if first is None:
        raise FormatError(f"{place}: is empty. Give a file with JSON objects, or rows.")
    for keys in KNOWN_FIELDS:
        if all(key in first[1] for key in keys):
            return "qa", keys
    if "text" in first[1]:
        return "text", ("text",)
    known = ", ".join(key[:40] for key in itertools.islice(first[1], 8))
    raise FormatError(f"{place}: has the keys {known}; say with --fields which of them to use.")
