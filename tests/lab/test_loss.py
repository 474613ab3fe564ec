import math
from functools import partial
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch

from codd.data.noise import NoiseRecipe
from codd.data.packing import PackedSequences
from codd_lab.pretraining.loss import Batch, causal_batch, diffusion_batch, loss_sum, mean_loss
from tests.support.small_runs import CPU, packed, small_network

VOCAB = 30
TEXTS = [(3, 9), (7, 4), (1, 1), (0, 15), (2, 2)]
make_noised = partial(diffusion_batch, recipe=NoiseRecipe(block_length=4), mask_id=0)


def noised(rows: PackedSequences, seed: int = 0) -> Batch:
    return make_noised(rows, torch.Generator().manual_seed(seed))


def caused(rows: PackedSequences) -> Batch:
    return causal_batch(rows, torch.Generator())


def parts(rows: PackedSequences) -> list[tuple[int, slice]]:
    """Where each text stands."""
    found = []
    for row, segments in enumerate(rows.segments):
        edges = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
        found += [(row, slice(a, b)) for a, b in pairwise(edges) if segments[a]]
    return found


@pytest.mark.parametrize("causal", [False, True])
def test_the_loss_is_that_of_each_text_alone(causal):
    network = small_network(VOCAB, causal=causal)
    rows = packed(TEXTS, 17)
    batch = caused(rows) if causal else noised(rows)
    places = parts(rows)
    assert len(places) == len(TEXTS) > len(rows.tokens)
    expected = 0.0
    for row, at in places:
        ids = batch.ids[row, at]
        logits = network.logits(network.states(ids[None], torch.arange(len(ids))[None]))[0].double()
        for scores, target, weight in zip(logits, batch.targets[row, at], batch.weights[row, at], strict=True):
            expected += float(weight) * (math.log(float(scores.exp().sum())) - float(scores[target]))
    assert expected > 1
    assert float(loss_sum(network, batch)) == pytest.approx(expected, rel=1e-5)


def test_diffusion_batch_hides_what_counts_and_asks_for_the_truth():
    rows = packed(TEXTS, 17)
    batch = noised(rows)
    tokens = torch.from_numpy(rows.tokens.astype(np.int64))
    assert torch.equal(batch.targets, tokens)
    for row, at in parts(rows):
        assert batch.positions[row, at].tolist() == list(range(at.stop - at.start))
    assert (batch.ids[batch.weights > 0] == 0).all()
    shown = batch.ids != 0
    assert torch.equal(batch.ids[shown], tokens[shown])
    assert (batch.ids != tokens).any()
    assert not torch.equal(batch.ids, noised(rows, seed=1).ids)


def test_causal_batch():
    rows = PackedSequences(
        np.array([[5, 6, 7, 8, 9, 10, 0, 0]], np.uint16),
        np.array([[1, 1, 1, 2, 2, 2, 0, 0]], np.uint8),
        np.array([[0, 1, 1, 0, 0, 1, 0, 0]], np.bool_),
    )
    batch = caused(rows)
    assert batch.ids.tolist() == rows.tokens.tolist()
    assert batch.targets[0, :5].tolist() == [6, 7, 8, 9, 10]
    assert batch.weights.tolist() == [[1, 1, 0, 0, 1, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert float(batch.total) == 3


def test_the_first_token_of_a_full_row_is_nobodys_target():
    rows = PackedSequences(np.arange(4, dtype=np.uint16)[None], np.ones((1, 4), np.uint8), np.ones((1, 4), np.bool_))
    assert caused(rows).weights.tolist() == [[1, 1, 1, 0]]


def test_parts_add_up_to_the_whole():
    network, batch = small_network(VOCAB), noised(packed(TEXTS * 3, 17))
    assert len(batch.ids) > 4
    some = [batch.part(begin, begin + 2) for begin in range(0, len(batch.ids), 2)]
    assert all(torch.equal(part.total, batch.total) for part in some)
    whole = float(loss_sum(network, batch))
    assert sum(float(loss_sum(network, part)) for part in some) == pytest.approx(whole, rel=1e-5)


def test_mean_loss_depends_on_the_seed_and_not_on_how_many_rows_fit_at_once():
    network, rows = small_network(VOCAB), packed(TEXTS * 3, 17)
    loss = partial(mean_loss, network, rows, make_noised, device=CPU)
    assert loss(seed=4, at_once=100) == pytest.approx(loss(seed=4, at_once=2), rel=1e-5)
    assert loss(seed=4, at_once=100) != loss(seed=5, at_once=100)
    batch = noised(rows, 4)
    assert loss(seed=4, at_once=100) == pytest.approx(float(loss_sum(network, batch) / batch.total), rel=1e-5)


def test_mean_loss_of_a_causal_model_is_exact():
    network, rows = small_network(VOCAB, causal=True), packed(TEXTS, 17)
    one, two = (mean_loss(network, rows, causal_batch, seed=seed, device=CPU, at_once=9) for seed in (0, 1))
    batch = caused(rows)
    assert one == two == pytest.approx(float(loss_sum(network, batch) / batch.total))


def test_the_diffusion_loss_is_the_mean_over_all_orders_and_a_bound():
    network, truth = small_network(6, std=1.0), [3, 5, 1]
    orders = [negative_log_probability(network, truth, order) for order in permutations(range(3))]
    mean = sum(orders) / 6
    exact = -math.log(sum(math.exp(-each) for each in orders) / 6)  # of the model that reveals in random order
    assert mean > exact + 1
    rows = PackedSequences(
        *(np.tile(x, (500, 1)) for x in (np.array(truth, np.uint16), np.ones(3, np.uint8), np.ones(3, bool)))
    )
    make = partial(diffusion_batch, recipe=NoiseRecipe(minimum=1e-4, block_share=0.0), mask_id=0)
    found = mean_loss(network, rows, make, seed=0, device=CPU, at_once=500, draws=50)
    assert 3 * found == pytest.approx(mean, rel=0.03)


@torch.no_grad()
def negative_log_probability(network, truth: list[int], order: tuple[int, ...]) -> float:
    """Of revealing the tokens one by one in an order."""
    ids, lost = torch.zeros(1, 3, dtype=torch.long), 0.0
    for place in order:
        logits = network.logits(network.states(ids, torch.arange(3)[None]))[0, place]
        lost -= float(logits.log_softmax(-1)[truth[place]])
        ids[0, place] = truth[place]
    return lost
