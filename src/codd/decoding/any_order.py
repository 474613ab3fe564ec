"""The any-order sampler: commit the surest position's token, condition on it; again, in one network call."""

from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.ops.sampling_rule import Proposals, SamplingRule
from codd.coupling import Coupled
from codd.decoding.options import Options
from codd.decoding.samplers import (
    COLDEST,
    HOTTEST,
    Noise,
    Ranking,
    choose_tokens,
    entropy,
    priority,
    temper_conditional,
    tempers_conditionals,
    token_probability,
)

CANDIDATES = 64
"""How many tokens of a position are looked at before all of them are."""


def sample_any_order(
    joint: Coupled,
    rows: Int[Tensor, " R"],
    count: int | None,
    options: Options,
    noise: Noise,
    open_rows: Bool[Tensor, " R"] | None = None,
    *,
    dense: bool = False,
) -> Ranking:
    """Rank positions ``rows`` of a window (B = 1) by exact conditionals, each given the tokens committed before it.

    ``count`` positions are committed; under a constraint, those besides whose tokens it makes certain. None: with a
    threshold it goes on while a conditional probability reaches it, with an entropy budget while the conditional
    entropies sum to less. With the null circuit that is what `sample_factorized` commits: the same numbers draw the
    tokens, and the same rules rank them. With ``tempering="paper"`` every conditional is tempered, which then says how
    sure its token is. ``dense`` computes the marginals of all tokens instead of candidates first. Invalid where the
    evidence has probability zero.
    """
    most = len(rows) if count is None else min(count, len(rows))
    rule = sampling_rule(options, most, adaptive=count is None, dense=dense)
    length, host = joint.masked.shape[1], rows.device.type == "cpu"
    few = rule.candidates_suffice and (host or rule.plain)
    given = None
    if rule.order == "given":
        left_to_right = -torch.arange(length, dtype=torch.float32, device=rows.device)
        given = noise.order if options.remasking == "random" else left_to_right
    open_ = torch.zeros(length, dtype=torch.bool, device=rows.device)
    open_ = open_.scatter(0, rows, torch.ones_like(rows, dtype=torch.bool) if open_rows is None else open_rows)
    found = joint.conditionals(CANDIDATES if few else None).commit_tokens(open_, noise.tokens, given, rule)
    numbers = torch.zeros_like(open_, dtype=rows.dtype).scatter(0, rows, torch.arange(len(rows), device=rows.device))
    positions = numbers.index_select(0, found.positions)
    return Ranking(positions, found.tokens, found.probabilities, found.keep, found.valid)


def sampling_rule(options: Options, count: int, *, adaptive: bool, dense: bool = False) -> SamplingRule:
    """What the options say, as commit loops understand it."""
    tempered = tempers_conditionals(options)
    cut = options.top_k is not None or (options.top_p is not None and options.top_p < 1)
    known = options.remasking in ("random", "left_to_right")
    return SamplingRule(
        order="given" if known else options.remasking,
        propose=partial(_propose, options),
        temper=partial(temper_conditional, options=options),
        most=count,
        adaptive=adaptive,
        threshold=options.threshold,
        entropy_budget=options.entropy_budget,
        temperature=options.temperature and min(max(options.temperature, COLDEST), HOTTEST),
        truncated=tempered or (cut and options.temperature > 0),
        candidates=CANDIDATES,
        dense=dense or tempered,  # the normalisation of what is tempered needs all tokens
    )


def _propose(
    options: Options, log_p: Float[Tensor, "R V"], uniforms: Float[Tensor, " R"], given: Float[Tensor, " R"] | None
) -> Proposals:
    """A token for each position, from the log-probabilities of all tokens, and how early it may be committed."""
    tokens = choose_tokens(log_p, uniforms, options.temperature, options.top_k, options.top_p)
    scores = token_probability(log_p, tokens)
    order = priority(options.remasking, log_p, tokens, None) if given is None else given
    entropies = torch.zeros_like(scores) if options.entropy_budget is None else entropy(log_p)
    return Proposals(tokens, scores, order, entropies)
