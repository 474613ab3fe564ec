"""Which positions a network evaluation may commit, and how many: blocks, counts, and windows of the circuit."""

from collections.abc import Iterator, Sequence
from fractions import Fraction

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from codd.circuits.protocol import ProbabilisticCircuit
from codd.decoding.options import Options
from codd.decoding.state import SequenceState, StepPlan, Window
from codd.errors import InvalidInput


def plan_steps(state: SequenceState) -> Iterator[StepPlan]:
    """The steps of a sequence; each plan is made after the tokens of the step before are committed."""
    return _block_schedule(state) if state.options.mode == "block" else _full_schedule(state)


def _block_schedule(state: SequenceState) -> Iterator[StepPlan]:
    """Block after block, counted from the end of the prompt, backwards too: masks in the prompt come first.

    Those of a block-causal network, or parts of them, are counted from the beginning.
    """
    options, masked, size = state.options, state.masked, state.options.block_length
    origin = state.prompt_length if state.block_size is None else 0
    blocks = sorted({(position - origin) // size for position in masked.nonzero()[:, 0].tolist()})
    starts = [origin + block * size for block in blocks]
    spans = [(max(0, start), min(len(masked), start + size)) for start in starts]
    if not options.counted:
        for begin, end in spans:
            while bool(state.masked[begin:end].any()):
                yield StepPlan(begin, end, None, last=False)
            yield from edit_steps(state, begin, end)
        return
    sizes = [int(masked[begin:end].sum()) for begin, end in spans]
    steps = sum(sizes) if options.steps is None else options.steps
    if "steps" in options.defaulted:
        steps = max(steps, len(sizes))
    for (begin, end), share in zip(spans, divide_steps(steps, sizes), strict=True):
        for i in range(share):
            if left := int(state.masked[begin:end].sum()):  # a constraint may have written more than was due
                yield StepPlan(begin, end, -(-left // (share - i)), last=i == share - 1)
        yield from edit_steps(state, begin, end)


def edit_steps(state: SequenceState, begin: int, end: int) -> Iterator[StepPlan]:
    """The steps that only edit a block without masks, until one of them changes nothing; none where nothing may be."""
    if bool(state.given[begin:end].all()):
        return
    for _ in range(state.options.max_post_steps if state.options.editing_threshold is not None else 0):
        yield StepPlan(begin, end, 0, last=True)
        if not state.edits:
            return


def _full_schedule(state: SequenceState) -> Iterator[StepPlan]:
    """All positions in every step. Tokens that a step leaves over are divided among the steps that are left."""
    options, length, masks = state.options, len(state.ids), int(state.masked.sum())
    if not options.counted:
        while bool(state.masked.any()):
            yield StepPlan(0, length, None, last=False)
    else:
        steps = masks if options.steps is None else min(options.steps, masks)
        for i in range(steps):
            if left := int(state.masked.sum()):
                yield StepPlan(0, length, -(-left // (steps - i)), last=i == steps - 1)
    yield from edit_steps(state, 0, length)


def spread(total: int, parts: int) -> list[int]:
    """Whole numbers that sum to ``total``, as equal as possible, the larger ones first."""
    each, more = divmod(total, parts)
    return [each + (part < more) for part in range(parts)]


def divide_steps(steps: int, masks: Sequence[int]) -> list[int]:
    """Divide evaluations among blocks in proportion to their masks: at least one each, never more than masks.

    What whole numbers leave over goes to the blocks that are owed most, the earliest of equals. Raises InvalidInput if
    there are fewer steps than blocks.
    """
    total = sum(masks)
    if steps < len(masks):
        raise InvalidInput(
            f"{steps} steps are not enough for {len(masks)} blocks, each of which needs at least one: "
            "raise steps or block_length."
        )
    steps = min(steps, total)
    owed = [Fraction(steps * mask, total) for mask in masks]
    shares = [max(1, int(part)) for part in owed]
    while sum(shares) != steps:
        up = sum(shares) < steps
        blocks = [b for b in range(len(masks)) if (shares[b] < masks[b] if up else shares[b] > 1)]
        needs = [(owed[b] - shares[b], -b) for b in blocks]
        if up:
            shares[-max(needs)[1]] += 1
        else:
            shares[-min(needs)[1]] -= 1
    return shares


def best_window(due: Bool[Tensor, "*B L"], length: int) -> Int[Tensor, "*B"]:
    """The first position of a window of ``length`` that covers as many due positions as any.

    Of the windows that do, those that begin in a row with the first of them are equally good; the middle one leaves
    the same context on both sides.
    """
    length = min(length, due.shape[-1])
    total = torch.nn.functional.pad(due.long().cumsum(-1), (1, 0))
    covered = total[..., length:] - total[..., : total.shape[-1] - length]
    best = covered == covered.amax(-1, keepdim=True)
    begin = torch.arange(best.shape[-1], device=due.device)
    first = best.int().argmax(-1)
    beyond = ~best & (begin > first[..., None])
    last = torch.where(beyond.any(-1), beyond.int().argmax(-1), best.shape[-1]) - 1
    return (first + last) // 2


def masked_positions(state: SequenceState, plan: StepPlan) -> Int[Tensor, " R"]:
    """The masked positions of a plan's block, ascending."""
    return state.masked[plan.begin : plan.end].nonzero()[:, 0] + plan.begin


def fit_window(window: Window, circuit: ProbabilisticCircuit | None, length: int) -> Window | None:
    """The window as the circuit can serve it: one of fixed length reaches back into what is written.

    None if a sequence of ``length`` positions has no room for it.
    """
    begin, end = window
    if circuit is None or circuit.length is None or circuit.length == end - begin:
        return window
    begin = max(0, end - circuit.length)
    return (begin, begin + circuit.length) if begin + circuit.length <= length else None


def window_length(circuit: ProbabilisticCircuit, options: Options, length: int) -> int:
    """How many positions the circuit covers in full mode."""
    return min(circuit.length or circuit.window or options.block_length, length)


def activation_ratio(state: SequenceState, window: Window) -> float:
    """The share of masks that ``activation`` is compared with: in the window, or in all that the run is to write."""
    if state.options.activation_scope == "window":
        return state.mask_ratio(window)
    return int(state.masked.sum()) / max(1, int((~state.given).sum()))


def circuit_acts(circuit: ProbabilisticCircuit | None, mask_ratio: float, options: Options) -> bool:
    """Whether the circuit takes part in a step at this mask ratio."""
    wanted = circuit is not None and options.sampler != "factorized"
    return wanted and (options.activation is None or mask_ratio < options.activation)
