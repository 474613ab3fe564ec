"""The any-order sampler: pick the surest position, commit its token, condition on it; again, in one network call."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.constrained import ConstrainedHMM
from codd.circuits.incremental import IncrementalConditioner
from codd.circuits.ops.draw.eager import RULES, Draw
from codd.circuits.ops.native import Drawing
from codd.circuits.ops.pick.eager import Limits, Offers, Picked
from codd.circuits.ops.pick.eager import choose as pick_surest
from codd.circuits.protocol import Conditioner
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


CERTAIN = 1 - 1e-6
"""Tokens at least so probable are picked together: what is certain stays so, whatever else is picked."""


class _Pick(NamedTuple):
    """One position, its token and that token's probability, in tensors: plain numbers would wait for the device.

    Or several that are certain.
    """

    row: Int[Tensor, " k"]
    token: Int[Tensor, " k"]
    score: Float[Tensor, " k"]
    entropy: Float[Tensor, " k"] | None
    valid: Bool[Tensor, ""]
    """False if the candidates could not settle it."""


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
    """Rank positions ``rows`` of a window (B = 1) by exact conditionals, each given the tokens picked before it.

    ``count`` positions are picked; under a constraint, those besides whose tokens it makes certain. None: with a
    threshold it goes on while a conditional probability reaches it, with an entropy budget while the conditional
    entropies sum to less. With the null circuit that is what `sample_factorized` commits: the same numbers draw the
    tokens, and the same rules rank them. With ``tempering="paper"`` every conditional is tempered, which then says how
    sure its token is. ``dense`` computes the marginals of all tokens instead of candidates first. Void where the
    evidence has probability zero.
    """
    on_host = rows.device.type == "cpu"
    drawn = options.temperature > 0 or options.entropy_budget is not None
    tempered = tempers_conditionals(options)  # its normalisation needs all tokens
    natively = on_host and not (dense or tempered) and _runs_natively(options)
    dense = dense or tempered or not _candidates_suffice(options) or (drawn and not on_host)
    constrained = isinstance(joint.circuit, ConstrainedHMM)
    few = not dense or (natively and not constrained)
    conditioner = joint.conditionals(CANDIDATES if few else None)
    noise = noise.at(rows)
    open_rows = torch.ones(len(rows), dtype=torch.bool, device=rows.device) if open_rows is None else open_rows.clone()
    if isinstance(conditioner, IncrementalConditioner) and not on_host:
        return _sample_on_device(conditioner, rows, open_rows, count, noise, options)
    picks: list[_Pick] = []
    if isinstance(conditioner, IncrementalConditioner) and natively:
        picks, complete = _pick_natively(conditioner, rows, open_rows, count, noise, options)
        if complete:
            return _ranking(rows, picks, torch.ones((), dtype=torch.bool))
    if on_host and float(conditioner.log_partition[0]) == -torch.inf:
        return _nothing(rows)
    for pick in picks:
        conditioner.commit(rows.index_select(0, pick.row), pick.token)
        open_rows[pick.row] = False
    spent, done, left = 0.0, len(picks), int(open_rows.sum())
    most = left + done if count is None else min(count, len(rows))
    while done < most and left > 0:
        log_marginals = conditioner.dense_log_marginals() if dense else conditioner.log_marginals()
        exact = log_marginals[0] if len(rows) == len(log_marginals[0]) else log_marginals[0].index_select(0, rows)
        log_p = temper_conditional(exact, options)
        candidates = None if dense else conditioner.candidates
        free = count is not None and constrained
        both = torch.minimum(log_p, exact) if tempered else exact  # what only tempering makes certain may change
        sure = _certain(both, candidates, rows, open_rows, left if free else most - done, options)
        pick = _pick(conditioner, log_p, candidates, rows, open_rows, noise, options) if sure is None else sure
        if count is None and done and options.threshold is not None and float(pick.score[0]) < options.threshold:
            break
        if count is None and pick.entropy is not None and options.entropy_budget is not None:
            spent += float(pick.entropy)
            if done and spent >= options.entropy_budget:
                break
        picks.append(pick)
        for row, token in zip(pick.row[:, None], pick.token[:, None], strict=True):
            conditioner.commit(rows.index_select(0, row), token)
        open_rows = open_rows.scatter(0, pick.row, False)
        left -= len(pick.row)
        done += 0 if free and sure is not None else len(pick.row)
    return _ranking(rows, picks, conditioner.log_partition[0] > -torch.inf)


def _ranking(rows: Int[Tensor, " R"], picks: list[_Pick], possible: Bool[Tensor, ""]) -> Ranking:
    if not picks:
        return _nothing(rows)._replace(valid=possible)
    picked, tokens, scores = (torch.cat(parts) for parts in list(zip(*picks, strict=True))[:3])
    valid = torch.stack([pick.valid for pick in picks]).all() & possible
    return Ranking(picked, tokens, scores, torch.ones_like(picked, dtype=torch.bool), valid)


def _candidates_suffice(options: Options) -> bool:
    """Whether the most probable tokens of each position can tell which position comes first."""
    if options.remasking == "low_confidence":
        return options.temperature == 0  # else it goes by the token that is drawn at each position
    return options.remasking != "entropy" and options.threshold is None


def _runs_natively(options: Options) -> bool:
    """Whether the loops in C know the rule. They draw from a few candidates, which bound the others up to T = 1."""
    if options.temperature == 0:
        return options.entropy_budget is None and _candidates_suffice(options)
    whole = options.top_k is None and (options.top_p is None or options.top_p >= 1)
    return (
        whole and options.temperature <= 1 and options.remasking == "low_confidence" and options.entropy_budget is None
    )


def _pick_natively(
    conditioner: IncrementalConditioner,
    rows: Int[Tensor, " R"],
    open_rows: Bool[Tensor, " R"],
    count: int | None,
    noise: Noise,
    options: Options,
) -> tuple[list[_Pick], bool]:
    """The picks as far as one call of the loops in C comes with them, and whether these are all."""
    length = conditioner.shape[1]
    rule, order = _pick_rule(options, noise)
    given = None if order is None else torch.zeros(length).scatter(0, rows, order[0])
    open_ = torch.zeros(length, dtype=torch.bool).scatter(0, rows, open_rows)
    draw = None
    if options.temperature > 0:
        uniforms = torch.zeros(length).scatter(0, rows, noise.tokens.float())
        draw = Drawing(uniforms, max(options.temperature, COLDEST))
    threshold = options.threshold if count is None else None
    native = conditioner.picks(rule, open_, given, length if count is None else count, threshold, draw)
    if native is None:
        return [], False
    numbers = torch.zeros(length, dtype=torch.int64).scatter(0, rows, torch.arange(len(rows)))
    sure = torch.ones((), dtype=torch.bool)
    parts = (numbers[native.positions], native.tokens, native.probabilities)
    picks = [_Pick(*(x[i : i + 1] for x in parts), None, sure) for i in range(len(native.positions))]  # type: ignore[call-arg]
    return picks, native.complete


def _sample_on_device(
    conditioner: IncrementalConditioner,
    rows: Int[Tensor, " R"],
    open_rows: Bool[Tensor, " R"],
    count: int | None,
    noise: Noise,
    options: Options,
) -> Ranking:
    """The same on a GPU, each pick in a few launches: the host never looks, so that all of it can be captured.

    Without a count there is a pick for every position; those after the end of the rest commit nothing, and launches
    that have nothing to do end at once. A token that is settled has a positive probability given those before it, so
    together they are possible.
    """
    length = conditioner.shape[1]

    def spread(part: Tensor) -> Tensor:
        """From rows to all positions of the window."""
        return part.new_zeros(1, length).scatter(1, rows[None], part[None])

    open_, uniforms = spread(open_rows), spread(noise.tokens)
    rule, order = _pick_rule(options, noise)
    order = None if order is None or options.remasking in RULES else spread(order[0])
    threshold, budget = (options.threshold, options.entropy_budget) if count is None else (None, None)
    spent = torch.zeros(1, device=rows.device)
    picks: list[Picked] = []
    for i in range(len(rows) if count is None else min(count, len(rows))):
        if conditioner.candidates is not None:
            picks.append(conditioner.pick(rule, open_, order, threshold if i > 0 else None))
        else:
            offers = _offers(conditioner, open_, uniforms, order, options)
            picks.append(conditioner.take(offers, open_, Limits(i == 0, threshold, budget, spent)))
    if not picks:
        return _nothing(rows)._replace(valid=conditioner.log_partition[0] > -torch.inf)
    positions, tokens, scores, valid, keep = (torch.cat(parts) for parts in zip(*picks, strict=True))
    numbers = torch.arange(len(rows), device=rows.device)
    picked = rows.new_zeros(length).scatter(0, rows, numbers).index_select(0, positions)
    return Ranking(picked, tokens, scores, keep, valid.all())


def _offers(
    conditioner: IncrementalConditioner,
    open_: Bool[Tensor, "1 L"],
    uniforms: Float[Tensor, "1 L"],
    given: Float[Tensor, "1 L"] | None,
    options: Options,
) -> Offers:
    """A token for every position, and how early it may be taken: as ``given``, or as the remasking rule says.

    By the kernels, or from the marginals of all tokens.
    """
    greedy = options.temperature == 0
    whole = greedy or (options.top_k is None and options.top_p is None)
    if conditioner.proposes and whole and not tempers_conditionals(options):
        heat = 1.0 if greedy else min(max(options.temperature, COLDEST), HOTTEST)
        rule = options.remasking if options.remasking in RULES else RULES[0]
        draw = Draw(heat, rule, options.entropy_budget is not None)
        offers = conditioner.propose(open_, draw, None if greedy else uniforms)
        return offers if given is None else offers._replace(order=given)
    log_p = temper_conditional(conditioner.dense_log_marginals()[0], options)
    tokens, scores = _proposals(log_p, uniforms[0], options)
    if given is None:
        given = priority(options.remasking, log_p, tokens, None)[None]
    entropies = torch.zeros_like(scores) if options.entropy_budget is None else entropy(log_p)
    return Offers(tokens[None], scores[None], given, entropies[None])


def _pick_rule(options: Options, noise: Noise) -> tuple[str, Float[Tensor, "1 R"] | None]:
    """The remasking rule as candidates can settle it: by their probabilities, or by numbers known beforehand."""
    if options.remasking in ("low_confidence", "margin"):
        return options.remasking, None
    if options.remasking == "random":
        return "given", noise.order[None]
    return "given", -torch.arange(len(noise.order), dtype=torch.float32, device=noise.order.device)[None]


def _nothing(rows: Int[Tensor, " R"]) -> Ranking:
    """An empty ranking whose ``valid`` is false."""
    none = rows[:0]
    return Ranking(none, none, none.float(), none.bool(), torch.zeros((), dtype=torch.bool, device=rows.device))


def _certain(
    log_p: Float[Tensor, "R K"],
    candidates: Int[Tensor, "1 L K"] | None,
    rows: Int[Tensor, " R"],
    open_rows: Bool[Tensor, " R"],
    most: int,
    options: Options,
) -> _Pick | None:
    """All tokens that are certain, if the surest come first; None if there are none. A constraint leaves many."""
    if options.remasking != "low_confidence" or options.entropy_budget is not None:
        return None
    best = log_p.max(-1)
    sure = (open_rows & (best.values.exp() >= CERTAIN)).nonzero()[:most, 0]
    if not len(sure):
        return None
    tokens, scores = best.indices.index_select(0, sure), best.values.index_select(0, sure).exp()
    if candidates is not None:
        listed = candidates[0].index_select(0, rows.index_select(0, sure))
        tokens = listed.gather(-1, tokens[:, None])[:, 0]
    return _Pick(sure, tokens, scores, None, torch.ones((), dtype=torch.bool, device=rows.device))


def _pick(
    conditioner: Conditioner,
    log_p: Float[Tensor, "R K"],
    candidates: Int[Tensor, "1 L K"] | None,
    rows: Int[Tensor, " R"],
    open_rows: Bool[Tensor, " R"],
    noise: Noise,
    options: Options,
) -> _Pick:
    """The next position and its token; where candidates cannot settle it, the host looks at all tokens at once."""
    if candidates is not None:
        rule, order = _pick_rule(options, noise)
        row, number, score, settled, _ = pick_surest(log_p[None], open_rows[None], rule, order)
        if rows.device.type != "cpu" or bool(settled):
            position = rows.index_select(0, row)
            if options.temperature == 0 and options.entropy_budget is None:
                token = candidates[0].index_select(0, position).gather(-1, number[:, None])[:, 0]
                return _Pick(row, token, score, None, settled[0])
            log_p = conditioner.dense_log_marginals(position)
            tokens, scores = _proposals(log_p, noise.tokens.index_select(0, row), options)
            return _Pick(row, tokens, scores, entropy(log_p), settled[0])
        log_p = conditioner.dense_log_marginals()[0].index_select(0, rows)
    tokens, scores = _proposals(log_p, noise.tokens, options)
    priorities = priority(options.remasking, log_p, tokens, noise.order)
    if options.threshold is not None:
        passed = open_rows & (scores >= options.threshold)
        open_rows = torch.where(passed.any(), passed, open_rows)
    row = priorities.masked_fill(~open_rows, -torch.inf).argmax(0, keepdim=True)
    certain = torch.ones((), dtype=torch.bool, device=rows.device)
    token, score = (part.index_select(0, row) for part in (tokens, scores))
    spent = None if options.entropy_budget is None else entropy(log_p.index_select(0, row))
    return _Pick(row, token, score, spent, certain)


def _proposals(
    log_p: Float[Tensor, "R V"], uniforms: Float[Tensor, " R"], options: Options
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """A token for each position, from the probabilities of all tokens, and its own."""
    tokens = choose_tokens(log_p, uniforms, options.temperature, options.top_k, options.top_p)
    return tokens, token_probability(log_p, tokens)
