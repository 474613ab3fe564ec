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
    dtype, vocab = dtype or emission.dtype, emission.stored.shape[-1]
    observed, positions = ev.rows(Kind.OBSERVED), torch.arange(ev.shape[1], device=ev.device).expand(ev.shape)
    if ev.device.type != "cpu":  # where listing rows would wait for the device
        emitted = emission.log_rows(latents.flatten(), positions.flatten()).view(*ev.shape, vocab)
        return ev.dense_log_weights(vocab, dtype) + torch.where(observed[..., None], 0.0, emitted)
    b, t = (~observed).nonzero(as_tuple=True)
    at = b, t
    found = ev.dense_log_weights(vocab, dtype, at) + emission.log_rows(latents[at], t)
    if ev.tokens is None or len(b) == observed.numel():
        return found.view(*ev.shape, vocab)
    out = torch.full((*ev.shape, vocab), -torch.inf, dtype=dtype)
    out.scatter_(-1, ev.tokens.clamp(0, vocab - 1)[..., None], 0.0)  # a mask may be any number
    return out.index_put_(at, found)
