"""The scores of all tokens once the latent path is known."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind
from codd.circuits.parameters import Emission


def scores(
    emission: Emission, ev: Evidence, latents: Int[Tensor, "B L"], dtype: torch.dtype | None = None
) -> Float[Tensor, "B L V"]:
    """log w_t(v) + log E[z_t, v]; an observed position has 0 at its token and minus infinity elsewhere."""
    weights = ev.dense_log_weights(emission.stored.shape[-1], dtype or emission.dtype)
    positions = torch.arange(ev.shape[1], device=ev.device).expand(ev.shape)
    emitted = emission.log_rows(latents.flatten(), positions.flatten()).view(weights.shape)
    return weights + torch.where(ev.rows(Kind.OBSERVED)[..., None], 0.0, emitted)
