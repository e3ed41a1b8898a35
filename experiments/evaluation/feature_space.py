"""The shape of a feature space: principal axes, neighbours, class means, span of a classifier.

Labels are integers [n], or [n, C] where an image has any number of labels (1, 0, or −1 where that
is unknown). Everything is computed in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_ELEMENTS_AT_ONCE = 2**23  # Similarities held at once: bounds the work space to about 64 MB.
_MOST_ORDERED = 400  # With more classes, the optimal order of the leaves takes minutes.


def unit_features(features: np.ndarray) -> np.ndarray:
    """Features [n, d] divided by their lengths; zero stays zero."""
    features = np.asarray(features, np.float64)
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(lengths > 0, lengths, 1)


def principal_axes(features: np.ndarray) -> np.ndarray:
    """The two directions in which features [n, d] vary most: orthonormal float64 [d, 2]."""
    features = np.asarray(features, np.float64)
    centered = features - features.mean(0)
    axes = np.linalg.eigh(centered.T @ centered)[1][:, ::-1][:, :2]
    # The sign of an eigenvector is arbitrary: the largest entry is positive.
    return axes * np.sign(axes[np.abs(axes).argmax(0), [0, 1]])


def class_membership(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Whether an image has a label: bool [n, C]."""
    labels = np.asarray(labels)
    return labels > 0 if labels.ndim == 2 else labels[:, None] == np.arange(num_classes)


def class_similarity(features: np.ndarray, membership: np.ndarray) -> np.ndarray:
    """The cosines [C, C] between the mean unit features of classes; 0 without an image."""
    means = unit_features(membership.T.astype(np.float64) @ unit_features(features))
    return np.clip(means @ means.T, -1, 1)


def class_order(similarity: np.ndarray) -> np.ndarray:
    """An order of the classes, [C], by average linkage of 1 − similarity: similar ones adjoin."""
    from scipy.cluster.hierarchy import leaves_list, linkage  # Slow to import.
    from scipy.spatial.distance import squareform

    if len(similarity) < 3:
        return np.arange(len(similarity))
    distance = np.clip(1 - (similarity + similarity.T) / 2, 0, None)
    np.fill_diagonal(distance, 0)
    optimal = len(similarity) <= _MOST_ORDERED
    tree = linkage(squareform(distance, checks=False), "average", optimal_ordering=optimal)
    return leaves_list(tree).astype(np.int64)


def most_similar_pairs(similarity: np.ndarray, count: int) -> list[tuple[int, int]]:
    """The pairs of different classes with the largest similarity, from the most similar one."""
    rows, columns = np.triu_indices(len(similarity), 1)
    order = np.argsort(-similarity[rows, columns], kind="stable")[:count]
    return [(int(rows[k]), int(columns[k])) for k in order]


