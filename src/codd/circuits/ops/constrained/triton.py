"""The chain over (latent, automaton state) on a GPU: a window's messages in one launch, by tables of the automaton.

A *row* holds the values of all latents for one state (or class, or group of classes), its largest value at one, with
the logarithm of what was taken out beside it; -inf marks a row that is zero, whose values are never read. All rows of
all states are kept, so that no launch depends on what the host knows of the text.

``_sweep`` is one cooperative launch: programs that all are resident make each message in two turns, the rows of the
next states and their product with the transition, and wait for each other after each. Half of them go forward, half
backward. Under Triton's interpreter, which runs programs one after the other, each half is one program.
"""

import os
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind, row_max
from codd.circuits.ops.constrained.layout import Ids, Structure
from codd.circuits.ops.leaf.triton import _nearest, unit_stride

_DENSE = tl.constexpr(int(Kind.DENSE))
_LOG2E = tl.constexpr(1.4426950408889634)
_WIDE = tl.constexpr(64)
"""Pairs of a row whose scales are looked at together."""
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_LINE = 32
"""Numbers of a cache line: rows begin at one, so that no two programs write to the same."""
_LEAF_TOKENS, _MARGINAL_TOKENS = 1024, 128
"""Tokens of one class that a program sums over, or whose marginals it computes."""


class Edges(NamedTuple):
    """Lists of pairs: those of row r are ``x[ptr[r]:ptr[r + 1]]`` and ``y`` likewise."""

    ptr: Int[Tensor, " rows"]
    x: Int[Tensor, " P"]
    y: Int[Tensor, " P"]

    @classmethod
    def of(cls, rows: int, key: Ids, x: Ids, y: Ids, device: torch.device) -> "Edges":
        """Pairs sorted by the row that they belong to."""
        order = np.argsort(key, kind="stable")
        ptr = np.searchsorted(key[order], np.arange(rows + 1))
        return cls(*(torch.from_numpy(part.astype(np.int32)).to(device) for part in (ptr, x[order], y[order])))


