"""Which positions go together: exact tables of two positions at a time, the vocabulary coarsened to a few classes.

At every position each of K candidates is a class of its own, and all other tokens are one more: C = K + 1. With q_t the
posterior of the latent, r_t(c | i) the share of class c in the leaf value of state i, and the chain's step given all
evidence, P_t(j | i) = A[i, j] L_{t+1}(j) b_{t+1}(j) / b_t(i),

    p(c_s, c_t) = sum_ij  q_s(i) r_s(c_s | i)  (P_s ... P_{t-1})(j | i)  r_t(c_t | j)

Every factor is a probability, so nothing leaves the range of numbers, and a row that goes through P keeps its sum: if
it does not, something was lost to underflow, and conditioning on each class answers. All rows are propagated at once.

What two classes tell about each other is no more than what the tokens do, so the mutual information of these tables is
a lower bound of that of the tokens, and equal to it where the candidates are all that is possible.
"""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits import inference
from codd.circuits.evidence import Evidence, Kind, check_ids
from codd.circuits.inference import Smoothed
from codd.circuits.ops.backend import REFERENCE, Backend
from codd.circuits.parameters import Emission, Transition
from codd.circuits.protocol import ProbabilisticCircuit
from codd.circuits.underflow import Answer, Select, either, with_float64_fallback
from codd.errors import InvalidEvidence

if TYPE_CHECKING:
    from codd.circuits.hmm import HMM

LOST = {torch.float32: 1e-5, torch.float64: 1e-9}
"""How much of its sum a row may lose in a step; more than rounding does, less than counts."""


def mutual_information(tables: Float[Tensor, "B L L C C"]) -> Float[Tensor, "B L L"]:
    """In nats, of every two positions; symmetric, never negative, zero on the diagonal."""
    p = _normalised(tables.double())
    rows, columns = p.sum(-1, keepdim=True), p.sum(-2, keepdim=True)
    # Margins one by one: the product of two small ones would vanish.
    information = (torch.xlogy(p, p) - torch.xlogy(p, rows) - torch.xlogy(p, columns)).sum((-1, -2))
    upper = information.clamp_min(0).triu(1)
    return (upper + upper.mT).to(tables.dtype)


@torch.no_grad()
def by_conditioning(
    circuit: ProbabilisticCircuit, ev: Evidence, candidates: Int[Tensor, "B L K"]
) -> Float[Tensor, "B L L C C"]:
    """The tables by C marginal queries per position; works for any circuit, and checks the faster way."""
    check_candidates(candidates, ev, circuit.vocab_size)
    weights = ev.dense_log_weights(circuit.vocab_size)
    classes = torch.full_like(weights, candidates.shape[-1], dtype=torch.int64)
    classes.scatter_(-1, candidates, torch.arange(candidates.shape[-1], device=ev.device).expand_as(candidates))

    def by_class(log_weights: Float[Tensor, "B L V"]) -> Float[Tensor, "B L C"]:
        soft = Evidence(
            log_potentials=log_weights,
            latent_log_potentials=ev.latent_log_potentials,
            step_log_gates=ev.step_log_gates,
        )
        p = circuit.marginals(soft).double().exp()
        return p.new_zeros(*ev.shape, candidates.shape[-1] + 1).scatter_add(-1, classes, p)

    alone = by_class(weights)
    out = _independent(alone)
    for s in _open(ev):
        for c in (alone[:, s] > 0).any(0).nonzero()[:, 0].tolist():  # of the others all tables are zero already
            given = weights.clone()
            given[:, s].masked_fill_(classes[:, s] != c, -torch.inf)
            out[:, s, :, c] = alone[:, s, None, None, c] * by_class(given)
    return _finished(out, alone)


def tables(hmm: "HMM", ev: Evidence, candidates: Int[Tensor, "B L K"]) -> Float[Tensor, "B L L C C"]:
    """The tables of an HMM; of impossible evidence all are zero."""
    check_candidates(candidates, ev, hmm.vocab_size)

    def query(backend: Backend, ev: Evidence, select: Select) -> Answer:
        if backend is REFERENCE:
            return (by_conditioning(hmm.to(dtype=torch.float64), ev, select(candidates)),), None
        smoothed = inference.smooth(hmm, ev, backend)
        dtype = smoothed.leaf.values.dtype
        shares = _class_shares(hmm.emission, ev, backend, select(candidates)).to(dtype)
        out, lost = _propagated(smoothed, shares, _open(ev), inference.steps_of(hmm, ev))
        suspects = smoothed.suspects
        if backend.checked and ev.device.type == "cpu":
            faint = ~(lost <= LOST[dtype])
            suspects = either(suspects, faint if bool(faint.any()) else None)
        return (out,), suspects

    return with_float64_fallback(hmm, ev, query)[0].to(hmm.dtype)


