"""From files and generators to rows of tokens: reading, tokenizing (in several processes) and keeping the result."""

import hashlib
import json
import lzma
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from codd import files
from codd.backbones.tokenizer import Tokenizer
from codd.errors import FormatError
from codd.training.problems import problems
from codd.training.recipe import Source
from codd.training.rows import MOST_SEGMENTS, Example, PackedRows, Rows, RowSource, TextRows, Tokens, pack, token_type

CALCULATOR = re.compile(r"<<[^>]*>>")
"""GSM8K's marks for a calculator, such as <<48/2=24>>: not part of what is said."""
TAILS = (0.6, 0.25, 0.15)
"""By default: answers end before their room does."""
CHUNK = 2000
"""Problems that one process makes at a time."""
MANY = 4_000_000
"""Characters from which on starting several processes pays."""

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


def texts(source: Source, root: Path) -> Iterator[str]:
    """The documents of a text source."""
    path = resolve(source, root)
    if ".jsonl" in path.suffixes[-2:]:
        key = source.fields[0] if len(source.fields) == 1 else "text"
        for where, entry in entries(path, source.count):
            yield _field(entry, key, where)
    else:
        with _open(path) as file:
            yield file.read()


def pairs(source: Source, root: Path) -> Iterator[Pair]:
    """The questions and answers of a qa or problems source."""
    if source.kind == "problems":
        for problem in problems(source.count or 0, split=source.split, seed=source.seed):
            yield Pair(problem.question, problem.solution)
        return
    path = resolve(source, root)
    if len(source.fields) != 2:
        raise FormatError(f"source {source.name}: fields must name the question's and the answer's key.")
    for where, entry in entries(path, source.count):
        question, answer = (_field(entry, key, where) for key in source.fields)
        yield Pair(question.strip(), CALCULATOR.sub("", answer).strip())


def resolve(source: Source, root: Path) -> Path:
    """The file of a source."""
    path = root / (source.path or "")
    if not path.is_file():
        raise FormatError(f"{path}: there is no such file (source {source.name}). Give the data's folder with --data.")
    return path


def sample_texts(sources: Sequence[Source], root: Path, megabytes: int) -> Iterator[str]:
    """Text for a tokenizer: of each source its share of so many megabytes, spread over all of it."""
    whole = sum(source.weight for source in sources)
    for source in sources:
        budget = int(megabytes * 1e6 * source.weight / whole)
        if source.kind == "text":
            documents = list(texts(source, root))
            share = min(1.0, budget / max(1, sum(map(len, documents))))
            for document in documents:
                yield document[: int(len(document) * share)]
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
        stream = _kept(
            cache, source, root, tokenizer, layout, lambda: {"stream": token_stream(source, root, tokenizer)}
        )
        tokens = stream["stream"]
        if len(tokens) < layout.row_length:
            raise FormatError(f"source {source.name}: {len(tokens)} tokens do not fill a row of {layout.row_length}.")
        return TextRows(tokens, layout.row_length, layout.seed)
    kept = _kept(cache, source, root, tokenizer, layout, lambda: _packed(source, root, tokenizer, layout)._asdict())
    if not len(kept["tokens"]):
        raise FormatError(f"source {source.name}: no question with its answer fits {layout.row_length} tokens.")
    return PackedRows(Rows(**kept), layout.seed)


def token_stream(source: Source, root: Path, tokenizer: Tokenizer) -> Tokens:
    """All documents, one after the other, each followed by the end mark."""
    documents = list(texts(source, root))
    if len(documents) > 1 and sum(map(len, documents)) > MANY and (os.cpu_count() or 1) > 1:
        parts = _in_processes(_encode_one, documents, tokenizer)
    else:
        parts = [_encode_document(document, tokenizer) for document in documents]
    return np.concatenate(parts) if parts else np.empty(0, token_type(tokenizer.vocab_size))


