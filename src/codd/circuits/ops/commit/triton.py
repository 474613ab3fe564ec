"""Candidates and picks on the GPU: a launch each instead of some sixty small ones.

A pick follows the chain's own launch, which takes most of the time, so what counts here is the number of launches and
the longest chain of dependent loads in each.
"""

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind
from codd.circuits.ops.gpu import INTERPRETED
from codd.circuits.ops.leaf.triton import unit_stride
from codd.circuits.ops.sampling_rule import ORDERS, ROUNDING, Proposals
from codd.circuits.ops.scaled import Scaled
from codd.circuits.parameters import Emission

_DENSE = tl.constexpr(int(Kind.DENSE))
_MARGIN, _GIVEN = tl.constexpr(ORDERS.index("margin")), tl.constexpr(ORDERS.index("given"))
_ROUNDING = tl.constexpr(ROUNDING)
LARGEST = 128
"""Positions, and candidates, of a sequence that one program chooses from: a tile that registers hold."""


def tiling_for(rows: int, count: int, states: int, chip: int = 128) -> tuple[int, int]:
    """How many candidates and states one program reads at a time: about one program a multiprocessor.

    The interpreter gets small tiles, so that small shapes have several.
    """
    if INTERPRETED:
        return 8, 16
    each = triton.next_power_of_2(max(1, rows * count // chip))
    return min(16, each), min(1024, triton.next_power_of_2(states))


@triton.jit
def _prepare(
    emission,
    candidates,
    potentials,
    inverse_temperature,
    kind,
    totals,
    leaf_scale,
    latent,
    latent_scale,
    columns,
    weights,
    rows,
    length,
    count,
    states,
    vocab,
    batch_stride,
    row_stride,
    NORMALISED: tl.constexpr,
    LATENT: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
):
    """columns[row, k, n] = E[n, id_k] times the latent potential; weights[row, k] with all scales in them."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * K + tl.arange(0, K)
    n = tl.program_id(2) * N + tl.arange(0, N)
    listed, inside = k < count, n < states
    ids = tl.load(candidates + row * count + k, mask=listed, other=0)
    tile = listed[:, None] & inside[None, :]
    column = tl.load(emission + n.to(tl.int64)[None, :] * vocab + ids[:, None], mask=tile, other=0.0)
    if LATENT:
        potential = tl.load(latent + row * states + n, mask=inside, other=0.0)
        column = column.to(tl.float32) * potential[None, :]
    tl.store(columns + (row * count + k)[:, None] * states + n[None, :], column, mask=tile)
    if tl.program_id(2) == 0:
        b = row // length
        source = potentials + b * batch_stride + (row - b * length) * row_stride
        x = tl.load(source + ids, mask=listed, other=0.0).to(tl.float32)
        if NORMALISED:
            x = (x - tl.load(totals + row)) * tl.load(inverse_temperature + b) - tl.load(totals + rows + row)
        weight = tl.where(tl.load(kind + row) == _DENSE, x, 0.0) - tl.load(leaf_scale + row)
        if LATENT:
            weight += tl.load(latent_scale + row)
        tl.store(weights + row * count + k, weight, mask=listed)


@triton.jit
def nothing_open(open_, sequence, length, L: tl.constexpr):
    """Whether all positions of a sequence are closed."""
    t = tl.arange(0, L)
    return tl.max(tl.load(open_ + sequence * length + t, mask=t < length, other=0), 0) == 0


@triton.jit
def _marginals(
    forward,
    backward,
    leaf,
    columns,
    weights,
    candidates,
    tokens,
    observed,
    open_,
    out,
    length,
    count,
    states,
    OPEN: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
):
    """One program per position and a block of candidates; nothing where its sequence has nothing open."""
    row = tl.program_id(0).to(tl.int64)
    if OPEN:
        if nothing_open(open_, row // length, length, L):
            return
    k = tl.program_id(1) * K + tl.arange(0, K)
    listed = k < count
    at = row * count + k
    sums = tl.zeros((N,), tl.float32)
    for begin in range(0, states, N):
        n = begin + tl.arange(0, N)
        inside = n < states
        f = tl.load(forward + row * states + n, mask=inside, other=0.0)
        b = tl.load(backward + row * states + n, mask=inside, other=0.0)
        sums += f * b * tl.load(leaf + row * states + n, mask=inside, other=0.0)
    total = tl.sum(sums, 0)
    possible = total > 0.0
    over = tl.where(possible, total, 1.0)
    mass = tl.zeros((K,), tl.float32)
    for begin in range(0, states, N):  # messages come from the nearest cache now
        n = begin + tl.arange(0, N)
        inside = n < states
        f = tl.load(forward + row * states + n, mask=inside, other=0.0)
        b = tl.load(backward + row * states + n, mask=inside, other=0.0)
        tile = listed[:, None] & inside[None, :]
        column = tl.load(columns + at[:, None] * states + n[None, :], mask=tile, other=0.0).to(tl.float32)
        mass += tl.sum(column * (f * b / over)[None, :], 1)
    log_p = tl.log(mass) + tl.load(weights + at, mask=listed, other=0.0)
    hit = tl.load(candidates + at, mask=listed, other=-1) == tl.load(tokens + row)
    log_p = tl.where(tl.load(observed + row) != 0, tl.where(hit, 0.0, float("-inf")), log_p)
    tl.store(out + at, tl.where(possible, log_p, float("-inf")), mask=listed)


@triton.jit
def _commit(
    column,
    stride,
    latent,
    scale,
    leaf,
    leaf_scale,
    tokens,
    observed,
    row,
    token,
    states,
    LATENT: tl.constexpr,
    N: tl.constexpr,
):
    """Put a column of the emission (times the latent potential) in place of leaf values, the largest at one.

    Everything is read before anything is written: warps do not run in step.
    """
    known = tl.load(observed + row)
    tops = tl.zeros((N,), tl.float32)
    for begin in range(0, states, N):
        n = begin + tl.arange(0, N)
        value = tl.load(column + n.to(tl.int64) * stride, mask=n < states, other=0.0).to(tl.float32)
        if LATENT:
            value *= tl.load(latent + row * states + n, mask=n < states, other=0.0)
        tops = tl.maximum(tops, value)
    top = tl.max(tops, 0)
    top = tl.where(top > 0.0, top, 1.0)
    tl.debug_barrier()
    if known == 0:
        for begin in range(0, states, N):
            n = begin + tl.arange(0, N)
            value = tl.load(column + n.to(tl.int64) * stride, mask=n < states, other=0.0).to(tl.float32)
            if LATENT:
                value *= tl.load(latent + row * states + n, mask=n < states, other=0.0)
            tl.store(leaf + row * states + n, value / top, mask=n < states)
        tl.store(leaf_scale + row, scale + tl.log(top))
        tl.store(tokens + row, token)
    tl.store(observed + row, 1)


@triton.jit
def _pick(
    log_p,
    candidates,
    open_,
    given,
    columns,
    column_scale,
    leaf,
    leaf_scale,
    tokens,
    observed,
    positions,
    picked,
    probabilities,
    flags,
    batch,
    length,
    count,
    states,
    batch_stride,
    row_stride,
    threshold,
    RULE: tl.constexpr,
    SCALED: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
):
    """One program per sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, L)
    k = tl.arange(0, K)
    here, listed = t < length, k < count
    base = sequence * length
    tile = here[:, None] & listed[None, :]
    log = tl.load(log_p + (base + t)[:, None] * count + k[None, :], mask=tile, other=float("-inf"))
    may = tl.load(open_ + sequence * batch_stride + t * row_stride, mask=here, other=0) != 0
    best = tl.max(log, 1)
    number = tl.min(tl.where(log == best[:, None], k[None, :], K), 1)
    probability = tl.exp(best)
    second = tl.exp(tl.max(tl.where(k[None, :] == number[:, None], float("-inf"), log), 1))
    rest = tl.maximum(1.0 - _ROUNDING - tl.sum(tl.exp(log), 1), 0.0)
    if RULE == _GIVEN:
        bound = probability
        order = tl.load(given + base + t, mask=here, other=float("-inf"))
        could = tl.full((L,), float("-inf"), tl.float32)
    elif RULE == _MARGIN:
        bound = second  # else the lead itself is not certain
        order = probability - second
        could = tl.where(rest <= second, order, tl.maximum(rest, order + second))
    else:
        bound = probability
        order = probability
        could = rest
    order = tl.where(may, order, float("-inf"))
    first = tl.max(order, 0)
    place = tl.min(tl.where(may & (order == first), t, L), 0)
    some = place < L
    place = tl.where(some, place, 0)
    chosen = t == place
    index = tl.sum(tl.where(chosen, number, 0), 0)
    value = tl.sum(tl.where(chosen, probability, 0.0), 0)
    doubts = tl.sum(tl.where((may & (could > first)) | (chosen & (rest > bound)), 1, 0), 0)
    # That nothing reaches the threshold may be certain where it is not what comes first.
    ends = value < threshold
    doubts = tl.where(ends, tl.sum(tl.where(may & (rest >= threshold), 1, 0), 0), doubts)
    closed = tl.max(may.to(tl.int32), 0) == 0
    keep = some & (value >= threshold)
    row = base + place
    entry = row * count + tl.minimum(index, count - 1)
    token = tl.load(candidates + entry)
    if keep:
        scale = 0.0
        if SCALED:
            scale += tl.load(column_scale + row)
        _commit(
            columns + entry * states,
            1,
            columns,
            scale,
            leaf,
            leaf_scale,
            tokens,
            observed,
            row,
            token,
            states,
            False,
            N,
        )
    left = may & keep & (t != place)
    tl.store(open_ + sequence * batch_stride + t * row_stride, left.to(tl.uint8), mask=here)
    tl.store(positions + sequence, place.to(tl.int64))
    tl.store(picked + sequence, token)
    tl.store(probabilities + sequence, value)
    tl.store(flags + sequence, (closed | (some & (doubts == 0))).to(tl.uint8))
    tl.store(flags + batch + sequence, keep.to(tl.uint8))


@triton.jit
def _take(
    offered,
    offered_probabilities,
    order,
    entropies,
    open_,
    spent,
    emission,
    latent,
    latent_scale,
    leaf,
    leaf_scale,
    tokens,
    observed,
    positions,
    picked,
    probabilities,
    flags,
    batch,
    length,
    states,
    vocab,
    batch_stride,
    row_stride,
    threshold,
    least,
    budget,
    LATENT: tl.constexpr,
    L: tl.constexpr,
    N: tl.constexpr,
):
    """One program per sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, L)
    here = t < length
    base = sequence * length
    may = tl.load(open_ + sequence * batch_stride + t * row_stride, mask=here, other=0) != 0
    probability = tl.load(offered_probabilities + base + t, mask=here, other=0.0)
    passed = may & (probability >= threshold)
    eligible = tl.where(tl.max(passed.to(tl.int32), 0) > 0, passed, may)
    rank = tl.where(eligible, tl.load(order + base + t, mask=here, other=0.0), float("-inf"))
    place = tl.min(tl.where(eligible & (rank == tl.max(rank, 0)), t, L), 0)
    some = place < L
    place = tl.where(some, place, 0)
    value = tl.sum(tl.where(t == place, probability, 0.0), 0)
    row = base + place
    token = tl.load(offered + row)
    total = tl.load(spent + sequence) + tl.where(some, tl.load(entropies + row), 0.0)
    ends = (value < least) | (total >= budget)
    closed = tl.max(may.to(tl.int32), 0) == 0
    keep = some & (ends == 0)
    tl.debug_barrier()
    tl.store(spent + sequence, total)
    if keep:
        scale = 0.0
        if LATENT:
            scale += tl.load(latent_scale + row)
        _commit(
            emission + token,
            vocab,
            latent,
            scale,
            leaf,
            leaf_scale,
            tokens,
            observed,
            row,
            token,
            states,
            LATENT,
            N,
        )
    left = may & keep & (t != place)
    tl.store(open_ + sequence * batch_stride + t * row_stride, left.to(tl.uint8), mask=here)
    tl.store(positions + sequence, place.to(tl.int64))
    tl.store(picked + sequence, token)
    tl.store(probabilities + sequence, value)
    tl.store(flags + sequence, (closed | (some & (ends | (value > 0.0)))).to(tl.uint8))
    tl.store(flags + batch + sequence, keep.to(tl.uint8))


def prepare(
    emission: Emission,
    ev: Evidence,
    candidates: Int[Tensor, "B L K"],
    leaf_scale: Float[Tensor, "B L 1"],
    totals: Float[Tensor, "2 B L"],
    latent: Scaled | None,
) -> tuple[Float[Tensor, "B L K N"], Float[Tensor, "B L K"]]:
    """Columns of the candidates, and their log-weights, from the normalisers that the leaf values needed anyway.

    A compact table's columns stay as they are, half as many bytes to read a pick, unless something multiplies them.
    Dense evidence and one emission table only.
    """
    batch, length, count = candidates.shape
    states, vocab = emission.stored.shape
    assert ev.potentials is not None
    potentials = unit_stride(ev.potentials)
    device, dtype = candidates.device, torch.float32
    if emission.compact and latent is None:
        dtype = torch.bfloat16
    columns = torch.empty(batch, length, count, states, dtype=dtype, device=device)
    weights = torch.empty(batch, length, count, device=device)
    wide, deep = (8, 16) if INTERPRETED else (16, 128)
    _prepare[(batch * length, triton.cdiv(count, wide), triton.cdiv(states, deep))](
        emission.linear,
        candidates.contiguous(),
        potentials,
        ev.inverse_temperature(),
        ev.kind,
        totals,
        leaf_scale.contiguous(),
        weights if latent is None else latent.values.contiguous(),
        weights if latent is None else latent.log_scale.contiguous(),
        columns,
        weights,
        batch * length,
        length,
        count,
        states,
        vocab,
        potentials.stride(0),
        potentials.stride(1),
        NORMALISED=ev.normalised,
        LATENT=latent is not None,
        K=wide,
        N=deep,
        num_warps=4,
    )
    return columns, weights


def candidate_marginals(
    forward: Float[Tensor, "B L N"],
    backward: Float[Tensor, "B L N"],
    leaf: Float[Tensor, "B L N"],
    columns: Float[Tensor, "B L K N"],
    weights: Float[Tensor, "B L K"],
    candidates: Int[Tensor, "B L K"],
    tokens: Int[Tensor, "B L"],
    observed: Bool[Tensor, "B L"],
    open_: Bool[Tensor, "B L"] | None = None,
) -> Float[Tensor, "B L K"]:
    """log p of the candidates at every position, in one launch; anything in sequences with nothing open."""
    batch, length, count, states = columns.shape
    out = torch.empty(batch, length, count, device=columns.device)
    wide, deep = tiling_for(batch * length, count, states)
    _marginals[(batch * length, triton.cdiv(count, wide))](
        forward.contiguous(),
        backward.contiguous(),
        leaf.contiguous(),
        columns.contiguous(),
        weights.contiguous(),
        candidates.contiguous(),
        tokens.contiguous(),
        observed.contiguous().view(torch.uint8),
        (observed if open_ is None else open_).contiguous().view(torch.uint8),
        out,
        length,
        count,
        states,
        OPEN=open_ is not None,
        L=triton.next_power_of_2(length),
        K=wide,
        N=deep,
        num_warps=8 if wide * deep > 4096 else 4,
    )
    return out


def pick(
    log_p: Float[Tensor, "B L K"],
    candidates: Int[Tensor, "B L K"],
    open_: Bool[Tensor, "B L"],
    order: str,
    given: Float[Tensor, "B L"] | None,
    columns: Float[Tensor, "B L K N"],
    column_scale: Float[Tensor, "B L 1"] | None,
    leaf: Scaled,
    tokens: Int[Tensor, "B L"],
    observed: Bool[Tensor, "B L"],
    threshold: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Choose a candidate and commit it, in one launch; at most ``LARGEST`` positions and candidates.

    ``open_``, ``leaf``, ``tokens`` and ``observed``, the last three contiguous, change in place.

    Returns:
        Position, token, probability, whether no token outside the candidates could change any of that, and whether the
        token was committed, each (B,).
    """
    batch, length, count, states = columns.shape
    made = _Made(batch, log_p.device)
    _pick[(batch,)](
        log_p.contiguous(),
        candidates.contiguous(),
        open_.view(torch.uint8),
        log_p if given is None else given.float().contiguous(),
        columns.contiguous(),
        log_p if column_scale is None else column_scale.contiguous(),
        leaf.values,
        leaf.log_scale,
        tokens,
        observed.view(torch.uint8),
        *made.outputs,
        batch,
        length,
        count,
        states,
        open_.stride(0),
        open_.stride(1),
        -1.0 if threshold is None else threshold,
        RULE=ORDERS.index(order),
        SCALED=column_scale is not None,
        L=triton.next_power_of_2(length),
        K=triton.next_power_of_2(count),
        N=16 if INTERPRETED else min(4096, triton.next_power_of_2(states)),
        num_warps=8,
    )
    return made.picked()


def take(
    proposals: Proposals,
    open_: Bool[Tensor, "B L"],
    spent: Float[Tensor, " B"],
    limits: tuple[float | None, float | None],
    first: bool,
    emission: Emission,
    latent: Scaled | None,
    leaf: Scaled,
    tokens: Int[Tensor, "B L"],
    observed: Bool[Tensor, "B L"],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Choose a proposal and commit it, in one launch; results as of `pick`.

    One emission table; the leaf values and tokens contiguous. ``limits`` are a threshold and a budget, ``spent`` the
    entropies so far, which change in place; the first is never held back by them.
    """
    batch, length, states = leaf.values.shape
    made = _Made(batch, leaf.values.device)
    threshold, budget = (-1.0 if limits[0] is None else limits[0]), limits[1]
    _take[(batch,)](
        *(part.contiguous() for part in proposals),
        open_.view(torch.uint8),
        spent,
        emission.linear,
        leaf.values if latent is None else latent.values.contiguous(),
        leaf.values if latent is None else latent.log_scale.contiguous(),
        leaf.values,
        leaf.log_scale,
        tokens,
        observed.view(torch.uint8),
        *made.outputs,
        batch,
        length,
        states,
        emission.stored.shape[-1],
        open_.stride(0),
        open_.stride(1),
        threshold,
        -1.0 if first else threshold,
        math.inf if first or budget is None else budget,
        LATENT=latent is not None,
        L=triton.next_power_of_2(length),
        N=16 if INTERPRETED else min(1024, triton.next_power_of_2(states)),
        num_warps=8,
    )
    return made.picked()


class _Made:
    """Output buffers of a launch that picks one token for each sequence."""

    def __init__(self, batch: int, device: torch.device):
        positions, tokens = torch.empty(2, batch, dtype=torch.int64, device=device)
        probabilities = torch.empty(batch, device=device)
        self.outputs = positions, tokens, probabilities, torch.empty(2, batch, dtype=torch.uint8, device=device)

    def picked(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        positions, tokens, probabilities, flags = self.outputs
        settled, keep = flags.view(torch.bool)
        return positions, tokens, probabilities, settled, keep
