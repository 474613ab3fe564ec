"""Attention over a KV cache: writing keys and values to it, and attending to them."""

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from codd.backbones.triton.tiles import INTERPRETED, PROGRAMS, Tile


@triton.jit
def _store_kv(joined, memory, slots, positions, rows, heads, kv_heads, taken, length, H: tl.constexpr, D: tl.constexpr):
    """One program per row and some heads of keys and values; ``taken``: slots that the memory has."""
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
    """One program per row and head: what it attends to, from shares of the keys."""
    at = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, D)
    each = tl.load(sums + s * count + at)
    top = tl.max(each, 0)
    weight = tl.exp2(each - tl.where(top == float("-inf"), 0.0, top))
    share = tl.load(shares + (s[:, None] * count + at) * D + d[None, :])
    total = tl.sum(weight, 0)
    mixed = tl.sum(share * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + at * D + d, mixed)


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
    some = 2 if INTERPRETED else min(16, triton.next_power_of_2(kv_heads))
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
    splits, wanted = 1, 8 if INTERPRETED else PROGRAMS
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
    if INTERPRETED:
        return Tile(16, 16, width)
    tallest = max(16, 32768 // (width * dtype.itemsize))
    height = min(tallest, 64, max(16, triton.next_power_of_2(rows)))
    return Tile(height, 64 if width * dtype.itemsize <= 256 else 32, width, 4, 3)
