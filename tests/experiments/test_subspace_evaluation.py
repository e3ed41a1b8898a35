"""The spectrum of a classifier and the variance inside its span, against float64 loops."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from experiments.evaluation.subspace import classifier_subspace, span, variance_shares

LABELS = np.array([3, 0, 3, 5, 0, 3, 5, 5, 5, 3])


def make(dim=6, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    offsets = rng.normal(size=(6, dim))
    features = offsets[LABELS] + 0.5 * rng.normal(size=(len(LABELS), dim)) + 3
    return features.astype(np.float32), rng.normal(size=(dim, classes)).astype(np.float32)


def test_shares_are_those_of_the_orthogonal_projection():
    features, weights = make()
    found = classifier_subspace(features, LABELS, weights)
    projector = weights @ np.linalg.inv(weights.T @ weights) @ weights.T
    mean = features.mean(axis=0)
    inside = total = class_inside = class_total = 0.0
    for label in set(LABELS.tolist()):
        rows = features[label == LABELS]
        for row in rows:
            inside += np.sum((projector @ (row - mean)) ** 2)
            total += np.sum((row - mean) ** 2)
        class_inside += len(rows) * np.sum((projector @ (rows.mean(axis=0) - mean)) ** 2)
        class_total += len(rows) * np.sum((rows.mean(axis=0) - mean) ** 2)
    assert found.variance_share == pytest.approx(inside / total, rel=1e-5)
    assert found.class_variance_share == pytest.approx(class_inside / class_total, rel=1e-5)
    # The complement is the one that the direct sum uses.
    outside = np.asarray(
        jaxloss.project_complement(jnp.asarray(features - mean), jnp.asarray(weights), epsilon=0)
    )
    assert np.sum(outside**2) / total == pytest.approx(1 - found.variance_share, rel=1e-4)


def test_the_effective_rank_is_between_one_and_the_number_of_directions():
    features = make()[0]
    for values, rank in [((2, 2, 2), 3), ((5, 0, 0), 1), ((2, 1, 0), 25 / 17), ((0, 0, 0), 0)]:
        weights = np.zeros((6, 3), np.float32)
        weights[[4, 1, 2], range(3)] = values
        found = classifier_subspace(features, LABELS, weights)
        assert found.effective_rank == pytest.approx(rank)
        assert found.singular_values == sorted(values, reverse=True)
    # Of weights without a direction, nothing is inside.
    assert found.variance_share == found.class_variance_share == 0


def test_directions_add_up_to_the_share_inside():
    features, weights = make()
    weights[:, 2] = weights[:, 0] - weights[:, 1]  # Rank 2.
    basis, _ = span(weights)
    assert basis.shape[1] == 2
    shares = variance_shares(features, basis)
    first = (features @ np.linalg.svd(weights)[0][:, 0]).var() / features.var(0).sum()
    assert shares[0] == pytest.approx(first, rel=1e-4)
    inside = classifier_subspace(features, LABELS, weights).variance_share
    assert shares.sum() == pytest.approx(inside, rel=1e-6)
    assert 0.05 < inside < 0.95
