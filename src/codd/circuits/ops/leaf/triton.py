"""The soft-evidence contraction on the GPU: raw logits in, leaf values out, the vocabulary read once.

Three launches. ``_compact`` lists the rows that need the contraction (their number stays on the device).
``_contract`` splits states and vocabulary over the chip: each program turns a strip of logits into weights with a
running maximum, as attention kernels do, and multiplies them with its tile of the emission on the tensor cores.
``_finish`` joins the strips, looks up observed tokens, and multiplies latent potentials in.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind
from codd.circuits.ops.gpu import INTERPRETED
from codd.circuits.ops.leaf import eager
from codd.circuits.ops.scaled import Scaled
from codd.circuits.parameters import Emission

_OBSERVED = tl.constexpr(int(Kind.OBSERVED))
_DENSE = tl.constexpr(int(Kind.DENSE))
_LOG2E = tl.constexpr(1.4426950408889634)


class Tiling(NamedTuple):
    """How the contraction is cut up: rows, states and tokens a tile, strips of the vocabulary, warps and stages."""

    rows: int
    states: int
    tokens: int
    strips: int
    warps: int
    stages: int


def tiling_for(rows: int, states: int, vocab: int, itemsize: int, chip: int = 132) -> Tiling:
    """One wave of programs, with wider tiles of states once there are many rows (measured: docs/results/kernels.md)."""
    tile_rows = min(max(16, triton.next_power_of_2(rows)), 128)
    many = tile_rows > 32
    tile_states = min(256 if many else 128, max(16, triton.next_power_of_2(states)))
    tokens = (64 if many else 128) * 2 // itemsize
    strips = max(1, chip // triton.cdiv(states, tile_states))
    return Tiling(tile_rows, tile_states, tokens, min(strips, triton.cdiv(vocab, tokens)), 8, 3)


@triton.jit
def _compact(kind, slots, rows, count, total_rows, BLOCK: tl.constexpr):
    """Number the dense rows: rows[slot] = row, slots[row] = slot."""
    filled = 0
    for first in range(0, total_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < total_rows
        hit = (tl.load(kind + row, mask=inside, other=-1) == _DENSE) & inside
        number = hit.to(tl.int32)
        slot = filled + tl.cumsum(number, 0) - number
        tl.store(rows + slot, row, mask=hit)
        tl.store(slots + row, slot, mask=inside)
        filled += tl.sum(number, 0)
    tl.store(count, filled)


@triton.jit
def _nearest(x):
    """Round float32 to the ten bits that tf32 keeps. The tensor cores cut them off, which is a bias, not a noise."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _contract(
    logits,
    inverse_temperature,
    emission,
    rows,
    count,
    partial,
    tops,
    sums,
    length,
    capacity,
    states,
    vocab,
    strip,
    batch_stride,
    row_stride,
    R: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """partial[strip, slot, state] = sum over the strip of E[state, v] e^((x_v - top) / temperature).

    The largest logit and the plain sum stand beside it. The difference comes first, so that an offset costs no digits.
    """
    part = tl.program_id(1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    begin = part * strip
    end = tl.minimum(begin + strip, vocab)
    table = emission + n.to(tl.int64)[:, None] * vocab
    have = tl.load(count)
    for first in range(0, have, R):
        slot = first + tl.arange(0, R)
        used = slot < have
        row = tl.load(rows + slot, mask=used, other=0)
        b = row // length
        scale = tl.load(inverse_temperature + b, mask=used, other=1.0) * _LOG2E
        source = logits + b.to(tl.int64) * batch_stride + (row - b * length).to(tl.int64) * row_stride
        top = tl.full((R,), float("-inf"), tl.float32)
        total = tl.zeros((R,), tl.float32)
        acc = tl.zeros((N, R), tl.float32)
        for k in range(begin, end, K):
            v = k + tl.arange(0, K)
            inside = v < end
            e = tl.load(table + v[None, :], mask=(n < states)[:, None] & inside[None, :], other=0.0)
            x = tl.load(source[None, :] + v[:, None], mask=inside[:, None] & used[None, :], other=float("-inf"))
            x = x.to(tl.float32)
            new = tl.maximum(top, tl.max(x, 0))
            safe = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp2((x - safe[None, :]) * scale[None, :])
            shrink = tl.exp2((top - safe) * scale)
            total = total * shrink + tl.sum(p, 0)
            if PRECISION == "rounded":
                e = _nearest(e)
                p = _nearest(p)
            if UPCAST:  # the interpreter multiplies the bit patterns of bfloat16
                e = e.to(tl.float32)
            acc = tl.dot(
                e, p.to(e.dtype), acc * shrink[None, :], input_precision="tf32" if PRECISION == "rounded" else PRECISION
            )
            top = new
        where = part.to(tl.int64) * capacity + slot
        inside_out = (n < states)[:, None] & used[None, :]
        tl.store(partial + where[None, :] * states + n[:, None], acc, mask=inside_out)
        if tl.program_id(0) == 0:
            tl.store(tops + where, top, mask=used)
            tl.store(sums + where, total, mask=used)


@triton.jit
def _finish(
    kind,
    tokens,
    emission,
    inverse_temperature,
    slots,
    partial,
    tops,
    sums,
    latent,
    values,
    log_scale,
    totals,
    length,
    capacity,
    states,
    vocab,
    strips,
    NORMALISED: tl.constexpr,
    LATENT: tl.constexpr,
    TOKENS: tl.constexpr,
    DENSE: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
):
    """One program per row: leaf values (the largest is one), their scale, the largest logit and the log-sum over it."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, N)
    inside = n < states
    what = tl.load(kind + row)
    value = tl.full((N,), 1.0, tl.float32)
    scale = 0.0
    if TOKENS:
        if what == _OBSERVED:
            token = tl.load(tokens + row)
            value = tl.load(emission + n.to(tl.int64) * vocab + token, mask=inside, other=0.0).to(tl.float32)
    if DENSE:
        if what == _DENSE:
            slot = tl.load(slots + row)
            heat = tl.load(inverse_temperature + row // length) * _LOG2E
            s = tl.arange(0, S)
            top = tl.load(tops + s.to(tl.int64) * capacity + slot, mask=s < strips, other=float("-inf"))
            highest = tl.max(top, 0)
            possible = highest > float("-inf")
            base = tl.where(possible, highest, 0.0)
            total = tl.sum(
                tl.load(sums + s.to(tl.int64) * capacity + slot, mask=s < strips, other=0.0)
                * tl.exp2((top - base) * heat),
                0,
            )
            acc = tl.zeros((N,), tl.float32)
            at = slot.to(tl.int64)
            for _ in range(0, strips):
                weight = tl.exp2((tl.load(tops + at) - base) * heat)
                acc += weight * tl.load(partial + at * states + n, mask=inside, other=0.0)
                at += capacity
            value = tl.where(possible, acc / tl.where(possible, total, 1.0), 0.0)
            log_sum = tl.log(tl.where(possible, total, 1.0))
            tl.store(totals + row, base)
            tl.store(totals + capacity + row, log_sum)
            if not NORMALISED:
                scale = base + log_sum
    if LATENT:
        potential = tl.load(latent + row * states + n, mask=inside, other=float("-inf")).to(tl.float32)
        top_latent = tl.max(potential, 0)
        top_latent = tl.where(top_latent > float("-inf"), top_latent, 0.0)
        value *= tl.exp(potential - top_latent)
        scale += top_latent
    largest = tl.max(tl.where(inside, value, 0.0), 0)
    largest = tl.where(largest > 0.0, largest, 1.0)
    tl.store(values + row * states + n, value / largest, mask=inside)
    tl.store(log_scale + row, scale + tl.log(largest))


def fused(emission: Emission, ev: Evidence) -> tuple[Scaled, Float[Tensor, "2 B L"]]:
    """Leaf values, and what ``scores`` subtracts: the largest logit of each dense row, and the log-sum over it."""
    batch, length = ev.shape
    table = emission.linear
    states, vocab = table.shape
    rows = batch * length
    device = ev.device
    potentials = None if ev.potentials is None else unit_stride(ev.potentials)
    values = torch.empty(batch, length, states, device=device)
    log_scale = torch.empty(batch, length, 1, device=device)
    totals = torch.zeros(2, batch, length, device=device)
    inverse = ev.inverse_temperature()
    plan = tiling_for(rows, states, vocab, table.element_size())
    slots = partial = tops = sums = values  # stand-ins where there is nothing dense
    if potentials is not None:
        numbers = torch.empty(2 * rows + 1, dtype=torch.int32, device=device)
        slots, listed, count = numbers[:rows], numbers[rows : 2 * rows], numbers[2 * rows :]
        partial = torch.empty(plan.strips, rows, states, device=device)
        tops, sums = torch.empty(2, plan.strips, rows, device=device)
        _compact[(1,)](ev.kind, slots, listed, count, rows, BLOCK=min(1024, triton.next_power_of_2(rows)))
        strip = triton.cdiv(triton.cdiv(vocab, plan.strips), plan.tokens) * plan.tokens
        _contract[(triton.cdiv(states, plan.states), plan.strips)](
            potentials,
            inverse,
            table,
            listed,
            count,
            partial,
            tops,
            sums,
            length,
            rows,
            states,
            vocab,
            strip,
            potentials.stride(0),
            potentials.stride(1),
            R=plan.rows,
            N=plan.states,
            K=plan.tokens,
            PRECISION="rounded" if table.dtype == torch.float32 else "ieee",
            UPCAST=INTERPRETED,
            num_warps=plan.warps,
            num_stages=plan.stages,
        )
    latent = ev.latent_log_potentials
    _finish[(rows,)](
        ev.kind,
        values if ev.tokens is None else ev.tokens.contiguous(),
        table,
        inverse,
        slots,
        partial,
        tops,
        sums,
        values if latent is None else latent.contiguous(),
        values,
        log_scale,
        totals,
        length,
        rows,
        states,
        vocab,
        plan.strips,
        NORMALISED=ev.normalised,
        LATENT=latent is not None,
        TOKENS=ev.tokens is not None,
        DENSE=potentials is not None,
        S=triton.next_power_of_2(plan.strips),
        N=triton.next_power_of_2(states),
        num_warps=4,
    )
    return Scaled(values, log_scale), totals


def unit_stride(potentials: Float[Tensor, "B L V"]) -> Float[Tensor, "B L V"]:
    """Potentials whose tokens lie side by side, which is what the kernels read; copied only if they do not."""
    return potentials if potentials.stride(-1) == 1 else potentials.contiguous()


def leaf_values(emission: Emission, ev: Evidence) -> Scaled:
    """sum_v E[i, v] w_t(v) at every position; sparse evidence and per-position tables go through PyTorch."""
    if ev.sparse is not None or emission.per_position:
        return eager.leaf_values(emission, ev)
    return fused(emission, ev)[0]
