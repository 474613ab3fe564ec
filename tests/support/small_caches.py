"""A small network, rows for it, and caches of what it says of them."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from codd.backbones import Backbone
from codd.circuits import HMM
from codd.data.packing import Example, PackedDataset, PackedSequences, pack
from codd.data.windows import WindowRecipe
from codd.distributed import DistributedContext
from codd.training.logit_cache.build import Progress, build, check
from codd.training.logit_cache.reader import LogitCache
from codd.training.logit_cache.storage import CacheSettings, claimed
from tests.support.checkpoints import random_network

CPU = torch.device("cpu")
ALONE = DistributedContext(0, 1, CPU)
VOCAB, MASK, WINDOW = 90, 0, 8


@functools.cache
def network(vocab_size: int = VOCAB, seed: int = 3) -> Backbone:
    return random_network(seed=seed, vocab_size=vocab_size, mask_token_id=MASK)


def rows_of(vocab_size: int = VOCAB, *, length: int = 40, texts: int = 255, mask: int = MASK) -> PackedDataset:
    """Questions of a few tokens and answers of one to three blocks."""
    random = np.random.default_rng(7)
    allowed = np.delete(np.arange(vocab_size), mask)
    kind = np.uint16 if vocab_size <= 2**16 else np.uint32
    examples = []
    for _ in range(40):
        prompt, answer = int(random.integers(1, 6)), WINDOW * int(random.integers(1, 4))
        examples.append(Example(random.choice(allowed, prompt + answer).astype(kind), prompt))
    return PackedDataset(pack(examples, length, mask, texts), 0)


def settings_of(**changes: Any) -> CacheSettings:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "mask_id": MASK,
        "shards": 3,
        "shard_rows": 6,
        "window": WindowRecipe(WINDOW, per_row=3),
        "features": True,
        "top_k": 16,
    }
    return CacheSettings(**{**fields, **changes})


def rows_at(settings: CacheSettings, rows: PackedDataset | None = None) -> Callable[[int], PackedSequences]:
    source = rows or rows_of(settings.vocab_size)
    return lambda shard: source.take(shard * settings.shard_rows, settings.shard_rows)


def steps(
    folder: Path,
    settings: CacheSettings,
    *,
    backbone: Backbone | None = None,
    circuit: HMM | None = None,
    rows: Callable[[int], PackedSequences] | None = None,
    fresh: bool = False,
) -> list[Progress]:
    """As `codd cache` makes a cache."""
    backbone = backbone or network(settings.vocab_size)
    with claimed(folder, fresh=fresh):
        check(backbone, circuit, settings)
        given = rows or rows_at(settings)
        return list(build(backbone, given, settings, folder, ALONE, circuit=circuit, batch_rows=4))


def made(folder: Path, settings: CacheSettings | None = None, **more: Any) -> LogitCache:
    steps(folder, settings or settings_of(), **more)
    return LogitCache.open(folder)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}
