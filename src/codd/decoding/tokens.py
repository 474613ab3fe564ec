"""Choosing a token from each row of scores: greedily, or drawn from what top-k and top-p leave."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.sampling import draw_token


def keep_top_k(scores: Float[Tensor, "R V"], k: int | None) -> Float[Tensor, "R V"]:
    """Exclude all but the k largest of each row (and what equals the k-th)."""
    if k is None or k >= scores.shape[-1]:
        return scores
    least = scores.topk(k, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, -math.inf)


def keep_top_p(scores: Float[Tensor, "R V"], p: float | None) -> Float[Tensor, "R V"]:
    """Keep the smallest set of tokens whose probability exceeds p, the token that crosses it included."""
    if p is None or p >= 1:
        return scores
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    before[..., 0] = 0
    drop = before > p
    return scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)


def choose(
    scores: Float[Tensor, "R V"],
    uniforms: Float[Tensor, " R"] | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Int[Tensor, " R"]:
    """One token a row: at temperature 0 the best, else drawn by inverse CDF with one uniform number each."""
    if temperature == 0:
        return scores.argmax(-1)
    assert uniforms is not None
    kept = keep_top_p(keep_top_k(scores / temperature, top_k), top_p)
    return draw_token(kept.softmax(-1), uniforms)
