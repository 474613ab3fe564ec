import math

import numpy as np
import pytest

from codd.errors import InvalidInput
from codd.evaluation.statistics import bootstrap_interval, mcnemar, paired, ratio_of_sums, share_interval


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [(0, 0, 1.0), (1, 0, 1.0), (5, 0, 2 / 32), (0, 5, 2 / 32), (8, 2, 2 * (1 + 10 + 45) / 1024), (4, 4, 1.0)],
)
def test_mcnemar_by_hand(gained, lost, p):
    assert mcnemar(gained, lost) == pytest.approx(p)


def test_mcnemar_of_many_problems():
    assert 0 < mcnemar(5000, 4000) < 1e-20


def test_wilsons_interval_by_hand():
    low, high = share_interval(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert share_interval(0, 10)[0] == pytest.approx(0.0)
    assert share_interval(0, 10)[1] > 0.2
    assert share_interval(10, 10)[1] == pytest.approx(1.0)
    with pytest.raises(InvalidInput, match="no share of nothing"):
        share_interval(0, 0)


def test_paired_scores():
    found = paired([1, 1, 0, 1, 0], [1, 0, 0, 0, 1])
    assert (found.problems, found.gained, found.lost) == (5, 2, 1)
    assert found.difference == pytest.approx(0.2)
    assert found.low <= 0.2 <= found.high
    assert found.p == 1.0
    assert str(found).startswith("+20.0 (")


def test_scores_that_are_not_right_or_wrong_have_no_exact_test():
    assert paired([0.5, 1.0], [0.25, 1.0]).p is None


def test_unequal_lengths_are_not_paired():
    with pytest.raises(InvalidInput, match="not the same problems"):
        paired([1, 0], [1])


def test_the_bootstrap_covers_a_known_mean():
    """Of a hundred samples of a known distribution, about 95 intervals hold its mean."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(100):
        values = rng.exponential(size=60)
        low, high = bootstrap_interval(lambda drawn, v=values: v[drawn].mean(-1), 60, resamples=500)
        held += low <= 1.0 <= high
    assert 86 <= held <= 99


def test_the_bootstrap_is_seeded():
    values = np.arange(20.0)
    first, again, other = (bootstrap_interval(lambda d: values[d].mean(-1), 20, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    with pytest.raises(InvalidInput, match="nothing to draw"):
        bootstrap_interval(lambda d: values[d].mean(-1), 0)


def test_means_over_tokens_weigh_long_texts_more():
    statistic = ratio_of_sums(np.array([10.0, 1.0]), np.array([5.0, 1.0]))
    assert statistic(np.array([[0, 1]]))[0] == pytest.approx(11 / 6)
    assert not math.isnan(ratio_of_sums(np.zeros(1), np.zeros(1))(np.array([[0]]))[0])
