"""Texts that no model here was trained on, and what studies take of them by chance."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from codd.backbones import Tokenizer
from codd.data import sources
from codd.data.records import ENDINGS, locate
from codd.data.sources import QuestionAnswer, Source, read_pairs
from codd.data.tokenization import TAILS, EncodedPair, PackingConfig, encode_pairs, pad_answer, token_stream
from codd.errors import FormatError, InvalidInput
from codd_lab.problems import problems

PROBLEMS = "problems"
"""The corpus that is generated."""
NUM_PROBLEMS = 2000
GSM8K = Source("qa", "gsm8k", path="gsm8k/test.jsonl", strip="gsm8k")
SOURCES: dict[str, Source | None] = {
    "books": Source("text", "books", path="books/test.jsonl.xz", fields=("text",)),
    "gsm8k": GSM8K,
    "gsm8k-padded": GSM8K,
    "wikitext103": Source("text", "wikitext103", path="wikitext103/test.txt.xz"),
    PROBLEMS: None,
}
"""An answer ends where training ends it, at a block's end; what is called padded has masks up to the end of a row
instead, which do not tell where the answer ends."""
PROSE = ("wikitext103", "books")
ROW_LENGTH = 384


class Texts(NamedTuple):
    """Rows of one length, and a block in each."""

    ids: Int[Tensor, "B T"]
    starts: Int[Tensor, " B"]


class BlockSpec(NamedTuple):
    """How many blocks to draw from a corpus, and their shape in tokens."""

    block_length: int
    blocks: int = 200
    row_length: int = ROW_LENGTH
    seed: int = 0
    on_grid: bool = False
    """Whether blocks are counted from the text's first token, as a block-causal network has them."""


def source_of(name: str, data: Path | None) -> Source | None:
    """One of `SOURCES` (None: generated), or a file of text or of questions and answers, or a dataset of the hub.

    Raises InvalidInput for what is neither, and for a corpus of files whose folder nobody gave.
    """
    if name in SOURCES:
        if SOURCES[name] is not None and data is None:
            raise InvalidInput(
                f"the corpus {name} is read from files: give their folder with --data, or your own file with --text."
            )
        return SOURCES[name]
    if locate(name, Path()) is None:
        raise InvalidInput(
            f"{name!r} is not a corpus of this study; there are {', '.join(SOURCES)}, files ({', '.join(ENDINGS)}), "
            "and datasets of the hub (owner/name[:config][:split])."
        )
    return sources.find_sources([Path(name)], None)[0]


def _problems() -> Iterator[QuestionAnswer]:
    for each in problems(NUM_PROBLEMS, split="test", seed=100):
        yield QuestionAnswer(each.question, each.solution)


def draw_blocks(name: str, data: Path | None, tokenizer: Tokenizer, spec: BlockSpec) -> list[Texts]:
    """Blocks of a corpus or file by chance; those of one group stand in texts of the same length."""
    source, generator = source_of(name, data), np.random.default_rng((spec.seed, 17))
    data = data or Path()
    if source is not None and source.kind == "text":
        return [_prose(token_stream(source, data, tokenizer), spec, generator)]
    pairs = encode_pairs(list(_problems() if source is None else read_pairs(source, data)), tokenizer)
    if tokenizer.eos_id is None:
        raise InvalidInput("the tokenizer has no end mark, so that answers have no end.")
    return _answers(pairs, tokenizer.eos_id, spec, generator, padded=name.endswith("padded"))


def draw_continuations(
    name: str, data: Path | None, tokenizer: Tokenizer, *, length: int, texts: int, seed: int = 0
) -> Int[Tensor, "B T"]:
    """Rows of so many tokens, side by side in the stream, some of them by chance; none has the end of a text in it."""
    source, generator = source_of(name, data), np.random.default_rng((seed, 23))
    assert source is not None, "no prose is generated"
    stream = token_stream(source, data or Path(), tokenizer)
    rows = _rows(stream, length)
    whole = rows if tokenizer.eos_id is None else rows[(rows != tokenizer.eos_id).all(1)]
    if not len(whole):
        raise FormatError(
            f"{name}: {len(stream)} tokens hold no text of {length} without an end; give longer ones, or shorter "
            "contexts."
        )
    return torch.from_numpy(whole[generator.permutation(len(whole))[:texts]])


def _rows(stream: NDArray[Any], length: int) -> NDArray[np.int64]:
    """Adjacent rows; a rest that fills no row is dropped."""
    return stream[: len(stream) // length * length].reshape(-1, length).astype(np.int64)


def _prose(stream: NDArray[Any], spec: BlockSpec, generator: np.random.Generator) -> Texts:
    """Random rows, with a block at random after the first quarter of each."""
    first, last = spec.row_length // 4, spec.row_length - spec.block_length
    rows = _rows(stream, spec.row_length)
    if not len(rows) or last < first:
        raise FormatError(
            f"{len(stream)} tokens in rows of {spec.row_length} hold no block of {spec.block_length} behind "
            f"{first} tokens; give longer texts, or rows of another length."
        )
    chosen = generator.permutation(len(rows))[: spec.blocks]
    step = spec.block_length if spec.on_grid else 1
    starts = step * generator.integers(min(-(-first // step), last // step), last // step + 1, len(chosen))
    return Texts(torch.from_numpy(rows[chosen]), torch.from_numpy(starts))


def _answers(
    pairs: Sequence[EncodedPair], eos: int, spec: BlockSpec, generator: np.random.Generator, *, padded: bool
) -> list[Texts]:
    """A random block of each answer, aligned to the answer; the last candidate holds the answer's end."""
    length = spec.block_length
    packing = PackingConfig(spec.row_length, length, spec.seed)
    groups: dict[int, list[tuple[NDArray[np.int64], int]]] = {}
    fitting = [(q, a) for q, a in pairs if len(q) + (len(a) // length + 1) * length <= spec.row_length]
    if not fitting:
        raise FormatError(f"no question with its answer fits {spec.row_length} tokens.")
    for number in generator.permutation(len(fitting))[: spec.blocks]:
        question, answer = fitting[number]
        extra = int(generator.choice(len(TAILS), p=TAILS))
        start = len(question) + length * int(generator.integers(len(answer) // length + 1))
        row = pad_answer(question, answer, extra, eos, packing).tokens.astype(np.int64)
        if spec.on_grid:  # a block that begins in the question is left out: it would be given half
            first, last = -(-len(question) // length), (len(question) + len(answer)) // length
            start = length * int(generator.integers(first, max(first, last) + 1))
            row = np.pad(row, (0, -len(row) % length), constant_values=eos)
        if padded:
            row = np.pad(row, (0, spec.row_length - len(row)), constant_values=eos)
        groups.setdefault(len(row), []).append((row, start))
    return [
        Texts(torch.from_numpy(np.stack([row for row, _ in group])), torch.tensor([start for _, start in group]))
        for _, group in sorted(groups.items())
    ]
