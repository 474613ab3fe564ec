"""Candidates and picks in PyTorch, for a whole batch. The host never looks at a value."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.ops.scaled import Scaled

RULES = ("low_confidence", "margin", "given")
"""What orders the positions: the best probability, its lead over the second, or numbers that are given."""
ROUNDING = 1e-5
"""How far the sum of all float32 probabilities may be from one."""


class Picked(NamedTuple):
    """One token of each sequence, its probability, and whether no token outside the candidates could change that.

    Where nothing was open, nothing was committed: ``sure`` is false there, and the rest says nothing.
    """

    positions: Int[Tensor, " B"]
    tokens: Int[Tensor, " B"]
    probabilities: Float[Tensor, " B"]
    sure: Bool[Tensor, " B"]


class Choice(NamedTuple):
    """The same with the number of a candidate instead of a token, and where there was something to choose."""

    positions: Int[Tensor, " B"]
    numbers: Int[Tensor, " B"]
    probabilities: Float[Tensor, " B"]
    sure: Bool[Tensor, " B"]
    some: Bool[Tensor, " B"]


def candidate_marginals(
    forward: Float[Tensor, "B L N"],
    backward: Float[Tensor, "B L N"],
    leaf: Float[Tensor, "B L N"],
    columns: Float[Tensor, "B L K N"],
    weights: Float[Tensor, "B L K"],
    candidates: Int[Tensor, "B L K"],
    tokens: Int[Tensor, "B L"],
    observed: Bool[Tensor, "B L"],
) -> Float[Tensor, "B L K"]:
    """log p of the candidates at every position."""
    cavity = forward * backward
    total = (cavity * leaf).sum(-1, keepdim=True)
    product = (cavity / total)[:, :, None] @ columns.to(cavity.dtype).mT
    known = torch.where(candidates == tokens[..., None], 0.0, -torch.inf).to(cavity.dtype)
    out = torch.where(observed[..., None], known, product[:, :, 0].log() + weights)
    return out.masked_fill(~(total > 0), -torch.inf)


def choose(
    log_p: Float[Tensor, "B L K"],
    open_: Bool[Tensor, "B L"],
    rule: str,
    given: Float[Tensor, "B L"] | None = None,
    partial: bool = True,
) -> Choice:
    """Which token of which position comes first; ``partial``: there are tokens besides those of ``log_p``."""
    best, number = log_p.max(-1)
    probability = best.exp()
    others = log_p.scatter(-1, number[..., None], -torch.inf)
    second = others.amax(-1).exp()
    order = probability if rule == "low_confidence" else probability - second
    if rule == "given":
        assert given is not None
        order = given.to(log_p.dtype)
    order = order.masked_fill(~open_, -torch.inf)
    first = order.amax(-1, keepdim=True)
    place = (open_ & (order == first)).to(torch.int8).argmax(-1, keepdim=True)
    rest = (1 - ROUNDING - log_p.exp().sum(-1)).clamp_min(0) if partial else torch.zeros_like(best)
    if rule == "margin":
        possible = torch.where(rest <= second, order, torch.maximum(rest, order + second))
    else:
        possible = rest if rule == "low_confidence" else torch.full_like(rest, -torch.inf)
    # Unless the second is a candidate, too, the lead itself is not certain.
    settled = rest <= (second if rule == "margin" else probability)
    here = [x.gather(-1, place)[:, 0] for x in (number, probability, settled)]
    some = open_.any(-1)
    sure = ((possible <= first) | ~open_).all(-1) & here[2] & some
    return Choice(place[:, 0], here[0], here[1], sure, some)


def pick(
    log_p: Float[Tensor, "B L K"],
    candidates: Int[Tensor, "B L K"],
    open_: Bool[Tensor, "B L"],
    rule: str,
    given: Float[Tensor, "B L"] | None,
    columns: Float[Tensor, "B L K N"],
    column_scale: Float[Tensor, "B L 1"] | None,
    leaf: Scaled,
    tokens: Int[Tensor, "B L"],
    observed: Bool[Tensor, "B L"],
) -> Picked:
    """Choose a token, and commit it: ``open_``, ``leaf``, ``tokens`` and ``observed`` change in place."""
    choice = choose(log_p, open_, rule, given)
    at = (torch.arange(len(log_p), device=log_p.device), choice.positions)
    token = candidates[(*at, choice.numbers)]
    column = columns[(*at, choice.numbers)].to(leaf.values.dtype)
    top = column.amax(-1, keepdim=True)
    top = torch.where(top > 0, top, 1)
    scale = top.log() if column_scale is None else top.log() + column_scale[at]
    new = (choice.some & ~observed[at])[:, None]
    leaf.values[at] = torch.where(new, column / top, leaf.values[at])
    leaf.log_scale[at] = torch.where(new, scale, leaf.log_scale[at])
    tokens[at] = torch.where(new[:, 0], token, tokens[at])
    observed[at] = observed[at] | choice.some
    open_.scatter_(1, choice.positions[:, None], False)
    return Picked(choice.positions, token, choice.probabilities.float(), choice.sure)
