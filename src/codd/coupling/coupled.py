"""The joint distribution of a window's masked tokens: the network's factorized one times the circuit's joint one.

    p(x | observed)  proportional to  circuit(x) * prod over masked t of softmax(logits_t / temperature)[x_t]

Everything here is exact. With the null circuit every answer is the network's own, factorized one.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits import Evidence, pairwise
from codd.circuits.constrained import ConstrainedHMM, WindowConstraint
from codd.circuits.evidence import check_tensors
from codd.circuits.protocol import Conditioner as Conditioner
from codd.circuits.protocol import ProbabilisticCircuit
from codd.circuits.results import JointStep, Samples
from codd.constraints import Automaton
from codd.errors import InvalidConstraint, InvalidEvidence, shown


class Coupled:
    """The joint distribution of the masked tokens of B windows, given the others."""

    def __init__(
        self,
        circuit: ProbabilisticCircuit,
        *,
        logits: Float[Tensor, "B L V"],
        tokens: Int[Tensor, "B L"],
        masked: Bool[Tensor, "B L"],
        temperature: float | Float[Tensor, " B"] = 1.0,
        latent_log_potentials: Float[Tensor, "B L N"] | None = None,
        step_log_gates: Float[Tensor, "B T R"] | None = None,
        features: Float[Tensor, "B L d"] | None = None,
        hidden: Bool[Tensor, "B L"] | None = None,
        constraint: Automaton | WindowConstraint | None = None,
    ):
        """Multiply the network's distribution at the masked positions by the circuit.

        Args:
            circuit: over the network's tokens.
            logits: of the network.
            tokens: given where ``masked`` is False, and ignored elsewhere.
            masked: the positions that this is a distribution over.
            temperature: divides the logits before the product; one number, or one per sequence.
            latent_log_potentials: additional weights on the circuit's latents.
            step_log_gates: additional weights on the inner states of its low-rank transitions.
            features: the network's last hidden states in the window, for circuits with a ``feature_width``.
            hidden: what was masked when the features were computed; by default what is masked now.
            constraint: everything is conditioned on this automaton accepting the window, read from its first position,
                or as a `WindowConstraint` says.

        Raises:
            InvalidEvidence: shapes, types or devices do not fit, or the circuit lacks features.
            InvalidConstraint: the constraint is not an automaton over tokens.
        """
        _check(circuit, logits, tokens, masked, constraint)
        self.circuit, modulation = circuit.condition_on(features, masked if hidden is None else hidden)
        if constraint is not None:
            given = constraint if isinstance(constraint, WindowConstraint) else WindowConstraint(constraint)
            self.circuit = ConstrainedHMM(self.circuit, *given)
        self.evidence = Evidence(
            tokens=torch.where(masked, 0, tokens),  # a mask's id need not be in the circuit's vocabulary
            observed=~masked,
            logits=logits,
            temperature=temperature,
            latent_log_potentials=_added(latent_log_potentials, modulation.latent_log_potentials),
            step_log_gates=_added(step_log_gates, modulation.step_log_gates),
        )

    @property
    def tokens(self) -> Int[Tensor, "B L"]:
        """The observed tokens, (B, L); 0 where masked."""
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
        """Log-probabilities of whole windows, given the observed tokens.

        Args:
            x0: tokens of the B windows; only those at masked positions count.

        Returns:
            log p(x0 at the masked positions | the observed ones).
        """
        check_tensors(x0=x0)
        return self.circuit.conditional_log_prob(x0, self.evidence)

    def marginals(self) -> Float[Tensor, "B L V"]:
        """Log-probabilities of each position's token by itself, (B, L, V)."""
        return self.circuit.marginals(self.evidence)

    def pairwise(self, candidates: Int[Tensor, "B L K"]) -> Float[Tensor, "B L L C C"]:
        """p(c_s, c_t) of every two positions, each token being one of its position's candidates or, last, any other.

        The table of a position with itself is diagonal. All are zero where the two factors exclude each other.
        """
        return self.circuit.pairwise(self.evidence, candidates)

    def mutual_information(self, candidates: int = 8) -> Float[Tensor, "B L L"]:
        """How much every two positions tell of each other, in nats: a lower bound from coarsened tokens.

        The tokens that are kept apart are the ``candidates`` most probable ones of each position; if they are all
        that is possible, it is exact. Zero on the diagonal and where a position is observed.
        """
        if candidates < 1:
            raise InvalidEvidence(f"candidates must be at least 1, found {candidates}.")
        likely = self.marginals().topk(min(candidates, self.circuit.vocab_size), dim=-1).indices
        information = pairwise.mutual_information(self.pairwise(likely))
        return information * (self.masked[:, :, None] & self.masked[:, None, :])

    def posterior(self) -> Float[Tensor, "B L N"]:
        """Log-probabilities of each position's latent by itself."""
        return self.circuit.posterior(self.evidence)

    def sample(self, *, generator: torch.Generator | None = None, num_samples: int | None = None) -> Samples:
        """Exact joint samples.

        Args:
            generator: of random numbers; None: PyTorch's own.
            num_samples: the number of samples per window, a leading axis of the result; None: one, no axis.

        Returns:
            ``.tokens`` and ``.latents``, and ``.log_partition`` of each window.

        Raises:
            ImpossibleEvidence: network and circuit exclude each other.
        """
        return self.circuit.sample(self.evidence, generator=generator, num_samples=num_samples)

    def scores(self, latents: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """Scores of all tokens once the latents are known, not normalised: given them, positions are independent."""
        return self.circuit.conditional_scores(self.evidence, latents)

    def joint_step(self, uniforms: Float[Tensor, "B L"]) -> JointStep:
        """A latent path and the scores given it; impossible evidence shows as a log Z of -inf and does not raise."""
        return self.circuit.joint_step(self.evidence, uniforms=uniforms)

    def conditionals(self, candidates: int | None = None) -> Conditioner:
        """Token marginals while tokens are committed one by one; at most ``candidates`` per position (None: all)."""
        few = candidates is not None and candidates < self.circuit.vocab_size
        return self.circuit.incremental(self.evidence, candidates if few else None)

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


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _check(circuit: ProbabilisticCircuit, logits: Tensor, tokens: Tensor, masked: Tensor, constraint: object) -> None:
    if not hasattr(circuit, "condition_on"):  # isinstance would look at every member of the protocol, in every step
        raise InvalidEvidence(f"circuit must be a circuit, such as codd.HMM, found {shown(circuit)}.")
    if not isinstance(constraint, Automaton | WindowConstraint | None):
        raise InvalidConstraint(
            f"constraint must be an Automaton over the circuit's tokens, found {shown(constraint)}: "
            "model.automaton(...) makes one of a Regex, JsonSchema, Choice or Template."
        )
    check_tensors(logits=logits, tokens=tokens, masked=masked)
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape or masked.shape != tokens.shape:
        shapes = f"{tuple(logits.shape)}, {tuple(tokens.shape)} and {tuple(masked.shape)}"
        raise InvalidEvidence(f"logits must be (B, L, V), tokens and masked (B, L), found {shapes}.")
    if masked.dtype != torch.bool:
        raise InvalidEvidence(f"masked must be a boolean mask, found {masked.dtype}.")
    if not logits.device == tokens.device == masked.device:
        found = f"{logits.device}, {tokens.device} and {masked.device}"
        raise InvalidEvidence(f"logits, tokens and masked must be on one device, found {found}: move them.")
    if logits.shape[-1] != circuit.vocab_size:
        raise InvalidEvidence(
            f"the network has {logits.shape[-1]} tokens, the circuit {circuit.vocab_size}: they do not belong together."
        )
