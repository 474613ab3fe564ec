"""From files and generators to rows of tokens: reading, tokenizing (in several processes) and keeping the result."""

import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from codd import files
from codd.backbones.tokenizer import Tokenizer
from codd.errors import FormatError
from codd.training import text_files
from codd.training.problems import problems
from codd.training.recipe import Source
from codd.training.rows import MOST_SEGMENTS, Example, PackedRows, Rows, RowSource, TextRows, Tokens, pack, token_type

CALCULATOR = re.compile(r"<<[^<>]*>>")
"""GSM8K's marks for a calculator, such as <<48/2=24>>: not part of what is said."""
TAILS = (0.6, 0.25, 0.15)
"""By default: answers end before their room does."""
CHUNK = 2000
"""Problems that one process makes at a time."""
MANY = 4_000_000
"""Characters from which on starting several processes pays."""
PIECE = 2**20
"""Characters that a text file is read by."""
MOST_AT_ONCE = 2**27
"""Characters of all documents, where they must be in memory together."""
PARAGRAPH = re.compile(r"(?<=\n\n)(?=\S)")
LINE = re.compile(r"(?<=\n)(?=[^\S\n]*\S)")
SURROGATE = re.compile(r"[\ud800-\udfff]")

Item = TypeVar("Item")
Job = TypeVar("Job")
Result = TypeVar("Result")


