"""Messages of a batch of windows, kept and made again in part; log Z and paths from them."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.ops.constrained.tables import Tables
from codd.circuits.ops.constrained.triton.rows import LINE, DeviceRows, Place, stride_of
from codd.circuits.ops.constrained.triton.sweep import _sweep, sweep_tiling
from codd.circuits.ops.gpu import INTERPRETED, multiprocessors


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


class Messages:
    """Forward and backward messages of B windows, all boundaries between positions, all states of the automaton."""

    def __init__(self, batch: int, length: int, automaton: int, states: int, device: torch.device) -> None:
        """Allocate the messages: 16 bytes times (L + 1) S N a window."""
        self.batch, self.length, self.automaton, self.states = batch, length, automaton, states
        self.padded = triton.cdiv(automaton, LINE) * LINE
        shape = (batch, length + 1, self.padded, stride_of(states))
        self.forward = DeviceRows.empty(*shape, device=device)
        self.backward = DeviceRows.empty(*shape, device=device)
        self.forward.log.fill_(-torch.inf)
        self.backward.log.fill_(-torch.inf)
        self.joint = DeviceRows(torch.empty(shape, device=device), self.backward.log)
        """Backward messages by the state before a position, times its leaf values; scaled as ``backward``."""
        # Of each position by itself: a multiprocessor may keep what it read until the launch ends.
        self._reached = torch.empty(shape, device=device)

    @property
    def place(self) -> Place:
        """Where the rows before each position begin."""
        return Place((self.length + 1) * self.padded, 0, self.padded)

    def begin(self, initial: Float[Tensor, " N"], log_start: Tensor, log_end: Tensor) -> None:
        """Write the messages at both ends, from log-weights of latents and of the automaton's states."""
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
    ) -> None:
        """Make messages again: of each window backward from one position on, and forward from another."""
        device, tiling = leaf.values.device, sweep_tiling(self.automaton, self.states)
        tiles = triton.cdiv(self.automaton, tiling.rows) * triton.cdiv(stride_of(self.states), tiling.columns)
        work = max(self.automaton, tiles)
        counters = torch.zeros(self.batch, 2, dtype=torch.int32, device=device)
        begins = torch.tensor(begin, dtype=torch.int32).to(device, non_blocking=True)
        for b in range(self.batch):
            _sweep[(1 if INTERPRETED else min(tiling.programs * multiprocessors(device) // 2, work), 2)](
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
                **({} if INTERPRETED else {"launch_cooperative_grid": True}),
            )

    def log_partition(self) -> Float[Tensor, " B"]:
        """log Z of each window, in float32; -inf if it is impossible."""
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
        """Complete sampled paths in place: ``states`` and ``latents`` hold each path's first pair already."""
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
