"""A window of a sequence as the circuit is given it, and the sampler that the options choose for it."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.circuits.constrained import WindowConstraint
from codd.circuits.protocol import ProbabilisticCircuit
from codd.coupling import Coupled
from codd.decoding.options import Options
from codd.decoding.samplers.any_order import sample_any_order
from codd.decoding.samplers.latent import sample_latent
from codd.decoding.samplers.ranking import Noise, Ranking


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

    def after(self, positions: Int[Tensor, " k"], tokens: Int[Tensor, " k"]) -> "WindowInputs":
        """The window once tokens are committed at some of its masked positions."""
        left = ~torch.isin(self.positions, positions)
        return self._replace(
            tokens=self.tokens.scatter(0, positions, tokens),
            masked=self.masked.scatter(0, positions, False),
            positions=self.positions[left],
            logits=self.logits[left.nonzero()[:, 0].to(self.logits.device)],
        )

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


def logits_temperature(options: Options) -> float:
    """What divides the logits before the product; the paper tempers the tokens after it instead."""
    return 1.0 if options.tempering == "paper" else options.circuit_temperature


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
