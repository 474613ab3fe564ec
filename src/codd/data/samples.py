"""Text drawn from a causal model, as a dataset of rows: the paper's circuits for open text are trained on such samples.

Row number n is a function of n and the seed alone: rows are drawn in batches, each from a generator of its own, when
they are first asked for. The model is one of ours, or any that the package transformers can load.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from codd import files
from codd.backbones import mini
from codd.backbones.config import Config
from codd.backbones.loading import MODEL_FILES, load_checkpoint
from codd.backbones.tokenizer import Tokenizer
from codd.backbones.transformer import Attention, Block, Transformer, apply_rotary, rotary_angles
from codd.data.packing import PADDING, PackedSequences, concatenate, numbered_seed, token_dtype
from codd.data.pretrained import load_causal_lm
from codd.errors import FormatError, InvalidInput

BATCH = 128
"""Rows that are drawn together. Another number would give other rows."""


@runtime_checkable
class Reader(Protocol):
    """A model in the middle of some texts: it remembers what it has read."""

    def read(self, ids: Int[Tensor, "B n"]) -> Float[Tensor, "B V"]:
        """Logits of the token that follows these, which follow all that was read before."""


class MiniReader:
    """One of our causal networks with the keys and values of what it has read."""

    def __init__(self, network: Transformer, rows: int, length: int):
        """For so many texts of at most so many tokens."""
        config = network.config
        self.network, self.length = network, 0
        weight = network.embedding.tokens.weight
        shape = (config.layers, 2, rows, config.kv_heads, length, config.head_dim)
        half = weight.device.type == "cuda"  # where the layers compute in bfloat16
        self.kept = torch.empty(shape, dtype=torch.bfloat16 if half else weight.dtype, device=weight.device)

    def read(self, ids: Int[Tensor, "B n"]) -> Float[Tensor, "B V"]:
        """Logits of the next token, by one pass over the new tokens alone."""
        network, config = self.network, self.network.config
        assert config.rope_theta is not None, "mini has rotary positions"
        begin, end = self.length, self.length + ids.shape[1]
        places = torch.arange(begin, end, device=ids.device)
        turns = rotary_angles(places[None], config.head_dim, config.rope_theta)
        visible = torch.arange(end, device=ids.device) <= places[:, None]
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
            x = network.embedding(ids, places.expand(ids.shape), None)
            for block, kept in zip(network.blocks, self.kept, strict=True):
                assert isinstance(block, Block)
                assert block.attention_norm is not None
                x = x + _attend(block.attention, block.attention_norm(x), turns, visible, kept[..., :end, :])
                x = x + block.mlp(block.mlp_norm(x))
            assert network.final_norm is not None
            logits = network.logits(network.final_norm(x[:, -1]))
        self.length = end
        return logits.float()


def _attend(
    attention: Attention,
    x: Float[Tensor, "B n d"],
    turns: tuple[Tensor, Tensor],
    visible: Tensor,
    kept: Float[Tensor, "2 B H L D"],
) -> Float[Tensor, "B n d"]:
    """What new positions read from all; their keys and values are kept."""
    config = attention.config
    counts = (config.heads, config.kv_heads, config.kv_heads)
    parts = attention.qkv(x).unflatten(-1, (-1, config.head_dim)).split(counts, dim=-2)
    q, k, v = (part.transpose(1, 2) for part in parts)
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = attention.q_norm(q), attention.k_norm(k)
    new = slice(visible.shape[1] - x.shape[1], None)
    kept[0][:, :, new] = apply_rotary(k, *turns)
    kept[1][:, :, new] = v
    mixed = F.scaled_dot_product_attention(
        apply_rotary(q, *turns).to(kept.dtype),
        kept[0],
        kept[1],
        attn_mask=visible,
        enable_gqa=config.kv_heads < config.heads,
    )
    out: Tensor = attention.out(mixed.transpose(1, 2).flatten(2))
    return out


class TransformersReader:
    """A model of the package transformers, with the cache that it gives."""

    def __init__(self, model: Any):
        """Wrap a causal language model; nothing is read yet."""
        self.model, self.past = model, None

    def read(self, ids: Int[Tensor, "B n"]) -> Float[Tensor, "B V"]:
        """Logits of the next token, by one pass over the new tokens alone."""
        out = self.model(input_ids=ids, past_key_values=self.past, use_cache=True)
        self.past = out.past_key_values
        logits: Tensor = out.logits[:, -1].float()
        return logits


@dataclass(frozen=True)
class CausalModel:
    """A causal language model that samples are drawn from, and its special tokens."""

    network: Any
    """A `Transformer` of ours, or a model of the package transformers."""
    tokenizer: Tokenizer
    begin: int | None
    """The token that a text is begun with: the beginning-of-text, or the end of the text before."""
    eos: int | None
    never: tuple[int, ...]
    """Tokens that are not text: mask and padding."""
    max_length: int | None
    device: torch.device

    def reader(self, rows: int, length: int) -> Reader:
        """To read so many texts of at most so many tokens."""
        if isinstance(self.network, Transformer):
            return MiniReader(self.network, rows, length)
        return TransformersReader(self.network)


def load_causal(source: str | os.PathLike[str], device: torch.device) -> CausalModel:
    """A folder or hub id: a model of ours with ``causal: true``, or one that the package transformers can load."""
    folder = files.local_folder(source, MODEL_FILES)
    if mini.recognises(Config.read(folder)):
        loaded = load_checkpoint(folder, device=device)
        if not loaded.backbone.config.causal:
            raise InvalidInput(f"{folder}: is a denoiser; samples are drawn from a causal model (`causal: true`).")
        special, limit = loaded.backbone.special, loaded.backbone.max_length
        begin = special.eos if special.bos is None else special.bos
        never = tuple(id for id in (special.mask, special.pad) if id is not None and id != special.eos)
        tokenizer = _required(loaded.tokenizer, folder)
        return CausalModel(loaded.backbone.network, tokenizer, begin, special.eos, never, limit, device)
    return _load_other(folder, device)


def _required(tokenizer: Tokenizer | None, folder: Path) -> Tokenizer:
    if tokenizer is None:
        raise FormatError(f"{folder}: has no tokenizer files, so that its samples mean nothing to another network.")
    return tokenizer


def _load_other(folder: Path, device: torch.device) -> CausalModel:
    model = load_causal_lm(folder, dtype=torch.float32 if device.type == "cpu" else "auto").to(device)
    config = model.config
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    begin = eos if config.bos_token_id is None else config.bos_token_id
    limit = getattr(config, "max_position_embeddings", None)
    tokenizer = _required(Tokenizer.from_folder(folder), folder)
    return CausalModel(model, tokenizer, begin, eos, (), limit, device)


@torch.no_grad()
def sample(
    model: CausalModel, prompt: Sequence[int], rows: int, count: int, generator: torch.Generator
) -> Int[Tensor, "rows count"]:
    """Continuations of so many tokens, drawn at temperature 1, each token from the whole distribution."""
    reader = model.reader(rows, len(prompt) + count)
    ids = torch.tensor([list(prompt)] * rows, device=model.device)
    out = torch.empty(rows, count, dtype=torch.long, device=model.device)
    never = torch.tensor(model.never, dtype=torch.long, device=model.device)
    for at in range(count):
        logits = reader.read(ids).index_fill(-1, never, -torch.inf)
        ids = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        out[:, at] = ids[:, 0]
    return out


class SampledDataset:
    """Rows of samples, one text each; what the model was prompted with is not scored."""

    def __init__(
        self, model: CausalModel, tokenizer: Tokenizer, *, count: int, length: int, seed: int, prompt: str = ""
    ):
        """``tokenizer`` is that of the network to be cached; if the model has another one, texts are encoded anew."""
        self.model, self.tokenizer = model, tokenizer
        self.count, self.length, self.seed = count, length, seed
        self.same = _vocabulary(model.tokenizer) == _vocabulary(tokenizer)
        if not prompt and model.begin is None:
            raise InvalidInput("the causal model has no token to begin a text with. Give it a prompt.")
        self.given = tokenizer.encode(prompt)
        self.prompt = model.tokenizer.encode(prompt) if prompt else [model.begin or 0]
        room = length if model.max_length is None else min(length, model.max_length)
        self.drawn = room - len(self.prompt) if prompt else room
        if self.drawn < 1:
            raise InvalidInput(f"the prompt has {len(self.prompt)} tokens and leaves no room in {room}. Shorten it.")
        self._batch = functools.lru_cache(maxsize=64)(self._draw)  # they are small, and took long

    def __len__(self) -> int:
        """Rows in an epoch; further ones are other samples."""
        return self.count

    def take(self, start: int, count: int) -> PackedSequences:
        """``count`` rows, from row number ``start`` on."""
        size = min(BATCH, self.count)
        parts = []
        for number in range(start // size, (start + count - 1) // size + 1):
            here = slice(max(start - number * size, 0), start + count - number * size)
            rows = self._batch(number)
            parts.append(PackedSequences(rows.tokens[here], rows.segments[here], rows.scored[here]))
        return concatenate(parts)

    def _draw(self, number: int) -> PackedSequences:
        generator = torch.Generator(self.model.device).manual_seed(numbered_seed(self.seed, number))
        drawn = sample(self.model, self.prompt, min(BATCH, self.count), self.drawn, generator).tolist()
        texts = drawn if self.same else [self._encode(ids) for ids in drawn]
        shape = (len(texts), self.length)
        tokens: NDArray[Any] = np.zeros(shape, token_dtype(self.tokenizer.vocab_size))
        segments, scored = np.full(shape, PADDING, np.uint8), np.zeros(shape, np.bool_)
        for row, text in enumerate(texts):
            whole = [*self.given, *text][: self.length]
            tokens[row, : len(whole)] = whole
            segments[row, : len(whole)] = 1
            scored[row, len(self.given) : len(whole)] = True
        return PackedSequences(tokens, segments, scored)

    def _encode(self, ids: Sequence[int]) -> list[int]:
        """The same text in the other network's tokens; where a text ends another begins."""
        texts: list[list[int]] = [[]]
        for id in ids:
            if id == self.model.eos:
                texts.append([])
            else:
                texts[-1].append(id)
        decoded = [self.model.tokenizer.decode(text, skip_unknown=True) for text in texts]
        encoded = self.tokenizer.encode_batch(decoded, parse_special=False)
        end = [] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id]
        out = encoded[0]
        for text in encoded[1:]:
            out = [*out, *end, *text]
        return out


def _vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    return dict(tokenizer.backend.get_vocab(with_added_tokens=True))
