"""Exponential moving averages: of weights, and of the tables that an optimizer remembers."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

_COUNT = "updates"


@torch.no_grad()
def update_ema(average: Iterable[Tensor], current: Iterable[Tensor], step: int, decay: float) -> None:
    """Move an average of weights towards the current ones; faster at first, so that it forgets the random start."""
    share = 1 - min(decay, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average), list(current), share)


class EMA:
    """Averages under names, corrected for their start at zero, and the number of updates that they have seen."""

    def __init__(self) -> None:
        """No averages and no updates yet."""
        self.updates = 0
        self._kept: dict[str, Tensor] = {}

    def smoothed(self, name: str, values: Sequence[Tensor], decay: float) -> list[Tensor]:
        """Take the values in; ``decay buf + (1 - decay) value``, over ``1 - decay ** (updates + 1)``."""
        if decay == 0:
            return list(values)
        out = []
        for i, value in enumerate(values):
            buffer = self._kept.setdefault(f"{name}.{i}", torch.zeros_like(value))
            buffer.mul_(decay).add_(value, alpha=1 - decay)
            out.append(buffer / (1 - decay ** (self.updates + 1)))
        return out

    def tensors(self) -> dict[str, Tensor]:
        """The averages and the count of updates, for a checkpoint; they change with the next update."""
        return {_COUNT: torch.tensor(self.updates), **self._kept}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what ``tensors`` gave; KeyError if the count of updates is missing."""
        self.updates = int(tensors[_COUNT])
        self._kept = {name: x.clone() for name, x in tensors.items() if name != _COUNT}
