"""The latent sampler: one path of latent states from its posterior; given it, positions are independent."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from codd.coupling import Coupled
from codd.decoding.options import Options
from codd.decoding.samplers.factorized import sample_factorized
from codd.decoding.samplers.ranking import Noise, Ranking, temper


def sample_latent(
    joint: Coupled,
    rows: Int[Tensor, " R"] | None,
    count: int,
    options: Options,
    noise: Noise,
    open_rows: Bool[Tensor, " R"] | None = None,
) -> Ranking:
    """Rank positions of a window (B = 1) given one latent path; void where the evidence has probability zero.

    ``rows`` are positions in the window; None: all of them, of which some are open. ``noise`` is the whole window's.
    """
    step = joint.joint_step(noise.path[None])
    scores = step.scores[0] if rows is None else step.scores[0, rows]
    if options.tempering == "paper":
        scores = temper(scores, options.circuit_temperature)
    ranking = sample_factorized(scores, count, options, noise if rows is None else noise.at(rows), open_rows)
    return ranking._replace(valid=step.log_partition[0] > -torch.inf)
