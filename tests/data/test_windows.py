import dataclasses

import pytest
import torch

from codd.data.noise import positions_in, segment_starts
from codd.data.packing import PADDING, PackedSequences
from codd.data.windows import (
    MaskedRows,
    WindowRecipe,
    draw_windows,
    gather_windows,
    mask_rows,
    predict_windows,
    sample_blocks,
    sample_starts,
)
from codd.errors import InvalidInput
from tests.support.small_windows import CPU, MASK, QUESTIONS, WINDOW, network, prose, recipe_of

BOTH = pytest.mark.parametrize("rows", [QUESTIONS, prose(40, 45)], ids=["questions", "prose"])


def noised(
    rows: PackedSequences, recipe: WindowRecipe, seed: int = 0, *, absolute: bool = False
) -> tuple[MaskedRows, torch.Tensor]:
    """Rows with masks and windows, and the level of each token."""
    tokens, segments, scored = rows.tensors(CPU)
    generator = torch.Generator().manual_seed(seed)
    texts = int(segments.max()) + 1
    hidden, candidates, level = mask_rows(segments, scored, texts, recipe, generator, absolute=absolute)
    first, valid = sample_starts(candidates, recipe.per_row, generator)
    return MaskedRows(tokens, segments, hidden, first, valid, torch.zeros(first.shape)), level


@pytest.mark.parametrize("block_share", [0.0, 1.0, 0.5])
@BOTH
def test_windows_lie_in_one_text_and_hold_masks(rows, block_share):
    recipe = WindowRecipe(WINDOW, per_row=3, block_share=block_share)
    phases, found = set(), 0
    for seed in range(10):
        places, _ = noised(rows, recipe, seed)
        segments, hidden, scored = places.segments, places.hidden, rows.tensors(CPU)[2]
        assert not (hidden & ~scored).any()
        for row, slot in places.valid.nonzero().tolist():
            begin = int(places.first[row, slot])
            here = slice(begin, begin + WINDOW)
            text = (segments[row] == segments[row, begin]) & scored[row]
            assert text[here].all()
            assert hidden[row, here].any()
            answer = int(text.nonzero()[0])
            if rows is QUESTIONS:
                # Answers of full blocks are cut from where they begin; the odd one has no block to itself.
                assert (begin - answer) % WINDOW == 0
            phases.add((begin - answer) % WINDOW)
            if block_share == 1.0 and begin - answer >= WINDOW:
                assert not hidden[row, answer:begin].any()
            if block_share == 1.0:
                assert hidden[row, begin + WINDOW :][text[begin + WINDOW :]].all()
            found += 1
    assert found > 100
    assert len(phases) == (1 if rows is QUESTIONS else WINDOW)


@pytest.mark.parametrize("block_share", [0.0, 1.0])
@BOTH
def test_levels_are_the_share_that_is_masked(rows, block_share):
    """One level a text, drawn evenly from (0, 1): what is masked among windows of a level is that share of them."""
    recipe = WindowRecipe(WINDOW, per_row=1, block_share=block_share)
    levels, shares = [], []
    for seed in range(60):
        places, token_level = noised(rows, recipe, seed)
        segments, asked = places.segments, token_level > 0
        assert not (asked & ~places.hidden).any()
        if not block_share:
            assert torch.equal(asked, places.hidden)
        for row in range(len(segments)):
            for text in segments[row].unique():
                assert len(token_level[row][asked[row] & (segments[row] == text)].unique()) <= 1
        # The last block of a prose may be cut by the row's end; its window then begins left of it.
        useful = (places.valid & (places.first + WINDOW < segments.shape[1])).flatten()
        levels.append(gather_windows(token_level, places.first, WINDOW).amax(-1)[useful])
        shares.append(gather_windows(places.hidden, places.first, WINDOW).float().mean(-1)[useful])
    level, share = torch.cat(levels), torch.cat(shares)
    assert float(level.min()) >= recipe.minimum
    assert float(level.max()) <= 1
    for low in (0.4, 0.6, 0.8):  # lower ones are chosen for having a mask at all
        near = (level > low) & (level < low + 0.2)
        assert int(near.sum()) > 100
        assert float(share[near].mean()) == pytest.approx(float(level[near].mean()), abs=0.04)


