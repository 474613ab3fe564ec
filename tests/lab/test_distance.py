import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from codd.errors import InvalidInput
from codd_lab.text.distance import compare, distance, frontier_area

pytest.importorskip("sklearn", reason="the distance needs scikit-learn: pip install codd-lm[eval]")


def cloud(seed: int, count: int = 200, shift: float = 0.0) -> Tensor:
    """Points of one source: another seed is another sample of it."""
    return torch.randn(count, 12, generator=torch.Generator().manual_seed(seed)) + shift


def test_area_of_disjoint_histograms():
    # The curve is ((1 - λ)^5, λ^5), and the area 5 B(6, 5).
    assert frontier_area(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == pytest.approx(1 / 252, rel=1e-3)


def test_area_is_symmetric_and_falls_as_histograms_part():
    p = np.array([0.5, 0.3, 0.2, 0.0])
    areas = []
    for share in (0.0, 0.1, 0.3, 0.6, 1.0):
        q = (1 - share) * p + share * np.array([0.0, 0.0, 0.1, 0.9])
        areas.append(frontier_area(p, q))
        assert frontier_area(q, p) == pytest.approx(areas[-1], abs=1e-9)
    assert areas[0] == pytest.approx(1)
    assert areas == sorted(areas, reverse=True)
    assert len(set(areas)) == len(areas)


def test_area_by_a_loop():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.3, 0.6])
    points = [(0.0, 1.0)]
    for share in np.linspace(1, 0, 2001):
        mixed = share * p + (1 - share) * q
        points.append(tuple(np.exp(-5 * sum(a * np.log(a / b) for a, b in zip(h, mixed, strict=True))) for h in (q, p)))
    points.append((1.0, 0.0))
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
    assert frontier_area(p, q) == pytest.approx(area, abs=1e-5)


def test_identical_and_disjoint_sets():
    here = cloud(0)
    assert distance(here, here) == pytest.approx(1)
    assert distance(cloud(0, shift=2.0), cloud(1, shift=-2.0)) < 0.02


def test_samples_of_one_source_are_nearer_than_those_of_two():
    near, far = distance(cloud(0), cloud(1)), distance(cloud(0), cloud(1, shift=0.5))
    assert near > 0.9
    assert far < near - 0.2
    assert distance(cloud(1, shift=0.5), cloud(0)) == pytest.approx(far, abs=0.1)


def test_seeded():
    p, q = cloud(0), cloud(1, shift=0.4)
    assert distance(p, q, seed=3) == distance(p, q, seed=3)
    assert len({distance(p, q, seed=seed) for seed in range(4)}) > 1


def test_lengths_of_the_features_do_not_matter():
    p, q = cloud(0), cloud(1, shift=0.4)
    scales = torch.rand(len(p), 1, generator=torch.Generator().manual_seed(5)) + 0.5
    assert distance(p * scales, q) == pytest.approx(distance(p, q), abs=1e-3)


def test_texts_that_are_all_the_same():
    """As a model writes them that has collapsed: fewer different texts than clusters."""
    same = torch.ones(60, 12)
    assert distance(same, same) == pytest.approx(1)
    assert distance(same, cloud(0, 60)) < 0.1


def test_what_it_cannot_use():
    for other, message in ((cloud(1, 19), "20 texts on each side, found 200 and 19"), (cloud(1).log(), "finite")):
        with pytest.raises(InvalidInput, match=message):
            distance(cloud(0), other)


def test_compare_gives_the_ceiling_at_the_same_size():
    found = compare(cloud(0, 120), cloud(1, 300), cloud(2, 100, shift=0.5))
    assert found["texts"] == 100
    ceilings = [distance(cloud(0, 120)[:100], cloud(1, 300)[:100], seed) for seed in range(5)]
    assert found["ceiling"] == pytest.approx(sum(ceilings) / 5)
    assert found["mauve"] < found["ceiling"] - 0.2
    assert found["mauve_deviation"] > 0


@pytest.mark.filterwarnings("ignore")  # the other package's own affairs
def test_agrees_with_the_authors_package():
    """Which is under the GPL, and so is not used by ours; its clusters are others, and so are its seeds."""
    mauve = pytest.importorskip("mauve", reason="the package mauve-text is not installed")
    for shift in (0.0, 0.3, 0.6):
        p, q = cloud(0, 400), cloud(1, 400, shift=shift)
        theirs = [mauve.compute_mauve(p.numpy(), q.numpy(), seed=seed).mauve for seed in range(5)]
        ours = [distance(p, q, seed) for seed in range(5)]
        assert np.mean(ours) == pytest.approx(np.mean(theirs), abs=0.06)
