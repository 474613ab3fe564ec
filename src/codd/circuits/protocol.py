"""The interface of all circuits: chains (`HMM`, `Modulated`) and general circuits (`Circuit`).

B sequences, L positions, V tokens, K latents, hidden states of width d. All log-probabilities; impossible evidence has
log Z = -inf, and evidence that does not fit the circuit raises `InvalidEvidence`.
"""

from os import PathLike
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Modulation
from codd.circuits.ops.sampling_rule import Committed, SamplingRule
from codd.circuits.results import JointStep, Samples


@runtime_checkable
class Conditioner(Protocol):
    """Token marginals while tokens are committed one by one; made by ``ProbabilisticCircuit.incremental``."""

    candidates: Int[Tensor, "B L K"] | None
    """The tokens that `log_marginals` is about; None: all V."""
    certain_is_free: bool
    """Whether `commit_tokens` does not count tokens that are certain."""

    @property
    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z of the evidence and the committed tokens."""

    def log_marginals(self) -> Float[Tensor, "B L K"]:
        """Log-probabilities of the candidates (of all tokens, if there are none), normalised over all tokens."""

    def dense_log_marginals(self, positions: Int[Tensor, " B"] | None = None) -> Float[Tensor, "B *L V"]:
        """Log-probabilities of all tokens: (B, V) at one position of each sequence, or (B, L, V) at all."""

    def commit(self, positions: Int[Tensor, " B"], tokens: Int[Tensor, " B"]) -> None:
        """Observe one more token of each sequence; a position that is observed already keeps its token."""

    def commit_tokens(
        self,
        open_: Bool[Tensor, " L"],
        uniforms: Float[Tensor, " L"],
        given: Float[Tensor, " L"] | None,
        rule: SamplingRule,
    ) -> Committed:
        """Choose and commit tokens at open positions one after the other, each given those before; of one sequence."""


_Circuit = TypeVar("_Circuit")


class Unconditioned:
    """What circuits share that do not depend on hidden states."""

    feature_width: int | None = None
    """None: it needs no hidden states."""

    def condition_on(
        self: _Circuit, features: Float[Tensor, "B L d"] | None, masked: Bool[Tensor, "B L"]
    ) -> tuple[_Circuit, Modulation]:
        """The circuit itself and no modulation."""
        return self, Modulation()


@runtime_checkable
class ProbabilisticCircuit(Protocol):
    """A distribution over strings with exact queries, conditioned on `Evidence`."""

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""

    @property
    def num_latents(self) -> int:
        """K, the number of latents of a position: states of an HMM, leaves of a general circuit's variable."""

    @property
    def length(self) -> int | None:
        """The only length that is served, or None: any."""

    @property
    def window(self) -> int | None:
        """The length that the circuit was made for, or None if it was made for none in particular."""

    @property
    def device(self) -> torch.device:
        """Where the parameters are, and the evidence must be."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the results: float32 or float64."""

    @property
    def feature_width(self) -> int | None:
        """d, the width of the hidden states that the circuit is conditioned on; None: it needs none."""

    @property
    def supports_cuda_graphs(self) -> bool:
        """Whether queries can be captured in a CUDA graph: on a GPU they never wait for the host."""

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "ProbabilisticCircuit":
        """The same circuit on another device or in another type; `InvalidCircuit` if it cannot be there."""

    def save(self, folder: str | PathLike[str]) -> Path:
        """Write config.json and circuit.safetensors, atomically; `codd.load_circuit` reads them."""

    def condition_on(
        self, features: Float[Tensor, "B L d"] | None, masked: Bool[Tensor, "B L"]
    ) -> tuple["ProbabilisticCircuit", Modulation]:
        """The circuit that answers for these windows, and the latent evidence that the network's hidden states are.

        ``masked`` are the positions that were hidden from the network. A circuit with a ``feature_width`` raises
        `InvalidEvidence` without features or with misshapen ones; the others ignore them.
        """

    def log_partition(self, ev: Evidence) -> Float[Tensor, " B"]:
        """log Z: the logarithm of the total weight of all strings under the evidence."""

    def conditional_log_prob(self, ids: Int[Tensor, "B L"], ev: Evidence) -> Float[Tensor, " B"]:
        """log p(ids at the positions that are not observed | evidence)."""

    def marginals(self, ev: Evidence) -> Float[Tensor, "B L V"]:
        """log p(x_t | evidence) of every token."""

    def posterior(self, ev: Evidence) -> Float[Tensor, "B L K"]:
        """log p(z_t | evidence) of every latent."""

    def sample(
        self, ev: Evidence, *, generator: torch.Generator | None = None, num_samples: int | None = None
    ) -> Samples:
        """Exact joint samples of tokens and latents; impossible evidence raises `ImpossibleEvidence`."""

    def conditional_scores(self, ev: Evidence, latents: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """Scores of all tokens given the latents, not normalised: positions are independent then."""

    def joint_step(
        self, ev: Evidence, *, generator: torch.Generator | None = None, uniforms: Float[Tensor, "B L"] | None = None
    ) -> JointStep:
        """A latent path from its posterior and the scores given it; impossible evidence does not raise here.

        ``uniforms``, numbers in [0, 1), decide the path instead of the generator.
        """

    def pairwise(self, ev: Evidence, candidates: Int[Tensor, "B L K"]) -> Float[Tensor, "B L L C C"]:
        """p(class at s, class at t | evidence): each candidate is a class, and all other tokens are the last one."""

    def incremental(self, ev: Evidence, candidates: int | None = None) -> Conditioner:
        """Marginals while tokens are committed one by one.

        ``candidates`` limits `Conditioner.log_marginals` to a number of tokens per position, where that
        saves work; None: all tokens.
        """
