"""The gap between writing all masked tokens at once and one at a time, and the share of it that a circuit closes."""

import math

SMALLEST_GAP = 5e-3
"""Nats per masked token. Where one token at a time is no better than that, a share of the difference is noise."""
NO_GAP = "no gap to close"


def gap_closed(factorized: float, coupled: float, sequential: float) -> float:
    """(coupled - factorized) / (sequential - factorized), of mean log-likelihoods in nats per masked token.

    NaN where there is no gap to close: sequential is not better than factorized by `SMALLEST_GAP`.
    """
    gap = sequential - factorized
    return (coupled - factorized) / gap if gap >= SMALLEST_GAP else math.nan


def gap_in_words(share: float | None) -> str:
    """A share in per cent; None and NaN: no gap to close."""
    return NO_GAP if share is None or math.isnan(share) else f"{share:.0%}"
