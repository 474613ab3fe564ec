"""The samplers, and what a step gives them and gets from them.

A token is chosen for each position by itself (`sample_factorized`), for all given one latent path (`sample_latent`), or
one after the other, each given those before it (`sample_any_order`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.constrained import WindowConstraint
from codd.circuits.ops.sampling_rule import Proposals, SamplingRule
from codd.circuits.protocol import ProbabilisticCircuit
from codd.circuits.sampling import draw_token
from codd.coupling import Coupled
from codd.decoding.constraint import Window
from codd.decoding.options import Options
from codd.decoding.sequence import SequenceState, StepPlan, Writes

CANDIDATES = 64
"""How many tokens of a position are looked at before all of them are."""
COLDEST, HOTTEST = 1e-30, 1e30
"""Temperatures beyond these count as these: float32 would make 0 or infinity of some of them."""


class Noise(NamedTuple):
    """Uniform numbers in [0, 1), one of each kind for a position, whether the options need them or not.

    A position's numbers are then the same with and without a circuit, so that the null circuit writes the network's
    own text.
    """

    tokens: Float[Tensor, " n"]
    order: Float[Tensor, " n"]
    path: Float[Tensor, " n"]

    @classmethod
    def drawn(cls, size: int, generator: torch.Generator) -> "Noise":
        """Draw the numbers of ``size`` positions."""
        return cls(*torch.rand(3, size, generator=generator))

    def at(self, positions: Int[Tensor, " R"] | slice) -> "Noise":
        """The random numbers of some of the positions, in the order given."""
        return Noise(*(part[positions] for part in self))

    def to(self, device: torch.device) -> "Noise":
        """Copy to a device, in one transfer."""
        return self if self.tokens.device == device else Noise(*torch.stack(tuple(self)).to(device, non_blocking=True))


class Ranking(NamedTuple):
    """Rows in the order of commitment, with a token and a score each, and which of them to commit."""

    rows: Int[Tensor, " k"]
    tokens: Int[Tensor, " k"]
    scores: Float[Tensor, " k"]
    """The probability of each token under the distribution that it was taken from."""
    keep: Bool[Tensor, " k"]
    valid: Bool[Tensor, ""]
    """False: the circuit gives zero probability to the evidence, or the candidates did not suffice; discard it."""

    def writes(self) -> Writes:
        """The rows that are to be committed; probabilities, which rounding may have moved, are at most 1."""
        kept = self.keep.nonzero()[:, 0]
        rows, tokens, scores = (part.index_select(0, kept) for part in self[:3])
        return Writes(rows, tokens, scores.float().clamp(max=1))

    def packed(self) -> Float[Tensor, "4 more"]:
        """One float64 tensor (exact for ids of any vocabulary), so that it crosses to the host in one transfer.

        The last column holds ``valid``.
        """
        parts = torch.stack([part.double() for part in self[:4]])
        return torch.cat((parts, self.valid.double().expand(4, 1)), dim=1)

    @classmethod
    def unpacked(cls, packed: Float[Tensor, "4 more"]) -> "Ranking":
        """The inverse of ``packed``."""
        rows, tokens, scores, keep = packed[:, :-1]
        return cls(rows.long(), tokens.long(), scores.float(), keep.bool(), packed[0, -1].bool())

    def to_host(self) -> Callable[[], "Ranking"]:
        """Send it to the host: what is returned waits until it is there. From a GPU it crosses as one tensor."""
        if self.rows.device.type == "cpu":
            return lambda: self
        packed = self.packed()
        return lambda: Ranking.unpacked(packed.cpu())


@dataclass(frozen=True, eq=False)
class StepInputs:
    """All that one step of one sequence is computed from."""

    state: SequenceState
    positions: Int[Tensor, " R"]
    """The masked positions that the step is about, ascending, on the host."""
    logits: Float[Tensor, "R V"]
    """The network's logits there, after guidance, hooks and bans, on its device."""
    circuit: ProbabilisticCircuit | None = None
    features: Float[Tensor, "P d"] | None = None
    """The network's hidden states from position ``begin`` on, for a circuit that is conditioned on them."""
    begin: int = 0
    edits: Callable[[], Ranking] | None = None
    """Gives the written tokens that are to be replaced, on the host; None: nothing is edited."""

    @property
    def options(self) -> Options:
        """The options of the sequence."""
        return self.state.options

    @property
    def plan(self) -> StepPlan:
        """What the step is for."""
        assert self.state.plan is not None, "a finished sequence takes no step"
        return self.state.plan

    def window(
        self, window: Window, noise: Noise | None = None, constraint: WindowConstraint | None = None
    ) -> "WindowInputs":
        """A window, whose masked positions are among those of the step, as the circuit is given it.

        ``noise``: of the whole sequence; None: zeros, for queries that draw nothing.
        """
        begin, end = window
        tokens = self.state.ids[begin:end]
        inside = (self.positions >= begin) & (self.positions < end)
        logits, device = self.logits, self.logits.device
        if not bool(inside.all()):
            logits = logits[inside.nonzero()[:, 0].to(device, non_blocking=True)]
        if len(logits) < len(tokens):
            places = (self.positions[inside] - begin).to(device, non_blocking=True)
            dense = logits.new_zeros(len(tokens), logits.shape[-1])
            logits = dense.index_copy_(0, places, logits)
        features = None if self.features is None else self.features[begin - self.begin : end - self.begin]
        drawn = Noise(*torch.zeros(3, len(tokens))) if noise is None else noise.at(slice(begin, end))
        due = None if self.plan.due_end is None else torch.arange(begin, end) < self.plan.due_end
        return WindowInputs(tokens, tokens == self.state.mask_id, logits, drawn, features, constraint, due)


