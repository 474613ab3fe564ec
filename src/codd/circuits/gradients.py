"""log Z with exact gradients: the backward pass is the expected counts, not a graph through the chain.

Forward and backward messages are computed once, in the forward pass; every gradient is read off them.
"""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from codd.circuits import inference
from codd.circuits.evidence import Evidence, Kind
from codd.circuits.inference import Smoothed
from codd.circuits.ops.backend import REFERENCE, Backend, backend_for

if TYPE_CHECKING:
    from codd.circuits.hmm import HMM


def wanted(hmm: "HMM", ev: Evidence) -> bool:
    """Whether any input of log Z requires a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in _inputs(hmm, ev))


def _inputs(hmm: "HMM", ev: Evidence) -> tuple[Tensor | None, ...]:
    sparse = (None, None) if ev.sparse is None else (ev.sparse.log_weights, ev.sparse.log_tail)
    tables = (hmm.log_initial, hmm.emission.stored, *hmm.transition.log_factors)
    return (ev.potentials, ev.latent_log_potentials, *sparse, ev.step_log_gates, *tables)


def log_partition(hmm: "HMM", ev: Evidence) -> Float[Tensor, " B"]:
    """log Z, differentiable in the parameters, the potentials, the latent potentials and the gates."""
    out: Tensor = _LogPartition.apply(hmm, ev, *_inputs(hmm, ev))  # type: ignore[no-untyped-call]  # torch has no types for it
    return out


class _LogPartition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hmm: "HMM", ev: Evidence, *inputs: Tensor | None) -> Tensor:
        backend = backend_for(ev.device, hmm.dtype)
        smoothed = inference.smooth(hmm, ev, backend)
        if smoothed.suspects is not None:  # rare, and only on the CPU: all of it again, by the reference
            backend = REFERENCE
            smoothed = inference.smooth(hmm, ev, backend)
        ctx.hmm, ctx.ev, ctx.smoothed, ctx.backend = hmm, ev, smoothed, backend
        return smoothed.log_partition

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hmm, ev, smoothed, backend = ctx.hmm, ctx.ev, ctx.smoothed, ctx.backend
        needs = ctx.needs_input_grad[2:]
        share = grad[:, None, None]
        out: list[Tensor | None] = [None] * len(needs)
        if needs[0]:
            out[0] = (_potential_gradient(hmm, ev, smoothed, backend) * share).to(ev.potentials.dtype)
        if needs[1]:
            out[1] = (smoothed.posterior.normalised() * share).to(ev.latent_log_potentials.dtype)
        if needs[2] or needs[3]:
            out[2], out[3] = _sparse_gradient(hmm, ev, smoothed, backend, grad)
        if needs[4]:
            messages = (smoothed.source, smoothed.target, smoothed.log_partition, grad)
            out[4] = backend.gate_flow(inference.steps_of(hmm, ev), *messages).to(ev.step_log_gates.dtype)
        if any(needs[5:]):
            counts = inference.counts_of(hmm, ev, smoothed, backend, grad)
            out[5:] = [x.to(hmm.dtype) for x in (counts.initial, counts.emission, *counts.steps)]
        return None, None, *(x if need else None for x, need in zip(out, needs, strict=True))


def _potential_gradient(hmm: "HMM", ev: Evidence, smoothed: Smoothed, backend: Backend) -> Float[Tensor, "B L V"]:
    """The token marginals; for logits, less their own distribution (they are normalised), over the temperature."""
    marginals = backend.token_marginals(hmm.emission, ev, smoothed.leaf, smoothed.posterior, None).exp()
    if ev.normalised:
        marginals = marginals - ev.log_weights().exp().to(marginals.dtype)
        marginals = marginals / ev.heat(marginals.dtype)
    return torch.where(ev.rows(Kind.DENSE)[..., None], marginals, 0)


def _sparse_gradient(
    hmm: "HMM", ev: Evidence, smoothed: Smoothed, backend: Backend, grad: Float[Tensor, " B"]
) -> tuple[Tensor, Tensor | None]:
    """The marginals of the listed tokens, and of all the others together."""
    assert ev.sparse is not None
    listed = backend.token_marginals(hmm.emission, ev, smoothed.leaf, smoothed.posterior, ev.sparse.ids).exp()
    here = ev.rows(Kind.SPARSE)
    weights = torch.where(here[..., None], listed, 0) * grad[:, None, None]
    if ev.sparse.log_tail is None:
        return weights.to(ev.sparse.log_weights.dtype), None
    tail = torch.where(here, 1 - listed.sum(-1), 0) * grad[:, None]
    return weights.to(ev.sparse.log_weights.dtype), tail.to(ev.sparse.log_tail.dtype)
