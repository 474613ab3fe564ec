"""Datasets of windows. One of hidden states: the network is evaluated once, and its last states stay in memory.

From a hidden state the head makes all logits again, exactly and in one product. For a small network that is far less to
keep than the logits themselves, and costs less than to run its layers again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from codd.backbones.backbone import Backbone
from codd.data.packing import SequenceDataset, narrow, numbered_seed, widen
from codd.data.windows import (
    MaskedRows,
    WindowBatch,
    WindowRecipe,
    choose_windows,
    gather_windows,
    window_states,
)
from codd.errors import InvalidInput

STRATA = 8
"""Parts of the data that a batch takes the same number of windows from. Processes share the strata, so that one, two,
four or eight of them see the same batches."""
LONGEST_SEARCH = 200
"""Batches of rows in a row without a single window, after which there are none."""


@dataclass(frozen=True, eq=False)
class HiddenStateDataset:
    """W windows of S positions, on the network's device."""

    backbone: Backbone
    mask_id: int
    tokens: Int[Tensor, "W S"]
    """The true tokens, stored in two or four bytes each; see `narrow`."""
    masked: Bool[Tensor, "W S"]
    level: Float[Tensor, " W"]
    """The probability with which the tokens of a window were masked."""
    features: Float[Tensor, "W S d"]
    """In bfloat16 for training windows on a GPU, as the layers compute in it anyway."""

    def __len__(self) -> int:
        """How many windows there are."""
        return len(self.tokens)

    def windows(self, index: Int[Tensor, " n"]) -> WindowBatch:
        """The windows of these numbers, with logits over the whole vocabulary. Nothing here waits for the device."""
        tokens, masked, features = widen(self.tokens[index]), self.masked[index], self.features[index]
        features = features.to(self.backbone.dtype)
        with torch.no_grad():
            shown = torch.where(masked, self.mask_id, tokens)
            logits = self.backbone.masked_logits_from_states(features, shown, mask_id=self.mask_id)
        return WindowBatch(tokens, masked, logits=logits, features=features, level=self.level[index])


def concatenate(parts: Sequence[HiddenStateDataset], count: int) -> HiddenStateDataset:
    """The first ``count`` windows of several datasets of one network."""
    first = parts[0]
    columns = ("tokens", "masked", "level", "features")
    tokens, masked, level, features = (torch.cat([getattr(p, name) for p in parts])[:count] for name in columns)
    return HiddenStateDataset(first.backbone, first.mask_id, tokens, masked, level, features)


@torch.no_grad()
def evaluate_windows(backbone: Backbone, mask_id: int, rows: MaskedRows, size: int) -> HiddenStateDataset:
    """The network's states in the windows of some rows; fillers are left out."""
    states = window_states(backbone, mask_id, rows, size)
    valid = rows.valid.flatten()
    tokens, masked = (gather_windows(x, rows.first, size)[valid] for x in (rows.tokens, rows.hidden))
    kept = states.reshape(len(valid), size, -1)[valid]
    level = rows.level.flatten()[valid]
    return HiddenStateDataset(backbone, mask_id, narrow(tokens, backbone.vocab_size), masked, level, kept)


def build_hidden_states(
    backbone: Backbone,
    mask_id: int,
    sources: Sequence[tuple[SequenceDataset, float]],
    recipe: WindowRecipe,
    *,
    windows: int,
    rows_at_once: int,
    seed: int,
    strata: range,
) -> HiddenStateDataset:
    """The part of a dataset of ``windows`` windows that lies in some strata: of every (source, weight) its share.

    Rows and noise are a function of the seed and the stratum, whichever process computes it. InvalidInput if there are
    fewer windows than sources, or a source has none.
    """
    each, total = windows // STRATA, sum(weight for _, weight in sources)
    shares = [max(1, round(each * weight / total)) for _, weight in sources]
    shares[0] += each - sum(shares)
    if shares[0] < 1:
        raise InvalidInput(f"bank.windows {windows} is too few for {len(sources)} sources.")
    parts, device = [], backbone.device
    for stratum in strata:
        for number, ((source, _), share) in enumerate(zip(sources, shares, strict=True)):
            source_seed, have, empty, batch = seed * 1009 + number, 0, 0, stratum
            while have < share:
                rows = source.take(batch * rows_at_once, rows_at_once)
                generator = torch.Generator(device).manual_seed(numbered_seed(source_seed, batch))
                drawn = choose_windows(rows, recipe, generator, absolute=backbone.block_size is not None)
                part = evaluate_windows(backbone, mask_id, drawn, recipe.length)
                batch += STRATA
                empty = 0 if len(part) else empty + 1
                rounds = 4 * len(source) / (rows_at_once * STRATA) + LONGEST_SEARCH / STRATA
                if empty > min(LONGEST_SEARCH, rounds):
                    raise InvalidInput(f"no window of {recipe.length} tokens with a mask was found in the data.")
                half = part.features.to(torch.bfloat16) if device.type == "cuda" else part.features
                parts.append(concatenate([replace(part, features=half)], share - have))
                have += len(part)
    return concatenate(parts, each * len(strata))