class WindowInputs(NamedTuple):
    """One window: ids and noise on the host, logits and hidden states on the network's device."""

    tokens: Int[Tensor, " L"]
    masked: Bool[Tensor, " L"]
    logits: Float[Tensor, "L V"]
    """Those at masked positions count."""
    noise: Noise
    features: Float[Tensor, "L d"] | None = None
    constraint: WindowConstraint | None = None
    """The language that the window is part of."""
    due: Bool[Tensor, " L"] | None = None
    """The positions of which the step commits a number at least; None: all."""

    def joint(self, circuit: ProbabilisticCircuit, temperature: float) -> Coupled:
        """The product of network and circuit, on the logits' device."""
        return Coupled(
            circuit,
            logits=self.logits[None],
            tokens=self.tokens[None].to(self.logits.device),
            masked=self.masked[None].to(self.logits.device),
            temperature=temperature,
            features=None if self.features is None else self.features[None],
            constraint=self.constraint,
        )


@dataclass(frozen=True, eq=False)
class StepResult:
    """What a step commits."""

    ranking: Callable[[], Ranking]
    """Gives the ranking on the host, whose rows are positions of the sequence; waits for the device."""
    window: Window
    mask_ratio: float
    """The share of masks in the window before the step."""
    circuit: bool = False
    """Whether the circuit acted."""
    joint: Callable[[], Coupled] | None = None
    """What tokens of the window were taken from; None: the network alone."""


def best_window(due: Bool[Tensor, " L"], length: int) -> int:
    """The first position of a window of ``length`` that covers as many due positions as any.

    Of the windows that do, those that begin in a row with the first of them are equally good; the middle one leaves
    the same context on both sides.
    """
    length = min(length, len(due))
    covered = due.long().unfold(0, length, 1).sum(-1)
    best = (covered == covered.max()).tolist()
    first = best.index(True)
    row = best[first:]
    return (2 * first + (row.index(False) if False in row else len(row)) - 1) // 2


def fit_window(window: Window, circuit: ProbabilisticCircuit | None, length: int) -> Window | None:
    """The window as the circuit can serve it: one of fixed length reaches back into what is written.

    None if a sequence of ``length`` positions has no room for it.
    """
    begin, end = window
    if circuit is None or circuit.length is None or circuit.length == end - begin:
        return window
    begin = max(0, end - circuit.length)
    return (begin, begin + circuit.length) if begin + circuit.length <= length else None


def window_length(circuit: ProbabilisticCircuit | None, options: Options, length: int) -> int:
    """How many positions the window of full mode covers."""
    own = None if circuit is None else circuit.length or circuit.window
    return min(own or options.block_length, length)


def circuit_acts(circuit: ProbabilisticCircuit | None, state: SequenceState, window: Window) -> bool:
    """Whether the circuit takes part in a step: `Options.activation` is compared with the share of masks.

    That is the share in the window, or in all that the run is to write.
    """
    options = state.options
    if circuit is None or options.sampler == "factorized":
        return False
    if options.activation is None:
        return True
    if options.activation_scope == "window":
        return state.mask_ratio(window) < options.activation
    return int(state.masked.sum()) / max(1, int((~state.given).sum())) < options.activation


def sample_window(
    circuit: ProbabilisticCircuit, window: WindowInputs, count: int, options: Options, *, dense: bool = False
) -> Ranking:
    """Rank the masked positions of a window; void if the circuit excludes the evidence, or candidates do not suffice.

    On a GPU it can be captured: its shapes are the same whatever is masked. ``dense``: from all tokens instead of the
    most probable candidates of each position.
    """
    joint, noise = window.joint(circuit, logits_temperature(options)), window.noise.to(window.logits.device)
    if options.sampler == "latent":
        return sample_latent(joint, count, options, noise)
    due = None if window.due is None else window.due.to(joint.masked.device, non_blocking=True)
    return sample_any_order(joint, count, options, noise, dense=dense, due=due)


