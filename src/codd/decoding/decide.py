"""One turn of one sequence: which tokens to commit, given the network's logits at its masked positions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.circuits import HMM, Modulated
from codd.coupling.coupled import Prior
from codd.decoding import graphs, samplers
from codd.decoding.draft import Draft, Turn
from codd.decoding.graphs import Given
from codd.decoding.options import Options
from codd.decoding.samplers import Noise, Ranking
from codd.decoding.windows import best_window

Window = tuple[int, int]
AT_A_TIME = 8
"""Picks between two looks at whether they pass a joint threshold."""


class Asked(NamedTuple):
    """A turn of a sequence, with the network's logits at the masked positions that it is about."""

    draft: Draft
    turn: Turn
    rows: Int[Tensor, " R"]
    """The positions, ascending, on the host."""
    logits: Float[Tensor, "R V"]
    circuit: Prior | Modulated | None
    options: Options
    features: Float[Tensor, "L d"] | None = None
    """The network's last states in all of the sequence, for a circuit that listens to them."""


@dataclass(frozen=True)
class Decision:
    """What is to be committed, still on the device."""

    packed: Float[Tensor, "4 more"]
    """A `Ranking` whose rows are positions, counted from ``origin``."""
    origin: int
    window: Window
    mask_ratio: float
    """The share of masks in the window before the step."""
    circuit: bool
    """Whether the circuit acted."""

    def fetched(self) -> Ranking:
        """On the host, with rows that are positions of the sequence; waits for the device once."""
        found = Ranking.unpacked(self.packed.cpu())
        return found._replace(rows=found.rows + self.origin)


def share_masked(draft: Draft, window: Window) -> float:
    """The mask ratio of a window."""
    begin, end = window
    return int(draft.masked[begin:end].sum()) / (end - begin)


def fitted(window: Window, circuit: Prior | Modulated | None, total: int) -> Window | None:
    """The window as the circuit can serve it: one of fixed length reaches back into what is written."""
    begin, end = window
    if circuit is None or circuit.length is None or circuit.length == end - begin:
        return window
    begin = max(0, end - circuit.length)
    return (begin, begin + circuit.length) if begin + circuit.length <= total else None


def active(circuit: Prior | Modulated | None, ratio: float, options: Options) -> bool:
    """Whether the circuit is to act at this mask ratio."""
    wanted = circuit is not None and options.sampler != "factorized"
    return wanted and (options.activation is None or ratio < options.activation)


def given_to(asked: Asked, window: Window, noise: Noise) -> Given:
    """A window, whose masked positions are among the rows, as the circuit is given it."""
    draft, rows, logits = asked.draft, asked.rows, asked.logits
    begin, end = window
    tokens = draft.ids[begin:end]
    masked = tokens == draft.mask_id
    inside = (rows >= begin) & (rows < end)
    part = logits if bool(inside.all()) else logits[inside.nonzero()[:, 0].to(logits.device)]
    given = Given(tokens, masked, rows[inside] - begin, part, noise.at(slice(begin, end)))
    return given if asked.features is None else given._replace(features=asked.features[begin:end], hidden=masked)


def _coupled(circuit: Prior | Modulated, given: Given, count: int | None, options: Options) -> Float[Tensor, "4 more"]:
    """A packed ranking, whose rows are places in the window; if the circuit cannot say anything it is not sure."""
    if isinstance(circuit, HMM | Modulated) and given.logits.device.type == "cuda":
        if count is not None:
            return _on_device(circuit, given, count, options)
        if options.sampler == "any_order" and options.threshold is not None:
            return walk(given, options.threshold, lambda left, some: _on_device(circuit, left, some, options)).packed()
    places, noise = given.places.to(given.logits.device), given.noise.to(given.logits.device)
    sample = samplers.latent if options.sampler == "latent" else samplers.any_order
    joint = given.joint(circuit, graphs.temperature_of(options))
    ranking = sample(joint, places, count, options, noise)
    if options.sampler == "any_order" and places.device.type != "cpu" and not bool(ranking.sure):
        ranking = samplers.any_order(joint, places, count, options, noise, dense=True)
    return ranking._replace(rows=places.index_select(0, ranking.rows)).packed()


