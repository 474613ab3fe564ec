"""Leaf values and what hangs on them, in float64 logarithms, position by position."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence
from codd.circuits.ops.scaled import Scaled
from codd.circuits.parameters import Emission

_BUDGET = 2**24  # entries of the largest intermediate: 128 MiB in float64


def _blocks(rows: int, per_row: int) -> list[slice]:
    size = max(1, _BUDGET // max(per_row, 1))
    return [slice(i, min(i + size, rows)) for i in range(0, rows, size)]


def leaf_values(emission: Emission, ev: Evidence) -> Scaled:
    """log L_t(i) = logsumexp_v (log E[i, v] + log w_t(v)), plus the latent potential."""
    vocab = emission.stored.shape[-1]
    weights = ev.dense_log_weights(vocab)
    columns = []
    for t in range(ev.shape[1]):
        table = emission.at(t).log.detach().double()
        parts = [(table + weights[s, t, None, :]).logsumexp(-1) for s in _blocks(ev.shape[0], table.numel())]
        columns.append(torch.cat(parts))
    log = torch.stack(columns, 1)
    if ev.latent_log_potentials is not None:
        log = log + ev.latent_log_potentials.double()
    leaf = Scaled.from_log(log)
    return replace(leaf, values=leaf.values.masked_fill(~(log < torch.inf), torch.nan))  # +inf and NaN are errors


def _log_cavity(ev: Evidence, leaf: Scaled, posterior: Scaled) -> Float[Tensor, "B L N"]:
    """log q_t(i) - log L_t(i), L without the latent potential, which belongs to both alike."""
    pots = 0.0 if ev.latent_log_potentials is None else ev.latent_log_potentials.double()
    bare, q = leaf.log(), posterior.log_normalised()
    return torch.where(q > -torch.inf, q - torch.where(bare > -torch.inf, bare, 0) + pots, -torch.inf)


def token_marginals(
    emission: Emission, ev: Evidence, leaf: Scaled, posterior: Scaled, candidates: Int[Tensor, "B L K"] | None = None
) -> Float[Tensor, "B L V"]:
    """log p(x_t = v | evidence) = log w_t(v) + logsumexp_i (log q_t(i) - log L_t(i) + log E[i, v])."""
    weights, cavity = ev.dense_log_weights(emission.stored.shape[-1]), _log_cavity(ev, leaf, posterior)
    out = torch.empty_like(weights)
    for t in range(ev.shape[1]):
        table = emission.at(t).log.detach().double()
        for s in _blocks(ev.shape[0], table.numel()):
            out[s, t] = (cavity[s, t, :, None] + table).logsumexp(-2)
    out = out + weights
    return out if candidates is None else out.gather(-1, candidates)


def emission_flow(
    emission: Emission, ev: Evidence, leaf: Scaled, posterior: Scaled, weights: Float[Tensor, " B"] | None
) -> Float[Tensor, "*L N V"]:
    """Expected number of times that each state emits each token, summed over the batch with the given weights."""
    log_w, ratio = ev.dense_log_weights(emission.stored.shape[-1]), _log_cavity(ev, leaf, posterior)
    share = torch.ones(ev.shape[0], dtype=torch.float64, device=ev.device) if weights is None else weights.double()
    out = torch.zeros(emission.stored.shape, dtype=torch.float64, device=ev.device)
    for b in range(ev.shape[0]):
        for t in range(ev.shape[1]):
            table = emission.at(t).log.detach().double()
            flow = share[b] * (ratio[b, t, :, None] + table + log_w[b, t]).exp()
            out[t if emission.per_position else ...] += flow
    return out
