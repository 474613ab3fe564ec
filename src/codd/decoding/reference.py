"""The turns of the published implementation, quirks included: for comparison with its figures.

What differs from our own turns, all of it on purpose: confidences in the network's type, and (LLaDA) of noisy scores;
top-p, top-k and the temperature inside the confidences (Dream); scores of the circuit rounded to the network's type
and tempered a second time; windows centred on a target; targets outside the window forced; the mask may be written.
The one thing that the reference leaves open, which of equal confidences comes first, is settled as everywhere: the
leftmost. Its random numbers are not reproduced.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits import Modulated
from codd.coupling.coupled import Prior
from codd.decoding import decide
from codd.decoding.decide import Asked, Decision, Window
from codd.decoding.draft import Draw
from codd.decoding.options import Options
from codd.decoding.orders import ranked
from codd.decoding.samplers import Noise, Ranking
from codd.decoding.tokens import choose, keep_top_k, keep_top_p
from codd.decoding.windows import reference_window

_TINY = 1e-10
_NEVER, _ALWAYS = -1e9, 1e9


def block(asked: Asked, *, dream: bool) -> Decision:
    """Block diffusion, as for LLaDA or, with Dream's way of sampling, as for Dream."""
    draft, turn, rows, logits, circuit, options, _ = asked
    window = (turn.begin, turn.end)
    ratio = decide.share_masked(draft, window)
    draw = draft.drawer(logits.device)
    acted = circuit is not None and decide.active(circuit, ratio, options) and len(rows) > 0
    possible = _sure(logits)
    if acted:
        assert circuit is not None
        logits, possible = modified(circuit, asked, window, draw)
    found = (_dream if dream else _llada)(logits, options, draw)
    return _decision(rows, found, turn.count, window, ratio, acted, possible)


def full(asked: Asked) -> Decision:
    """Full diffusion: Dream's own loop, or with a circuit the one with dynamic windows."""
    draft, turn, rows, logits, circuit, options, _ = asked
    total, draw = len(draft.ids), draft.drawer(logits.device)
    if circuit is None or options.sampler == "factorized":
        found = _dream(logits, options, draw)
        count = turn.count
        if options.remasking == "origin":  # each mask is revealed by a coin of its own
            count = len(rows) if turn.last else int((found.confidence > turn.time[1] / turn.time[0]).sum())
        everything = (0, total)
        ratio = decide.share_masked(draft, everything)
        return _decision(rows, found, count, everything, ratio, False, _sure(logits))
    return _windowed(asked, circuit, draw)


def _windowed(asked: Asked, circuit: Prior | Modulated, draw: Draw) -> Decision:
    draft, turn, rows, logits, _, options, _ = asked
    total = len(draft.ids)
    length = min(circuit.length or getattr(circuit, "window", None) or options.block_length, total)
    due = torch.zeros(total, dtype=torch.bool)
    if len(rows) > 1:
        chosen = ranked(_selection(logits, options, draw))[: turn.count].cpu()
        due[rows[chosen]] = True
    begin, covered = reference_window(due, length)
    window: Window = (begin, begin + length)
    ratio = decide.share_masked(draft, window)
    acted = covered > 1 and decide.active(circuit, ratio, options)
    possible = _sure(logits)
    if acted:
        logits, possible = modified(circuit, asked, window, draw)
    found = _dream(logits, options, draw)
    confidence = found.confidence
    outside = (rows < begin) | (rows >= begin + length)
    if acted:
        confidence = confidence.masked_fill(outside.to(confidence.device), _NEVER)
    confidence = confidence.masked_fill((outside & due[rows]).to(confidence.device), _ALWAYS)
    return _decision(rows, found._replace(confidence=confidence), turn.count, window, ratio, acted, possible)


