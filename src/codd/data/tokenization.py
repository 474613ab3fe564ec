"""From sources to packed sequences of tokens: encoding (in several processes), packing, and a copy on disk."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from codd import files
from codd.backbones.tokenizer import Tokenizer
from codd.data.packing import (
    MAX_TEXTS_PER_ROW,
    PADDING,
    Example,
    PackedDataset,
    PackedSequences,
    SequenceDataset,
    StreamDataset,
    Tokens,
    pack,
    token_dtype,
)
from codd.data.records import content_digest
from codd.data.sources import (
    PARAGRAPH,
    QuestionAnswer,
    Source,
    TextChunk,
    read_chunks,
    read_pairs,
    read_sequences,
    source_place,
)
from codd.errors import FormatError, TextsLeftOut

TAILS = (0.6, 0.25, 0.15)
"""Default shares of answers followed by no, one or two further blocks of end marks."""
DIGESTS = "sha256.txt"
"""The file that has the digests of the arrays beside it."""


class PackingConfig(NamedTuple):
    """What packed sequences look like, whatever is in them. Its values, in this order, are part of names on disk."""

    row_length: int
    block_length: int
    seed: int
    texts_per_row: int = MAX_TEXTS_PER_ROW
    """How many questions with their answers may share a row: one, for networks that cannot keep them apart."""
    tails: tuple[float, ...] = TAILS
    """How often an answer is followed by no, one, two ... further blocks of end marks."""
    characters: int | None = None
    """About how many characters of each file are read at most; None: all."""


def load_source(
    source: Source, root: Path, tokenizer: Tokenizer, config: PackingConfig, cache: Path | None
) -> SequenceDataset:
    """The packed sequences of a source; what took work is kept in the folder ``cache`` for the next time."""

    def make() -> dict[str, NDArray[Any]]:
        kinds = {"text": _make_stream, "qa": _make_packed, "sequences": _make_sequences}
        return kinds[source.kind](source, root, tokenizer, config)

    name = f"{source.name}-{dataset_digest(source, root, tokenizer, config)}" if cache else ""
    arrays = _kept(cache / name, make) if cache else make()
    if source.kind == "text":
        return StreamDataset(arrays["stream"], config.row_length, config.seed)
    return PackedDataset(PackedSequences(**arrays), config.seed)


def _make_stream(source: Source, root: Path, tokenizer: Tokenizer, config: PackingConfig) -> dict[str, NDArray[Any]]:
    tokens = token_stream(source, root, tokenizer, config.characters)
    if len(tokens) < config.row_length:
        raise FormatError(f"source {source.name}: {len(tokens)} tokens do not fill a row of {config.row_length}.")
    return {"stream": tokens}


def token_stream(source: Source, root: Path, tokenizer: Tokenizer, most: int | None = None) -> Tokens:
    """All documents (or ``most`` characters of them), one after the other, each followed by the end mark."""
    parts = [_encode_chunk(chunk, tokenizer) for chunk in read_chunks(source, root, most)]
    return np.concatenate(parts) if parts else np.empty(0, token_dtype(tokenizer.vocab_size))


def _encode_chunk(chunk: TextChunk, tokenizer: Tokenizer) -> Tokens:
    # Cut at paragraphs, which no token crosses: the library encodes many texts in parallel, and is slow on a long one.
    encoded = tokenizer.encode_batch(PARAGRAPH.split(chunk.text), parse_special=False)
    end = [_required(tokenizer.eos_id, "eos")] if chunk.ends else []
    dtype = token_dtype(tokenizer.vocab_size)
    return np.concatenate([np.asarray(ids, dtype=dtype) for ids in (*encoded, end)])


def _make_packed(source: Source, root: Path, tokenizer: Tokenizer, config: PackingConfig) -> dict[str, NDArray[Any]]:
    encoded = encode_pairs(list(read_pairs(source, root, config.characters)), tokenizer)
    generator = np.random.default_rng((config.seed, 1))
    eos = _required(tokenizer.eos_id, "eos")
    tails = np.asarray(config.tails) / np.sum(config.tails)
    extra = generator.choice(len(tails), size=len(encoded), p=tails)
    examples = [pad_answer(*pair, int(more), eos, config) for pair, more in zip(encoded, extra, strict=True)]
    pad = eos if tokenizer.pad_id is None else tokenizer.pad_id  # what stands at padding is not looked at
    _check_fit(source.name, [len(example.tokens) for example in examples], config.row_length)
    return pack(examples, config.row_length, pad, config.texts_per_row)._asdict()


def _make_sequences(source: Source, root: Path, tokenizer: Tokenizer, config: PackingConfig) -> dict[str, NDArray[Any]]:
    """A row for each sequence; scored is its window, or the whole of it if nothing says where that begins."""
    read, size = list(read_sequences(source, root, config.characters)), config.block_length
    ids = tokenizer.encode_batch([text for text, _ in read], add_special_tokens=True, parse_special=False)
    special, unknown = sorted(tokenizer.special_ids), tokenizer.special_tokens.get("unk_token")
    examples, windows = [], []
    for (text, begin), row in zip(read, ids, strict=True):
        if unknown is not None and tokenizer.token_to_id(unknown) in row:
            raise FormatError(f"source {source.name}: {text!r:.60} holds what is not a token of the tokenizer.")
        [own] = np.nonzero(~np.isin(row, special))
        if size <= len(own) and len(row) <= config.row_length:
            first = 0 if begin is None else max(0, min(begin, len(own) - size))
            examples.append(np.asarray(row, token_dtype(tokenizer.vocab_size)))
            windows.append(own[first:] if begin is None else own[first : first + size])
    _check_sequences(source.name, len(read), len(examples), config)
    shape = len(examples), max(map(len, examples))
    tokens = np.full(shape, tokenizer.pad_id or 0, token_dtype(tokenizer.vocab_size))
    segments, scored = np.full(shape, PADDING, np.uint8), np.zeros(shape, np.bool_)
    for number, (example, window) in enumerate(zip(examples, windows, strict=True)):
        tokens[number, : len(example)], segments[number, : len(example)] = example, 1
        scored[number, window] = True
    return {"tokens": tokens, "segments": segments, "scored": scored}


def _check_sequences(name: str, found: int, kept: int, config: PackingConfig) -> None:
    """Warn of sequences that have no window or do not fit a row; FormatError if that is so of all."""
    said = (
        f"source {name}: {found - kept} of {found} sequences have fewer tokens than a window, {config.block_length}, "
        f"or more than row_length, {config.row_length}"
    )
    if not kept:
        raise FormatError(f"{said}: nothing is left. Choose a shorter window, or a longer row_length.")
    if kept < found:
        warnings.warn(f"{said}, and were left out.", TextsLeftOut, stacklevel=2)


def _check_fit(name: str, lengths: Sequence[int], row_length: int) -> None:
    """Warn of pairs of a source that are longer than a row, since `pack` leaves them out; FormatError if all are."""
    if not lengths:
        raise FormatError(f"source {name}: holds no questions with answers.")
    too_long = sum(length > row_length for length in lengths)
    if too_long == len(lengths):
        raise FormatError(
            f"source {name}: none of its {too_long} questions fits a row with its answer: row_length is {row_length} "
            f"tokens, and the shortest takes {min(lengths)}. Raise row_length."
        )
    if too_long:
        warnings.warn(
            f"source {name}: {too_long} of {len(lengths)} questions with their answers are longer than row_length, "
            f"{row_length} tokens, and were left out; the longest takes {max(lengths)}. Raise row_length to keep them.",
            TextsLeftOut,
            stacklevel=2,
        )


EncodedPair = tuple[Tokens, Tokens]
"""A question, with all that a conversation puts around it up to the answer, and the answer."""


def encode_pairs(pairs: Sequence[QuestionAnswer], tokenizer: Tokenizer) -> list[EncodedPair]:
    """Questions, in the tokenizer's chat template, and answers as tokens."""
    questions = [tokenizer.encode_chat(pair.question) for pair in pairs]
    answers = tokenizer.encode_batch([pair.answer for pair in pairs], parse_special=False)
    dtype = token_dtype(tokenizer.vocab_size)
    return [
        (np.asarray(question, dtype), np.asarray(answer, dtype))
        for question, answer in zip(questions, answers, strict=True)
    ]


