"""What stands between the matrix products of a transformer, a launch each, rounded as PyTorch rounds it.

With few rows a product takes as long as its weights take to be read, and a dozen small launches between two products
take as long again.
"""

import math
import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, Int8
from torch import Tensor

from codd.backbones.experts import ExpertsConfig

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LONGEST = 128
"""Positions to which one program attends at once."""
PROGRAMS = 128
"""About one for each of a large GPU's processors: with fewer, the keys of a cache are shared out."""
FEW = 64
"""Rows up to which a product with int8 weights is as fast as they are read; with more, they are widened first."""


class Tile(NamedTuple):
    """What one program of a product does at once."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 4
    splits: int = 1
    """Programs that share the depth, and write sums that are added later."""


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
    """One program a position and some heads: each is normalised, and its first columns are turned in pairs."""
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
def _store_kv(joined, memory, slots, positions, rows, heads, kv_heads, taken, length, H: tl.constexpr, D: tl.constexpr):
    """One program a row and some heads of keys and values; ``taken``: slots that the memory has."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    if position < 0:
        return
    slot = tl.load(slots + row // rows)
    h = tl.program_id(1) * H + tl.arange(0, H)[:, None]
    d = tl.arange(0, D)[None, :]
    inside = (h < kv_heads) & (d < D)
    at = joined + row * (heads + 2 * kv_heads) * D + (heads + h) * D + d
    into = memory + ((slot * kv_heads + h) * length + position) * D + d
    tl.store(into, tl.load(at, mask=inside), mask=inside)
    into = memory + (((taken + slot) * kv_heads + h) * length + position) * D + d
    tl.store(into, tl.load(at + kv_heads * D, mask=inside), mask=inside)


@triton.jit
def _attend_cached(
    joined,
    memory,
    slots,
    positions,
    ends,
    out,
    sums,
    rows,
    heads,
    kv_heads,
    taken,
    length,
    block_size,
    scale,
    BLOCKED: tl.constexpr,
    SPLITS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """One program some rows of the query heads that share a key head, and a share of the keys: an online softmax.

    Shares that are added later are written in float32 with the logarithm, of base 2, of their sums.
    """
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    own, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    group = heads // kv_heads
    m, d = tile * M + tl.arange(0, M), tl.arange(0, D)
    used = m < rows * group
    row = b * rows + m // group
    head = own * group + m % group
    stride = (heads + 2 * kv_heads) * D
    q = tl.load(joined + row[:, None] * stride + head[:, None] * D + d[None, :], mask=used[:, None], other=0.0)
    slot, end = tl.load(slots + b), tl.load(ends + b).to(tl.int32)
    keys = memory + (slot * kv_heads + own) * length * D
    values = memory + ((taken + slot) * kv_heads + own) * length * D
    block = tl.zeros((M,), tl.int32)
    if BLOCKED:
        block = tl.load(positions + row, mask=used, other=0).to(tl.int32) // block_size
        end = tl.minimum(end, (tl.max(block, 0) + 1) * block_size)
    share = tl.cdiv(tl.cdiv(end, N), SPLITS) * N
    end = tl.minimum(end, (split + 1) * share)
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    mixed = tl.zeros((M, D), tl.float32)
    for start in range(split * share, end, N):
        n = start + tl.arange(0, N)
        known = n < end
        at = n[:, None] * D + d[None, :]
        k = tl.load(keys + at, mask=known[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = known[None, :]
        if BLOCKED:
            seen = seen & (n[None, :] // block_size <= block[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(now == float("-inf"), 0.0, now)  # a row that has seen nothing yet
        p = tl.exp2(scores - finite[:, None])
        fade = tl.exp2(top - finite)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(values + at, mask=known[:, None], other=0.0)
        mixed = tl.dot(p.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        top = now
    total = tl.where(total > 0, total, 1.0)
    into = row * heads + head
    if SPLITS > 1:
        into += split * tl.num_programs(2).to(tl.int64) * rows * heads
        tl.store(sums + into, top + tl.log2(total), mask=used)
    tl.store(out + into[:, None] * D + d[None, :], mixed / total[:, None], mask=used[:, None])


@triton.jit
def _add_shares(shares, sums, out, count, SPLITS: tl.constexpr, D: tl.constexpr):
    """One program a row and head: what it attends to, from shares of the keys."""
    at = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, D)
    each = tl.load(sums + s * count + at)
    top = tl.max(each, 0)
    weight = tl.exp2(each - tl.where(top == float("-inf"), 0.0, top))
    share = tl.load(shares + (s[:, None] * count + at) * D + d[None, :])
    total = tl.sum(weight, 0)
    mixed = tl.sum(share * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + at * D + d, mixed)


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


@triton.jit
def _route(
    logits,
    bias,
    weights,
    chosen,
    groups,
    size,
    kept,
    count,
    scale,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
):
    """One program a row: its experts by groups, those with the best ranks, one after the other."""
    row = tl.program_id(0).to(tl.int64)
    g, c = tl.arange(0, G), tl.arange(0, C)
    s = tl.arange(0, S)[None, :]
    number = g[:, None] * size + s
    inside = (g < groups)[:, None] & (s < size)
    score = tl.load(logits + row * groups * size + number, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
    else:
        score = tl.exp(score - tl.max(tl.max(score, 1), 0))
        score /= tl.sum(tl.sum(score, 1), 0)
    rank = score
    if BIASED:
        rank += tl.load(bias + number, mask=inside, other=0.0).to(tl.float32)
    rank = tl.where(inside, rank, float("-inf"))
    weigh = score
    if not SIGMOID:
        weigh = rank
    if kept < groups:
        best = tl.max(rank, 1)
        at_best = tl.min(tl.where(rank == best[:, None], number, groups * size), 1)
        best += tl.max(tl.where(number == at_best[:, None], float("-inf"), rank), 1)
        left = tl.where(g < groups, best, float("-inf"))
        for _ in range(kept):
            group = tl.min(tl.where(left == tl.max(left, 0), g, groups), 0)
            left = tl.where(g == group, float("-inf"), left)
        rank = tl.where((left == float("-inf"))[:, None], rank, float("-inf"))
    weight = tl.zeros((C,), tl.float32)
    expert = tl.zeros((C,), tl.int32)
    for i in range(count):
        top = tl.max(tl.max(rank, 1), 0)
        at = tl.min(tl.min(tl.where(rank == top, number, groups * size - 1), 1), 0)  # of NaN: the last, its weight NaN
        weight = tl.where(c == i, tl.sum(tl.sum(tl.where(number == at, weigh, 0.0), 1), 0), weight)
        expert = tl.where(c == i, at, expert)
        rank = tl.where(number == at, float("-inf"), rank)
    if SIGMOID:
        if count > 1:
            weight /= tl.sum(weight, 0) + 1e-20
        weight *= scale
    tl.store(weights + row * count + c, weight, mask=c < count)
    tl.store(chosen + row * count + c, expert, mask=c < count)


@triton.jit
def _sort_choices(chosen, ends, order, count, BLOCK: tl.constexpr):
    """One program an expert: which choices are of it, in their order, after those of the experts before it."""
    expert = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for i in range(0, count, BLOCK):
        before += (tl.load(chosen + i + n, mask=i + n < count, other=expert) < expert).to(tl.int32)
    end = tl.sum(before, 0)
    for i in range(0, count, BLOCK):
        own = (tl.load(chosen + i + n, mask=i + n < count, other=-1) == expert).to(tl.int32)
        tl.store(order + end + tl.cumsum(own, 0) - 1, i + n, mask=own > 0)
        end += tl.sum(own, 0)
    tl.store(ends + expert, end)


@triton.jit
def _grouped(
    x,
    weights,
    ends,
    order,
    out,
    experts,
    chosen,
    depth,
    columns,
    GATED: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """One program some rows of an expert and some columns; the weights stand on the left, where there are many of them.

    The first product reads the rows that chose the expert, and gates; the second writes to where they were chosen.
    """
    blocks = tl.cdiv(columns, N)
    block, tile = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    e = tl.arange(0, E)
    end = tl.load(ends + e, mask=e < experts, other=0)
    begin = tl.load(ends + e - 1, mask=(e > 0) & (e < experts), other=0)
    tiles = (end - begin + M - 1) // M
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert >= experts:
        return
    tile -= tl.sum(tl.where(e < expert, tiles, 0), 0)
    row = tl.sum(tl.where(e == expert, begin, 0), 0) + tile * M + tl.arange(0, M)
    used = row < tl.sum(tl.where(e == expert, end, 0), 0)
    choice = tl.load(order + row, mask=used, other=0)
    source, target = row, choice
    if GATED:
        source, target = choice // chosen, row
    n, k = block * N + tl.arange(0, N), tl.arange(0, K)
    at_x = x + source.to(tl.int64)[None, :] * depth + k[:, None]
    halves = 2 if GATED else 1
    at_w = weights + expert.to(tl.int64) * halves * columns * depth + n[:, None] * depth + k[None, :]
    first = tl.zeros((N, M), tl.float32)
    second = tl.zeros((N, M), tl.float32)
    for start in range(0, depth, K):
        some = k < depth - start
        kept = (n < columns)[:, None] & some[None, :]
        part = tl.load(at_x + start, mask=used[None, :] & some[:, None], other=0.0)
        first = tl.dot(tl.load(at_w + start, mask=kept, other=0.0), part, first, input_precision="ieee")
        if GATED:
            weight = tl.load(at_w + columns * depth + start, mask=kept, other=0.0)
            second = tl.dot(weight, part, second, input_precision="ieee")
    if GATED:
        kind = out.dtype.element_ty
        gate = first.to(kind).to(tl.float32)
        first = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * second.to(kind).to(tl.float32)
    at = out + target.to(tl.int64)[None, :] * columns + n[:, None]
    tl.store(at, first, mask=used[None, :] & (n < columns)[:, None])


@triton.jit
def _weigh(outputs, weights, out, chosen, width, BLOCK: tl.constexpr):
    """One program a position and some columns: the weighted sum of what its experts say."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(chosen):
        choice = row * chosen + i
        value = tl.load(outputs + choice * width + n, mask=n < width, other=0.0).to(tl.float32)
        total += value * tl.load(weights + choice).to(tl.float32)
    tl.store(out + row * width + n, total, mask=n < width)


@triton.jit
def _int8_product(
    x,
    weight,
    scale,
    bias,
    onto,
    out,
    rows,
    columns,
    depth,
    share,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """One program some columns and a share of the depth; the weights stand on the left, widened as they come.

    ``EVEN``: every share is of whole tiles. Shares that are added later are written in float32, without their scale.
    """
    split, block = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    m, n, k = tl.program_id(1) * M + tl.arange(0, M), block * N + tl.arange(0, N), tl.arange(0, K)
    used, kept = m < rows, n < columns
    at_x = x + m[None, :] * depth + k[:, None]
    at_w = weight + n.to(tl.int64)[:, None] * depth + k[None, :]
    end = tl.minimum(depth, (split + 1) * share)
    total = tl.zeros((N, M), tl.float32)
    for start in range(split * share, end, K):
        if EVEN:
            part = tl.load(at_x + start, mask=used[None, :], other=0.0)
            whole = tl.load(at_w + start, mask=kept[:, None], other=0)
        else:
            some = k < end - start
            part = tl.load(at_x + start, mask=used[None, :] & some[:, None], other=0.0)
            whole = tl.load(at_w + start, mask=kept[:, None] & some[None, :], other=0)
        total = tl.dot(whole.to(part.dtype), part, total, input_precision="ieee")
    at = m.to(tl.int64)[None, :] * columns + n[:, None]
    inside = kept[:, None] & used[None, :]
    if SPLITS > 1:
        tl.store(out + split.to(tl.int64) * rows * columns + at, total, mask=inside)
    else:
        total = _finished(total, scale, bias, onto, n[:, None], kept[:, None], at, inside, BIASED, ADDED)
        tl.store(out + at, total, mask=inside)


@triton.jit
def _finished(total, scale, bias, onto, n, kept, at, inside, BIASED: tl.constexpr, ADDED: tl.constexpr):
    """Sums of a product with int8 weights, times their scale, plus bias and residual."""
    total *= tl.load(scale + n, mask=kept, other=0.0)
    if BIASED:
        total += tl.load(bias + n, mask=kept, other=0.0).to(tl.float32)
    if ADDED:
        total += tl.load(onto + at, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _int8_sum(
    shares,
    scale,
    bias,
    onto,
    out,
    rows,
    columns,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row and some columns: what the shares of the depth add up to."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept, at = n < columns, tl.program_id(0).to(tl.int64) * columns + n
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(shares + tl.cast(rows, tl.int64) * columns * split + at, mask=kept, other=0.0)
    total = _finished(total, scale, bias, onto, n, kept, at, kept, BIASED, ADDED)
    tl.store(out + at, total, mask=kept)


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
    some = 2 if _INTERPRETED else 4
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


def attends_cached(joined: Float[Tensor, "B R d"], memory: Float[Tensor, "2 slots h L D"]) -> bool:
    """Whether `store_kv` and `attend_cached` serve a projection: heads of a power of two, a cache as precise as it."""
    width = memory.shape[-1]
    known = joined.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return known and joined.dtype == memory.dtype and 16 <= width <= 256 and width == triton.next_power_of_2(width)


def store_kv(
    joined: Float[Tensor, "B R d"],
    memory: Float[Tensor, "2 slots h L D"],
    slots: Int[Tensor, " B"],
    positions: Int[Tensor, "B R"],
    heads: int,
) -> None:
    """Write the keys and values of a joined projection to their positions; of padding, at -1, nothing."""
    batch, rows, _ = joined.shape
    _, taken, kv_heads, length, width = memory.shape
    some = 2 if _INTERPRETED else min(16, triton.next_power_of_2(kv_heads))
    _store_kv[(batch * rows, triton.cdiv(kv_heads, some))](
        joined, memory, slots, positions, rows, heads, kv_heads, taken, length, H=some, D=width, num_warps=4
    )


def attend_cached(
    joined: Float[Tensor, "B R d"],
    memory: Float[Tensor, "2 slots h L D"],
    slots: Int[Tensor, " B"],
    positions: Int[Tensor, "B R"],
    ends: Int[Tensor, " B"],
    heads: int,
    block_size: int | None,
) -> Float[Tensor, "B R h"]:
    """Attention from the queries of a joined projection, norms and rotary positions done, to what a cache holds.

    Each sequence sees its slot's positions before its end, of a block-causal network no later block than a row's own.
    Nothing waits for the host. Rows of padding hold anything finite.
    """
    batch, rows, _ = joined.shape
    _, taken, kv_heads, length, width = memory.shape
    tile = cached_tile(rows * heads // kv_heads, width, joined.dtype)
    tiles = triton.cdiv(rows * heads // kv_heads, tile.rows)
    splits, wanted = 1, 8 if _INTERPRETED else PROGRAMS
    while splits < 16 and tiles * kv_heads * batch * splits < wanted and splits * tile.columns < length:
        splits *= 2
    out = joined.new_empty(batch, rows, heads * width)
    shares, sums = out, None
    if splits > 1:
        shares = joined.new_empty(splits, batch, rows, heads * width, dtype=torch.float32)
        sums = joined.new_empty(splits, batch, rows, heads, dtype=torch.float32)
    _attend_cached[(tiles * splits, kv_heads, batch)](
        joined,
        memory,
        slots,
        positions,
        ends,
        shares,
        sums,
        rows,
        heads,
        kv_heads,
        taken,
        length,
        block_size or 1,
        width**-0.5 * math.log2(math.e),
        BLOCKED=block_size is not None,
        SPLITS=splits,
        D=width,
        M=tile.rows,
        N=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if sums is not None:
        count = batch * rows * heads
        _add_shares[(count,)](shares, sums, out, count, SPLITS=splits, D=width, num_warps=1 if width <= 64 else 4)
    return out


def cached_tile(rows: int, width: int, dtype: torch.dtype) -> Tile:
    """How many rows attend to how many keys (its columns) at once; ``rows``: of all heads that share a key head."""
    if _INTERPRETED:
        return Tile(16, 16, width)
    tallest = max(16, 32768 // (width * dtype.itemsize))
    height = min(tallest, 64, max(16, triton.next_power_of_2(rows)))
    return Tile(height, 64 if width * dtype.itemsize <= 256 else 32, width, 4, 3)


def gated_silu(x: Float[Tensor, "*b both"]) -> Float[Tensor, "*b d"]:
    """silu of the first half of each row times its second half."""
    x = x.contiguous()
    width, rows = x.shape[-1] // 2, x.numel() // x.shape[-1]
    out = x.new_empty(*x.shape[:-1], width)
    block = 16 if _INTERPRETED else 1024
    _gated_silu[(rows, triton.cdiv(width, block))](x, out, width, BLOCK=block, num_warps=4)
    return out


def route(
    logits: Float[Tensor, "n E"], bias: Float[Tensor, " E"] | None, config: ExpertsConfig, dtype: torch.dtype
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The weights, in ``dtype``, and numbers of the experts that each row goes to, as `Router` chooses them."""
    rows, experts = logits.shape
    weights = logits.new_empty(rows, config.chosen, dtype=dtype)
    chosen = logits.new_empty(rows, config.chosen, dtype=torch.int32)
    size = experts // config.groups
    _route[(rows,)](
        logits,
        bias,
        weights,
        chosen,
        config.groups,
        size,
        config.kept_groups,
        config.chosen,
        config.scale,
        SIGMOID=config.score == "sigmoid",
        BIASED=bias is not None,
        G=triton.next_power_of_2(config.groups),
        S=triton.next_power_of_2(size),
        C=triton.next_power_of_2(config.chosen),
        num_warps=1 if experts <= 256 else 4,
    )
    return weights, chosen


def multiplies_int8(x: Float[Tensor, "*b i"]) -> bool:
    """Whether `int8_product` serves an input: with few rows."""
    rows = x.numel() // x.shape[-1]
    return 0 < rows <= FEW and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def int8_product(
    x: Float[Tensor, "*b i"],
    weight: Int8[Tensor, "o i"],
    scale: Float[Tensor, " o"],
    bias: Float[Tensor, " o"] | None = None,
    onto: Float[Tensor, "*b o"] | None = None,
    tile: Tile | None = None,
) -> Float[Tensor, "*b o"]:
    """A linear layer with int8 weights, added to ``onto``, in place if that is contiguous; ``tile``: None is ours.

    Nothing waits for the host.
    """
    x, (columns, depth) = x.contiguous(), weight.shape
    rows = x.numel() // depth
    tile = tile or int8_tile(rows, columns, depth, x.dtype)
    out = x.new_empty(*x.shape[:-1], columns) if onto is None else onto.contiguous()
    plain = {"BIASED": bias is not None, "ADDED": onto is not None, "SPLITS": tile.splits}
    shares = out if tile.splits == 1 else x.new_empty(tile.splits, rows, columns, dtype=torch.float32)
    share = triton.cdiv(triton.cdiv(depth, tile.depth), tile.splits) * tile.depth
    _int8_product[(triton.cdiv(columns, tile.columns) * tile.splits, triton.cdiv(rows, tile.rows))](
        x,
        weight,
        scale,
        bias,
        out,
        shares,
        rows,
        columns,
        depth,
        share,
        **plain,
        EVEN=depth % tile.depth == 0,
        M=tile.rows,
        N=tile.columns,
        K=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if tile.splits > 1:
        block = 16 if _INTERPRETED else 512
        grid = (rows, triton.cdiv(columns, block))
        _int8_sum[grid](shares, scale, bias, out, out, rows, columns, **plain, BLOCK=block, num_warps=4)
    return out


def int8_tile(rows: int, columns: int, depth: int, dtype: torch.dtype) -> Tile:
    """The weights are read once by enough programs to keep all processors waiting for memory."""
    if _INTERPRETED:
        return Tile(16, 16, 16, splits=2)
    height = min(64, max(16, triton.next_power_of_2(rows)))
    tile, splits = Tile(height, 64, 128 if dtype.itemsize == 2 else 64, 4, 4), 1
    while triton.cdiv(columns, tile.columns) * splits < 2 * PROGRAMS and splits * 4 * tile.depth < depth:
        splits *= 2
    return tile._replace(splits=splits)


def tile_for(rows: int, experts: int, dtype: torch.dtype, *, gated: bool) -> Tile:
    """By how many rows an expert has on average: with few, its weights are all there is to read."""
    if _INTERPRETED:
        return Tile(16, 16, 16)
    mean = rows / experts
    height = 16 if mean <= 16 else 32 if mean <= 32 else 64 if mean <= 128 else 128
    columns = 64 if gated else 128  # a gated product has two halves of them
    return Tile(height, columns, 128 // dtype.itemsize, 8 if height == 128 else 4, 4 if height < 64 else 3)


def mix(
    x: Float[Tensor, "n d"],
    weights: Float[Tensor, "n k"],
    chosen: Int[Tensor, "n k"],
    up: Float[Tensor, "E two d"],
    down: Float[Tensor, "E d w"],
) -> Float[Tensor, "n d"]:
    """The chosen experts of every row, weighted and summed; an expert that no row chose is not read.

    Nothing waits for the device: the launches are enough for any choice, and programs without rows end at once.
    """
    x, (rows, count), (experts, width, inner) = x.contiguous(), chosen.shape, down.shape
    choices = rows * count
    ends = torch.empty(experts, dtype=torch.int32, device=x.device)
    order = torch.empty(choices, dtype=torch.int32, device=x.device)
    block = 16 if _INTERPRETED else min(4096, max(128, triton.next_power_of_2(choices)))
    _sort_choices[(experts,)](chosen, ends, order, choices, BLOCK=block, num_warps=8 if block > 1024 else 4)
    hidden, outputs, out = x.new_empty(choices, inner), x.new_empty(choices, width), torch.empty_like(x)
    for gated, given, matrices, made in ((True, x, up, hidden), (False, hidden, down, outputs)):
        tile = tile_for(choices, experts, x.dtype, gated=gated)
        tallest = choices // tile.rows + min(experts, choices)
        _grouped[(tallest * triton.cdiv(made.shape[1], tile.columns),)](
            given,
            matrices,
            ends,
            order,
            made,
            experts,
            count,
            given.shape[1],
            made.shape[1],
            GATED=gated,
            E=triton.next_power_of_2(experts),
            M=tile.rows,
            N=tile.columns,
            K=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    block = 16 if _INTERPRETED else 1024
    _weigh[(rows, triton.cdiv(width, block))](outputs, weights, out, count, width, BLOCK=block, num_warps=4)
    return out
