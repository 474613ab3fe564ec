"""Latent paths in float64 logarithms, one position after the other."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.ops.scaled import Scaled
from codd.circuits.parameters import Transition


def draw(weights: Float[Tensor, "... K"], uniform: Float[Tensor, "..."]) -> Int[Tensor, "..."]:
    """The first index whose cumulative weight passes ``uniform`` times the total: inverse-CDF sampling."""
    cumulative = weights.cumsum(-1).contiguous()
    threshold = (uniform.to(weights.dtype)[..., None] * cumulative[..., -1:] * (1 - 2**-23)).contiguous()
    return torch.searchsorted(cumulative, threshold, right=True)[..., 0].clamp_max_(weights.shape[-1] - 1)


def _rows(table: Float[Tensor, "*B N N"], states: Int[Tensor, "S B"]) -> Float[Tensor, "S B N"]:
    """The rows of some states, from one table or from one per sequence."""
    return table[states] if table.ndim == 2 else table[torch.arange(len(table), device=table.device), states]


def sample_path(
    transition: Transition, start: Float[Tensor, " N"], target: Scaled, uniforms: Float[Tensor, "S B L"]
) -> Int[Tensor, "S B L"]:
    """Draw z from p(z | evidence), given ``target`` = leaf times backward message and one uniform a position."""
    log_target = target.log().double()
    logits = start.detach().double() + log_target[:, 0].expand(uniforms.shape[0], -1, -1)
    path: list[Tensor] = []
    for t in range(log_target.shape[1]):
        if t > 0:
            logits = _rows(transition.log_step(t - 1), path[-1]) + log_target[:, t]
        path.append(draw(logits.softmax(-1).nan_to_num(0.0), uniforms[..., t]))
    return torch.stack(path, -1)
