"""What a circuit is trained on: the network, its data or a cache, and the windows of each step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from codd.backbones import Tokenizer, load_checkpoint, mini
from codd.backbones.backbone import Backbone
from codd.errors import Diverged, InvalidInput
from codd.training import corpus
from codd.training.bank import Supply, fill
from codd.training.cache import Cache
from codd.training.cache_entries import Entries
from codd.training.circuit_recipe import STRATA, CircuitRecipe
from codd.training.held_out import HeldOut
from codd.training.learners import Ground
from codd.training.pretrain import VALIDATION_SEED, mix
from codd.training.recipe import Source
from codd.training.rows import MOST_SEGMENTS, Rows, RowSource
from codd.training.windows import Windows, draw_windows, keeps_texts_apart
from codd.training.workers import Workers

Draw = Callable[[int], Windows]
"""The windows of a step that are this process's."""


@dataclass(frozen=True)
class Setup:
    """What a run reads."""

    ground: Ground
    supply: Supply | None
    """None: the network is asked at each step, since it changes."""
    draw: Draw
    held_out: dict[str, HeldOut]
    tokenizer: Tokenizer | None = None
    ask_again: Callable[[], dict[str, HeldOut]] | None = None
    """Held-out text as the network sees it now, where it changes."""


def prepare(recipe: CircuitRecipe, root: Path, out: Path, workers: Workers) -> Setup:
    """Load the network, read the data or the cache, ask the network what it will be asked."""
    strata = strata_of(workers)
    entries = None
    if recipe.cache is not None:
        entries, vocab_size = _from_cache(Cache.open(root / recipe.cache), recipe, strata, workers.device)
        if not recipe.validation:
            ground = Ground(vocab_size, _width(entries), workers.device)
            return Setup(ground, entries, _picking(recipe, entries, strata), {})
    opened = _open(recipe, root, out, workers)
    backbone, mask_id = opened.backbone, opened.mask_id
    ground = Ground(backbone.vocab_size, backbone.config.width, workers.device)
    if entries is not None:
        _check_belongs(recipe, vocab_size, _width(entries), ground)
        ground = ground._replace(features=_width(entries))
        return Setup(ground, entries, _picking(recipe, entries, strata), opened.held_out(), opened.tokenizer)
    validation, sources = opened.validation(), opened.sources(recipe.data)
    held_out = opened.asked(validation)
    if recipe.joint.weights != "none":
        draw, ground = _online(recipe, backbone, mask_id, sources, strata), ground._replace(backbone=backbone)
        return Setup(ground, None, draw, held_out, opened.tokenizer, lambda: opened.asked(validation))
    pairs = [(rows, source.weight) for rows, source in zip(sources, recipe.data, strict=True)]
    bank = fill(backbone, mask_id, pairs, recipe, strata)
    _check_numbers(recipe, bool(bank.features.isfinite().all()))
    return Setup(ground, bank, _picking(recipe, bank, strata), held_out, opened.tokenizer)


def _open(recipe: CircuitRecipe, root: Path, out: Path, workers: Workers) -> "_Opened":
    source = None if recipe.backbone == "bundled" else recipe.backbone
    backbone, tokenizer, _ = load_checkpoint(source, device=workers.device, dtype=torch.float32, check=True)
    backbone.batch_invariant = False
    mask_id = backbone.special.mask if backbone.special.mask is not None else getattr(tokenizer, "mask_id", None)
    if tokenizer is None or mask_id is None:
        raise InvalidInput(f"{recipe.backbone}: training needs a checkpoint with a tokenizer and a mask token.")
    if recipe.joint.weights == "all" and backbone.family != mini.NAME:
        raise InvalidInput(
            f"{recipe.backbone}: joint training writes checkpoints of the family {mini.NAME} alone, this one is of "
            f"{backbone.family}: train it with joint.weights lora, which writes an adapter, or its circuit with none."
        )
    return _Opened(recipe, root, out, tokenizer, backbone, mask_id, workers)


def _check_numbers(recipe: CircuitRecipe, good: bool) -> None:
    if not good:
        raise Diverged(
            f"{recipe.backbone}: what the network says of the text is not numbers (NaN or infinite): check its weights "
            "and precision. No circuit was trained on it."
        )


def _check_belongs(recipe: CircuitRecipe, vocab_size: int, features: int, ground: Ground) -> None:
    """A cache, made by some network, to the recipe's."""
    if vocab_size != ground.vocab_size or features not in (0, ground.features):
        raise InvalidInput(
            f"cache: {recipe.cache} is over {vocab_size} tokens"
            + (f" and hidden states of {features} numbers" if features else "")
            + f", the backbone {recipe.backbone} over {ground.vocab_size} and of {ground.features}: they do not belong "
            "together."
        )


