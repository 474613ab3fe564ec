"""The scores of all tokens once the latent path is known."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind, log_softmax
from codd.circuits.parameters import Emission


def scores(emission: Emission, ev: Evidence, latents: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
    """log w_t(v) + log E[z_t, v]; an observed position has 0 at its token and minus infinity elsewhere."""
    vocab, dtype = emission.stored.shape[-1], emission.dtype
    table = emission.log.detach()
    rows = table[torch.arange(ev.shape[1], device=ev.device), latents] if emission.per_position else table[latents]
    if ev.potentials is not None:
        weights = ev.scaled().to(dtype)
        weights = log_softmax(weights) if ev.normalised else weights
        rows = torch.where(ev.rows(Kind.DENSE)[..., None], rows + weights, rows)
    if ev.sparse is not None:
        tail = ev.sparse.log_tail_weight(vocab).to(dtype)[..., None].expand_as(rows)
        listed = tail.scatter(-1, ev.sparse.ids, ev.sparse.log_weights.to(dtype))
        rows = torch.where(ev.rows(Kind.SPARSE)[..., None], rows + listed, rows)
    if ev.tokens is not None:
        hit = torch.arange(vocab, device=ev.device) == ev.tokens[..., None]
        hard = torch.zeros_like(rows).masked_fill_(~hit, -torch.inf)
        rows = torch.where(ev.rows(Kind.OBSERVED)[..., None], hard, rows)
    return rows
