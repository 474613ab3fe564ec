"""One signature for each operation, four sets of implementations, and the choice between them."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from codd.circuits.ops import native
from codd.circuits.ops.chain import eager as chain_eager
from codd.circuits.ops.chain import reference as chain_reference
from codd.circuits.ops.commit import eager as commit_eager
from codd.circuits.ops.commit import native as commit_native
from codd.circuits.ops.leaf import eager as leaf_eager
from codd.circuits.ops.leaf import reference as leaf_reference
from codd.circuits.ops.path import eager as path_eager
from codd.circuits.ops.path import reference as path_reference
from codd.circuits.ops.sampling_rule import Committed
from codd.circuits.ops.scaled import Scaled
from codd.circuits.ops.scores import eager as scores_eager
from codd.errors import MissingDependency

if TYPE_CHECKING:
    from codd.circuits.protocol import Conditioner


@dataclass(frozen=True)
class Backend:
    """One implementation of every operation; the modules in this folder say what each computes."""

    name: str
    checked: bool
    """Whether this implementation can lose terms to underflow, so that its answers are checked where that is free."""
    leaf_values: Callable[..., Scaled]
    token_marginals: Callable[..., Tensor]
    emission_flow: Callable[..., Tensor]
    messages: Callable[..., Scaled]
    forward_backward: Callable[..., tuple[Scaled, Scaled]]
    transition_flow: Callable[..., tuple[Tensor, ...]]
    gate_flow: Callable[..., Tensor]
    sample_path: Callable[..., Tensor]
    scores: Callable[..., Tensor]
    joint_step: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """Latents, scores and log Z of a circuit and evidence."""
    conditioner: Callable[..., "Conditioner"]
    """What `HMM.incremental` gives."""
    commit_tokens: Callable[..., Committed]
    """The commit loop of `IncrementalConditioner`; the one on a GPU has its own."""


def _joint_step(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from codd.circuits import inference

    return inference.joint_step(*args)


def _conditioner(*args: Any) -> "Conditioner":
    from codd.circuits.incremental import IncrementalConditioner

    return IncrementalConditioner(*args)


def _recomputing(circuit: Any, ev: Any, *_: Any) -> "Conditioner":
    """Ask the circuit again after every token, and so the reference."""
    from codd.circuits.incremental import RecomputingConditioner

    return RecomputingConditioner(circuit, ev)


EAGER = Backend(
    name="eager",
    checked=True,
    leaf_values=leaf_eager.leaf_values,
    token_marginals=leaf_eager.token_marginals,
    emission_flow=leaf_eager.emission_flow,
    messages=chain_eager.messages,
    forward_backward=chain_eager.forward_backward,
    transition_flow=chain_eager.transition_flow,
    gate_flow=chain_eager.gate_flow,
    sample_path=path_eager.sample_path,
    scores=scores_eager.scores,
    joint_step=_joint_step,
    conditioner=_conditioner,
    commit_tokens=commit_eager.commit_tokens,
)

REFERENCE = replace(
    EAGER,
    name="reference",
    checked=False,
    leaf_values=leaf_reference.leaf_values,
    token_marginals=leaf_reference.token_marginals,
    emission_flow=leaf_reference.emission_flow,
    messages=chain_reference.messages,
    forward_backward=partial(chain_eager.forward_backward, by=chain_reference.messages),
    transition_flow=chain_reference.transition_flow,
    gate_flow=chain_reference.gate_flow,
    sample_path=path_reference.sample_path,
    scores=partial(scores_eager.scores, dtype=torch.float64),
    conditioner=_recomputing,
)

_COMPILED = partial(chain_eager.messages, compiled=True)
NATIVE = replace(
    EAGER,
    name="native",
    leaf_values=partial(leaf_eager.leaf_values, compiled=True),
    messages=_COMPILED,
    forward_backward=partial(chain_eager.forward_backward, by=_COMPILED),
    sample_path=partial(path_eager.sample_path, compiled=True),
    commit_tokens=commit_native.commit_tokens,
)


@cache
def _triton() -> Backend:
    if importlib.util.find_spec("triton") is None:
        raise MissingDependency("the Triton kernels need the package triton: pip install 'codd-lm[gpu]'")
    from codd.circuits.ops import kernels

    return replace(
        EAGER,
        name="triton",
        checked=False,
        leaf_values=kernels.leaf_values,
        messages=kernels.messages,
        forward_backward=kernels.forward_backward,
        sample_path=kernels.sample_path,
        scores=kernels.scores,
        joint_step=kernels.joint_step,
        conditioner=kernels.conditioner,
    )


_BY_NAME: dict[str, Callable[[], Backend]] = {
    "reference": lambda: REFERENCE,
    "eager": lambda: EAGER,
    "native": lambda: NATIVE,
    "triton": _triton,
}
_forced: ContextVar[str | None] = ContextVar("codd_backend", default=None)


def backend_for(device: torch.device, dtype: torch.dtype) -> Backend:
    """The implementation for tensors of this device and type."""
    forced = _forced.get()
    if forced is not None:
        return _BY_NAME[forced]()
    if dtype != torch.float32:
        return EAGER
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return _triton()
    return NATIVE if device.type == "cpu" and native.library() is not None else EAGER


@contextmanager
def use(name: str) -> Iterator[None]:
    """Force one implementation: "reference", "eager", "native" or "triton"."""
    if name not in _BY_NAME:
        raise ValueError(f"no such backend: {name!r}; there are {', '.join(_BY_NAME)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)
