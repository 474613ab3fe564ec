"""The published loops of block-causal families, at temperature 0: SDAR, Fast-dLLM v2, LLaDA2, Stable-DiffCoder, A2D.

They differ in where they end and how far they reach; within a block all commit by one rule. Passes that only store a
finished block's keys and values commit nothing, and are no steps here. Kept on purpose: all write whole blocks, so that
SDAR's and Fast-dLLM's answers are longer than asked; SDAR returns what it has not reached as masks; Fast-dLLM v2
forgets a prompt of exactly one block, and leaves the next block's first token after the last one; Stable-DiffCoder
fills the rest of the block that has the end with it; blocks of A2D (BD3LM) end with the prompt.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from codd.decoding.options import Options
from codd.decoding.published.bidirectional import Proposals, rounded_blocks, step_result
from codd.decoding.samplers import StepInputs, StepResult
from codd.decoding.sequence import SequenceState, StepPlan, StopCondition, edit_steps, spread

LLADA2_STEPS, LLADA2_THRESHOLD = 32, 0.95
STABLE_DIFFCODER_THRESHOLD = 0.95
FAST_DLLM_THRESHOLD, FAST_DLLM_BLOCK = 0.9, 8
"""Those of its scripts; its `generate` itself has 1, which is one token a pass."""


def defaults(family: str, size: int, options: Options) -> dict[str, Any]:
    """What a family's loop decides where the options leave it open: blocks of ``size``, steps and threshold."""
    steps, threshold = None if "steps" in options.unset else options.steps, options.threshold
    if family == "sdar":
        steps = steps or size
    elif family == "stable_diffcoder" and steps is None:
        steps, threshold = max(1, options.gen_length), STABLE_DIFFCODER_THRESHOLD if threshold is None else threshold
    elif threshold is None and family in ("fast_dllm", "llada2"):
        threshold = FAST_DLLM_THRESHOLD if family == "fast_dllm" else LLADA2_THRESHOLD
    if family == "llada2" and steps is None and options.editing_threshold is None:
        steps = LLADA2_STEPS
    divided = family == "fast_dllm" and "block_length" in options.unset and size % FAST_DLLM_BLOCK == 0
    return {"steps": steps, "threshold": threshold, **({"block_length": FAST_DLLM_BLOCK} if divided else {})}


def positions(state: SequenceState) -> Int[Tensor, " R"]:
    """The masked positions of the plan's block, ascending."""
    assert state.plan is not None
    return state.masked_in(state.plan.block)


def plan_steps(state: SequenceState, stop: StopCondition) -> Iterator[StepPlan]:
    """The steps of a family's loop, which heeds ``stop`` in its own way."""
    assert state.block_size is not None
    return LOOPS[state.family](state, state.block_size, stop)


def step(inputs: StepInputs) -> StepResult:
    """All that are surer than the threshold, but at least ``plan.count``: then the surest, or the leftmost."""
    options, plan = inputs.options, inputs.plan
    best = inputs.logits.softmax(-1).max(-1)
    first = -torch.arange(len(best.values), device=best.values.device).float()
    order = first if options.remasking == "left_to_right" else best.values
    proposals = Proposals(best.indices, order, best.values)
    reaches = torch.ge if inputs.state.family in AT_LEAST else torch.gt
    sure = 0 if options.threshold is None else int(reaches(best.values, options.threshold).sum())
    count = max(sure, plan.count)
    return step_result(inputs, proposals, count, plan.block, inputs.state.mask_ratio(plan.block), False)


def _sdar(state: SequenceState, size: int, stop: StopCondition) -> Iterator[StepPlan]:
    """Looks for the end after whole blocks only, and then returns all that there is."""
    for begin, end in _whole_blocks(state, size):
        yield from _counted(state, begin, end)
        if _end(state, stop) is not None:
            return


def _llada2(state: SequenceState, size: int, stop: StopCondition) -> Iterator[StepPlan]:
    """Ends as soon as it can (its ``eos_early_stop``, which spares evaluations and changes no text), and is cut there.

    With an editing threshold it is 2.1: one token at least in each step, edits, and the end after whole blocks only.
    """
    asked = state.prompt_length + state.options.gen_length
    editing = state.options.editing_threshold is not None
    for begin, end in _whole_blocks(state, size):
        for plan in _one_at_least(state, begin, end) if editing else _counted(state, begin, end):
            yield plan
            if not editing and _end(state, stop) is not None:
                break
        yield from edit_steps(state, begin, end)
        if _end(state, stop) is not None:
            break
    state.ids = state.ids[: min(asked, _end(state, stop) or asked)]