def strata_of(workers: Workers) -> range:
    """Those of this process."""
    if STRATA % workers.count:
        raise InvalidInput(f"{workers.count} processes cannot share {STRATA} strata: use 1, 2, 4 or 8.")
    each = STRATA // workers.count
    return range(workers.rank * each, (workers.rank + 1) * each)


def _from_cache(cache: Cache, recipe: CircuitRecipe, strata: range, device: torch.device) -> tuple[Entries, int]:
    """The windows of some strata of a cache, and over how many tokens it is."""
    each = len(cache) // STRATA
    if not each:
        raise InvalidInput(f"{cache.folder}: has {len(cache)} windows; there must be at least {STRATA}.")
    if cache.window != recipe.windows.length:
        raise InvalidInput(
            f"{cache.folder}: has windows of {cache.window} tokens, the recipe of {recipe.windows.length}: set "
            "windows.length, or make another cache with --window."
        )
    return cache.load(device, range(strata.start * each, strata.stop * each)), cache.vocab_size


def _width(entries: Entries) -> int:
    return 0 if entries.features is None else entries.features.shape[-1]


def _picking(recipe: CircuitRecipe, supply: Supply, strata: range) -> Draw:
    return lambda step: supply.windows(index_of(recipe, step, strata, len(supply)))


def index_of(recipe: CircuitRecipe, step: int, strata: range, held: int) -> Int[Tensor, " n"]:
    """Which of the windows at hand a step takes: the same number from each stratum."""
    each, size = recipe.batch_windows // STRATA, held // len(strata)
    parts = []
    for place, stratum in enumerate(strata):
        generator = torch.Generator().manual_seed(mix(recipe.seed, step) * STRATA + stratum)
        parts.append(torch.randint(size, (each,), generator=generator) + place * size)
    return torch.cat(parts)


@dataclass(frozen=True)
class _Opened:
    """The data of a run."""

    recipe: CircuitRecipe
    root: Path
    out: Path
    tokenizer: Tokenizer
    backbone: Backbone
    mask_id: int
    workers: Workers

    def sources(self, wanted: Sequence[Source]) -> list[RowSource]:
        """Rows; the leading process makes them, the others find what it kept."""
        recipe = self.recipe
        texts = MOST_SEGMENTS if keeps_texts_apart(self.backbone) else 1
        layout = corpus.Layout(recipe.row_length, recipe.windows.length, recipe.seed, texts, tuple(recipe.tails))
        if not self.workers.leads:
            self.workers.wait()
        found = [corpus.open_source(s, self.root, self.tokenizer, layout, self.out / "data") for s in wanted]
        if self.workers.leads:
            self.workers.wait()
        return found

    def validation(self) -> dict[str, Rows]:
        """The rows that are scored during the run."""
        wanted = self.recipe.validation
        found = zip(wanted, self.sources(wanted), strict=True)
        return {source.name: rows.take(0, min(len(rows), source.rows or len(rows))) for source, rows in found}

    def asked(self, validation: Mapping[str, Rows]) -> dict[str, HeldOut]:
        """What the network says of them."""
        recipe, found = self.recipe, {}
        for name, rows in validation.items():
            size, seed = recipe.windows.length, VALIDATION_SEED
            found[name] = HeldOut.prepare(self.backbone, self.mask_id, rows, size, recipe.ratios, seed)
            _check_numbers(recipe, not any(map(math.isnan, found[name].sequential.values())))
        return found

    def held_out(self) -> dict[str, HeldOut]:
        """Both."""
        return self.asked(self.validation())


def _online(recipe: CircuitRecipe, backbone: Backbone, mask_id: int, sources: list[RowSource], strata: range) -> Draw:
    """Windows of fresh rows, through which gradients reach the network."""
    weights = [source.weight for source in recipe.data]
    rows = max(1, recipe.batch_windows // STRATA // recipe.windows.per_row)
    shares = [max(1, round(rows * weight / sum(weights))) for weight in weights]

    def draw(step: int) -> Windows:
        parts = []
        for stratum in strata:
            number = step * STRATA + stratum
            taken = [source.take(number * n, n) for source, n in zip(sources, shares, strict=True)]
            found = Rows(*(np.concatenate(column) for column in zip(*taken, strict=True)))
            generator = torch.Generator(backbone.device).manual_seed(mix(recipe.seed, number))
            parts.append(draw_windows(backbone, mask_id, found, recipe.windows, generator))
        return _joined(parts)

    return draw


def _joined(parts: Sequence[Windows]) -> Windows:
    def join(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    dense = {name: join(name) for name in ("logits", "features", "level")}
    return Windows(join("tokens"), join("masked"), **dense)  # type: ignore[arg-type]  # none of them is sparse
