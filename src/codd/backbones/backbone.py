"""What every family gives: position-aligned logits for a batch of ids, padded or not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from codd.backbones.config import Config
from codd.backbones.transformer import Transformer, TransformerConfig
from codd.backbones.weights import Key
from codd.errors import InvalidInput


@dataclass(frozen=True)
class SpecialIds:
    """The ids that decoding needs; None where the checkpoint does not say."""

    mask: int | None = None
    eos: int | None = None
    pad: int | None = None
    bos: int | None = None

    @classmethod
    def of(cls, config: Config, *, mask: int | None = None) -> "SpecialIds":
        """As a config.json states them; ``mask`` is the family's, where the file is silent."""
        stated = {name: config.token(f"{name}_token_id") for name in ("mask", "eos", "pad", "bos")}
        return cls(**{**stated, "mask": mask if stated["mask"] is None else stated["mask"]})


@dataclass(frozen=True)
class Plan:
    """How a checkpoint is to be built: what the file of a family makes of a config.json."""

    family: str
    transformer: TransformerConfig
    keys: tuple[Key, ...]
    special: SpecialIds = SpecialIds()
    chat_template: str | None = None
    max_length: int | None = None
    ignored: Callable[[str], bool] = lambda name: False
    """Names in the file that carry nothing: buffers that are recomputed, copies of tied weights."""
    rename: Callable[[str], str] = lambda name: name
    """Older spellings of a name in the file."""
    backbone: "type[Backbone] | None" = None
    """A subclass with the family's quirks; None: it has none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What that subclass wants to know of the configuration."""


class Backbone(nn.Module):
    """A denoiser: for every position, logits of its token given the visible ones.

    ``backbone(ids)`` is position-aligned whatever the family's quirks. A batch of unequal lengths is padded on the left
    (or on the right) and comes with its ``attention_mask``; the logits of a sequence do not depend on its neighbours.
    """

    def __init__(self, plan: Plan, network: Transformer):
        """Use `codd.backbones.load_backbone`."""
        super().__init__()
        self.plan = plan
        self.network = network

    @property
    def family(self) -> str:
        """The name of the family."""
        return self.plan.family

    @property
    def config(self) -> TransformerConfig:
        """What the network is made of."""
        return self.network.config

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.config.vocab_size

    @property
    def special(self) -> SpecialIds:
        """The ids of mask, end, padding and beginning."""
        return self.plan.special

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.network.embedding.tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """In which precision the weights are."""
        return self.network.embedding.tokens.weight.dtype

    def forward(
        self,
        ids: Int[Tensor, "B L"],
        attention_mask: Int[Tensor, "B L"] | Bool[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
        **inputs: Tensor,
    ) -> Float[Tensor, "B L V"]:
        """Logits; ``attention_mask`` is 0 at padding. Further inputs are a family's own (noise level, token types)."""
        return self.logits(self.states(ids, attention_mask, position_ids, **inputs), ids)

    def states(
        self,
        ids: Int[Tensor, "B L"],
        attention_mask: Int[Tensor, "B L"] | Bool[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
        **inputs: Tensor,
    ) -> Float[Tensor, "B L d"]:
        """The last hidden states, aligned like the logits."""
        self._check(ids, attention_mask)
        valid = None if attention_mask is None else attention_mask.bool()
        positions = positions_of(ids, valid) if position_ids is None else position_ids
        states = self.network.states(ids, positions, valid=valid, **self.network_inputs(ids, valid, inputs))
        return self.align(states, valid)

    def logits(self, states: Float[Tensor, "B L d"], ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """From hidden states to logits; ``ids`` are those that the states were computed from."""
        return self.network.logits(states)

    def network_inputs(
        self, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What the network wants beside ids and positions. Families that take something override this."""
        if inputs:
            raise InvalidInput(f"the family {self.family} takes no input called {', '.join(sorted(inputs))}.")
        return {}

    def align(self, states: Float[Tensor, "B L d"], valid: Bool[Tensor, "B L"] | None) -> Float[Tensor, "B L d"]:
        """Put the state that predicts a position there. Families that predict elsewhere override this."""
        return states

    def _check(self, ids: Tensor, attention_mask: Tensor | None) -> None:
        if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise InvalidInput(f"ids must be whole numbers of shape (B, L), found {ids.dtype} {tuple(ids.shape)}.")
        if attention_mask is not None and attention_mask.shape != ids.shape:
            found, wanted = tuple(attention_mask.shape), tuple(ids.shape)
            raise InvalidInput(f"attention_mask has shape {found}, but ids have {wanted}.")
        if self.plan.max_length is not None and self.config.positions and ids.shape[1] > self.plan.max_length:
            raise InvalidInput(
                f"{ids.shape[1]} positions, but this {self.family} checkpoint has learned only {self.plan.max_length}. "
                "Cut the text."
            )
        # On an accelerator a look at the values would wait for the device.
        if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise InvalidInput(
                f"id {wrong} is not in the vocabulary of {self.vocab_size} tokens (0 to {self.vocab_size - 1})."
            )


def positions_of(ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None) -> Int[Tensor, "B L"]:
    """0, 1, ... from each sequence's first token on; padding on the left is counted backwards from there."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return positions if valid is None else positions - leading_padding(valid)[:, None]


def leading_padding(valid: Bool[Tensor, "B L"]) -> Int[Tensor, " B"]:
    """How many padded positions precede the first token of each sequence."""
    return valid.int().argmax(dim=1)
