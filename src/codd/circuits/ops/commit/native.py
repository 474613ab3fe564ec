"""The commit loop in C: all tokens of a window in one call, for float32, one dense matrix and one emission table."""

import ctypes
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.ops import native
from codd.circuits.ops.commit import eager
from codd.circuits.ops.sampling_rule import ORDERS, ROUNDING, Committed, SamplingRule

if TYPE_CHECKING:
    from codd.circuits.incremental import IncrementalConditioner

FEW = 4
"""Candidates of a position that are looked at before more of them are."""
FAINT = 1e-10
"""A sum of weights, each with its largest at one, from which on what float32 lost is less than it rounds off."""


class _Window(ctypes.Structure):
    """The C struct ``window`` of native.c, field by field."""

    _tables = ("matrix", "columns", "latent", "leaf", "forward", "backward", "work", "candidates", "weights")
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_tables, "open", "given", "uniforms", "by_id", "found")),
        *((name, ctypes.c_int64) for name in ("length", "n", "k", "compact", "rule")),
        ("power", ctypes.c_double),
    )


def commit_tokens(
    conditioner: "IncrementalConditioner",
    open_: Bool[Tensor, " L"],
    uniforms: Float[Tensor, " L"],
    given: Float[Tensor, " L"] | None,
    rule: SamplingRule,
) -> Committed:
    """As `eager.commit_tokens`, which goes on where candidates or float32 do not suffice.

    Where the loop in C comes to the end, nothing is committed to the conditioner.
    """
    chain = conditioner.chain(rule.candidates) if _serves(rule) else None
    if chain is None:
        return eager.commit_tokens(conditioner, open_, uniforms, given, rule)
    found, complete = _run(chain, open_, uniforms, given, rule)
    if complete:
        return found
    done = range(len(found.positions))
    steps = [(found.positions[i : i + 1], found.tokens[i : i + 1], found.probabilities[i : i + 1]) for i in done]
    return eager.commit_tokens(conditioner, open_, uniforms, given, rule, steps)


def _serves(rule: SamplingRule) -> bool:
    """Whether the loop knows the rule. It draws from a few candidates, which bound the others up to temperature 1."""
    if rule.dense or rule.entropy_budget is not None or rule.truncated:
        return False
    if rule.temperature == 0:
        return rule.candidates_suffice
    return rule.temperature <= 1 and rule.order == "low_confidence"


Chain = tuple[
    Tensor,  # matrix: the transition as float32, or in 16 bits as `native.narrowed` makes it
    Float[Tensor, " N"],  # the initial distribution
    Float[Tensor, "V N"],  # columns of the emission
    Float[Tensor, "L N"] | None,  # latent potentials
    Float[Tensor, "L N"],  # leaf values
    Int[Tensor, "L K"],  # candidates of each position, by descending weight
    Float[Tensor, "L K"],  # weights: p = weight * sum(cavity latent column) / sum(cavity leaf)
]


def _run(
    chain: Chain,
    open_: Bool[Tensor, " L"],
    uniforms: Float[Tensor, " L"],
    given: Float[Tensor, " L"] | None,
    rule: SamplingRule,
) -> tuple[Committed, bool]:
    """See ``codd_pick``: what would be committed, and whether that is all."""
    matrix, initial, columns, latent, leaf, candidates, weights = chain
    (length, states), width = leaf.shape, candidates.shape[-1]
    room = torch.empty(2 * length + 2, states)
    room[0], room[2 * length - 1] = initial, 1
    forward, backward, work = room[:length], room[length : 2 * length], room[2 * length :]
    leaf, candidates = leaf.clone(memory_format=torch.contiguous_format), candidates.contiguous()
    drawn = rule.temperature > 0
    numbers = uniforms.float().contiguous() if drawn else None
    by_id = candidates.argsort(-1) if drawn else None
    order = None if given is None else given.float().contiguous()
    tables = (matrix, columns, latent, leaf, forward, backward, work, candidates)
    open_ = open_.to(torch.uint8) if rule.due is None else open_.to(torch.uint8) * (2 - rule.due.to(torch.uint8))
    kept = (*tables, weights.clone(), open_.clone(), order, numbers, by_id, torch.empty(length, width))
    sizes = (length, states, width, matrix.dtype == torch.int16, ORDERS.index(rule.order))
    power = 1 / rule.temperature if drawn else 1.0
    window = _Window(*(None if x is None else x.data_ptr() for x in kept), *sizes, power)
    beliefs = torch.empty(length, 4, dtype=torch.int64)  # three floats and two numbers each
    most = min(int(open_.count_nonzero()), rule.most)
    positions, tokens = torch.empty(2, max(most, 1), dtype=torch.int64)
    probabilities, complete = torch.empty(max(most, 1)), ctypes.c_int64()
    limits = (most, rule.least, rule.limits[0] or 0.0, FEW, ROUNDING, FAINT)
    results = (positions.data_ptr(), tokens.data_ptr(), probabilities.data_ptr(), ctypes.addressof(complete))
    loaded = native.library()
    assert loaded is not None  # else this backend is not chosen
    done = loaded.codd_pick(ctypes.byref(window), beliefs.data_ptr(), *limits, *results)
    keep = torch.ones(done, dtype=torch.bool)
    found = Committed(positions[:done], tokens[:done], probabilities[:done], keep, torch.ones((), dtype=torch.bool))
    return found, bool(complete.value)
