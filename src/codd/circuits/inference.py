"""The queries of an HMM, written once for every implementation of the operations.

Each query is a function of the circuit, the evidence and a backend, which `with_float64_fallback` runs.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence
from codd.circuits.ops import native
from codd.circuits.ops.backend import REFERENCE, Backend, backend_for
from codd.circuits.ops.scaled import FLUSH, LEAF_FLUSH, Scaled, in_place
from codd.circuits.parameters import Transition
from codd.circuits.underflow import Answer, Select, Suspects, all_large, suspects, with_float64_fallback
from codd.errors import InvalidEvidence

if TYPE_CHECKING:
    from codd.circuits.hmm import HMM


def check_leaf(leaf: Scaled) -> Scaled:
    """The same leaf values; raise InvalidEvidence if one is not a number. On a GPU nothing is looked at."""
    if leaf.values.device.type == "cpu" and math.isnan(leaf.values.numpy().min()):
        wrong = leaf.values.isnan().any(-1)
        b, t = wrong.nonzero()[0].tolist()
        raise InvalidEvidence(
            f"the potentials of sequence {b}, position {t} hold NaN or +inf ({int(wrong.sum())} such position(s)); "
            "log-potentials must be finite or -inf"
        )
    return leaf


def steps_of(hmm: "HMM", ev: Evidence) -> Transition:
    """The transition, with the gates that the evidence puts into it."""
    return hmm.transition.gated(ev.step_log_gates)


def root(hmm: "HMM", target: Scaled) -> Float[Tensor, " B"]:
    """log Z from leaf times backward message at the first position."""
    # Through logarithms: an improbable start times an improbable leaf would leave the range of float32.
    first = target.values[:, 0].log() + hmm.log_initial.detach()
    if target.log_scale.shape[-1] == 1:
        return first.logsumexp(-1) + target.log_scale[:, 0, 0]
    return (first + target.log_scale[:, 0]).logsumexp(-1)


def backward_pass(hmm: "HMM", ev: Evidence, backend: Backend) -> tuple[Scaled, Float[Tensor, " B"], Suspects]:
    """Leaf times backward message at every position, log Z, and the suspect sequences."""
    steps, leaf = steps_of(hmm, ev), check_leaf(backend.leaf_values(hmm.emission, ev))
    backward = backend.messages(steps, None, leaf, True)
    target, found = leaf * backward, None
    if backend.checked and not all_large((leaf.values, LEAF_FLUSH), (target.values, FLUSH[leaf.values.dtype])):
        found = suspects(leaf, backend.messages(steps, hmm.log_initial, leaf, False), backward)
    return target, root(hmm, target), found


@dataclass(frozen=True, eq=False)
class Smoothed:
    """Messages in both directions, and what is made of them and the leaf values."""

    hmm: "HMM"
    leaf: Scaled
    forward: Scaled
    backward: Scaled
    source: Scaled
    """Forward messages times leaf values."""
    target: Scaled
    """Leaf values times backward messages."""
    posterior: Scaled
    suspects: Suspects

    @cached_property
    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z."""
        return root(self.hmm, self.target)


def smooth(hmm: "HMM", ev: Evidence, backend: Backend) -> Smoothed:
    """Forward and backward messages under evidence."""
    return passes(hmm, steps_of(hmm, ev), check_leaf(backend.leaf_values(hmm.emission, ev)), backend)


def passes(hmm: "HMM", steps: Transition, leaf: Scaled, backend: Backend) -> Smoothed:
    """Forward and backward messages for leaf values."""
    forward, backward = backend.forward_backward(steps, hmm.log_initial, leaf)
    source, target = forward * leaf, leaf * backward
    posterior, found = source * backward, None
    if backend.checked:
        flush = FLUSH[leaf.values.dtype]
        sums = (source.values, flush), (target.values, flush), (posterior.values.sum(-1), LEAF_FLUSH)
        found = None if all_large((leaf.values, LEAF_FLUSH), *sums) else suspects(leaf, forward, backward)
    return Smoothed(hmm, leaf, forward, backward, source, target, posterior, found)


def _at_once(
    hmm: "HMM", ev: Evidence, backend: Backend, posterior: bool
) -> tuple[Float[Tensor, " B"], Float[Tensor, "L B N"] | None] | None:
    """log Z and the posterior by one call in C, where no leaf value is a sum over the vocabulary.

    None where it does not serve, or where something may have been lost.
    """
    steps = hmm.transition
    soft = ev.potentials is not None or ev.sparse is not None or ev.step_log_gates is not None
    if backend.name != "native" or soft or steps.low_rank or not hmm.homogeneous:
        return None
    offset: Float[Tensor, " B"] | float = 0.0
    if ev.tokens is not None and ev.observed is None and ev.latent_log_potentials is None:
        rows, numbers = hmm.emission.columns, ev.tokens.T
    else:
        leaf = check_leaf(backend.leaf_values(hmm.emission, ev))
        rows, offset = leaf.values.transpose(0, 1).flatten(0, 1), leaf.log_scale[..., 0].sum(-1)
        numbers = torch.arange(ev.kind.numel()).view(ev.shape[1], ev.shape[0])
    tables = steps.linear[0], steps.transposed[0], hmm.log_initial.detach().exp()
    done = native.smooth(*tables, rows, numbers, posterior, FLUSH[torch.float32], LEAF_FLUSH)
    return None if done is None else (done[0] + offset, done[1])


