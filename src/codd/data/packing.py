"""Packed sequences: rows of equal length, cut from one long stream of prose or packed from questions and answers.

Row number n of a dataset is a function of n and the seed alone, epoch after epoch in another order. So a run that stops
goes on with exactly the rows that it would have seen.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

PADDING = 0
"""The segment number of positions that hold nothing."""
MAX_TEXTS_PER_ROW = 255
"""More would not fit the type of segment numbers."""
NARROW = 2**16
"""Vocabularies up to this size have ids of two bytes."""

Tokens = NDArray[np.unsignedinteger[Any]]
"""Ids in the smallest type that holds the vocabulary, see `token_dtype`."""


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Two bytes an id, or four where the vocabulary needs them."""
    return np.uint16 if vocab_size <= NARROW else np.uint32


def narrow(ids: Int[Tensor, "*shape"], vocab_size: int) -> Int[Tensor, "*shape"]:
    """Ids in two bytes, where the vocabulary allows it, or four; `widen` takes them back."""
    return ids.to(torch.int16 if vocab_size <= NARROW else torch.int32)


def widen(ids: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """As PyTorch indexes with them. Two bytes hold ids above 32,767 as negative numbers."""
    return ids.long() & 0xFFFF if ids.dtype == torch.int16 else ids.long()


def numbered_seed(seed: int, number: int) -> int:
    """A seed of its own for every step, shard or batch of rows of a run with this seed."""
    return (seed * 1_000_003 + number) % 2**63


class PackedSequences(NamedTuple):
    """Some rows. Texts that share a row have different segment numbers, from 1 on, and do not see each other."""

    tokens: Tokens
    segments: NDArray[np.uint8]
    scored: NDArray[np.bool_]
    """Which tokens are to be predicted: all of a prose, the answers of questions."""

    def tensors(self, device: torch.device) -> tuple[Int[Tensor, "B L"], Int[Tensor, "B L"], Bool[Tensor, "B L"]]:
        """Tokens, segments and which are scored, on a device; nothing waits for it."""
        columns = (self.tokens.astype("int64"), self.segments.astype("int64"), self.scored)
        tokens, segments, scored = (torch.from_numpy(x) for x in columns)
        if device.type != "cuda":
            return tokens, segments, scored
        # A copy from memory that is not pinned may wait.
        tokens, segments, scored = (x.pin_memory().to(device, non_blocking=True) for x in (tokens, segments, scored))
        return tokens, segments, scored


def concatenate(parts: Sequence[PackedSequences]) -> PackedSequences:
    """The rows of several, one after the other."""
    return PackedSequences(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _by_epoch(start: int, count: int, size: int, epoch_values: Callable[[int], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Values number start, start + 1, ... of epochs of ``size`` values each."""
    numbers = np.arange(start, start + count)
    values = np.empty(count, dtype=np.int64)
    for epoch in np.unique(numbers // size):
        here = numbers // size == epoch
        values[here] = epoch_values(int(epoch))[numbers[here] % size]
    return values


class StreamDataset:
    """Rows cut from a stream of tokens, each epoch at another offset."""

    def __init__(self, stream: Tokens, length: int, seed: int):
        """The stream must hold at least one row."""
        assert len(stream) >= length
        self.stream, self.length, self.seed = stream, length, seed
        self._starts = functools.lru_cache(maxsize=2)(self._draw_starts)  # drawing them takes long

    def __len__(self) -> int:
        """Whole rows that fit whatever the offset."""
        return max(1, len(self.stream) // self.length - 1)

    def take(self, start: int, count: int) -> PackedSequences:
        """``count`` rows, from row number ``start`` on; each is full, and one segment."""
        starts = _by_epoch(start, count, len(self), self._starts)
        tokens = self.stream[starts[:, None] + np.arange(self.length)]
        return PackedSequences(tokens, np.ones(tokens.shape, np.uint8), np.ones(tokens.shape, np.bool_))

    def _draw_starts(self, epoch: int) -> NDArray[np.int64]:
        generator = np.random.default_rng((self.seed, epoch))
        offset = int(generator.integers(len(self.stream) - len(self) * self.length + 1))
        return offset + generator.permutation(len(self)) * self.length


class PackedDataset:
    """Rows that were packed beforehand, each epoch in another order."""

    def __init__(self, rows: PackedSequences, seed: int):
        """Rows, of which there must be at least one; the seed is that of the orders."""
        assert len(rows.tokens)
        self.rows, self.seed = rows, seed
        self._order = functools.lru_cache(maxsize=2)(self._draw_order)  # for a million rows it takes as long as a step

    def __len__(self) -> int:
        """How many rows an epoch has."""
        return len(self.rows.tokens)

    def take(self, start: int, count: int) -> PackedSequences:
        """``count`` rows, from row number ``start`` on."""
        chosen = _by_epoch(start, count, len(self), self._order)
        return PackedSequences(self.rows.tokens[chosen], self.rows.segments[chosen], self.rows.scored[chosen])

    def _draw_order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self))


SequenceDataset: TypeAlias = StreamDataset | PackedDataset
"""A dataset of packed rows, numbered on without end from epoch to epoch."""


class Example(NamedTuple):
    """A question and its answer as tokens, the answer with its end mark and whatever fills its last block."""

    tokens: Tokens
    prompt: int
    """How many of the tokens are the question's."""


def pack(examples: Sequence[Example], length: int, pad_id: int, most: int = MAX_TEXTS_PER_ROW) -> PackedSequences:
    """Lay examples, ``most`` to a row, into as few rows as best fit manages; ones that are too long are left out."""
    bins = _best_fit([len(example.tokens) for example in examples], length, most)
    kind = examples[0].tokens.dtype if examples else np.uint16
    rows = PackedSequences(
        np.full((len(bins), length), pad_id, kind),
        np.full((len(bins), length), PADDING, np.uint8),
        np.zeros((len(bins), length), np.bool_),
    )
    for row, members in enumerate(bins):
        at = 0
        for segment, member in enumerate(members, start=1):
            tokens, prompt = examples[member]
            end = at + len(tokens)
            rows.tokens[row, at:end] = tokens
            rows.segments[row, at:end] = segment
            rows.scored[row, at + prompt : end] = True
            at = end
    return rows


def _best_fit(sizes: Sequence[int], capacity: int, most: int) -> list[list[int]]:
    """Which items share a bin: longest first, each into the bin that it fills best."""
    bins: list[list[int]] = []
    open_bins: dict[int, list[int]] = {}
    rooms = 0  # bit r is set while some bin has room for exactly r: the best bin is found without a search
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[item]
        if not 0 < size <= capacity:
            continue
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            chosen = open_bins[room].pop()
            if not open_bins[room]:
                rooms &= ~(1 << room)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        left = room - size
        if left and len(bins[chosen]) < most:
            open_bins.setdefault(left, []).append(chosen)
            rooms |= 1 << left
    return bins


class Mixture:
    """A fixed share of the rows from each source, exact in the long run.

    Rows are dealt one by one, the n-th of a source (from 0) when the deal reaches (n + 1/2) / share: so the rows of a
    source are never taken back, as they can be when the shares of a growing total are rounded.
    """

    def __init__(self, sources: Sequence[SequenceDataset], weights: Sequence[float], batch: int):
        """``batch`` rows per step; weights need not add to one."""
        self.sources, self.batch = list(sources), batch
        self.shares = np.asarray(weights, dtype=np.float64) / float(np.sum(weights))

    def batch_at(self, step: int) -> PackedSequences:
        """The rows of a step, grouped by source."""
        before, after = self._drawn(step), self._drawn(step + 1)
        parts = [
            source.take(int(begin), int(end - begin))
            for source, begin, end in zip(self.sources, before, after, strict=True)
            if end > begin
        ]
        return concatenate(parts)

    def _drawn(self, steps: int) -> NDArray[np.int64]:
        """Rows taken from each source in a number of steps."""
        rows = steps * self.batch
        # As many sources before the end, no more than the rows up to there are dealt; the last few are dealt singly.
        surely = max(0, rows - len(self.sources))
        drawn = np.floor(surely * self.shares + 0.5).astype(np.int64)
        for _ in range(rows - int(drawn.sum())):
            drawn[np.argmin((drawn + 0.5) / self.shares)] += 1
        return drawn
