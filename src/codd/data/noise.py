"""Masking: which tokens a step hides, and what each hidden one counts.

Under uniform noise every scored token of a text is hidden with probability t, and counts 1 / t: the weighted sum of
their negative log-probabilities is then a bound on that of the whole text. Under block noise the scored tokens left of
one block are visible and those right of it hidden, as in block-wise decoding; only the block is noised and counts.
For a block-causal network these blocks are its own: counted from a text's first token, its question included.
t is drawn with low discrepancy over the batch: each of B texts has its own stratum of width 1 / B.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic.dataclasses import dataclass
from torch import Tensor

from codd.data.packing import PADDING
from codd.validation import BetweenZeroAndOne, Count, Positive, Section, Share


@dataclass(frozen=True)
class NoiseRecipe(Section):
    """The masking of training rows: noise levels, and the share of block noise."""

    minimum: BetweenZeroAndOne = 1e-3
    """The smallest masking probability; its inverse bounds the weight of a token."""
    block_share: Share = 0.4
    """Share of texts with one partly masked block, everything left of it visible and right of it masked."""
    block_length: Count = 32
    block_weight: Positive = 4.0
    """Weight of a token of such a block against one under uniform noise: a block has few."""


class Noise(NamedTuple):
    """Which tokens are masked, and what each counts in the loss."""

    hidden: Bool[Tensor, "B L"]
    weights: Float[Tensor, "B L"]
    """The weight of each token's loss; zero where nothing is predicted."""
    total: Float[Tensor, ""]
    """The weighted number of tokens that were at stake: what a loss is divided by."""


def stratified(
    rows: int, columns: int, generator: torch.Generator, device: torch.device
) -> Float[Tensor, "rows columns"]:
    """Numbers in [0, 1): those of a column are one in each stratum, in random order."""
    shift = torch.rand(1, columns, generator=generator, device=device)
    order = torch.rand(rows, columns, generator=generator, device=device).argsort(dim=0)
    return (order + shift) / rows


def add_noise(
    segments: Int[Tensor, "B L"],
    scored: Bool[Tensor, "B L"],
    texts: int,
    recipe: NoiseRecipe,
    generator: torch.Generator,
    *,
    absolute: bool = False,
) -> Noise:
    """Noise for one batch; every text (segment) of a row has its own level and kind.

    ``texts`` is above every segment number: stated, since looking for it would wait for a GPU. ``absolute``: blocks are
    counted from a text's first token, as a block-causal network counts them.
    """
    device, (rows, length) = segments.device, segments.shape
    level = recipe.minimum + (1 - recipe.minimum) * stratified(rows, texts, generator, device)
    in_blocks = torch.rand(rows, texts, generator=generator, device=device) < recipe.block_share
    choice = torch.rand(rows, texts, generator=generator, device=device)
    coins = torch.rand(rows, length, generator=generator, device=device)

    counts = torch.zeros(rows, texts, device=device).scatter_add_(1, segments, scored.float())
    unscored = torch.zeros_like(counts).scatter_add_(1, segments, torch.ones_like(coins)) - counts
    # A prose is entered anywhere, so that its blocks may begin anywhere; an answer's begin where the answer does.
    entered = torch.rand(rows, texts, generator=generator, device=device).mul(recipe.block_length).long()
    phase = unscored.long() % recipe.block_length if absolute else entered * (unscored == 0)
    blocks = ((counts.long() + phase - 1) // recipe.block_length + 1).clamp(min=1)
    chosen = (choice * blocks).long()

    t = level.gather(1, segments)
    blockwise = in_blocks.gather(1, segments)
    rank = positions_in(2 * segments + scored)  # of a scored token among those of its text, which stand side by side
    block = (rank + phase.gather(1, segments)) // recipe.block_length
    at = chosen.gather(1, segments)
    scored = scored & (segments != PADDING)
    noised = scored & (~blockwise | (block == at))
    hidden = (noised & (coins < t)) | (scored & blockwise & (block > at))
    importance = torch.where(blockwise, recipe.block_weight, 1.0) * noised
    return Noise(hidden, importance * hidden / t, importance.sum())


def segment_starts(segments: Int[Tensor, "B L"]) -> Int[Tensor, "B L"]:
    """The first position of the text that each position belongs to."""
    places = torch.arange(segments.shape[1], device=segments.device).expand(segments.shape)
    new = torch.ones_like(segments, dtype=torch.bool)
    new[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return torch.where(new, places, 0).cummax(dim=1).values


def positions_in(segments: Int[Tensor, "B L"]) -> Int[Tensor, "B L"]:
    """0, 1, ... from the beginning of each text."""
    return torch.arange(segments.shape[1], device=segments.device) - segment_starts(segments)
