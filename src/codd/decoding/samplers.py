"""The samplers: each position by itself, all given one latent path, or one after the other; and the window they see."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.constrained import WindowConstraint
from codd.circuits.protocol import ProbabilisticCircuit
from codd.coupling import Coupled
from codd.decoding.any_order import sample_any_order
from codd.decoding.options import Options
from codd.decoding.ranking import (
    Noise,
    Ranking,
    by_priority,
    choose_tokens,
    entropy,
    priority,
    temper,
    token_probability,
)
from codd.decoding.state import StepInputs, Window


class WindowInputs(NamedTuple):
    """One window: ids and noise on the host, the logits of its masked positions on the network's device."""

    tokens: Int[Tensor, " L"]
    masked: Bool[Tensor, " L"]
    positions: Int[Tensor, " R"]
    """The masked positions, counted from the window's first one."""
    logits: Float[Tensor, "R V"]
    noise: Noise
    features: Float[Tensor, "L d"] | None = None
    """The network's last hidden states in the window, on the device, for a circuit that is conditioned on them."""
    masked_for_network: Bool[Tensor, " L"] | None = None
    """What was masked when the network computed ``features``: more than ``masked``, once tokens are committed."""
    constraint: WindowConstraint | None = None
    """The language that the window is part of."""

    def packed(self) -> Float[Tensor, "rows L"]:
        """All host tensors in one, so that they cross to the device in one transfer."""
        extra = () if self.masked_for_network is None else (self.masked_for_network,)
        return torch.stack([row.double() for row in (self.tokens, self.masked, *self.noise, *extra)])

    def joint(self, circuit: ProbabilisticCircuit, temperature: float) -> Coupled:
        """The product of network and circuit, on the logits' device."""
        device, dense = self.logits.device, self.logits
        if len(self.positions) != len(self.tokens):
            dense = self.logits.new_zeros(len(self.tokens), self.logits.shape[-1])
            dense[self.positions.to(device)] = self.logits
        seen = self.masked_for_network
        return Coupled(
            circuit,
            logits=dense[None],
            tokens=self.tokens[None].to(device),
            masked=self.masked[None].to(device),
            temperature=temperature,
            features=None if self.features is None else self.features[None],
            hidden=None if seen is None else seen[None].to(device),
            constraint=self.constraint,
        )


def window_inputs(
    inputs: StepInputs, window: Window, noise: Noise, constraint: WindowConstraint | None = None
) -> WindowInputs:
    """A window, whose masked positions are among those of the step, as the circuit is given it."""
    state, positions, logits = inputs.state, inputs.positions, inputs.logits
    begin, end = window
    tokens = state.ids[begin:end]
    masked = tokens == state.mask_id
    inside = (positions >= begin) & (positions < end)
    part = logits if bool(inside.all()) else logits[inside.nonzero()[:, 0].to(logits.device, non_blocking=True)]
    made = WindowInputs(
        tokens, masked, positions[inside] - begin, part, noise.at(slice(begin, end)), constraint=constraint
    )
    if inputs.features is None:
        return made
    return made._replace(features=inputs.features.at(window), masked_for_network=masked)


def logits_temperature(options: Options) -> float:
    """What divides the logits before the product; the paper tempers the tokens after it instead."""
    return 1.0 if options.tempering == "paper" else options.circuit_temperature


def sample_factorized(
    scores: Float[Tensor, "R V"],
    count: int | None,
    options: Options,
    noise: Noise,
    open_rows: Bool[Tensor, " R"] | None = None,
) -> Ranking:
    """Rank every row by itself; rows that are not open come last, are not kept, and ``count`` must not reach them.

    ``count`` rows are kept; None: all that reach the threshold, or the first ones up to the entropy budget, and in any
    case one.
    """
    wide = torch.promote_types(scores.dtype, torch.float32)
    if options.temperature > 0:
        scores = scores.to(wide)
    tokens = choose_tokens(scores, noise.tokens, options.temperature, options.top_k, options.top_p)
    log_p = scores.log_softmax(-1, dtype=wide)
    priorities = priority(options.remasking, log_p, tokens, noise.order)
    rows = by_priority(priorities if open_rows is None else priorities.masked_fill(~open_rows, -torch.inf))
    probabilities = token_probability(log_p, tokens)[rows]
    entropies = None if options.entropy_budget is None else entropy(log_p)[rows]
    if open_rows is None:
        keep = _kept(probabilities, entropies, count, options)
    else:
        opened = open_rows[rows]
        keep = opened & _kept(probabilities.masked_fill(~opened, -1.0), entropies, count, options)
    return Ranking(rows, tokens[rows], probabilities, keep, torch.ones((), dtype=torch.bool, device=scores.device))


def _kept(
    probabilities: Float[Tensor, " R"], entropies: Float[Tensor, " R"] | None, count: int | None, options: Options
) -> Bool[Tensor, " R"]:
    rank = torch.arange(len(probabilities), device=probabilities.device)
    if count is not None:
        return rank < count
    if entropies is not None and options.entropy_budget is not None:
        return (entropies.cumsum(0) < options.entropy_budget) | (rank == 0)
    assert options.threshold is not None
    passed = probabilities >= options.threshold
    return passed | ((rank == 0) & ~passed.any())


def sample_latent(
    joint: Coupled,
    rows: Int[Tensor, " R"] | None,
    count: int,
    options: Options,
    noise: Noise,
    open_rows: Bool[Tensor, " R"] | None = None,
) -> Ranking:
    """Rank positions of a window (B = 1) given one latent path; void where the evidence has probability zero.

    ``rows`` are positions in the window; None: all of them, of which some are open. ``noise`` is the whole window's.
    """
    step = joint.joint_step(noise.path[None])
    scores = step.scores[0] if rows is None else step.scores[0, rows]
    if options.tempering == "paper":
        scores = temper(scores, options.circuit_temperature)
    ranking = sample_factorized(scores, count, options, noise if rows is None else noise.at(rows), open_rows)
    return ranking._replace(valid=step.log_partition[0] > -torch.inf)


def sample_window(
    circuit: ProbabilisticCircuit, window: WindowInputs, count: int | None, options: Options
) -> Float[Tensor, "4 more"]:
    """A packed `Ranking` whose rows are positions in the window; invalid if the circuit excludes the evidence."""
    device = window.logits.device
    rows, noise = window.positions.to(device), window.noise.to(device)
    joint = window.joint(circuit, logits_temperature(options))
    if options.sampler == "latent":
        assert count is not None, "the latent sampler commits by number"
        ranking = sample_latent(joint, rows, count, options, noise)
    else:
        ranking = sample_any_order(joint, rows, count, options, noise)
        if device.type != "cpu" and not bool(ranking.valid):
            ranking = sample_any_order(joint, rows, count, options, noise, dense=True)
    return ranking._replace(rows=rows.index_select(0, ranking.rows)).packed()


def sample_whole_window(
    joint: Coupled, noise: Noise, count: int | None, options: Options, *, dense: bool = False
) -> Ranking:
    """Like the samplers, but over all positions, of which the masked ones are open: shapes that a graph can capture."""
    open_rows = joint.masked[0]
    if options.sampler == "latent":
        assert count is not None, "the latent sampler commits by number"
        return sample_latent(joint, None, count, options, noise, open_rows)
    rows = torch.arange(len(open_rows), device=open_rows.device)
    return sample_any_order(joint, rows, count, options, noise, open_rows, dense=dense)
