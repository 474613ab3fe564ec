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
LONGEST = 128
"""Positions to which one program attends at once."""


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
def _turned(x, first, second, c, s, mask):
    """Two halves of heads, turned by their angles."""
    a = tl.load(x + first, mask=mask, other=0.0)
    b = tl.load(x + second, mask=mask, other=0.0)
    kind = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    return (a * c - b * s).to(kind), (b * c + a * s).to(kind)


@triton.jit
def _attend(
    joined,
    cos,
    sin,
    out,
    length,
    heads,
    kv_heads,
    scale,
    HALF: tl.constexpr,
    Q: tl.constexpr,
    L: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a head and some positions: rotary positions, and attention to all keys at once."""
    head, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    stride = (heads + 2 * kv_heads) * 2 * HALF
    own = head // (heads // kv_heads)
    base = joined + b * length * stride
    angles = b * length * HALF
    i = tl.arange(0, HALF)
    q = tl.program_id(0) * Q + tl.arange(0, Q)
    used = (q < length)[:, None]
    at = q[:, None] * HALF + i[None, :]
    c = tl.load(cos + angles + at, mask=used, other=0.0)
    s = tl.load(sin + angles + at, mask=used, other=0.0)
    at = q[:, None] * stride + head * 2 * HALF + i[None, :]
    q1, q2 = _turned(base, at, at + HALF, c, s, used)
    k = tl.arange(0, L)
    known = (k < length)[:, None]
    at = k[:, None] * HALF + i[None, :]
    c = tl.load(cos + angles + at, mask=known, other=0.0)
    s = tl.load(sin + angles + at, mask=known, other=0.0)
    at = k[:, None] * stride + (heads + own) * 2 * HALF + i[None, :]
    k1, k2 = _turned(base, at, at + HALF, c, s, known)
    at += kv_heads * 2 * HALF
    v1 = tl.load(base + at, mask=known, other=0.0)
    v2 = tl.load(base + at + HALF, mask=known, other=0.0)
    scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
    scores = tl.where((k < length)[None, :], scores * scale, float("-inf"))
    p = tl.exp(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(p, 1)[:, None]
    p = p.to(v1.dtype)
    into = out + (b * length + q)[:, None] * heads * 2 * HALF + head * 2 * HALF + i[None, :]
    tl.store(into, tl.dot(p, v1, input_precision=PRECISION) / total, mask=used)
    tl.store(into + HALF, tl.dot(p, v2, input_precision=PRECISION) / total, mask=used)


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


def attends(joined: Float[Tensor, "B L d"], head_dim: int) -> bool:
    """Whether `attend` serves a projection: in half precision, heads of a power of two, few positions."""
    half = head_dim // 2
    fits = joined.shape[1] <= LONGEST and half >= 16 and half == triton.next_power_of_2(half)
    return fits and joined.dtype in (torch.bfloat16, torch.float16)


def attend(
    joined: Float[Tensor, "B L d"],
    heads: int,
    kv_heads: int,
    cos: Float[Tensor, "b 1 L half"],
    sin: Float[Tensor, "b 1 L half"],
) -> Float[Tensor, "B L h"]:
    """Attention from every position to all, with rotary positions, from joined projections."""
    batch, length, _ = joined.shape
    half = cos.shape[-1]
    out = joined.new_empty(batch, length, heads * 2 * half)
    tile = 16 if _INTERPRETED else 32
    angles = (part.expand(batch, -1, -1, -1).contiguous() for part in (cos, sin))
    _attend[(triton.cdiv(length, tile), heads, batch)](
        joined,
        *angles,
        out,
        length,
        heads,
        kv_heads,
        (2 * half) ** -0.5,
        HALF=half,
        Q=tile,
        L=max(16, triton.next_power_of_2(length)),
        PRECISION="ieee",
        num_warps=4,
    )
    return out


def gated_silu(x: Float[Tensor, "*b both"]) -> Float[Tensor, "*b d"]:
    """silu of the first half of each row times its second half."""
    x = x.contiguous()
    width, rows = x.shape[-1] // 2, x.numel() // x.shape[-1]
    out = x.new_empty(*x.shape[:-1], width)
    block = 16 if _INTERPRETED else 1024
    _gated_silu[(rows, triton.cdiv(width, block))](x, out, width, BLOCK=block, num_warps=4)
    return out
