"""How far one set of texts is from another: MAUVE, computed here from its definition (Pillutla et al., 2021).

The features of both sets are clustered together, which gives two histograms P and Q over the clusters. For mixtures
R = λP + (1 - λ)Q the points (exp(-c KL(Q|R)), exp(-c KL(P|R))) make a curve; the area under it is the score: 1 for
equal histograms, near 0 for disjoint ones. Of a few hundred texts it is biased and noisy: two samples of one source do
not reach 1, so that the score of reference against reference, with the same sizes, belongs beside it.
"""

import statistics

import numpy as np
import threadpoolctl
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from codd.errors import InvalidInput

SCALE = 5.0
"""The constant c; the authors' choice."""
TEXTS_PER_CLUSTER = 10
"""Texts of the smaller set per cluster; the authors' choice."""
FEWEST = 2 * TEXTS_PER_CLUSTER
"""Texts on each side, for two clusters."""
VARIANCE = 0.9
"""Share that the principal components keep; the authors' choice."""
POINTS = 1001
"""Points of the divergence curve whose area is MAUVE."""
SEEDS = (0, 1, 2, 3, 4)
RESTARTS = 5


def distance(p: Float[Tensor, "n d"], q: Float[Tensor, "m d"], seed: int = 0) -> float:
    """The MAUVE score of two sets of features (`Judge.assess`): 1 is no distance, 0 is far apart.

    The seed is that of the clustering, into a cluster for ten texts of the smaller set.
    """
    if min(len(p), len(q)) < FEWEST:
        raise InvalidInput(f"a distance needs at least {FEWEST} texts on each side, found {len(p)} and {len(q)}.")
    wanted = round(min(len(p), len(q)) / TEXTS_PER_CLUSTER)
    with threadpoolctl.threadpool_limits(1):  # of so few points: several would only wait for each other
        points = _reduced(np.concatenate([_rows(p), _rows(q)]))
        labels = _labels(points, wanted, seed)
    count = int(labels.max()) + 1
    return frontier_area(_histogram(labels[: len(p)], count), _histogram(labels[len(p) :], count))


def frontier_area(p: Float[np.ndarray, " k"], q: Float[np.ndarray, " k"]) -> float:
    """The area under the divergence curve of two histograms."""
    shares = np.linspace(0.0, 1.0, POINTS)[:, None]
    mixed = shares * p + (1 - shares) * q
    x, y = (np.exp(-SCALE * _divergence(histogram, mixed)) for histogram in (q, p))
    # x falls from 1 at R = Q to its least at R = P. The corners close the curve, so that equal histograms have area 1.
    across, up = np.concatenate([[0.0], x[::-1], [1.0]]), np.concatenate([[1.0], y[::-1], [0.0]])
    return float(np.trapezoid(up, across))


def _divergence(p: NDArray[np.float64], mixed: NDArray[np.float64]) -> NDArray[np.float64]:
    """KL(p | row) of every row; infinite where a row lacks what p has."""
    held = p > 0
    with np.errstate(divide="ignore"):
        ratios = np.log(p[held]) - np.log(mixed[:, held])
    return np.asarray((p[held] * ratios).sum(-1))


def _histogram(labels: Int[np.ndarray, " n"], count: int) -> NDArray[np.float64]:
    return np.bincount(labels, minlength=count) / len(labels)


def _rows(features: Tensor) -> NDArray[np.float64]:
    rows = features.double().numpy(force=True)
    if not np.isfinite(rows).all():
        raise InvalidInput("features must be finite numbers; found NaN or infinity.")
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1.0))


def _reduced(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """The first principal components, as many as hold most of the variance."""
    left, scales, _ = np.linalg.svd(points - points.mean(0), full_matrices=False)
    variance = np.cumsum(scales**2)
    kept = int(np.searchsorted(variance, VARIANCE * variance[-1])) + 1
    return np.asarray(left[:, :kept] * scales[:kept])


def _labels(points: NDArray[np.float64], clusters: int, seed: int) -> NDArray[np.int64]:
    """The cluster of each point, by k-means; equal points make no more clusters than they are different."""
    from sklearn.cluster import KMeans  # not before it is needed: it takes long

    clusters = min(clusters, len(np.unique(points.round(12), axis=0)))
    labels = KMeans(clusters, n_init=RESTARTS, max_iter=500, random_state=seed).fit_predict(points)
    return np.asarray(labels, np.int64)


def average_distance(p: Float[Tensor, "n d"], q: Float[Tensor, "m d"]) -> tuple[float, float]:
    """The mean of `distance` over the clusterings' seeds, and the deviation between them."""
    scores = [distance(p, q, seed) for seed in SEEDS]
    return statistics.fmean(scores), statistics.pstdev(scores)


def compare(
    reference: Float[Tensor, "n d"],
    again: Float[Tensor, "m d"],
    samples: Float[Tensor, "l d"],
) -> dict[str, float | int]:
    """Samples against a reference, and the ceiling: another sample of the reference against it.

    All are cut to the smallest set. Deviations are between the clusterings' seeds: they do not hold the chance of which
    texts were drawn. ``texts``: how many of each set were compared.
    """
    size = min(len(reference), len(again), len(samples))
    found: dict[str, float | int] = {"texts": size}
    for name, other in (("mauve", samples), ("ceiling", again)):
        found[name], found[f"{name}_deviation"] = average_distance(reference[:size], other[:size])
    return found
