"""Nemotron-Labs-Diffusion's published loops, at temperature 0: block after block, or drafts that a causal pass checks.

A block's first token is the causal network's own. Passes that only store keys and values commit nothing, and are no
steps here. Kept on purpose: the answer of a speculation may be longer than asked, by at most a block less one token.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from codd.decoding.published import block_causal
from codd.decoding.samplers import Ranking, StepInputs, StepResult
from codd.decoding.sequence import SequenceState, StepPlan, StopCondition


def plan_steps(state: SequenceState, stop: StopCondition) -> Iterator[StepPlan]:
    """The steps of a sequence, which ends with the first of its stop tokens that has no mask before it."""
    speculative = state.options.mode == "speculative"
    for plan in _speculation(state) if speculative else _blocks(state):
        yield plan
        # A stop token that is a block's first is noticed after the next step; one in a draft is not yet there.
        checked = plan.causal == speculative and plan.end - plan.begin > 1
        if checked and (end := stop.end_of(state.ids.tolist(), state.prompt_length, state.mask_id)) is not None:
            state.ids = state.ids[:end]
            return


def _blocks(state: SequenceState) -> Iterator[StepPlan]:
    size = state.options.block_length
    for begin in range(state.prompt_length, len(state.ids), size):
        yield StepPlan(begin, begin + 1, 1, last=False, causal=True)
        for _ in range(begin + 1, begin + size):  # each writes one at least, if it is not the mask itself
            if bool(state.masked[begin : begin + size].any()):
                yield StepPlan(begin, begin + size, 1, last=False)


def _speculation(state: SequenceState) -> Iterator[StepPlan]:
    """Rounds: a draft after the last token, in one step or by threshold, and a check of it by one causal pass."""
    size, asked = state.options.block_length, len(state.ids)
    block_causal.resize(state, asked + size)
    yield StepPlan(state.prompt_length, state.prompt_length + 1, 1, last=False, causal=True)
    while (known := state.first_mask) < asked:
        begin, end = known - 1, known - 1 + size
        at_once = None if state.options.threshold else size
        while bool(state.masked[begin:end].any()):
            yield StepPlan(begin, end, at_once or 1, last=False, settled=known)
        yield StepPlan(known, end + 1, size, last=False, causal=True, settled=known)
    state.ids = state.ids[:known]


def positions(state: SequenceState) -> Int[Tensor, " R"]:
    """The masked positions of the plan's block, ascending; where a draft is checked, all of it and the next one."""
    assert state.plan is not None
    block = state.plan.block
    return torch.arange(*block) if state.plan.causal else state.masked_in(block)


def step(inputs: StepInputs) -> StepResult:
    """Which tokens to commit; where a draft is checked, also which positions are masks again."""
    state, plan = inputs.state, inputs.plan
    if not plan.causal or plan.end - plan.begin == 1:
        return block_causal.step(inputs)
    drafted, (probability, best) = state.ids[plan.begin : plan.end], inputs.logits.softmax(-1).max(-1)
    agrees = (drafted.to(best.device) == best)[:-1].cumprod(0)
    accepted = torch.arange(len(best), device=best.device) <= agrees.sum()
    tokens = torch.where(accepted, best, state.mask_id)
    scores = torch.where(accepted, probability.float(), 0.0)
    written = tokens != drafted.to(best.device)
    rows, valid = inputs.positions.to(best.device), torch.ones((), dtype=torch.bool, device=best.device)
    ranking = Ranking(rows, tokens, scores, written | accepted, valid)
    return StepResult(ranking.to_host(), plan.block, state.mask_ratio(plan.block))
