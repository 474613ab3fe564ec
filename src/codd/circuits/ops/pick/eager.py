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
    """One token of each sequence (`choose`: the number of a candidate), its probability, and whether it was committed.

    Where it was not, because nothing was open or the picks have ended, it says nothing.
    """

    positions: Int[Tensor, " B"]
    tokens: Int[Tensor, " B"]
    probabilities: Float[Tensor, " B"]
    sure: Bool[Tensor, " B"]
    """Whether no token outside the candidates could change any of that; false where nothing is possible."""
    keep: Bool[Tensor, " B"]


class Offers(NamedTuple):
    """A token for every position, from which the first is taken."""

    tokens: Int[Tensor, "B L"]
    probabilities: Float[Tensor, "B L"]
    order: Float[Tensor, "B L"]
    """Sort key of each position: the largest is taken first."""
    entropies: Float[Tensor, "B L"]
    """Entropy of the distribution that each token is from, in nats; all zero where there is no budget."""


class Limits(NamedTuple):
    """When picks end: at a probability below a threshold, or when the entropies reach a budget; never at the first."""

    first: bool
    threshold: float | None
    budget: float | None
    spent: Float[Tensor, " B"]
    """The entropies so far: changes in place."""


def candidate_marginals(
    forward: Float[Tensor, "B L N"],
    backward: Float[Tensor, "B L N"],
    leaf: Float[Tensor, "B L N"],
    columns: Float[Tensor, "B L K N"],
    weights: Float[Tensor, "B L K"],
    candidates: Int[Tensor, "B L K"],
    tokens: Int[Tensor, "B L"],
    observed: Bool[Tensor, "B L"],
    open_: Bool[Tensor, "B L"] | None = None,
) -> Float[Tensor, "B L K"]:
    """log p of the candidates at every position; anything in sequences with no position in ``open_``."""
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
    threshold: float | None = None,
) -> Picked:
    """Which token of which position comes first, if it reaches the threshold.

    ``partial``: there are tokens besides those of ``log_p``.
    """
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
    some = (open_ & (order == first)).any(-1)  # none is where all are NaN
    sure = ((possible <= first) | ~open_).all(-1) & here[2] & some
    ends = torch.zeros_like(some) if threshold is None else here[1] < threshold
    if threshold is not None:  # that nothing reaches it may be certain where it is not what comes first
        sure = torch.where(ends, ((rest < threshold) | ~open_).all(-1), sure)
    return Picked(place[:, 0], here[0], here[1], sure | ~open_.any(-1), some & ~ends)


def close(open_: Bool[Tensor, "B L"], positions: Int[Tensor, " B"], keep: Bool[Tensor, " B"]) -> None:
    """Close a position where its token was committed, and all of them where the picks have ended."""
    open_.scatter_(1, positions[:, None], False)
    open_ &= keep[:, None]


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
    threshold: float | None = None,
) -> Picked:
    """Choose a token, and commit it: ``open_``, ``leaf``, ``tokens`` and ``observed`` change in place."""
    choice = choose(log_p, open_, rule, given, threshold=threshold)
    at = (torch.arange(len(log_p), device=log_p.device), choice.positions)
    token = candidates[(*at, choice.tokens)]
    column = columns[(*at, choice.tokens)].to(leaf.values.dtype)
    top = column.amax(-1, keepdim=True)
    top = torch.where(top > 0, top, 1)
    scale = top.log() if column_scale is None else top.log() + column_scale[at]
    new = (choice.keep & ~observed[at])[:, None]
    leaf.values[at] = torch.where(new, column / top, leaf.values[at])
    leaf.log_scale[at] = torch.where(new, scale, leaf.log_scale[at])
    tokens[at] = torch.where(new[:, 0], token, tokens[at])
    observed[at] = observed[at] | choice.keep
    close(open_, choice.positions, choice.keep)
    return Picked(choice.positions, token, choice.probabilities.float(), choice.sure, choice.keep)


def first_offer(offers: Offers, open_: Bool[Tensor, "B L"], limits: Limits) -> Picked:
    """Which of the offers is taken: the first among those that reach the threshold, or among all if none does."""
    passed = open_ if limits.threshold is None else open_ & (offers.probabilities >= limits.threshold)
    eligible = torch.where(passed.any(-1, keepdim=True), passed, open_)
    order = offers.order.masked_fill(~eligible, -torch.inf)
    hit = eligible & (order == order.amax(-1, keepdim=True))
    place = hit.to(torch.int8).argmax(-1, keepdim=True)
    some = hit.any(-1)  # none is where all are NaN
    token, probability, entropy = (
        part.gather(-1, place)[:, 0] for part in (offers.tokens, offers.probabilities, offers.entropies)
    )
    limits.spent.add_(torch.where(some, entropy, 0))
    ends = torch.zeros_like(some)
    if not limits.first and limits.threshold is not None:
        ends |= probability < limits.threshold
    if not limits.first and limits.budget is not None:
        ends |= limits.spent >= limits.budget
    sure = (some & (ends | (probability > 0))) | ~open_.any(-1)
    return Picked(place[:, 0], token, probability, sure, some & ~ends)
