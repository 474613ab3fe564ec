"""What a circuit is trained on: windows of hidden states in memory, of a logit cache, or of a changing network."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from codd.backbones import Tokenizer, load_checkpoint, mini
from codd.backbones.backbone import Backbone
from codd.backbones.loading import BUNDLED
from codd.data.datasets import STRATA, HiddenStateDataset, build_hidden_states
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
from codd.training.logit_cache.storage import adapter_digest, network_name
from codd.training.run import VALIDATION_SEED


class TrainingData:
    """What a circuit is trained on, and the held-out text that it is scored on: network, rows or a cache, windows."""

    def __init__(self, recipe: CircuitRecipe, root: Path, out: Path, context: DistributedContext):
        """Load the network, read the data or the cache, evaluate the network on it."""
        self.root, self.out, self.context, self.strata = root, out, context, strata_of(context)
        self.recipe = recipe
        """The recipe, once this is made with the circuit that it starts from."""
        self.dataset: HiddenStateDataset | CachedWindows | None = None
        """None: the network is evaluated at each step, since it changes."""
        self.tokenizer: Tokenizer | None = None
        self._held_out: dict[str, HeldOut] = {}
        cache, width = None, 0
        if recipe.cache is not None:
            cache = LogitCache.open(root / recipe.cache)
            _check_adapter(recipe, cache)
            self.dataset = cached = _from_cache(cache, recipe, self.strata, context.device)
            width = 0 if cached.features is None else cached.features.shape[-1]
            if not recipe.validation:  # the network is not needed
                folder = BUNDLED if recipe.backbone == "bundled" else Path(recipe.backbone)
                self.recipe = begun_from(recipe, folder)
                self.spec = CircuitSpec(cache.settings.vocab_size, width, context)
                return
        backbone, self.tokenizer, folder, self._mask_id = _open_network(recipe, context)
        self._backbone = backbone
        if cache is not None:
            _check_belongs(cache, width, backbone, folder, recipe, context)
        self.recipe = begun_from(recipe, folder)
        joint = recipe.joint.weights != "none"
        width = backbone.config.width if cache is None else width
        self.spec = CircuitSpec(backbone.vocab_size, width, context, backbone if joint else None)
        self._validation = self._read(recipe.validation)
        sources = self._read(recipe.data)
        for source, rows in zip(recipe.data, sources, strict=True):
            check_lengths(source.name, rows, recipe.windows.length, absolute=backbone.block_size is not None)
        self._sources = sources
        if joint:
            return
        self._held_out = self._score_held_out()
        if cache is None:
            hidden = build_hidden_states(
                backbone,
                self._mask_id,
                [(rows, source.weight) for rows, source in zip(sources, recipe.data, strict=True)],
                recipe.windows,
                windows=recipe.bank.windows,
                rows_at_once=recipe.bank.rows_at_once,
                seed=recipe.seed,
                strata=self.strata,
            )
            _check_numbers(recipe, bool(hidden.features.isfinite().all()))
            self.dataset = hidden

    def draw(self, step: int) -> WindowBatch:
        """The windows of a step that are this process's."""
        if self.dataset is not None:
            return self.dataset.windows(batch_index(self.recipe, step, self.strata, len(self.dataset)))
        return self._draw_fresh(step)

    def held_out(self) -> Mapping[str, HeldOut]:
        """Held-out text by name, as the network sees it now; Diverged if it does not give numbers."""
        return self._held_out if self.spec.backbone is None else self._score_held_out()

    def _score_held_out(self) -> dict[str, HeldOut]:
        recipe, prepared = self.recipe, {}
        for source, rows in zip(recipe.validation, self._validation, strict=True):
            some = rows.take(0, min(len(rows), source.rows or len(rows)))
            size, seed = recipe.windows.length, VALIDATION_SEED
            made = HeldOut.prepare(self._backbone, self._mask_id, some, size, recipe.ratios, seed)
            _check_numbers(recipe, made.is_finite())
            prepared[source.name] = made
        return prepared

    def _read(self, wanted: Sequence[Source]) -> list[SequenceDataset]:
        """The rows of sources; the main process makes them, the others find what it kept."""
        recipe, tokenizer = self.recipe, self.tokenizer
        assert tokenizer is not None
        texts = MAX_TEXTS_PER_ROW if supports_packing(self._backbone) else 1
        packing = PackingConfig(recipe.row_length, recipe.windows.length, recipe.seed, texts, tuple(recipe.tails))
        with self.context.main_first():
            return [load_source(s, self.root, tokenizer, packing, self.out / "data") for s in wanted]

    def _draw_fresh(self, step: int) -> WindowBatch:
        """Windows of fresh rows, through which gradients reach the network."""
        recipe, backbone, parts = self.recipe, self._backbone, []
        weights = [source.weight for source in recipe.data]
        rows = max(1, recipe.batch_windows // STRATA // recipe.windows.per_row)
        shares = [max(1, round(rows * weight / sum(weights))) for weight in weights]
        for stratum in self.strata:
            number = step * STRATA + stratum
            taken = concatenate([rows.take(number * n, n) for rows, n in zip(self._sources, shares, strict=True)])
            generator = torch.Generator(backbone.device).manual_seed(numbered_seed(recipe.seed, number))
            parts.append(draw_windows(backbone, self._mask_id, taken, recipe.windows, generator))
        columns: list[Any] = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
        return WindowBatch(*columns)


def _open_network(recipe: CircuitRecipe, context: DistributedContext) -> tuple[Backbone, Tokenizer, Path, int]:
    """The recipe's backbone, its tokenizer, folder and mask; InvalidInput if it cannot be trained on."""
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
            f"{backbone.family}: train it with joint.weights lora, which writes an adapter, or its circuit with none."
        )
    return backbone, tokenizer, folder, mask_id


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


def _check_belongs(
    cache: LogitCache, width: int, network: Backbone, folder: Path, recipe: CircuitRecipe, context: DistributedContext
) -> None:
    """Refuse a cache that another network has made."""
    name = recipe.backbone
    if cache.settings.vocab_size != network.vocab_size or width not in (0, network.config.width):
        raise InvalidInput(
            f"cache: {recipe.cache} is over {cache.settings.vocab_size} tokens"
            + (f" and hidden states of {width} numbers" if width else "")
            + f", the backbone {name} over {network.vocab_size} and of {network.config.width}: they do not belong "
            "together."
        )
    made_by = cache.settings.base  # one process reads all of the weights for it
    other = context.is_main and made_by is not None and made_by != network_name(network.family, folder, None)
    if context.broadcast(other):
        raise InvalidInput(
            f"{cache.folder}: was made by another network ({made_by}) than {name}: set backbone to that of the cache, "
            f"make the cache again with --backbone {name}, or train on the cache alone (--set validation=[])."
        )


def strata_of(context: DistributedContext) -> range:
    """The strata of the data that are this process's; InvalidInput if they cannot be shared evenly."""
    return context.shard(STRATA, "strata: use 1, 2, 4 or 8")


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


def batch_index(recipe: CircuitRecipe, step: int, strata: range, held: int) -> Int[Tensor, " n"]:
    """Which of the windows at hand a step takes: the same number from each stratum."""
    each, size = recipe.batch_windows // STRATA, held // len(strata)
    parts = []
    for place, stratum in enumerate(strata):
        generator = torch.Generator().manual_seed(numbered_seed(recipe.seed, step) * STRATA + stratum)
        parts.append(torch.randint(size, (each,), generator=generator) + place * size)
    return torch.cat(parts)
