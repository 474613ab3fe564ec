"""RMS norm and gated SiLU, row by row."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from codd.backbones.triton.tiles import INTERPRETED


@triton.jit
def _rms_norm(x, weight, out, width, eps, N: tl.constexpr):
    """One program per row: normalised in float32, times the weight in the network's own precision."""
    row = tl.program_id(0).to(tl.int64) * width
    n = tl.arange(0, N)
    inside = n < width
    value = tl.load(x + row + n, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = (wide * scale).to(value.dtype).to(tl.float32)
    tl.store(out + row + n, normed * tl.load(weight + n, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit
def _gated_silu(x, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < width
    gate = tl.load(x + row * 2 * width + n, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    other = tl.load(x + (row * 2 + 1) * width + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + n, active * other, mask=inside)


def rms_norm(x: Float[Tensor, "*b d"], weight: Float[Tensor, " d"], eps: float) -> Float[Tensor, "*b d"]:
    """x scaled to root mean square 1, times the weight."""
    x = x.contiguous()
    width = x.shape[-1]
    out = torch.empty_like(x)
    _rms_norm[(x.numel() // width,)](
        x, weight, out, width, eps, N=triton.next_power_of_2(width), num_warps=8 if width > 2048 else 4
    )
    return out


def gated_silu(x: Float[Tensor, "*b both"]) -> Float[Tensor, "*b d"]:
    """silu of the first half of each row times its second half."""
    x = x.contiguous()
    width, rows = x.shape[-1] // 2, x.numel() // x.shape[-1]
    out = x.new_empty(*x.shape[:-1], width)
    block = 16 if INTERPRETED else 1024
    _gated_silu[(rows, triton.cdiv(width, block))](x, out, width, BLOCK=block, num_warps=4)
    return out
