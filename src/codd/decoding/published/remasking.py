"""DPLM's published loop: every step predicts all that was not given, and the least sure of it become masks again."""

from collections.abc import Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from codd.decoding.published.bidirectional import draw
from codd.decoding.samplers import Ranking, StepInputs, StepResult, by_priority
from codd.decoding.sequence import SequenceState, StepPlan, StopCondition

STEPS = 500
"""Where nobody says."""
UNKNOWN_RESIDUE = 24
"""The X of ESM's alphabet, which is never written, nor are the special tokens."""


def plan_steps(state: SequenceState, stop: StopCondition) -> Iterator[StepPlan]:
    """The steps of a sequence, which has no end of its own.

    How many masks each leaves is cut in the original's arithmetic (float32).
    """
    free, steps = torch.tensor(float(state.masked.sum())), state.options.steps or 1
    for step in range(1, steps + 1):
        left = int(free * (1 - step / steps))
        yield StepPlan(0, len(state.ids), int(free) - left, last=step == steps, settled=0)


def positions(state: SequenceState) -> Int[Tensor, " R"]:
    """All positions that were masked at the start, ascending: those that are written take part, too."""
    return (~state.given).nonzero()[:, 0]


def step(inputs: StepInputs) -> StepResult:
    """Which masks become tokens, and which tokens become masks again; what is written and sure enough stays."""
    state, options, logits = inputs.state, inputs.options, inputs.logits.float()
    assert state.plan is not None
    if options.temperature > 0:
        noise = draw(state, logits.numel(), logits.device).view(logits.shape).clamp_min(1e-20)
        logits = logits - options.temperature * (-noise.log()).log()
    scores, tokens = logits.log_softmax(-1).max(-1)
    order = logits.amax(-1) if options.remasking == "logit" else scores
    rows = inputs.positions.to(logits.device)
    present = state.ids.to(logits.device)[rows]
    sure = torch.zeros_like(tokens, dtype=torch.bool)
    sure[by_priority(order)[: state.plan.count]] = True
    hidden = present == state.mask_id
    after = torch.where(sure, torch.where(hidden, tokens, present), state.mask_id)
    ranking = Ranking(rows, after, scores.exp(), after != present, torch.ones((), dtype=torch.bool))
    return StepResult(ranking.to_host(), state.plan.block, state.mask_ratio(state.plan.block))
