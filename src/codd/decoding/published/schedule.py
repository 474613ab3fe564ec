"""Blocks, counts and windows of the published loops."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from codd.decoding.schedule import spread
from codd.decoding.state import SequenceState, StepPlan

EPS = 1e-3
"""The last time in full mode."""


def bidirectional_steps(state: SequenceState) -> Iterator[StepPlan]:
    """The steps of a sequence, those that have nothing to commit included."""
    return _block_schedule(state) if state.options.mode == "block" else _full_schedule(state)


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


def _full_schedule(state: SequenceState) -> Iterator[StepPlan]:
    steps = state.options.steps or state.options.gen_length
    times = diffusion_times(steps)
    for i in range(steps):
        now, then, last = times[i], times[i + 1], i == steps - 1
        count = revealed(int(state.masked.sum()), now, then, last)
        yield StepPlan(0, len(state.ids), count, last=last, time=(now, then))


def masked_positions(state: SequenceState, plan: StepPlan) -> Int[Tensor, " R"]:
    """All masked positions before the end of a block: masks in the prompt take part, too."""
    return state.masked[: plan.end].nonzero()[:, 0]


def all_positions(state: SequenceState, plan: StepPlan) -> Int[Tensor, " L"]:
    """Every position: where tokens are drawn at all of them, those that are written already can spoil the draw."""
    return torch.arange(len(state.ids))


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
