"""Rows of latents with their scales, and sums over pairs of them."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.ops.constrained.tables import Edges

LINE = 32
"""Numbers of a cache line: rows begin at one, so that no two programs write to the same."""
_WIDE = tl.constexpr(64)
"""Pairs of a row whose scales are looked at together."""


class DeviceRows(NamedTuple):
    """``values * exp(log)``: rows of latents, padded to whole cache lines."""

    values: Float[Tensor, "*rows N"]
    log: Float[Tensor, "*rows"]

    @classmethod
    def empty(cls, *shape: int, device: torch.device) -> "DeviceRows":
        """Rows that are yet to be written; the last of ``shape`` is the stride of a row."""
        return cls(torch.empty(shape, device=device), torch.empty(shape[:-1], device=device))


class Place(NamedTuple):
    """Where rows of a sequence and position begin: rows per sequence, the first position, rows per position."""

    batch: int
    first: int
    rows: int


@triton.jit
def _sum_of_products(
    x, x_log, y, y_log, ptr, xi, yi, out, out_log, row, stride, Y: tl.constexpr, E: tl.constexpr, N: tl.constexpr
):
    """out[row] = sum over its pairs of x[xi] * y[yi]; Y "none": of x[xi], "one": of x[xi] times the row y."""
    n = tl.arange(0, N)
    inside = n < stride
    begin = tl.load(ptr + row)
    end = tl.load(ptr + row + 1)
    top = float("-inf")
    for first in range(begin, end, _WIDE):
        e = first + tl.arange(0, _WIDE)
        there = e < end
        i = tl.load(xi + e, mask=there, other=0)
        log = tl.load(x_log + i, mask=there, other=float("-inf"), cache_modifier=".cg")
        if Y == "each":
            j = tl.load(yi + e, mask=there, other=0)
            log += tl.load(y_log + j, mask=there, other=float("-inf"), cache_modifier=".cg")
        top = tl.maximum(top, tl.max(log, 0))
    acc = tl.zeros((N,), tl.float32)
    if top > float("-inf"):
        for first in range(begin, end, E):
            e = first + tl.arange(0, E)
            there = e < end
            i = tl.load(xi + e, mask=there, other=0)
            log = tl.load(x_log + i, mask=there, other=float("-inf"), cache_modifier=".cg")
            if Y == "each":
                j = tl.load(yi + e, mask=there, other=0)
                log += tl.load(y_log + j, mask=there, other=float("-inf"), cache_modifier=".cg")
            weight = tl.exp(log - top)
            if tl.max(weight, 0) > 0.0:
                live = (weight > 0.0)[:, None] & inside[None, :]
                value = tl.load(
                    x + i.to(tl.int64)[:, None] * stride + n[None, :], mask=live, other=0.0, cache_modifier=".cg"
                )
                if Y == "each":
                    value *= tl.load(
                        y + j.to(tl.int64)[:, None] * stride + n[None, :], mask=live, other=0.0, cache_modifier=".cg"
                    )
                acc += tl.sum(value * weight[:, None], 0)
        if Y == "one":
            acc *= tl.load(y + n, mask=inside, other=0.0)
    largest = tl.max(acc, 0)
    log_out = tl.where(largest > 0.0, top + tl.log(tl.where(largest > 0.0, largest, 1.0)), float("-inf"))
    tl.store(out + n, acc / tl.where(largest > 0.0, largest, 1.0), mask=inside)
    tl.store(out_log, log_out)


@triton.jit
def _sums(
    x,
    x_log,
    y,
    y_log,
    ptr,
    xi,
    yi,
    out,
    out_log,
    positions,
    length,
    rows,
    stride,
    x_batch,
    x_first,
    x_rows,
    y_batch,
    y_first,
    y_rows,
    Y: tl.constexpr,
    E: tl.constexpr,
    N: tl.constexpr,
):
    """`_sum_of_products` for every row of some positions; ``*_batch``, ``*_rows``: rows of a sequence and position."""
    place = tl.load(positions + tl.program_id(1))
    row = tl.program_id(0)
    b = (place // length).to(tl.int64)
    t = place % length
    from_x = b * x_batch + (t + x_first) * x_rows
    from_y = b * y_batch + (t + y_first) * y_rows
    here = tl.program_id(1).to(tl.int64) * rows + row
    _sum_of_products(
        x + from_x * stride,
        x_log + from_x,
        y + from_y * stride,
        y_log + from_y,
        ptr,
        xi,
        yi,
        out + here * stride,
        out_log + here,
        row,
        stride,
        Y,
        E,
        N,
    )


def stride_of(states: int) -> int:
    """The length of a row for a number of latents."""
    return -(-states // LINE) * LINE


def sums(
    x: DeviceRows,
    at: Place,
    edges: Edges,
    positions: Int[Tensor, " T"],
    length: int,
    y: DeviceRows | None = None,
    y_at: Place | None = None,
    scale: DeviceRows | None = None,
) -> DeviceRows:
    """For each position and row: the sum over the row's pairs of x, or x times y; or x times the position's scale."""
    stride, rows = x.values.shape[-1], len(edges.ptr) - 1
    out = DeviceRows.empty(len(positions), rows, stride, device=x.values.device)
    other = y or scale or x
    place = y_at or Place(length, 0, 1)
    width = triton.next_power_of_2(stride)
    _sums[(rows, len(positions))](
        x.values,
        x.log,
        other.values,
        other.log,
        edges.ptr,
        edges.x,
        edges.y,
        out.values,
        out.log,
        positions,
        length,
        rows,
        stride,
        *at,
        *place,
        Y="each" if y is not None else "one" if scale is not None else "none",
        E=max(1, min(8, 8192 // width)),
        N=width,
        num_warps=max(1, min(8, width // 128)),
    )
    if scale is not None:
        out.log.add_(scale.log.flatten()[positions.long()][:, None])
    return out
