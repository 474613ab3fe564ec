"""The loss of backbones: the masked diffusion bound, or next-token prediction for the causal model of comparison."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from codd.backbones.transformer import Transformer
from codd.data.noise import NoiseRecipe, add_noise, positions_in
from codd.data.packing import PADDING, PackedSequences


class Batch(NamedTuple):
    """What the network is shown, the targets, and the weight of each in the loss."""

    ids: Int[Tensor, "B L"]
    positions: Int[Tensor, "B L"]
    segments: Int[Tensor, "B L"]
    targets: Int[Tensor, "B L"]
    weights: Float[Tensor, "B L"]
    total: Float[Tensor, ""]
    """What the weighted sum of losses is divided by."""

    def part(self, begin: int, end: int) -> "Batch":
        """Some of the rows; the total stays that of the whole."""
        return Batch._make([*(x[begin:end] for x in self[:-1]), self.total])


Maker = Callable[[PackedSequences, torch.Generator], Batch]
"""Makes the batch of a step from its rows."""


def diffusion_batch(
    rows: PackedSequences, generator: torch.Generator, *, recipe: NoiseRecipe, mask_id: int, absolute: bool = False
) -> Batch:
    """Mask the rows; the masked tokens are the targets. ``absolute`` as for `add_noise`."""
    tokens, segments, scored = rows.tensors(generator.device)
    noised = add_noise(segments, scored, int(rows.segments.max()) + 1, recipe, generator, absolute=absolute)
    shown = torch.where(noised.hidden, mask_id, tokens)
    return Batch(shown, positions_in(segments), segments, tokens, noised.weights, noised.total)


def causal_batch(rows: PackedSequences, generator: torch.Generator) -> Batch:
    """The target at each position is the next token of its text."""
    tokens, segments, scored = rows.tensors(generator.device)
    targets = tokens.roll(-1, dims=1)
    follows = segments == segments.roll(-1, dims=1)
    follows[:, -1] = False
    weights = (follows & scored.roll(-1, dims=1) & (segments != PADDING)).float()
    return Batch(tokens, positions_in(segments), segments, targets, weights, weights.sum())


def loss_sum(network: Transformer, batch: Batch) -> Float[Tensor, ""]:
    """The weighted sum of negative log-probabilities of the targets."""
    states = network.states(batch.ids, batch.positions, segments=batch.segments)
    logits = network.logits(states).float()
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    return (losses * batch.weights.flatten()).sum()


@torch.no_grad()
def mean_loss(
    network: Transformer,
    rows: PackedSequences,
    make: Maker,
    *,
    seed: int,
    device: torch.device,
    at_once: int,
    draws: int = 1,
) -> float:
    """The bound (or, of a causal model, the exact value) per scored token, with noise that the seed fixes.

    All rows share one stratified draw of noise levels, so that few rows already give a steady estimate.
    """
    generator = torch.Generator(device).manual_seed(seed)
    lost, total = 0.0, 0.0
    for _ in range(draws):
        batch = make(rows, generator)
        for begin in range(0, len(batch.ids), at_once):
            lost += float(loss_sum(network, batch.part(begin, begin + at_once)))
        total += float(batch.total)
    return lost / max(total, 1.0)
