"""All messages of a window in one cooperative launch.

Programs that all are resident make each message in two turns, the rows of the next states and their product with the
transition, and wait for each other after each. Half of them go forward, half backward. Under Triton's interpreter,
which runs programs one after the other, each half is one program.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from codd.circuits.ops.constrained.triton.rows import _sum_of_products


class SweepTiling(NamedTuple):
    """Pairs that are summed at a time; rows, columns and depth of a tile of the product; programs a multiprocessor."""

    pairs: int
    rows: int
    columns: int
    depth: int
    programs: int = 2
    warps: int = 4


def sweep_tiling(automaton: int, states: int) -> SweepTiling:
    """About a tile a program; two programs of 128 threads fit a multiprocessor whatever they need.

    Measured on an H200 with 1024 states: benchmarks/structured.py, docs/results/structured.md.
    """
    width = triton.next_power_of_2(states)
    pairs = max(1, min(8, 8192 // width))
    if automaton <= 16:
        return SweepTiling(pairs, 16, 32, min(64, max(16, width)))
    columns = triton.next_power_of_2(width * triton.cdiv(automaton, 32) // 128)
    return SweepTiling(pairs, 32, min(64, max(16, columns)), min(32, max(16, width)))


@triton.jit
def _wait(counter, target):
    """Until all programs were here: ``target`` is their number times how often."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")
    arrived = tl.load(counter, volatile=True)
    while arrived < target:
        arrived = tl.load(counter, volatile=True)
    tl.debug_barrier()


@triton.jit
def _product(rows, log, matrix, out, count, states, stride, M: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """out = rows @ matrix, by tiles; those of which every row is zero are left out."""
    across = tl.cdiv(stride, C)
    for tile in range(tl.program_id(0), tl.cdiv(count, M) * across, tl.num_programs(0)):
        m = (tile // across) * M + tl.arange(0, M)
        c = (tile % across) * C + tl.arange(0, C)
        live = tl.load(log + m, mask=m < count, other=float("-inf"), cache_modifier=".cg") > float("-inf")
        if tl.max(live.to(tl.int32), 0) > 0:
            acc = tl.zeros((M, C), tl.float32)
            for first in tl.range(0, states, K, num_stages=3):
                k = first + tl.arange(0, K)
                a = tl.load(
                    rows + m[:, None] * stride + k[None, :],
                    mask=live[:, None] & (k < states)[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                w = tl.load(
                    matrix + k[:, None] * states + c[None, :],
                    mask=(k < states)[:, None] & (c < states)[None, :],
                    other=0.0,
                )
                acc = tl.dot(a, w, acc, input_precision="tf32x3")
            tl.store(out + m[:, None] * stride + c[None, :], acc, mask=live[:, None] & (c < stride)[None, :])


@triton.jit
def _sweep(
    forward,
    reached,
    forward_log,
    backward,
    joint,
    backward_log,
    leaf,
    leaf_log,
    matrix,
    transposed,
    into_ptr,
    into_x,
    into_y,
    leaving_ptr,
    leaving_x,
    leaving_y,
    counters,
    begin,
    length,
    automaton,
    padded,
    groups,
    states,
    stride,
    E: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
):
    """All messages that depend on position ``begin[0]`` (backward) or ``begin[1]`` (forward)."""
    programs = tl.num_programs(0)
    target = 0
    if tl.program_id(1) == 0:
        for k in range(0, tl.load(begin) + 1):
            t = tl.load(begin) - k
            for row in range(tl.program_id(0), automaton, programs):
                _sum_of_products(
                    backward + (t + 1).to(tl.int64) * padded * stride,
                    backward_log + (t + 1) * padded,
                    leaf + t.to(tl.int64) * groups * stride,
                    leaf_log + t * groups,
                    leaving_ptr,
                    leaving_x,
                    leaving_y,
                    joint + (t.to(tl.int64) * padded + row) * stride,
                    backward_log + t * padded + row,
                    row,
                    stride,
                    "each",
                    E,
                    N,
                )
            target += programs
            _wait(counters, target)
            if t > 0:
                at = t.to(tl.int64) * padded
                _product(
                    joint + at * stride,
                    backward_log + at,
                    transposed,
                    backward + at * stride,
                    automaton,
                    states,
                    stride,
                    M,
                    C,
                    K,
                )
                target += programs
                _wait(counters, target)
    else:
        for k in range(0, length - 1 - tl.load(begin + 1)):
            t = tl.load(begin + 1) + k
            for row in range(tl.program_id(0), automaton, programs):
                _sum_of_products(
                    forward + t.to(tl.int64) * padded * stride,
                    forward_log + t * padded,
                    leaf + t.to(tl.int64) * groups * stride,
                    leaf_log + t * groups,
                    into_ptr,
                    into_x,
                    into_y,
                    reached + (t.to(tl.int64) * padded + row) * stride,
                    forward_log + (t + 1) * padded + row,
                    row,
                    stride,
                    "each",
                    E,
                    N,
                )
            target += programs
            _wait(counters + 1, target)
            at = t.to(tl.int64) * padded
            after = at + padded
            _product(
                reached + at * stride,
                forward_log + after,
                matrix,
                forward + after * stride,
                automaton,
                states,
                stride,
                M,
                C,
                K,
            )
            target += programs
            _wait(counters + 1, target)
