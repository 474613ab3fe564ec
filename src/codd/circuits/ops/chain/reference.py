"""Messages along the chain in float64 logarithms, one position after the other."""

import torch
from jaxtyping import Float
from torch import Tensor

from codd.circuits.ops.scaled import Scaled
from codd.circuits.parameters import Transition


def messages(transition: Transition, start: Float[Tensor, " N"] | None, leaf: Scaled, reverse: bool) -> Scaled:
    """Forward: log p(z_t, evidence before t), from log ``start``. Reverse: log p(evidence after t | z_t)."""
    log_leaf = leaf.log().double()
    length = log_leaf.shape[1]
    first = torch.zeros_like(log_leaf[:, 0]) if start is None else start.detach().double().expand_as(log_leaf[:, 0])
    out = [first]
    for k in range(length - 1):
        t = length - 1 - k if reverse else k
        matrix = transition.log_step(t - 1 if reverse else t)
        incoming = out[-1] + log_leaf[:, t]
        terms = incoming[:, None, :] + matrix if reverse else incoming[:, :, None] + matrix
        out.append(terms.logsumexp(-1 if reverse else -2))
    return Scaled.from_log(torch.stack(out[::-1] if reverse else out, 1))


def transition_flow(
    transition: Transition,
    source: Scaled,
    target: Scaled,
    log_partition: Float[Tensor, " B"],
    weights: Float[Tensor, " B"] | None,
) -> tuple[Float[Tensor, "*steps _ _"], ...]:
    """Expected number of uses of each entry of each factor, summed over the batch with the given weights.

    ``source`` is forward message times leaf, ``target`` leaf times backward message.
    """
    log_source, log_target = source.log().double(), target.log().double()
    batch, length, _ = log_source.shape
    share = torch.ones(batch, dtype=torch.float64, device=log_source.device) if weights is None else weights.double()
    factors = [f.detach().double() for f in transition.log_factors]
    out = [torch.zeros_like(f) for f in factors]
    for b in range(batch):
        if log_partition[b] == -torch.inf:
            continue
        for t in range(length - 1):
            at = list(transition.at(t, tuple(factors)))
            if transition.log_gates is not None:  # a gate weighs what leaves its inner state
                at[1] = at[1] + transition.log_gates[b, t].double()[:, None]
            left, right = log_source[b, t], log_target[b, t + 1] - log_partition[b].double()
            for k, factor in enumerate(at):
                before, after = left, right
                for f in at[:k]:
                    before = (before[:, None] + f).logsumexp(0)
                for f in reversed(at[k + 1 :]):
                    after = (f + after).logsumexp(1)
                flow = share[b] * (before[:, None] + factor + after).exp()
                out[k][t if transition.per_position else ...] += flow
    return tuple(out)


def gate_flow(
    transition: Transition,
    source: Scaled,
    target: Scaled,
    log_partition: Float[Tensor, " B"],
    weights: Float[Tensor, " B"] | None,
) -> Float[Tensor, "B T R"]:
    """The probability of each inner state at each step, times the sequence's weight."""
    assert transition.log_gates is not None
    log_source, log_target = source.log().double(), target.log().double()
    factors = tuple(f.detach().double() for f in transition.log_factors)
    out = torch.zeros_like(transition.log_gates, dtype=torch.float64)
    for t in range(out.shape[1]):
        first, second = transition.at(t, factors)
        before = (log_source[:, t, :, None] + first).logsumexp(1)
        after = (second + log_target[:, t + 1, None]).logsumexp(2)
        out[:, t] = before + transition.log_gates[:, t].double() + after - log_partition.double()[:, None]
    possible = (log_partition > -torch.inf)[:, None, None]
    flow = torch.where(possible, out, -torch.inf).exp()
    return flow if weights is None else flow * weights.double()[:, None, None]