def check_candidates(candidates: Int[Tensor, "B L K"], ev: Evidence, vocab_size: int) -> None:
    """Refuse candidates that do not fit the evidence, are no tokens, or are listed twice."""
    if candidates.ndim != 3 or candidates.shape[:2] != ev.shape or not 1 <= candidates.shape[-1] <= vocab_size:
        wanted = f"({ev.shape[0]}, {ev.shape[1]}, K) with 1 <= K <= {vocab_size}"
        raise InvalidEvidence(f"candidates must be {wanted}, found {tuple(candidates.shape)}")
    if candidates.dtype != torch.int64 or candidates.device != ev.device:
        raise InvalidEvidence(
            f"candidates must be int64 on {ev.device}, found {candidates.dtype} on {candidates.device}"
        )
    check_ids("candidates", candidates, vocab_size)
    if bool((candidates.sort(-1).values.diff(dim=-1) == 0).any()):
        raise InvalidEvidence("the candidates of a position must differ from each other: a token is listed twice")


def _open(ev: Evidence) -> list[int]:
    """The positions that some sequence does not know."""
    known = ev.rows(Kind.OBSERVED).all(0)
    return (~known).nonzero()[:, 0].tolist()


def _class_shares(
    emission: Emission, ev: Evidence, backend: Backend, candidates: Int[Tensor, "B L K"]
) -> Float[Tensor, "B L C N"]:
    """r_t(c | i) in float64; zero for states that can emit nothing. What weighs the latents has no part in it."""
    weights = ev.dense_log_weights(emission.stored.shape[-1])
    chosen = weights.gather(-1, candidates)
    # A pass over the vocabulary of its own: the leaf value less those of the candidates would be rounding only, where
    # they are nearly all of it.
    others = Evidence(
        tokens=ev.tokens,
        observed=None if ev.tokens is None else ev.rows(Kind.OBSERVED),
        log_potentials=weights.scatter(-1, candidates, -torch.inf),
    )
    rest = backend.leaf_values(emission, others).log().double()
    positions = torch.arange(ev.shape[1], device=ev.device)[:, None]
    listed = emission.log_columns(candidates, positions).double() + chosen[..., None]
    log = torch.cat([listed, rest[:, :, None]], 2)
    total = log.logsumexp(2, keepdim=True)
    shares = (log - torch.where(total > -torch.inf, total, 0)).exp()
    # An observed token is of one class in all states.
    is_one = chosen == 0
    hard = torch.cat([is_one, ~is_one.any(-1, keepdim=True)], -1)[..., None].double()
    return torch.where(ev.rows(Kind.OBSERVED)[..., None, None], hard, shares)


def _propagated(
    smoothed: Smoothed, shares: Float[Tensor, "B L C N"], places: list[int], steps: Transition
) -> tuple[Float[Tensor, "B L L C C"], Float[Tensor, " B"]]:
    """The tables, and the most that a row lost of its sum in a step; rows go through P_t factor by factor."""
    backward, target, posterior = smoothed.backward, smoothed.target, smoothed.posterior.normalised()
    before = torch.where(backward.values > 0, 1 / backward.values, 0)
    scale = target.log_scale[:, 1:].double() - backward.log_scale[:, :-1].double()
    if steps.gates is not None:
        scale = scale + steps.gates[1][..., None]
    after = (target.values[:, 1:] * scale.exp()).to(shares.dtype)
    alone = (posterior[:, :, None] @ shares.mT)[:, :, 0]
    out = _independent(alone)
    batch, _, classes, states = shares.shape
    rows, sums = shares.new_zeros(batch, 0, states), shares.new_zeros(batch, 0)
    lost = sums.new_zeros(batch)
    for t in range(places[0], places[-1] + 1) if places else ():
        if t > places[0]:
            rows = (rows * before[:, t - 1, None]).transpose(0, 1)
            rows = steps.through(rows, t - 1).transpose(0, 1) * after[:, t - 1, None]
            now = rows.sum(-1)
            lost = torch.maximum(lost, (now - sums).abs().amax(-1))
            rows = rows * torch.where(now > 0, sums / now, 0)[..., None]
        if t in places:
            earlier = [s for s in places if s < t]
            out[:, earlier, t] = (rows @ shares[:, t].mT).reshape(batch, len(earlier), classes, classes)
            rows = torch.cat([rows, posterior[:, t, None] * shares[:, t]], 1)
            sums = torch.cat([sums, alone[:, t]], 1)
    return _finished(out, alone), lost


def _independent(alone: Float[Tensor, "B L C"]) -> Float[Tensor, "B L L C C"]:
    """The tables if no position knew of another."""
    return alone[:, :, None, :, None] * alone[:, None, :, None, :]


def _finished(out: Float[Tensor, "B L L C C"], alone: Float[Tensor, "B L C"]) -> Float[Tensor, "B L L C C"]:
    """With sums of one, each position's table with itself, and those below the diagonal from those above."""
    length, out = out.shape[1], _normalised(out)
    later = torch.ones(length, length, dtype=torch.bool, device=out.device).triu(1)[..., None, None]
    mirrored = torch.where(later, out, out.transpose(1, 2).mT)
    itself = torch.eye(length, dtype=torch.bool, device=out.device)[..., None, None]
    return torch.where(itself, _normalised(alone.diag_embed())[:, :, None], mirrored)


def _normalised(out: Float[Tensor, "*pairs C C"]) -> Float[Tensor, "*pairs C C"]:
    total = out.sum((-1, -2), keepdim=True)
    return out / torch.where(total > 0, total, 1)
