"""Rotary positions, norms of queries and keys, and attention without a cache, for short sequences."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from codd.backbones.triton.tiles import INTERPRETED

LONGEST = 128
"""Positions to which one program attends at once."""


@triton.jit
def _rotate(x, cos, sin, stride, half, heads, H: tl.constexpr, D: tl.constexpr):
    """One program per position and some heads."""
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
def _norm_rotate(
    x,
    q_weight,
    k_weight,
    cos,
    sin,
    stride,
    heads,
    kv_heads,
    half,
    rest,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
):
    """One program per position and some heads: each is normalised, and its first columns are turned in pairs."""
    row = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * H + tl.arange(0, H))[:, None]
    i = tl.arange(0, D)[None, :]
    used, query = h < heads + kv_heads, h < heads
    width = 2 * half + rest
    inside = used & (i < half)
    at = x + row * stride + h * width + i
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + half, mask=inside, other=0.0)
    kind = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(first * first + second * second, 1)
    if R > 0:
        j = 2 * half + tl.arange(0, R)[None, :]
        at_rest = x + row * stride + h * width + j
        others = tl.load(at_rest, mask=used & (j < width), other=0.0).to(tl.float32)
        squares += tl.sum(others * others, 1)
    scale = tl.rsqrt(squares / width + eps)[:, None]
    if R > 0:
        others = (others * scale).to(kind).to(tl.float32)
        tl.store(at_rest, others * _either(q_weight, k_weight, j, query, j < width), mask=used & (j < width))
    first = ((first * scale).to(kind).to(tl.float32) * _either(q_weight, k_weight, i, query, i < half)).to(kind)
    second = (second * scale).to(kind).to(tl.float32) * _either(q_weight, k_weight, half + i, query, i < half)
    first, second = first.to(tl.float32), second.to(kind).to(tl.float32)
    c = tl.load(cos + row * half + i, mask=i < half, other=0.0)
    s = tl.load(sin + row * half + i, mask=i < half, other=0.0)
    tl.store(at, first * c - second * s, mask=inside)
    tl.store(at + half, second * c + first * s, mask=inside)


@triton.jit
def _either(one, other, at, first, mask):
    """The weights of queries or of keys."""
    here = tl.load(one + at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(first, here, tl.load(other + at, mask=mask, other=0.0).to(tl.float32))


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
    """One program per head and some positions: rotary positions, and attention to all keys at once."""
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


def rotate_(
    joined: Float[Tensor, "B L d"], heads: int, cos: Float[Tensor, "b 1 L half"], sin: Float[Tensor, "b 1 L half"]
) -> None:
    """Turn the pair (i, i + D / 2) of each of the first heads of a joined projection by its angle, in place."""
    half, shape = cos.shape[-1], joined.shape
    some = 2 if INTERPRETED else 16
    angles = (part.expand(shape[0], -1, -1, -1).contiguous() for part in (cos, sin))
    _rotate[(shape[0] * shape[1], triton.cdiv(heads, some))](
        joined, *angles, shape[2], half, heads, H=some, D=triton.next_power_of_2(half), num_warps=4
    )


def norm_rotate_(
    joined: Float[Tensor, "B L d"],
    norms: tuple[Float[Tensor, " D"], Float[Tensor, " D"]],
    eps: float,
    heads: int,
    kv_heads: int,
    cos: Float[Tensor, "b 1 L half"],
    sin: Float[Tensor, "b 1 L half"],
) -> None:
    """Normalise each head of queries and of keys by its root mean square, then turn its first columns, in place."""
    half, shape = cos.shape[-1], joined.shape
    rest = len(norms[0]) - 2 * half
    some = 2 if INTERPRETED else 4
    angles = (part.expand(shape[0], -1, -1, -1).contiguous() for part in (cos, sin))
    _norm_rotate[(shape[0] * shape[1], triton.cdiv(heads + kv_heads, some))](
        joined,
        *norms,
        *angles,
        shape[2],
        heads,
        kv_heads,
        half,
        rest,
        eps,
        H=some,
        D=triton.next_power_of_2(half),
        R=triton.next_power_of_2(rest) if rest else 0,
        num_warps=4,
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
    tile = 16 if INTERPRETED else 32
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
