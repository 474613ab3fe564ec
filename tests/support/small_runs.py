"""What several tests of training share: the tiny recipe, a vocabulary, a network with weights that say something."""

import functools
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from codd.backbones import mini
from codd.backbones.config import Config
from codd.backbones.tokenizer import Tokenizer
from codd.backbones.transformer import Transformer, initialise
from codd.data.packing import Example, PackedSequences, pack
from codd_lab.pretraining.bpe import train_bpe
from codd_lab.pretraining.recipe import SHIPPED
from codd_lab.problems import problems

TINY = SHIPPED / "tiny.yaml"
CPU = torch.device("cpu")


@functools.cache
def small_tokenizer(vocab_size: int = 400) -> Tokenizer:
    return train_bpe([f"{p.question}\n{p.solution}" for p in problems(100)], vocab_size=vocab_size)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A real limit of the system: what is written beyond it fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def small_network(vocab_size: int, *, causal: bool = False, std: float = 0.4) -> Transformer:
    sizes = {"width": 16, "layers": 2, "heads": 2, "mlp_width": 32}
    config = Config({**sizes, "vocab_size": vocab_size, "causal": causal, "mask_token_id": 0}, "a test")
    network = mini.build(config).network
    initialise(network, generator=torch.Generator().manual_seed(1), std=std)
    return network.requires_grad_(False)


def save_network(folder: Path, vocab_size: int = 400, **changes: object) -> Path:
    """A random network of one layer with its tokenizer."""
    tokenizer = small_tokenizer(vocab_size)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_id") for name in ("mask", "eos", "pad")}
    sizes = {"vocab_size": tokenizer.vocab_size, "width": 16, "layers": 1, "heads": 2, "mlp_width": 16}
    built = mini.build(Config({**sizes, **special, **changes}, "a test"))
    initialise(built.network, generator=torch.Generator().manual_seed(3), std=0.3)
    mini.save(built, folder)
    tokenizer.save(folder)
    return folder


def packed(texts: list[tuple[int, int]], length: int, vocab_size: int = 30) -> PackedSequences:
    """Random texts, given by the lengths of their question and answer, in rows; token 0 is the mask and the padding."""
    random = np.random.default_rng(5)
    examples = [
        Example(random.integers(1, vocab_size, prompt + answer).astype(np.uint16), prompt) for prompt, answer in texts
    ]
    return pack(examples, length, 0)
