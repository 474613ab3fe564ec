"""What a causal language model says of whole texts: `codd.backbones.causal` loads ours, and those of transformers.

Network and causal model must share their tokens. They need not have tables of one size: denoisers of GPT-2's tokens
have the mask behind them (50,258 columns against 50,257), and some checkpoints pad theirs. Ids are shared from 0 on;
what the causal model lacks it gives probability zero, and what the network lacks is left out.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones import Backbone
from codd.backbones.backbone import take_positions
from codd.backbones.causal import CausalModel
from codd.errors import InvalidInput

NUMBERS = 2**27
"""The most logits that are held at a time: half a gigabyte in float32."""


class Read(NamedTuple):
    """The outputs of a network for a batch of texts."""

    logits: Float[Tensor, "B L V"]
    """Logits of the token that follows each position."""
    states: Float[Tensor, "B L d"]
    """The last hidden states."""


@torch.no_grad()
def read(model: CausalModel, ids: Int[Tensor, "B L"], valid: Bool[Tensor, "B L"]) -> Read:
    """The outputs for a batch of texts, padded on the right, in one forward pass without a KV cache."""
    if isinstance(model.network, Backbone):
        states = model.network.states(ids, valid)
        return Read(model.network.logits(states, ids), states)
    out = model.network(input_ids=ids, attention_mask=valid.long(), use_cache=False, output_hidden_states=True)
    return Read(out.logits, out.hidden_states[-1])


def logits_at(model: CausalModel, ids: Int[Tensor, "B T"], places: Int[Tensor, "B S"]) -> Float[Tensor, "B S V"]:
    """The logits at some places of each text, about the token that follows; float32, on the places' device."""
    if model.max_length is not None and ids.shape[1] > model.max_length:
        raise InvalidInput(
            f"the causal model was made for {model.max_length} tokens, found texts of {ids.shape[1]}: give shorter "
            "rows or contexts."
        )
    parts, size = [], rows_at_once(model, ids.shape[1])
    for begin in range(0, len(ids), size):
        some, at = (each[begin : begin + size].to(model.network.device) for each in (ids, places))
        logits = read(model, some, torch.ones_like(some, dtype=torch.bool)).logits
        parts.append(take_positions(logits, at).float().to(places.device))
    return torch.cat(parts)


def rows_at_once(model: CausalModel, length: int) -> int:
    """How many texts of this length are read together."""
    return max(1, NUMBERS // (length * model.vocab_size))
