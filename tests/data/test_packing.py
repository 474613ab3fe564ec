import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from codd.data.packing import (
    MAX_TEXTS_PER_ROW,
    Example,
    Mixture,
    PackedDataset,
    PackedSequences,
    StreamDataset,
    pack,
)

PAD = 60_000


def unpacked(rows: PackedSequences) -> list[tuple[tuple[int, ...], int]]:
    """The texts in some rows and the lengths of their questions; fails where a row is not laid out as promised."""
    found = []
    for tokens, segments, scored in zip(*rows, strict=True):
        number = int(segments.max())
        assert [*dict.fromkeys(segments.tolist())] == [*range(1, number + 1), *([0] if 0 in segments else [])]
        for segment in range(1, number + 1):
            at = np.flatnonzero(segments == segment)
            assert (np.diff(at) == 1).all()
            prompt = int((~scored[at]).sum())
            assert not scored[at[:prompt]].any()
            found.append((tuple(tokens[at].tolist()), prompt))
        assert (tokens[segments == 0] == PAD).all()
        assert not scored[segments == 0].any()
    return found


@settings(max_examples=100, deadline=None)
@given(length=st.integers(2, 40), sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=40))
def test_packing_loses_nothing_and_overfills_nothing(length, sizes):
    examples, at = [], 0
    for prompt, answer in sizes:
        examples.append(Example(np.arange(at, at + prompt + answer, dtype=np.uint16), prompt))
        at += prompt + answer
    fitting = [each for each in examples if len(each.tokens) <= length]
    rows = pack(examples, length, PAD)
    assert rows.tokens.shape == rows.segments.shape == rows.scored.shape
    assert sorted(unpacked(rows)) == sorted((tuple(each.tokens.tolist()), each.prompt) for each in fitting)
    # Best fit opens a row only for what fits in none: two rows at most half full would have been one.
    assert sum(2 * int((segments > 0).sum()) <= length for segments in rows.segments) <= 1


def test_a_row_holds_no_more_texts_than_it_can_number():
    rows = pack([Example(np.array([i], np.uint16), 0) for i in range(600)], 600, PAD)
    assert len(rows.tokens) == 3
    assert rows.segments.max() == MAX_TEXTS_PER_ROW
    assert len(unpacked(rows)) == 600


def test_rows_for_networks_that_cannot_keep_texts_apart():
    rows = pack([Example(np.full(size, size, np.uint16), 0) for size in (6, 2, 2, 30)], 10, PAD, 1)
    assert sorted(len(text) for text, _ in unpacked(rows)) == [2, 2, 6]
    assert len(rows.tokens) == 3


def some_rows(count: int) -> PackedDataset:
    """Rows that hold their own number."""
    tokens = np.repeat(np.arange(count, dtype=np.uint16)[:, None], 3, axis=1)
    return PackedDataset(PackedSequences(tokens, np.ones((count, 3), np.uint8), np.ones((count, 3), np.bool_)), seed=0)


SOURCES = [some_rows(1), some_rows(7), StreamDataset(np.arange(23, dtype=np.uint16), 4, seed=0)]


def test_every_row_comes_once_per_epoch_in_another_order_for_each_epoch_and_seed():
    source = some_rows(20)
    assert len(source) == 20
    epochs = [source.take(epoch * 20, 20).tokens[:, 0].tolist() for epoch in range(4)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    others = [PackedDataset(source.rows, seed).take(0, 20).tokens[:, 0].tolist() for seed in range(1, 4)]
    assert len({tuple(order) for order in (*epochs, *others)}) == 7


@settings(max_examples=50, deadline=None)
@given(size=st.integers(4, 60), length=st.integers(1, 4), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_text_rows_stay_in_the_stream_and_do_not_overlap_within_an_epoch(size, length, seed, epoch):
    source = StreamDataset(np.arange(100, 100 + size, dtype=np.uint16), length, seed)
    rows = source.take(epoch * len(source), len(source))
    assert rows.tokens.shape == (len(source), length)
    assert (np.diff(rows.tokens.astype(int), axis=1) == 1).all()
    assert len(np.unique(rows.tokens)) == rows.tokens.size
    assert rows.tokens.min() >= 100
    assert rows.tokens.max() < 100 + size
    assert (rows.segments == 1).all()
    assert rows.scored.all()


class Numbered(StreamDataset):
    """Row n is [source, n]."""

    def __init__(self, source: int):
        self.source = source

    def __len__(self) -> int:
        return 1_000_000_000

    def take(self, start: int, count: int) -> PackedSequences:
        tokens = np.stack([np.full(count, self.source), np.arange(start, start + count)], axis=1).astype(np.uint16)
        return PackedSequences(tokens, np.ones((count, 2), np.uint8), np.ones((count, 2), np.bool_))


def mixture(weights: list[float], batch: int) -> Mixture:
    return Mixture([Numbered(i) for i in range(len(weights))], weights, batch)


WEIGHTS = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(weights=WEIGHTS, batch=st.integers(1, 20))
@example(weights=[0.5, 0.01, 0.49], batch=8)
@example(weights=[1e-9, 1.0, 1e-9], batch=64)
@example(weights=[1.0, 1.0, 1.0], batch=1)
def test_batches_are_full_and_each_source_gives_its_rows_in_order(weights, batch):
    mixed = mixture(weights, batch)
    batches = [mixed.batch_at(step).tokens for step in range(40)]
    assert all(len(tokens) == batch for tokens in batches)
    rows = np.concatenate(batches)
    for source in range(len(weights)):
        numbers = rows[rows[:, 0] == source, 1]
        assert numbers.tolist() == list(range(len(numbers)))


@settings(max_examples=100, deadline=None)
@given(weights=WEIGHTS, batch=st.integers(1, 20), step=st.integers(0, 10_000_000))
def test_shares_are_exact_in_the_long_run_and_found_at_any_step(weights, batch, step):
    mixed = mixture(weights, batch)
    drawn, after = mixed._drawn(step), mixed._drawn(step + 1)
    assert drawn.sum() == step * batch
    assert after.sum() == (step + 1) * batch
    assert (after >= drawn).all()
    shares = np.array(weights) / sum(weights)
    assert (np.abs(drawn - step * batch * shares) <= 0.5 + shares * len(weights) / 2 + 1e-6).all()
