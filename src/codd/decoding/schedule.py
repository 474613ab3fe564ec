"""How many evaluations a block gets, and how many tokens an evaluation commits."""

from collections.abc import Sequence
from fractions import Fraction

import torch

from codd.errors import InvalidInput


def spread(total: int, parts: int) -> list[int]:
    """As evenly as whole numbers allow, the larger ones first."""
    each, more = divmod(total, parts)
    return [each + (part < more) for part in range(parts)]


def share(steps: int, masks: Sequence[int]) -> list[int]:
    """Divide evaluations among blocks in proportion to their masks: at least one each, never more than masks.

    What whole numbers leave over goes to the blocks that miss most, the earliest of equals.
    """
    total = sum(masks)
    if steps < len(masks):
        raise InvalidInput(
            f"{steps} steps are not enough for {len(masks)} blocks, each of which needs at least one: "
            "raise steps or block_length."
        )
    steps = min(steps, total)
    owed = [Fraction(steps * mask, total) for mask in masks]
    found = [max(1, int(part)) for part in owed]
    while sum(found) != steps:
        up = sum(found) < steps
        blocks = [b for b in range(len(masks)) if (found[b] < masks[b] if up else found[b] > 1)]
        needs = [(owed[b] - found[b], -b) for b in blocks]
        if up:
            found[-max(needs)[1]] += 1
        else:
            found[-min(needs)[1]] -= 1
    return found


def times(steps: int, eps: float) -> list[float]:
    """The reference's times in full mode: from 1 to eps."""
    return torch.linspace(1, eps, steps + 1).tolist()


def revealed(masks: int, now: float, then: float, last: bool) -> int:
    """How many of the masks the reference reveals between two times, in its own arithmetic (float32, cut)."""
    if last:
        return masks
    return int(torch.tensor(float(masks)) * (1 - torch.tensor(then) / torch.tensor(now)))