def _encode_document(document: str, tokenizer: Tokenizer) -> Tokens:
    # Cut at paragraphs, which no token crosses: the library is slow on one text of many megabytes.
    pieces = re.split(r"(?<=\n\n)(?=\S)", document)
    encoded = tokenizer.encode_batch(pieces, parse_special=False)
    end = [_required(tokenizer.eos_id, "eos")]
    kind = token_type(tokenizer.vocab_size)
    return np.concatenate([np.asarray(ids, dtype=kind) for ids in (*encoded, end)])


def _packed(source: Source, root: Path, tokenizer: Tokenizer, layout: Layout) -> Rows:
    if source.kind == "problems" and (source.count or 0) > CHUNK and (os.cpu_count() or 1) > 1:
        found = _generate_in_parallel(source, tokenizer)
    else:
        found = encode_pairs(list(pairs(source, root)), tokenizer)
    generator = np.random.default_rng((layout.seed, 1))
    eos = _required(tokenizer.eos_id, "eos")
    tails = np.asarray(layout.tails) / np.sum(layout.tails)
    extra = generator.choice(len(tails), size=len(found), p=tails)
    examples = [_fill(*pair, int(more), eos, layout) for pair, more in zip(found, extra, strict=True)]
    pad = eos if tokenizer.pad_id is None else tokenizer.pad_id  # what stands at padding is not looked at
    return pack(examples, layout.row_length, pad, layout.texts)


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
    return [pair for sizes, tokens in _in_processes(_generate_some, jobs, tokenizer) for pair in _cut(sizes, tokens)]


def _in_processes(function: Callable[[Job], Result], jobs: Sequence[Job], tokenizer: Tokenizer) -> list[Result]:
    """Do the jobs in as many processes as there are cores, each with the tokenizer at hand."""
    processes = min(os.cpu_count() or 1, len(jobs))
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_prepare_process, initargs=(tokenizer,)
    ) as pool:
        return list(pool.map(function, jobs))


_process_tokenizer: Tokenizer | None = None


def _prepare_process(tokenizer: Tokenizer) -> None:
    global _process_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # this process is one of many already
    _process_tokenizer = tokenizer


def _encode_one(document: str) -> Tokens:
    """In a process of its own."""
    assert _process_tokenizer is not None
    return _encode_document(document, _process_tokenizer)


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
        for name, array in arrays.items():
            np.save(partial / f"{name}.npy", array)
        if not folder.is_dir():  # another process of the run may have been faster
            os.replace(partial, folder)
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}


def identity(source: Source, root: Path, tokenizer: Tokenizer, layout: Layout) -> str:
    """Names the rows of a source: the same name means the same rows."""
    content = None if source.kind == "problems" else files.sha256(resolve(source, root))
    # Fields that came later: what is kept under the old names stays good.
    later = {"texts": MOST_SEGMENTS, "tails": TAILS}
    shown = [value for name, value in layout._asdict().items() if value != later.get(name)]
    fields = {**asdict(source), "weight": None, "layout": shown, "content": content, "tokenizer": _digest(tokenizer)}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def _digest(tokenizer: Tokenizer) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return "".join(files.sha256(path) for path in sorted(Path(folder).iterdir()))


def entries(path: Path, most: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a file of JSON objects, each with where it stands."""
    with _open(path) as file:
        for number, line in enumerate(file):
            if most is not None and number >= most:
                return
            where = f"{path}: line {number + 1}"
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise FormatError(f"{where} is not JSON ({error}).") from error
            if not isinstance(entry, dict):
                raise FormatError(f"{where} is not a JSON object.")
            yield where, entry


def _field(entry: dict[str, Any], key: str, where: str) -> str:
    found = entry.get(key)
    if not isinstance(found, str):
        raise FormatError(f"{where}: expected a text under {key!r}, found the keys {', '.join(entry)}.")
    return found


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            yield file
    except (UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise FormatError(f"{path}: cannot be read as UTF-8 text ({files.brief(error)}).") from error


def _required(token: int | None, name: str) -> int:
    if token is None:
        raise FormatError(f"the tokenizer has no {name} token, which training needs.")
    return token
