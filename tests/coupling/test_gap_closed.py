import math

import pytest
import torch

from codd.coupling.gap import NO_GAP, SMALLEST_GAP, BlockScores, gap_closed, gap_in_words, summary
from codd_lab.likelihood.studies import closed_interval

NONE = [(-1.0, -0.5, -1.0), (-1.0, -1.0135, -0.999), (-1.0, -0.9, -1.2), (-0.0003, -0.0002, -0.0003)]
"""Factorized, coupled, sequential where one token at a time is no better, or hardly, than all at once."""


@pytest.mark.parametrize("scores", [*NONE, (-2.0, -1.5, -1.0), (-2.0, -2.5, -1.0), (-2.0, -0.5, -1.0)])
def test_all_give_one_answer(scores):
    factorized, coupled, sequential = scores
    blocks = [torch.tensor([x, x], dtype=torch.float64) for x in scores]
    measured = BlockScores(1, blocks[0], {}, blocks[2])
    closed = gap_closed(*scores)
    answers = [closed, summary(measured, blocks[1])["gap_closed"]]
    interval = closed_interval(measured, blocks[1], seed=0)["mean"]
    if scores in NONE:
        assert all(map(math.isnan, answers))
        assert interval is None
        assert gap_in_words(closed) == gap_in_words(interval) == NO_GAP
    else:
        share = (coupled - factorized) / (sequential - factorized)
        assert [*answers, interval] == pytest.approx([share] * 3)
        assert gap_in_words(share) == f"{share:.0%}"


def test_a_gap_begins_where_it_is_said_to():
    assert math.isnan(gap_closed(0.0, 0.0, SMALLEST_GAP * 0.99))
    assert gap_closed(0.0, SMALLEST_GAP, 2 * SMALLEST_GAP) == 0.5
