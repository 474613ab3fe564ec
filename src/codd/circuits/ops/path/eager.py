"""Latent paths: four small operations a position."""

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from codd.circuits.ops import native
from codd.circuits.ops.scaled import Scaled
from codd.circuits.parameters import Transition

_BELOW_ONE = 1 - 2**-23  # keeps u * total strictly under the total, so that the state found has weight
FLUSH = 1e-30
"""Weights that sum to less than this may have lost terms to the smallest number of float32."""


def sample_path(
    transition: Transition, start: Float[Tensor, " N"], target: Scaled, uniforms: Float[Tensor, "S B L"]
) -> Int[Tensor, "S B L"]:
    """Draw z from p(z | evidence), given ``target`` = leaf times backward message and one uniform a position."""
    weights = target.values.transpose(0, 1)
    thresholds = (uniforms.to(weights.dtype) * _BELOW_ONE).permute(2, 0, 1).contiguous()
    first = start.detach().to(weights.dtype).exp()
    if weights.device.type == "cpu":
        if not transition.stepwise:
            done = native.path(transition.dense, first, weights, thresholds, FLUSH)
            if done is not None:
                return done.permute(1, 2, 0)
        if transition.gates is None:
            return torch.from_numpy(_sample_numpy(transition, start.detach(), weights, thresholds)).permute(1, 2, 0)
    length, samples, batch = thresholds.shape
    path = torch.empty(length, samples, batch, dtype=torch.int64, device=weights.device)
    # Through logarithms: an improbable start times an improbable leaf would leave the range of float32.
    log_row = start.detach().double() + weights[0].double().log()
    row = (log_row - log_row.amax(-1, keepdim=True)).exp().nan_to_num_(0.0).to(weights.dtype)
    row = row.expand(samples, batch, -1)
    for t in range(length):
        cumulative = row.cumsum(-1)
        passed = cumulative <= thresholds[t][..., None] * cumulative[..., -1:]
        path[t] = passed.sum(-1).clamp_max_(weights.shape[-1] - 1)
        if t + 1 < length:
            row = leaving(transition, t, path[t]) * weights[t + 1]
    return path.permute(1, 2, 0)


def leaving(transition: Transition, t: int, states: Int[Tensor, "S B"]) -> Float[Tensor, "S B N"]:
    """The weights of the next states; through the gates if there are some."""
    if transition.gates is None:
        return (transition.dense[t] if transition.per_position else transition.dense)[states]
    left, right = (f[t] if transition.per_position else f for f in transition.linear)
    return (left[states] * transition.gates[0][:, t]) @ right


def _sample_numpy(
    transition: Transition,
    start: Float[Tensor, " N"],
    weights: Float[Tensor, "L B N"],
    thresholds: Float[Tensor, "L S B"],
) -> NDArray[np.int64]:
    """The same through NumPy, whose calls cost a third of PyTorch's on rows this short."""
    tables = list(transition.dense.numpy()) if transition.per_position else [transition.dense.numpy()] * len(weights)
    targets, limits = list(weights.numpy()), list(thresholds.numpy()[..., None])
    path = np.empty(thresholds.shape, dtype=np.int64)
    states = list(path)
    rows = np.empty((*thresholds.shape[1:], weights.shape[-1]), dtype=targets[0].dtype)
    rows[...] = start.to(weights.dtype).exp().numpy()
    cumulative, passed = np.empty_like(rows), np.empty(rows.shape, dtype=np.bool_)
    total = cumulative[..., -1:]
    for t, target in enumerate(targets):
        if t > 0:
            tables[t - 1].take(states[t - 1], 0, rows, "clip")
        np.multiply(rows, target, rows)
        np.add.accumulate(rows, -1, None, cumulative)
        if total.min() < FLUSH:  # two small numbers met: multiply them as logarithms
            s, b = (total[..., 0] < FLUSH).nonzero()
            with np.errstate(divide="ignore"):
                source = (
                    start.double().numpy() if t == 0 else np.log(tables[t - 1][path[t - 1, s, b]].astype(np.float64))
                )
                cumulative[s, b] = _cumulative(source + np.log(target[b].astype(np.float64)))
        np.greater(cumulative, limits[t] * total, passed)
        passed.argmax(-1, states[t])
    return path


def _cumulative(log_weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cumulative weights of rows of logarithms, the largest weight at one; rows of zeros stay so."""
    top = log_weights.max(-1, keepdims=True)
    out: NDArray[np.float64] = np.exp(log_weights - np.where(top > -np.inf, top, 0)).cumsum(-1)
    return out
