"""Products with int8 weights, for few rows."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int8
from torch import Tensor

from codd.backbones.triton.tiles import INTERPRETED, PROGRAMS, Tile

FEW = 64
"""Rows up to which a product with int8 weights is as fast as they are read; with more, they are widened first."""


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
    """One program per row and some columns: what the shares of the depth add up to."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept, at = n < columns, tl.program_id(0).to(tl.int64) * columns + n
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(shares + tl.cast(rows, tl.int64) * columns * split + at, mask=kept, other=0.0)
    total = _finished(total, scale, bias, onto, n, kept, at, kept, BIASED, ADDED)
    tl.store(out + at, total, mask=kept)


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
        block = 16 if INTERPRETED else 512
        grid = (rows, triton.cdiv(columns, block))
        _int8_sum[grid](shares, scale, bias, out, out, rows, columns, **plain, BLOCK=block, num_warps=4)
    return out


def int8_tile(rows: int, columns: int, depth: int, dtype: torch.dtype) -> Tile:
    """The weights are read once by enough programs to keep all processors waiting for memory."""
    if INTERPRETED:
        return Tile(16, 16, 16, splits=2)
    height = min(64, max(16, triton.next_power_of_2(rows)))
    tile, splits = Tile(height, 64, 128 if dtype.itemsize == 2 else 64, 4, 4), 1
    while triton.cdiv(columns, tile.columns) * splits < 2 * PROGRAMS and splits * 4 * tile.depth < depth:
        splits *= 2
    return tile._replace(splits=splits)