class Pair(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


class Layout(NamedTuple):
    """What rows look like, whatever is in them."""

    row_length: int
    block_length: int
    seed: int
    texts: int = MOST_SEGMENTS
    """How many questions with their answers may share a row: one, for networks that cannot keep them apart."""
    tails: tuple[float, ...] = TAILS
    """How often an answer is followed by no, one, two ... further blocks of end marks."""
    characters: int | None = None
    """Of each file no more than about so many are read; None: all."""


class Piece(NamedTuple):
    """A part of a document: a whole one, or what is between two paragraphs of a long one."""

    text: str
    ends: bool
    """Whether the document ends here."""


def pieces(source: Source, root: Path, most: int | None = None) -> Iterator[Piece]:
    """The documents of a text source, none of them whole in memory that is longer than a line of JSON may be.

    Reading ends with the piece that makes ``most`` characters full.
    """
    path = resolve(source, root)
    if ".jsonl" in path.suffixes[-2:]:
        key = source.fields[0] if len(source.fields) == 1 else "text"
        lines = entries(path, source.count)
        return _until((Piece(_field(entry, key, where), True) for where, entry in lines), _size, most)
    return _until(_parts(path), _size, most)


def _size(piece: Piece) -> int:
    return len(piece.text)


def _parts(path: Path) -> Iterator[Piece]:
    """A text file, some characters at a time."""
    with text_files.open_text(path) as file:
        rest = ""
        while more := file.read(PIECE - len(rest)):
            rest += more
            if len(rest) == PIECE:
                at = _cut_at(rest)
                yield Piece(rest[:at], False)
                rest = rest[at:]
        yield Piece(rest, True)


def _cut_at(text: str) -> int:
    """The last place that no token crosses: before a paragraph, else a line, else a word; the end if there is none."""
    for boundary in (PARAGRAPH, LINE):
        if found := [match.end() for match in boundary.finditer(text)]:
            return found[-1]
    return max(text.rfind(" "), 0) or len(text)


def _until(found: Iterator[Item], size: Callable[[Item], int], most: int | None) -> Iterator[Item]:
    """All of them up to the one whose size makes ``most`` full."""
    taken = 0
    for each in found:
        yield each
        taken += size(each)
        if most is not None and taken >= most:
            return


def texts(source: Source, root: Path) -> Iterator[str]:
    """The documents of a text source, each whole; all of them together are at most `MOST_AT_ONCE` characters."""
    document: list[str] = []
    taken = 0
    for text, ends in pieces(source, root):
        document.append(text)
        taken += len(text)
        if taken > MOST_AT_ONCE:
            raise FormatError(
                f"{resolve(source, root)}: holds more than {MOST_AT_ONCE:,} characters, too many to choose passages "
                "from. Give a part of it."
            )
        if ends:
            yield "".join(document)
            document = []


def pairs(source: Source, root: Path, most: int | None = None) -> Iterator[Pair]:
    """The questions and answers of a qa or problems source, of a file up to the one that makes ``most`` characters."""
    if source.kind == "problems":
        for problem in problems(source.count or 0, split=source.split, seed=source.seed):
            yield Pair(problem.question, problem.solution)
        return
    path = resolve(source, root)
    if len(source.fields) != 2:
        raise FormatError(f"source {source.name}: fields must name the question's and the answer's key.")
    yield from _until(_pairs(path, source), lambda pair: len(pair.question) + len(pair.answer), most)


def _pairs(path: Path, source: Source) -> Iterator[Pair]:
    for where, entry in entries(path, source.count):
        question, answer = (_field(entry, key, where) for key in source.fields)
        yield Pair(question.strip(), CALCULATOR.sub("", answer).strip())


def resolve(source: Source, root: Path) -> Path:
    """The file of a source."""
    path = root / (source.path or "")
    if not os.path.isfile(path):  # unlike Path.is_file, not an error for a name that is too long
        raise FormatError(f"{path}: there is no such file (source {source.name}). Give the data's folder with --data.")
    return path


def sample_texts(sources: Sequence[Source], root: Path, megabytes: int) -> Iterator[str]:
    """Text for a tokenizer: of each source its share of so many megabytes, spread over all of it."""
    whole = sum(source.weight for source in sources)
    for source in sources:
        budget = int(megabytes * 1e6 * source.weight / whole)
        if source.kind == "text":
            share = min(1.0, budget / max(1, sum(map(_size, pieces(source, root)))))
            for piece in pieces(source, root):
                yield piece.text[: int(len(piece.text) * share)]
            continue
        for pair in pairs(source, root):
            text = f"{pair.question}\n{pair.answer}"
            budget -= len(text)
            if budget < 0:
                break
            yield text


def open_source(source: Source, root: Path, tokenizer: Tokenizer, layout: Layout, cache: Path | None) -> RowSource:
    """The rows of a source; what took work is kept in ``cache`` and found there the next time."""
    if source.kind == "text":
        kept = _kept(cache, source, root, tokenizer, layout, lambda: _stream(source, root, tokenizer, layout))
        return TextRows(kept["stream"], layout.row_length, layout.seed)
    kept = _kept(cache, source, root, tokenizer, layout, lambda: _packed(source, root, tokenizer, layout)._asdict())
    return PackedRows(Rows(**kept), layout.seed)


def _stream(source: Source, root: Path, tokenizer: Tokenizer, layout: Layout) -> dict[str, Tokens]:
    tokens = token_stream(source, root, tokenizer, layout.characters)
    if len(tokens) < layout.row_length:
        raise FormatError(f"source {source.name}: {len(tokens)} tokens do not fill a row of {layout.row_length}.")
    return {"stream": tokens}


def token_stream(source: Source, root: Path, tokenizer: Tokenizer, most: int | None = None) -> Tokens:
    """All documents (or ``most`` characters of them), one after the other, each followed by the end mark."""
    cores = os.cpu_count() or 1
    batches = _batches(pieces(source, root, most), MANY * min(cores, 16))
    first = next(batches, [])
    if sum(map(_size, first)) > MANY and cores > 1:
        parts = list(_in_processes(_encode_one, itertools.chain([first], batches), tokenizer))
    else:
        parts = [_encode(piece, tokenizer) for batch in itertools.chain([first], batches) for piece in batch]
    return np.concatenate(parts) if parts else np.empty(0, token_type(tokenizer.vocab_size))


def _batches(found: Iterator[Piece], characters: int) -> Iterator[list[Piece]]:
    """So many characters at a time, so that no more of them are in memory."""
    while batch := list(_until(found, _size, characters)):
        yield batch


def _encode(piece: Piece, tokenizer: Tokenizer) -> Tokens:
    # Cut at paragraphs, which no token crosses: the library is slow on one text of many megabytes.
    encoded = tokenizer.encode_batch(PARAGRAPH.split(piece.text), parse_special=False)
    end = [_required(tokenizer.eos_id, "eos")] if piece.ends else []
    kind = token_type(tokenizer.vocab_size)
    return np.concatenate([np.asarray(ids, dtype=kind) for ids in (*encoded, end)])


def _packed(source: Source, root: Path, tokenizer: Tokenizer, layout: Layout) -> Rows:
    if source.kind == "problems" and (source.count or 0) > CHUNK and (os.cpu_count() or 1) > 1:
        found = _generate_in_parallel(source, tokenizer)
    else:
        found = encode_pairs(list(pairs(source, root, layout.characters)), tokenizer)
    generator = np.random.default_rng((layout.seed, 1))
    eos = _required(tokenizer.eos_id, "eos")
    tails = np.asarray(layout.tails) / np.sum(layout.tails)
    extra = generator.choice(len(tails), size=len(found), p=tails)
    examples = [_fill(*pair, int(more), eos, layout) for pair, more in zip(found, extra, strict=True)]
    pad = eos if tokenizer.pad_id is None else tokenizer.pad_id  # what stands at padding is not looked at
    rows = pack(examples, layout.row_length, pad, layout.texts)
    if not len(rows.tokens):
        raise FormatError(f"source {source.name}: no question with its answer fits {layout.row_length} tokens.")
    return rows


Encoded = tuple[Tokens, Tokens]
"""A question, with all that a conversation puts around it up to the answer, and the answer."""


def encode_pairs(found: Sequence[Pair], tokenizer: Tokenizer) -> list[Encoded]:
    """Questions and answers as tokens."""
    questions = [tokenizer.encode_chat(pair.question) for pair in found]
    answers = tokenizer.encode_batch([pair.answer for pair in found], parse_special=False)
    kind = token_type(tokenizer.vocab_size)
    return [
        (np.asarray(question, kind), np.asarray(answer, kind))
        for question, answer in zip(questions, answers, strict=True)
    ]


def _fill(question: Tokens, answer: Tokens, extra: int, eos: int, layout: Layout) -> Example:
    """End marks up to the end of the answer's last block, and sometimes further blocks of them if there is room."""
    size = layout.block_length
    blocks = len(answer) // size + 1
    while extra and len(question) + (blocks + extra) * size > layout.row_length:
        extra -= 1
    room = min((blocks + extra) * size, max(len(answer) + 1, layout.row_length - len(question)))
    end = np.full(room - len(answer), eos, answer.dtype)
    return Example(np.concatenate((question, answer, end)), len(question))


def _generate_in_parallel(source: Source, tokenizer: Tokenizer) -> list[Encoded]:
    count = source.count or 0
    jobs = [(begin, min(CHUNK, count - begin), source.split, source.seed) for begin in range(0, count, CHUNK)]
    return [pair for sizes, tokens in _in_processes(_generate_some, [jobs], tokenizer) for pair in _cut(sizes, tokens)]


def _in_processes(
    function: Callable[[Job], Result], batches: Iterable[Sequence[Job]], tokenizer: Tokenizer
) -> Iterator[Result]:
    """Do one batch of jobs after the other in as many processes as there are cores, each with the tokenizer at hand."""
    with ProcessPoolExecutor(
        os.cpu_count() or 1, mp_context=get_context("spawn"), initializer=_prepare_process, initargs=(tokenizer,)
    ) as pool:
        for jobs in batches:
            yield from pool.map(function, jobs)


_process_tokenizer: Tokenizer | None = None


def _prepare_process(tokenizer: Tokenizer) -> None:
    global _process_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # this process is one of many already
    _process_tokenizer = tokenizer


def _encode_one(piece: Piece) -> Tokens:
    """In a process of its own."""
    assert _process_tokenizer is not None
    return _encode(piece, _process_tokenizer)


def _generate_some(
    job: tuple[int, int, Literal["train", "test"], int],
) -> tuple[NDArray[np.int64], Tokens]:
    """In a process of its own; the result is two arrays, since thousands would take long to hand over."""
    start, count, split, seed = job
    assert _process_tokenizer is not None
    made = [Pair(p.question, p.solution) for p in problems(count, split=split, seed=seed, start=start)]
    parts = [part for pair in encode_pairs(made, _process_tokenizer) for part in pair]
    return np.asarray([len(part) for part in parts]), np.concatenate(parts)


def _cut(sizes: NDArray[np.int64], tokens: Tokens) -> Iterator[Encoded]:
    """The opposite of joining: questions and answers in turns."""
    parts = iter(np.split(tokens, np.cumsum(sizes)[:-1]))
    return zip(parts, parts, strict=True)


def _kept(
    cache: Path | None,
    source: Source,
    root: Path,
    tokenizer: Tokenizer,
    layout: Layout,
    make: Callable[[], dict[str, NDArray[Any]]],
) -> dict[str, NDArray[Any]]:
    """The arrays of a source: read if they were made before from the same things, else made and written."""
    if cache is None:
        return make()
    digest = identity(source, root, tokenizer, layout)
    folder = cache / f"{source.name}-{digest}"
    if not folder.is_dir():
        arrays = make()
        partial = cache / f".{source.name}-{digest}.{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)  # of a process with the same number that was killed
        partial.mkdir(parents=True)
        try:
            for name, array in arrays.items():
                np.save(partial / f"{name}.npy", array)
            if not folder.is_dir():  # another process of the run may have been faster
                os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    try:
        return {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}
    except (ValueError, EOFError, OSError) as error:
        raise FormatError(f"{folder}: is damaged ({files.brief(error)}). Remove it: it is made again.") from error


def identity(source: Source, root: Path, tokenizer: Tokenizer, layout: Layout) -> str:
    """Names the rows of a source: the same name means the same rows."""
    content = None if source.kind == "problems" else files.sha256(resolve(source, root))
    # Fields that came later: what is kept under the old names stays good.
    later = {"texts": MOST_SEGMENTS, "tails": TAILS, "characters": None}
    shown = [value for name, value in layout._asdict().items() if value != later.get(name)]
    fields = {**asdict(source), "weight": None, "layout": shown, "content": content, "tokenizer": _digest(tokenizer)}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def _digest(tokenizer: Tokenizer) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return "".join(files.sha256(path) for path in sorted(Path(folder).iterdir()))


def entries(path: Path, most: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a file of JSON objects (or ``most`` of them), each with where it stands."""
    return itertools.islice(text_files.json_lines(path), most)


def _field(entry: dict[str, Any], key: str, where: str) -> str:
    found = entry.get(key)
    if not isinstance(found, str):
        keys = ", ".join(name[:40] for name in itertools.islice(entry, 8))
        raise FormatError(f"{where}: expected a text under {key!r}, found the keys {keys}.")
    if not found.isascii() and SURROGATE.search(found):
        raise FormatError(f"{where}: {key!r} holds half a character (a surrogate), which is no text.")
    return found


def _required(token: int | None, name: str) -> int:
    if token is None:
        raise FormatError(f"the tokenizer has no {name} token, which training needs.")
    return token
