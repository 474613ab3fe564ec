"""One turn of one sequence: which tokens to commit, given the network's logits at its masked positions."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits import HMM
from codd.coupling import Coupled
from codd.coupling.coupled import Prior
from codd.decoding import graphs, samplers
from codd.decoding.draft import Draft, Turn
from codd.decoding.options import Options
from codd.decoding.samplers import Noise, Ranking
from codd.decoding.windows import best_window

Window = tuple[int, int]


@dataclass(frozen=True)
class Decision:
    """What is to be committed, still on the device."""

    positions: Int[Tensor, " k"]
    ranking: Ranking
    window: Window
    mask_ratio: float
    """The share of masks in the window before the step."""
    circuit: bool
    """Whether the circuit acted."""


def share_masked(draft: Draft, window: Window) -> float:
    """The mask ratio of a window."""
    begin, end = window
    return int(draft.masked[begin:end].sum()) / (end - begin)


def fitted(window: Window, circuit: Prior | None, total: int) -> Window | None:
    """The window as the circuit can serve it: one of fixed length reaches back into what is written."""
    begin, end = window
    if circuit is None or circuit.length is None or circuit.length == end - begin:
        return window
    begin = max(0, end - circuit.length)
    return (begin, begin + circuit.length) if begin + circuit.length <= total else None


def active(circuit: Prior | None, ratio: float, options: Options) -> bool:
    """Whether the circuit is to act at this mask ratio."""
    wanted = circuit is not None and options.sampler != "factorized"
    return wanted and (options.activation is None or ratio < options.activation)


def couple(
    circuit: Prior,
    draft: Draft,
    window: Window,
    rows: Int[Tensor, " R"],
    logits: Float[Tensor, "R V"],
    options: Options,
) -> Coupled:
    """The product over a window, whose masked positions are among the rows (host positions, ascending)."""
    begin, end = window
    tokens = draft.ids[begin:end]
    masked = tokens == draft.mask_id
    inside = ((rows >= begin) & (rows < end)).nonzero()[:, 0]
    dense = logits
    if len(inside) != len(rows) or len(rows) != end - begin:
        dense = logits.new_zeros(end - begin, logits.shape[-1])
        dense[(rows[inside] - begin).to(logits.device)] = logits[inside.to(logits.device)]
    temperature = 1.0 if options.tempering == "paper" else options.circuit_temperature
    return Coupled(
        circuit,
        logits=dense[None],
        tokens=tokens[None].to(logits.device),
        masked=masked[None].to(logits.device),
        temperature=temperature,
    )


def _coupled(
    circuit: Prior,
    draft: Draft,
    window: Window,
    rows: Int[Tensor, " R"],
    logits: Float[Tensor, "R V"],
    count: int | None,
    options: Options,
    noise: Noise,
) -> tuple[Int[Tensor, " k"], Ranking]:
    """Positions and tokens by the circuit; if it cannot say anything, ``sure`` is false."""
    joint = couple(circuit, draft, window, rows, logits, options)
    window_noise = noise.at(slice(*window)).to(logits.device)
    if count is not None and isinstance(circuit, HMM) and logits.device.type == "cuda":
        places = torch.arange(window[1] - window[0], device=logits.device)
        ranking = graphs.step_on_device(circuit, joint, window_noise, count, options)
        # Where the host may not look on the way, it looks at the end, and does it again if candidates were too few.
        if options.sampler == "any_order" and not bool(ranking.sure):
            ranking = graphs.coupled_step(joint, joint.masked[0], window_noise, count, options, dense=True)
    else:
        places = (rows[(rows >= window[0]) & (rows < window[1])] - window[0]).to(logits.device)
        sample = samplers.latent if options.sampler == "latent" else samplers.any_order
        ranking = sample(joint, places, count, options, window_noise)
    return places.index_select(0, ranking.rows) + window[0], ranking


def block(
    draft: Draft,
    turn: Turn,
    rows: Int[Tensor, " R"],
    logits: Float[Tensor, "R V"],
    circuit: Prior | None,
    options: Options,
) -> Decision:
    """Block diffusion: the circuit covers the block."""
    window = (turn.begin, turn.end)
    ratio = share_masked(draft, window)
    covered = fitted(window, circuit, len(draft.ids))
    noise = Noise.drawn(len(draft.ids), draft.generator)
    if circuit is not None and covered is not None and active(circuit, ratio, options):
        positions, ranking = _coupled(circuit, draft, covered, rows, logits, turn.count, options, noise)
        return Decision(positions, ranking, covered, ratio, True)
    ranking = samplers.factorized(logits, turn.count, options, noise.at(rows).to(logits.device))
    return Decision(rows.to(logits.device)[ranking.rows], ranking, window, ratio, False)


def full(
    draft: Draft,
    turn: Turn,
    rows: Int[Tensor, " R"],
    logits: Float[Tensor, "R V"],
    circuit: Prior | None,
    options: Options,
) -> Decision:
    """Full diffusion: the circuit covers the window in which most of the tokens that are due stand."""
    device, total = logits.device, len(draft.ids)
    noise = Noise.drawn(total, draft.generator)
    base = samplers.factorized(logits, turn.count, options, noise.at(rows).to(device))
    positions = rows.to(device)[base.rows]
    if circuit is None or options.sampler == "factorized":
        return Decision(positions, base, (0, total), share_masked(draft, (0, total)), False)
    due = torch.zeros(total, dtype=torch.bool)
    due[positions[base.keep].cpu()] = True
    length = min(circuit.length or getattr(circuit, "window", None) or options.block_length, total)
    begin = int(best_window(due, length))
    window = (begin, begin + length)
    ratio = share_masked(draft, window)
    if not active(circuit, ratio, options) or (circuit.length is not None and circuit.length != length):
        return Decision(positions, base, window, ratio, False)
    count = None if turn.count is None else int(due[begin : begin + length].sum())
    at, inside = _coupled(circuit, draft, window, rows, logits, count, options, noise)
    away = (positions < begin) | (positions >= begin + length)
    wait = options.outside == "defer" and not turn.last
    elsewhere = base._replace(keep=base.keep & away & (not wait))
    both = Ranking(
        torch.cat((inside.rows, elsewhere.rows)),
        torch.cat((inside.tokens, elsewhere.tokens)),
        torch.cat((inside.scores, elsewhere.scores)),
        torch.cat((inside.keep, elsewhere.keep)),
        inside.sure,
    )
    return Decision(torch.cat((at, positions)), both, window, ratio, True)
