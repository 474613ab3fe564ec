"""Messages along the chain as matrix products on scaled values: two small operations a position.

Messages are rescaled every few positions only, and every message keeps its own logarithmic scale. What float32 could
lose on the way is looked for afterwards (`codd.circuits.underflow`), so the loop itself carries no checks.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from codd.circuits.ops import native
from codd.circuits.ops.scaled import Scaled
from codd.circuits.parameters import Transition

_RESCALE_EVERY = {torch.float32: 4, torch.float64: 16}


def messages(
    transition: Transition,
    start: Float[Tensor, " N"] | None,
    leaf: Scaled,
    reverse: bool,
    absorb: bool = False,
    *,
    compiled: bool = False,
) -> Scaled:
    """The messages of one pass along the chain; ``compiled``: by the loops in C, where they serve it.

    Forward: p(z_t, evidence before t), from ``start`` in logarithms. Reverse: p(evidence after t | z_t). With
    ``absorb`` each message comes multiplied with the leaf values of its own position, as the next step needs it.
    """
    values = leaf.values.transpose(0, 1).contiguous()
    norms = values.new_ones(*values.shape[:2], 1)
    first = None if start is None else start.detach().to(values.dtype).exp()
    factors, done = transition.transposed if reverse else transition.linear, None
    if compiled and len(factors) == 1 and factors[0].ndim == 2:
        every = _RESCALE_EVERY[values.dtype]
        done = native.chain_pass(factors[0], first, values, norms, reverse, not absorb, every)
    if done is None:
        gates = None if transition.gates is None else transition.gates[0].transpose(0, 1)
        done = _pass(factors, gates, first, values, norms, reverse, keep_messages=not absorb)
    out = done[0] if absorb else done[1]
    total = _scales(norms[..., 0], leaf.log_scale[..., 0].transpose(0, 1), reverse, absorb)
    if transition.gates is not None:
        total = total + _met_gates(transition.gates[1].transpose(0, 1).to(total.dtype), reverse)
    return Scaled(out.transpose(0, 1), total.transpose(0, 1)[..., None])


def forward_backward(
    transition: Transition, start: Float[Tensor, " N"], leaf: Scaled, *, by: Callable[..., Scaled] = messages
) -> tuple[Scaled, Scaled]:
    """Forward and backward messages, each by ``by``."""
    return by(transition, start, leaf, False), by(transition, None, leaf, True)


def _scales(
    norms: Float[Tensor, "L B"], scale: Float[Tensor, "L B"], reverse: bool, absorb: bool
) -> Float[Tensor, "L B"]:
    """The logarithm of all that a message (or, absorbing, a product) has met: norms taken out, and leaf scales."""
    # Over thousands of positions the sums of scales need more digits than any one of them.
    total = norms.to(torch.float64 if norms.device.type == "cpu" else norms.dtype).log() + scale
    total = total.flip(0).cumsum(0).flip(0) if reverse else total.cumsum(0)
    if not absorb:
        none = torch.zeros_like(total[:1])
        total = torch.cat([total[1:], none] if reverse else [none, total[:-1]])
    return total


def _met_gates(scale: Float[Tensor, "T B"], reverse: bool) -> Float[Tensor, "L B"]:
    """The logarithm of what was taken out of the gates on the way to each position."""
    none = scale.new_zeros(1, scale.shape[1])
    if reverse:
        return torch.cat([scale.flip(0).cumsum(0).flip(0), none])
    return torch.cat([none, scale.cumsum(0)])


def _pass(
    factors: tuple[Float[Tensor, "*steps _ _"], ...],
    gates: Float[Tensor, "T B R"] | None,
    first: Float[Tensor, " N"] | None,
    values: Float[Tensor, "L B N"],
    norms: Float[Tensor, "L B 1"],
    reverse: bool,
    keep_messages: bool,
) -> tuple[Float[Tensor, "L B N"], Float[Tensor, "K B N"]]:
    """Products of message and leaf (scaled; the norms go into ``norms``), and the messages themselves if wanted.

    On a CPU through NumPy, on the same memory: its calls cost a third of PyTorch's, and stay on one core.
    """
    every, smallest = _RESCALE_EVERY[values.dtype], torch.finfo(values.dtype).tiny
    products = torch.empty_like(values)
    carried = torch.empty_like(values if keep_messages else values[:1])
    on_host = values.device.type == "cpu"
    xp: Any = np if on_host else torch
    product: Any = np.dot if on_host else torch.mm

    def array(x: Tensor) -> Any:
        return x.numpy() if on_host else x

    rows, leaves, kept, norm = (list(array(x)) for x in (products, values, carried, norms))
    kept = kept if keep_messages else kept * len(rows)
    *inner, last = map(array, factors)
    weights = [] if gates is None else list(array(gates))
    order = range(len(rows) - 1, -1, -1) if reverse else range(len(rows))
    kept[order[0]][...] = 1.0 if first is None else array(first)
    for k, t in enumerate(order, 1):
        row = rows[t]
        xp.multiply(kept[t], leaves[t], out=row)
        if k % every == 0:
            norm[t][...] = xp.amax(row, axis=-1, keepdims=True).clip(smallest)
            row /= norm[t]
        if k < len(order):
            step = t - 1 if reverse else t
            for table in inner:
                row = row @ (table[step] if table.ndim == 3 else table)
                if weights:
                    row *= weights[step]
            product(row, last[step] if last.ndim == 3 else last, out=kept[order[k]])
    return products, carried


def transition_flow(
    transition: Transition,
    source: Scaled,
    target: Scaled,
    log_partition: Float[Tensor, " B"],
    weights: Float[Tensor, " B"] | None,
) -> tuple[Float[Tensor, "*steps _ _"], ...]:
    """Expected number of uses of each entry of each factor: one matrix product over all sequences and positions.

    ``source`` is forward message times leaf, ``target`` leaf times backward message.
    """
    left, right = source.values[:, :-1], target.values[:, 1:]
    log_ratio = source.log_scale[:, :-1] + target.log_scale[:, 1:] - log_partition[:, None, None]
    gates, gate_scale = (None, None) if transition.gates is None else transition.gates
    if gate_scale is not None:
        log_ratio = log_ratio + gate_scale[..., None]
    left, right = _shares(left, right, log_ratio, log_partition, weights)
    out = []
    factors = transition.linear
    for k, factor in enumerate(factors):
        before, after = left, right
        for f in factors[:k]:
            before = _apply(before, f) if gates is None else _apply(before, f) * gates
        for f in reversed(factors[k + 1 :]):
            after = _apply(after, f.transpose(-1, -2)) if gates is None else _apply(after, f.transpose(-1, -2)) * gates
        if transition.per_position:
            out.append(factor * torch.einsum("bti,btj->tij", before, after))
        else:
            out.append(factor * (before.flatten(0, 1).T @ after.flatten(0, 1)))
    return tuple(out)


def _shares(
    left: Float[Tensor, "B T N"],
    right: Float[Tensor, "B T N"],
    log_ratio: Float[Tensor, "B T 1"],
    log_partition: Float[Tensor, " B"],
    weights: Float[Tensor, " B"] | None,
) -> tuple[Float[Tensor, "B T N"], Float[Tensor, "B T N"]]:
    """Both sides of a step so that left times step times right is a probability, times the sequence's weight.

    The two messages carry scales of their own; their product is normalised, so neither overflows after the split.
    """
    left_top, right_top = _top(left), _top(right)
    share = (log_ratio + left_top.log() + right_top.log()).exp()
    share = torch.where(log_partition[:, None, None] > -torch.inf, share, 0).to(left.dtype)
    if weights is not None:  # a sequence without weight may hold infinities: it is answered elsewhere
        given = weights.to(share.dtype)[:, None, None]
        share = torch.where(given != 0, share * given, 0)
    return left / left_top * share, right / right_top


def gate_flow(
    transition: Transition,
    source: Scaled,
    target: Scaled,
    log_partition: Float[Tensor, " B"],
    weights: Float[Tensor, " B"] | None,
) -> Float[Tensor, "B T R"]:
    """The probability of each inner state at each step, times the sequence's weight."""
    assert transition.gates is not None
    gates, gate_scale = transition.gates
    log_ratio = source.log_scale[:, :-1] + target.log_scale[:, 1:] - log_partition[:, None, None]
    sides = (source.values[:, :-1], target.values[:, 1:])
    left, right = _shares(*sides, log_ratio + gate_scale[..., None], log_partition, weights)
    first, second = transition.linear
    return _apply(left, first) * gates * _apply(right, second.transpose(-1, -2))


def _top(x: Float[Tensor, "B T N"]) -> Float[Tensor, "B T 1"]:
    top = x.amax(-1, keepdim=True)
    return torch.where(top > 0, top, 1)


def _apply(x: Float[Tensor, "B T I"], factor: Float[Tensor, "*T I J"]) -> Float[Tensor, "B T J"]:
    return torch.einsum("bti,tij->btj", x, factor) if factor.ndim == 3 else x @ factor
