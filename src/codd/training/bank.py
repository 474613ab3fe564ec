"""A bank: windows that the network was asked about once, kept in memory as its hidden states.

From a hidden state the head makes all logits again, exactly and in one product. For a small network that is far less to
keep than the logits themselves, and costs less than to run its layers again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.errors import InvalidInput
from codd.training.cache_entries import narrow, widen
from codd.training.circuit_recipe import STRATA, CircuitRecipe
from codd.training.objective import to_tensors
from codd.training.rows import RowSource
from codd.training.windows import Shown, WindowRecipe, Windows, cut, mask_rows, pick, see

LONGEST_SEARCH = 200
"""Batches of rows in a row without a single window, after which there are none."""


@runtime_checkable
class Supply(Protocol):
    """Where windows come from: a bank or the entries of a cache."""

    def __len__(self) -> int:
        """How many there are."""

    def windows(self, index: Int[Tensor, " n"]) -> Windows:
        """Some of them. Nothing here waits for the device if ``index`` is on it."""


@dataclass(frozen=True, eq=False)
class Bank:
    """W windows of S positions, on the network's device."""

    backbone: Backbone
    mask_id: int
    tokens: Int[Tensor, "W S"]
    """Narrow."""
    masked: Bool[Tensor, "W S"]
    level: Float[Tensor, " W"]
    features: Float[Tensor, "W S d"]
    """On a GPU in bfloat16, in which its layers compute anyway."""

    def __len__(self) -> int:
        """How many windows there are."""
        return len(self.tokens)

    def windows(self, index: Int[Tensor, " n"]) -> Windows:
        """Some windows with all their logits."""
        tokens, masked, features = widen(self.tokens[index]), self.masked[index], self.features[index]
        features = features.to(self.backbone.dtype)
        with torch.no_grad():
            shown = torch.where(masked, self.mask_id, tokens)
            logits = self.backbone.masked_logits_from_states(features, shown, mask_id=self.mask_id)
        return Windows(tokens, masked, logits=logits, features=features, level=self.level[index])


def joined(parts: Sequence[Bank], count: int) -> Bank:
    """The first ``count`` windows of several banks."""
    first = parts[0]
    columns = ("tokens", "masked", "level", "features")
    tokens, masked, level, features = (torch.cat([getattr(p, name) for p in parts])[:count] for name in columns)
    return Bank(first.backbone, first.mask_id, tokens, masked, level, features)


@torch.no_grad()
def draw(
    backbone: Backbone, mask_id: int, source: RowSource, rows: tuple[int, int], recipe: WindowRecipe, seed: int
) -> Bank:
    """The windows of some rows (from, how many), those that count alone."""
    device = backbone.device
    found = source.take(*rows)
    tokens, segments, scored = to_tensors(found, device)
    generator = torch.Generator(device).manual_seed(seed % 2**63)
    absolute = backbone.block_size is not None
    noised = mask_rows(segments, scored, int(found.segments.max()) + 1, recipe, generator, absolute=absolute)
    places = pick(noised.may_begin, recipe.per_row, generator)
    states = see(backbone, mask_id, Shown(tokens, segments, noised.hidden), places, recipe.length)
    useful, size = places.useful.flatten(), recipe.length
    kept = torch.bfloat16 if device.type == "cuda" else states.dtype
    return Bank(
        backbone,
        mask_id,
        narrow(cut(tokens, places, size)[useful], backbone.vocab_size),
        cut(noised.hidden, places, size)[useful],
        cut(noised.level, places, size).amax(-1)[useful],
        states.reshape(len(useful), size, -1)[useful].to(kept),
    )


def fill(
    backbone: Backbone, mask_id: int, sources: Sequence[tuple[RowSource, float]], recipe: CircuitRecipe, strata: range
) -> Bank:
    """The bank of some strata: each holds of every source (rows and weight) its share of windows.

    Rows and noise are a function of the recipe and the stratum, whoever fills it.
    """
    each, total = recipe.bank.windows // STRATA, sum(weight for _, weight in sources)
    shares = [max(1, round(each * weight / total)) for _, weight in sources]
    shares[0] += each - sum(shares)
    if shares[0] < 1:
        raise InvalidInput(f"bank.windows {recipe.bank.windows} is too few for {len(sources)} sources.")
    parts = []
    for stratum in strata:
        for number, ((source, _), share) in enumerate(zip(sources, shares, strict=True)):
            parts.append(_some(backbone, mask_id, source, share, recipe, stratum, recipe.seed * 1009 + number))
    return joined(parts, each * len(strata))


def _some(
    backbone: Backbone, mask_id: int, source: RowSource, count: int, recipe: CircuitRecipe, stratum: int, seed: int
) -> Bank:
    rows, parts, have, empty = recipe.bank.rows_at_once, [], 0, 0
    number = stratum
    while have < count:
        part = draw(backbone, mask_id, source, (number * rows, rows), recipe.windows, seed * 1_000_003 + number)
        number += STRATA
        empty = 0 if len(part) else empty + 1
        if empty > LONGEST_SEARCH or (empty and empty * rows * STRATA > 4 * len(source) + LONGEST_SEARCH * rows):
            raise InvalidInput(f"no window of {recipe.windows.length} tokens with a mask was found in the data.")
        parts.append(part)
        have += len(part)
    return joined(parts, count)
