"""What several tests of training share: the tiny recipe, a vocabulary, a network with weights that say something."""

import functools
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from codd.backbones.tokenizer import Tokenizer
from codd.backbones.transformer import Transformer
from codd.data.packing import Example, PackedSequences, pack
from codd_lab.pretraining.bpe import train_bpe
from codd_lab.pretraining.recipe import SHIPPED
from codd_lab.problems import problems
from tests.support.checkpoints import random_network

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
    sizes = {"layers": 2, "mlp_width": 32, "vocab_size": vocab_size, "causal": causal, "mask_token_id": 0}
    return random_network(seed=1, std=std, **sizes).network


def packed(texts: list[tuple[int, int]], length: int, vocab_size: int = 30) -> PackedSequences:
    """Random texts, given by the lengths of their question and answer, in rows; token 0 is the mask and the padding."""
    random = np.random.default_rng(5)
    examples = [
        Example(random.integers(1, vocab_size, prompt + answer).astype(np.uint16), prompt) for prompt, answer in texts
    ]
    return pack(examples, length, 0)
