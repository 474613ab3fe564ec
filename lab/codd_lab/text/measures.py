"""What continued text is like: how much it repeats itself, and how probable a judge finds it.

Names differ between papers, so here each says what it is. All but the pooled one are of a text by itself, averaged over
texts. A text is a sequence of anything that can be compared, customarily the ids of the tokens that were generated,
without the prompt and without end marks.
"""

import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from codd.evaluation.statistics import bootstrap_interval, ratio_of_sums

MEANINGS: Mapping[str, str] = {
    "nll": "nats per token of the judge: all nats over all tokens (micro average)",
    "ppl": "perplexity: exp of nll",
    "nats_per_byte": "nats per byte of text: does not depend on the judge's tokenizer",
    "rep_2": "share of 2-grams that occurred before in the same text, mean over texts",
    "rep_3": "share of 3-grams that occurred before in the same text, mean over texts",
    "rep_4": "share of 4-grams that occurred before in the same text, mean over texts",
    "distinct_2": "1 - rep_2 (what the CoDD paper's table calls Div)",
    "diversity": "(1 - rep_2)(1 - rep_3)(1 - rep_4) of a text, mean over texts",
    "pooled_distinct_2": "unique 2-grams of all texts together over all their 2-grams: falls with the number of texts",
    "length": "tokens of a text, mean over texts",
}
"""What each figure is, in words for a table."""

LARGEST = 700
"""Nats whose exponential is a float."""
Figure = dict[str, float | None]
"""``value`` with its 95% interval ``low`` to ``high``; None where there is nothing to say."""


def rep_n(text: Sequence[Hashable], n: int) -> float:
    """1 - unique n-grams / n-grams. NaN for a text of fewer than n tokens: it has none, and says nothing either way."""
    grams = _grams(text, n)
    return 1 - len(set(grams)) / len(grams) if grams else math.nan


def diversity(text: Sequence[Hashable]) -> float:
    """The customary product of 1 - `rep_n` for n = 2, 3, 4. NaN for a text of fewer than 4 tokens."""
    return math.prod(1 - rep_n(text, n) for n in (2, 3, 4))


def pooled_distinct_n(texts: Sequence[Sequence[Hashable]], n: int) -> float:
    """Unique n-grams of all texts together over all their n-grams: low also if texts are alike. NaN if there are none.

    It falls with the number of texts, so that only sets of the same size can be compared.
    """
    grams = [gram for text in texts for gram in _grams(text, n)]
    return len(set(grams)) / len(grams) if grams else math.nan


def _grams(text: Sequence[Hashable], n: int) -> list[tuple[Hashable, ...]]:
    return [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]


def measures(
    tokens: Sequence[Sequence[Hashable]],
    nats: Sequence[float],
    counts: Sequence[int],
    sizes: Sequence[int],
) -> dict[str, Figure]:
    """All figures of `MEANINGS` for some texts, with 95% intervals by bootstrap over texts.

    ``tokens`` are the texts; ``nats``, ``counts`` and ``sizes`` are what a judge found for each (`Score`: nats, tokens,
    bytes). Texts that are too short for a measure are left out of it. The pooled measure has no interval: a resample
    holds texts twice, which by itself makes it fall.
    """
    totals = _array(nats)
    figures = {"nll": _ratio(totals, _array(counts))}
    figures["ppl"] = {
        name: None if value is None or value > LARGEST else math.exp(value) for name, value in figures["nll"].items()
    }
    figures["nats_per_byte"] = _ratio(totals, _array(sizes))
    repeated = {n: _array([rep_n(text, n) for text in tokens]) for n in (2, 3, 4)}
    for n, values in repeated.items():
        figures[f"rep_{n}"] = _mean(values)
    figures["distinct_2"] = _mean(1 - repeated[2])
    figures["diversity"] = _mean(_array([diversity(text) for text in tokens]))
    pooled = pooled_distinct_n(tokens, 2)
    figures["pooled_distinct_2"] = {"value": None if math.isnan(pooled) else pooled, "low": None, "high": None}
    figures["length"] = _mean(_array([len(text) for text in tokens]))
    return figures


def _array(values: Sequence[float] | Sequence[int]) -> NDArray[np.float64]:
    return np.asarray(values, np.float64)


def _mean(values: NDArray[np.float64]) -> Figure:
    """The mean over the texts that have a value."""
    known = ~np.isnan(values)
    return _ratio(np.where(known, values, 0.0), known.astype(np.float64))


def _ratio(totals: NDArray[np.float64], counts: NDArray[np.float64]) -> Figure:
    if not counts.sum():
        return {"value": None, "low": None, "high": None}
    low, high = bootstrap_interval(ratio_of_sums(totals, counts), len(totals))
    return {"value": float(totals.sum() / counts.sum()), "low": low, "high": high}
