"""What every family gives: position-aligned logits for a batch of token ids, padded or not."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from codd.backbones.config import Config
from codd.backbones.kv_cache import CachedPass
from codd.backbones.transformer import Transformer, TransformerConfig
from codd.backbones.weights import Key
from codd.errors import InvalidInput, shown

Shared = TypeVar("Shared", bound=nn.Module)

if TYPE_CHECKING:
    from codd.backbones.adapters import LowRank


@dataclass(frozen=True)
class SpecialTokenIds:
    """The ids of the special tokens that decoding needs; None where the checkpoint states none."""

    mask: int | None = None
    eos: int | None = None
    pad: int | None = None
    bos: int | None = None

    @classmethod
    def from_config(cls, config: Config, *, mask: int | None = None) -> "SpecialTokenIds":
        """Read them from a config.json; ``mask``: the published one of the family, for a file that states none."""
        stated = {name: config.token(f"{name}_token_id") for name in ("mask", "eos", "pad", "bos")}
        if stated["mask"] is None and mask is not None and mask < config.count("vocab_size", mask + 1):
            stated["mask"] = mask
        return cls(**stated)


@dataclass(frozen=True)
class ModelSpec:
    """What a config.json describes, as its family reads it: the network's shape and how to load its weights."""

    family: str
    transformer: TransformerConfig
    keys: tuple[Key, ...]
    special: SpecialTokenIds = SpecialTokenIds()
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end an answer beside the end-of-text: those of its generation_config.json."""
    chat_template: str | None = None
    """The family's, for a tokenizer that has none of its own."""
    max_length: int | None = None
    """The longest sequence, in tokens; None where the checkpoint states none."""
    ignored: Callable[[str], bool] = lambda name: False
    """Whether a tensor of the file carries nothing: recomputed buffers, copies of tied weights."""
    rename: Callable[[str], str] = lambda name: name
    """From older spellings of a tensor's name to the one in ``keys``."""
    backbone: "type[Backbone] | None" = None
    """The subclass with the family's quirks; None: `Backbone` itself."""
    block_length: int | None = None
    """Tokens of a block where the network's attention does not say; None: its files do not, either."""
    any_blocks: bool = False
    """Whether the network may be block-causal though its files do not say so: the caller does."""
    causal_context: bool = False
    """Whether what precedes a block is read causally, by the same weights; a block's first token then comes from
    the causal row before it."""
    assumed: Mapping[str, int] = field(default_factory=dict)
    """Published values in place of fields that the files leave out."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings that this subclass reads from ``spec.options``."""


class NetworkInputs(NamedTuple):
    """A checked batch on the network's device."""

    ids: Int[Tensor, "B L"]
    valid: Bool[Tensor, "B L"] | None
    """False at padding; None: there is none."""
    positions: Int[Tensor, "B L"]
    extra: dict[str, Tensor]
    """A family's own inputs, (B,) or (B, L)."""

    def sequence(self, i: int) -> "tuple[NetworkInputs, slice]":
        """The i-th sequence without the padding around it, as a batch of one, and its columns in the batch."""
        row, columns, valid = slice(i, i + 1), slice(None), None
        if self.valid is not None and bool(self.valid[i].any()):
            tokens = self.valid[i].nonzero()
            columns = slice(int(tokens[0]), int(tokens[-1]) + 1)
            valid = None if bool(self.valid[i, columns].all()) else self.valid[row, columns]
        extra = {name: value[row, columns] if value.ndim == 2 else value[row] for name, value in self.extra.items()}
        return NetworkInputs(self.ids[row, columns], valid, self.positions[row, columns], extra), columns


class MaskedOutput(NamedTuple):
    """What the network says about some positions."""

    logits: Float[Tensor, "B n V"]
    """In float32; minus infinity for the mask token."""
    states: Float[Tensor, "B n d"]
    """The last hidden states that they were computed from."""


