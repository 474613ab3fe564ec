"""The upward and the downward pass over a circuit; a query is a pair of small functions handed to them.

A circuit is compiled to a `Program`. Every node has a slot: leaf k of the variable at position l has slot l * K + k
(variables with fewer than K leaves leave slots unused), inner nodes follow, children before parents. The upward pass
fills one number a slot and sequence; what it computes is decided by how a mixture joins its children (`log_sum`:
partition functions, `log_max`: best assignments). The downward pass carries a tensor, the reach of a node, from the
root to the leaves: a log-probability a sequence for expectations, the list of rows that pass through the node for
samples and best assignments.

Everything is in log space and float64, so that weights of e^10000 and of zero are answered exactly.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind, check_evidence
from codd.errors import InvalidEvidence

Reduce = Callable[[Tensor, int], Tensor]
Choose = Callable[[Tensor], Tensor]
Split = Callable[["Step", Tensor], Sequence[Tensor]]
Merge = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True, eq=False)
class Step:
    """An inner node: its slot, the slots of its children, and their log-weights (None for a product)."""

    slot: int
    children: Int[Tensor, " C"]
    log_weights: Float[Tensor, " C"] | None


@dataclass(frozen=True, eq=False)
class Program:
    """A circuit as the passes see it: the stacked leaves and the inner nodes, children before parents."""

    leaf_log_probs: Float[Tensor, "L K V"]
    steps: tuple[Step, ...]
    root: int

    @property
    def leaf_shape(self) -> tuple[int, int]:
        """(L, K): positions, and the largest number of leaves of one."""
        return self.leaf_log_probs.shape[0], self.leaf_log_probs.shape[1]

    @property
    def num_slots(self) -> int:
        """Leaf slots, used or not, and inner nodes."""
        return math.prod(self.leaf_shape) + len(self.steps)


@dataclass(frozen=True, eq=False)
class Values:
    """The results of the upward pass: each leaf summed over its tokens, and each slot of the circuit."""

    log_weights: Float[Tensor, "B L V"]
    tokens: Float[Tensor, "B L K"]
    slots: Float[Tensor, "M B"]
    root: Float[Tensor, " B"]


def fitting_log_weights(program: Program, ev: Evidence) -> Float[Tensor, "B L V"]:
    """The weights of the tokens in float64, or `InvalidEvidence` that says why the evidence does not fit."""
    _check_shapes(program, ev)
    vocab_size = program.leaf_log_probs.shape[2]
    if ev.tokens is not None:
        _check_ids(ev.tokens, ev.rows(Kind.OBSERVED), vocab_size, "tokens")
    if ev.sparse is not None:
        _check_ids(ev.sparse.ids, torch.ones_like(ev.sparse.ids, dtype=torch.bool), vocab_size, "sparse.ids")
    log_weights = ev.dense_log_weights(vocab_size).detach()
    _check_potentials(log_weights, "the log-weights of the tokens")
    if ev.latent_log_potentials is not None:
        _check_potentials(ev.latent_log_potentials, "latent_log_potentials")
    return log_weights


def log_sum(x: Tensor, dim: int) -> Tensor:
    """Join alternatives by their total weight."""
    return x.logsumexp(dim)


def log_max(x: Tensor, dim: int) -> Tensor:
    """Join alternatives by the best of them."""
    return x.amax(dim)


def log_ratio(part: Tensor, whole: Tensor) -> Tensor:
    """``part - whole``, and -inf (not NaN) where the whole is impossible."""
    return torch.where(whole == -math.inf, -math.inf, part - whole)


def upward(
    program: Program,
    log_weights: Float[Tensor, "B L V"],
    latent: Float[Tensor, "B L K"] | None,
    reduce: Reduce,
) -> Values:
    """Evaluate every node under the weights of tokens and of leaves."""
    length, num_leaves = program.leaf_shape
    table = program.leaf_log_probs
    # One position at a time: (B, K, V) is the largest tensor, never (B, L, K, V).
    tokens = torch.stack([reduce(log_weights[:, t, None] + table[t], -1) for t in range(length)], 1)
    leaves = tokens if latent is None else tokens + latent
    slots = torch.full((program.num_slots, len(log_weights)), -math.inf, dtype=torch.float64)
    slots[: length * num_leaves] = leaves.permute(1, 2, 0).reshape(length * num_leaves, -1)
    for step in program.steps:
        slots[step.slot] = slots[step.children].sum(0) if step.log_weights is None else reduce(_edges(step, slots), 0)
    return Values(log_weights, tokens, slots, slots[program.root].clone())


def downward(program: Program, start: Tensor, split: Split, merge: Merge) -> dict[int, Tensor]:
    """The reach of every slot: products pass theirs to all children, mixtures split it, a shared node merges."""
    inbox: dict[int, list[Tensor]] = {program.root: [start]}
    reach: dict[int, Tensor] = {}
    for step in reversed(program.steps):
        here = reach[step.slot] = merge(inbox.pop(step.slot))
        shares = [here] * len(step.children) if step.log_weights is None else split(step, here)
        for child, share in zip(step.children.tolist(), shares, strict=True):
            inbox.setdefault(child, []).append(share)
    return reach | {slot: merge(parts) for slot, parts in inbox.items()}


def log_reach(program: Program, values: Values) -> dict[int, Float[Tensor, " B"]]:
    """The log-probability that each node is active given the evidence; -inf everywhere if it is impossible."""

    def split(step: Step, here: Tensor) -> Sequence[Tensor]:
        return (here + log_shares(step, values)).unbind(0)

    def merge(parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.stack(list(parts)).logsumexp(0)

    start = torch.zeros_like(values.root).masked_fill(values.root == -math.inf, -math.inf)
    return downward(program, start, split, merge)


def log_shares(step: Step, values: Values) -> Float[Tensor, "C B"]:
    """The log-probability of each child of a mixture, given that the mixture is active and the evidence."""
    return log_ratio(_edges(step, values.slots), values.slots[step.slot])


def log_leaf_reach(program: Program, reach: dict[int, Tensor], batch: int) -> Float[Tensor, "B L K"]:
    """The reach of the leaves, in the layout of latent evidence."""
    impossible = torch.full((batch,), -math.inf, dtype=torch.float64)
    length, num_leaves = program.leaf_shape
    flat = torch.stack([reach.get(slot, impossible) for slot in range(length * num_leaves)])
    return flat.reshape(length, num_leaves, batch).permute(2, 0, 1)


def log_token_shares(program: Program, values: Values, position: int) -> Float[Tensor, "B K V"]:
    """The log-probability of each token at one position, given that leaf k is active and the evidence."""
    scores = values.log_weights[:, position, None] + program.leaf_log_probs[position]
    return log_ratio(scores, values.tokens[:, position, :, None])


def choose_leaves(program: Program, values: Values, num_rows: int, choose: Choose) -> Int[Tensor, "R L"]:
    """Go down with a choice at every mixture; row r belongs to sequence r modulo B. Returns leaf numbers."""
    batch = len(values.log_weights)

    def split(step: Step, rows: Tensor) -> Sequence[Tensor]:
        picked = choose(_edges(step, values.slots)[:, rows % batch].T)
        counts = picked.bincount(minlength=len(step.children))
        return torch.split(rows[picked.argsort(stable=True)], counts.tolist())

    def merge(parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    reach = downward(program, torch.arange(num_rows), split, merge)
    length, num_leaves = program.leaf_shape
    latents = torch.zeros(num_rows, length, dtype=torch.int64)
    for slot in range(length * num_leaves):
        if slot in reach:
            latents[reach[slot], slot // num_leaves] = slot % num_leaves
    return latents


def choose_tokens(program: Program, values: Values, latents: Int[Tensor, "R L"], choose: Choose) -> Int[Tensor, "R L"]:
    """A choice of a token at every position, given its leaf: tokens are independent then."""
    sequence = torch.arange(len(latents)) % max(len(values.log_weights), 1)
    columns = [
        choose(values.log_weights[sequence, t] + program.leaf_log_probs[t, latents[:, t]])
        for t in range(latents.shape[1])
    ]
    return torch.stack(columns, 1)


def draw(scores: Float[Tensor, "R C"], generator: torch.Generator | None) -> Int[Tensor, " R"]:
    """One category a row with probability proportional to exp(score), by inversion of the distribution function.

    A category of weight zero is never drawn: the uniform number is below one, and the first category whose
    cumulative weight is above it has added to it. Rows that are -inf throughout get the last category.
    """
    scores = scores.contiguous()  # searchsorted warns otherwise
    peak = scores.amax(-1, keepdim=True)
    cumulative = (scores - peak.masked_fill(peak == -math.inf, 0.0)).exp().cumsum(-1)
    uniform = torch.rand(len(scores), 1, dtype=torch.float64, generator=generator)
    picked = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return picked.squeeze(-1).clamp(max=scores.shape[-1] - 1)


def best(scores: Float[Tensor, "R C"]) -> Int[Tensor, " R"]:
    """The highest category of each row."""
    return scores.argmax(-1)


def _edges(step: Step, slots: Float[Tensor, "M B"]) -> Float[Tensor, "C B"]:
    assert step.log_weights is not None
    return slots[step.children] + step.log_weights[:, None]


def _check_shapes(program: Program, ev: Evidence) -> None:
    check_evidence(ev)
    length, num_leaves, vocab_size = program.leaf_log_probs.shape
    if ev.device.type != "cpu":
        raise InvalidEvidence(
            f"a general circuit answers on the CPU, the evidence is on {ev.device}: pass evidence.to('cpu')"
        )
    if ev.shape[1] != length:
        raise InvalidEvidence(
            f"the circuit has {length} variable(s), so evidence must be (B, {length}, ...), "
            f"found {ev.shape[1]} position(s)"
        )
    if ev.step_log_gates is not None:
        raise InvalidEvidence("step_log_gates weigh the inner states of a chain's steps; a general circuit has none")
    if ev.potentials is not None and ev.potentials.shape[-1] != vocab_size:
        raise InvalidEvidence(
            f"potentials must have V = {vocab_size} tokens (the size of the largest variable), "
            f"found {ev.potentials.shape[-1]}"
        )
    if ev.latent_log_potentials is not None and ev.latent_log_potentials.shape[-1] != num_leaves:
        raise InvalidEvidence(
            f"latent_log_potentials must have K = {num_leaves} entries a position (the largest number of leaves of a "
            f"variable), found {ev.latent_log_potentials.shape[-1]}"
        )


def _check_ids(ids: Tensor, used: Tensor, vocab_size: int, what: str) -> None:
    wrong = used & ((ids < 0) | (ids >= vocab_size))
    if bool(wrong.any()):
        where = wrong.nonzero()[0].tolist()
        raise InvalidEvidence(
            f"{what}{where} = {int(ids[tuple(where)])} is not a token: ids go from 0 to {vocab_size - 1}. "
            "A mask id belongs to a position that is not observed (observed=False)"
        )


def _check_potentials(log_values: Tensor, what: str) -> None:
    wrong = log_values.isnan() | (log_values == math.inf)
    if bool(wrong.any()):
        b, t, v = wrong.nonzero()[0].tolist()
        raise InvalidEvidence(
            f"{what} must be numbers below +inf (-inf means weight zero), found {float(log_values[b, t, v])} in "
            f"sequence {b}, position {t}, entry {v}"
        )
