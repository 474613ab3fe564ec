"""Tokens given latents, by inverse CDF from explicit uniform numbers."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.evidence import Evidence, Kind, row_max
from codd.circuits.ops.backend import backend_for
from codd.circuits.ops.leaf.eager import FLUSH, Rows, dense_rows, dense_weights, sparse_weights
from codd.circuits.ops.path.reference import draw

if TYPE_CHECKING:
    from codd.circuits.hmm import HMM

_BLOCK = 64


def draw_token(weights: Float[Tensor, "R V"], uniform: Float[Tensor, " R"]) -> Int[Tensor, " R"]:
    """Inverse-CDF sampling over a vocabulary, in two levels: first a block of tokens, then a token inside it.

    Summing blocks is several times faster than one cumulative sum over the row, and rounds less. A token of weight zero
    is never drawn, however sums round, unless there is no other.
    """
    token = draw(weights, uniform) if weights.shape[1] <= 4 * _BLOCK else _draw_in_blocks(weights, uniform)
    weight = weights.gather(-1, token[:, None])[:, 0]
    if weights.device.type == "cpu" and bool((weight > 0).all()):  # elsewhere, looking would wait for the device
        return token
    return torch.where(weight > 0, token, weights.argmax(-1))


def _draw_in_blocks(weights: Float[Tensor, "R V"], uniform: Float[Tensor, " R"]) -> Int[Tensor, " R"]:
    rows, vocab = weights.shape
    whole = vocab // _BLOCK * _BLOCK
    blocks = weights[:, :whole].reshape(rows, whole // _BLOCK, _BLOCK)
    mass = blocks.sum(-1)
    if whole < vocab:
        mass = torch.cat([mass, weights[:, whole:].sum(-1, keepdim=True)], -1)
    cumulative = mass.cumsum(-1)
    threshold = uniform.to(weights.dtype) * cumulative[:, -1] * (1 - 2**-23)
    block = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0].clamp_max_(mass.shape[1] - 1)
    # What is left of the threshold inside the block is again uniform.
    here = mass.gather(-1, block[:, None])[:, 0]
    inside = (threshold - (cumulative.gather(-1, block[:, None])[:, 0] - here)) / torch.where(here > 0, here, 1)
    offsets = (block * _BLOCK)[:, None] + torch.arange(_BLOCK, device=weights.device)
    beyond = offsets >= vocab
    candidates = weights.gather(-1, offsets.clamp_max(vocab - 1)).masked_fill_(beyond, 0)
    return (block * _BLOCK + draw(candidates, inside.clamp_(0, 1))).clamp_max_(vocab - 1)


@torch.no_grad()
def tokens_given(
    hmm: "HMM", ev: Evidence, latents: Int[Tensor, "B L"], uniforms: Float[Tensor, "B L"]
) -> Int[Tensor, "B L"]:
    """One token a position from p(x_t | z_t, evidence)."""
    if ev.device.type != "cpu":
        scores = backend_for(ev.device, hmm.dtype).scores(hmm.emission, ev, latents)
        flat = draw_token(scores.flatten(0, 1).softmax(-1).nan_to_num_(0.0), uniforms.flatten())
        return flat.view(ev.shape)
    out = torch.empty(ev.shape, dtype=torch.int64)
    positions = torch.arange(ev.shape[1]).expand(ev.shape)
    for kind in Kind:
        rows = Rows(ev.rows(kind))
        if not rows:
            continue
        if kind == Kind.OBSERVED:
            assert ev.tokens is not None
            rows.put(out, rows.take(ev.tokens).long())
            continue
        u, states, places = rows.take(uniforms), rows.take(latents), rows.take(positions)
        if kind == Kind.DENSE:
            rows.put(out, _dense(hmm, ev, rows, states, places, u))
        elif kind == Kind.MISSING:
            rows.put(out, draw_token(hmm.emission.rows(states, places), u))
        else:
            rows.put(out, _sparse(hmm, ev, rows, states, places, u))
    return out


def _dense(
    hmm: "HMM",
    ev: Evidence,
    rows: Rows,
    states: Int[Tensor, " R"],
    places: Int[Tensor, " R"],
    u: Float[Tensor, " R"],
) -> Int[Tensor, " R"]:
    emitted = hmm.emission.rows(states, places)
    weights = dense_weights(ev, rows, hmm.dtype)[0].mul_(emitted)
    vanished = weights.sum(-1) < FLUSH
    if bool(vanished.any()):  # the state allows only tokens that the network all but excludes: go through logarithms
        scores = dense_rows(ev, rows, hmm.dtype)[vanished]
        scores = scores - row_max(scores) + hmm.emission.log_rows(states[vanished], places[vanished])
        weights[vanished] = scores.softmax(-1).nan_to_num_(0.0)
    return draw_token(weights, u)


def _sparse(
    hmm: "HMM",
    ev: Evidence,
    rows: Rows,
    states: Int[Tensor, " R"],
    places: Int[Tensor, " R"],
    u: Float[Tensor, " R"],
) -> Int[Tensor, " R"]:
    """A listed token, or (one weight more) the tail, in which the token then follows the emission."""
    ids, weights, tail, _ = sparse_weights(ev, rows, hmm.vocab_size, hmm.dtype)
    listed = hmm.emission.entries(states, places, ids)
    weights = weights * listed
    rest = (tail * (1 - listed.sum(-1))).clamp_min(0)
    joined = torch.cat([weights, rest[:, None]], -1)
    # The difference above is noise for states that emit little but listed tokens, and products of small numbers vanish.
    unsure = (rest < 1e-3 * tail) | (joined.sum(-1) < FLUSH)
    if bool(unsure.any()):
        joined[unsure] = _sparse_by_logarithms(hmm, ev, rows, states, places, unsure)
        weights, rest = joined[:, :-1], joined[:, -1]
    choice = draw(joined, u)
    tokens = ids.gather(-1, choice.clamp_max(ids.shape[-1] - 1)[:, None])[:, 0]
    fell = choice == ids.shape[-1]
    if bool(fell.any()):
        # What u exceeds the listed mass by, over the tail's mass, is again uniform.
        within = (u[fell] * joined[fell].sum(-1) - weights[fell].sum(-1)) / rest[fell]
        spread = hmm.emission.rows(states[fell], places[fell]).scatter(-1, ids[fell], 0.0)
        tokens[fell] = draw_token(spread, within.clamp(0, 1))
    return tokens


def _sparse_by_logarithms(
    hmm: "HMM",
    ev: Evidence,
    rows: Rows,
    states: Int[Tensor, " R"],
    places: Int[Tensor, " R"],
    which: Bool[Tensor, " R"],
) -> Float[Tensor, "U choices"]:
    """The weights of the listed tokens and of the tail for some of the rows, summed over every token."""
    assert ev.sparse is not None
    ids = rows.take(ev.sparse.ids)[which]
    table = hmm.emission.log_rows(states[which], places[which])
    listed = rows.take(ev.sparse.log_weights)[which].to(hmm.dtype) + table.gather(-1, ids)
    others = table.scatter(-1, ids, -torch.inf).logsumexp(-1)
    tail = rows.take(ev.sparse.log_tail_weight(hmm.vocab_size))[which].to(hmm.dtype) + others
    return torch.cat([listed, tail[:, None]], -1).softmax(-1).nan_to_num_(0.0)
