"""Messages along the chain as matrix products on scaled values: two small operations a position.

Messages are rescaled every few positions only, and every message keeps its own logarithmic scale. What float32 could
lose on the way is looked for afterwards (``lost_terms``), so the loop itself carries no checks.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from codd.circuits.ops.scaled import Scaled
from codd.circuits.parameters import Transition

_RESCALE_EVERY = {torch.float32: 4, torch.float64: 16}
_FLUSH = {torch.float32: 1e-36, torch.float64: 1e-300}


def _factors(transition: Transition, reverse: bool) -> tuple[Float[Tensor, "*steps _ _"], ...]:
    return transition.transposed if reverse else transition.linear


def messages(transition: Transition, start: Float[Tensor, " N"] | None, leaf: Scaled, reverse: bool) -> Scaled:
    """Forward: p(z_t, evidence before t), from ``start`` in logarithms. Reverse: p(evidence after t | z_t)."""
    values, scale = leaf.values.transpose(0, 1).contiguous(), leaf.log_scale[..., 0].transpose(0, 1)
    factors = _factors(transition, reverse)
    first = None if start is None else start.detach().to(values.dtype).exp()
    norms = values.new_ones(*values.shape[:2], 1)
    walk = _walk_numpy if values.device.type == "cpu" else _walk_torch
    return _assemble(walk(factors, first, values, norms, reverse), norms, scale, reverse)


def _walk_torch(
    factors: tuple[Float[Tensor, "*steps _ _"], ...],
    first: Float[Tensor, " N"] | None,
    values: Float[Tensor, "L B N"],
    norms: Float[Tensor, "L B 1"],
    reverse: bool,
) -> Float[Tensor, "L B N"]:
    """All messages, scaled; the norms that were taken out on the way are written into ``norms``."""
    every, smallest = _RESCALE_EVERY[values.dtype], torch.finfo(values.dtype).tiny
    out = torch.empty_like(values)
    order = range(len(values) - 1, -1, -1) if reverse else range(len(values))
    out[order[0]] = 1.0 if first is None else first
    for k in range(len(values) - 1):
        t, to = order[k], order[k + 1]
        work = out[t] * values[t]
        if k % every == every - 1:
            norms[to] = work.amax(-1, keepdim=True).clamp_min_(smallest)
            work = work / norms[to]
        for factor in factors:
            work = work @ (factor[t - 1 if reverse else t] if factor.ndim == 3 else factor)
        out[to] = work
    return out


def _walk_numpy(
    factors: tuple[Float[Tensor, "*steps _ _"], ...],
    first: Float[Tensor, " N"] | None,
    values: Float[Tensor, "L B N"],
    norms: Float[Tensor, "L B 1"],
    reverse: bool,
) -> Float[Tensor, "L B N"]:
    """The same through NumPy: its calls cost a third of PyTorch's, and products this small stay on one core."""
    every, smallest = _RESCALE_EVERY[values.dtype], torch.finfo(values.dtype).tiny
    result = torch.empty_like(values)
    out, leaf, norm = result.numpy(), values.numpy(), norms.numpy()
    tables = [factor.numpy() for factor in factors]
    order = range(len(leaf) - 1, -1, -1) if reverse else range(len(leaf))
    out[order[0]] = 1.0 if first is None else first.numpy()
    work = np.empty_like(out[0])
    for k in range(len(leaf) - 1):
        t, to = order[k], order[k + 1]
        np.multiply(out[t], leaf[t], out=work)
        if k % every == every - 1:
            np.maximum(work.max(-1, keepdims=True, out=norm[to]), smallest, out=norm[to])
            np.divide(work, norm[to], out=work)
        source, step = work, t - 1 if reverse else t
        for table in tables[:-1]:
            source = source @ (table[step] if table.ndim == 3 else table)
        np.dot(source, tables[-1][step] if tables[-1].ndim == 3 else tables[-1], out=out[to])
    return result


