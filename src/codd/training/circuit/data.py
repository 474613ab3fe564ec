"""What a circuit is trained on: windows of hidden states in memory, of a logit cache, or of a changing network."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from codd.backbones import Tokenizer, load_checkpoint, mini
from codd.backbones.backbone import Backbone
from codd.backbones.loading import BUNDLED
from codd.data.datasets import STRATA, WindowDataset, build_hidden_states
from codd.data.packing import MAX_TEXTS_PER_ROW, SequenceDataset, concatenate, numbered_seed
from codd.data.sources import Source
from codd.data.tokenization import PackingConfig, load_source
from codd.data.windows import WindowBatch, check_lengths, draw_windows, supports_packing
from codd.distributed import DistributedContext
from codd.errors import Diverged, InvalidInput
from codd.training.circuit.initial import CircuitSpec
from codd.training.circuit.validation import HeldOut
from codd.training.circuit_recipe import AUTO, CircuitRecipe, TablesRecipe
from codd.training.logit_cache.cached_windows import CachedWindows
from codd.training.logit_cache.reader import LogitCache
from codd.training.logit_cache.sources import adapter_digest, network_name
from codd.training.run import VALIDATION_SEED


@dataclass(frozen=True)
class TrainingData:
    """What a circuit is trained on, and the held-out text that it is scored on."""

    recipe: CircuitRecipe
    """The recipe, with the circuit that it starts from."""
    spec: CircuitSpec
    dataset: WindowDataset | None
    """None: the network is evaluated at each step, since it changes."""
    draw: Callable[[int], WindowBatch]
    """The windows of a step that are this process's."""
    held_out: Callable[[], Mapping[str, HeldOut]]
    """Held-out text by name, as the network sees it now."""
    tokenizer: Tokenizer | None = None


def prepare(recipe: CircuitRecipe, root: Path, out: Path, context: DistributedContext) -> TrainingData:
    """Load the network, read the data or the cache, evaluate the network on it."""
    strata = strata_of(context)
    cache = None if recipe.cache is None else LogitCache.open(root / recipe.cache)
    dataset: WindowDataset | None = None
    if cache is not None:
        _check_adapter(recipe, cache)
        dataset = cached = _from_cache(cache, recipe, strata, context.device)
        width = 0 if cached.features is None else cached.features.shape[-1]
        if not recipe.validation:
            begun = begun_from(recipe, BUNDLED if recipe.backbone == "bundled" else Path(recipe.backbone))
            spec = CircuitSpec(cache.settings.vocab_size, width, context.device)
            return TrainingData(begun, spec, dataset, _picking(recipe, dataset, strata), dict)
    network = _Network.open(recipe, root, out, context)
    backbone = network.backbone
    if cache is None:
        width = backbone.config.width
    else:
        _check_belongs(cache, width, network)
    begun = begun_from(recipe, network.folder)
    spec = CircuitSpec(backbone.vocab_size, width, context.device)
    validation = list(zip(recipe.validation, network.sources(recipe.validation), strict=True))
    if cache is None:
        sources = network.sources(recipe.data)
        for source, rows in zip(recipe.data, sources, strict=True):
            check_lengths(source.name, rows, recipe.windows.length, absolute=backbone.block_size is not None)
        if recipe.joint.weights != "none":
            spec = spec._replace(backbone=backbone)
            draw = _online(network, sources, strata)
            return TrainingData(begun, spec, None, draw, lambda: network.held_out(validation), network.tokenizer)
    held_out = network.held_out(validation)
    if dataset is None:
        hidden = build_hidden_states(
            backbone,
            network.mask_id,
            [(rows, source.weight) for rows, source in zip(sources, recipe.data, strict=True)],
            recipe.windows,
            windows=recipe.bank.windows,
            rows_at_once=recipe.bank.rows_at_once,
            seed=recipe.seed,
            strata=strata,
        )
        _check_numbers(recipe, bool(hidden.features.isfinite().all()))
        dataset = hidden
    return TrainingData(begun, spec, dataset, _picking(recipe, dataset, strata), lambda: held_out, network.tokenizer)


