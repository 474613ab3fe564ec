import pytest
import torch

from codd.data.noise import Noise, NoiseRecipe, add_noise, positions_in
from codd.data.packing import PackedSequences
from tests.support.small_runs import CPU, packed

UNIFORM = NoiseRecipe(minimum=0.05, block_share=0.0)
BLOCKS = NoiseRecipe(minimum=0.05, block_share=1.0, block_length=4, block_weight=3.0)


def draw(rows: PackedSequences, recipe: NoiseRecipe, generator: torch.Generator) -> Noise:
    _, segments, scored = rows.tensors(CPU)
    return add_noise(segments, scored, int(rows.segments.max()) + 1, recipe, generator)


def draws(rows: PackedSequences, recipe: NoiseRecipe, count: int) -> list[Noise]:
    generator = torch.Generator().manual_seed(3)
    return [draw(rows, recipe, generator) for _ in range(count)]


def test_a_hidden_token_counts_the_inverse_of_its_probability():
    rows = packed([(0, 4000)] * 8, 4000)
    (found,) = draws(rows, UNIFORM, 1)
    for hidden, weights in zip(found.hidden, found.weights, strict=True):
        assert len(weights[hidden].unique()) == 1
        assert not weights[~hidden].any()
        assert float(hidden.float().mean()) == pytest.approx(1 / float(weights.max()), abs=0.04)


def test_each_text_of_a_batch_has_its_own_stratum():
    rows = packed([(0, 200), (2, 150)] * 16, 352)
    (found,) = draws(rows, UNIFORM, 1)
    for segment in (1, 2):
        of_segment = torch.where(torch.from_numpy(rows.segments == segment), found.weights, 0.0)
        level = (1 / of_segment.amax(dim=1) - UNIFORM.minimum) / (1 - UNIFORM.minimum)
        assert sorted((level * 16).floor().int().tolist()) == list(range(16))


def scored_parts(rows: PackedSequences, found: Noise):
    """Of each text: which of its scored tokens are hidden, and their weights."""
    for row, segments in enumerate(rows.segments):
        for segment in range(1, int(segments.max()) + 1):
            at = torch.from_numpy((segments == segment) & rows.scored[row])
            yield found.hidden[row][at], found.weights[row][at]


def tail_start(hidden: torch.Tensor, weights: torch.Tensor) -> int:
    """Where the hidden tokens that count nothing begin; everything after it is hidden."""
    unweighted = (hidden & (weights == 0)).nonzero().flatten().tolist()
    start = unweighted[0] if unweighted else len(hidden)
    assert unweighted == list(range(start, len(hidden)))
    return start


def test_block_noise_on_answers():
    rows = packed([(5, 14), (2, 14)] * 16, 36)
    seen = []
    for found in draws(rows, BLOCKS, 20):
        for hidden, weights in scored_parts(rows, found):
            end = tail_start(hidden, weights)
            assert end in (4, 8, 12, 14)  # where blocks of four end, counted from the answer's start
            begin = (end - 1) // 4 * 4
            assert not hidden[:begin].any()  # left of the block all is visible
            assert torch.equal(weights > 0, hidden & (torch.arange(14) >= begin) & (torch.arange(14) < end))
            assert len(weights[weights > 0].unique()) <= 1
            seen.append(end)
    assert min(seen.count(end) for end in (4, 8, 12, 14)) > len(seen) * 0.2


def test_block_noise_on_prose_begins_anywhere():
    rows = packed([(0, 30)] * 32, 30)
    phases, lengths = set(), []
    for found in draws(rows, BLOCKS, 20):
        for hidden, weights in scored_parts(rows, found):
            end = tail_start(hidden, weights)
            counting = weights.nonzero().flatten()
            if end < 30:
                phases.add(end % 4)
                assert not hidden[: max(0, end - 4)].any()
            lengths.append(len(counting))
            assert counting.numel() == 0 or int(counting.max() - counting.min()) < 4
    assert phases == {0, 1, 2, 3}
    assert max(lengths) == 4


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_questions_and_padding_are_never_hidden(share):
    rows = packed([(3, 9), (7, 4), (1, 1), (4, 15), (2, 2)] * 5, 23)
    asked = torch.from_numpy(rows.scored & (rows.segments > 0))
    assert not asked.all()
    ever = torch.zeros_like(asked)
    for found in draws(rows, NoiseRecipe(block_share=share, block_length=4), 100):
        ever |= found.hidden
        assert not (found.hidden & ~asked).any()
        assert not found.weights[~found.hidden].any()
        assert found.weights.min() >= 0
    assert torch.equal(ever, asked)


def test_padding_is_not_scored_even_if_it_says_so():
    rows = packed([(1, 4)], 8)
    found = draws(rows._replace(scored=rows.segments >= 0), UNIFORM, 1)[0]
    assert float(found.total) == 5
    assert not found.hidden[0, 5:].any()


def test_absolute_blocks_are_counted_from_the_first_token_of_a_text():
    rows = packed([(3, 9), (6, 6), (0, 12)] * 8, 12)
    _, segments, scored = rows.tensors(CPU)
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        found = add_noise(segments, scored, int(rows.segments.max()) + 1, BLOCKS, generator, absolute=True)
        for row, weights in enumerate(found.weights):
            asked = weights.nonzero()[:, 0]
            blocks = (positions_in(segments)[row, asked] // 4).unique()
            assert len(blocks) <= 1
            later = positions_in(segments)[row] // 4 > (blocks.max() if len(blocks) else 99)
            assert bool(found.hidden[row, later & scored[row]].all())
