"""What stands between the matrix products of a transformer, a launch each, rounded as PyTorch rounds it.

With few rows a product takes as long as its weights take to be read, and a dozen small launches between two products
take as long again.
"""

import os

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _rms_norm(x, weight, out, width, eps, N: tl.constexpr):
    """One program a row: normalised in float32, times the weight in the network's own precision."""
    row = tl.program_id(0).to(tl.int64) * width
    n = tl.arange(0, N)
    inside = n < width
    value = tl.load(x + row + n, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = (wide * scale).to(value.dtype).to(tl.float32)
    tl.store(out + row + n, normed * tl.load(weight + n, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit
def _rotate(x, cos, sin, stride, half, heads, H: tl.constexpr, D: tl.constexpr):
    """One program a position and some heads."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * H + tl.arange(0, H)
    i = tl.arange(0, D)
    inside = (h < heads)[:, None] & (i < half)[None, :]
    at = x + row * stride + h[:, None] * 2 * half + i[None, :]
    c = tl.load(cos + row * half + i, mask=i < half, other=0.0)[None, :]
    s = tl.load(sin + row * half + i, mask=i < half, other=0.0)[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, first * c - second * s, mask=inside)
    tl.store(at + half, second * c + first * s, mask=inside)


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


def rotate_(
    joined: Float[Tensor, "B L d"], heads: int, cos: Float[Tensor, "b 1 L half"], sin: Float[Tensor, "b 1 L half"]
) -> None:
    """Turn the pair (i, i + D / 2) of each of the first heads of a joined projection by its angle, in place."""
    half, shape = cos.shape[-1], joined.shape
    some = 2 if _INTERPRETED else 16
    angles = (part.expand(shape[0], -1, -1, -1).contiguous() for part in (cos, sin))
    _rotate[(shape[0] * shape[1], triton.cdiv(heads, some))](
        joined, *angles, shape[2], half, heads, H=some, D=triton.next_power_of_2(half), num_warps=4
    )


def gated_silu(x: Float[Tensor, "*b both"]) -> Float[Tensor, "*b d"]:
    """silu of the first half of each row times its second half."""
    x = x.contiguous()
    width, rows = x.shape[-1] // 2, x.numel() // x.shape[-1]
    out = x.new_empty(*x.shape[:-1], width)
    block = 16 if _INTERPRETED else 1024
    _gated_silu[(rows, triton.cdiv(width, block))](x, out, width, BLOCK=block, num_warps=4)
    return out
