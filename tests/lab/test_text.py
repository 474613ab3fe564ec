import math

import numpy as np
import pytest

from codd_lab.text.measures import MEANINGS, diversity, measures, pooled_distinct_n, rep_n


def test_rep_n_by_hand():
    text = [1, 2, 1, 2, 3]  # 2-grams 12 21 12 23; 3-grams 121 212 123; 4-grams 1212 2123
    assert rep_n(text, 1) == pytest.approx(2 / 5)
    assert rep_n(text, 2) == pytest.approx(1 / 4)
    assert rep_n(text, 3) == rep_n(text, 4) == 0
    assert diversity(text) == pytest.approx(3 / 4)


def test_one_token_over_and_over():
    text = [5] * 9  # one unique n-gram of 8, 7 and 6
    assert [rep_n(text, n) for n in (2, 3, 4)] == pytest.approx([7 / 8, 6 / 7, 5 / 6])
    assert diversity(text) == pytest.approx(1 / 8 / 7 / 6)


def test_words_are_as_good_as_ids():
    assert rep_n(["the", "cat", "and", "the", "cat"], 2) == rep_n([0, 1, 2, 0, 1], 2) == pytest.approx(1 / 4)


@pytest.mark.parametrize("text", [[], [1], [1, 2, 3]])
def test_a_text_without_n_grams_says_nothing(text: list[int]):
    assert math.isnan(rep_n(text, 4))
    assert math.isnan(diversity(text))


def test_pooled_sees_repetition_between_texts():
    texts = [[1, 2, 3], [1, 2, 4]]  # 12 23 12 24
    assert pooled_distinct_n(texts, 2) == pytest.approx(3 / 4)
    assert all(rep_n(text, 2) == 0 for text in texts)
    assert math.isnan(pooled_distinct_n([[1]], 2))


def test_measures_average_over_texts_and_nll_over_tokens():
    tokens = [[1, 1, 1, 1, 1], [1, 2, 3, 4, 5]]
    found = measures(tokens, [6.0, 1.0], [2, 5], [12, 23])
    values = {name: figure["value"] for name, figure in found.items()}
    assert values["nll"] == pytest.approx(7 / 7)
    assert values["ppl"] == pytest.approx(math.e)
    assert values["nats_per_byte"] == pytest.approx(7 / 35)
    assert values["rep_2"] == pytest.approx((3 / 4 + 0) / 2)
    assert values["rep_4"] == pytest.approx((1 / 2 + 0) / 2)
    assert values["distinct_2"] == pytest.approx(1 - values["rep_2"])
    assert values["diversity"] == pytest.approx((1 / 4 * 1 / 3 * 1 / 2 + 1) / 2)
    assert values["pooled_distinct_2"] == pytest.approx(5 / 8)
    assert values["length"] == 5
    assert set(found) == set(MEANINGS)


def test_short_texts_are_left_out_of_what_they_cannot_show():
    with_short = measures([[1, 1, 1], [7], []], [1.0, 1.0, 0.0], [3, 1, 0], [5, 1, 0])
    assert with_short["rep_2"]["value"] == pytest.approx(1 / 2)
    assert with_short["rep_4"] == {"value": None, "low": None, "high": None}
    assert with_short["diversity"]["value"] is None
    assert with_short["nll"]["value"] == pytest.approx(1 / 2)


def test_nothing_to_score_is_none_and_huge_is_no_perplexity():
    assert measures([[1, 2]], [0.0], [0], [0])["nll"]["value"] is None
    assert measures([[1, 2]], [800.0], [1], [3])["ppl"]["value"] is None


def test_intervals_cover_the_truth_and_narrow_with_more_texts():
    def interval(n: int) -> tuple[float, float]:
        generator = np.random.default_rng(1)
        counts = generator.integers(50, 150, n)
        nats = 3.0 * counts + 20 * generator.standard_normal(n)
        tokens = generator.integers(0, 9, (n, 30)).tolist()
        nll = measures(tokens, nats.tolist(), counts.tolist(), counts.tolist())["nll"]
        assert nll["low"] < nll["value"] < nll["high"]
        return nll["low"], nll["high"]

    (low, high), (lower, higher) = interval(400), interval(25)
    assert low < 3.0 < high
    assert high - low < (higher - lower) / 2
