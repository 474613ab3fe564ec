"""Which tokens come first. Every rule gives larger numbers to positions that may be committed earlier."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def probability_of(log_p: Float[Tensor, "R V"], tokens: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """Of one token a row."""
    return log_p.gather(-1, tokens[:, None])[:, 0].exp()


def margin(log_p: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """How far the most probable token is ahead of the second."""
    if log_p.shape[-1] == 1:
        return log_p[:, 0].exp()
    top = log_p.topk(2, dim=-1).values.exp()
    return top[:, 0] - top[:, 1]


def entropy(log_p: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """In nats."""
    return -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)


def order_of(
    rule: str,
    scores: Float[Tensor, "R V"],
    log_p: Float[Tensor, "R V"],
    tokens: Int[Tensor, " R"],
    uniforms: Float[Tensor, " R"] | None,
    sharpening: float,
) -> Float[Tensor, " R"]:
    """The order of some rows, by position from left to right, of which a token each is proposed.

    ``scores`` are logits, ``log_p`` their log-softmax; ``uniforms`` are for the random order.
    """
    if rule == "low_confidence":
        return probability_of(log_p, tokens)
    if rule == "sharpened":
        return probability_of((scores / sharpening).log_softmax(-1), tokens)
    if rule == "margin":
        return margin(log_p)
    if rule == "entropy":
        return -entropy(log_p)
    if rule == "random":
        assert uniforms is not None
        return uniforms
    assert rule == "left_to_right"
    return torch.arange(len(tokens), 0, -1, dtype=log_p.dtype, device=log_p.device)


def ranked(order: Float[Tensor, " R"]) -> Int[Tensor, " R"]:
    """Rows from first to last; of equals, the leftmost comes first."""
    return order.argsort(descending=True, stable=True)
