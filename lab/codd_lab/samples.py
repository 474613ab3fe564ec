"""Text drawn from a causal model: the paper's circuits for open text are trained on such samples.

    python -m codd_lab.samples openai-community/gpt2 --count 25000 --length 768 --out samples.jsonl

The model is one of ours, or any that the package transformers can load.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from codd import files
from codd.backbones import mini
from codd.backbones.causal import load_causal_lm
from codd.backbones.config import Config
from codd.backbones.loading import MODEL_FILES, load_checkpoint
from codd.backbones.tokenizer import Tokenizer
from codd.backbones.transformer import Attention, Block, Transformer, apply_rotary, rotary_angles
from codd.data.packing import numbered_seed
from codd.distributed import choose_device
from codd.errors import FormatError, InvalidInput

BATCH = 128
"""Samples that are drawn together. Another number would give other ones."""


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


def texts(model: CausalModel, *, count: int, length: int, seed: int, prompt: str = "") -> Iterator[str]:
    """Texts drawn from the model, ``count`` samples of at most ``length`` tokens; one that ends is followed by another.

    Sample number n is a function of n and the seed. InvalidInput if the prompt leaves no room, or if the model has
    no token to begin a text with and there is no prompt.
    """
    if not prompt and model.begin is None:
        raise InvalidInput("the causal model has no token to begin a text with. Give it a prompt.")
    begin = model.tokenizer.encode(prompt) if prompt else [model.begin or 0]
    room = (length if model.max_length is None else min(length, model.max_length)) - (len(begin) if prompt else 0)
    if room < 1:
        raise InvalidInput(f"the prompt has {len(begin)} tokens and leaves no room in {length}. Shorten it.")
    for number, first in enumerate(range(0, count, BATCH)):
        generator = torch.Generator(model.device).manual_seed(numbered_seed(seed, number))
        drawn = sample(model, begin, BATCH, room, generator)[: count - first]
        for ids in drawn.tolist():
            yield from _documents(model, [*(begin if prompt else []), *ids])


def _documents(model: CausalModel, ids: Sequence[int]) -> Iterator[str]:
    """The texts of a sample: where one ends another begins."""
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == model.eos:
            parts.append([])
        else:
            parts[-1].append(token)
    for part in parts:
        if text := model.tokenizer.decode(part):
            yield text


def main() -> None:
    """Write JSON lines with a text each, which recipes and ``codd cache --data`` read."""
    parser = argparse.ArgumentParser(prog="python -m codd_lab.samples", description=main.__doc__)
    parser.add_argument("model", help="a causal model: a folder or hub id")
    parser.add_argument("--count", type=int, default=1000, help="samples (default: 1000)")
    parser.add_argument("--length", type=int, default=384, help="tokens of a sample at most (default: 384)")
    parser.add_argument("--prompt", default="", help="what samples begin with (default: the beginning of a text)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    args = parser.parse_args()
    model = load_causal(args.model, choose_device(args.device))
    drawn = texts(model, count=args.count, length=args.length, seed=args.seed, prompt=args.prompt)
    with files.replacing(args.out.parent, args.out.name) as (temporary,), temporary.open("w") as file:
        for text in drawn:
            file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