def begun_from(recipe: CircuitRecipe, checkpoint: Path) -> CircuitRecipe:
    """The recipe with the circuit that training starts from in place of `AUTO`."""
    if recipe.start != AUTO:
        return recipe
    own = checkpoint / "circuit"
    takes = recipe.circuit == TablesRecipe() and recipe.optimizer.rule == "adam" and own.is_dir()
    return dataclasses.replace(recipe, start=str(own) if takes else None)


def _check_numbers(recipe: CircuitRecipe, good: bool) -> None:
    if not good:
        raise Diverged(
            f"{recipe.backbone}: what the network says of the text is not numbers (NaN or infinite): check its weights "
            "and precision. No circuit was trained on it."
        )


def _check_adapter(recipe: CircuitRecipe, cache: LogitCache) -> None:
    """Refuse a cache of the same network with another adapter, or with one where the recipe has none."""
    made_with, wanted = cache.settings.adapter, recipe.adapter
    if made_with == (None if wanted is None else adapter_digest(wanted)):
        return
    had = "without an adapter" if made_with is None else f"with an adapter (digest {made_with})"
    has, again = ("none", "without --adapter") if wanted is None else (wanted, f"with --adapter {wanted}")
    raise InvalidInput(
        f"{cache.folder}: was made {had}, the recipe's adapter is {has}: set adapter to that of the cache, or make the "
        f"cache again {again}."
    )


def _check_belongs(cache: LogitCache, width: int, opened: "_Network") -> None:
    """Refuse a cache that another network has made."""
    network, name = opened.backbone, opened.recipe.backbone
    if cache.settings.vocab_size != network.vocab_size or width not in (0, network.config.width):
        raise InvalidInput(
            f"cache: {opened.recipe.cache} is over {cache.settings.vocab_size} tokens"
            + (f" and hidden states of {width} numbers" if width else "")
            + f", the backbone {name} over {network.vocab_size} and of {network.config.width}: they do not belong "
            "together."
        )
    made_by, main = cache.settings.base, opened.context.is_main  # one process reads all of the weights for it
    other = main and made_by is not None and made_by != network_name(network.family, opened.folder, None)
    if opened.context.broadcast(other):
        raise InvalidInput(
            f"{cache.folder}: was made by another network ({made_by}) than {name}: set backbone to that of the cache, "
            f"make the cache again with --backbone {name}, or train on the cache alone (--set validation=[])."
        )


def strata_of(context: DistributedContext) -> range:
    """The strata of the data that are this process's; InvalidInput if they cannot be shared evenly."""
    if STRATA % context.world_size:
        raise InvalidInput(f"{context.world_size} processes cannot share {STRATA} strata: use 1, 2, 4 or 8.")
    each = STRATA // context.world_size
    return range(context.rank * each, (context.rank + 1) * each)


def _from_cache(cache: LogitCache, recipe: CircuitRecipe, strata: range, device: torch.device) -> CachedWindows:
    """The windows of some strata of a cache."""
    each = len(cache) // STRATA
    if not each:
        raise InvalidInput(f"{cache.folder}: has {len(cache)} windows; there must be at least {STRATA}.")
    if (has := cache.settings.window.length) != recipe.windows.length:
        raise InvalidInput(
            f"{cache.folder}: has windows of {has} tokens, the recipe of {recipe.windows.length}: set windows.length, "
            "or make another cache with --window."
        )
    return cache.load(device, range(strata.start * each, strata.stop * each))


def _picking(recipe: CircuitRecipe, dataset: WindowDataset, strata: range) -> Callable[[int], WindowBatch]:
    return lambda step: dataset.windows(batch_index(recipe, step, strata, len(dataset)))


def batch_index(recipe: CircuitRecipe, step: int, strata: range, held: int) -> Int[Tensor, " n"]:
    """Which of the windows at hand a step takes: the same number from each stratum."""
    each, size = recipe.batch_windows // STRATA, held // len(strata)
    parts = []
    for place, stratum in enumerate(strata):
        generator = torch.Generator().manual_seed(numbered_seed(recipe.seed, step) * STRATA + stratum)
        parts.append(torch.randint(size, (each,), generator=generator) + place * size)
    return torch.cat(parts)


