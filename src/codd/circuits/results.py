"""The result types of queries on circuits."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor


class Samples(NamedTuple):
    """Exact joint samples: tokens, the latents that they were drawn through, and log Z of the evidence.

    A latent is a state of an HMM; in a general circuit it is the number of the leaf, among the leaves of its
    variable, that produced the token. With ``num_samples`` the two have a leading sample axis.
    """

    tokens: Int[Tensor, "*n B L"]
    latents: Int[Tensor, "*n B L"]
    log_partition: Float[Tensor, " B"]


class JointStep(NamedTuple):
    """A latent path drawn from its posterior, the scores of all tokens given it, and log Z."""

    latents: Int[Tensor, "B L"]
    scores: Float[Tensor, "B L V"]
    log_partition: Float[Tensor, " B"]


@dataclass(frozen=True, eq=False)
class Flows:
    """Expected counts of an HMM, summed over the batch: the gradient of log Z in the logarithms of the parameters.

    ``transition`` has the layout of the circuit's transition: one matrix, one per position, or (for a low-rank one) a
    pair of factors.
    """

    initial: Float[Tensor, " N"]
    transition: Float[Tensor, "*steps N N"] | tuple[Float[Tensor, "*steps N R"], Float[Tensor, "*steps R N"]]
    emission: Float[Tensor, "*positions N V"]
    log_partition: Float[Tensor, " B"] | None = None
    """log Z of each sequence, which comes with them."""
