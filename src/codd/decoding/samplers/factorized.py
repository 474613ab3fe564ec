"""The factorized sampler: every position by itself, as the network alone decodes."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from codd.decoding.options import Options
from codd.decoding.samplers.ranking import (
    Noise,
    Ranking,
    by_priority,
    choose_tokens,
    entropy,
    priority,
    token_probability,
)


def sample_factorized(
    scores: Float[Tensor, "R V"],
    count: int | None,
    options: Options,
    noise: Noise,
    open_rows: Bool[Tensor, " R"] | None = None,
) -> Ranking:
    """Rank every row by itself; rows that are not open come last, are not kept, and ``count`` must not reach them.

    ``count`` rows are kept; None: all that reach the threshold, or the first ones up to the entropy budget, and in any
    case one.
    """
    wide = torch.promote_types(scores.dtype, torch.float32)
    if options.temperature > 0:
        scores = scores.to(wide)
    tokens = choose_tokens(scores, noise.tokens, options.temperature, options.top_k, options.top_p)
    log_p = scores.log_softmax(-1, dtype=wide)
    priorities = priority(options.remasking, log_p, tokens, noise.order)
    rows = by_priority(priorities if open_rows is None else priorities.masked_fill(~open_rows, -torch.inf))
    probabilities = token_probability(log_p, tokens)[rows]
    entropies = None if options.entropy_budget is None else entropy(log_p)[rows]
    if open_rows is None:
        keep = _kept(probabilities, entropies, count, options)
    else:
        opened = open_rows[rows]
        keep = opened & _kept(probabilities.masked_fill(~opened, -1.0), entropies, count, options)
    return Ranking(rows, tokens[rows], probabilities, keep, torch.ones((), dtype=torch.bool, device=scores.device))


def _kept(
    probabilities: Float[Tensor, " R"], entropies: Float[Tensor, " R"] | None, count: int | None, options: Options
) -> Bool[Tensor, " R"]:
    rank = torch.arange(len(probabilities), device=probabilities.device)
    if count is not None:
        return rank < count
    if entropies is not None and options.entropy_budget is not None:
        return (entropies.cumsum(0) < options.entropy_budget) | (rank == 0)
    assert options.threshold is not None
    passed = probabilities >= options.threshold
    return passed | ((rank == 0) & ~passed.any())
