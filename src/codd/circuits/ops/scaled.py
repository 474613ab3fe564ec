"""Non-negative tensors with their scale kept apart, so that long products neither overflow nor vanish."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

LEAF_FLUSH = 1e-30
"""A leaf value below this may have lost terms to the smallest number of float32."""
FLUSH = {torch.float32: 1e-36, torch.float64: 1e-300}
"""A product of message and leaf value below this may have been lost."""


def exponentials(log: Float[Tensor, "B L N"]) -> "Scaled":
    """Exponentials with the largest of each row taken out; position-major in memory, as the chain reads them."""
    log = log.transpose(0, 1)
    top = log.amax(-1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0)
    out = torch.empty(log.shape, dtype=log.dtype, device=log.device)
    return Scaled(in_place(np.exp, torch.sub(log, top, out=out)).transpose(0, 1), top.transpose(0, 1))


def in_place(function: np.ufunc, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """NumPy's exp or log of every entry, in place: on one core they take half of PyTorch's time."""
    if x.device.type != "cpu":
        return getattr(x, f"{function.__name__}_")()  # type: ignore[no-any-return]  # a method found by its name
    with np.errstate(divide="ignore"):
        function(x.numpy(), out=x.numpy())
    return x


@dataclass(frozen=True, eq=False)
class Scaled:
    """``values * exp(log_scale)``, with one scale a position (the fast paths) or one an entry (the reference).

    The fast paths compute with ordinary products of ``values``; the reference keeps values of one and zero and puts
    everything into ``log_scale``, which makes it exact whatever the range. Code that uses only the methods below
    serves both.
    """

    values: Float[Tensor, "B L N"]
    log_scale: Float[Tensor, "B L #N"]

    def __mul__(self, other: "Scaled") -> "Scaled":
        """The product, entry by entry."""
        return Scaled(self.values * other.values, self.log_scale + other.log_scale)

    def log(self) -> Float[Tensor, "B L N"]:
        """The logarithm, entry by entry."""
        return self.values.log() + self.log_scale

    def log_sum(self) -> Float[Tensor, "B L"]:
        """The logarithm of the sum over the last axis."""
        if self.log_scale.shape[-1] == 1:
            return self.values.sum(-1).log() + self.log_scale[..., 0]
        return self.log().logsumexp(-1)

    def log_normalised(self) -> Float[Tensor, "B L N"]:
        """The logarithm of the distribution proportional to this; rows of zeros stay at minus infinity."""
        if self.log_scale.shape[-1] == 1:
            total = self.values.sum(-1, keepdim=True)
            return in_place(np.log, self.values / torch.where(total > 0, total, 1))
        log = self.log()
        total = log.logsumexp(-1, keepdim=True)
        return log - torch.where(total > -torch.inf, total, 0)

    def normalised(self) -> Float[Tensor, "B L N"]:
        """The distribution proportional to this; rows of zeros stay zero."""
        if self.log_scale.shape[-1] == 1:
            total = self.values.sum(-1, keepdim=True)
            return self.values / torch.where(total > 0, total, 1)
        return self.log_normalised().exp()

    @classmethod
    def from_log(cls, log: Float[Tensor, "B L N"]) -> "Scaled":
        """Everything in the scale: exact for any range."""
        possible = log > -torch.inf
        return cls(possible.to(log.dtype), torch.where(possible, log, 0))
