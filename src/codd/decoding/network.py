"""How steps get hidden states from the network: what is recomputed and what is cached is a runner's affair."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.decoding.accelerate import cuda_graphs
from codd.decoding.state import HiddenStates, SequenceState, Window

LENGTH_MULTIPLE = 32
"""The length of a ragged batch is rounded up to a multiple of this on a GPU, so that few graphs serve most batches."""


class StateRequest(NamedTuple):
    """The hidden states that a step needs: of some positions of a sequence, as it is or with its prompt hidden."""

    state: SequenceState
    """The sequence that the ids are of; a cache is keyed by it."""
    ids: Int[Tensor, " L"]
    """All that the network is to see: of a block-causal one nothing beyond the blocks of the span."""
    span: Window
    """The positions whose states are needed."""
    begin: int = 0
    """The position of the first of ``ids``."""


@runtime_checkable
class NetworkRunner(Protocol):
    """Evaluates the network for the sequences that share a step."""

    def __call__(self, requests: Sequence[StateRequest]) -> list[HiddenStates]:
        """The states of each request, covering at least its span."""

    def logits(self, rows: Sequence[Float[Tensor, "_ d"]], mask_id: int) -> list[Float[Tensor, "_ V"]]:
        """What the head makes of hidden states, as those of masked positions."""

    def admit(self, state: SequenceState) -> bool:
        """Take what memory a sequence needs before its first request; False while there is none."""

    def release(self, state: SequenceState) -> None:
        """Give back what a sequence holds; nothing if it holds nothing."""


class FullRecompute:
    """The exact runner: every position of every sequence in every step, no cache.

    On a CPU the backbone evaluates sequences one by one, so that each is what it is alone, to the bit. On a GPU they
    are one batch, whose shape changes how it rounds; ``one_by_one``: there too, at the price of batching.
    """

    def __init__(self, backbone: Backbone, *, one_by_one: bool = False):
        """Run ``backbone`` on its own device."""
        self.backbone, self.one_by_one = backbone, one_by_one

    def __call__(self, requests: Sequence[StateRequest]) -> list[HiddenStates]:
        """The hidden states of all positions of each request's ids."""
        sequences = [request.ids for request in requests]
        if not self.one_by_one:
            hidden = self._batch(sequences)
        else:  # cloned: the next call overwrites what a graph gave
            hidden = [self._states(ids[None], None)[0].clone() for ids in sequences]
        for request in requests:
            request.state.computed = request.state.cached = 0
        for request in requests:  # with guidance there are two of a sequence
            request.state.computed += len(request.ids)
        return [HiddenStates(request.begin, states) for request, states in zip(requests, hidden, strict=True)]

    def logits(self, rows: Sequence[Float[Tensor, "_ d"]], mask_id: int) -> list[Float[Tensor, "_ V"]]:
        """What the head makes of hidden states: of all sequences together where the network is evaluated so."""
        if self.one_by_one or self.backbone.device.type == "cpu":
            return [self._logits(each, mask_id) for each in rows]
        return list(torch.split(self._logits(torch.cat(list(rows)), mask_id), [len(each) for each in rows]))

    def _logits(self, rows: Float[Tensor, "n d"], mask_id: int) -> Float[Tensor, "n V"]:
        return self.backbone.masked_logits_from_states(rows[None], mask_id=mask_id, exclude_mask=False)[0]

    def admit(self, state: SequenceState) -> bool:
        """True: without a cache a sequence needs no memory between steps."""
        return True

    def release(self, state: SequenceState) -> None:
        """Do nothing: without a cache a sequence holds no memory."""

    def _batch(self, sequences: Sequence[Int[Tensor, " _"]]) -> list[Float[Tensor, "_ d"]]:
        pad = self.backbone.special.pad if self.backbone.special.pad is not None else 0
        lengths = {len(ids) for ids in sequences}
        length = self._padded_length(max(lengths))
        # A block-causal network is shown more with every block: unpadded, each length would be captured anew.
        if len(lengths) == 1 and (self.backbone.block_size is None or length in lengths):
            return list(self._states(torch.stack(list(sequences)), None))
        ids, valid = pad_left(sequences, pad, torch.device("cpu"), length)
        states = self._states(ids, valid)
        return [row[ids.shape[1] - len(own) :] for row, own in zip(states, sequences, strict=True)]

    def _states(self, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None) -> Float[Tensor, "B L d"]:
        """The last hidden states. On a GPU the next call overwrites them."""
        if self.backbone.device.type == "cuda":
            return cuda_graphs.network_states(self.backbone, ids, valid)
        return self.backbone.states(ids, valid, fill_padding=False)

    def _padded_length(self, longest: int) -> int:
        if self.backbone.device.type != "cuda":
            return longest
        rounded, limit = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, self.backbone.max_length
        return rounded if limit is None else max(longest, min(rounded, limit))


def pad_left(
    sequences: Sequence[Sequence[int] | Tensor], pad_id: int, device: torch.device, at_least: int = 0
) -> tuple[Tensor, Tensor]:
    """One batch of sequences of any lengths: ids (B, L), and which of them are real (B, L)."""
    longest = max(at_least, max(map(len, sequences), default=0))
    ids = torch.full((len(sequences), longest), pad_id, dtype=torch.long)
    valid = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        start = longest - len(sequence)
        ids[row, start:] = torch.as_tensor(sequence, dtype=torch.long)
        valid[row, start:] = True
    return ids.to(device), valid.to(device)
