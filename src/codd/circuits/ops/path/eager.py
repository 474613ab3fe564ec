"""Latent paths: four small operations per position."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.ops import native
from codd.circuits.ops.path import reference
from codd.circuits.ops.scaled import LEAF_FLUSH, Scaled
from codd.circuits.parameters import Transition

_BELOW_ONE = 1 - 2**-23  # keeps u * total strictly under the total, so that the state found has weight


def sample_path(
    transition: Transition,
    start: Float[Tensor, " N"],
    target: Scaled,
    uniforms: Float[Tensor, "S B L"],
    *,
    compiled: bool = False,
) -> Int[Tensor, "S B L"]:
    """Draw z from p(z | evidence), given ``target`` = leaf times backward message and one uniform per position.

    ``compiled``: by the loop in C, where it serves. On a CPU the reference answers where weights sum to so little that
    terms may have been lost.
    """
    weights = target.values.transpose(0, 1)
    thresholds = (uniforms.to(weights.dtype) * _BELOW_ONE).permute(2, 0, 1).contiguous()
    first = start.detach().to(weights.dtype).exp()
    on_host = weights.device.type == "cpu"
    if compiled and not transition.stepwise:
        done = native.path(transition.dense, first, weights, thresholds, LEAF_FLUSH)
        if done is not None:
            return done.permute(1, 2, 0)
    length, samples, batch = thresholds.shape
    path = torch.empty(length, samples, batch, dtype=torch.int64, device=weights.device)
    # Through logarithms: an improbable start times an improbable leaf would leave the range of float32.
    log_row = start.detach().double() + weights[0].double().log()
    row = (log_row - log_row.amax(-1, keepdim=True)).exp().nan_to_num_(0.0).to(weights.dtype)
    row = row.expand(samples, batch, -1)
    for t in range(length):
        cumulative = row.cumsum(-1)
        if on_host and bool((cumulative[..., -1] < LEAF_FLUSH).any()):
            return reference.sample_path(transition, start, target, uniforms)
        passed = cumulative <= thresholds[t][..., None] * cumulative[..., -1:]
        path[t] = passed.sum(-1).clamp_max_(weights.shape[-1] - 1)
        if t + 1 < length:
            row = leaving(transition, t, path[t]) * weights[t + 1]
    return path.permute(1, 2, 0)


def leaving(transition: Transition, t: int, states: Int[Tensor, "S B"]) -> Float[Tensor, "S B N"]:
    """The weights of the next states; through the gates if there are some."""
    if transition.gates is None:
        return transition.at(t, (transition.dense,))[0][states]
    left, right = transition.at(t, transition.linear)
    return (left[states] * transition.gates[0][:, t]) @ right
