"""Windows as a cache keeps them: the network's distribution of each masked token, cut to the top k and a tail.

The first of a list is always the truth, in float32; the others are the most probable ones beside it, in float16, the
largest first. The tail is the mass of all that are not listed. The lists of masked positions stand one after the
other, and a window knows where its own begin.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.evidence import SparsePotentials
from codd.data.packing import narrow, widen
from codd.data.windows import WindowBatch


class TopK(NamedTuple):
    """The top K entries of M distributions over the tokens, the truth first, and the mass of the rest."""

    ids: Int[Tensor, "M K"]
    log_probs: Float[Tensor, "M K"]
    truth: Float[Tensor, " M"]
    """The log-probability of the truth, NaN if the network gave no numbers."""
    tail: Float[Tensor, " M"]
    """The log-probability of all tokens that are not listed, together."""


def keep_top_k(logits: Float[Tensor, "M V"], truth: Int[Tensor, " M"], k: int) -> TopK:
    """The truth, the k - 1 most probable others, and the mass of the rest."""
    log_probs = logits.float().log_softmax(-1)
    ids = log_probs.scatter(-1, truth[:, None], torch.inf).topk(k, dim=-1).indices
    tail = log_probs.scatter(-1, ids, -torch.inf).logsumexp(-1)
    kept = log_probs.gather(-1, ids)
    return TopK(narrow(ids, logits.shape[-1]), kept.half(), kept[:, 0].clone(), tail)


@dataclass(frozen=True, eq=False)
class CachedWindows:
    """A dataset of W windows of S positions, M of which are masked."""

    tokens: Int[Tensor, "W S"]
    """The true tokens, stored in two or four bytes each; see `codd.data.packing.narrow`."""
    masked: Bool[Tensor, "W S"]
    level: Float[Tensor, " W"]
    lists: TopK
    """The lists of the masked positions, one after the other."""
    features: Float[Tensor, "W S d"] | None = None
    complete: bool = False
    """Whether the lists hold the whole vocabulary, as those of small ones do."""
    begins: Int[Tensor, " W"] = field(init=False)
    """The number of the first list of each window."""

    def __post_init__(self) -> None:
        """Count where the lists of each window begin."""
        counts = self.masked.sum(-1)
        object.__setattr__(self, "begins", counts.cumsum(0) - counts)

    def __len__(self) -> int:
        """How many windows there are."""
        return len(self.tokens)

    def windows(self, index: Int[Tensor, " n"]) -> WindowBatch:
        """Some windows with their top-k distributions, as logits if those are complete.

        Nothing here waits for the device if ``index`` is on it. At positions that are not masked stand lists of others,
        which nobody reads.
        """
        masked = self.masked[index]
        entry = torch.where(masked, self.begins[index][:, None] + masked.cumsum(-1) - 1, 0)
        ids, log_probs, truth, tail = (x[entry] for x in self.lists)
        ids, log_weights = widen(ids), log_probs.float()
        log_weights[..., 0] = truth
        return WindowBatch(
            widen(self.tokens[index]),
            masked,
            logits=torch.zeros_like(log_weights).scatter(-1, ids, log_weights) if self.complete else None,
            sparse=None if self.complete else SparsePotentials(ids, log_weights, tail),
            features=None if self.features is None else self.features[index].float(),
            level=self.level[index],
        )

    def part(self, begin: int, end: int) -> "CachedWindows":
        """The windows from ``begin`` to before ``end``."""
        here, ends = slice(begin, end), [0, *self.masked.sum(-1).cumsum(0).tolist()]
        lists = TopK(*(x[ends[begin] : ends[min(end, len(self))]] for x in self.lists))
        features = None if self.features is None else self.features[here]
        return CachedWindows(self.tokens[here], self.masked[here], self.level[here], lists, features)


def join(parts: Iterable[CachedWindows], windows: int, masked: int, device: torch.device | str) -> CachedWindows:
    """The windows of all parts, in memory of a device that is allocated once: torch.cat at the end would take it twice.

    ``windows`` is how many there are, ``masked`` at least how many lists.
    """

    def room(rows: int, x: Tensor) -> Tensor:
        return torch.empty(rows, *x.shape[1:], dtype=x.dtype, device=device)

    columns: list[Tensor] = []
    lists: list[Tensor] = []
    at, listed = 0, 0
    for part in parts:
        new = [x for x in (part.tokens, part.masked, part.level, part.features) if x is not None]
        columns = columns or [room(windows, x) for x in new]
        lists = lists or [room(masked, x) for x in part.lists]
        for whole, x in zip(columns, new, strict=True):
            whole[at : at + len(part)] = x
        for whole, x in zip(lists, part.lists, strict=True):
            whole[listed : listed + len(x)] = x
        at, listed = at + len(part), listed + len(part.lists.truth)
    assert at == windows
    tokens, hidden, level, *features = columns
    return CachedWindows(tokens, hidden, level, TopK(*(x[:listed] for x in lists)), features[0] if features else None)
