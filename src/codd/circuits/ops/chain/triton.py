"""The whole chain in one launch: persistent programs that keep their rows of the matrix in registers.

Every program owns some rows of the matrix and computes its part of each message. The next step needs all parts, so
programs wait for each other, but there is no barrier: the message buffer starts as -1 everywhere, an entry is written
once, and a reader spins until no entry is negative. One store and one load is the shortest way between two programs.

All programs must be resident at once, so the grid never exceeds the number of multiprocessors, and the launch is
cooperative: the device starts all of it or nothing, also when another stream holds some of the multiprocessors. Under
Triton's interpreter, which runs programs one after the other, the grid is one program.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from codd.circuits.ops.chain import eager
from codd.circuits.ops.gpu import INTERPRETED, multiprocessors
from codd.circuits.ops.scaled import Scaled
from codd.circuits.parameters import Transition

_REGISTER_TILE = 32 * 1024
"""Matrix entries a program can keep: 128 KiB of a multiprocessor's 256 KiB of registers."""
MAX_BATCH = 16
"""Above this many sequences the chain is compute-bound and a matrix product a step is the better program."""


@triton.jit
def _pass(
    matrix,
    start,
    leaf,
    leaf_scale,
    out,
    out_scale,
    batch,
    length,
    states,
    START: tl.constexpr,
    REVERSE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
):
    """Message k + 1 = matrix @ (message k * leaf k / their sum), for all steps."""
    n = tl.arange(0, N)
    inside = n < states
    owner = tl.program_id(0)
    sequence = tl.arange(0, SEQUENCES)
    scales = tl.zeros((SEQUENCES,), tl.float32)
    if TILES == 1:
        kept_rows = owner * ROWS + tl.arange(0, ROWS)
        kept = tl.load(
            matrix + kept_rows.to(tl.int64)[:, None] * states + n[None, :],
            mask=(kept_rows < states)[:, None] & inside[None, :],
            other=0.0,
        )
    for k in range(0, length):
        t = length - 1 - k if REVERSE else k
        to = t - 1 if REVERSE else t + 1
        for s in range(0, SEQUENCES):
            b = tl.program_id(1) * SEQUENCES + s
            if b < batch:
                here = (b * length + t).to(tl.int64) * states
                there = (b * length + to).to(tl.int64) * states
                value = tl.load(leaf + here + n, mask=inside, other=0.0)
                if k == 0:
                    if START:
                        message = tl.exp(tl.load(start + n, mask=inside, other=float("-inf")))
                    else:
                        message = tl.where(inside, 1.0, 0.0)
                    if owner == 0:
                        tl.store(out + here + n, message, mask=inside)
                        tl.store(out_scale + b * length + t, 0.0)
                else:
                    message = tl.load(out + here + n, mask=inside, other=0.0, volatile=True)
                    while tl.min(message, 0) < 0.0:
                        message = tl.load(out + here + n, mask=inside, other=0.0, volatile=True)
                if k < length - 1:
                    work = message * value
                    total = tl.sum(work, 0)
                    inverse = tl.where(total > 0.0, 1.0 / total, 0.0)
                    work = work * inverse
                    if TILES == 1:
                        result = tl.sum(kept * work[None, :], 1)
                        tl.store(out + there + kept_rows, result, mask=kept_rows < states)
                    else:
                        for tile in tl.range(0, TILES, num_stages=STAGES):
                            rows = (owner * TILES + tile) * ROWS + tl.arange(0, ROWS)
                            block = tl.load(
                                matrix + rows.to(tl.int64)[:, None] * states + n[None, :],
                                mask=(rows < states)[:, None] & inside[None, :],
                                other=0.0,
                            )
                            result = tl.sum(block * work[None, :], 1)
                            tl.store(out + there + rows, result, mask=rows < states)
                    gained = tl.where(total > 0.0, tl.log(total), 0.0) + tl.load(leaf_scale + b * length + t)
                    scales = tl.where(sequence == s, scales + gained, scales)
                    if owner == 0:
                        tl.store(out_scale + b * length + to, tl.sum(tl.where(sequence == s, scales, 0.0), 0))


@triton.jit
def _both(
    matrix,
    transposed,
    start,
    leaf,
    leaf_scale,
    forward,
    forward_scale,
    backward,
    backward_scale,
    open_,
    batch,
    length,
    states,
    OPEN: tl.constexpr,
    L: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
):
    """Both directions side by side, each with half of the programs: neither needs anything of the other."""
    if OPEN:
        row = tl.program_id(1) * SEQUENCES * length + tl.arange(0, L)
        mine = (tl.arange(0, L) < SEQUENCES * length) & (row < batch * length)
        if tl.max(tl.load(open_ + row, mask=mine, other=0), 0) == 0:
            return
    if tl.program_id(2) == 0:
        _pass(
            transposed,
            start,
            leaf,
            leaf_scale,
            forward,
            forward_scale,
            batch,
            length,
            states,
            True,
            False,
            SEQUENCES,
            TILES,
            1,
            ROWS,
            N,
        )
    else:
        _pass(
            matrix,
            start,
            leaf,
            leaf_scale,
            backward,
            backward_scale,
            batch,
            length,
            states,
            False,
            True,
            SEQUENCES,
            TILES,
            1,
            ROWS,
            N,
        )


