"""The span of a linear classifier, and how much of the features' variance and gradient it holds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


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
