"""Making a cache: each shard is a function of the settings and its number, so that any of them can be made again.

Rows and noise of a shard are drawn on the CPU from (seed, number). The frozen network is evaluated once. Finished
shards stay: a run that was killed goes on with the shards that are missing or damaged.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.circuits import HMM
from codd.data.datasets import evaluate_windows
from codd.data.packing import PackedSequences, numbered_seed, widen
from codd.data.windows import MaskedRows, WindowBatch, choose_windows, predict_windows
from codd.distributed import DistributedContext
from codd.errors import Diverged, FormatError, InvalidInput
from codd.training.logit_cache import storage
from codd.training.logit_cache.cached_windows import CachedWindows, TopK, join, keep_top_k
from codd.training.logit_cache.storage import CacheSettings, Index
from codd.training.logit_cache.top_k import choose_top_k

SAMPLE = 64
"""Windows that the length of the lists is measured on."""
ELEMENTS = 2**25
"""Logits that are held at once."""

HALF = 65504.0
"""The largest number in float16."""

RowsAt = Callable[[int], PackedSequences]
"""Gives the rows of the shard of a number."""


class Progress(NamedTuple):
    """How much of its part of a cache a process has made."""

    rows: int
    """Rows done, those of shards that were finished before included."""
    windows: int
    """Windows made in this run."""
    note: str | None = None
    """A message for the user, such as that a damaged shard is made again."""


def draw_shard(rows: PackedSequences, settings: CacheSettings, number: int, *, absolute: bool = False) -> MaskedRows:
    """Mask the rows of a shard and choose windows, without the network; rows without a window are left out.

    ``absolute`` as for `codd.data.windows.mask_rows`.
    """
    generator = torch.Generator().manual_seed(numbered_seed(settings.seed, number))
    drawn = choose_windows(rows, settings.window, generator, absolute=absolute)
    use = drawn.valid.any(-1)
    if not use.any():
        use[0] = True  # a batch of no rows is nothing that networks are made for
    return drawn.each(lambda x: x[use])


def windows_per_row(rows: PackedSequences, settings: CacheSettings) -> float:
    """How many windows a row gives; none at all is an error."""
    windows = int(draw_shard(rows, settings, 0).valid.sum())
    if not windows:
        raise InvalidInput(
            f"{len(rows.tokens)} rows hold no window of {settings.window.length} tokens with a masked one: the texts "
            "are too short. Give other data or a smaller window."
        )
    return windows / len(rows.tokens)


def build(
    backbone: Backbone,
    rows_at: RowsAt,
    settings: CacheSettings,
    folder: Path,
    context: DistributedContext,
    *,
    circuit: HMM | None = None,
    batch_rows: int = 32,
) -> Iterator[Progress]:
    """Make the shards that are missing in a folder that is `storage.claimed`.

    The length of the lists is chosen by their effect on ``circuit``; None: a random circuit.
    """
    rows_at = functools.lru_cache(maxsize=1)(rows_at)  # those of the first shard are looked at twice
    if context.is_main:
        open_index(backbone, rows_at, settings, folder, circuit)
    context.barrier()
    index = storage.read_index(folder)
    assert index is not None, "it was just written"
    known = storage.records(folder, settings)
    rows, windows = 0, 0
    yield Progress(rows, windows)
    for number in range(context.rank, settings.shards, context.world_size):
        record = known[number]
        if record is not None:
            try:
                storage.checked_content(folder, number, record)
            except FormatError as error:
                yield Progress(rows, windows, f"{error}; it is made again")
                record = None
        if record is None:
            parts = []
            for made in evaluate_shard(backbone, rows_at(number), settings, number, index.top_k, batch_rows):
                parts.append(made)
                windows += len(made)
                yield Progress(min(rows + batch_rows * len(parts), rows + settings.shard_rows), windows)
            whole = join(parts, sum(map(len, parts)), sum(len(part.lists.truth) for part in parts), "cpu")
            try:
                storage.write_shard(folder, number, whole, settings)
            except OSError as error:
                done = sum(record is not None for record in storage.records(folder, settings))
                raise OSError(
                    f"{folder / storage.shard_name(number)}: could not be written ({error.strerror or error}). {done} "
                    f"of {settings.shards} shards are finished and kept: make room and run the same command to go on."
                ) from error
        rows += settings.shard_rows
        yield Progress(rows, windows)
    context.barrier()


def open_index(
    backbone: Backbone, rows_at: RowsAt, settings: CacheSettings, folder: Path, circuit: HMM | None
) -> Index:
    """Write the index of a new cache, or read that of an older run, which must be of the same settings."""
    index = storage.read_index(folder)
    if index is None:
        batches = sample_windows(backbone, rows_at, settings)
        # Far from neutral where the network has none, so that the tail matters to it.
        circuit = circuit or HMM.random(64, backbone.vocab_size, scale=2.0).to(backbone.device)
        top_k, measured = choose_top_k(batches, circuit, top_k=settings.top_k, tolerance=settings.tolerance)
        index = Index(settings, top_k, measured)
        storage.write_index(folder, index)
    elif index.settings != settings:
        raise InvalidInput(
            f"{folder}: is a cache of other settings ({_difference(index.settings, settings)}). Give another --out, or "
            "--fresh to begin again."
        )
    return index


def check(backbone: Backbone, circuit: HMM | None, settings: CacheSettings) -> None:
    """Refuse what cannot give a cache, before any work."""
    if backbone.config.causal:
        raise InvalidInput("this backbone is a causal model; a cache needs a denoiser. Draw samples from it instead.")
    if circuit is not None and circuit.vocab_size != backbone.vocab_size:
        raise InvalidInput(
            f"the circuit is over {circuit.vocab_size} tokens, the backbone over {backbone.vocab_size}: they do not "
            "belong together."
        )
    if settings.top_k is not None and not 1 <= settings.top_k <= backbone.vocab_size:
        raise InvalidInput(f"top_k must be from 1 to the {backbone.vocab_size} tokens, found {settings.top_k}.")


def _difference(old: CacheSettings, new: CacheSettings) -> str:
    was, now = (json.loads(json.dumps(dataclasses.asdict(each))) for each in (old, new))
    return ", ".join(f"{name} was {was[name]}, is {now[name]}" for name in now if was[name] != now[name])


@torch.no_grad()
def sample_windows(backbone: Backbone, rows_at: RowsAt, settings: CacheSettings) -> list[WindowBatch]:
    """Some windows of the first shards with the network's whole answer."""
    many = max(1, ELEMENTS // (settings.window.per_row * settings.window.length * backbone.vocab_size))
    batches, sampled = [], 0
    for number in range(settings.shards):
        drawn = draw_shard(rows_at(number), settings, number, absolute=backbone.block_size is not None)
        for part in _parts(drawn, many, backbone.device):
            if not bool(part.valid.any()):
                continue
            windows = predict_windows(backbone, settings.mask_id, part, settings.window.length)
            assert windows.logits is not None
            _check_numbers(windows.logits.logsumexp(-1).isnan() & windows.masked, number)
            batches.append(windows)
            sampled += int(part.valid.sum())
            if sampled >= SAMPLE:
                return batches
    return batches


def _parts(drawn: MaskedRows, rows: int, device: torch.device) -> Iterator[MaskedRows]:
    for begin in range(0, len(drawn.level), rows):
        yield drawn.each(lambda x, begin=begin: x[begin : begin + rows].to(device))  # type: ignore[misc]  # mypy and defaults


def _check_numbers(bad: Tensor, number: int) -> None:
    if bool(bad.any()):
        raise Diverged(
            f"the network's logits are not numbers in shard {number}: check the backbone's weights and precision. "
            "Finished shards are kept."
        )


@torch.no_grad()
def evaluate_shard(
    backbone: Backbone, rows: PackedSequences, settings: CacheSettings, number: int, k: int, batch_rows: int
) -> Iterator[CachedWindows]:
    """The windows of a shard, some rows at a time."""
    drawn = draw_shard(rows, settings, number, absolute=backbone.block_size is not None)
    for part in _parts(drawn, batch_rows, backbone.device):
        found = evaluate_windows(backbone, settings.mask_id, part, settings.window.length)
        truth = widen(found.tokens[found.masked])
        lists = _lists(backbone, settings.mask_id, found.features[found.masked], truth, k)
        _check_numbers(lists.truth.isnan(), number)
        features = found.features.clamp(-HALF, HALF).half().cpu() if settings.features else None
        tokens, masked, level, *columns = (x.cpu() for x in (found.tokens, found.masked, found.level, *lists))
        yield CachedWindows(tokens, masked, level, TopK(*columns), features)


def _lists(backbone: Backbone, mask_id: int, states: Float[Tensor, "M d"], truth: Int[Tensor, " M"], k: int) -> TopK:
    """The head, at masked positions alone and not at all of them at once."""
    many, parts = max(1, ELEMENTS // backbone.vocab_size), []
    for begin in range(0, max(1, len(truth)), many):
        logits = backbone.masked_logits_from_states(states[None, begin : begin + many], mask_id=mask_id)
        parts.append(keep_top_k(logits[0], truth[begin : begin + many], k))
    return TopK(*(torch.cat(column) for column in zip(*parts, strict=True)))
