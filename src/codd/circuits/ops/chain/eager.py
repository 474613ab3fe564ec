"""Messages along the chain as matrix products on scaled values: two small operations a position.

Messages are rescaled every few positions only, and every message keeps its own logarithmic scale. What float32 could
lose on the way is looked for afterwards (`codd.circuits.underflow`), so the loop itself carries no checks.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from codd.circuits.ops import native
from codd.circuits.ops.scaled import Scaled
from codd.circuits.parameters import Transition

Gates: TypeAlias = tuple[Float[Tensor, "B T R"], Float[Tensor, "B T"]] | None
_RESCALE_EVERY = {torch.float32: 4, torch.float64: 16}


def messages(
    transition: Transition,
    start: Float[Tensor, " N"] | None,
    leaf: Scaled,
    reverse: bool,
    *,
    compiled: bool = False,
) -> Scaled:
    """The messages of one pass along the chain; ``compiled``: by the loop in C, where it serves.

    Forward: p(z_t, evidence before t), from ``start`` in logarithms. Reverse: p(evidence after t | z_t).
    """
    values, scale = leaf.values.transpose(0, 1).contiguous(), leaf.log_scale[..., 0].transpose(0, 1)
    first = None if start is None else start.detach().to(values.dtype).exp()
    factors, done = transition.transposed if reverse else transition.linear, None
    if compiled and not (transition.low_rank or transition.stepwise):
        done = native.chain_pass(factors[0], first, values, scale, reverse, _RESCALE_EVERY[values.dtype])
    if done is None:
        carried, norms = _pass(factors, transition.gates, first, values, reverse)
        done = carried, _scales(norms[..., 0], scale, transition.gates, reverse)
    carried, scale = (x.transpose(0, 1) for x in done)
    return Scaled(carried, scale[..., None])


def forward_backward(
    transition: Transition, start: Float[Tensor, " N"], leaf: Scaled, *, by: Callable[..., Scaled] = messages
) -> tuple[Scaled, Scaled]:
    """Forward and backward messages, each by ``by``."""
    return by(transition, start, leaf, False), by(transition, None, leaf, True)


def _scales(
    norms: Float[Tensor, "L B"], scale: Float[Tensor, "L B"], gates: Gates, reverse: bool
) -> Float[Tensor, "L B"]:
    """The logarithm of all that was taken out on the way to each message: norms, leaf and gate scales."""
    # Over thousands of positions the sums of scales need more digits than any one of them.
    met = norms.to(torch.float64 if norms.device.type == "cpu" else norms.dtype).log() + scale
    met = met[1:] if reverse else met[:-1]
    total = met if gates is None else met + gates[1].transpose(0, 1)
    total = total.flip(0).cumsum(0).flip(0) if reverse else total.cumsum(0)
    return pad(total, (0, 0, 0, 1) if reverse else (0, 0, 1, 0))


def _pass(
    factors: tuple[Float[Tensor, "*steps _ _"], ...],
    gates: Gates,
    first: Float[Tensor, " N"] | None,
    values: Float[Tensor, "L B N"],
    reverse: bool,
) -> tuple[Float[Tensor, "L B N"], Float[Tensor, "L B 1"]]:
    """Messages, and what their products with the leaf values were divided by on the way to the next.

    On a CPU through NumPy, on the same memory: its calls cost a third of PyTorch's, and stay on one core.
    """
    every, smallest = _RESCALE_EVERY[values.dtype], torch.finfo(values.dtype).tiny
    carried, norms = torch.empty_like(values), values.new_ones(*values.shape[:2], 1)
    on_host = values.device.type == "cpu"
    xp: Any = np if on_host else torch
    product: Any = np.dot if on_host else torch.mm

    def array(x: Tensor) -> Any:
        return x.numpy() if on_host else x

    leaves, kept, norm = (list(array(x)) for x in (values, carried, norms))
    *inner, last = map(array, factors)
    weights = [] if gates is None else list(array(gates[0].transpose(0, 1)))
    order = range(len(kept) - 1, -1, -1) if reverse else range(len(kept))
    kept[order[0]][...] = 1.0 if first is None else array(first)
    for k, (t, after) in enumerate(pairwise(order), 1):
        row = kept[t] * leaves[t]
        if k % every == 0:
            norm[t][...] = xp.amax(row, axis=-1, keepdims=True).clip(smallest)
            row /= norm[t]
        step = min(t, after)
        for table in inner:
            row = row @ (table[step] if table.ndim == 3 else table)
            if weights:
                row *= weights[step]
        product(row, last[step] if last.ndim == 3 else last, out=kept[after])
    return carried, norms


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
    left, right = _shares(transition, source, target, log_partition, weights)
    gates = 1 if transition.gates is None else transition.gates[0]
    out = []
    factors = transition.linear
    for k, factor in enumerate(factors):
        before, after = left, right
        for f in factors[:k]:
            before = _apply(before, f) * gates
        for f in reversed(factors[k + 1 :]):
            after = _apply(after, f.transpose(-1, -2)) * gates
        if transition.per_position:
            out.append(factor * torch.einsum("bti,btj->tij", before, after))
        else:
            out.append(factor * (before.flatten(0, 1).T @ after.flatten(0, 1)))
    return tuple(out)


def _shares(
    transition: Transition,
    source: Scaled,
    target: Scaled,
    log_partition: Float[Tensor, " B"],
    weights: Float[Tensor, " B"] | None,
) -> tuple[Float[Tensor, "B T N"], Float[Tensor, "B T N"]]:
    """Both sides of a step so that left times step times right is a probability, times the sequence's weight.

    The two messages carry scales of their own; their product is normalised, so neither overflows after the split.
    """
    left, right = source.values[:, :-1], target.values[:, 1:]
    log_ratio = source.log_scale[:, :-1] + target.log_scale[:, 1:] - log_partition[:, None, None]
    if transition.gates is not None:
        log_ratio = log_ratio + transition.gates[1][..., None]
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
    left, right = _shares(transition, source, target, log_partition, weights)
    first, second = transition.linear
    return _apply(left, first) * transition.gates[0] * _apply(right, second.transpose(-1, -2))


def _top(x: Float[Tensor, "B T N"]) -> Float[Tensor, "B T 1"]:
    top = x.amax(-1, keepdim=True)
    return torch.where(top > 0, top, 1)


def _apply(x: Float[Tensor, "B T I"], factor: Float[Tensor, "*T I J"]) -> Float[Tensor, "B T J"]:
    return torch.einsum("bti,tij->btj", x, factor) if factor.ndim == 3 else x @ factor
