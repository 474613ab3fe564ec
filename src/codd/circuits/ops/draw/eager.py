"""What is proposed for every position before one of them is committed."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class Proposals(NamedTuple):
    """A token for every position, and what may order them."""

    tokens: Int[Tensor, "B L"]
    probabilities: Float[Tensor, "B L"]
    margins: Float[Tensor, "B L"]
    """The largest probability less the second largest."""
    sharpened: Float[Tensor, "B L"]
    """The token's probability once all are raised to a power."""
    entropies: Float[Tensor, "B L"]
    """In nats."""


class Marginals(NamedTuple):
    """Log-probabilities of all tokens, and what was kept of each strip of them."""

    log_p: Float[Tensor, "B L V"]
    sums: Float[Tensor, "5 B L S"]
    strip: int