def sample_factorized(
    logits: Float[Tensor, "R V"],
    count: int,
    options: Options,
    noise: Noise,
    open_rows: Bool[Tensor, " R"] | None = None,
    due: Bool[Tensor, " R"] | None = None,
) -> Ranking:
    """Rank every row by itself; rows that are not open come last, and ``count`` must not reach them.

    ``count`` rows are kept; under a threshold or an entropy budget the first ``count`` that are due (None: of all), and
    those that reach the one, or the first ones whose entropies sum to less than the other.
    """
    log_p = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    found = propose(options, log_p, noise.tokens, known_order(options, noise))
    rows = by_priority(found.order if open_rows is None else found.order.masked_fill(~open_rows, -torch.inf))
    if options.threshold is not None:  # what reaches it comes first
        rows = rows[(found.probabilities[rows] < options.threshold).byte().argsort(stable=True)]
    first = torch.ones_like(rows, dtype=torch.bool) if due is None else due[rows]
    first = first & (first.cumsum(0) <= count)
    turns = (~first).byte().argsort(stable=True)
    rows, keep = rows[turns], first[turns]
    if options.threshold is not None:
        keep = keep | (found.probabilities[rows] >= options.threshold)
    elif options.entropy_budget is not None:
        keep = keep | (found.entropies[rows].cumsum(0) < options.entropy_budget)
    valid = torch.ones((), dtype=torch.bool, device=rows.device)
    return Ranking(rows, found.tokens[rows], found.probabilities[rows], keep, valid)


def sample_latent(joint: Coupled, count: int, options: Options, noise: Noise) -> Ranking:
    """Rank the masked positions of a window (B = 1) given one latent path; void where the evidence is impossible."""
    step = joint.joint_step(noise.path[None])
    scores = temper(step.scores[0], options.circuit_temperature) if options.tempering == "paper" else step.scores[0]
    ranking = sample_factorized(scores, count, options, noise, joint.masked[0])
    return ranking._replace(valid=step.log_partition[0] > -torch.inf)


def sample_any_order(
    joint: Coupled,
    count: int,
    options: Options,
    noise: Noise,
    *,
    dense: bool = False,
    due: Bool[Tensor, " L"] | None = None,
) -> Ranking:
    """Rank the masked positions of a window (B = 1) by exact conditionals, each given the tokens committed before it.

    ``count`` positions are committed; under a constraint, those besides whose tokens it makes certain. With a threshold
    these are taken from those that are ``due`` (None: from all), and it goes on everywhere while a conditional
    probability reaches it, with an entropy budget while the conditional entropies sum to less. With the null circuit
    that is what `sample_factorized` commits: the same numbers draw the tokens, and the same rules rank them. With
    ``tempering="paper"`` every conditional is tempered, which then says how sure its token is. ``dense`` computes the
    marginals of all tokens instead of candidates first. Invalid where the evidence has probability zero.
    """
    masked = joint.masked[0]
    rule = sampling_rule(options, min(count, len(masked)), len(masked), dense=dense, due=due)
    few = rule.candidates_suffice and (rule.plain or masked.device.type == "cpu")
    conditionals = joint.conditionals(CANDIDATES if few else None)
    return Ranking(*conditionals.commit_tokens(masked, noise.tokens, known_order(options, noise), rule))


def sampling_rule(
    options: Options, count: int, most: int, *, dense: bool = False, due: Bool[Tensor, " L"] | None = None
) -> SamplingRule:
    """What the options say, as commit loops understand it: ``count`` tokens, or at least, and then at most ``most``."""
    tempered = tempers_conditionals(options)
    cut = options.top_k is not None or (options.top_p is not None and options.top_p < 1)
    return SamplingRule(
        order="given" if options.remasking in ("random", "left_to_right") else options.remasking,
        propose=partial(propose, options),
        temper=partial(temper_conditional, options=options),
        most=count if options.fixed_count else most,
        adaptive=not options.fixed_count,
        threshold=options.threshold,
        entropy_budget=options.entropy_budget,
        temperature=options.temperature and min(max(options.temperature, COLDEST), HOTTEST),
        truncated=tempered or (cut and options.temperature > 0),
        candidates=CANDIDATES,
        dense=dense or tempered,  # the normalisation of what is tempered needs all tokens
        least=count,
        due=due,
    )


def propose(
    options: Options, log_p: Float[Tensor, "R V"], uniforms: Float[Tensor, " R"], given: Float[Tensor, " R"] | None
) -> Proposals:
    """A token for each position, from the log-probabilities of all tokens, and how early it may be committed.

    ``given``: the order, where it does not depend on the probabilities.
    """
    tokens = choose_tokens(log_p, uniforms, options.temperature, options.top_k, options.top_p)
    scores = token_probability(log_p, tokens)
    order = priority(options.remasking, log_p, tokens) if given is None else given
    entropies = torch.zeros_like(scores) if options.entropy_budget is None else entropy(log_p)
    return Proposals(tokens, scores, order, entropies)