def _on_device(circuit: graphs.Chain, given: Given, count: int, options: Options) -> Float[Tensor, "4 more"]:
    """So many tokens. Where the host may not look on the way, it looks at the end: were the candidates too few?"""
    packed = graphs.step_on_device(circuit, given, count, options)
    if options.sampler == "any_order" and not bool(packed[0, -1]):
        return graphs.eager_step(circuit, given, count, options, dense=True).packed()
    return packed


def walk(given: Given, threshold: float, pick: Callable[[Given, int], Float[Tensor, "4 more"]]) -> Ranking:
    """The joint threshold without waiting for every pick: some at a time, and on from there while all of them pass."""
    walked: list[Ranking] = []
    while len(given.places):
        count = min(AT_A_TIME, len(given.places))
        found = Ranking.unpacked(pick(given, count).cpu())
        passed = found.scores >= threshold
        if not walked:
            passed[0] = True  # at least one, however unsure
        passed = passed.cumprod(0).bool()
        walked.append(found._replace(keep=passed).chosen())
        if not bool(found.sure) or not bool(passed.all()):
            break
        given = given.after(found.rows, found.tokens)
    parts = list(zip(*walked, strict=True))
    rows, tokens, scores, keep = (torch.cat(part) for part in parts[:4])
    return Ranking(rows, tokens, scores, keep, torch.stack(parts[4]).all())


def _alone(ranking: Ranking, rows: Int[Tensor, " R"]) -> Ranking:
    """With positions of the sequence instead of numbers of rows."""
    return ranking._replace(rows=rows.to(ranking.rows.device).index_select(0, ranking.rows))


def block(asked: Asked) -> Decision:
    """Block diffusion: the circuit covers the block."""
    draft, turn, rows, logits, circuit, options, _ = asked
    window = (turn.begin, turn.end)
    ratio = share_masked(draft, window)
    covered = fitted(window, circuit, len(draft.ids))
    noise = Noise.drawn(len(draft.ids), draft.generator)
    if circuit is not None and covered is not None and active(circuit, ratio, options):
        packed = _coupled(circuit, given_to(asked, covered, noise), turn.count, options)
        return Decision(packed, covered[0], covered, ratio, True)
    ranking = samplers.factorized(logits, turn.count, options, noise.at(rows).to(logits.device))
    return Decision(_alone(ranking, rows).packed(), 0, window, ratio, False)


def full(asked: Asked) -> Decision:
    """Full diffusion: the circuit covers the window in which most of the tokens that are due stand."""
    draft, turn, rows, logits, circuit, options, _ = asked
    total = len(draft.ids)
    noise = Noise.drawn(total, draft.generator)
    base = samplers.factorized(logits, turn.count, options, noise.at(rows).to(logits.device))
    alone = _alone(base, rows).packed()
    if circuit is None or options.sampler == "factorized":
        return Decision(alone, 0, (0, total), share_masked(draft, (0, total)), False)
    alone = alone.cpu()  # the window depends on it, and with the window whether the circuit acts
    base = Ranking.unpacked(alone)
    due = torch.zeros(total, dtype=torch.bool)
    due[base.rows[base.keep]] = True
    length = min(circuit.length or getattr(circuit, "window", None) or options.block_length, total)
    begin = int(best_window(due, length))
    window = (begin, begin + length)
    ratio = share_masked(draft, window)
    if not active(circuit, ratio, options) or (circuit.length is not None and circuit.length != length):
        return Decision(alone, 0, window, ratio, False)
    count = None if turn.count is None else int(due[begin : begin + length].sum())
    packed = _coupled(circuit, given_to(asked, window, noise), count, options)
    inside = Decision(packed, begin, window, ratio, True).fetched()
    wait = options.outside == "defer" and not turn.last
    away = (base.rows < begin) | (base.rows >= begin + length)
    elsewhere = base._replace(keep=base.keep & away & (not wait))
    both = Ranking(
        torch.cat((inside.rows, elsewhere.rows)),
        torch.cat((inside.tokens, elsewhere.tokens)),
        torch.cat((inside.scores, elsewhere.scores)),
        torch.cat((inside.keep, elsewhere.keep)),
        inside.sure,
    )
    return Decision(both.packed(), 0, window, ratio, True)
