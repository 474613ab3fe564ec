"""The queries of an HMM, written once for every implementation of the operations.

Each query is a function of the circuit, the evidence and a backend. ``exactly`` runs it on the fast backend and has
the reference answer for the sequences in which float32 may have lost something (CPU only: on a GPU looking would
mean waiting for the device).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence
from codd.circuits.ops.backend import REFERENCE, Backend, backend_for
from codd.circuits.ops.chain import eager as chain_eager
from codd.circuits.ops.doubt import Doubt, either
from codd.circuits.ops.leaf import eager as leaf_eager
from codd.circuits.ops.scaled import Scaled
from codd.circuits.parameters import Transition
from codd.errors import InvalidEvidence

if TYPE_CHECKING:
    from codd.circuits.hmm import HMM

Answer: TypeAlias = tuple[tuple[Tensor, ...], Doubt]
Pick: TypeAlias = Callable[[Tensor], Tensor]
Query: TypeAlias = Callable[[Evidence, Backend, Pick], Answer]
"""Gets the evidence, the backend, and what selects the same sequences from any other batch-first tensor."""


@torch.no_grad()
def exactly(hmm: "HMM", ev: Evidence, query: Query) -> tuple[Tensor, ...]:
    """Answer a query whose results have the batch first, with the doubtful sequences answered by the reference.

    Results are in the precision that they were computed in, for more to be added to them.
    """
    out, doubt = query(ev, backend_for(ev.device, hmm.dtype), lambda x: x)
    if doubt is not None:
        index = doubt.nonzero()[:, 0]
        exact, _ = query(ev.select(index), REFERENCE, lambda x: x[index])
        for fast, slow in zip(out, exact, strict=True):
            fast[index] = slow.to(fast.dtype)
    return out


def _leaf(hmm: "HMM", ev: Evidence, backend: Backend, *, each: bool = True) -> tuple[Scaled, Doubt]:
    """The leaf values and the sequences in doubt; NaN is an error. Elsewhere than on the CPU nothing is looked at.

    Without ``each`` every sequence with a small value is in doubt, whether or not anything can have been lost: finding
    that out takes long, and is seldom needed.
    """
    leaf = backend.leaf_values(hmm.emission, ev)
    if leaf.values.device.type != "cpu":
        return leaf, None
    smallest = float(leaf.values.numpy().min())
    if smallest != smallest:
        wrong = leaf.values.isnan().any(-1)
        b, t = wrong.nonzero()[0].tolist()
        raise InvalidEvidence(
            f"the potentials of sequence {b}, position {t} hold NaN or +inf ({int(wrong.sum())} such position(s)); "
            "log-potentials must be finite or -inf"
        )
    if not backend.checked or smallest >= leaf_eager.FLUSH:
        return leaf, None
    if not each:
        return leaf, (leaf.values < leaf_eager.FLUSH).flatten(1).any(-1)
    return leaf, leaf_eager.lost_terms(hmm.emission, ev, leaf)


def steps_of(hmm: "HMM", ev: Evidence) -> Transition:
    """The transition, with the gates that the evidence puts into it."""
    return hmm.transition.gated(ev.step_log_gates)


def _doubt(
    hmm: "HMM", ev: Evidence, leaf: Scaled, product: Scaled, reverse: bool, backend: Backend, *, each: bool = True
) -> Doubt:
    """The sequences in which the products of message and leaf may have lost something on the way."""
    if not backend.checked or leaf.values.device.type != "cpu" or chain_eager.nothing_lost(product):
        return None
    if not each:
        return torch.ones(len(leaf.values), dtype=torch.bool)
    start = None if reverse else hmm.log_initial
    message = backend.messages(steps_of(hmm, ev), start, leaf, reverse)
    return chain_eager.lost_terms(hmm.transition, start, leaf, message, reverse)


def _faint(q: Scaled, log_partition: Float[Tensor, " B"], backend: Backend) -> Doubt:
    """The sequences that are possible although forward times backward has all but vanished somewhere."""
    if not backend.checked or q.values.device.type != "cpu":
        return None
    faint = (q.values.sum(-1) < leaf_eager.FLUSH).any(-1) & (log_partition > -torch.inf)
    return faint if bool(faint.any()) else None


def _root(hmm: "HMM", target: Scaled) -> Float[Tensor, " B"]:
    """log Z from leaf times backward message at the first position."""
    # Through logarithms: an improbable start times an improbable leaf would leave the range of float32.
    first = target.values[:, 0].log() + hmm.log_initial.detach()
    if target.log_scale.shape[-1] == 1:
        return first.logsumexp(-1) + target.log_scale[:, 0, 0]
    return (first + target.log_scale[:, 0]).logsumexp(-1)


TOLERATED = 1e-6
"""The share of Z that may be lost before the reference has to answer: less than float32 rounds off on the way."""


def lost_share(
    forward: Float[Tensor, "B L N"], leaf: Float[Tensor, "B L N"], backward: Float[Tensor, "B L N"]
) -> Float[Tensor, " B"]:
    """A bound of the share of Z that underflow can have cost, in each sequence; all values in the units of their pass.

    At every position Z is the sum over states of forward times leaf times backward, in units that all three share. A
    leaf that was lost is below its flush, a product with a message below the chain's (in the units of that message, or
    in those that make its largest entry one); what each was multiplied with is no more than the largest message. So a
    circuit whose numbers are far apart is in no doubt if those that count are there.
    """
    total = (forward * leaf * backward).sum(-1)
    high, above = forward.amax(-1), backward.amax(-1)
    flush = chain_eager.FLUSH[leaf.dtype]
    products = flush * (above * high.clamp_min(1) + high * above.clamp_min(1))
    lost = leaf.shape[-1] * (leaf_eager.FLUSH * high * above + products)
    return torch.where(total > 0, lost / total, torch.inf).amax(-1)


def _outweighed(hmm: "HMM", ev: Evidence, leaf: Scaled, doubt: Doubt, backend: Backend) -> Doubt:
    """The doubts that are left when what may be lost is compared with what is there."""
    if doubt is None:
        return None
    assert backend.forward_backward is not None  # the reference loses nothing
    forward, backward = backend.forward_backward(steps_of(hmm, ev), hmm.log_initial, leaf)
    doubt = doubt & ~(lost_share(forward.values, leaf.values, backward.values) <= TOLERATED)
    return doubt if bool(doubt.any()) else None


def backward_pass(hmm: "HMM", ev: Evidence, backend: Backend) -> tuple[Scaled, Float[Tensor, " B"], Doubt]:
    """Leaf times backward message at every position, log Z, and the sequences in doubt."""
    leaf, doubt = _leaf(hmm, ev, backend, each=False)
    target = backend.messages(steps_of(hmm, ev), None, leaf, True, absorb=True)
    doubt = either(doubt, _doubt(hmm, ev, leaf, target, True, backend, each=False))
    return target, _root(hmm, target), _outweighed(hmm, ev, leaf, doubt, backend)


class Smoothed(NamedTuple):
    """Leaf values L, forward messages times L, L times backward messages, posterior, log Z, sequences in doubt."""

    leaf: Scaled
    source: Scaled
    target: Scaled
    posterior: Scaled
    log_partition: Float[Tensor, " B"]
    doubt: Doubt


def smooth(hmm: "HMM", ev: Evidence, backend: Backend, *, each: bool = True) -> Smoothed:
    """Forward and backward messages; ``each``: every state's probability must be right, not only their sums."""
    leaf, doubt = _leaf(hmm, ev, backend, each=each)
    steps = steps_of(hmm, ev)
    source = backend.messages(steps, hmm.log_initial, leaf, False, absorb=True)
    backward = backend.messages(steps, None, leaf, True)
    target = leaf * backward
    products = ((source, False), (target, True))
    doubt = either(doubt, *(_doubt(hmm, ev, leaf, x, reverse, backend, each=each) for x, reverse in products))
    doubt = doubt if each else _outweighed(hmm, ev, leaf, doubt, backend)
    q, value = source * backward, _root(hmm, target)
    return Smoothed(leaf, source, target, q, value, either(doubt, _faint(q, value, backend)))


