"""New scores for all positions in one launch: the emission row of each position's latent, gathered and added."""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind, row_max
from codd.circuits.ops.leaf.triton import unit_stride
from codd.circuits.ops.scores import eager
from codd.circuits.parameters import Emission

_OBSERVED = tl.constexpr(int(Kind.OBSERVED))
_DENSE = tl.constexpr(int(Kind.DENSE))


@triton.jit
def _scores(
    kind,
    tokens,
    logits,
    inverse_temperature,
    totals,
    emission,
    latents,
    out,
    rows,
    length,
    vocab,
    batch_stride,
    row_stride,
    NORMALISED: tl.constexpr,
    TOKENS: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[row] = (logits - largest) / temperature - log-sum + log E[z]; one-hot where observed."""
    row = tl.program_id(0)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < vocab
    what = tl.load(kind + row)
    into = out + row.to(tl.int64) * vocab + v
    if TOKENS:
        observed = what == _OBSERVED
    else:
        observed = False
    if observed:
        token = tl.load(tokens + row)
        tl.store(into, tl.where(v == token, 0.0, float("-inf")), mask=inside)
    else:
        state = tl.load(latents + row)
        score = tl.log(tl.load(emission + state.to(tl.int64) * vocab + v, mask=inside, other=1.0).to(tl.float32))
        if DENSE:
            if what == _DENSE:
                b = row // length
                source = logits + b.to(tl.int64) * batch_stride + (row - b * length).to(tl.int64) * row_stride
                x = tl.load(source + v, mask=inside, other=0.0).to(tl.float32)
                if NORMALISED:
                    x = (x - tl.load(totals + row)) * tl.load(inverse_temperature + b) - tl.load(totals + rows + row)
                score += x
        tl.store(into, score, mask=inside)


def launch(
    emission: Emission, ev: Evidence, latents: Int[Tensor, "B L"], totals: Float[Tensor, "2 B L"] | None
) -> Float[Tensor, "B L V"]:
    """The scores; ``totals`` are each row's largest logit and the log-sum over it, if somebody knows them already."""
    potentials = None if ev.potentials is None else unit_stride(ev.potentials)
    vocab = emission.stored.shape[-1]
    out = torch.empty(*ev.shape, vocab, device=ev.device)
    if totals is None and potentials is not None and ev.normalised:
        top = row_max(potentials).float()
        log_sum = ((potentials.float() - top) / ev.heat(torch.float32)).logsumexp(-1)
        totals = torch.stack([top[..., 0], log_sum])
    block = min(4096, triton.next_power_of_2(vocab))
    _scores[(ev.shape[0] * ev.shape[1], triton.cdiv(vocab, block))](
        ev.kind,
        out if ev.tokens is None else ev.tokens.contiguous(),
        out if potentials is None else potentials,
        ev.inverse_temperature(),
        out if totals is None else totals,
        emission.linear,
        latents.contiguous(),
        out,
        ev.shape[0] * ev.shape[1],
        ev.shape[1],
        vocab,
        0 if potentials is None else potentials.stride(0),
        0 if potentials is None else potentials.stride(1),
        NORMALISED=ev.normalised,
        TOKENS=ev.tokens is not None,
        DENSE=potentials is not None,
        BLOCK=block,
        num_warps=8,
    )
    return out


def scores(emission: Emission, ev: Evidence, latents: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
    """log w_t(v) + log E[z_t, v]; sparse evidence and per-position tables go through PyTorch."""
    if ev.sparse is not None or emission.per_position:
        return eager.scores(emission, ev, latents)
    return launch(emission, ev, latents, None)