def test_the_network_is_asked_about_texts_by_themselves():
    backbone, mask = network(vocab_size=31), 30
    found, _ = noised(QUESTIONS, WindowRecipe(WINDOW))
    tokens, segments = found.tokens, found.segments
    windows = predict_windows(backbone, mask, found, WINDOW)
    assert (windows.logits[..., mask] == -torch.inf).all()
    first = segment_starts(segments)
    for row, slot in found.valid.nonzero().tolist()[:20]:
        begin, number = int(found.first[row, slot]), 2 * row + slot
        text = segments[row] == segments[row, begin]
        shown = torch.where(found.hidden, mask, tokens)[row, text]
        at = begin - int(first[row, begin])
        alone, states = backbone(shown[None])[0, at : at + WINDOW], backbone.states(shown[None])[0, at : at + WINDOW]
        torch.testing.assert_close(windows.logits[number, :, :mask], alone[:, :mask], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(windows.features[number], states, atol=1e-4, rtol=1e-4)
        assert torch.equal(windows.tokens[number], tokens[row, begin : begin + WINDOW])
        assert torch.equal(windows.masked[number], found.hidden[row, begin : begin + WINDOW])
    assert not windows.masked[~found.valid.flatten()].any()


@BOTH
def test_held_out_blocks_lie_in_one_text(rows):
    tokens, segments, scored = rows.tensors(CPU)
    first, valid, order = sample_blocks(rows, WINDOW, torch.Generator().manual_seed(0))
    assert int(valid.sum()) >= 0.9 * len(tokens)  # a row of the shortest answers alone has none
    assert torch.equal(order.sort(1).values, torch.arange(WINDOW).expand(len(tokens), -1))
    assert len(order.unique(dim=0)) > len(order) // 2
    for row in valid.nonzero()[:, 0].tolist():
        begin = int(first[row])
        here = slice(begin, begin + WINDOW)
        assert len(segments[row, here].unique()) == 1
        assert int(segments[row, begin]) != PADDING
        assert bool(scored[row, here].all())


def test_no_more_windows_than_there_are():
    some = torch.tensor([[True, False, True, False], [False] * 4])
    first, valid = sample_starts(some, 3, torch.Generator().manual_seed(0))
    assert valid.tolist() == [[True, True, False], [False] * 3]
    assert sorted(first[0, :2].tolist()) == [0, 2]
    first, _ = sample_starts(torch.ones(1, 4, dtype=torch.bool), 9, torch.Generator().manual_seed(0))
    assert sorted(first[0].tolist()) == [0, 1, 2, 3]


def test_rows_shorter_than_a_window_are_refused():
    with pytest.raises(InvalidInput, match="rows of 7 tokens hold no window of 8"):
        sample_blocks(prose(2, 7), WINDOW, torch.Generator().manual_seed(0))
    recipe = dataclasses.replace(recipe_of().windows, length=9)
    with pytest.raises(InvalidInput, match="no window of 9"):
        draw_windows(network(), MASK, prose(2, 8), recipe, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("block_share", [0.0, 1.0])
@BOTH
def test_windows_of_a_block_causal_network_are_its_blocks(rows, block_share):
    """Counted from each text's first token, question included; what a window's block does not see is hidden."""
    _, segments, _ = rows.tensors(CPU)
    recipe, seen = WindowRecipe(WINDOW, per_row=4, block_share=block_share), 0
    for seed in range(20):
        places, _ = noised(rows, recipe, seed, absolute=True)
        begins = positions_in(segments).gather(1, places.first)[places.valid]
        assert not bool((begins % WINDOW).any())
        seen += len(begins)
    assert seen > 40
    first, valid, _ = sample_blocks(rows, WINDOW, torch.Generator().manual_seed(0), absolute=True)
    assert not bool((positions_in(segments).gather(1, first)[valid] % WINDOW).any())
