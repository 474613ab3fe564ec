"""Mixtures of experts: routing, and products grouped by expert."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from codd.backbones.experts import ExpertsConfig
from codd.backbones.triton.tiles import INTERPRETED, Tile


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
    """One program per row: its experts by groups, those with the best ranks, one after the other."""
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
    """One program per position and some columns: the weighted sum of what its experts say."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(chosen):
        choice = row * chosen + i
        value = tl.load(outputs + choice * width + n, mask=n < width, other=0.0).to(tl.float32)
        total += value * tl.load(weights + choice).to(tl.float32)
    tl.store(out + row * width + n, total, mask=n < width)


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


def tile_for(rows: int, experts: int, dtype: torch.dtype, *, gated: bool) -> Tile:
    """By how many rows an expert has on average: with few, its weights are all there is to read."""
    if INTERPRETED:
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
    block = 16 if INTERPRETED else min(4096, max(128, triton.next_power_of_2(choices)))
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
    block = 16 if INTERPRETED else 1024
    _weigh[(rows, triton.cdiv(width, block))](outputs, weights, out, count, width, BLOCK=block, num_warps=4)
    return out