def _fast_dllm(state: SequenceState, size: int, stop: StopCondition) -> Iterator[StepPlan]:
    """The token after a finished block comes with the pass that stores the block; ends as soon as it can."""
    first, blocks = state.prompt_length // size * size, state.options.gen_length // size
    resize(state, first + blocks * size + 1)
    if state.prompt_length == size:  # nothing stores the prompt: its blocks begin anew
        state.unseen = size
    for plan in _fast_dllm_plans(state, range(first, first + blocks * size, size)):
        yield plan
        if (end := _end(state, stop)) is not None:
            state.ids = state.ids[:end]
            return


def _fast_dllm_plans(state: SequenceState, starts: range) -> Iterator[StepPlan]:
    size, part = starts.step, state.options.block_length
    if state.prompt_length > size and state.prompt_length == starts.start:
        yield StepPlan(starts.start, starts.start + 1, 1, last=False)
    for start in starts:
        for begin in range(start, start + size, part):
            yield from _one_at_least(state, begin, begin + part)
        yield StepPlan(start + size, start + size + 1, 1, last=False)


def _stable_diffcoder(state: SequenceState, size: int, stop: StopCondition) -> Iterator[StepPlan]:
    """The first block has the prompt's end, and the last one is as much shorter; ends after whole blocks only."""
    options, length = state.options, len(state.ids)
    assert options.steps is not None
    share = options.steps // (options.gen_length // size)
    for begin in range(state.prompt_length // size * size, length, size):
        end = min(begin + size, length)
        for count in spread(int(state.masked[begin:end].sum()), share):
            if bool(state.masked[begin:end].any()):
                yield StepPlan(begin, end, count if options.threshold is None else 1, last=False)
        if (ended := _end(state, stop)) is not None:
            state.ids[ended:end] = state.ids[ended - 1]
            state.ids = state.ids[:end]
            return


def _a2d(state: SequenceState, size: int, stop: StopCondition) -> Iterator[StepPlan]:
    """BD3LM: blocks are counted from the end of the prompt; ends after whole blocks only, with all of the block."""
    state.phase = -state.prompt_length % size
    for plan in rounded_blocks(state, size):
        yield plan
        block = state.masked[plan.begin : plan.end]
        if not bool(block.any()) and _end(state, stop) is not None:
            state.ids = state.ids[: plan.end]
            return


def _counted(state: SequenceState, begin: int, end: int) -> Iterator[StepPlan]:
    """A block's size divided by its steps, however many masks it has, until none is left."""
    assert state.options.steps is not None
    for count in spread(end - begin, state.options.steps):
        if not bool(state.masked[begin:end].any()):
            return
        yield StepPlan(begin, end, count, last=False)


def _one_at_least(state: SequenceState, begin: int, end: int) -> Iterator[StepPlan]:
    """Until no mask is left. Each step writes one at least, if it is not the mask itself: there the originals hang."""
    for _ in range(int(state.masked[begin:end].sum())):
        if bool(state.masked[begin:end].any()):
            yield StepPlan(begin, end, 1, last=False)


def _whole_blocks(state: SequenceState, size: int) -> list[tuple[int, int]]:
    """Fill up the last block with masks; the blocks from the one that has the prompt's end."""
    total = -(-len(state.ids) // size) * size
    resize(state, total)
    return [(begin, begin + size) for begin in range(state.prompt_length // size * size, total, size)]


def resize(state: SequenceState, length: int) -> None:
    """Make a sequence longer, by masks at its end."""
    more = length - len(state.ids)
    state.ids = pad(state.ids, (0, more), value=state.mask_id)
    state.given = pad(state.given, (0, more), value=False)


def _end(state: SequenceState, stop: StopCondition) -> int | None:
    return stop.end_of(state.ids.tolist(), state.prompt_length, state.mask_id)


LOOPS = {
    "sdar": _sdar,
    "fast_dllm": _fast_dllm,
    "llada2": _llada2,
    "stable_diffcoder": _stable_diffcoder,
    "a2d": _a2d,
}
"""By family."""
AT_LEAST = ("stable_diffcoder", "nemotron")
"""Families whose threshold need only be reached; elsewhere it must be exceeded."""