class Pieces(NamedTuple):
    """Stretches of the tokens sorted by class, each of one class."""

    begin: Int[Tensor, " pieces"]
    end: Int[Tensor, " pieces"]
    owner: Int[Tensor, " pieces"]

    @classmethod
    def of(cls, offsets: Ids, size: int, device: torch.device) -> "Pieces":
        """The classes in stretches of at most so many tokens."""
        counts = -(-np.diff(offsets) // size)
        owner = np.repeat(np.arange(len(counts)), counts)
        first = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        begin = offsets[owner] + first * size
        end = np.minimum(begin + size, offsets[owner + 1])
        return cls(*(torch.from_numpy(part.astype(np.int32)).to(device) for part in (begin, end, owner)))


class Tables:
    """An automaton as the kernels read it."""

    def __init__(self, structure: Structure, device: torch.device) -> None:
        """Sort its pairs of states in the three ways that they are met, and its tokens by class."""
        pairs, entry_class, entry_group = structure.pairs, structure.entry_class, structure.entry_group
        states, self.groups, self.classes = structure.num_states, structure.num_groups, structure.num_classes
        self.states = states
        self.into = Edges.of(states, pairs.target, pairs.source, pairs.group, device)
        self.leaving = Edges.of(states, pairs.source, pairs.target, pairs.group, device)
        self.between = Edges.of(self.groups, pairs.group, pairs.source, pairs.target, device)
        self.members = Edges.of(self.groups, entry_group, entry_class, entry_class, device)
        self.holders = Edges.of(self.classes, entry_class, entry_group, entry_group, device)
        self.leaf_pieces = Pieces.of(structure.offsets, _LEAF_TOKENS, device)
        self.marginal_pieces = Pieces.of(structure.offsets, _MARGINAL_TOKENS, device)
        number = np.arange(len(self.leaf_pieces.owner))
        self.parts = Edges.of(self.classes, self.leaf_pieces.owner.cpu().numpy(), number, number, device)
        self.order = torch.from_numpy(structure.order.astype(np.int32)).to(device)
        member = np.zeros((self.groups, self.classes), dtype=bool)
        member[entry_group, entry_class] = True
        self.member, self.class_of = torch.from_numpy(member).to(device), structure.tables(device)[1]
        """Which group holds which class, and the class of each token."""
        self.widest = int(np.bincount(pairs.source, minlength=1).max(initial=1))
        """The most ways on from a state."""


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


@triton.jit
def _marginals(
    cavity,
    cavity_log,
    emission,
    log_weights,
    positions,
    observed,
    tokens,
    order,
    begins,
    ends,
    owners,
    out,
    rows,
    states,
    stride,
    vocab,
    classes,
    R: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """out[row, v] = log w(v) + log sum over states of cavity[row, class of v] E[:, v], for a piece of the tokens.

    An observed position has 0 at its token and -inf elsewhere.
    """
    piece = tl.program_id(0)
    owner = tl.load(owners + piece)
    at = tl.load(begins + piece) + tl.arange(0, K)
    inside = at < tl.load(ends + piece)
    v = tl.load(order + at, mask=inside, other=0)
    row = tl.program_id(1) * R + tl.arange(0, R)
    used = row < rows
    place = tl.load(positions + row, mask=used, other=0)
    known = tl.load(observed + place, mask=used, other=1) != 0
    source = row.to(tl.int64) * classes + owner
    log = tl.load(cavity_log + source, mask=used, other=float("-inf"))
    live = used & (log > float("-inf")) & (known == 0)
    acc = tl.zeros((R, K), tl.float32)
    if tl.max(live.to(tl.int32), 0) > 0:
        for first in tl.range(0, states, N, num_stages=3):
            n = first + tl.arange(0, N)
            c = tl.load(
                cavity + source[:, None] * stride + n[None, :], mask=live[:, None] & (n < states)[None, :], other=0.0
            )
            e = tl.load(
                emission + v.to(tl.int64)[:, None] * states + n[None, :],
                mask=inside[:, None] & (n < states)[None, :],
                other=0.0,
            ).to(tl.float32)
            acc = tl.dot(_nearest(c), tl.trans(_nearest(e)), acc, input_precision="tf32")
    weight = tl.load(
        log_weights + place.to(tl.int64)[:, None] * vocab + v[None, :],
        mask=live[:, None] & inside[None, :],
        other=float("-inf"),
    )
    result = tl.where(live[:, None], tl.log(acc) + log[:, None] + weight, float("-inf"))
    token = tl.load(tokens + place, mask=used, other=-1)
    result = tl.where(known[:, None] & (token[:, None] == v[None, :]), 0.0, result)
    tl.store(out + row.to(tl.int64)[:, None] * vocab + v[None, :], result, mask=used[:, None] & inside[None, :])


@triton.jit
def _partition(forward, joint, forward_log, backward_log, out, automaton, padded, length, stride, N: tl.constexpr):
    """log Z from the rows before the first position."""
    n = tl.arange(0, N)
    inside = n < stride
    b = tl.program_id(0).to(tl.int64) * (length + 1) * padded
    top = float("-inf")
    total = 0.0
    for s in range(0, automaton):
        log = tl.load(forward_log + b + s) + tl.load(backward_log + b + s)
        if log > float("-inf"):
            value = tl.load(forward + (b + s) * stride + n, mask=inside, other=0.0)
            value *= tl.load(joint + (b + s) * stride + n, mask=inside, other=0.0)
            new = tl.maximum(top, log)
            total = total * tl.exp(top - new) + tl.sum(value, 0) * tl.exp(log - new)
            top = new
    tl.store(out + tl.program_id(0), tl.where(total > 0.0, tl.log(total) + top, float("-inf")))


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


@triton.jit
def _paths(
    matrix,
    leaf,
    leaf_log,
    backward,
    joint,
    backward_log,
    ptr,
    targets,
    group_of,
    uniforms,
    states_out,
    latents_out,
    batch,
    length,
    padded,
    groups,
    states,
    stride,
    W: tl.constexpr,
    N: tl.constexpr,
):
    """Go on from the first pair of each sample: draw the next automaton state, then the latent given it."""
    which = tl.program_id(0)
    b = (which % batch).to(tl.int64)
    path = which.to(tl.int64) * length
    s = tl.load(states_out + path)
    z = tl.load(latents_out + path)
    n = tl.arange(0, N)
    inside = n < states
    way = tl.arange(0, W)
    for t in range(0, length - 1):
        first = tl.load(ptr + s)
        there = way < tl.load(ptr + s + 1) - first
        target = tl.load(targets + first + way, mask=there, other=0)
        after = (b * (length + 1) + t + 1) * padded + target
        through = (b * length + t) * groups + tl.load(group_of + first + way, mask=there, other=0)
        log = tl.load(leaf_log + through, mask=there, other=float("-inf"))
        log += tl.load(backward_log + after, mask=there, other=float("-inf"))
        top = tl.max(log, 0)
        log = log - tl.where(top > float("-inf"), top, 0.0)
        live = there & (log > float("-inf"))
        weight = tl.load(leaf + through * stride + z, mask=live, other=0.0)
        weight *= tl.load(backward + after * stride + z, mask=live, other=0.0)
        weight = tl.where(live, weight * tl.exp(log), 0.0)
        cumulative = tl.cumsum(weight, 0)
        total = tl.max(cumulative, 0)
        threshold = tl.load(uniforms + path + t + 1) * total
        last = tl.max(tl.where(weight > 0.0, way, 0), 0)
        chosen = tl.minimum(tl.sum(((cumulative <= threshold) & there).to(tl.int32), 0), last)
        mine = tl.sum(tl.where(way == chosen, weight, 0.0), 0)
        rest = threshold - tl.sum(tl.where(way == chosen, cumulative - weight, 0.0), 0)
        s = tl.sum(tl.where(way == chosen, target, 0), 0).to(tl.int64)
        row = tl.load(matrix + z * states + n, mask=inside, other=0.0)
        row *= tl.load(joint + ((b * (length + 1) + t + 1) * padded + s) * stride + n, mask=inside, other=0.0)
        cumulative = tl.cumsum(row, 0)
        share = tl.where(mine > 0.0, rest / tl.where(mine > 0.0, mine, 1.0), 0.0)
        passed = (cumulative <= share * tl.max(cumulative, 0)) & inside
        z = tl.minimum(tl.sum(passed.to(tl.int32), 0), tl.max(tl.where(row > 0.0, n, 0), 0)).to(tl.int64)
        tl.store(states_out + path + t + 1, s)
        tl.store(latents_out + path + t + 1, z)


class DeviceRows(NamedTuple):
    """``values * exp(log)``: rows of latents, padded to whole cache lines."""

    values: Float[Tensor, "*rows N"]
    log: Float[Tensor, "*rows"]

    @classmethod
    def empty(cls, *shape: int, device: torch.device) -> "DeviceRows":
        """Rows that are yet to be written; the last of ``shape`` is the stride of a row."""
        return cls(torch.empty(shape, device=device), torch.empty(shape[:-1], device=device))


class LeafTiling(NamedTuple):
    """Rows, states and tokens a tile, warps and stages."""

    rows: int
    states: int
    tokens: int
    warps: int = 8
    stages: int = 3


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


def stride_of(states: int) -> int:
    """The length of a row of so many latents."""
    return -(-states // _LINE) * _LINE


def leaf_parts(
    emission: Float[Tensor, "V N"], ev: Evidence, tables: Tables, tiling: LeafTiling | None = None
) -> DeviceRows:
    """Leaf values (B L, pieces, N) by piece of the sorted tokens: the emission is read once."""
    batch, length = ev.shape
    states = emission.shape[1]
    rows, stride, pieces = batch * length, stride_of(states), tables.leaf_pieces
    out = DeviceRows.empty(rows, len(pieces.owner), stride, device=ev.device)
    totals = torch.empty_like(out.log)
    potentials = None if ev.potentials is None else unit_stride(ev.potentials)
    base = out.log[:, 0] if potentials is None else row_max(potentials).float().reshape(rows)
    width = max(16, triton.next_power_of_2(states))
    tiling = tiling or LeafTiling(min(max(16, triton.next_power_of_2(rows)), 32), min(256, width), 64)
    heat = ev.inverse_temperature() if ev.normalised else torch.ones(batch, device=ev.device)
    _leaf_parts[(triton.cdiv(stride, tiling.states), len(pieces.owner), triton.cdiv(rows, tiling.rows))](
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
        COMPACT=emission.dtype == torch.bfloat16 and not _INTERPRETED,  # it multiplies the bit patterns of bfloat16
        R=tiling.rows,
        N=tiling.states,
        K=tiling.tokens,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    if ev.normalised:
        normaliser = (out.log + totals.log()).logsumexp(-1, keepdim=True)
        out.log.sub_(torch.where(ev.rows(Kind.DENSE).view(-1, 1) & (normaliser > -torch.inf), normaliser, 0))
    elif potentials is not None:
        out.log.add_(torch.where(ev.rows(Kind.DENSE).view(-1, 1), base[:, None], 0))
    return out


class Place(NamedTuple):
    """Where rows of a sequence and position begin: of so many rows a sequence, the first position, rows a position."""

    batch: int
    first: int
    rows: int


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


class Messages:
    """Forward and backward messages of B windows, all boundaries between positions, all states of the automaton."""

    def __init__(self, batch: int, length: int, automaton: int, states: int, device: torch.device) -> None:
        """Room for them: 16 bytes times (L + 1) S N a window."""
        self.batch, self.length, self.automaton, self.states = batch, length, automaton, states
        self.padded = triton.cdiv(automaton, _LINE) * _LINE
        shape = (batch, length + 1, self.padded, stride_of(states))
        self.forward = DeviceRows.empty(*shape, device=device)
        self.backward = DeviceRows.empty(*shape, device=device)
        self.forward.log.fill_(-torch.inf)
        self.backward.log.fill_(-torch.inf)
        self.joint = DeviceRows(torch.empty(shape, device=device), self.backward.log)
        """Of the state before a position, its leaf values included; the scale is that of ``backward``."""
        # Of each position by itself: a multiprocessor may keep what it read until the launch ends.
        self._reached = torch.empty(shape, device=device)

    @property
    def place(self) -> Place:
        """Where the rows before each position begin."""
        return Place((self.length + 1) * self.padded, 0, self.padded)

    def begin(self, initial: Float[Tensor, " N"], log_start: Tensor, log_end: Tensor) -> None:
        """Set both ends."""
        top = initial.max()
        self.forward.values[:, 0, :, : self.states] = (initial - top).exp()
        self.forward.values[:, 0, :, self.states :] = 0
        self.forward.log[:, 0, : self.automaton] = (log_start + top).float()
        self.backward.values[:, -1] = 1
        self.backward.log[:, -1, : self.automaton] = log_end.float()

    def run(
        self,
        matrix: Tensor,
        transposed: Tensor,
        leaf: DeviceRows,
        tables: Tables,
        begin: list[tuple[int, int]],
        tiling: SweepTiling | None = None,
    ) -> None:
        """Make messages again: of each window backward from one position on, and forward from another."""
        device, tiling = leaf.values.device, tiling or sweep_tiling(self.automaton, self.states)
        tiles = triton.cdiv(self.automaton, tiling.rows) * triton.cdiv(stride_of(self.states), tiling.columns)
        work = max(self.automaton, tiles)
        counters = torch.zeros(self.batch, 2, dtype=torch.int32, device=device)
        begins = torch.tensor(begin, dtype=torch.int32).to(device, non_blocking=True)
        for b in range(self.batch):
            _sweep[(1 if _INTERPRETED else min(tiling.programs * _chip(device) // 2, work), 2)](
                self.forward.values[b],
                self._reached[b],
                self.forward.log[b],
                self.backward.values[b],
                self.joint.values[b],
                self.backward.log[b],
                leaf.values[b],
                leaf.log[b],
                matrix,
                transposed,
                *tables.into,
                *tables.leaving,
                counters[b],
                begins[b],
                self.length,
                self.automaton,
                self.padded,
                tables.groups,
                self.states,
                stride_of(self.states),
                E=tiling.pairs,
                N=triton.next_power_of_2(stride_of(self.states)),
                M=tiling.rows,
                C=tiling.columns,
                K=tiling.depth,
                num_warps=tiling.warps,
                **({} if _INTERPRETED else {"launch_cooperative_grid": True}),
            )

    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z."""
        out = torch.empty(self.batch, device=self.backward.log.device)
        _partition[(self.batch,)](
            self.forward.values,
            self.joint.values,
            self.forward.log,
            self.backward.log,
            out,
            self.automaton,
            self.padded,
            self.length,
            stride_of(self.states),
            N=triton.next_power_of_2(stride_of(self.states)),
            num_warps=4,
        )
        return out

    def go_on(
        self,
        matrix: Tensor,
        leaf: DeviceRows,
        tables: Tables,
        uniforms: Float[Tensor, "M B L"],
        states: Int[Tensor, "M B L"],
        latents: Int[Tensor, "M B L"],
    ) -> None:
        """Draw paths, whose first pairs are given, to their ends."""
        _paths[(uniforms.shape[0] * uniforms.shape[1],)](
            matrix,
            leaf.values,
            leaf.log,
            self.backward.values,
            self.joint.values,
            self.backward.log,
            *tables.leaving,
            uniforms.contiguous(),
            states,
            latents,
            self.batch,
            self.length,
            self.padded,
            tables.groups,
            self.states,
            stride_of(self.states),
            W=triton.next_power_of_2(tables.widest),
            N=triton.next_power_of_2(self.states),
            num_warps=4,
        )


def token_marginals(
    emission: Float[Tensor, "V N"],
    cavity: DeviceRows,
    tables: Tables,
    log_weights: Float[Tensor, "B L V"],
    positions: Int[Tensor, " R"],
    observed: Bool[Tensor, "B L"],
    tokens: Int[Tensor, "B L"],
) -> Float[Tensor, "R V"]:
    """log w(v) + log sum over latents of cavity[r, class of v] E[:, v]; certainty where a token is observed."""
    vocab, states = emission.shape
    rows, pieces = len(positions), tables.marginal_pieces
    out = torch.empty(rows, vocab, device=emission.device)
    tile = min(max(16, triton.next_power_of_2(rows)), 32)
    _marginals[(len(pieces.owner), triton.cdiv(rows, tile))](
        cavity.values,
        cavity.log,
        emission,
        log_weights,
        positions,
        observed.view(torch.uint8),
        tokens,
        tables.order,
        *pieces,
        out,
        rows,
        states,
        cavity.values.shape[-1],
        vocab,
        tables.classes,
        R=tile,
        N=min(64, max(16, triton.next_power_of_2(states))),
        K=_MARGINAL_TOKENS,
        num_warps=4,
    )
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


def _chip(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
