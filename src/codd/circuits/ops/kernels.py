"""The GPU implementations of all operations, and the fused joint step. Importing this needs Triton."""

from typing import TYPE_CHECKING

from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits import inference
from codd.circuits.evidence import Evidence
from codd.circuits.incremental import IncrementalConditioner
from codd.circuits.incremental_device import DeviceConditioner
from codd.circuits.ops.backend import EAGER, Backend
from codd.circuits.ops.chain.triton import forward_backward as forward_backward
from codd.circuits.ops.chain.triton import messages as messages
from codd.circuits.ops.leaf.triton import fused
from codd.circuits.ops.leaf.triton import leaf_values as leaf_values
from codd.circuits.ops.path.triton import launch as launch_path
from codd.circuits.ops.path.triton import sample_path as sample_path
from codd.circuits.ops.scores.triton import launch as launch_scores
from codd.circuits.ops.scores.triton import scores as scores

if TYPE_CHECKING:
    from codd.circuits.hmm import HMM


def joint_step(
    hmm: "HMM", ev: Evidence, uniforms: Float[Tensor, "B L"]
) -> tuple[Int[Tensor, "B L"], Float[Tensor, "B L V"], Float[Tensor, " B"]]:
    """Latents, new scores and log Z without a product, a reduction or a normaliser between the launches.

    For one dense transition, one emission table and no sparse evidence; the rest goes the general way.
    """
    if not hmm.homogeneous or hmm.transition.low_rank or ev.sparse is not None:
        return inference.joint_step(hmm, ev, uniforms)
    leaf, totals = fused(hmm.emission, ev)
    backward = messages(hmm.transition, None, leaf, True)
    path, log_partition = launch_path(hmm.transition, hmm.log_initial, leaf, backward, uniforms[None])
    return path[0], launch_scores(hmm.emission, ev, path[0], totals), log_partition


def conditioner(hmm: "HMM", ev: Evidence, candidates: int | None, backend: Backend) -> IncrementalConditioner:
    """With kernels for dense evidence and one emission table, else in PyTorch."""
    if ev.potentials is None or ev.sparse is not None or hmm.emission.per_position:
        return IncrementalConditioner(hmm, ev, candidates, EAGER)
    return DeviceConditioner(hmm, ev, candidates, backend)