def nearest_neighbours(features: np.ndarray, queries: np.ndarray, count: int) -> np.ndarray:
    """The `count` other features [n, d], or all, with the largest cosine to each of some rows [q].

    They are int64 [q, k], from the nearest.
    """
    units, queries = unit_features(features), np.asarray(queries)
    count, found = min(count, len(units) - 1), []
    step = max(1, _ELEMENTS_AT_ONCE // len(units))
    for start in range(0, len(queries), step):
        rows = queries[start : start + step]
        similar = units[rows] @ units.T
        similar[np.arange(len(rows)), rows] = -np.inf
        # Sorting the nearest ones alone takes a tenth of the time.
        nearest = np.sort(np.argpartition(-similar, count - 1, axis=1)[:, :count], axis=1)
        order = np.argsort(-np.take_along_axis(similar, nearest, 1), axis=1, kind="stable")
        found.append(np.take_along_axis(nearest, order, 1))
    return np.concatenate(found)


def nearest_mean_predictions(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The class whose mean has the largest cosine to a feature: int64 [n].

    The mean of a feature's own class is computed without the feature. A feature that is alone in
    its class is never assigned to it. Features are [n, d], and labels [n] from 0.
    """
    units, labels = unit_features(features), np.asarray(labels)
    counts = np.bincount(labels)
    sums = np.zeros((len(counts), units.shape[1]))
    np.add.at(sums, labels, units)
    scores = units @ unit_features(sums).T
    scores[:, counts == 0] = -np.inf
    own = (units * unit_features(sums[labels] - units)).sum(1)
    scores[np.arange(len(labels)), labels] = np.where(counts[labels] > 1, own, -np.inf)
    return scores.argmax(1)


class ClassifierSubspace(NamedTuple):
    """The spectrum of a classifier and the features inside its span, as JSON types."""

    singular_values: list[float]
    """Of the weights, largest first; min(d, C) of them."""
    effective_rank: float
    """Participation ratio of the squared singular values, `(Σσ²)² / Σσ⁴`: from 1 to min(d, C); 0
    for weights of zeros."""
    variance_share: float
    """Share of the variance of the features that lies in the span, in [0, 1]."""
    class_variance_share: float
    """Share of the variance between the means of the classes that lies in the span, in [0, 1]."""


class GradientDirections(NamedTuple):
    """The directions that the gradient of the features has in a batch."""

    rank: int
    """Number of directions; those below the usual rank tolerance of float32 do not count."""
    effective_rank: float
    """Participation ratio of the squared singular values: from 1 to the rank; 0 for zeros."""
    outside_span: float
    """Share of the squared gradient that softmax cannot have with the same classifier, in [0, 1]:
    what is outside of the span of the differences of its weights."""


def gradient_directions(gradients: np.ndarray, weights: np.ndarray) -> GradientDirections:
    """The directions of gradients [n, d] of features, and those that softmax lacks.

    The gradient of softmax is `W (p − e_y)` (Kobayashi, WACV 2021, supplement eq. (B.1)): the
    factors of the weights [d, C] sum to 0, so that its rank is at most min(C − 1, d). That of group
    softmax with the same groups for all samples is at most min(G·(C − 1), d) (eq. (B.2)).
    """
    gradients, weights = np.asarray(gradients, np.float64), np.asarray(weights, np.float64)
    values = np.linalg.svd(gradients, compute_uv=False)
    _, outside = split_by_span(gradients, weights - weights.mean(axis=1, keepdims=True))
    return GradientDirections(
        rank=int(np.sum(values > _tolerance(gradients, values))),
        effective_rank=_effective_rank(values),
        outside_span=float(np.sum(outside**2) / (np.sum(values**2) or 1)),
    )


def classifier_subspace(
    features: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> ClassifierSubspace:
    """Where features [n, d] with labels [n] vary: inside the span of weights [d, C], or outside it.

    Features that do not vary have the share 0. Labels are of any classes: those of the classifier
    or others.
    """
    basis, values = span(weights)
    features = np.asarray(features, np.float64)
    centred = features - features.mean(0)
    present, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    sums = np.zeros((len(present), centred.shape[1]))
    np.add.at(sums, classes, centred)
    # Every class weighs as many times as it has samples, as in the variance of the features.
    means = sums / np.sqrt(counts)[:, None]
    shares = [float(_shares(rows, basis).sum()) for rows in (centred, means)]
    return ClassifierSubspace(values.tolist(), _effective_rank(values), *shares)


def span(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An orthonormal basis [d, r] of the span of weights [d, C], and all singular values."""
    basis, values, _ = np.linalg.svd(np.asarray(weights, np.float64), full_matrices=False)
    return basis[:, values > _tolerance(weights, values)], values


def split_by_span(features: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The parts of features [n, d] inside the span of a classifier and outside it, float64."""
    basis, _ = span(weights)
    inside = features @ basis @ basis.T
    return inside, features - inside


def variance_shares(features: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """The share [k] of the variance of features [n, d] along orthonormal axes [d, k]; else 0."""
    # Centred before the product, whose rounding differs from row to row on some processors.
    features = np.asarray(features, np.float64)
    return _shares(features - features.mean(0), axes)


def _tolerance(matrix: np.ndarray, values: np.ndarray) -> float:
    """The singular values of a matrix that are not larger count as 0: max(d, C)·ε·max σ."""
    return max(matrix.shape) * np.finfo(np.float32).eps * values[0]


def _effective_rank(values: np.ndarray) -> float:
    powers = values**2
    return float(powers.sum() ** 2 / np.sum(powers**2)) if values[0] else 0.0


def _shares(deviations: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """The share of the squared length of the rows [n, d] along each of orthonormal axes [d, k]."""
    total = np.sum(deviations**2)
    return np.sum((deviations @ axes) ** 2, axis=0) / (total if total > 0 else 1)