@dataclass(frozen=True)
class _Network:
    """A loaded backbone, and all that is needed to read data for it."""

    recipe: CircuitRecipe
    root: Path
    out: Path
    context: DistributedContext
    tokenizer: Tokenizer
    backbone: Backbone
    folder: Path
    """The checkpoint's folder."""
    mask_id: int

    @classmethod
    def open(cls, recipe: CircuitRecipe, root: Path, out: Path, context: DistributedContext) -> "_Network":
        """Load the recipe's backbone; InvalidInput if it cannot be trained on."""
        source = None if recipe.backbone == "bundled" else recipe.backbone
        if recipe.dtype != "float32" and context.device.type != "cuda":
            raise InvalidInput(f"dtype {recipe.dtype} is for GPUs, this is {context.device}: --set dtype=float32.")
        backbone, tokenizer, folder = load_checkpoint(
            source, device=context.device, dtype=getattr(torch, recipe.dtype), adapter=recipe.adapter
        )
        backbone.batch_invariant = False
        mask_id = backbone.special.mask if backbone.special.mask is not None else getattr(tokenizer, "mask_id", None)
        if tokenizer is None or mask_id is None:
            raise InvalidInput(f"{recipe.backbone}: training needs a checkpoint with a tokenizer and a mask token.")
        if recipe.joint.weights == "all" and backbone.family != mini.NAME:
            raise InvalidInput(
                f"{recipe.backbone}: joint training writes checkpoints of the family {mini.NAME} alone, this one is of "
                f"{backbone.family}: train it with joint.weights lora, which writes an adapter, or its circuit with "
                "none."
            )
        return cls(recipe, root, out, context, tokenizer, backbone, folder, mask_id)

    def sources(self, wanted: Sequence[Source]) -> list[SequenceDataset]:
        """The rows of sources; the main process makes them, the others find what it kept."""
        recipe = self.recipe
        texts = MAX_TEXTS_PER_ROW if supports_packing(self.backbone) else 1
        packing = PackingConfig(recipe.row_length, recipe.windows.length, recipe.seed, texts, tuple(recipe.tails))
        with self.context.main_first():
            return [load_source(s, self.root, self.tokenizer, packing, self.out / "data") for s in wanted]

    def held_out(self, validation: Sequence[tuple[Source, SequenceDataset]]) -> dict[str, HeldOut]:
        """What the network says about the rows that are scored during the run; Diverged if they are not numbers."""
        recipe, prepared = self.recipe, {}
        for source, rows in validation:
            some = rows.take(0, min(len(rows), source.rows or len(rows)))
            size, seed = recipe.windows.length, VALIDATION_SEED
            made = HeldOut.prepare(self.backbone, self.mask_id, some, size, recipe.ratios, seed)
            _check_numbers(recipe, made.is_finite())
            prepared[source.name] = made
        return prepared


def _online(network: _Network, sources: list[SequenceDataset], strata: range) -> Callable[[int], WindowBatch]:
    """Windows of fresh rows, through which gradients reach the network."""
    recipe, backbone = network.recipe, network.backbone
    weights = [source.weight for source in recipe.data]
    rows = max(1, recipe.batch_windows // STRATA // recipe.windows.per_row)
    shares = [max(1, round(rows * weight / sum(weights))) for weight in weights]

    def draw(step: int) -> WindowBatch:
        parts = []
        for stratum in strata:
            number = step * STRATA + stratum
            taken = concatenate([source.take(number * n, n) for source, n in zip(sources, shares, strict=True)])
            generator = torch.Generator(backbone.device).manual_seed(numbered_seed(recipe.seed, number))
            parts.append(draw_windows(backbone, network.mask_id, taken, recipe.windows, generator))
        columns: list[Any] = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
        return WindowBatch(*columns)

    return draw
