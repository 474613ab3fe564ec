"""A latent path a program, in one launch: at each position one row of the matrix, a cumulative sum, a comparison."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.ops.path import eager
from codd.circuits.ops.scaled import Scaled
from codd.circuits.parameters import Transition


@triton.jit
def _sample(
    matrix,
    start,
    target,
    message,
    target_scale,
    message_scale,
    uniforms,
    path,
    log_partition,
    batch,
    length,
    states,
    SPLIT: tl.constexpr,
    N: tl.constexpr,
):
    """Sample p(z | evidence) from weights = target (times message, if split) by inverse CDF, first position first."""
    b = tl.program_id(0)
    which = (tl.program_id(1) * batch + b).to(tl.int64) * length
    n = tl.arange(0, N)
    inside = n < states
    row = tl.exp(tl.load(start + n, mask=inside, other=float("-inf")))
    for t in range(0, length):
        here = (b * length + t).to(tl.int64)
        weight = tl.load(target + here * states + n, mask=inside, other=0.0)
        if SPLIT:
            weight *= tl.load(message + here * states + n, mask=inside, other=0.0)
        u = tl.load(uniforms + which + t)
        weight *= row
        cumulative = tl.cumsum(weight, 0)
        total = tl.max(cumulative, 0)
        passed = (cumulative <= u * total) & inside
        # Rounding can put u * total on the total itself: then the last state that has weight is meant.
        last = tl.max(tl.where(weight > 0.0, n, 0), 0)
        state = tl.minimum(tl.sum(passed.to(tl.int32), 0), last)
        tl.store(path + which + t, state.to(tl.int64))
        if t == 0:
            scale = tl.load(target_scale + here)
            if SPLIT:
                scale += tl.load(message_scale + here)
            tl.store(log_partition + b, tl.where(total > 0.0, tl.log(total) + scale, float("-inf")))
        row = tl.load(matrix + state.to(tl.int64) * states + n, mask=inside, other=0.0)


def launch(
    transition: Transition,
    start: Float[Tensor, " N"],
    target: Scaled,
    message: Scaled | None,
    uniforms: Float[Tensor, "S B L"],
) -> tuple[Int[Tensor, "S B L"], Float[Tensor, " B"]]:
    """Paths and log Z, from leaf times backward message, given as one product or as the two factors."""
    batch, length, states = target.values.shape
    path = torch.empty(uniforms.shape, dtype=torch.int64, device=uniforms.device)
    log_partition = torch.empty(batch, device=uniforms.device)
    other = target if message is None else message
    width = triton.next_power_of_2(states)
    _sample[(batch, uniforms.shape[0])](
        transition.dense,
        start,
        target.values.contiguous(),
        other.values.contiguous(),
        target.log_scale.contiguous(),
        other.log_scale.contiguous(),
        uniforms.contiguous(),
        path,
        log_partition,
        batch,
        length,
        states,
        SPLIT=message is not None,
        N=width,
        num_warps=max(1, min(8, width // 128)),
    )
    return path, log_partition


def sample_path(
    transition: Transition, start: Float[Tensor, " N"], target: Scaled, uniforms: Float[Tensor, "S B L"]
) -> Int[Tensor, "S B L"]:
    """Draw z from p(z | evidence), given ``target`` = leaf times backward message and one uniform a position."""
    if transition.per_position or transition.low_rank:
        return eager.sample_path(transition, start, target, uniforms)
    return launch(transition, start, target, None, uniforms)[0]
