"""From scores to tokens in the order in which they are to be committed: factorized, through a latent path, one by one.

Everything here is about one sequence. Rows are masked positions from left to right. Nothing waits for the device
except where the number of tokens depends on what was drawn.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.incremental import IncrementalConditioner
from codd.circuits.ops.pick.eager import choose as surest
from codd.coupling import Coupled
from codd.coupling.coupled import Conditioner
from codd.decoding.options import Options
from codd.decoding.orders import entropy, order_of, probability_of, ranked
from codd.decoding.tokens import choose

CANDIDATES = 64
"""How many tokens of a position any-order sampling looks at before it looks at all."""


class Noise(NamedTuple):
    """Uniform numbers, one of each kind a position, whatever the options ask for.

    What is drawn for a position is then the same with a circuit and without: with the neutral circuit so is the text.
    """

    tokens: Float[Tensor, " n"]
    order: Float[Tensor, " n"]
    path: Float[Tensor, " n"]

    @classmethod
    def drawn(cls, size: int, generator: torch.Generator) -> "Noise":
        """For so many positions."""
        return cls(*torch.rand(3, size, generator=generator))

    @classmethod
    def none(cls, size: int) -> "Noise":
        """For what draws nothing."""
        return cls(*torch.zeros(3, size))

    def at(self, positions: Int[Tensor, " R"] | slice) -> "Noise":
        """That of some positions."""
        return Noise(*(part[positions] for part in self))

    def to(self, device: torch.device) -> "Noise":
        """The same numbers elsewhere."""
        return Noise(*torch.stack(tuple(self)).to(device, non_blocking=True))


class Ranking(NamedTuple):
    """Rows in the order of commitment, their tokens and scores, and how far to go."""

    rows: Int[Tensor, " k"]
    tokens: Int[Tensor, " k"]
    scores: Float[Tensor, " k"]
    """The probability of each token under the distribution that it was taken from."""
    keep: Bool[Tensor, " k"]
    sure: Bool[Tensor, ""]
    """False: the circuit excludes everything, or candidates did not suffice; the result is void."""

    def chosen(self) -> "Ranking":
        """Only what is to be committed."""
        keep = self.keep
        return Ranking(self.rows[keep], self.tokens[keep], self.scores[keep], keep[keep], self.sure)

    def packed(self) -> Float[Tensor, "4 more"]:
        """All of it in one tensor, which crosses to the host in one go; a column more says whether it is sure.

        float64 holds ids of any vocabulary.
        """
        parts = torch.stack([part.double() for part in self[:4]])
        return torch.cat((parts, self.sure.double().expand(4, 1)), dim=1)

    @classmethod
    def unpacked(cls, packed: Float[Tensor, "4 more"]) -> "Ranking":
        """From what ``packed`` gave."""
        rows, tokens, scores, keep = packed[:, :-1]
        return cls(rows.long(), tokens.long(), scores.float(), keep.bool(), packed[0, -1].bool())


def factorized(
    scores: Float[Tensor, "R V"],
    count: int | None,
    options: Options,
    noise: Noise,
    open_rows: Bool[Tensor, " R"] | None = None,
) -> Ranking:
    """Every row by itself. Rows that are not open come last, and are never to be committed."""
    scores = scores.float() if scores.dtype != torch.float64 else scores
    tokens = choose(scores, noise.tokens, options.temperature, options.top_k, options.top_p)
    log_p = scores.log_softmax(-1)
    order = order_of(options.remasking, scores, log_p, tokens, noise.order, options.sharpening)
    rows = ranked(order if open_rows is None else order.masked_fill(~open_rows, -torch.inf))
    found = probability_of(log_p, tokens)[rows]
    uncertainty = None if options.entropy_budget is None else entropy(log_p)[rows]
    keep = _kept(found, uncertainty, count, options)
    return Ranking(rows, tokens[rows], found, keep, torch.ones((), dtype=torch.bool, device=scores.device))


def _kept(
    found: Float[Tensor, " R"], uncertainty: Float[Tensor, " R"] | None, count: int | None, options: Options
) -> Bool[Tensor, " R"]:
    first = torch.arange(len(found), device=found.device)
    if count is not None:
        return first < count
    if uncertainty is not None and options.entropy_budget is not None:
        return (uncertainty.cumsum(0) < options.entropy_budget) | (first == 0)
    assert options.threshold is not None
    return (found >= options.threshold) | (first == 0)


def latent(
    joint: Coupled,
    rows: Int[Tensor, " R"] | None,
    count: int | None,
    options: Options,
    noise: Noise,
    open_rows: Bool[Tensor, " R"] | None = None,
) -> Ranking:
    """One latent path from its posterior; given it, rows are independent.

    ``rows`` are places in the window; None: all, of which some are open. The noise is that of the whole window.
    """
    step = joint.joint_step(noise.path[None])
    scores = step.scores[0] if rows is None else step.scores[0, rows]
    if options.tempering == "paper":
        scores = scores / options.circuit_temperature
    ranking = factorized(scores, count, options, noise if rows is None else noise.at(rows), open_rows)
    return ranking._replace(sure=step.log_partition[0] > -torch.inf)


class _Pick(NamedTuple):
    """A row, its token, its probability, its entropy if that was asked for; whether all that is sure.

    One-element tensors: a number would have to be waited for.
    """

    place: Int[Tensor, " 1"]
    token: Int[Tensor, " 1"]
    score: Float[Tensor, " 1"]
    entropy: Float[Tensor, " 1"] | None
    sure: Bool[Tensor, ""]


def any_order(
    joint: Coupled,
    rows: Int[Tensor, " R"],
    count: int | None,
    options: Options,
    noise: Noise,
    open_rows: Bool[Tensor, " R"] | None = None,
    *,
    dense: bool = False,
) -> Ranking:
    """Pick the surest position, commit its token, condition on it; again, without another network call.

    With a threshold it goes on while the conditional probability stays above it; with an entropy budget while the
    conditional entropies sum to less. ``dense`` looks at all tokens at once instead of candidates first.
    """
    size = len(rows)
    whole = dense or options.remasking in ("entropy", "sharpened")
    given = joint.conditionals(None if whole else CANDIDATES)
    if rows.device.type == "cpu" and float(given.log_partition[0]) == -torch.inf:
        return _nothing(rows)
    noise = noise.at(rows)
    open_rows = torch.ones(size, dtype=torch.bool, device=rows.device) if open_rows is None else open_rows.clone()
    greedy = options.temperature == 0 and options.entropy_budget is None and rows.device.type != "cpu"
    if greedy and count is not None and isinstance(given, IncrementalConditioner) and given.candidates is not None:
        return _picked(given, rows, open_rows, count, noise, options)
    picks: list[_Pick] = []
    spent = 0.0
    for i in range(size if count is None else min(count, size)):
        pick = _pick(given, rows, open_rows, noise, options)
        if count is None and i > 0 and options.threshold is not None and float(pick.score) < options.threshold:
            break
        if count is None and pick.entropy is not None and options.entropy_budget is not None:
            spent += float(pick.entropy)
            if i > 0 and spent >= options.entropy_budget:
                break
        picks.append(pick)
        given.commit(rows.index_select(0, pick.place), pick.token)
        open_rows = open_rows.scatter(0, pick.place, False)
    if not picks:
        return _nothing(rows)._replace(sure=given.log_partition[0] > -torch.inf)
    sure = torch.stack([pick.sure for pick in picks]).all() & (given.log_partition[0] > -torch.inf)
    places, tokens = torch.cat([pick.place for pick in picks]), torch.cat([pick.token for pick in picks])
    scores = torch.cat([pick.score for pick in picks])
    return Ranking(places, tokens, scores, torch.ones_like(places, dtype=torch.bool), sure)


def _picked(
    given: IncrementalConditioner,
    rows: Int[Tensor, " R"],
    open_rows: Bool[Tensor, " R"],
    count: int,
    noise: Noise,
    options: Options,
) -> Ranking:
    """The same picks, each in a few launches: the most probable candidates, so many of them, with nothing to wait for.

    A token that is sure has a positive probability given those before it, so together they are possible.
    """
    assert given.candidates is not None
    length = given.candidates.shape[1]
    numbers = torch.arange(length, device=rows.device)
    open_ = torch.zeros(1, length, dtype=torch.bool, device=rows.device).scatter_(1, rows[None], open_rows[None])
    rule, order = _rule(options, noise)
    if order is not None:
        order = order.new_zeros(1, length).scatter(1, rows[None], order)
    picks = [given.pick(rule, open_, order) for _ in range(min(count, len(rows)))]
    if not picks:
        return _nothing(rows)._replace(sure=given.log_partition[0] > -torch.inf)
    positions, tokens, scores, sure = (torch.cat(parts) for parts in zip(*picks, strict=True))
    places = torch.zeros_like(numbers).scatter(0, rows, numbers[: len(rows)]).index_select(0, positions)
    return Ranking(places, tokens, scores, torch.ones_like(places, dtype=torch.bool), sure.all())


def _rule(options: Options, noise: Noise) -> tuple[str, Float[Tensor, "1 R"] | None]:
    """The order as candidates can settle it: by their probabilities, or given beforehand."""
    if options.remasking in ("low_confidence", "margin"):
        return options.remasking, None
    if options.remasking == "random":
        return "given", noise.order[None]
    return "given", -torch.arange(len(noise.order), dtype=torch.float32, device=noise.order.device)[None]


def _nothing(rows: Int[Tensor, " R"]) -> Ranking:
    """No token, and void."""
    none = rows[:0]
    return Ranking(none, none, none.float(), none.bool(), torch.zeros((), dtype=torch.bool, device=rows.device))


def _pick(
    given: Conditioner,
    rows: Int[Tensor, " R"],
    open_rows: Bool[Tensor, " R"],
    noise: Noise,
    options: Options,
) -> _Pick:
    """On the host, what candidates cannot settle is settled by looking at all tokens; on a device, later."""
    log_p = given.log_marginals()[0].index_select(0, rows)
    listed, greedy = given.candidates, options.temperature == 0 and options.entropy_budget is None
    if listed is not None:
        rule, order = _rule(options, noise)
        place, number, score, sure, _ = surest(log_p[None], open_rows[None], rule, order)
        if rows.device.type != "cpu" or bool(sure):
            position = rows.index_select(0, place)
            if greedy:
                token = listed[0].index_select(0, position).gather(-1, number[:, None])[:, 0]
                return _Pick(place, token, score, None, sure[0])
            return _drawn(given.dense_log_marginals(position), place, noise, options, sure[0])
        log_p = given.dense_log_marginals()[0].index_select(0, rows)
    order = order_of(options.remasking, log_p, log_p, log_p.argmax(-1), noise.order, options.sharpening)
    place = order.masked_fill(~open_rows, -torch.inf).argmax(0, keepdim=True)
    certain = torch.ones((), dtype=torch.bool, device=rows.device)
    return _drawn(log_p.index_select(0, place), place, noise, options, certain)


def _drawn(
    log_p: Float[Tensor, "1 V"], place: Int[Tensor, " 1"], noise: Noise, options: Options, sure: Bool[Tensor, ""]
) -> _Pick:
    """The token of a row of which the probabilities of all tokens are known."""
    uniform = noise.tokens.index_select(0, place)
    token = choose(log_p, uniform, options.temperature, options.top_k, options.top_p)
    return _Pick(place, token, probability_of(log_p, token), entropy(log_p), sure)
