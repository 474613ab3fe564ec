"""The commit loop in PyTorch, for any conditioner; the host looks at every step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.ops.sampling_rule import ROUNDING, Committed, SamplingRule

if TYPE_CHECKING:
    from codd.circuits.protocol import Conditioner

CERTAIN = 1 - 1e-6
"""Tokens at least so probable are committed together: what is certain stays so, whatever else is committed."""


class _Step(NamedTuple):
    """One position, its token and the token's probability; or several that are certain."""

    positions: Int[Tensor, " k"]
    tokens: Int[Tensor, " k"]
    probabilities: Float[Tensor, " k"]
    entropy: float = 0.0


def commit_tokens(
    conditioner: "Conditioner",
    open_: Bool[Tensor, " L"],
    uniforms: Float[Tensor, " L"],
    given: Float[Tensor, " L"] | None,
    rule: SamplingRule,
    steps: Sequence[tuple[Tensor, Tensor, Tensor]] = (),
) -> Committed:
    """Choose the token that comes first among the open positions, and commit it; again, until the rule says enough.

    Args:
        conditioner: of one sequence; it changes.
        open_: the positions that may be committed.
        uniforms: one number in [0, 1) per position, which draws its token in every step.
        given: for the order "given", the sort key of each position.
        rule: how tokens are chosen, and how many.
        steps: position, token and probability of what was chosen before: it is committed first, and counts.

    Returns:
        What was committed, in order; invalid where the evidence has probability zero.
    """
    open_, found = open_.clone(), [_Step(*each) for each in steps]
    if float(conditioner.log_partition[0]) == -torch.inf:
        found, open_ = [], torch.zeros_like(open_)
    for step in found:
        _commit(conditioner, step, open_)
    free = conditioner.certain_is_free and not rule.adaptive
    threshold, budget = rule.limits
    spent, done = 0.0, len(found)
    while done < rule.most and bool(open_.any()):
        left = None if free else rule.most - done
        due = open_ if rule.due is None else open_ & rule.due
        held_back = done >= rule.least or not bool(due.any())
        rows = (open_ if held_back else due).nonzero()[:, 0]
        certain, step = _next(conditioner, rows, uniforms, given, rule, left)
        spent += step.entropy
        low = threshold is not None and float(step.probabilities[0]) < threshold
        if held_back and (low or (budget is not None and spent >= budget)):
            break
        found.append(step)
        _commit(conditioner, step, open_)
        done += 0 if certain and free else len(step.positions)
    none = torch.zeros(0, dtype=torch.int64, device=open_.device)
    parts = (torch.cat(x) for x in zip((none, none, none.float()), *(step[:3] for step in found), strict=True))
    positions, tokens, probabilities = parts
    keep = torch.ones_like(positions, dtype=torch.bool)
    return Committed(positions, tokens, probabilities, keep, conditioner.log_partition[0] > -torch.inf)


def _commit(conditioner: "Conditioner", step: _Step, open_: Bool[Tensor, " L"]) -> None:
    """Commit one token after the other, and close their positions."""
    for position, token in zip(step.positions[:, None], step.tokens[:, None], strict=True):
        conditioner.commit(position, token)
    open_[step.positions] = False


def _next(
    conditioner: "Conditioner",
    rows: Int[Tensor, " R"],
    uniforms: Float[Tensor, " L"],
    given: Float[Tensor, " L"] | None,
    rule: SamplingRule,
    left: int | None,
) -> tuple[bool, _Step]:
    """All tokens that are certain, at most ``left``; or else what comes first."""
    candidates = conditioner.candidates if rule.candidates_suffice else None
    if candidates is not None:
        exact = log_p = conditioner.log_marginals()[0, rows]
        order = None if given is None else given[rows]
    else:
        exact = conditioner.dense_log_marginals()[0, rows]
        log_p = rule.temper(exact)
    if rule.order == "low_confidence" and rule.entropy_budget is None:
        # Of tempered distributions, what only tempering makes certain may change.
        best = (exact if log_p is exact else torch.minimum(log_p, exact)).max(-1)
        sure = (best.values.exp() >= CERTAIN).nonzero()[:left, 0]
        if len(sure):
            tokens = best.indices[sure]
            if candidates is not None:
                tokens = candidates[0, rows[sure], tokens]
            return True, _Step(rows[sure], tokens, best.values[sure].exp())
    if candidates is not None:
        place, number, probability, settled = first_candidate(log_p, rule.order, order)
        if settled:
            position = rows[place : place + 1]
            if rule.plain:
                return False, _Step(position, candidates[0, position, number], probability[None])
            one = conditioner.dense_log_marginals(position)
            return False, _first(one, position, uniforms, given, rule)
        log_p = conditioner.dense_log_marginals()[0, rows]
    return False, _first(log_p, rows, uniforms, given, rule)


def _first(
    log_p: Float[Tensor, "R V"],
    rows: Int[Tensor, " R"],
    uniforms: Float[Tensor, " L"],
    given: Float[Tensor, " L"] | None,
    rule: SamplingRule,
) -> _Step:
    """The proposal that comes first: among those that reach the threshold, or among all if none does."""
    found = rule.propose(log_p, uniforms[rows], None if given is None else given[rows])
    order = found.order
    if rule.threshold is not None and bool((passed := found.probabilities >= rule.threshold).any()):
        order = order.masked_fill(~passed, -torch.inf)
    at = order.argmax(0, keepdim=True)
    return _Step(rows[at], found.tokens[at], found.probabilities[at], float(found.entropies[at]))


def first_candidate(
    log_p: Float[Tensor, "R K"], order: str, given: Float[Tensor, " R"] | None
) -> tuple[int, int, Float[Tensor, ""], bool]:
    """Place and candidate that come first, its probability, and whether no token outside could change any of that."""
    best, number = log_p.max(-1)
    probability = best.exp()
    second = log_p.scatter(-1, number[..., None], -torch.inf).amax(-1).exp()
    rest = (1 - ROUNDING - log_p.exp().sum(-1)).clamp_min(0)
    if order == "given":
        assert given is not None
        keys, possible, bound = given.to(log_p.dtype), torch.full_like(rest, -torch.inf), probability
    elif order == "margin":  # unless the second is a candidate, too, the lead itself is not certain
        keys, bound = probability - second, second
        possible = torch.where(rest <= second, keys, torch.maximum(rest, keys + second))
    else:
        keys, possible, bound = probability, rest, probability
    place = int((keys == keys.amax()).to(torch.int8).argmax())
    settled = bool((possible <= keys[place]).all() & (rest[place] <= bound[place]))
    return place, int(number[place]), probability[place], settled
