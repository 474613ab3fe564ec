"""Samples of chains, tokens by inverse CDF from explicit uniform numbers."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence
from codd.circuits.ops.path.reference import draw
from codd.circuits.results import Samples
from codd.errors import InvalidEvidence

_BLOCK = 64


def sample_uniforms(
    ev: Evidence, num_samples: int | None, generator: torch.Generator | None
) -> Float[Tensor, "B S L 2"]:
    """Two numbers for every position of every sample: one decides its latent, one its token."""
    if num_samples is not None and num_samples < 1:
        raise InvalidEvidence(f"num_samples must be at least 1, found {num_samples}")
    batch, length = ev.shape
    return torch.rand(batch, num_samples or 1, length, 2, generator=generator, device=ev.device)


def as_asked(
    tokens: Int[Tensor, "B S L"], latents: Int[Tensor, "B S L"], log_z: Float[Tensor, " B"], num_samples: int | None
) -> Samples:
    """The samples with their axis in front, or the only one without it."""
    if num_samples is None:
        return Samples(tokens[:, 0], latents[:, 0], log_z)
    return Samples(tokens.transpose(0, 1), latents.transpose(0, 1), log_z)


def draw_token(weights: Float[Tensor, "R V"], uniform: Float[Tensor, " R"]) -> Int[Tensor, " R"]:
    """Inverse-CDF sampling over a vocabulary, in two levels: first a block of tokens, then a token inside it.

    Summing blocks is several times faster than one cumulative sum over the row, and rounds less. A token of weight zero
    is never drawn, however sums round, unless there is no other.
    """
    token = draw(weights, uniform) if weights.shape[1] <= 4 * _BLOCK else _draw_in_blocks(weights, uniform)
    weight = weights.gather(-1, token[:, None])[:, 0]
    if weights.device.type == "cpu" and bool((weight > 0).all()):  # elsewhere, looking would wait for the device
        return token
    return torch.where(weight > 0, token, weights.argmax(-1))


def _draw_in_blocks(weights: Float[Tensor, "R V"], uniform: Float[Tensor, " R"]) -> Int[Tensor, " R"]:
    rows, vocab = weights.shape
    whole = vocab // _BLOCK * _BLOCK
    blocks = weights[:, :whole].reshape(rows, whole // _BLOCK, _BLOCK)
    mass = blocks.sum(-1)
    if whole < vocab:
        mass = torch.cat([mass, weights[:, whole:].sum(-1, keepdim=True)], -1)
    cumulative = mass.cumsum(-1)
    threshold = uniform.to(weights.dtype) * cumulative[:, -1] * (1 - 2**-23)
    block = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0].clamp_max_(mass.shape[1] - 1)
    # What is left of the threshold inside the block is again uniform.
    here = mass.gather(-1, block[:, None])[:, 0]
    inside = (threshold - (cumulative.gather(-1, block[:, None])[:, 0] - here)) / torch.where(here > 0, here, 1)
    offsets = (block * _BLOCK)[:, None] + torch.arange(_BLOCK, device=weights.device)
    beyond = offsets >= vocab
    candidates = weights.gather(-1, offsets.clamp_max(vocab - 1)).masked_fill_(beyond, 0)
    return (block * _BLOCK + draw(candidates, inside.clamp_(0, 1))).clamp_max_(vocab - 1)