def log_partition(hmm: "HMM", ev: Evidence) -> Float[Tensor, " B"]:
    """log Z of circuit times evidence."""

    def query(ev: Evidence, backend: Backend, pick: Pick) -> Answer:
        _, value, doubt = backward_pass(hmm, ev, backend)
        return (value,), doubt

    return exactly(hmm, ev, query)[0]


def posterior(hmm: "HMM", ev: Evidence) -> Float[Tensor, "B L N"]:
    """log p(z_t | evidence) of every state."""

    def query(ev: Evidence, backend: Backend, pick: Pick) -> Answer:
        smoothed = smooth(hmm, ev, backend)
        return (smoothed.posterior.log_normalised(),), smoothed.doubt

    return exactly(hmm, ev, query)[0].to(hmm.dtype)


def marginals(hmm: "HMM", ev: Evidence, candidates: Int[Tensor, "B L K"] | None = None) -> Float[Tensor, "B L V"]:
    """log p(x_t | evidence), for all tokens or for the candidates."""

    def query(ev: Evidence, backend: Backend, pick: Pick) -> Answer:
        smoothed = smooth(hmm, ev, backend)
        wanted = None if candidates is None else pick(candidates)
        out = backend.token_marginals(hmm.emission, ev, smoothed.leaf, smoothed.posterior, wanted)
        return (out,), smoothed.doubt

    return exactly(hmm, ev, query)[0].to(hmm.dtype)


