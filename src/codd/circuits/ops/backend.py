"""One signature for each operation, three sets of implementations, and the choice between them."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from codd.circuits.ops.chain import eager as chain_eager
from codd.circuits.ops.chain import reference as chain_reference
from codd.circuits.ops.draw.eager import Marginals
from codd.circuits.ops.leaf import eager as leaf_eager
from codd.circuits.ops.leaf import reference as leaf_reference
from codd.circuits.ops.path import eager as path_eager
from codd.circuits.ops.path import reference as path_reference
from codd.circuits.ops.pick import eager as pick_eager
from codd.circuits.ops.pick.eager import Offers, Picked
from codd.circuits.ops.scaled import Scaled
from codd.circuits.ops.scores import eager as scores_eager
from codd.circuits.ops.scores import reference as scores_reference
from codd.errors import MissingDependency


@dataclass(frozen=True)
class Backend:
    """One implementation of every operation; the modules in this folder say what each computes."""

    name: str
    leaf_values: Callable[..., Scaled]
    token_marginals: Callable[..., Tensor]
    emission_flow: Callable[..., Tensor]
    messages: Callable[..., Scaled]
    transition_flow: Callable[..., tuple[Tensor, ...]]
    sample_path: Callable[..., Tensor]
    scores: Callable[..., Tensor]
    checked: bool
    """Whether this implementation can lose terms to underflow, so that its answers are checked where that is free."""
    joint_step: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    """Latents, scores and log Z in one go, for one dense transition and one emission table."""
    forward_backward: Callable[..., tuple[Scaled, Scaled]] | None = None
    """Forward and backward messages in one go."""
    leaf_totals: Callable[..., tuple[Scaled, Tensor]] | None = None
    """Leaf values with the normalisers of the dense rows, for one emission table and no sparse evidence."""
    prepare: Callable[..., tuple[Tensor, Tensor]] | None = None
    """Columns and log-weights of candidates in one go, from what ``leaf_totals`` gives."""
    candidate_marginals: Callable[..., Tensor] = pick_eager.candidate_marginals
    pick: Callable[..., Picked] = pick_eager.pick
    dense_marginals: Callable[..., Marginals] | None = None
    """Log-probabilities of all tokens after a pick, for one emission table, from what ``leaf_totals`` gives."""
    propose: Callable[..., Offers] | None = None
    """Tokens for all positions, from what ``dense_marginals`` gives."""
    take: Callable[..., Picked] | None = None
    """The first of them, committed, in one go."""


REFERENCE = Backend(
    name="reference",
    leaf_values=leaf_reference.leaf_values,
    token_marginals=leaf_reference.token_marginals,
    emission_flow=leaf_reference.emission_flow,
    messages=chain_reference.messages,
    transition_flow=chain_reference.transition_flow,
    sample_path=path_reference.sample_path,
    scores=scores_reference.scores,
    checked=False,
)

EAGER = Backend(
    name="eager",
    leaf_values=leaf_eager.leaf_values,
    token_marginals=leaf_eager.token_marginals,
    emission_flow=leaf_eager.emission_flow,
    messages=chain_eager.messages,
    transition_flow=chain_eager.transition_flow,
    sample_path=path_eager.sample_path,
    scores=scores_eager.scores,
    checked=True,
    forward_backward=chain_eager.forward_backward,
)


@cache
def _triton() -> Backend:
    if importlib.util.find_spec("triton") is None:
        raise MissingDependency("the Triton kernels need the package triton: pip install 'codd-lm[gpu]'")
    from codd.circuits.ops import kernels

    return Backend(
        name="triton",
        leaf_values=kernels.leaf_values,
        token_marginals=leaf_eager.token_marginals,
        emission_flow=leaf_eager.emission_flow,
        messages=kernels.messages,
        transition_flow=chain_eager.transition_flow,
        sample_path=kernels.sample_path,
        scores=kernels.scores,
        checked=False,
        joint_step=kernels.joint_step,
        forward_backward=kernels.forward_backward,
        leaf_totals=kernels.fused,
        prepare=kernels.prepare,
        candidate_marginals=kernels.candidate_marginals,
        pick=kernels.pick,
        dense_marginals=kernels.dense_marginals,
        propose=kernels.propose,
        take=kernels.take,
    )


_BY_NAME: dict[str, Callable[[], Backend]] = {
    "reference": lambda: REFERENCE,
    "eager": lambda: EAGER,
    "triton": _triton,
}
_forced: ContextVar[str | None] = ContextVar("codd_backend", default=None)


def backend_for(device: torch.device, dtype: torch.dtype) -> Backend:
    """The implementation for tensors of this device and type."""
    forced = _forced.get()
    if forced is not None:
        return _BY_NAME[forced]()
    fast = device.type == "cuda" and dtype == torch.float32 and importlib.util.find_spec("triton") is not None
    return _triton() if fast else EAGER


@contextmanager
def use(name: str) -> Iterator[None]:
    """Force one implementation: "reference", "eager" or "triton"."""
    if name not in _BY_NAME:
        raise ValueError(f"no such backend: {name!r}; there are {', '.join(_BY_NAME)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)
