"""Texts that no model here was trained on, and what studies take of them by chance."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from codd.backbones import Tokenizer
from codd.errors import FormatError, InvalidInput
from codd.training import corpus
from codd.training.recipe import Source

GSM8K = Source("qa", "gsm8k", path="gsm8k/test.jsonl")
SOURCES = {
    "books": Source("text", "books", path="books/test.jsonl.xz", fields=("text",)),
    "gsm8k": GSM8K,
    "gsm8k-padded": GSM8K,
    "wikitext103": Source("text", "wikitext103", path="wikitext103/test.txt.xz"),
    "problems": Source("problems", "problems", split="test", seed=100, count=2000),
}
"""An answer ends where training ends it, at a block's end; what is called padded has masks up to the end of a row
instead, which do not tell where the answer ends."""
PROSE = ("wikitext103", "books")
ROW_LENGTH = 384


class Texts(NamedTuple):
    """Rows of one length, and a block in each."""

    ids: Int[Tensor, "B T"]
    starts: Int[Tensor, " B"]


class Wanted(NamedTuple):
    """How many blocks of a corpus, and of which shape."""

    block_length: int
    blocks: int = 200
    row_length: int = ROW_LENGTH
    seed: int = 0


def draw_blocks(name: str, data: Path, tokenizer: Tokenizer, wanted: Wanted) -> list[Texts]:
    """Blocks of a corpus by chance; those of one group stand in texts of the same length."""
    source, generator = SOURCES[name], np.random.default_rng((wanted.seed, 17))
    if source.kind == "text":
        return [_prose(corpus.token_stream(source, data, tokenizer), wanted, generator)]
    pairs = corpus.encode_pairs(list(corpus.pairs(source, data)), tokenizer)
    if tokenizer.eos_id is None:
        raise InvalidInput("the tokenizer has no end mark, so that answers have no end.")
    return _answers(pairs, tokenizer.eos_id, wanted, generator, padded=name.endswith("padded"))


def draw_continuations(
    name: str, data: Path, tokenizer: Tokenizer, *, length: int, texts: int, seed: int = 0
) -> Int[Tensor, "B T"]:
    """Rows of so many tokens, side by side in the stream, some of them by chance; none has the end of a text in it."""
    stream, generator = corpus.token_stream(SOURCES[name], data, tokenizer), np.random.default_rng((seed, 23))
    rows = _rows(stream, length)
    whole = rows if tokenizer.eos_id is None else rows[(rows != tokenizer.eos_id).all(1)]
    if not len(whole):
        raise FormatError(
            f"{name}: {len(stream)} tokens hold no text of {length} without an end; give longer ones, or shorter "
            "contexts."
        )
    return torch.from_numpy(whole[generator.permutation(len(whole))[:texts]])


def _rows(stream: NDArray[Any], length: int) -> NDArray[np.int64]:
    """Side by side; what is left over at the end is left out."""
    return stream[: len(stream) // length * length].reshape(-1, length).astype(np.int64)


def _prose(stream: NDArray[Any], wanted: Wanted, generator: np.random.Generator) -> Texts:
    """Some rows by chance, and a block anywhere but in the first quarter."""
    first, last = wanted.row_length // 4, wanted.row_length - wanted.block_length
    rows = _rows(stream, wanted.row_length)
    if not len(rows) or last < first:
        raise FormatError(
            f"{len(stream)} tokens in rows of {wanted.row_length} hold no block of {wanted.block_length} behind "
            f"{first} tokens; give longer texts, or rows of another length."
        )
    chosen = generator.permutation(len(rows))[: wanted.blocks]
    starts = generator.integers(first, last + 1, len(chosen))
    return Texts(torch.from_numpy(rows[chosen]), torch.from_numpy(starts))


def _answers(
    pairs: Sequence[corpus.Encoded], eos: int, wanted: Wanted, generator: np.random.Generator, *, padded: bool
) -> list[Texts]:
    """A block on the grid of an answer, the one with its end at the latest."""
    length = wanted.block_length
    layout = corpus.Layout(wanted.row_length, length, wanted.seed)
    groups: dict[int, list[tuple[NDArray[np.int64], int]]] = {}
    fitting = [(q, a) for q, a in pairs if len(q) + (len(a) // length + 1) * length <= wanted.row_length]
    if not fitting:
        raise FormatError(f"no question with its answer fits {wanted.row_length} tokens.")
    for number in generator.permutation(len(fitting))[: wanted.blocks]:
        question, answer = fitting[number]
        extra = int(generator.choice(len(corpus.TAILS), p=corpus.TAILS))
        start = len(question) + length * int(generator.integers(len(answer) // length + 1))
        row = corpus._fill(question, answer, extra, eos, layout).tokens.astype(np.int64)
        if padded:
            row = np.pad(row, (0, wanted.row_length - len(row)), constant_values=eos)
        groups.setdefault(len(row), []).append((row, start))
    return [
        Texts(torch.from_numpy(np.stack([row for row, _ in group])), torch.tensor([start for _, start in group]))
        for _, group in sorted(groups.items())
    ]
