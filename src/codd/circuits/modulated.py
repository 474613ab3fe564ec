"""Circuits conditioned on the network: a small head on its hidden states weighs latents and transitions.

A static circuit knows how language hangs together, but not what this text is about. The head says so, at each position,
as log-weights on the circuit's latents (latent space), and at each step as log-weights on the inner states of its
transition (parameter space). Both are evidence of the chain, so that every query stays exact. A head starts at zero,
where the circuit is the unmodulated one.
"""

import dataclasses
import math
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from codd.circuits import storage
from codd.circuits.evidence import Evidence, Modulation
from codd.circuits.graph import Circuit
from codd.circuits.hmm import HMM
from codd.errors import FormatError, InvalidCircuit, InvalidEvidence
from codd.files import brief

WAVES = 8
"""How many cosines encode the share of masks, so that a head can tell small shares apart."""


@dataclass(frozen=True)
class HeadConfig:
    """The sizes of a head; what is saved of its architecture."""

    features: int
    """d, the width of the hidden states."""
    states: int
    """N, the states whose log-weights it gives; 0: none."""
    inner_states: int = 0
    """R, the inner states of the detour whose log-gates it gives; 0: none."""
    hidden: int = 0
    """Width of a hidden layer; 0: the head is linear."""
    dropout: float = 0.0
    """Dropout rate in training."""


class Head(nn.Module):
    """A network from hidden states and the mask of their window to log-weights of latents and steps."""

    def __init__(self, config: HeadConfig, seed: int = 0):
        """The last layer starts at zero; the one before is drawn on the CPU, alike on every device."""
        super().__init__()
        self.config = config
        width = config.features + WAVES + 1
        self.norm = nn.LayerNorm(config.features)
        self.drop = nn.Dropout(config.dropout)
        self.between = nn.Linear(width, config.hidden) if config.hidden else None
        size = config.hidden or width
        self.latents = nn.Linear(size, config.states) if config.states else None
        self.gates = nn.Linear(2 * size, config.inner_states) if config.inner_states else None
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            if self.between is not None:
                self.between.weight.normal_(0, width**-0.5, generator=generator)
                self.between.bias.zero_()
            for last in (self.latents, self.gates):
                if last is not None:
                    last.weight.zero_()
                    last.bias.zero_()

    def forward(self, features: Float[Tensor, "B L d"], masked: Bool[Tensor, "B L"]) -> Modulation:
        """Log-weights; those of steps come from the hidden states at both of their ends."""
        x = self.drop(torch.cat((self.norm(features.float()), _mask_features(masked)), -1))
        if self.between is not None:
            x = self.drop(nn.functional.gelu(self.between(x)))
        latents = None if self.latents is None else self.latents(x)
        gates = None if self.gates is None else self.gates(torch.cat((x[:, :-1], x[:, 1:]), -1))
        return Modulation(latents, gates)

    def restricted(self, states: Int[Tensor, " K"]) -> "Head":
        """The head of a circuit that keeps only these states; a new one, on the same device."""
        given = {name: x[states] if name.startswith("latents.") else x for name, x in self.state_dict().items()}
        made = Head(dataclasses.replace(self.config, states=len(states) if self.config.states else 0))
        made.load_state_dict(given)
        return made.to(self.norm.weight.device)


def _mask_features(masked: Bool[Tensor, "B L"]) -> Float[Tensor, "B L w"]:
    """Whether each position is masked, and cosines of the share of masks: (B, L, WAVES + 1)."""
    here = masked.float()
    angles = here.mean(1, keepdim=True) * torch.arange(1, WAVES + 1, device=masked.device) * math.pi
    return torch.cat((here[..., None], angles.cos()[:, None].expand(-1, masked.shape[1], -1)), -1)