class Backbone(nn.Module):
    """A denoiser: for every position, logits of its token given the visible ones.

    ``backbone(ids)`` is position-aligned whatever the family's quirks. A batch of unequal lengths is padded on the left
    (or on the right) and comes with its ``attention_mask``; the logits of a sequence do not depend on its neighbours.
    """

    shift = 0
    """How many positions before a token the state is that predicts it."""

    def __init__(self, spec: ModelSpec, network: Transformer):
        """Use `codd.backbones.load_checkpoint`."""
        super().__init__()
        self.spec = spec
        self.network = network
        self.batch_invariant = True
        """Whether a CPU evaluates the sequences of a batch one after the other: a sequence's result is then the same
        to the bit in any batch, but many short ones take longer."""
        self.adapter: dict[str, LowRank] = {}
        """The layers that an adapter loaded with ``merge=False`` puts in place of the network's."""

    def switch_adapter(self, on: bool) -> None:
        """Switch an adapter that was loaded with ``merge=False`` on or off.

        Raises InvalidInput where there is none to switch on.
        """
        if on and not self.adapter:
            raise InvalidInput("there is no adapter to switch on: give adapter= and merge=False to codd.load.")
        # Modules are exchanged, which those who keep captured graphs of the network notice.
        for place, layer in self.adapter.items():
            weight = layer.base.weight
            self.network.set_submodule(place, layer.to(weight.device, weight.dtype) if on else layer.base)

    @cached_property
    def causal(self) -> "Backbone | None":
        """The same weights with causal attention, whose row i is about the token after position i; None: no such mode.

        It shares all parameters, but no adapter that is kept apart: that one is for denoising.
        """
        if not self.spec.causal_context:
            return None
        on = any(self.network.get_submodule(place) is layer for place, layer in self.adapter.items())
        self.switch_adapter(False)
        network = _sharing_parameters(self.network)
        network.config = replace(self.config, causal=True)
        if on:
            self.switch_adapter(True)
        spec = replace(self.spec, transformer=network.config, causal_context=False)
        return Backbone(spec, network).eval()

    @property
    def family(self) -> str:
        """The name of the model family, such as "llada"."""
        return self.spec.family

    @property
    def config(self) -> TransformerConfig:
        """The sizes and parts of the transformer."""
        return self.network.config

    @property
    def vocab_size(self) -> int:
        """V, the number of columns of the logits: tokens, and padding of the output layer if there is any."""
        return self.config.vocab_size

    @property
    def max_length(self) -> int | None:
        """The longest sequence, in tokens, that the checkpoint is made for; None where it states none."""
        return self.spec.max_length

    @property
    def block_size(self) -> int | None:
        """Positions per block of a block-causal network, counted from a sequence's first; None: it sees everything."""
        return self.config.block_size

    @property
    def special(self) -> SpecialTokenIds:
        """The ids of mask, end, padding and beginning."""
        return self.spec.special

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.network.embedding.tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights that are not rounded to int8, and of what is computed with any."""
        return self.network.embedding.tokens.weight.dtype

    @property
    def precision(self) -> str:
        """Its name, and "int8" where layers and head have such weights."""
        name = str(self.dtype).removeprefix("torch.")
        return name if self.network.head.int8 is None else f"{name} and int8"

    def forward(
        self,
        ids: Int[Tensor, "B L"],
        attention_mask: Int[Tensor, "B L"] | Bool[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
        **extra: Tensor,
    ) -> Float[Tensor, "B L V"]:
        """Logits of every position.

        Args:
            ids: Token ids.
            attention_mask: 0 at padding, whose logits have no meaning; None: there is none.
            position_ids: Positions of the tokens; None: counted from the first token of each sequence.
            extra: The family's own inputs, such as a noise level or token types.

        Raises:
            InvalidInput: The network cannot take these ids or inputs.
        """
        return self._per_sequence(self._logits, self._prepare_inputs(ids, attention_mask, position_ids, extra))

    def states(
        self,
        ids: Int[Tensor, "B L"],
        attention_mask: Int[Tensor, "B L"] | Bool[Tensor, "B L"] | None = None,
        position_ids: Int[Tensor, "B L"] | None = None,
        **extra: Tensor,
    ) -> Float[Tensor, "B L d"]:
        """The last hidden states, aligned like the logits; arguments and errors as in `forward`."""
        return self._per_sequence(self._states, self._prepare_inputs(ids, attention_mask, position_ids, extra))

    def _prepare_inputs(
        self, ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, extra: Mapping[str, Tensor]
    ) -> NetworkInputs:
        self._check(ids, attention_mask)
        ids = ids.to(self.device, torch.long)
        valid = None if attention_mask is None else attention_mask.to(self.device).bool()
        positions = default_positions(ids, valid) if position_ids is None else position_ids.to(ids)
        self.extra_inputs(ids, valid, extra)  # refuses what does not fit the batch
        return NetworkInputs(ids, valid, positions, {name: value.to(self.device) for name, value in extra.items()})

    def _logits(self, inputs: NetworkInputs) -> Float[Tensor, "B L V"]:
        return self.logits(self._states(inputs), inputs.ids)

    def _states(self, inputs: NetworkInputs) -> Float[Tensor, "B L d"]:
        return self.align(self._unaligned_states(inputs), inputs.valid)

    def _unaligned_states(self, inputs: NetworkInputs) -> Float[Tensor, "B L d"]:
        extra: dict[str, Any] = dict(self.extra_inputs(inputs.ids, inputs.valid, inputs.extra))
        return self.network.states(inputs.ids, inputs.positions, valid=inputs.valid, **extra)

    def _per_sequence(
        self, function: Callable[[NetworkInputs], Float[Tensor, "b l n"]], inputs: NetworkInputs
    ) -> Float[Tensor, "B L n"]:
        """Apply a function to the whole batch on an accelerator, on a CPU to each sequence without its padding.

        A matrix product adds in an order that depends on its shape. One sequence at a time has the same shape whatever
        the batch, so that its result is the same to the bit; and a CPU has little to gain from more rows.
        """
        if self.device.type != "cpu" or not self.batch_invariant:
            return function(inputs)
        parts = [inputs.sequence(i) for i in range(len(inputs.ids))]
        outputs = [function(part) for part, _ in parts]
        if len(parts) == 1 and outputs[0].shape[1] == inputs.ids.shape[1]:
            return outputs[0]
        out = outputs[0].new_zeros(*inputs.ids.shape, outputs[0].shape[-1])
        for i, ((_, columns), output) in enumerate(zip(parts, outputs, strict=True)):
            out[i, columns] = output[0]
        return out

    def cached_states(self, ids: Int[Tensor, "B R"], past: CachedPass) -> Float[Tensor, "B R d"]:
        """The last hidden states of some positions of longer sequences, whose keys and values go into a cache.

        Aligned like the logits, but for the first row of a family that is shifted, whose state is of the position
        before: ask for one row more.
        """
        return self.align(self.network.states(ids, past.positions, past=past), None)

    def logits(self, states: Float[Tensor, "B L d"], ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """From hidden states to logits; ``ids`` are those that the states were computed from."""
        return self.network.logits(states)

    def masked_logits(self, ids: Int[Tensor, "B L"], positions: Int[Tensor, "B n"], *, mask_id: int) -> MaskedOutput:
        """Evaluate the network on ``ids``, and its head at ``positions`` alone; no token there can be the mask."""
        ids, positions = ids.to(self.device), positions.to(self.device)
        states = take_positions(self.states(ids), positions)
        return MaskedOutput(self.masked_logits_from_states(states, ids.gather(1, positions), mask_id=mask_id), states)

    def masked_logits_from_states(
        self,
        states: Float[Tensor, "B n d"],
        ids: Int[Tensor, "B n"] | None = None,
        *,
        mask_id: int,
        exclude_mask: bool = True,
    ) -> Float[Tensor, "B n V"]:
        """`masked_logits` from hidden states: in float32, with minus infinity for the mask token.

        ``ids`` are the tokens that the network saw at these positions; None: the mask at all of them. Without
        ``exclude_mask`` the logits are as the head gives them, in its own precision, for callers that change them
        (guidance, hooks) before they exclude tokens.
        """
        if ids is None:
            ids = torch.full(states.shape[:-1], mask_id, device=states.device)
        logits = self.logits(states, ids)
        if exclude_mask:
            logits = logits.float()
            logits[..., mask_id] = -torch.inf
        return logits

    def extra_inputs(
        self, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None, extra: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The network's inputs beside ids and positions, made from the caller's; families that take some override this.

        Raises InvalidInput for names or shapes that the family does not take.
        """
        if extra:
            raise InvalidInput(f"the family {self.family} takes no input called {', '.join(sorted(extra))}.")
        return {}

    def align(self, states: Float[Tensor, "B L d"], valid: Bool[Tensor, "B L"] | None) -> Float[Tensor, "B L d"]:
        """Put the state that predicts a position there. Families that predict elsewhere override this."""
        return states

    def _check(self, ids: Tensor, attention_mask: Tensor | None) -> None:
        if not isinstance(ids, Tensor):
            raise InvalidInput(f"ids must be a torch tensor, found {shown(ids)}: torch.as_tensor makes one.")
        if ids.ndim != 2 or not ids.numel() or ids.is_floating_point() or ids.dtype == torch.bool:
            raise InvalidInput(
                f"ids must be whole numbers of shape (B, L), at least one, found {ids.dtype} {tuple(ids.shape)}."
            )
        if attention_mask is not None and attention_mask.shape != ids.shape:
            raise InvalidInput(
                f"attention_mask has shape {tuple(attention_mask.shape)}, but ids have {tuple(ids.shape)}."
            )
        if self.max_length is not None and self.config.positions and ids.shape[1] > self.max_length:
            raise InvalidInput(
                f"{ids.shape[1]} positions, but this {self.family} checkpoint has learned only {self.max_length}. "
                "Cut the text."
            )
        # On an accelerator a look at the values would wait for the device.
        if ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
            raise InvalidInput(
                f"id {wrong} is not in the vocabulary of {self.vocab_size} tokens (0 to {self.vocab_size - 1})."
            )


def _sharing_parameters(module: Shared) -> Shared:
    """A copy of a module and of those in it, so that they can be exchanged, with the same parameters."""
    twin = copy.copy(module)
    twin._modules = {name: child and _sharing_parameters(child) for name, child in module._modules.items()}
    return twin


def take_positions(states: Float[Tensor, "B L d"], positions: Int[Tensor, "B n"]) -> Float[Tensor, "B n d"]:
    """The states of some positions of each sequence."""
    return states.gather(1, positions[..., None].expand(-1, -1, states.shape[-1]))


def default_positions(ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"] | None) -> Int[Tensor, "B L"]:
    """0, 1, ... from each sequence's first token on; padding on the left is counted backwards from there."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return positions if valid is None else positions - leading_padding(valid)[:, None]


def leading_padding(valid: Bool[Tensor, "B L"]) -> Int[Tensor, " B"]:
    """How many padded positions precede the first token of each sequence."""
    return valid.int().argmax(dim=1)