def log_partition(hmm: "HMM", ev: Evidence) -> Float[Tensor, " B"]:
    """log Z of circuit times evidence."""

    def query(backend: Backend, ev: Evidence, select: Select) -> Answer:
        if (done := _at_once(hmm, ev, backend, posterior=False)) is not None:
            return done[:1], None
        _, value, found = backward_pass(hmm, ev, backend)
        return (value,), found

    return with_float64_fallback(hmm, ev, query)[0]


def posterior(hmm: "HMM", ev: Evidence) -> Float[Tensor, "B L N"]:
    """log p(z_t | evidence) of every state."""

    def query(backend: Backend, ev: Evidence, select: Select) -> Answer:
        done = _at_once(hmm, ev, backend, posterior=True)
        if done is not None and done[1] is not None:
            return (in_place(np.log, done[1]).transpose(0, 1),), None
        smoothed = smooth(hmm, ev, backend)
        return (smoothed.posterior.log_normalised(),), smoothed.suspects

    return with_float64_fallback(hmm, ev, query)[0].to(hmm.dtype)


def marginals(hmm: "HMM", ev: Evidence, candidates: Int[Tensor, "B L K"] | None = None) -> Float[Tensor, "B L V"]:
    """log p(x_t | evidence), for all tokens or for the candidates."""

    def query(backend: Backend, ev: Evidence, select: Select) -> Answer:
        smoothed = smooth(hmm, ev, backend)
        wanted = None if candidates is None else select(candidates)
        out = backend.token_marginals(hmm.emission, ev, smoothed.leaf, smoothed.posterior, wanted)
        return (out,), smoothed.suspects

    return with_float64_fallback(hmm, ev, query)[0].to(hmm.dtype)


def sample_latents(
    hmm: "HMM", ev: Evidence, uniforms: Float[Tensor, "B S L"]
) -> tuple[Int[Tensor, "B S L"], Float[Tensor, " B"]]:
    """Latent paths from p(z | evidence), one for each row of uniforms, and log Z."""

    def query(backend: Backend, ev: Evidence, select: Select) -> Answer:
        target, value, found = backward_pass(hmm, ev, backend)
        paths = backend.sample_path(steps_of(hmm, ev), hmm.log_initial, target, select(uniforms).transpose(0, 1))
        return (paths.transpose(0, 1), value), found

    paths, value = with_float64_fallback(hmm, ev, query)
    return paths, value


def joint_step(
    hmm: "HMM", ev: Evidence, uniforms: Float[Tensor, "B L"]
) -> tuple[Int[Tensor, "B L"], Float[Tensor, "B L V"], Float[Tensor, " B"]]:
    """Latent paths, the scores of all tokens given them, and log Z."""
    centred, offset = hmm.centred(ev)
    latents, log_z = sample_latents(hmm, centred, uniforms[:, None])
    return latents[:, 0], hmm.conditional_scores(ev, latents[:, 0]), (log_z + offset).to(hmm.dtype)


class Counts(NamedTuple):
    """d sum(w log Z) / d log-parameters: expected uses of each of them, summed over the batch."""

    initial: Float[Tensor, " N"]
    steps: tuple[Tensor, ...]
    """One for each factor of the transition."""
    emission: Float[Tensor, "*L N V"]


def counts_of(
    hmm: "HMM", ev: Evidence, smoothed: Smoothed, backend: Backend, weights: Float[Tensor, " B"] | None
) -> Counts:
    """The counts from a pass in both directions; suspect sequences count nothing."""
    if smoothed.suspects is not None:
        keep = (~smoothed.suspects).to(hmm.dtype)
        weights = keep if weights is None else weights * keep
    first = smoothed.posterior.normalised()[:, 0].to(hmm.dtype)
    initial = first.sum(0) if weights is None else weights.to(hmm.dtype) @ first
    messages = (smoothed.source, smoothed.target, smoothed.log_partition, weights)
    steps = backend.transition_flow(steps_of(hmm, ev), *messages)
    return Counts(initial, steps, backend.emission_flow(hmm.emission, ev, smoothed.leaf, smoothed.posterior, weights))


@torch.no_grad()
def expected_counts(
    hmm: "HMM", ev: Evidence, weights: Float[Tensor, " B"] | None, smoothed: Smoothed | None = None
) -> tuple[Counts, Float[Tensor, " B"]]:
    """Flows of the initial distribution, of each transition factor and of the emission, and log Z."""
    backend = backend_for(ev.device, hmm.dtype)
    smoothed = smooth(hmm, ev, backend) if smoothed is None else smoothed
    out, log_z = counts_of(hmm, ev, smoothed, backend, weights), smoothed.log_partition
    if smoothed.suspects is not None:
        some = ev.select(smoothed.suspects)
        again = smooth(hmm, some, REFERENCE)
        exact = counts_of(hmm, some, again, REFERENCE, None if weights is None else weights[smoothed.suspects])
        steps = tuple(a + b.to(a.dtype) for a, b in zip(out.steps, exact.steps, strict=True))
        out = Counts(out.initial + exact.initial.to(hmm.dtype), steps, out.emission + exact.emission.to(hmm.dtype))
        log_z = log_z.masked_scatter(smoothed.suspects, again.log_partition.to(log_z.dtype))
    steps = tuple(x.to(hmm.dtype) for x in out.steps)
    return Counts(out.initial.to(hmm.dtype), steps, out.emission.to(hmm.dtype)), log_z