def modified(
    circuit: Prior | Modulated, asked: Asked, window: Window, draw: Draw
) -> tuple[Float[Tensor, "R V"], Bool[Tensor, ""]]:
    """Logits with the scores of one latent path in the window, in the logits' own type; whether there is a path."""
    rows, logits, tau = asked.rows, asked.logits, asked.options.circuit_temperature
    divided = logits / tau if 0 < tau < 1 else logits
    path = draw(window[1] - window[0])
    given = decide.given_to(asked._replace(logits=divided), window, Noise.none(len(asked.draft.ids)))
    step = given.joint(circuit, 1.0).joint_step(path[None])
    inside = ((rows >= window[0]) & (rows < window[1])).nonzero()[:, 0].to(logits.device)
    scores = step.scores[0, rows.to(logits.device)[inside] - window[0]]
    return logits.index_copy(0, inside, scores.to(logits.dtype)), step.log_partition[0] > -torch.inf


class _Found(NamedTuple):
    """A token a row, how early it may be committed, and its probability."""

    tokens: Int[Tensor, " R"]
    confidence: Float[Tensor, " R"]
    probability: Float[Tensor, " R"]


def _llada(logits: Float[Tensor, "R V"], options: Options, draw: Draw) -> _Found:
    """Tokens of noisy scores, confidences by the rule."""
    scores = logits
    if options.temperature > 0:
        noise = draw(logits.numel()).double().view(logits.shape).clamp_min(torch.finfo(torch.float64).tiny)
        scores = logits.double().exp() / (-noise.log()) ** options.temperature
    tokens = scores.argmax(-1)
    probability = logits.double().softmax(-1).gather(-1, tokens[:, None])[:, 0]
    if options.remasking == "low_confidence":
        return _Found(tokens, probability, probability)
    if options.remasking == "random":
        return _Found(tokens, draw(len(logits)), probability)
    return _Found(tokens, _spread(scores.softmax(-1), options.remasking), probability)


def _dream(logits: Float[Tensor, "R V"], options: Options, draw: Draw) -> _Found:
    """Tokens of tempered and filtered logits; confidences likewise."""
    scores = logits / options.temperature if options.temperature > 0 else logits
    p = keep_top_k(keep_top_p(scores, options.top_p), options.top_k).softmax(-1)
    uniforms = draw(len(logits)) if options.temperature > 0 else None
    tokens = choose(p.float().log(), uniforms, 1.0 if options.temperature > 0 else 0.0, None, None)
    probability = p.gather(-1, tokens[:, None])[:, 0]
    if options.remasking in ("random", "origin"):
        return _Found(tokens, draw(len(logits)), probability)
    if options.remasking == "topprob":
        return _Found(tokens, logits.softmax(-1).amax(-1), probability)
    if options.remasking == "low_confidence":
        return _Found(tokens, probability, probability)
    return _Found(tokens, _spread(p, options.remasking), probability)


def _spread(p: Float[Tensor, "R V"], rule: str) -> Float[Tensor, " R"]:
    if rule == "margin":
        return -p.topk(2, dim=-1).values.diff(dim=-1)[:, 0]
    return (p * (p + _TINY).log()).sum(-1)


def _selection(logits: Float[Tensor, "R V"], options: Options, draw: Draw) -> Float[Tensor, " R"]:
    """How the windowed loop finds its targets: from the logits as they are."""
    p = logits.softmax(-1)
    if options.remasking in ("random", "origin"):
        return draw(len(logits))
    if options.remasking == "entropy":
        entropies: Float[Tensor, " R"] = torch.special.entr(p).sum(-1)
        return -entropies
    return _spread(p, "margin") if options.remasking == "margin" else p.amax(-1)


def _sure(logits: Float[Tensor, "R V"]) -> Bool[Tensor, ""]:
    return torch.ones((), dtype=torch.bool, device=logits.device)


def _decision(
    rows: Int[Tensor, " R"],
    found: _Found,
    count: int | None,
    window: Window,
    ratio: float,
    circuit: bool,
    sure: Bool[Tensor, ""],
) -> Decision:
    first = ranked(found.confidence)
    keep = torch.arange(len(first), device=first.device) < (count or 0)
    positions = rows.to(first.device)[first]
    ranking = Ranking(positions, found.tokens[first], found.probability[first].float(), keep, sure)
    return Decision(ranking.packed(), 0, window, ratio, circuit)
