"""The one rule for underflow: a fast answer where the total keeps its digits, float64 in log space where it does not.

At every position Z is the sum over states of forward message times leaf value times backward message. What one of the
three loses to the smallest number of float32 costs Z at most that number times the largest of the other two. Where all
that can be lost is a tolerated share of the sum, the fast answer stands, however far apart its terms are; where it is
not, or the sum is zero or not a number, the reference answers. That is looked at on a CPU only: on a GPU it would mean
waiting for the device.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from codd.circuits.evidence import Evidence
from codd.circuits.ops.backend import REFERENCE, Backend, backend_for
from codd.circuits.ops.scaled import FLUSH, LEAF_FLUSH, Scaled

if TYPE_CHECKING:
    from codd.circuits.hmm import HMM

Suspects: TypeAlias = Bool[Tensor, " B"] | None
"""True for the sequences that may have lost too much; None: there are none."""
Select: TypeAlias = Callable[[Tensor], Tensor]
Answer: TypeAlias = tuple[tuple[Tensor, ...], Suspects]
Attempt: TypeAlias = Callable[[Evidence, Select], Answer]
"""Gets the evidence, and what selects the same sequences from any other batch-first tensor."""

TOLERATED = 1e-6
"""The share of Z that may be lost: less than float32 rounds off on the way."""


@torch.no_grad()
def first_sound(ev: Evidence, attempts: Iterable[Attempt]) -> tuple[Tensor, ...]:
    """The first attempt's results, batch first; suspect sequences are answered by the next attempt, and so on.

    Results are in the precision that they were computed in, for more to be added to them.
    """
    first, *others = attempts
    out, suspects = first(ev, lambda x: x)
    index: slice | Tensor = slice(None)
    for attempt in others:
        if suspects is None or not bool(suspects.any()):
            break
        index = torch.arange(ev.shape[0], device=ev.device)[index][suspects]
        exact, suspects = attempt(ev.select(index), partial(torch.index_select, dim=0, index=index))
        for fast, slow in zip(out, exact, strict=True):
            fast[index] = slow.to(fast.dtype)
    return out


def with_float64_fallback(
    hmm: "HMM", ev: Evidence, query: Callable[[Backend, Evidence, Select], Answer]
) -> tuple[Tensor, ...]:
    """Answer a query by the backend of the evidence's device, and by the reference what that may have lost."""
    return first_sound(ev, [partial(query, x) for x in (backend_for(ev.device, hmm.dtype), REFERENCE)])


def all_large(*values: tuple[Float[Tensor, "..."], float]) -> bool:
    """Whether all entries on a CPU are at least so large that nothing can have been lost; elsewhere nobody looks."""
    return all(x.device.type != "cpu" or float(x.numpy().min()) >= least for x, least in values)


def suspects(leaf: Scaled, forward: Scaled, backward: Scaled) -> Suspects:
    """The sequences that may have lost more than is tolerated."""
    found = ~(lost_share(forward.values, leaf.values, backward.values) <= TOLERATED)
    return found if bool(found.any()) else None


def lost_share(
    forward: Float[Tensor, "B L N"], leaf: Float[Tensor, "B L N"], backward: Float[Tensor, "B L N"]
) -> Float[Tensor, " B"]:
    """A bound of the share of Z that underflow can have cost, in each sequence; infinite where the sum is zero.

    A leaf value that was lost is below its flush, a product with a message below the chain's (in the units of that
    message, or in those that make its largest entry one).
    """
    total = (forward * leaf * backward).sum(-1)
    high, above = forward.amax(-1), backward.amax(-1)
    products = FLUSH[leaf.dtype] * (above * high.clamp_min(1) + high * above.clamp_min(1))
    lost = leaf.shape[-1] * (LEAF_FLUSH * high * above + products)
    return torch.where(total > 0, lost / total, torch.inf).amax(-1)


def lost_some(suspects: Suspects) -> bool:
    """Whether some sequence is suspect."""
    return suspects is not None and bool(suspects.any())


def either(*parts: Suspects) -> Suspects:
    """The sequences that are suspect for any of these reasons; None if every one of them is None."""
    out: Suspects = None
    for part in parts:
        if part is not None:
            out = part if out is None else out | part
    return out