def sample_latents(
    hmm: "HMM", ev: Evidence, uniforms: Float[Tensor, "B S L"]
) -> tuple[Int[Tensor, "B S L"], Float[Tensor, " B"]]:
    """Latent paths from p(z | evidence), one for each row of uniforms, and log Z."""

    def query(ev: Evidence, backend: Backend, pick: Pick) -> Answer:
        target, value, doubt = backward_pass(hmm, ev, backend)
        paths = backend.sample_path(steps_of(hmm, ev), hmm.log_initial, target, pick(uniforms).transpose(0, 1))
        return (paths.transpose(0, 1), value), doubt

    paths, value = exactly(hmm, ev, query)
    return paths, value


class Counts(NamedTuple):
    """d sum(w log Z) / d log-parameters: expected uses of each of them, summed over the batch."""

    initial: Float[Tensor, " N"]
    steps: tuple[Tensor, ...]
    """One for each factor of the transition."""
    emission: Float[Tensor, "*L N V"]


def counts_of(
    hmm: "HMM", ev: Evidence, smoothed: Smoothed, backend: Backend, weights: Float[Tensor, " B"] | None
) -> Counts:
    """The counts from a pass in both directions; sequences in doubt count nothing."""
    if smoothed.doubt is not None:
        keep = (~smoothed.doubt).to(hmm.dtype)
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
    smoothed = smooth(hmm, ev, backend, each=False) if smoothed is None else smoothed
    out, log_z = counts_of(hmm, ev, smoothed, backend, weights), smoothed.log_partition
    if smoothed.doubt is not None:
        some = ev.select(smoothed.doubt)
        again = smooth(hmm, some, REFERENCE)
        exact = counts_of(hmm, some, again, REFERENCE, None if weights is None else weights[smoothed.doubt])
        steps = tuple(a + b.to(a.dtype) for a, b in zip(out.steps, exact.steps, strict=True))
        out = Counts(out.initial + exact.initial.to(hmm.dtype), steps, out.emission + exact.emission.to(hmm.dtype))
        log_z = log_z.masked_scatter(smoothed.doubt, again.log_partition.to(log_z.dtype))
    steps = tuple(x.to(hmm.dtype) for x in out.steps)
    return Counts(out.initial.to(hmm.dtype), steps, out.emission.to(hmm.dtype)), log_z
