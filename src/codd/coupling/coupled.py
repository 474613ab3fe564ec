"""One window, coupled: what the network says of each masked place, times what the circuit says of all of them.

    p(x | observed)  proportional to  circuit(x) * prod over masked t of softmax(logits_t / temperature)[x_t]

Everything here is exact. With the neutral circuit every answer is the network's own, factorized one.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits import HMM, Evidence, Modulated, pairwise
from codd.circuits.results import JointStep, Samples
from codd.errors import InvalidEvidence


@runtime_checkable
class Prior(Protocol):
    """What is asked of a circuit. `codd.HMM` and `codd.Circuit` answer it."""

    @property
    def vocab_size(self) -> int:
        """How many tokens it is over."""

    @property
    def length(self) -> int | None:
        """How many positions; None if it serves any number."""

    def log_partition(self, ev: Evidence) -> Float[Tensor, " B"]:
        """The logarithm of the evidence's weight."""

    def conditional_log_prob(self, ids: Int[Tensor, "B L"], ev: Evidence) -> Float[Tensor, " B"]:
        """Of what is not observed."""

    def marginals(self, ev: Evidence) -> Float[Tensor, "B L V"]:
        """Log-probabilities of the tokens."""

    def posterior(self, ev: Evidence) -> Float[Tensor, "B L N"]:
        """Log-probabilities of the latents."""

    def sample(
        self, ev: Evidence, *, generator: torch.Generator | None = None, num_samples: int | None = None
    ) -> Samples:
        """Exact joint samples."""

    def conditional_scores(self, ev: Evidence, latents: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """Scores of all tokens, given the latents."""


@runtime_checkable
class Conditioner(Protocol):
    """Token marginals while tokens are committed one by one: `codd.HMM.incremental`, or the slow way below."""

    candidates: Int[Tensor, "B L K"] | None
    """The tokens that `log_marginals` is about; None: all."""

    @property
    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z given what has been committed."""

    def log_marginals(self) -> Float[Tensor, "B L K"]:
        """Log-probabilities of the candidates, normalised over all tokens."""

    def dense_log_marginals(self, positions: Int[Tensor, " B"] | None = None) -> Float[Tensor, "B *L V"]:
        """Log-probabilities of all tokens, at one position of each window or at all."""

    def commit(self, positions: Int[Tensor, " B"], tokens: Int[Tensor, " B"]) -> None:
        """One more token of each window is known."""


class Coupled:
    """The joint distribution of the masked tokens of B windows, given the others."""

    def __init__(
        self,
        circuit: Prior | Modulated,
        *,
        logits: Float[Tensor, "B L V"],
        tokens: Int[Tensor, "B L"],
        masked: Bool[Tensor, "B L"],
        temperature: float | Float[Tensor, " B"] = 1.0,
        latent_log_potentials: Float[Tensor, "B L N"] | None = None,
        step_log_gates: Float[Tensor, "B T R"] | None = None,
        features: Float[Tensor, "B L d"] | None = None,
        hidden: Bool[Tensor, "B L"] | None = None,
    ):
        """``tokens`` count where ``masked`` is false; ``temperature`` divides the logits before the product.

        ``latent_log_potentials`` and ``step_log_gates`` are weights on the circuit's latents and on the inner states
        of its steps, from whatever else knows about the window. A modulated circuit takes them from ``features``, the
        network's last hidden states in the window, and ``hidden``, what was masked when they were computed: by
        default what is masked now.
        """
        _check(circuit, logits, tokens, masked)
        if isinstance(circuit, Modulated):
            if features is None:
                raise InvalidEvidence("this circuit is modulated: give the network's last hidden states as features")
            found = circuit.modulate(features, masked if hidden is None else hidden)
            circuit = circuit.hmm
            latent_log_potentials = _added(latent_log_potentials, found.latent_log_potentials)
            step_log_gates = _added(step_log_gates, found.step_log_gates)
        self.circuit = circuit
        self.evidence = Evidence(
            tokens=torch.where(masked, 0, tokens),  # a mask's id need not be in the circuit's vocabulary
            observed=~masked,
            logits=logits,
            temperature=temperature,
            latent_log_potentials=latent_log_potentials,
            step_log_gates=step_log_gates,
        )

    @property
    def tokens(self) -> Int[Tensor, "B L"]:
        """The observed tokens; 0 where masked."""
        assert self.evidence.tokens is not None
        return self.evidence.tokens

    @property
    def masked(self) -> Bool[Tensor, "B L"]:
        """The positions that this is a distribution over."""
        assert self.evidence.observed is not None
        return ~self.evidence.observed

    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z: how much of the two factors' mass agrees. -inf where they exclude each other."""
        return self.circuit.log_partition(self.evidence)

    def log_prob(self, x0: Int[Tensor, "B L"]) -> Float[Tensor, " B"]:
        """log p(x0 at the masked positions | the observed ones); what x0 says elsewhere is ignored."""
        return self.circuit.conditional_log_prob(x0, self.evidence)

    def marginals(self) -> Float[Tensor, "B L V"]:
        """Log-probabilities of each position's token by itself."""
        return self.circuit.marginals(self.evidence)

    def pairwise(self, candidates: Int[Tensor, "B L K"]) -> Float[Tensor, "B L L C C"]:
        """p(c_s, c_t) of every two positions, each token being one of its position's candidates or, last, any other.

        The table of a position with itself is diagonal. All are zero where the two factors exclude each other.
        """
        if isinstance(self.circuit, HMM):
            return self.circuit.pairwise(self.evidence, candidates)
        return pairwise.by_conditioning(self.circuit, self.evidence, candidates.long())

    def mutual_information(self, candidates: int = 8) -> Float[Tensor, "B L L"]:
        """How much every two positions tell of each other, in nats: a lower bound from coarsened tokens.

        The tokens that are kept apart are the ``candidates`` most probable ones of each position; if they are all
        that is possible, it is exact. Zero on the diagonal and where a position is observed.
        """
        if candidates < 1:
            raise InvalidEvidence(f"candidates must be at least 1, found {candidates}.")
        likely = self.marginals().topk(min(candidates, self.circuit.vocab_size), dim=-1).indices
        found = pairwise.mutual_information(self.pairwise(likely))
        return found * (self.masked[:, :, None] & self.masked[:, None, :])

    def posterior(self) -> Float[Tensor, "B L N"]:
        """Log-probabilities of each position's latent by itself."""
        return self.circuit.posterior(self.evidence)

    def sample(self, *, generator: torch.Generator | None = None, num_samples: int | None = None) -> Samples:
        """Exact joint samples: ``.tokens`` and ``.latents``; with ``num_samples`` they get a leading axis."""
        return self.circuit.sample(self.evidence, generator=generator, num_samples=num_samples)

    def scores(self, latents: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """Scores of all tokens once the latents are known, not normalised: given them, positions are independent."""
        return self.circuit.conditional_scores(self.evidence, latents)

    def joint_step(self, uniforms: Float[Tensor, "B L"]) -> JointStep:
        """A latent path and the scores given it; impossible evidence shows as a log Z of -inf and does not raise."""
        if isinstance(self.circuit, HMM):
            return self.circuit.joint_step(self.evidence, uniforms=uniforms)
        log_z = self.log_partition()
        if bool((log_z == -torch.inf).any()):
            none = torch.zeros_like(self.tokens)
            return JointStep(none, self.evidence.dense_log_weights(self.circuit.vocab_size).to(log_z.dtype), log_z)
        seed = int(uniforms.double().sum().mul(2**40))  # a circuit that takes a generator gets one that they fix
        found = self.sample(generator=torch.Generator(log_z.device).manual_seed(seed))
        return JointStep(found.latents, self.scores(found.latents), log_z)

    def conditionals(self, candidates: int | None = None) -> Conditioner:
        """Token marginals while tokens are committed one by one; of that many candidates a position, or of all."""
        if isinstance(self.circuit, HMM):
            few = candidates is not None and candidates < self.circuit.vocab_size
            return self.circuit.incremental(self.evidence, candidates if few else None)
        return _Recomputed(self)

    def condition(self, tokens: Int[Tensor, "B L"], where: Bool[Tensor, "B L"]) -> "Coupled":
        """The distribution of the rest once some of the masked tokens are known."""
        assert self.evidence.logits is not None
        return Coupled(
            self.circuit,
            logits=self.evidence.logits,
            tokens=torch.where(where & self.masked, tokens, self.tokens),
            masked=self.masked & ~where,
            temperature=self.evidence.temperature,
            latent_log_potentials=self.evidence.latent_log_potentials,
            step_log_gates=self.evidence.step_log_gates,
        )


class _Recomputed:
    """`Conditioner` by asking the circuit again after every token: for any circuit, and for comparison."""

    candidates: Int[Tensor, "B L K"] | None = None

    def __init__(self, joint: Coupled):
        self.joint = joint

    @property
    def log_partition(self) -> Float[Tensor, " B"]:
        return self.joint.log_partition()

    def log_marginals(self) -> Float[Tensor, "B L V"]:
        return self.joint.marginals()

    def dense_log_marginals(self, positions: Int[Tensor, " B"] | None = None) -> Float[Tensor, "B *L V"]:
        found = self.joint.marginals()
        return found if positions is None else found[torch.arange(len(found), device=found.device), positions]

    def commit(self, positions: Int[Tensor, " B"], tokens: Int[Tensor, " B"]) -> None:
        here = torch.zeros_like(self.joint.masked).scatter(1, positions[:, None], True)
        self.joint = self.joint.condition(tokens[:, None].expand_as(here), here)


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _check(circuit: Prior | Modulated, logits: Tensor, tokens: Tensor, masked: Tensor) -> None:
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape or masked.shape != tokens.shape:
        raise InvalidEvidence(
            "logits must be (B, L, V), tokens and masked (B, L), found "
            f"{tuple(logits.shape)}, {tuple(tokens.shape)} and {tuple(masked.shape)}."
        )
    if logits.shape[-1] != circuit.vocab_size:
        raise InvalidEvidence(
            f"the network has {logits.shape[-1]} tokens, the circuit {circuit.vocab_size}: they do not belong together."
        )
    if circuit.length is not None and circuit.length != tokens.shape[1]:
        raise InvalidEvidence(f"the circuit is over {circuit.length} positions, the window has {tokens.shape[1]}.")
