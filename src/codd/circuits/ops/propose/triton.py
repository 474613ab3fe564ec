"""The marginals of all tokens and draws from them on the GPU: three launches per pick, the emission read once.

``_cavity`` turns messages into weights of the states. ``_marginals`` multiplies them with the emission on the tensor
cores, a strip of the vocabulary per program, and keeps of each strip what draws and orders need. ``_propose`` joins the
strips of a position and finds the drawn token in the only strip that can hold it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind
from codd.circuits.ops.gpu import INTERPRETED
from codd.circuits.ops.leaf.triton import unit_stride
from codd.circuits.ops.sampling_rule import ORDERS, Proposals
from codd.circuits.ops.scaled import Scaled
from codd.circuits.parameters import Emission

_DENSE = tl.constexpr(int(Kind.DENSE))
_MARGIN, _ENTROPY = tl.constexpr(ORDERS.index("margin")), tl.constexpr(ORDERS.index("entropy"))
_SUMS = 4
"""Numbers kept of a strip: the largest log-probability, the tempered mass, what an order needs, the sum of p log p."""


@triton.jit
def _cavity(
    forward,
    backward,
    leaf,
    latent,
    open_,
    high,
    low,
    possible,
    states,
    OPEN: tl.constexpr,
    LATENT: tl.constexpr,
    SPLIT: tl.constexpr,
    N: tl.constexpr,
):
    """forward * backward * potential / sum(forward * backward * leaf); as two bfloat16 numbers, or in float32."""
    if OPEN:
        if tl.load(open_ + tl.program_id(0)) == 0:
            return
    row = tl.program_id(0).to(tl.int64) * states
    sums = tl.zeros((N,), tl.float32)
    for begin in range(0, states, N):
        n = begin + tl.arange(0, N)
        inside = n < states
        both = tl.load(forward + row + n, mask=inside, other=0.0) * tl.load(backward + row + n, mask=inside, other=0.0)
        sums += both * tl.load(leaf + row + n, mask=inside, other=0.0)
    total = tl.sum(sums, 0)
    tl.store(possible + tl.program_id(0), tl.where(total > 0.0, 1, 0))
    for begin in range(0, states, N):
        n = begin + tl.arange(0, N)
        inside = n < states
        both = tl.load(forward + row + n, mask=inside, other=0.0) * tl.load(backward + row + n, mask=inside, other=0.0)
        if LATENT:
            both *= tl.load(latent + row + n, mask=inside, other=0.0)
        both /= tl.where(total > 0.0, total, 1.0)
        if SPLIT:
            first = both.to(tl.bfloat16)
            tl.store(high + row + n, first, mask=inside)
            tl.store(low + row + n, (both - first.to(tl.float32)).to(tl.bfloat16), mask=inside)
        else:
            tl.store(high + row + n, both, mask=inside)


@triton.jit
def _marginals(
    emission,
    high,
    low,
    possible,
    potentials,
    inverse_temperature,
    kind,
    totals,
    leaf_scale,
    latent_scale,
    tokens,
    observed,
    open_,
    out,
    sums,
    rows,
    length,
    states,
    vocab,
    strips,
    batch_stride,
    row_stride,
    cooling,
    RULE: tl.constexpr,
    ENTROPY: tl.constexpr,
    OPEN: tl.constexpr,
    NORMALISED: tl.constexpr,
    LATENT: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
):
    """out[row, v] = log p; sums[:, row, strip]: see `_SUMS`."""
    strip = tl.program_id(0)
    v = strip * V + tl.arange(0, V)
    row = tl.program_id(1) * R + tl.arange(0, R)
    used = row < rows
    if OPEN:
        if tl.max(tl.load(open_ + row, mask=used, other=0), 0) == 0:
            return
    inside = v < vocab
    acc = tl.zeros((V, R), tl.float32)
    for begin in range(0, states, K):
        n = begin + tl.arange(0, K)
        e = tl.load(
            emission + n.to(tl.int64)[None, :] * vocab + v[:, None],
            mask=(n < states)[None, :] & inside[:, None],
            other=0.0,
        )
        at = row.to(tl.int64)[None, :] * states + n[:, None]
        here = used[None, :] & (n < states)[:, None]
        c = tl.load(high + at, mask=here, other=0.0)
        if SPLIT:
            rest = tl.load(low + at, mask=here, other=0.0)
            if UPCAST:  # the interpreter multiplies the bit patterns of bfloat16
                e, c, rest = e.to(tl.float32), c.to(tl.float32), rest.to(tl.float32)
            acc = tl.dot(e, rest, acc)
            acc = tl.dot(e, c, acc)
        else:
            acc = tl.dot(e, c, acc, input_precision="tf32x3")
    b = row // length
    source = potentials + b.to(tl.int64) * batch_stride + (row - b * length).to(tl.int64) * row_stride
    tile = inside[:, None] & used[None, :]
    x = tl.load(source[None, :] + v[:, None], mask=tile, other=0.0).to(tl.float32)
    if NORMALISED:
        x -= tl.load(totals + row, mask=used, other=0.0)[None, :]
        x *= tl.load(inverse_temperature + b, mask=used, other=0.0)[None, :]
        x -= tl.load(totals + rows + row, mask=used, other=0.0)[None, :]
    offset = -tl.load(leaf_scale + row, mask=used, other=0.0)
    if LATENT:
        offset += tl.load(latent_scale + row, mask=used, other=0.0)
    dense = tl.load(kind + row, mask=used, other=0) == _DENSE
    log_p = tl.log(acc) + tl.where(dense[None, :], x, 0.0) + offset[None, :]
    known = tl.load(observed + row, mask=used, other=0) != 0
    hit = v[:, None] == tl.load(tokens + row, mask=used, other=-1)[None, :]
    log_p = tl.where(known[None, :], tl.where(hit, 0.0, float("-inf")), log_p)
    may = (tl.load(possible + row, mask=used, other=0) != 0)[None, :] & tile
    log_p = tl.where(may, log_p, float("-inf"))
    tl.store(out + row.to(tl.int64)[None, :] * vocab + v[:, None], log_p, mask=tile)
    top = tl.max(log_p, 0)
    under = log_p - tl.where(top > float("-inf"), top, 0.0)[None, :]
    into = sums + row * strips + strip
    size = rows * strips
    tl.store(into, top, mask=used)
    tl.store(into + size, tl.sum(tl.exp(under * cooling), 0), mask=used)
    if RULE == _MARGIN:
        place = tl.min(tl.where(log_p == top[None, :], v[:, None], vocab), 0)
        second = tl.max(tl.where(v[:, None] == place[None, :], float("-inf"), log_p), 0)
        tl.store(into + 2 * size, second, mask=used)
    if ENTROPY:
        p = tl.exp(log_p)
        tl.store(into + 3 * size, tl.sum(tl.where(p > 0.0, p * log_p, 0.0), 0), mask=used)


@triton.jit
def _first(past, weight, index, BIG: tl.constexpr):
    """The first entry of a cumulative sum that is past a threshold and has weight; else the last that has."""
    found = tl.min(tl.where(past & (weight > 0.0), index, BIG), 0)
    return tl.where(found < BIG, found, tl.max(tl.where(weight > 0.0, index, 0), 0))


@triton.jit
def _propose(
    log_p,
    sums,
    uniforms,
    open_,
    tokens,
    probabilities,
    order,
    entropies,
    rows,
    vocab,
    strips,
    cooling,
    RULE: tl.constexpr,
    ENTROPY: tl.constexpr,
    GREEDY: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
):
    """One program per position."""
    row = tl.program_id(0)
    if tl.load(open_ + row) == 0:
        return
    s = tl.arange(0, S)
    mine = s < strips
    at = sums + row * strips + s
    size = rows * strips
    tops = tl.load(at, mask=mine, other=float("-inf"))
    top = tl.max(tops, 0)
    base = tl.where(top > float("-inf"), top, 0.0)
    holder = tl.min(tl.where(mine & (tops == top), s, S), 0)
    mass = tl.load(at + size, mask=mine, other=0.0) * tl.exp((tops - base) * cooling)
    strip = tl.where(holder < S, holder, 0)
    threshold = 0.0
    if not GREEDY:
        threshold = tl.load(uniforms + row) * tl.sum(mass, 0) * (1.0 - 1.1920929e-7)
        cumulative = tl.cumsum(mass, 0)
        strip = _first(cumulative > threshold, mass, s, S)
        threshold -= tl.sum(tl.where(s < strip, mass, 0.0), 0)
    j = tl.arange(0, V)
    v = strip * V + j
    log = tl.load(log_p + row.to(tl.int64) * vocab + v, mask=v < vocab, other=float("-inf"))
    if GREEDY:
        number = tl.min(tl.where(log == top, j, V), 0)
        number = tl.where(number < V, number, 0)
    else:
        weight = tl.exp((log - base) * cooling)
        number = _first(tl.cumsum(weight, 0) > threshold, weight, j, V)
    chosen = tl.sum(tl.where(j == number, log, 0.0), 0)
    tl.store(tokens + row, (strip * V + number).to(tl.int64))
    tl.store(probabilities + row, tl.exp(chosen))
    entropy = 0.0
    if ENTROPY:
        entropy -= tl.sum(tl.load(at + 3 * size, mask=mine, other=0.0), 0)
    tl.store(entropies + row, entropy)
    if RULE == _MARGIN:
        seconds = tl.load(at + 2 * size, mask=mine, other=float("-inf"))
        rank = tl.exp(top) - tl.exp(tl.max(tl.where(s == holder, seconds, tops), 0))
    elif RULE == _ENTROPY:
        rank = -entropy
    else:
        rank = tl.exp(chosen)
    tl.store(order + row, rank)


class Tiling(NamedTuple):
    """Tokens of a strip, positions and states of a tile, warps and stages."""

    tokens: int
    rows: int
    states: int
    warps: int
    stages: int


def tiling_for(rows: int, itemsize: int) -> Tiling:
    """Strips that keep the emission flowing; the interpreter gets small ones, so that small shapes have several."""
    if INTERPRETED:
        return Tiling(16, 16, 16, 4, 1)
    tile = min(32, max(16, triton.next_power_of_2(rows)))
    return Tiling(128, tile, 64 if itemsize == 2 else 32, 4, 2)


def dense_marginals(
    emission: Emission,
    ev: Evidence,
    totals: Float[Tensor, "2 B L"],
    messages: tuple[Scaled, Scaled],
    leaf: Scaled,
    latent: Scaled | None,
    tokens: Int[Tensor, "B L"],
    observed: Bool[Tensor, "B L"],
    open_: Bool[Tensor, "B L"] | None,
    cooling: float,
    order: str,
    entropies: bool,
) -> tuple[Float[Tensor, "B L V"], Float[Tensor, "4 B L S"], int]:
    """log p of all tokens at every position, or at those in ``open_``: the others may get anything.

    With it what `propose` needs of each strip of the vocabulary, and the width of a strip. ``cooling`` multiplies
    log-probabilities before a token is drawn; ``order`` and ``entropies`` say what is kept besides.

    ``totals`` are the normalisers that the leaf values needed anyway. Dense evidence and one emission table only.
    """
    batch, length, states = leaf.values.shape
    table = emission.linear
    vocab, device, rows = table.shape[-1], table.device, batch * length
    assert ev.potentials is not None
    potentials = unit_stride(ev.potentials)
    plan = tiling_for(rows, table.element_size())
    strips = triton.cdiv(vocab, plan.tokens)
    split = emission.compact
    parts = torch.empty(1 + split, rows, states, dtype=table.dtype, device=device)
    possible = torch.empty(rows, dtype=torch.uint8, device=device)
    wanted = possible if open_ is None else open_.contiguous().view(torch.uint8)
    _cavity[(rows,)](
        messages[0].values.contiguous(),
        messages[1].values.contiguous(),
        leaf.values.contiguous(),
        leaf.values if latent is None else latent.values.contiguous(),
        wanted,
        parts[0],
        parts[-1],
        possible,
        states,
        OPEN=open_ is not None,
        LATENT=latent is not None,
        SPLIT=split,
        N=16 if INTERPRETED else min(1024, triton.next_power_of_2(states)),
        num_warps=4,
    )
    out = torch.empty(batch, length, vocab, device=device)
    sums = torch.empty(_SUMS, batch, length, strips, device=device)
    _marginals[(strips, triton.cdiv(rows, plan.rows))](
        table,
        parts[0],
        parts[-1],
        possible,
        potentials,
        ev.inverse_temperature(),
        ev.kind,
        totals,
        leaf.log_scale.contiguous(),
        sums if latent is None else latent.log_scale.contiguous(),
        tokens.contiguous(),
        observed.contiguous().view(torch.uint8),
        wanted,
        out,
        sums,
        rows,
        length,
        states,
        vocab,
        strips,
        potentials.stride(0),
        potentials.stride(1),
        cooling,
        RULE=ORDERS.index(order),
        ENTROPY=entropies,
        OPEN=open_ is not None,
        NORMALISED=ev.normalised,
        LATENT=latent is not None,
        SPLIT=split,
        UPCAST=INTERPRETED,
        R=plan.rows,
        V=plan.tokens,
        K=plan.states,
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
    return out, sums, plan.tokens


def propose(
    log_p: Float[Tensor, "B L V"],
    sums: Float[Tensor, "4 B L S"],
    strip: int,
    open_: Bool[Tensor, "B L"],
    cooling: float,
    order: str,
    entropies: bool,
    uniforms: Float[Tensor, "B L"] | None,
) -> Proposals:
    """A token for every open position, from what `dense_marginals` gave: the most probable one, or drawn."""
    batch, length, vocab = log_p.shape
    rows, strips, device = batch * length, sums.shape[-1], log_p.device
    tokens = torch.empty(batch, length, dtype=torch.int64, device=device)
    numbers = torch.empty(3, batch, length, device=device)
    _propose[(rows,)](
        log_p,
        sums,
        sums if uniforms is None else uniforms.float().contiguous(),
        open_.contiguous().view(torch.uint8),
        tokens,
        *numbers,
        rows,
        vocab,
        strips,
        cooling,
        RULE=ORDERS.index(order),
        ENTROPY=entropies,
        GREEDY=uniforms is None,
        V=strip,
        S=triton.next_power_of_2(strips),
        num_warps=4,
    )
    return Proposals(tokens, *numbers)
