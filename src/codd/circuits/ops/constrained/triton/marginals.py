"""Log-probabilities of all tokens, from the messages around their positions."""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.ops.constrained.tables import MARGINAL_TOKENS, Tables
from codd.circuits.ops.constrained.triton.rows import DeviceRows
from codd.circuits.ops.leaf.triton import _nearest


@triton.jit
def _marginals(
    cavity,
    cavity_log,
    emission,
    log_weights,
    positions,
    observed,
    tokens,
    order,
    begins,
    ends,
    owners,
    out,
    rows,
    states,
    stride,
    vocab,
    classes,
    R: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """out[row, v] = log w(v) + log sum over states of cavity[row, class of v] E[:, v], for a piece of the tokens.

    An observed position has 0 at its token and -inf elsewhere.
    """
    piece = tl.program_id(0)
    owner = tl.load(owners + piece)
    at = tl.load(begins + piece) + tl.arange(0, K)
    inside = at < tl.load(ends + piece)
    v = tl.load(order + at, mask=inside, other=0)
    row = tl.program_id(1) * R + tl.arange(0, R)
    used = row < rows
    place = tl.load(positions + row, mask=used, other=0)
    known = tl.load(observed + place, mask=used, other=1) != 0
    source = row.to(tl.int64) * classes + owner
    log = tl.load(cavity_log + source, mask=used, other=float("-inf"))
    live = used & (log > float("-inf")) & (known == 0)
    acc = tl.zeros((R, K), tl.float32)
    if tl.max(live.to(tl.int32), 0) > 0:
        for first in tl.range(0, states, N, num_stages=3):
            n = first + tl.arange(0, N)
            c = tl.load(
                cavity + source[:, None] * stride + n[None, :], mask=live[:, None] & (n < states)[None, :], other=0.0
            )
            e = tl.load(
                emission + v.to(tl.int64)[:, None] * states + n[None, :],
                mask=inside[:, None] & (n < states)[None, :],
                other=0.0,
            ).to(tl.float32)
            acc = tl.dot(_nearest(c), tl.trans(_nearest(e)), acc, input_precision="tf32")
    weight = tl.load(
        log_weights + place.to(tl.int64)[:, None] * vocab + v[None, :],
        mask=live[:, None] & inside[None, :],
        other=float("-inf"),
    )
    result = tl.where(live[:, None], tl.log(acc) + log[:, None] + weight, float("-inf"))
    token = tl.load(tokens + place, mask=used, other=-1)
    result = tl.where(known[:, None] & (token[:, None] == v[None, :]), 0.0, result)
    tl.store(out + row.to(tl.int64)[:, None] * vocab + v[None, :], result, mask=used[:, None] & inside[None, :])


def token_marginals(
    emission: Float[Tensor, "V N"],
    cavity: DeviceRows,
    tables: Tables,
    log_weights: Float[Tensor, "P V"],
    positions: Int[Tensor, " R"],
    observed: Bool[Tensor, "B L"],
    tokens: Int[Tensor, "B L"],
) -> Float[Tensor, "R V"]:
    """log w(v) + log sum over latents of cavity[r, class of v] E[:, v]; certainty where a token is observed."""
    vocab, states = emission.shape
    rows, pieces = len(positions), tables.marginal_pieces
    out = torch.empty(rows, vocab, device=emission.device)
    tile = min(max(16, triton.next_power_of_2(rows)), 32)
    _marginals[(len(pieces.owner), triton.cdiv(rows, tile))](
        cavity.values,
        cavity.log,
        emission,
        log_weights,
        positions,
        observed.view(torch.uint8),
        tokens,
        tables.order,
        *pieces,
        out,
        rows,
        states,
        cavity.values.shape[-1],
        vocab,
        tables.classes,
        R=tile,
        N=min(64, max(16, triton.next_power_of_2(states))),
        K=MARGINAL_TOKENS,
        num_warps=4,
    )
    return out
