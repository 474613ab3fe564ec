"""log Z with exact gradients: the backward pass is the expected counts, not a graph through the chain."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from codd.circuits import inference
from codd.circuits.evidence import Evidence, Kind, log_softmax

if TYPE_CHECKING:
    from codd.circuits.hmm import HMM


def wanted(hmm: "HMM", ev: Evidence) -> bool:
    """Whether anything that log Z depends on asks for a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in _inputs(hmm, ev))


def _inputs(hmm: "HMM", ev: Evidence) -> tuple[Tensor | None, ...]:
    sparse = (None, None) if ev.sparse is None else (ev.sparse.log_weights, ev.sparse.log_tail)
    tables = (hmm.log_initial, hmm.emission.stored, *hmm.transition.log_factors)
    return (ev.potentials, ev.latent_log_potentials, *sparse, *tables)


def log_partition(hmm: "HMM", ev: Evidence) -> Float[Tensor, " B"]:
    """log Z, differentiable in the parameters, the potentials and the latent potentials."""
    out: Tensor = _LogPartition.apply(hmm, ev, *_inputs(hmm, ev))  # type: ignore[no-untyped-call]  # torch has no types for it
    return out


class _LogPartition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hmm: "HMM", ev: Evidence, *inputs: Tensor | None) -> Tensor:
        ctx.hmm, ctx.ev = hmm, ev
        return inference.log_partition(hmm, ev)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hmm, ev = ctx.hmm, ctx.ev
        needs = ctx.needs_input_grad[2:]
        potentials, latent = ev.potentials, ev.latent_log_potentials
        share = grad[:, None, None]
        out: list[Tensor | None] = [None] * len(needs)
        if needs[0]:
            assert potentials is not None
            out[0] = (_potential_gradient(hmm, ev) * share).to(potentials.dtype)
        if needs[1]:
            assert latent is not None
            out[1] = (inference.posterior(hmm, ev).exp() * share).to(latent.dtype)
        if needs[2] or needs[3]:
            out[2], out[3] = _sparse_gradient(hmm, ev, grad)
        if any(needs[4:]):
            initial, steps, emission = inference.expected_counts(hmm, ev, grad)
            out[4:] = [initial, emission, *steps]
        return None, None, *(x if need else None for x, need in zip(out, needs, strict=True))


def _potential_gradient(hmm: "HMM", ev: Evidence) -> Float[Tensor, "B L V"]:
    """The token marginals; for logits, less their own distribution (they are normalised), over the temperature."""
    marginals = inference.marginals(hmm, ev).exp()
    if ev.normalised:
        marginals = marginals - log_softmax(ev.scaled()).exp().to(marginals.dtype)
        t = ev.temperature
        marginals = marginals / (t.to(marginals.dtype)[:, None, None] if isinstance(t, Tensor) else t)
    return torch.where(ev.rows(Kind.DENSE)[..., None], marginals, 0)


def _sparse_gradient(hmm: "HMM", ev: Evidence, grad: Float[Tensor, " B"]) -> tuple[Tensor, Tensor | None]:
    """The marginals of the listed tokens, and of all the others together."""
    assert ev.sparse is not None
    listed = inference.marginals(hmm, ev, ev.sparse.ids).exp()
    here = ev.rows(Kind.SPARSE)
    weights = torch.where(here[..., None], listed, 0) * grad[:, None, None]
    if ev.sparse.log_tail is None:
        return weights.to(ev.sparse.log_weights.dtype), None
    tail = torch.where(here, 1 - listed.sum(-1), 0) * grad[:, None]
    return weights.to(ev.sparse.log_weights.dtype), tail.to(ev.sparse.log_tail.dtype)