def known_order(options: Options, noise: Noise) -> Float[Tensor, " R"] | None:
    """The priorities of the orders that heed no probability; None for the others."""
    if options.remasking == "random":
        return noise.order
    left_to_right = options.remasking == "left_to_right"
    return -torch.arange(len(noise.order), dtype=torch.float32, device=noise.order.device) if left_to_right else None


def priority(rule: str, log_p: Float[Tensor, "R V"], tokens: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """How early each row may be committed by a remasking rule that heeds probabilities: larger is earlier.

    ``tokens`` are the proposed ones, ``log_p`` the log-probabilities of all tokens.
    """
    if rule == "low_confidence":
        return token_probability(log_p, tokens)
    assert rule in ("margin", "entropy")
    return margin(log_p) if rule == "margin" else -entropy(log_p)


def logits_temperature(options: Options) -> float:
    """What divides the logits before the product; the paper tempers the tokens after it instead."""
    return 1.0 if options.tempering == "paper" else options.circuit_temperature


def token_probability(log_p: Float[Tensor, "R V"], tokens: Int[Tensor, " R"]) -> Float[Tensor, " R"]:
    """The probability of one token in each row."""
    return log_p.gather(-1, tokens[:, None])[:, 0].exp()


def margin(log_p: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """The probability of the best token less that of the second best."""
    if log_p.shape[-1] == 1:
        return log_p[:, 0].exp()
    top = log_p.topk(2, dim=-1).values.exp()
    return top[:, 0] - top[:, 1]


def entropy(log_p: Float[Tensor, "R V"]) -> Float[Tensor, " R"]:
    """The entropy of each row, in nats."""
    return -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)


def by_priority(priorities: Float[Tensor, " R"]) -> Int[Tensor, " R"]:
    """Rows from the earliest to the latest; of equals, the leftmost comes first."""
    return priorities.argsort(descending=True, stable=True)


def temper(scores: Float[Tensor, "R V"], temperature: float) -> Float[Tensor, "R V"]:
    """Scores over a temperature, the best of each row at 0: nothing overflows but what becomes impossible."""
    return (scores - scores.amax(-1, keepdim=True)) / min(max(temperature, COLDEST), HOTTEST)


def temper_conditional(log_p: Float[Tensor, "*R V"], options: Options) -> Float[Tensor, "*R V"]:
    """Log-probabilities of tokens given what is written, as the any-order sampler tempers them, or as they are.

    With ``tempering="paper"`` that is each token's conditional under the joint to the power of 1 / circuit temperature.
    """
    if not tempers_conditionals(options):
        return log_p
    return temper(log_p, options.circuit_temperature).log_softmax(-1)


def tempers_conditionals(options: Options) -> bool:
    """Whether the circuit temperature acts on conditionals of the joint rather than on the network's logits."""
    return options.sampler == "any_order" and options.tempering == "paper" and options.circuit_temperature != 1


def keep_top_k(scores: Float[Tensor, "R V"], k: int | None) -> Float[Tensor, "R V"]:
    """Set all but the k largest scores of each row (and what equals the k-th) to -inf."""
    if k is None or k >= scores.shape[-1]:
        return scores
    least = scores.topk(k, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, -math.inf)


def keep_top_p(scores: Float[Tensor, "R V"], p: float | None) -> Float[Tensor, "R V"]:
    """Keep the smallest set of tokens whose probability exceeds p, the one that crosses it included; -inf elsewhere."""
    if p is None or p >= 1:
        return scores
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
    before[..., 0] = 0
    drop = before > p
    return scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)


def choose_tokens(
    scores: Float[Tensor, "R V"],
    uniforms: Float[Tensor, " R"] | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Int[Tensor, " R"]:
    """One token per row: the best at temperature 0, otherwise drawn by inverse CDF with one uniform number per row.

    A token whose score is -inf is never chosen while there is another, whatever the temperature.
    """
    if temperature == 0:
        return scores.argmax(-1)
    assert uniforms is not None
    return draw_token(token_distribution(scores, temperature, top_k, top_p), uniforms)


def token_distribution(
    scores: Float[Tensor, "R V"], temperature: float, top_k: int | None, top_p: float | None
) -> Float[Tensor, "R V"]:
    """The probabilities that `choose_tokens` draws with; at temperature 0 all is on the best token."""
    if temperature == 0:
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    return keep_top_p(keep_top_k(temper(scores, temperature), top_k), top_p).softmax(-1)