class Modulated(HMM):
    """An HMM and the head that modulates it. `Coupled` takes one with the ``features`` of the window.

    Its queries are those of the HMM, for evidence that carries the head's modulation; ``hmm`` answers without.
    """

    kind = "modulated"
    feature_width: int
    """d, the width of the hidden states that the head takes."""

    def __init__(self, hmm: HMM, head: Head):
        """Take the tables of the circuit; `InvalidCircuit` unless the head has its sizes."""
        config = head.config
        detour = hmm.factors.detour if hmm.factors is not None else None
        inner = 0 if detour is None else detour.left.shape[1]
        if config.states not in (0, hmm.num_states) or config.inner_states not in (0, inner):
            raise InvalidCircuit(
                f"the head is for {config.states} states and {config.inner_states} inner ones, the circuit has "
                f"{hmm.num_states} and {inner}: they do not belong together"
            )
        vars(self).update(vars(hmm))
        self.hmm, self.head, self.feature_width = hmm, head.eval(), config.features

    def __repr__(self) -> str:
        """The circuit and what is modulated."""
        config = self.head.config
        spaces = [name for name, size in (("latents", config.states), ("steps", config.inner_states)) if size]
        return f"Modulated({self.hmm!r}, {' and '.join(spaces) or 'nothing'} by {config.features} features)"

    def modulate(self, features: Float[Tensor, "B L d"], masked: Bool[Tensor, "B L"]) -> Modulation:
        """The latent evidence of a window's hidden states; ``masked``: the positions hidden from the network."""
        if features.ndim != 3 or features.shape[:2] != masked.shape or features.shape[2] != self.feature_width:
            raise InvalidEvidence(
                f"features must be (B, L, {self.feature_width}) = {(*masked.shape, self.feature_width)}, the network's "
                f"last hidden states in the window; found {tuple(features.shape)}"
            )
        return widened(self.head(features, masked), self.hmm)

    def condition_on(  # type: ignore[override]  # the unmodulated circuit answers, not this one
        self, features: Float[Tensor, "B L d"] | None, masked: Bool[Tensor, "B L"]
    ) -> tuple[HMM, Modulation]:
        """The HMM, and the head's modulation by the features; `InvalidEvidence` if they are missing or misshapen."""
        if features is None:
            raise InvalidEvidence("this circuit is modulated: give the network's last hidden states as features")
        return self.hmm, self.modulate(features, masked)

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        emission: torch.dtype | None = None,
    ) -> "Modulated":
        """The same circuit elsewhere, as `HMM.to`; the head stays in float32."""
        moved = Head(self.head.config)
        moved.load_state_dict(self.head.state_dict())
        return Modulated(self.hmm.to(device, dtype, emission=emission), moved.to(device))

    def as_circuit(self, length: int | None = None) -> Circuit:
        """`InvalidCircuit`: as a general circuit it would be without its head."""
        raise InvalidCircuit("a modulated circuit is not a general one: ask its .hmm, which is unmodulated")

    def _check(self, ev: Evidence) -> None:
        """Refuse evidence without the weights that the head gives: without them it would be another circuit."""
        super()._check(ev)
        config = self.head.config
        needed = (
            ("latent_log_potentials", config.states, ev.latent_log_potentials),
            ("step_log_gates", config.inner_states, ev.step_log_gates),
        )
        for name, size, weights in needed:
            if size and weights is None:
                raise InvalidEvidence(
                    f"this circuit is modulated, and the evidence has no {name}: take the network's from "
                    "condition_on(features, masked), or ask circuit.hmm for the unmodulated answer"
                )

    def save(self, folder: str | PathLike[str], *, half: bool = False) -> Path:
        """Write config.json and circuit.safetensors, atomically; ``half``: in 16 bits what can be."""
        config = {**self.hmm.description(), "circuit": self.kind, "head": dataclasses.asdict(self.head.config)}
        weights = {f"head.{name}": x.detach().cpu().contiguous() for name, x in self.head.state_dict().items()}
        if half:
            weights = {name: x.half() for name, x in weights.items()}
        return storage.write_folder(folder, config, {**self.hmm.stored(half=half), **weights})

    @classmethod
    def from_stored(cls, config: dict[str, Any], tensors: dict[str, Tensor], source: str) -> "Modulated":
        """The circuit that a configuration and tensors describe; `FormatError` if they do not fit together."""
        try:
            with torch.device("meta"):  # no memory for sizes that the tensors do not have
                head = Head(HeadConfig(**config["head"]))
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FormatError(f"{source}: config.json does not describe a head ({brief(error)})") from None
        start = "head."
        stored = {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
        weights = {name: x.to(torch.float32, copy=True) for name, x in stored.items()}
        try:
            head.load_state_dict(weights, assign=True)
        except RuntimeError as error:
            raise FormatError(f"{source}: the head's tensors do not fit ({' '.join(str(error).split())})") from None
        if wrong := [name for name, x in weights.items() if not bool(x.isfinite().all())]:
            raise FormatError(f"{source}: the head's {wrong[0]} holds NaN or infinite numbers. Save the circuit again")
        rest = {name: x for name, x in tensors.items() if not name.startswith(start)}
        hmm = HMM.from_stored(config, rest, source)
        return cls(hmm, head.to(hmm.device))


def widened(modulation: Modulation, hmm: HMM) -> Modulation:
    """Log-gates for all inner states of the transition, padded with zeros for the ungated ones of the direct path."""
    if modulation.step_log_gates is None:
        return modulation
    return modulation._replace(step_log_gates=pad(modulation.step_log_gates, (hmm.num_states, 0)))
