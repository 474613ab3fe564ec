"""Text drawn from a causal model: the paper's circuits for open text are trained on such samples.

    python -m codd_lab.samples openai-community/gpt2 --count 25000 --length 768 --out samples.jsonl

The model is one of ours, or any that the package transformers can load.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from codd import files
from codd.backbones import Backbone
from codd.backbones.causal import CausalModel, CausalReader, load_causal
from codd.data.packing import numbered_seed
from codd.distributed import choose_device
from codd.errors import FormatError, InvalidInput

BATCH = 128
"""Samples that are drawn together. Another number would give other ones."""


class Marks(NamedTuple):
    """Special tokens of a causal model."""

    begin: int | None
    """The token that a text is begun with: the beginning-of-text, or the end of the text before."""
    eos: int | None
    never: list[int]
    """Tokens that are not text: mask and padding."""


def marks_of(model: CausalModel) -> Marks:
    """The special tokens of a model of ours, or of the package transformers."""
    if isinstance(model.network, Backbone):
        special = model.network.special
        begin, eos, never = special.bos, special.eos, {special.mask, special.pad}
    else:
        config = model.network.config
        eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        begin, never = config.bos_token_id, set()
    return Marks(eos if begin is None else begin, eos, [id for id in never if id is not None and id != eos])


@torch.no_grad()
def sample(
    model: CausalModel, prompt: Sequence[int], rows: int, count: int, generator: torch.Generator
) -> Int[Tensor, "rows count"]:
    """Continuations of ``count`` tokens, drawn at temperature 1, each token from the whole distribution."""
    reader = CausalReader(model.network, rows, len(prompt) + count)
    ids, drawn = torch.tensor([list(prompt)] * rows, device=generator.device), []
    never = torch.tensor(marks_of(model).never, dtype=torch.long, device=generator.device)
    for _ in range(count):
        logits = reader.read(ids)[:, -1].index_fill(-1, never, -torch.inf)
        ids = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        drawn.append(ids)
    return torch.cat(drawn, 1)


def texts(model: CausalModel, *, count: int, length: int, seed: int, prompt: str = "") -> Iterator[str]:
    """Texts drawn from the model, ``count`` samples of at most ``length`` tokens; one that ends is followed by another.

    Sample number n is a function of n and the seed. InvalidInput if the prompt leaves no room, or if the model has
    no token to begin a text with and there is no prompt; FormatError if it has no tokenizer.
    """
    if model.tokenizer is None:
        raise FormatError(
            "the causal model has no tokenizer files, so that its samples mean nothing to another network."
        )
    marks = marks_of(model)
    if not prompt and marks.begin is None:
        raise InvalidInput("the causal model has no token to begin a text with. Give it a prompt.")
    begin = model.tokenizer.encode(prompt) if prompt else [marks.begin or 0]
    room = (length if model.max_length is None else min(length, model.max_length)) - (len(begin) if prompt else 0)
    if room < 1:
        raise InvalidInput(f"the prompt has {len(begin)} tokens and leaves no room in {length}. Shorten it.")
    for number, first in enumerate(range(0, count, BATCH)):
        generator = torch.Generator(model.network.device).manual_seed(numbered_seed(seed, number))
        drawn = sample(model, begin, BATCH, room, generator)[: count - first]
        for ids in drawn.tolist():
            for part in documents([*(begin if prompt else []), *ids], marks.eos):
                if text := model.tokenizer.decode(part):
                    yield text


def documents(ids: Sequence[int], eos: int | None) -> list[list[int]]:
    """The texts of a sample: where one ends another begins."""
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == eos:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


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
