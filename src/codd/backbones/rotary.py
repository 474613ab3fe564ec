"""How published checkpoints stretch rotary positions (RoPE) for texts longer than those of their first training."""

import math
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3: slow rotations are made slower, fast ones stay, with a smooth passage between them."""

    factor: float
    low: float
    high: float
    """Rotations within ``length`` positions: with fewer than ``low`` a pair is slow, with more than ``high`` fast."""
    length: int

    amplitude = 1.0
    """What cosines and sines are multiplied with."""

    def frequencies(self, plain: Float[Tensor, " half"], theta: float) -> Float[Tensor, " half"]:
        """The angle per position of each pair of columns, from the plain one."""
        kept = ((plain * self.length / (2 * math.pi) - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain * kept + plain / self.factor * (1 - kept)

    def query_scale(self, positions: Int[Tensor, "B L"]) -> None:
        """None: queries stay as they are."""


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: like Llama 3's, by the number of the pair; a factor below 1 makes slow rotations faster."""

    factor: float
    fast: float
    slow: float
    """Rotations within ``length`` positions from which on a pair is fast, and up to which it is slow."""
    length: int
    amplitude: float = 1.0
    """What cosines and sines are multiplied with."""
    query_growth: float = 0.0
    """How much queries grow with the logarithm of their position in units of ``length``; 0: not at all."""

    def frequencies(self, plain: Float[Tensor, " half"], theta: float) -> Float[Tensor, " half"]:
        """The angle per position of each pair of columns, from the plain one with base ``theta``."""
        width = 2 * len(plain)

        def pair(rotations: float) -> float:
            return width * math.log(self.length / (2 * math.pi * rotations)) / (2 * math.log(theta))

        low, high = max(math.floor(pair(self.fast)), 0), min(math.ceil(pair(self.slow)), width - 1)
        ramp = (plain.new_tensor(range(len(plain))) - low) / (high - low or 1e-3)
        slowed = ramp.clamp(0, 1)
        return plain * (1 - slowed) + plain / self.factor * slowed

    def query_scale(self, positions: Int[Tensor, "B L"]) -> Float[Tensor, "B L 1"] | None:
        """What the query of each position is multiplied with; None: queries stay as they are."""
        if not self.query_growth:
            return None
        return (1 + self.query_growth * (positions // self.length).clamp(min=0).float().log1p())[..., None]


RopeScaling = Llama3Scaling | YarnScaling
