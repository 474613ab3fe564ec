"""The published loops of bidirectional families: LLaDA's block diffusion, Dream's sampling, and full diffusion."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding.constraint import Window
from codd.decoding.options import Options
from codd.decoding.samplers import (
    Ranking,
    StepInputs,
    StepResult,
    by_priority,
    choose_tokens,
    circuit_acts,
    keep_top_k,
    keep_top_p,
    window_length,
)
from codd.decoding.sequence import SequenceState, StepPlan, StopCondition, spread

EPS = 1e-3
"""The last time in full mode."""
_TINY = 1e-10
_SIMPLEX = 1e-6
"""How far from 1 probabilities may sum before PyTorch's Categorical refuses them."""
_NEVER, _ALWAYS = -1e9, 1e9


def plan_steps(state: SequenceState, stop: StopCondition) -> Iterator[StepPlan]:
    """The steps of a sequence, those that have nothing to commit included; it goes on after the end-of-text."""
    if state.options.mode == "full":
        return _full_schedule(state)
    return rounded_blocks(state, state.options.block_length) if state.family == "a2d" else _block_schedule(state)


def _block_schedule(state: SequenceState) -> Iterator[StepPlan]:
    """The steps of the blocks appended to the prompt; each block's masks are spread over its share of the steps."""
    options = state.options
    blocks, steps = options.gen_length // options.block_length, options.steps or options.gen_length
    for block in range(blocks):
        begin = state.prompt_length + block * options.block_length
        end = begin + options.block_length
        masks = int(state.masked[begin:end].sum())
        for count in spread(masks, steps // blocks):
            yield StepPlan(begin, end, count, last=False)


def rounded_blocks(state: SequenceState, size: int) -> Iterator[StepPlan]:
    """A2D's steps: as many for each block, each for its share of the masks that are left, rounded.

    Halves go to the even number but for rounding: the shares are the original's to the bit (float32). Steps that would
    write nothing are left out.
    """
    starts = range(state.prompt_length, len(state.ids), size)
    steps = -(-(state.options.steps or state.options.gen_length) // max(1, len(starts)))
    times = 1 - (1 - torch.tensor([left / steps for left in range(steps, -1, -1)]))
    shares = [1 - float(then / now) for now, then in pairwise(times)]
    for begin in starts:
        end = min(begin + size, len(state.ids))
        for share in shares:
            if count := round(int(state.masked[begin:end].sum()) * share):
                yield StepPlan(begin, end, count, last=False)


def _full_schedule(state: SequenceState) -> Iterator[StepPlan]:
    steps = state.options.steps or state.options.gen_length
    times = diffusion_times(steps)
    for i in range(steps):
        now, then, last = times[i], times[i + 1], i == steps - 1
        count = revealed(int(state.masked.sum()), now, then, last)
        yield StepPlan(0, len(state.ids), count, last=last, time=(now, then))


def positions(state: SequenceState) -> Int[Tensor, " R"]:
    """All masked positions before the end of the block: masks in the prompt take part, too.

    Where tokens are drawn at every position, all of them: those that are written already can spoil the draw.
    """
    assert state.plan is not None
    options, full = state.options, state.options.mode == "full"
    windowed = full and state.circuit is not None and options.sampler != "factorized"
    if options.temperature > 0 and (windowed or (state.family == "dream" and not full)):
        return torch.arange(len(state.ids))
    return state.masked[: state.plan.end].nonzero()[:, 0]


def diffusion_times(steps: int) -> list[float]:
    """The times of full mode: from 1 to `EPS`."""
    return torch.linspace(1, EPS, steps + 1).tolist()


def revealed(masks: int, now: float, then: float, last: bool) -> int:
    """How many of the masks are revealed between two times, in the original's arithmetic (float32, cut)."""
    if last:
        return masks
    return int(torch.tensor(float(masks)) * (1 - torch.tensor(then) / torch.tensor(now)))


def centred_window(due: Bool[Tensor, " L"], length: int) -> tuple[int, int]:
    """The window centred on a due position (moved inside at the ends) that covers most, the first of equals.

    Returns its first position and the number of due positions covered; (0, 0) if nothing is due.
    """
    total = len(due)
    begin, most = 0, 0
    for position in due.nonzero()[:, 0].tolist():
        at = max(0, min(position - length // 2, total - length))
        covered = int(due[at : at + length].sum())
        if covered > most:
            begin, most = at, covered
    return begin, most


def step(inputs: StepInputs) -> StepResult:
    """Which tokens to commit: block diffusion as for LLaDA or, with Dream's way of sampling, as for Dream; or full.

    Full diffusion is Dream's own loop, or with a circuit the one with dynamic windows.
    """
    inputs, others = _split(inputs)
    state, plan, circuit, logits, options = inputs.state, inputs.plan, inputs.circuit, inputs.logits, inputs.options
    full, positions = options.mode == "full", inputs.positions
    windowed = full and circuit is not None and options.sampler != "factorized"
    window, acts, due = plan.block, len(positions) > 0, torch.zeros(len(state.ids), dtype=torch.bool)
    if windowed:
        if len(positions) > 1:
            due[positions[by_priority(_target_confidence(logits, options, state))[: plan.count].cpu()]] = True
        length = window_length(circuit, options, len(due))
        begin, covered = centred_window(due, length)
        window, acts = (begin, begin + length), covered > 1
    mask_ratio, possible = state.mask_ratio(window), _true(logits)
    fits = circuit is not None and circuit.length in (None, window[1] - window[0])  # the sequence may be shorter
    acts = acts and fits and circuit_acts(circuit, state, window)
    if acts:
        assert circuit is not None
        logits, possible, latents = coupled_logits(circuit, inputs, window)
        others = _with_circuit(circuit, others, window, latents)
    if full or state.family == "dream":
        proposals = _propose_dream(logits, options, state, others)
    else:
        proposals = _propose_llada(logits, options, state)
    confidence, count = proposals.confidence, plan.count
    if windowed:
        outside = (positions < window[0]) | (positions >= window[1])
        if acts:
            confidence = confidence.masked_fill(outside.to(confidence.device), _NEVER)
        confidence = confidence.masked_fill((outside & due[positions]).to(confidence.device), _ALWAYS)
    elif full and options.remasking == "origin":  # each mask is revealed by a coin of its own
        now, then = plan.time
        count = len(positions) if plan.last else int((confidence > then / now).sum())
    return step_result(inputs, proposals._replace(confidence=confidence), count, window, mask_ratio, acts, possible)


def _split(inputs: StepInputs) -> tuple[StepInputs, StepInputs]:
    """The masked positions up to the end of the block, of which tokens may be committed, and all others."""
    masked = inputs.state.masked[inputs.positions] & (inputs.positions < inputs.plan.end)

    def part(chosen: Bool[Tensor, " R"]) -> StepInputs:
        rows = chosen.nonzero()[:, 0]
        logits = inputs.logits.index_select(0, rows.to(inputs.logits.device, non_blocking=True))
        return replace(inputs, positions=inputs.positions[rows], logits=logits)

    return (inputs if bool(masked.all()) else part(masked)), part(~masked)


def coupled_logits(
    circuit: ProbabilisticCircuit, inputs: StepInputs, window: Window
) -> tuple[Float[Tensor, "R V"], Bool[Tensor, ""], Int[Tensor, "1 W"]]:
    """The logits of masked positions with a window's scores given one latent path, in the logits' own type.

    Also whether there is such a path, and the path.
    """
    path = draw(inputs.state, window[1] - window[0], inputs.logits.device)
    joint = _divided(inputs).window(window).joint(circuit, 1.0)
    step = joint.joint_step(path[None])
    return _overwritten(inputs, window, step.scores[0]), step.log_partition[0] > -torch.inf, step.latents


def _with_circuit(
    circuit: ProbabilisticCircuit, others: StepInputs, window: Window, latents: Int[Tensor, "1 W"]
) -> StepInputs:
    """The scores given the same path at the window's other positions, which the published loop writes there as well."""
    if not bool(((others.positions >= window[0]) & (others.positions < window[1])).any()):
        return others
    given = _divided(others).window(window)
    free = given._replace(masked=torch.ones_like(given.masked))  # a score is asked for where a token is known
    return replace(others, logits=_overwritten(others, window, free.joint(circuit, 1.0).scores(latents)[0]))


def _divided(inputs: StepInputs) -> StepInputs:
    tau = inputs.options.circuit_temperature
    return replace(inputs, logits=inputs.logits / tau) if 0 < tau < 1 else inputs


def _overwritten(inputs: StepInputs, window: Window, scores: Float[Tensor, "W V"]) -> Float[Tensor, "R V"]:
    """The logits with a window's scores in their place, rounded to their type."""
    positions, logits = inputs.positions, inputs.logits
    inside = ((positions >= window[0]) & (positions < window[1])).nonzero()[:, 0].to(logits.device)
    taken = scores[positions.to(logits.device)[inside] - window[0]]
    return logits.index_copy(0, inside, taken.to(logits.dtype))


class Proposals(NamedTuple):
    """A token for each position (R,), how early it may be committed, and its probability."""

    tokens: Int[Tensor, " R"]
    confidence: Float[Tensor, " R"]
    probability: Float[Tensor, " R"]


def _propose_llada(logits: Float[Tensor, "R V"], options: Options, state: SequenceState) -> Proposals:
    """Tokens from noisy scores; confidences by the remasking rule."""
    scores = logits
    if options.temperature > 0:
        noise = (
            draw(state, logits.numel(), logits.device)
            .double()
            .view(logits.shape)
            .clamp_min(torch.finfo(torch.float64).tiny)
        )
        # By logarithms, where nothing overflows, what it computes as exp(logits) / (-log noise) ** temperature.
        scores = logits.double() - options.temperature * (-noise.log()).log()
    tokens = scores.argmax(-1)
    probability = logits.double().softmax(-1).gather(-1, tokens[:, None])[:, 0]
    if options.remasking == "low_confidence":
        return Proposals(tokens, probability, probability)
    if options.remasking == "random":
        return Proposals(tokens, draw(state, len(logits), logits.device), probability)
    if options.temperature > 0:
        scores = scores.exp().clamp_max(torch.finfo(scores.dtype).max)
    return Proposals(tokens, _spread(scores.softmax(-1), options.remasking), probability)


def _propose_dream(
    logits: Float[Tensor, "R V"], options: Options, state: SequenceState, others: StepInputs
) -> Proposals:
    """Tokens and confidences from tempered and filtered logits.

    Tokens of ``others`` are drawn in the same call, and thrown away. If PyTorch's Categorical would refuse the
    probabilities of any position, all get their most probable token: half-precision ones often do not sum to 1.
    """
    p = _dream_probabilities(logits, options)
    tokens = p.argmax(-1)
    if options.temperature > 0:
        shares = _normalised(p)
        drawn = choose_tokens(shares.float().log(), draw(state, len(logits), logits.device), 1.0, None, None)
        accepted = _is_simplex(shares)
        if len(others.positions):
            accepted = accepted & _is_simplex(_normalised(_dream_probabilities(others.logits, options)))
        tokens = torch.where(accepted, drawn, tokens)
    probability = p.gather(-1, tokens[:, None])[:, 0]
    if options.remasking in ("random", "origin"):
        return Proposals(tokens, draw(state, len(logits), logits.device), probability)
    if options.remasking == "topprob":
        return Proposals(tokens, logits.softmax(-1).amax(-1), probability)
    if options.remasking == "low_confidence":
        return Proposals(tokens, probability, probability)
    return Proposals(tokens, _spread(p, options.remasking), probability)


def _dream_probabilities(logits: Float[Tensor, "R V"], options: Options) -> Float[Tensor, "R V"]:
    """What tokens are drawn from, in the logits' own type."""
    scores = logits / options.temperature if options.temperature > 0 else logits
    return keep_top_k(keep_top_p(scores, options.top_p), options.top_k).softmax(-1)


def _normalised(p: Float[Tensor, "R V"]) -> Float[Tensor, "R V"]:
    """As PyTorch's Categorical divides probabilities by their sum, in their own type."""
    return p / p.sum(-1, keepdim=True)


def _is_simplex(p: Float[Tensor, "R V"]) -> Bool[Tensor, ""]:
    """Whether all rows are probabilities by PyTorch's own test, in their own type."""
    return ((p >= 0).all(-1) & ((p.sum(-1) - 1).abs() < _SIMPLEX)).all()


def _spread(p: Float[Tensor, "R V"], rule: str) -> Float[Tensor, " R"]:
    if rule == "margin":
        return -p.topk(2, dim=-1).values.diff(dim=-1)[:, 0]
    return (p * (p + _TINY).log()).sum(-1)


def draw(state: SequenceState, size: int, device: torch.device) -> Float[Tensor, " n"]:
    """Uniform numbers in [0, 1) from the sequence's own generator."""
    return torch.rand(size, generator=state.generator).to(device, non_blocking=True)


def _target_confidence(logits: Float[Tensor, "R V"], options: Options, state: SequenceState) -> Float[Tensor, " R"]:
    """The confidences by which the windowed loop chooses its targets, from untempered logits."""
    p = logits.softmax(-1)
    if options.remasking in ("random", "origin"):
        return draw(state, len(logits), logits.device)
    if options.remasking == "entropy":
        entropies: Float[Tensor, " R"] = torch.special.entr(p).sum(-1)
        return -entropies
    return _spread(p, "margin") if options.remasking == "margin" else p.amax(-1)


def _true(logits: Float[Tensor, "R V"]) -> Bool[Tensor, ""]:
    return torch.ones((), dtype=torch.bool, device=logits.device)


def step_result(
    inputs: StepInputs,
    proposals: Proposals,
    count: int,
    window: Window,
    mask_ratio: float,
    circuit: bool,
    possible: Bool[Tensor, ""] | None = None,
) -> StepResult:
    """The first ``count`` proposals by their confidence; ``possible``: whether the circuit allows what is written."""
    first = by_priority(proposals.confidence)
    keep = torch.arange(len(first), device=first.device) < count
    positions, scores = inputs.positions.to(first.device)[first], proposals.probability[first].float()
    valid = _true(inputs.logits) if possible is None else possible
    ranking = Ranking(positions, proposals.tokens[first], scores, keep, valid)
    return StepResult(ranking.to_host(), window, mask_ratio, circuit)
