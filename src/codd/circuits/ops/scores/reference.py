"""The scores of all tokens once the latent path is known, in float64."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind
from codd.circuits.parameters import Emission


def scores(emission: Emission, ev: Evidence, latents: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
    """log w_t(v) + log E[z_t, v]; an observed position has 0 at its token and minus infinity elsewhere."""
    weights = ev.dense_log_weights(emission.stored.shape[-1])
    rows = [emission.at(t).log.detach().double()[latents[:, t]] for t in range(ev.shape[1])]
    observed = ev.rows(Kind.OBSERVED)[..., None]
    return weights + torch.where(observed, 0.0, torch.stack(rows, 1))
