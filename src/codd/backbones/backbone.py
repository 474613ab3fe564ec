"""What every family gives: position-aligned logits for a batch of ids, padded or not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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


class Given(NamedTuple):
    """What a network is given, on its device."""

    ids: Tensor
    valid: Tensor | None
    positions: Tensor
    inputs: dict[str, Tensor]

    def row(self, i: int) -> "Row":
        """One sequence, without the padding around it."""
        begin, end = 0, self.ids.shape[1]
        valid = None
        if self.valid is not None and bool(self.valid[i].any()):
            places = self.valid[i].nonzero()
            begin, end = int(places[0]), int(places[-1]) + 1
            valid = None if bool(self.valid[i, begin:end].all()) else self.valid[i : i + 1, begin:end]
        inputs = {
            name: value[i : i + 1, begin:end] if value.ndim == 2 else value[i : i + 1]
            for name, value in self.inputs.items()
        }
        part = Given(self.ids[i : i + 1, begin:end], valid, self.positions[i : i + 1, begin:end], inputs)
        return Row(part, begin, end, whole=end - begin == self.ids.shape[1])


class Row(NamedTuple):
    """A sequence of a batch, and where in its row it stands."""

    given: Given
    begin: int
    end: int
    whole: bool
    """Whether it fills the row."""


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
        self.one_by_one = True
        """Whether a CPU evaluates the sequences of a batch one after the other: exact, and slower if they are short."""

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
        *,
        fill_padding: bool = True,
        **inputs: Tensor,
    ) -> Float[Tensor, "B L V"]:
        """Logits; ``attention_mask`` is 0 at padding. Further inputs are a family's own (noise level, token types).

        What stands at padding is of use to nobody but tests; without ``fill_padding`` it is zero where it costs time.
        """
        given = self._given(ids, attention_mask, position_ids, inputs)
        return self._each(lambda part: self.logits(self._states(part), part.ids), given, fill_padding)

    def states(
        self,
        ids: Int[Tensor, "B L"],
        attention_mask: Int[Tensor, "B L"] | Bool[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
        *,
        fill_padding: bool = True,
        **inputs: Tensor,
    ) -> Float[Tensor, "B L d"]:
        """The last hidden states, aligned like the logits."""
        return self._each(self._states, self._given(ids, attention_mask, position_ids, inputs), fill_padding)

    def _given(
        self, ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, inputs: Mapping[str, Tensor]
    ) -> "Given":
        self._check(ids, attention_mask)
        ids = self.place(ids)
        valid = None if attention_mask is None else attention_mask.to(self.device).bool()
        positions = positions_of(ids, valid) if position_ids is None else self.place(position_ids)
        self.network_inputs(ids, valid, inputs)  # refuses what does not fit the batch
        return Given(ids, valid, positions, {name: value.to(self.device) for name, value in inputs.items()})

    def _states(self, given: "Given") -> Float[Tensor, "B L d"]:
        extra = self.network_inputs(given.ids, given.valid, given.inputs)
        return self.align(self.network.states(given.ids, given.positions, valid=given.valid, **extra), given.valid)

    def _each(
        self, function: Callable[["Given"], Float[Tensor, "b l n"]], given: "Given", fill_padding: bool
    ) -> Float[Tensor, "B L n"]:
        """On an accelerator all sequences at once; on a CPU one after the other, each without its padding.

        A matrix product adds in an order that depends on its shape. One sequence at a time has the same shape whatever
        the batch, so that its result is the same to the bit; and a CPU has little to gain from more rows.
        """
        if self.device.type != "cpu" or not self.one_by_one:
            return function(given)
        rows = [given.row(i) for i in range(len(given.ids))]
        if len(rows) <= 1 and all(row.whole for row in rows):
            return function(rows[0].given if rows else given)
        found = [function(row.given) for row in rows]
        if fill_padding and not all(row.whole for row in rows):
            out = function(given)
        else:
            out = found[0].new_zeros(*given.ids.shape, found[0].shape[-1])
        for i, (row, values) in enumerate(zip(rows, found, strict=True)):
            out[i, row.begin : row.end] = values[0]
        return out

    def place(self, ids: Int[Tensor, "B L"]) -> Int[Tensor, "B L"]:
        """Whole numbers of any type, as the network takes them, where its weights are."""
        return ids.to(self.device, torch.long)

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
