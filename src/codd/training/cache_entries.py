"""Windows as a cache keeps them: what the network said of each masked token, shortened to a list of k and a tail.

The first of a list is always the truth, in float32; the others are the most probable ones beside it, in float16, the
largest first. The tail is the mass of all that are not listed. Entries of masked positions stand one after the other,
and a window knows where its own begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.evidence import SparsePotentials
from codd.training.windows import Windows

NARROW = 2**16
"""Vocabularies up to this size have ids of two bytes."""


class Shortlist(NamedTuple):
    """What is kept of M distributions over the tokens."""

    ids: Int[Tensor, "M K"]
    log_probs: Float[Tensor, "M K"]
    truth: Float[Tensor, " M"]
    """The log-probability of the truth, NaN if the network gave no numbers."""
    tail: Float[Tensor, " M"]
    """The logarithm of what the others have together."""


def shorten(logits: Float[Tensor, "M V"], truth: Int[Tensor, " M"], k: int) -> Shortlist:
    """The truth, the k - 1 most probable others, and the mass of the rest."""
    log_probs = logits.float().log_softmax(-1)
    ids = log_probs.scatter(-1, truth[:, None], torch.inf).topk(k, dim=-1).indices
    tail = log_probs.scatter(-1, ids, -torch.inf).logsumexp(-1)
    kept = log_probs.gather(-1, ids)
    return Shortlist(narrow(ids, logits.shape[-1]), kept.half(), kept[:, 0].clone(), tail)


def narrow(ids: Int[Tensor, "*shape"], vocab_size: int) -> Int[Tensor, "*shape"]:
    """Ids in two bytes, where the vocabulary allows it, or four; `widen` takes them back."""
    return ids.to(torch.int16 if vocab_size <= NARROW else torch.int32)


def widen(ids: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """As PyTorch indexes with them. Two bytes hold ids above 32,767 as negative numbers."""
    return ids.long() & 0xFFFF if ids.dtype == torch.int16 else ids.long()


@dataclass(frozen=True, eq=False)
class Entries:
    """W windows of S positions, M of which are masked."""

    tokens: Int[Tensor, "W S"]
    """Narrow."""
    masked: Bool[Tensor, "W S"]
    level: Float[Tensor, " W"]
    begins: Int[Tensor, " W"]
    """The first list of each window."""
    lists: Shortlist
    """Of the masked positions, one after the other."""
    features: Float[Tensor, "W S d"] | None = None

    @classmethod
    def of(
        cls,
        tokens: Int[Tensor, "W S"],
        masked: Bool[Tensor, "W S"],
        level: Float[Tensor, " W"],
        lists: Shortlist,
        features: Float[Tensor, "W S d"] | None = None,
    ) -> "Entries":
        """Counts where the lists of each window begin."""
        counts = masked.sum(-1)
        return cls(tokens, masked, level, counts.cumsum(0) - counts, lists, features)

    def __len__(self) -> int:
        """How many windows there are."""
        return len(self.tokens)

    def windows(self, index: Int[Tensor, " n"]) -> Windows:
        """Some windows, as a circuit meets them. Nothing here waits for the device if ``index`` is on it.

        The lists of positions that are not masked are someone else's: nobody looks at them.
        """
        masked = self.masked[index]
        entry = torch.where(masked, self.begins[index][:, None] + masked.cumsum(-1) - 1, 0)
        ids, log_probs, truth, tail = (x[entry] for x in self.lists)
        log_weights = log_probs.float()
        log_weights[..., 0] = truth
        return Windows(
            widen(self.tokens[index]),
            masked,
            sparse=SparsePotentials(widen(ids), log_weights, tail),
            features=None if self.features is None else self.features[index].float(),
            level=self.level[index],
        )

    def part(self, begin: int, end: int) -> "Entries":
        """The windows from ``begin`` to before ``end``."""
        here, ends = slice(begin, end), [0, *self.masked.sum(-1).cumsum(0).tolist()]
        lists = Shortlist(*(x[ends[begin] : ends[min(end, len(self))]] for x in self.lists))
        features = None if self.features is None else self.features[here]
        return Entries.of(self.tokens[here], self.masked[here], self.level[here], lists, features)

    def to(self, device: torch.device | str) -> "Entries":
        """The same on another device."""
        lists = Shortlist(*(x.to(device) for x in self.lists))
        features = None if self.features is None else self.features.to(device)
        tokens, masked, level, begins = (x.to(device) for x in (self.tokens, self.masked, self.level, self.begins))
        return Entries(tokens, masked, level, begins, lists, features)

    @staticmethod
    def joined(parts: Sequence["Entries"]) -> "Entries":
        """Several, one after the other."""
        room = Room(parts[0], sum(map(len, parts)), sum(len(part.lists.truth) for part in parts), "cpu")
        for part in parts:
            room.add(part)
        return room.entries()


class Room:
    """Memory for entries that come bit by bit, taken once: joining them at the end would take it twice."""

    def __init__(self, like: Entries, windows: int, lists: int, device: torch.device | str):
        """For at most so many windows and lists of the same shape as some others."""

        def empty(rows: int, x: Tensor) -> Tensor:
            return torch.empty(rows, *x.shape[1:], dtype=x.dtype, device=device)

        self._whole = Entries(
            tokens=empty(windows, like.tokens),
            masked=empty(windows, like.masked),
            level=empty(windows, like.level),
            begins=empty(windows, like.begins),
            lists=Shortlist(*(empty(lists, x) for x in like.lists)),
            features=None if like.features is None else empty(windows, like.features),
        )
        self._windows, self._lists = 0, 0

    def add(self, part: Entries) -> None:
        """The next ones."""
        here, there = (
            slice(at, at + n) for at, n in ((self._windows, len(part)), (self._lists, len(part.lists.truth)))
        )
        whole = self._whole
        for old, new in ((whole.tokens, part.tokens), (whole.masked, part.masked), (whole.level, part.level)):
            old[here] = new.to(old.device)
        whole.begins[here] = part.begins.to(whole.begins.device) + self._lists
        for old, new in zip(whole.lists, part.lists, strict=True):
            old[there] = new.to(old.device)
        if whole.features is not None and part.features is not None:
            whole.features[here] = part.features.to(whole.features.device)
        self._windows, self._lists = here.stop, there.stop

    def entries(self) -> Entries:
        """All that came."""
        assert self._windows == len(self._whole)
        return replace(self._whole, lists=Shortlist(*(x[: self._lists] for x in self._whole.lists)))