class Plan(NamedTuple):
    """Programs and groups of sequences (the grid), sequences per group, tiles per program, rows per tile, warps."""

    programs: int
    groups: int
    sequences: int
    tiles: int
    rows: int
    warps: int
    stages: int = 1


def plan_for(batch: int, states: int, chip: int, rows: int | None = None, warps: int | None = None) -> Plan:
    """Fill the chip: few rows per program while there are multiprocessors to spare, all of them resident at once.

    A matrix that does not fit into all registers together is streamed in small tiles instead.
    """
    width = triton.next_power_of_2(states)
    stages = 1
    if rows is None:
        rows = max(1, min(_REGISTER_TILE // width, 32))
        if triton.cdiv(states, rows) > chip:
            rows, stages = max(1, 8192 // width), 3
        while stages == 1 and rows > 1 and batch * triton.cdiv(states, rows // 2) <= chip:
            rows //= 2
    programs = triton.cdiv(states, rows)
    tiles = triton.cdiv(programs, chip)
    programs = triton.cdiv(programs, tiles)
    groups = max(1, min(batch, chip // programs))
    sequences = triton.next_power_of_2(triton.cdiv(batch, groups))
    if warps is None:
        warps = 8 if stages > 1 else max(1, min(4, rows * width // 1024), min(8, rows * width // 4096))
    return Plan(programs, triton.cdiv(batch, sequences), sequences, tiles, rows, warps, stages)


def messages(
    transition: Transition,
    start: Float[Tensor, " N"] | None,
    leaf: Scaled,
    reverse: bool,
    plan: Plan | None = None,
) -> Scaled:
    """Forward: p(z_t, evidence before t), from ``start`` in logarithms. Reverse: p(evidence after t | z_t)."""
    batch, length, states = leaf.values.shape
    if transition.per_position or transition.low_rank or batch > MAX_BATCH:
        return eager.messages(transition, start, leaf, reverse)
    values = leaf.values.contiguous()
    # The interpreter gets small tiles, so that small shapes meet both kinds of tiles.
    plan = plan or plan_for(batch, states, multiprocessors(values.device), rows=8 if INTERPRETED else None)
    out = torch.full_like(values, -1.0)
    scale = torch.empty(batch, length, 1, device=values.device)
    _pass[(plan.programs, plan.groups)](
        transition.dense if reverse else transition.dense_transposed,
        values if start is None else start,
        values,
        leaf.log_scale.contiguous(),
        out,
        scale,
        batch,
        length,
        states,
        START=start is not None,
        REVERSE=reverse,
        SEQUENCES=plan.sequences,
        TILES=plan.tiles,
        STAGES=plan.stages,
        ROWS=plan.rows,
        N=triton.next_power_of_2(states),
        num_warps=plan.warps,
        **({} if INTERPRETED else {"launch_cooperative_grid": True}),
    )
    return Scaled(out, scale)


def forward_backward(
    transition: Transition,
    start: Float[Tensor, " N"],
    leaf: Scaled,
    plan: Plan | None = None,
    *,
    open_: Bool[Tensor, "B L"] | None = None,
) -> tuple[Scaled, Scaled]:
    """Forward and backward messages: two chains of dependent steps that run at the same time, in one launch.

    Sequences with no position in ``open_`` may get anything instead.

    All programs of both must be resident with their rows in registers. Where half of the chip does not hold the matrix,
    or the kernel does not serve the case, this is two calls of ``messages``.
    """
    batch, length, states = leaf.values.shape
    served = not (transition.per_position or transition.low_rank) and batch <= MAX_BATCH
    if served and plan is None:
        half = max(1, multiprocessors(leaf.values.device) // 2)
        plan = plan_for(batch, states, half, rows=8 if INTERPRETED else None)
    if not served or plan is None or plan.stages > 1:
        return messages(transition, start, leaf, False), messages(transition, None, leaf, True)
    values = leaf.values.contiguous()
    out = torch.full((2, *values.shape), -1.0, device=values.device)
    scale = torch.empty(2, batch, length, 1, device=values.device)
    _both[(plan.programs, plan.groups, 2)](
        transition.dense,
        transition.dense_transposed,
        start,
        values,
        leaf.log_scale.contiguous(),
        out[0],
        scale[0],
        out[1],
        scale[1],
        values if open_ is None else open_.contiguous().view(torch.uint8),
        batch,
        length,
        states,
        OPEN=open_ is not None,
        L=triton.next_power_of_2(plan.sequences * length),
        SEQUENCES=plan.sequences,
        TILES=plan.tiles,
        ROWS=plan.rows,
        N=triton.next_power_of_2(states),
        num_warps=plan.warps,
        **({} if INTERPRETED else {"launch_cooperative_grid": True}),
    )
    return Scaled(out[0], scale[0]), Scaled(out[1], scale[1])
