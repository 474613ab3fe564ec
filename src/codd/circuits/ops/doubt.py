"""Which sequences of a batch may have lost terms to underflow, and have to be answered in another way."""

from typing import TypeAlias

from jaxtyping import Bool
from torch import Tensor

Doubt: TypeAlias = Bool[Tensor, " B"] | None
"""True for the sequences in doubt; None: there are none, or nobody looked."""


def either(*doubts: Doubt) -> Doubt:
    """The sequences that are in doubt for any of these reasons; None if every one of them is None."""
    out: Doubt = None
    for doubt in doubts:
        if doubt is not None:
            out = doubt if out is None else out | doubt
    return out
