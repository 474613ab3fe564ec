"""The scores of all tokens once the latent path is known."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind, log_softmax
from codd.circuits.ops.leaf.eager import Rows, dense_rows, present
from codd.circuits.parameters import Emission


def scores(emission: Emission, ev: Evidence, latents: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
    """log w_t(v) + log E[z_t, v]; an observed position has 0 at its token and minus infinity elsewhere.

    Kind by kind: an observed position needs no pass over the vocabulary but the one that fills it.
    """
    vocab, dtype = emission.stored.shape[-1], emission.dtype
    out = torch.empty(*ev.shape, vocab, dtype=dtype, device=ev.device)
    positions = torch.arange(ev.shape[1], device=ev.device).expand(ev.shape)
    for kind in present(ev):
        rows = Rows(ev.rows(kind))
        if not rows:
            continue
        if kind == Kind.OBSERVED:
            assert ev.tokens is not None
            hard = torch.full((len(rows), vocab), -torch.inf, dtype=dtype, device=ev.device)
            tokens = rows.take(ev.tokens).clamp(0, vocab - 1)  # on a GPU these are all rows: a mask may be any number
            rows.put(out, hard.scatter_(-1, tokens[:, None], 0.0))
            continue
        scored = emission.log_rows(rows.take(latents), rows.take(positions))
        if kind == Kind.DENSE:
            weights = dense_rows(ev, rows, dtype)
            scored = scored + (log_softmax(weights) if ev.normalised else weights)
        elif kind == Kind.SPARSE:
            assert ev.sparse is not None
            tail = rows.take(ev.sparse.log_tail_weight(vocab)).to(dtype)[:, None].expand_as(scored)
            listed = rows.take(ev.sparse.log_weights).to(dtype)
            scored = scored + tail.scatter(-1, rows.take(ev.sparse.ids), listed)
        rows.put(out, scored)
    return out
