"""How tokens are drawn from the marginals of all tokens, and what is kept of these."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

RULES = ("low_confidence", "margin", "entropy")
"""What orders the positions: the token's probability, the largest less the second, or how small the entropy is."""


class Draw(NamedTuple):
    """How a token is drawn at every position, and what orders the positions."""

    temperature: float = 1.0
    """Divides the log-probabilities before a token is drawn."""
    rule: str = "low_confidence"
    entropies: bool = False

    @property
    def cooling(self) -> float:
        """What multiplies the log-probabilities."""
        return 1 / self.temperature

    @property
    def needs_entropies(self) -> bool:
        """Whether the order needs them, or the caller."""
        return self.entropies or self.rule == "entropy"


class Marginals(NamedTuple):
    """Log-probabilities of all tokens, and what was kept of each strip of them."""

    log_p: Float[Tensor, "B L V"]
    sums: Float[Tensor, "4 B L S"]
    strip: int
