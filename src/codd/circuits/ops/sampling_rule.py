"""What the commit loops of all backends are given, and what they give back."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

ORDERS = ("low_confidence", "margin", "given", "entropy")
"""What orders the positions: the probability of the token, the lead of the most probable token over the second, numbers
that are given, or how small the entropy is."""
ROUNDING = 1e-5
"""How far the sum of all float32 probabilities may be from one."""


class Proposals(NamedTuple):
    """A token for every position, from which the first is committed."""

    tokens: Int[Tensor, "*B R"]
    probabilities: Float[Tensor, "*B R"]
    order: Float[Tensor, "*B R"]
    """Sort key of each position: the largest is committed first."""
    entropies: Float[Tensor, "*B R"]
    """Entropy of the distribution that each token is from, in nats; all zero where there is no budget."""


class Committed(NamedTuple):
    """Positions of a window in the order of commitment, with a token and its probability each."""

    positions: Int[Tensor, " k"]
    tokens: Int[Tensor, " k"]
    probabilities: Float[Tensor, " k"]
    keep: Bool[Tensor, " k"]
    """False where nothing was committed, because nothing was open or the loop had ended; the rest says nothing then."""
    valid: Bool[Tensor, ""]
    """False: the evidence has probability zero, or the candidates did not suffice; discard it."""


def unchanged(log_p: Float[Tensor, "*R V"]) -> Float[Tensor, "*R V"]:
    """The log-probabilities as they are."""
    return log_p


class SamplingRule(NamedTuple):
    """How tokens are chosen and committed one after the other, in each distribution given those before."""

    order: str
    """One of ``ORDERS``; ties go to the leftmost position."""
    propose: Callable[[Float[Tensor, "R V"], Float[Tensor, " R"], Float[Tensor, " R"] | None], Proposals]
    """Proposals from log-probabilities of all tokens (tempered), uniform numbers and the given order."""
    most: int
    """How many are committed at most."""
    temper: Callable[[Float[Tensor, "*R V"]], Float[Tensor, "*R V"]] = unchanged
    """What is done to log-probabilities before tokens are chosen from them."""
    adaptive: bool = False
    """Whether threshold and budget end the loop, but never before the first ``least`` tokens."""
    threshold: float | None = None
    """Tokens whose probability reaches it come first; the loop ends at one below it."""
    entropy_budget: float | None = None
    """The loop ends when the entropies of what is committed reach it, in nats."""
    temperature: float = 0.0
    """0: the most probable token; otherwise log-probabilities are divided by it, and one is drawn."""
    truncated: bool = False
    """Whether tokens are drawn from a part of the vocabulary only, or from tempered distributions."""
    candidates: int = 64
    """How many tokens of a position are looked at before all of them are."""
    dense: bool = False
    """Look at all tokens from the beginning."""
    least: int = 1
    """How many tokens threshold and budget do not hold back; fewer where fewer are due."""
    due: Bool[Tensor, " L"] | None = None
    """The positions that these are taken from; None: all that are open."""

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """Threshold and budget at which the loop ends."""
        return (self.threshold, self.entropy_budget) if self.adaptive else (None, None)

    @property
    def plain(self) -> bool:
        """Whether the most probable token is taken and nothing else of its distribution counts."""
        return self.temperature == 0 and self.entropy_budget is None

    @property
    def candidates_suffice(self) -> bool:
        """Whether the most probable tokens of each position can tell which position comes first."""
        if self.dense or self.order == "entropy":
            return False
        return self.temperature == 0 if self.order == "low_confidence" else self.threshold is None
