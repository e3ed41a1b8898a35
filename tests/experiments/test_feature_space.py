"""Principal axes, neighbours and class means, against loops and another decomposition."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize

from experiments.evaluation import feature_space as space
from experiments.evaluation.feature_space import (
    classifier_subspace,
    gradient_directions,
    span,
    variance_shares,
)
from tests.tolerances import FLOAT32

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(40, 6)) * [3, 2, 1, 1, 0.5, 0.1] + 1
LABELS = RNG.integers(0, 5, 40)
MULTI = RNG.integers(-1, 2, (40, 4)).astype(np.int8)
UNITS = np.asarray(normalize(FEATURES))


def test_axes_are_those_of_the_singular_value_decomposition():
    axes = space.principal_axes(FEATURES)
    centered = FEATURES - FEATURES.mean(0)
    left, values, _ = np.linalg.svd(centered, full_matrices=False)
    np.testing.assert_allclose(abs(centered @ axes), abs(left * values)[:, :2])
    shares = values[:2] ** 2 / (values**2).sum()
    np.testing.assert_allclose(variance_shares(FEATURES, axes), shares, rtol=1e-12)
    assert (axes.max(0) == abs(axes).max(0)).all()
    assert variance_shares(np.ones((3, 6)), axes).tolist() == [0, 0]


@pytest.mark.parametrize("labels", [LABELS, MULTI])
def test_cosines_of_class_means_are_those_of_a_loop(labels):
    members = MULTI == 1 if labels is MULTI else np.eye(5, dtype=bool)[LABELS]
    membership = space.class_membership(labels, members.shape[1])
    np.testing.assert_array_equal(membership, members)
    means = np.asarray(normalize([UNITS[own].mean(0) for own in members.T]))
    np.testing.assert_allclose(space.class_similarity(FEATURES, membership), means @ means.T)


def test_a_class_without_an_image_and_a_zero_feature_have_no_direction():
    membership = space.class_membership(np.zeros(3, int), 2)
    assert space.class_similarity(np.ones((3, 2)), membership)[1].tolist() == [0, 0]
    assert space.unit_features(np.zeros((1, 2))).tolist() == [[0, 0]]


def test_neighbours_are_those_of_scikit_learn(monkeypatch):
    search = NearestNeighbors(n_neighbors=3, metric="cosine").fit(FEATURES)
    expected = search.kneighbors(return_distance=False)[::2]  # Of each among the others.
    queries = np.arange(0, 40, 2)
    for at_once in (4000, 120):  # All queries, or three.
        monkeypatch.setattr(space, "_ELEMENTS_AT_ONCE", at_once)
        np.testing.assert_array_equal(space.nearest_neighbours(FEATURES, queries, 3), expected)
    assert space.nearest_neighbours(FEATURES[:3], np.array([1]), 9).shape == (1, 2)


def test_predictions_leave_the_feature_out_of_its_own_mean():
    labels = LABELS.copy()
    labels[labels == 4] = 3
    labels[5] = 4  # Alone in its class.
    expected = []
    for i, unit in enumerate(UNITS):
        of_others = [UNITS[(labels == c) & (np.arange(40) != i)] for c in range(5)]
        means = normalize([rows.mean(0) if len(rows) else -unit for rows in of_others])
        expected.append(np.argmax(np.asarray(means) @ unit))
    predictions = space.nearest_mean_predictions(FEATURES, labels)
    assert predictions.tolist() == expected
    assert predictions[5] != 4


def test_similar_classes_are_side_by_side():
    block = np.array([0, 1, 0, 1, 2, 2, 0, 1])
    similarity = np.where(block[:, None] == block, 0.9, 0.1) + 0.01 * np.eye(8)
    order = space.class_order(similarity)
    assert sorted(order) == list(range(8))
    assert np.count_nonzero(np.diff(block[order])) == 2
    assert space.class_order(np.eye(2)).tolist() == [0, 1]
    similarity = np.array([[1, 0.2, 0.7], [0.2, 1, 0.5], [0.7, 0.5, 1]])
    assert space.most_similar_pairs(similarity, 2) == [(0, 2), (1, 2)]


CLASSES = np.array([3, 0, 3, 5, 0, 3, 5, 5, 5, 3])


def make(dim=6, classes=3):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(6, dim))[CLASSES] + 0.5 * rng.normal(size=(len(CLASSES), dim)) + 3
    return features.astype(np.float32), rng.normal(size=(dim, classes)).astype(np.float32)


def test_shares_are_those_of_the_orthogonal_projection():
    features, weights = make()
    found = classifier_subspace(features, CLASSES, weights)
    projector = weights @ np.linalg.inv(weights.T @ weights) @ weights.T
    centered = features - features.mean(0)
    means = np.stack([centered[c == CLASSES].mean(0) for c in CLASSES])
    shares = [np.sum((rows @ projector) ** 2) / np.sum(rows**2) for rows in (centered, means)]
    assert found[2:] == pytest.approx(shares, rel=4 * FLOAT32)
    # Direction by direction, also of weights of a lower rank.
    weights[:, 2] = weights[:, 0] - weights[:, 1]
    shares = variance_shares(features, span(weights)[0])
    first = (features @ np.linalg.svd(weights)[0][:, 0]).var() / features.var(0).sum()
    assert shares[0] == pytest.approx(first, rel=16 * FLOAT32)
    inside = classifier_subspace(features, CLASSES, weights).variance_share
    assert (len(shares), shares.sum()) == (2, pytest.approx(inside, rel=FLOAT32))


def test_the_effective_rank_is_between_one_and_the_number_of_directions():
    for values, rank in [((2, 2, 2), 3), ((5, 0, 0), 1), ((2, 1, 0), 25 / 17), ((0, 0, 0), 0)]:
        weights = np.zeros((6, 3), np.float32)
        weights[[4, 1, 2], range(3)] = values
        found = classifier_subspace(make()[0], CLASSES, weights)
        assert found.effective_rank == pytest.approx(rank)
        assert found.singular_values == sorted(values, reverse=True)
    assert found.variance_share == found.class_variance_share == 0


def test_directions_of_a_gradient_are_counted_and_weighed():
    rng = np.random.default_rng(8)
    weights = rng.normal(size=(6, 3)) + 5  # Its own direction is not one of softmax's two.
    errors = rng.normal(size=(9, 3))
    gradients = (errors - errors.mean(axis=1, keepdims=True)) @ weights.T
    inside = gradient_directions(gradients.astype(np.float32), weights.astype(np.float32))
    values = np.linalg.svd(gradients, compute_uv=False)[:2]
    assert inside.rank == 2
    expected = np.sum(values**2) ** 2 / np.sum(values**4)
    assert inside.effective_rank == pytest.approx(expected, rel=16 * FLOAT32)
    assert inside.outside_span < FLOAT32
    orthogonal = np.linalg.svd(weights)[0][:, 4]
    both = gradients + 3 * rng.normal(size=(9, 1)) * orthogonal
    share = np.sum((both @ orthogonal) ** 2) / np.sum(both**2)
    found = gradient_directions(both, weights)
    assert (found.rank, found.outside_span) == (3, pytest.approx(share))
    assert gradient_directions(0 * both, weights) == (0, 0, 0)
