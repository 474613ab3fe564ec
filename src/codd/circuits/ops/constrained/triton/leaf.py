"""Leaf values by class of tokens, and of one token that is observed later."""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind, row_max
from codd.circuits.ops.constrained.tables import Tables
from codd.circuits.ops.constrained.triton.rows import DeviceRows, stride_of
from codd.circuits.ops.gpu import INTERPRETED
from codd.circuits.ops.leaf.triton import _nearest, unit_stride

_DENSE = tl.constexpr(int(Kind.DENSE))
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _leaf_parts(
    logits,
    kind,
    base,
    inverse_temperature,
    emission,
    order,
    begins,
    ends,
    partial,
    tops,
    totals,
    rows,
    length,
    states,
    stride,
    pieces,
    batch_stride,
    row_stride,
    POTENTIALS: tl.constexpr,
    COMPACT: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """partial[row, piece, state] = sum over a piece's tokens of E[state, v] e^((x_v - base) / temperature - top).

    The sum of the weights alone stands beside it. The difference comes first, so that an offset costs no digits.
    """
    piece = tl.program_id(1)
    begin = tl.load(begins + piece)
    end = tl.load(ends + piece)
    n = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.program_id(2) * R + tl.arange(0, R)
    used = row < rows
    b = row // length
    heat = tl.load(inverse_temperature + b, mask=used, other=1.0)
    dense = used & (tl.load(kind + row, mask=used, other=-1) == _DENSE)
    source = logits + b.to(tl.int64) * batch_stride + (row - b * length).to(tl.int64) * row_stride
    lowest = tl.load(base + row, mask=used, other=0.0)
    top = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    acc = tl.zeros((R, N), tl.float32)
    for k in range(begin, end, K):
        at = k + tl.arange(0, K)
        inside = at < end
        v = tl.load(order + at, mask=inside, other=0)
        e = tl.load(
            emission + v.to(tl.int64)[:, None] * states + n[None, :],
            mask=inside[:, None] & (n < states)[None, :],
            other=0.0,
        )
        x = tl.where(used[:, None] & inside[None, :], 0.0, float("-inf"))
        if POTENTIALS:
            given = tl.load(source[:, None] + v[None, :], mask=dense[:, None] & inside[None, :], other=0.0)
            x = tl.where(dense[:, None], x + (given.to(tl.float32) - lowest[:, None]), x)
        new = tl.maximum(top, tl.max(x, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2((x - safe[:, None]) * (heat * _LOG2E)[:, None])
        shrink = tl.exp2((top - safe) * heat * _LOG2E)
        total = total * shrink + tl.sum(p, 1)
        if COMPACT:
            acc = tl.dot(p.to(e.dtype), e, acc * shrink[:, None])
        else:
            e = e.to(tl.float32)
            acc = tl.dot(_nearest(p), _nearest(e), acc * shrink[:, None], input_precision="tf32")
        top = new
    where = row.to(tl.int64) * pieces + piece
    tl.store(partial + where[:, None] * stride + n[None, :], acc, mask=used[:, None] & (n < stride)[None, :])
    if tl.program_id(0) == 0:
        tl.store(tops + where, top * heat, mask=used)
        tl.store(totals + where, total, mask=used)


@triton.jit
def _commit(
    emission,
    potentials,
    potential_log,
    member,
    class_of,
    leaf,
    leaf_log,
    observed,
    tokens,
    place,
    token,
    groups,
    classes,
    states,
    stride,
    LATENT: tl.constexpr,
    N: tl.constexpr,
):
    """Observe a token: its emission becomes the leaf values of the groups that hold its class."""
    n = tl.arange(0, N)
    inside = n < states
    where = tl.program_id(0) + tl.cast(place, tl.int64) * groups
    value = tl.load(emission + tl.cast(token, tl.int64) * states + n, mask=inside, other=0.0).to(tl.float32)
    log = 0.0
    if LATENT:
        value *= tl.load(potentials + tl.cast(place, tl.int64) * stride + n, mask=inside, other=0.0)
        log = tl.load(potential_log + place)
    top = tl.max(value, 0)
    held = tl.load(member + tl.program_id(0) * classes + tl.load(class_of + token)) != 0
    tl.store(leaf + where * stride + n, value / tl.where(top > 0.0, top, 1.0), mask=n < stride)
    possible = held & (top > 0.0)
    tl.store(leaf_log + where, tl.where(possible, log + tl.log(tl.where(top > 0.0, top, 1.0)), float("-inf")))
    if tl.program_id(0) == 0:
        tl.store(observed + place, 1)
        tl.store(tokens + place, tl.cast(token, tl.int64))


def leaf_parts(emission: Float[Tensor, "V N"], ev: Evidence, tables: Tables) -> DeviceRows:
    """Leaf values (B L, pieces, N) by piece of the sorted tokens: the emission is read once."""
    batch, length = ev.shape
    states = emission.shape[1]
    rows, stride, pieces = batch * length, stride_of(states), tables.leaf_pieces
    out = DeviceRows.empty(rows, len(pieces.owner), stride, device=ev.device)
    totals = torch.empty_like(out.log)
    potentials = None if ev.potentials is None else unit_stride(ev.potentials)
    base = out.log[:, 0] if potentials is None else row_max(potentials).float().reshape(rows)
    tile = min(max(16, triton.next_power_of_2(rows)), 32), min(256, max(16, triton.next_power_of_2(states)))
    heat = ev.inverse_temperature() if ev.normalised else torch.ones(batch, device=ev.device)
    _leaf_parts[(triton.cdiv(stride, tile[1]), len(pieces.owner), triton.cdiv(rows, tile[0]))](
        out.values if potentials is None else potentials,
        ev.kind,
        base,
        heat,
        emission,
        tables.order,
        pieces.begin,
        pieces.end,
        out.values,
        out.log,
        totals,
        rows,
        length,
        states,
        stride,
        len(pieces.owner),
        0 if potentials is None else potentials.stride(0),
        0 if potentials is None else potentials.stride(1),
        POTENTIALS=potentials is not None,
        COMPACT=emission.dtype == torch.bfloat16 and not INTERPRETED,  # it multiplies the bit patterns of bfloat16
        R=tile[0],
        N=tile[1],
        K=64,
        num_warps=8,
        num_stages=3,
    )
    if ev.normalised:
        normaliser = (out.log + totals.log()).logsumexp(-1, keepdim=True)
        out.log.sub_(torch.where(ev.rows(Kind.DENSE).view(-1, 1) & (normaliser > -torch.inf), normaliser, 0))
    elif potentials is not None:
        out.log.add_(torch.where(ev.rows(Kind.DENSE).view(-1, 1), base[:, None], 0))
    return out


def commit(
    emission: Float[Tensor, "V N"],
    potentials: DeviceRows | None,
    tables: Tables,
    leaf: DeviceRows,
    observed: Bool[Tensor, "B L"],
    tokens: Int[Tensor, "B L"],
    place: int,
    token: int,
) -> None:
    """Observe a token at the position of this number, counted through all sequences."""
    states, stride = emission.shape[1], leaf.values.shape[-1]
    latent = potentials or leaf
    _commit[(tables.groups,)](
        emission,
        latent.values,
        latent.log,
        tables.member.view(torch.uint8),
        tables.class_of,
        leaf.values,
        leaf.log,
        observed.view(torch.uint8),
        tokens,
        place,
        token,
        tables.groups,
        tables.classes,
        states,
        stride,
        LATENT=potentials is not None,
        N=triton.next_power_of_2(stride),
        num_warps=4,
    )
