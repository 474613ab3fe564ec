"""The GPU implementations of all operations, and the fused joint step. Importing this needs Triton."""

from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence
from codd.circuits.ops.chain.triton import forward_backward as forward_backward
from codd.circuits.ops.chain.triton import messages as messages
from codd.circuits.ops.draw.triton import dense_marginals as dense_marginals
from codd.circuits.ops.draw.triton import propose as propose
from codd.circuits.ops.leaf.triton import fused as fused
from codd.circuits.ops.leaf.triton import leaf_values as leaf_values
from codd.circuits.ops.path.triton import launch as launch_path
from codd.circuits.ops.path.triton import sample_path as sample_path
from codd.circuits.ops.pick.triton import candidate_marginals as candidate_marginals
from codd.circuits.ops.pick.triton import pick as pick
from codd.circuits.ops.pick.triton import prepare as prepare
from codd.circuits.ops.pick.triton import take as take
from codd.circuits.ops.scores.triton import launch as launch_scores
from codd.circuits.ops.scores.triton import scores as scores
from codd.circuits.parameters import Emission, Transition


def joint_step(
    emission: Emission,
    transition: Transition,
    log_initial: Float[Tensor, " N"],
    ev: Evidence,
    uniforms: Float[Tensor, "B L"],
) -> tuple[Int[Tensor, "B L"], Float[Tensor, "B L V"], Float[Tensor, " B"]]:
    """Latents, new scores and log Z without a product, a reduction or a normaliser between the launches."""
    leaf, totals = fused(emission, ev)
    backward = messages(transition, None, leaf, True)
    path, log_partition = launch_path(transition, log_initial, leaf, backward, uniforms[None])
    return path[0], launch_scores(emission, ev, path[0], totals), log_partition
