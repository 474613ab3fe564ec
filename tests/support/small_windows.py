"""What tests of circuit training share: a tiny network, rows for it, texts of which the network misses something."""

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from codd.backbones import Backbone
from codd.circuits import HMM
from codd.data.packing import Example, PackedSequences, pack
from codd.data.sources import Source
from codd.data.windows import WindowBatch, WindowRecipe
from codd.distributed import DistributedContext
from codd.training.circuit_recipe import CircuitRecipe
from tests.support.checkpoints import random_network
from tests.support.small_runs import packed

CPU = torch.device("cpu")
ALONE = DistributedContext(0, 1, CPU)
PAIRS = 4
VOCAB, MASK = 2 * PAIRS + 1, 2 * PAIRS
WINDOW, WIDTH = 8, 16
QUESTIONS = packed([(5, 16), (3, 8), (9, 24), (1, 8), (4, 32), (2, 5)] * 20, 48)


@functools.cache
def network(*, std: float = 0.5, vocab_size: int = VOCAB) -> Backbone:
    """Random weights; with ``std`` 0 every token but the mask, which is the last, is as likely as any other."""
    return random_network(std=std, vocab_size=vocab_size, mask_token_id=vocab_size - 1)


def own_network(**options: Any) -> Backbone:
    """One that may be changed."""
    return copy.deepcopy(network(**options))


def rows_of_pairs(number: int, count: int = 16, answer: int = 16) -> PackedSequences:
    """Answers in which each second token is fixed by the one before it."""
    random = np.random.default_rng(number)
    examples = []
    for _ in range(count):
        first = random.integers(PAIRS, size=(3 + answer) // 2 + 1)
        tokens = np.stack((first, first + PAIRS), axis=1).flatten()[: 2 + answer]
        examples.append(Example(tokens.astype(np.uint16), 2))
    return pack(examples, 2 + answer, MASK)


def prose(count: int, length: int, vocab_size: int = VOCAB - 1) -> PackedSequences:
    tokens = np.random.default_rng(2).integers(0, vocab_size, (count, length)).astype(np.uint16)
    return PackedSequences(tokens, np.ones(tokens.shape, np.uint8), np.ones(tokens.shape, np.bool_))


def flat(vocab_size: int) -> HMM:
    """The circuit that changes nothing, over windows of this length."""
    tables = (torch.zeros(shape).log_softmax(-1) for shape in ((2,), (2, 2), (2, vocab_size)))
    return HMM(*tables, window=WINDOW)


def recipe_of(**changes: Any) -> CircuitRecipe:
    fields: dict[str, Any] = {
        "name": "small",
        "data": (Source("text", "none", path="none.txt"),),
        "batch_windows": 32,
        "windows": WindowRecipe(WINDOW),
    }
    return CircuitRecipe(**{**fields, **changes})


def random_windows(
    seed: int, vocab: int = 6, *, count: int = 6, size: int = 5, dtype: torch.dtype = torch.float64
) -> WindowBatch:
    """Truth, masks, answers, features and levels by chance; the first window has no masks."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, size, vocab, generator=generator, dtype=dtype)
    tokens = torch.randint(vocab, (count, size), generator=generator)
    masked = torch.rand(count, size, generator=generator) < 0.6
    masked[0] = False
    features = torch.randn(count, size, WIDTH, generator=generator, dtype=dtype)
    level = torch.rand(count, generator=generator, dtype=dtype).clamp(min=0.1)
    return WindowBatch(tokens, masked, logits=logits, features=features, level=level)


def check_gradients(parameters: Mapping[str, Tensor], found: Mapping[str, Tensor], loss: Callable[[], float]) -> int:
    """Gradients along random directions are central differences of the loss; how many are not zero everywhere."""
    generator, step = torch.Generator().manual_seed(0), 1e-5
    for name, parameter in parameters.items():
        direction, kept = torch.randn(parameter.shape, generator=generator, dtype=torch.float64), parameter.data.clone()
        values = []
        for sign in (1, -1):
            parameter.data = kept + sign * step * direction
            values.append(loss())
        parameter.data = kept
        wanted = (values[0] - values[1]) / (2 * step)
        assert abs(float((found[name] * direction).sum()) - wanted) <= 1e-5 * abs(wanted) + 1e-6, name
    return sum(bool(found[name].any()) for name in parameters)


def some(windows: WindowBatch, part: slice) -> WindowBatch:
    return WindowBatch(*(None if x is None else x[part] for x in windows))
