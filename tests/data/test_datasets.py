import dataclasses

import numpy as np
import pytest
import torch

from codd.data.datasets import (
    STRATA,
    HiddenStateDataset,
    build_hidden_states,
)
from codd.data.packing import Example, PackedDataset, pack
from codd.data.windows import WindowRecipe
from codd.errors import InvalidInput
from codd.training.circuit.data import batch_index
from codd.training.circuit_recipe import BankRecipe, CircuitRecipe
from tests.support.small_windows import MASK, WINDOW, network, recipe_of, rows_of_pairs

RECIPE = recipe_of(bank=BankRecipe(windows=96, rows_at_once=8), windows=WindowRecipe(WINDOW, per_row=2))
COLUMNS = ("tokens", "masked", "level", "features")


def whole_answers(count: int = 30) -> PackedDataset:
    """Rows of one token, and an answer of one window which begins with the same token."""
    random = np.random.default_rng(4)
    tokens = random.integers(0, MASK, (count, WINDOW)).astype(np.uint16)
    return PackedDataset(pack([Example(np.concatenate((x[:1], x)), 1) for x in tokens], WINDOW + 1, MASK), 0)


def sources() -> list[tuple[PackedDataset, float]]:
    """Two that have no token in common."""
    low, high = rows_of_pairs(1, 30), rows_of_pairs(2, 30)
    low.tokens[:] %= 2
    high.tokens[:] = 4 + high.tokens % 4
    return [(PackedDataset(low, 0), 1.0), (PackedDataset(high, 0), 2.0)]


def fill(sources: list[tuple[PackedDataset, float]], recipe: CircuitRecipe, strata: range) -> HiddenStateDataset:
    sizes = {"windows": recipe.bank.windows, "rows_at_once": recipe.bank.rows_at_once}
    return build_hidden_states(network(), MASK, sources, recipe.windows, **sizes, seed=recipe.seed, strata=strata)


def filled(strata: range, **changes) -> HiddenStateDataset:
    return fill(sources(), dataclasses.replace(RECIPE, **changes), strata)


def test_processes_share_the_strata_and_every_batch():
    whole = filled(range(STRATA))
    assert len(whole) == 96
    assert whole.tokens.dtype.itemsize <= 2
    for count in (2, 4):
        strata = [range(i * STRATA // count, (i + 1) * STRATA // count) for i in range(count)]
        parts = [filled(some) for some in strata]
        for name in COLUMNS:
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
        for step in (0, 7):
            batch = whole.windows(batch_index(RECIPE, step, range(STRATA), len(whole)))
            shared = [x.windows(batch_index(RECIPE, step, s, len(x))) for x, s in zip(parts, strata, strict=True)]
            assert len(batch.tokens) == RECIPE.batch_windows
            for name in COLUMNS:
                assert torch.equal(torch.cat([getattr(part, name) for part in shared]), getattr(batch, name))
    first, second = (batch_index(RECIPE, step, range(STRATA), len(whole)) for step in (0, 1))
    assert not torch.equal(first, second)
    other = filled(range(STRATA), seed=1)
    assert not torch.equal(other.masked, whole.masked)


def test_windows_are_as_the_network_says_them():
    bank = fill([(whole_answers(), 1.0)], RECIPE, range(2))
    windows = bank.windows(torch.tensor([3, 0, 11, 3]))
    assert windows.tokens.dtype == torch.int64
    assert bool(windows.masked.any(-1).all())
    shown = torch.where(windows.masked, MASK, windows.tokens)
    ids = torch.cat((windows.tokens[:, :1], shown), 1)
    wanted, states = network()(ids)[:, 1:], network().states(ids)[:, 1:]
    torch.testing.assert_close(windows.logits[..., :MASK], wanted[..., :MASK], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(windows.features, states, atol=1e-5, rtol=1e-5)
    assert bool((windows.logits[..., MASK] == -torch.inf).all())
    assert torch.equal(windows.level, bank.level[[3, 0, 11, 3]])
    assert bool((windows.level > 0).all())


def test_data_without_a_window_are_refused():
    rows = PackedDataset(pack([Example(np.arange(6, dtype=np.uint16), 2)] * 3, 20, MASK), 0)
    with pytest.raises(InvalidInput, match="no window of 8 tokens with a mask was found"):
        fill([(rows, 1.0)], RECIPE, range(STRATA))


def test_a_bank_that_is_too_small_for_its_sources_is_refused():
    recipe = dataclasses.replace(RECIPE, bank=BankRecipe(windows=STRATA, rows_at_once=8))
    with pytest.raises(InvalidInput, match=r"bank.windows 8 is too few for 2 sources"):
        fill(sources(), recipe, range(STRATA))
