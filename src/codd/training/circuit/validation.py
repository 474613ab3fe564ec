"""Validation of a circuit: what one step says about held-out text, and how much of the gap to many steps is closed.

What does not depend on the circuit is computed once: the network's states of each block at each mask ratio, its own
factorized score, and the score of writing one token at a time. `codd.evaluation.misspecification` measures the same of
a finished model, by the same code.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from codd.backbones.backbone import Backbone
from codd.circuits import ProbabilisticCircuit
from codd.coupling.gap import Blocks, MaskedBlocks, evaluate_blocks, joined, masked_counts, summary
from codd.data.noise import positions_in
from codd.data.packing import PackedSequences
from codd.data.windows import CPU, sample_blocks
from codd.errors import InvalidInput


@dataclass(frozen=True)
class HeldOut:
    """One block of each of some rows, as the network sees it at each mask ratio."""

    backbone: Backbone
    mask_id: int
    counts: Mapping[float, int]
    """How many tokens of a block each ratio masks."""
    blocks: Blocks
    parts: Sequence[Mapping[int, MaskedBlocks]]

    @classmethod
    def prepare(
        cls, backbone: Backbone, mask_id: int, rows: PackedSequences, size: int, ratios: Sequence[float], seed: int
    ) -> "HeldOut":
        """Evaluate the network. The seed fixes blocks and masks; those of a higher ratio contain the lower's."""
        counts = masked_counts(ratios, size)
        blocks = held_out_blocks(rows, size, seed, absolute=backbone.block_size is not None)
        parts = list(evaluate_blocks(backbone, blocks, set(counts.values()), mask_id))
        return cls(backbone, mask_id, counts, blocks, parts)

    def is_finite(self) -> bool:
        """Whether the network gave numbers everywhere."""
        return not any(bool(at.sequential.isnan().any()) for part in self.parts for at in part.values())

    @torch.no_grad()
    def scores(self, circuit: ProbabilisticCircuit) -> dict[float, dict[str, float]]:
        """At each mask ratio the figures that `codd.coupling.gap.summary` gives."""
        found = {}
        for ratio, count in self.counts.items():
            scores = joined([part[count].scores(self.backbone, {"": circuit}, self.mask_id) for part in self.parts])
            found[ratio] = summary(scores, scores.coupled[""])
        return found


def held_out_blocks(rows: PackedSequences, size: int, seed: int, *, absolute: bool) -> Blocks:
    """A block of each row that has one, with the text around it; ``absolute`` as for `mask_rows`."""
    generator = torch.Generator().manual_seed(seed)
    first, valid, order = sample_blocks(rows, size, generator, absolute=absolute)
    if not bool(valid.any()):
        raise InvalidInput(f"no block of {size} tokens fits the held-out text. Give longer texts.")
    keep = valid[:, 0]
    tokens, segments, scored, first, order = (x[keep] for x in (*rows.tensors(CPU), first, order))
    starts = positions_in(segments).gather(1, first)
    own = segments == segments.gather(1, first)
    places = first - starts + torch.arange(int(own.sum(1).max()))
    inside = places < segments.shape[1]
    places = places.clamp(max=segments.shape[1] - 1)
    inside &= own.gather(1, places)
    given = inside & ~scored.gather(1, places)
    return Blocks(tokens.gather(1, places), starts[:, 0], order.flip(1), None if bool(inside.all()) else inside, given)
