"""Causal models for DCD: ours, or any that the package transformers loads, GPT-2 beside SEDD and MDLM above all.

Network and causal model must share their tokens. They need not have tables of one size: denoisers of GPT-2's tokens
have the mask behind them (50,258 columns against 50,257), and some checkpoints pad theirs. Ids are shared from 0 on;
what the causal model lacks it gives probability zero, and what the network lacks is left out.
"""

import os
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.backbones import Backbone, Tokenizer, causal
from codd.backbones.backbone import take_positions
from codd.distributed import choose_device
from codd.errors import InvalidInput
from codd_lab.text.judging import NUMBERS, Network, TransformersNetwork


@dataclass(frozen=True)
class CausalModel:
    """A causal language model and the tokens that it reads."""

    network: Backbone | Network
    tokenizer: Tokenizer | None = None
    """None: not known; its tokens are then taken for the denoiser's."""
    device: torch.device | None = None
    """Where a network of transformers is; ours know it themselves."""
    max_length: int | None = None

    def __post_init__(self) -> None:
        """Refuse a network of ours that is not causal."""
        if isinstance(self.network, Backbone) and not self.network.config.causal:
            raise InvalidInput(
                f"DCD needs a causal model, found a denoiser ({self.network.family}); give one with causal: true."
            )

    @property
    def vocab_size(self) -> int:
        """How many tokens its logits are of."""
        return self.network.vocab_size

    def logits(self, ids: Int[Tensor, "B T"], places: Int[Tensor, "B S"]) -> Float[Tensor, "B S V"]:
        """The logits at some places of each text, about the token that follows; float32, on the places' device."""
        if isinstance(self.network, Backbone):
            states = self.network.states(ids)
            states = take_positions(states, places.to(states.device))
            return self.network.logits(states, ids.gather(1, places).to(states.device)).float().to(places.device)
        if self.max_length is not None and ids.shape[1] > self.max_length:
            raise InvalidInput(
                f"the causal model was made for {self.max_length} tokens, found texts of {ids.shape[1]}: give shorter "
                "rows or contexts."
            )
        size, parts = max(1, NUMBERS // (ids.shape[1] * self.vocab_size)), []
        for begin in range(0, len(ids), size):
            some = ids[begin : begin + size].to(self.device)
            read = self.network.read(some, torch.ones_like(some, dtype=torch.bool)).logits
            parts.append(take_positions(read, places[begin : begin + size].to(read.device)).float())
        return torch.cat(parts).to(places.device)


def load_causal(name: str | os.PathLike[str], device: str | torch.device | None = None) -> CausalModel:
    """A causal model from a folder or the hub: one of ours (``causal: true``), or one that transformers can load.

    In float32; no code of a checkpoint runs. Raises FormatError for files that cannot be read, InvalidInput for a model
    that is not causal.
    """
    where = choose_device(device)
    found = causal.load_causal(name, where, torch.float32)
    network = found.network if isinstance(found.network, Backbone) else TransformersNetwork(found.network)
    return CausalModel(network, found.tokenizer, where, found.max_length)


def as_causal(given: "Backbone | CausalModel") -> CausalModel:
    """A network of ours as a causal model."""
    return CausalModel(given) if isinstance(given, Backbone) else given