def pad_answer(question: Tokens, answer: Tokens, extra: int, eos: int, config: PackingConfig) -> Example:
    """Fill the answer's last block with end marks, and up to ``extra`` further blocks of them where there is room."""
    size = config.block_length
    blocks = len(answer) // size + 1
    while extra and len(question) + (blocks + extra) * size > config.row_length:
        extra -= 1
    room = min((blocks + extra) * size, max(len(answer) + 1, config.row_length - len(question)))
    end = np.full(room - len(answer), eos, answer.dtype)
    return Example(np.concatenate((question, answer, end)), len(question))


def _kept(folder: Path, make: Callable[[], dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """The arrays of a folder: read if they were made before, and are whole; else made and kept."""
    if (kept := _read_arrays(folder)) is not None:
        return kept
    arrays, partial = make(), folder.parent / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)  # of a process with the same number that was killed
    partial.mkdir(parents=True)
    try:
        for key, array in arrays.items():
            np.save(partial / f"{key}.npy", array)
        files.write_text(partial / DIGESTS, _array_digests(partial))
        if (kept := _read_arrays(folder)) is not None:  # another process of the run was faster
            return kept
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return _read_arrays(folder) or arrays


def _read_arrays(folder: Path) -> dict[str, NDArray[Any]] | None:
    """The arrays in a folder, mapped; None if there are none, or not those that were written."""
    try:
        if files.read_text(folder / DIGESTS) != _array_digests(folder):
            return None
    except FormatError:
        return None
    return {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}


def _array_digests(folder: Path) -> str:
    return "".join(f"{files.sha256(path)}  {path.name}\n" for path in sorted(folder.glob("*.npy")))


def dataset_digest(source: Source, root: Path, tokenizer: Tokenizer, config: PackingConfig) -> str:
    """12 hex digits that name the rows of a source: the same digest means the same rows."""
    content = content_digest(source_place(source, root))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        written = "".join(files.sha256(path) for path in sorted(Path(folder).iterdir()))
    fields = {
        **asdict(source),
        "weight": None,
        "layout": list(config),
        "content": content,
        "tokenizer": written,
    }
    return files.sha256_of_json(fields)[:12]


def _required(token: int | None, name: str) -> int:
    if token is None:
        raise FormatError(f"the tokenizer has no {name} token, which training needs.")
    return token
