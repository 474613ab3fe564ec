"""What stands between the matrix products of a transformer, one launch each, rounded as PyTorch rounds it."""

import os

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _rms_norm(x, added, weight, total, out, width, eps, ADD: tl.constexpr, N: tl.constexpr):
    """One program a row: the residual sum, its norm in float32, times the weight in the network's own precision."""
    row = tl.program_id(0).to(tl.int64) * width
    n = tl.arange(0, N)
    inside = n < width
    value = tl.load(x + row + n, mask=inside, other=0.0)
    kind = value.dtype
    if ADD:
        value = (value.to(tl.float32) + tl.load(added + row + n, mask=inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(total + row + n, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = (wide * scale).to(kind).to(tl.float32)
    tl.store(out + row + n, normed * tl.load(weight + n, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit
def _rotate(x, cos, sin, heads, length, batch_stride, half, D: tl.constexpr):
    """One program a position and head: the pair (i, i + D / 2) turned by its angle, in place."""
    row, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, D)
    inside = i < half
    at = x + row.to(tl.int64) * batch_stride + head * 2 * half + i
    angle = row * half + i
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, a * c - b * s, mask=inside)
    tl.store(at + half, b * c + a * s, mask=inside)


@triton.jit
def _gate(x, out, width, BLOCK: tl.constexpr):
    """silu of the first half times the second."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < width
    gate = tl.load(x + row * 2 * width + n, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    up = tl.load(x + (row * 2 + 1) * width + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + n, active * up, mask=inside)


def rms_norm(
    x: Float[Tensor, "*b d"], weight: Float[Tensor, " d"], eps: float, added: Float[Tensor, "*b d"] | None = None
) -> tuple[Float[Tensor, "*b d"], Float[Tensor, "*b d"]]:
    """x (plus what is added to it), and its norm times the weight."""
    x = x.contiguous()
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    out = torch.empty_like(x)
    total = x if added is None else torch.empty_like(x)
    _rms_norm[(rows,)](
        x, x if added is None else added.contiguous(), weight, total, out, width, eps,
        ADD=added is not None, N=triton.next_power_of_2(width), num_warps=8 if width > 2048 else 4,
    )  # fmt: skip
    return total, out


def rotate_(x: Float[Tensor, "B L H*D"], heads: int, cos: Tensor, sin: Tensor) -> None:
    """Turn the first ``heads`` heads of joined projections, in place."""
    half = cos.shape[-1]
    batch, length, _ = x.shape
    cos, sin = (part.expand(batch, 1, length, half).contiguous() for part in (cos, sin))
    _rotate[(batch * length, heads)](
        x, cos, sin, heads, length, x.stride(1), half, D=triton.next_power_of_2(half), num_warps=1
    )


def gate(x: Float[Tensor, "*b 2*d"]) -> Float[Tensor, "*b d"]:
    """silu of the first half of the last axis times its second half."""
    x = x.contiguous()
    width, rows = x.shape[-1] // 2, x.numel() // x.shape[-1]
    out = x.new_empty(*x.shape[:-1], width)
    block = 16 if _INTERPRETED else 1024
    _gate[(rows, triton.cdiv(width, block))](x, out, width, BLOCK=block, num_warps=4)
    return out
