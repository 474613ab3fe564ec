"""Choosing k for the top-k lists of a cache: by what they change in the likelihood that a circuit is trained for.

Both sides are log p(masked | observed) of the product of network and circuit: once with the network's whole answer,
once with the lists and the tail exactly as a shard would keep them, their rounding included.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from codd.circuits import HMM
from codd.data.packing import narrow
from codd.data.windows import WindowBatch
from codd.errors import InvalidInput
from codd.training.logit_cache.cached_windows import CachedWindows, keep_top_k
from codd.training.logit_cache.storage import Change

SMALLEST = 16


@torch.no_grad()
def choose_top_k(
    batches: Sequence[WindowBatch], circuit: HMM, *, top_k: int | None, tolerance: float
) -> tuple[int, tuple[Change, ...]]:
    """The shortest lists within the tolerance, or those that were asked for; and what was measured on the way.

    Tried are lists of 16, 32, ... tokens. The change is the mean of its absolute values, per masked token.
    """
    end = top_k or circuit.vocab_size
    dense = [_log_likelihood(circuit, windows) for windows in batches]
    tokens = max(1, sum(int(windows.masked.sum()) for windows in batches))
    seen: list[Change] = []
    for k in (*(SMALLEST << i for i in range(end.bit_length()) if SMALLEST << i < end), end):
        moved = [
            (_log_likelihood(circuit, truncated(windows, k)) - whole).abs().sum()
            for windows, whole in zip(batches, dense, strict=True)
        ]
        seen.append(Change(k, float(torch.stack(moved).double().sum()) / tokens))
        if k == top_k or (top_k is None and seen[-1].change < tolerance):
            return k, tuple(seen)
    raise InvalidInput(
        f"even lists of all {circuit.vocab_size} tokens change the likelihood by {seen[-1].change:.1e} nats per token, "
        f"more than the tolerance {tolerance:g}: it is below the rounding. Raise it."
    )


def truncated(windows: WindowBatch, k: int) -> WindowBatch:
    """The same windows as a cache would give them back."""
    assert windows.logits is not None
    truth = windows.tokens[windows.masked]
    lists = keep_top_k(windows.logits[windows.masked], truth, k)
    level = torch.zeros(len(windows.tokens), device=truth.device)
    kept = CachedWindows(narrow(windows.tokens, windows.logits.shape[-1]), windows.masked, level, lists)
    return kept.windows(torch.arange(len(kept), device=truth.device))


def _log_likelihood(circuit: HMM, windows: WindowBatch) -> Float[Tensor, " W"]:
    return circuit.conditional_log_prob(windows.tokens, windows.evidence())