def _assemble(
    out: Float[Tensor, "L B N"], norms: Float[Tensor, "L B 1"], scale: Float[Tensor, "L B"], reverse: bool
) -> Scaled:
    """Give every message the scale of the leaves and norms that it has absorbed."""
    total = norms[..., 0].log()
    if reverse:
        total[:-1] += scale[1:]
        total = total.flip(0)
    else:
        total[1:] += scale[:-1]
    # Over thousands of positions the sums of scales need more digits than any one of them.
    total = total.cumsum(0, dtype=torch.float64 if norms.device.type == "cpu" else norms.dtype)
    return Scaled(out.transpose(0, 1), (total.flip(0) if reverse else total).transpose(0, 1)[..., None])


def lost_terms(
    transition: Transition,
    start: Float[Tensor, " N"] | None,
    leaf: Scaled,
    message: Scaled,
    reverse: bool,
    smallest: float = 0.0,
) -> Bool[Tensor, " B"] | None:
    """The sequences in which a product that is not zero may have been lost to underflow; None if there are none.

    ``smallest`` is a lower bound of the leaf values: with all factors far from zero there is nothing to look for.
    """
    flush = _FLUSH[leaf.values.dtype]
    got, values = message.values.transpose(0, 1), leaf.values.transpose(0, 1)
    if smallest > 0 and float(got.min()) * smallest >= flush:
        return None
    work = got * values
    lost = ((work < flush) & (got > 0) & (values > 0)).any(-1).any(0)
    if start is not None:
        lost |= ((got[0] < flush) & (start.detach() > -torch.inf) & (values[0] > 0)).any(-1)
    if len(values) > 1 and bool((got < flush).any()):
        lost |= _lost_in_product(transition, work, got, flush, reverse)
    return lost if bool(lost.any()) else None


def _lost_in_product(
    transition: Transition,
    work: Float[Tensor, "L B N"],
    got: Float[Tensor, "L B N"],
    flush: float,
    reverse: bool,
) -> Bool[Tensor, " B"]:
    """Sequences in which a message entry is (nearly) zero although some path supports it."""
    source, target = (work[1:], got[:-1]) if reverse else (work[:-1], got[1:])
    support = (source > 0).to(work.dtype)
    tables = [f.mT for f in reversed(transition.support)] if reverse else transition.support
    for table in tables:
        support = ((support @ table.to(work.dtype)) > 0).to(work.dtype)
    return ((support > 0) & (target < flush)).any(-1).any(0)


def transition_flow(
    transition: Transition,
    forward: Scaled,
    leaf: Scaled,
    backward: Scaled,
    log_partition: Float[Tensor, " B"],
    weights: Float[Tensor, " B"] | None,
) -> tuple[Float[Tensor, "*steps _ _"], ...]:
    """Expected number of uses of each entry of each factor: one matrix product over all sequences and positions."""
    source, target = forward * leaf, leaf * backward
    left, right = source.values[:, :-1], target.values[:, 1:]
    log_ratio = source.log_scale[:, :-1] + target.log_scale[:, 1:] - log_partition[:, None, None]
    # The two messages carry scales of their own; their product is normalised, so neither overflows after the split.
    left_top, right_top = _top(left), _top(right)
    share = (log_ratio + left_top.log() + right_top.log()).exp()
    share = torch.where(log_partition[:, None, None] > -torch.inf, share, 0).to(left.dtype)
    if weights is not None:  # a sequence without weight may hold infinities: it is answered elsewhere
        given = weights.to(share.dtype)[:, None, None]
        share = torch.where(given != 0, share * given, 0)
    left, right = left / left_top * share, right / right_top
    out = []
    factors = transition.linear
    for k, factor in enumerate(factors):
        before, after = left, right
        for f in factors[:k]:
            before = _apply(before, f)
        for f in reversed(factors[k + 1 :]):
            after = _apply(after, f.transpose(-1, -2))
        if transition.per_position:
            out.append(factor * torch.einsum("bti,btj->tij", before, after))
        else:
            out.append(factor * (before.flatten(0, 1).T @ after.flatten(0, 1)))
    return tuple(out)


def _top(x: Float[Tensor, "B T N"]) -> Float[Tensor, "B T 1"]:
    top = x.amax(-1, keepdim=True)
    return torch.where(top > 0, top, 1)


def _apply(x: Float[Tensor, "B T I"], factor: Float[Tensor, "*T I J"]) -> Float[Tensor, "B T J"]:
    return torch.einsum("bti,tij->btj", x, factor) if factor.ndim == 3 else x @ factor
