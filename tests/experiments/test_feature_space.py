"""Principal axes, neighbours and class means, against loops and another decomposition."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.evaluation.feature_space import (
    class_means,
    class_membership,
    class_order,
    class_similarity,
    most_similar_pairs,
    nearest_mean_predictions,
    neighbour_precision,
    principal_axes,
    unit_features,
)
from experiments.evaluation.subspace import variance_shares

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(40, 6)) * [3, 2, 1, 1, 0.5, 0.1] + 1
LABELS = RNG.integers(0, 5, 40)
MULTI = RNG.integers(-1, 2, (40, 4)).astype(np.int8)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def test_axes_are_those_of_the_singular_value_decomposition():
    axes = principal_axes(FEATURES)
    centered = FEATURES - FEATURES.mean(0)
    left, values, _ = np.linalg.svd(centered, full_matrices=False)
    np.testing.assert_allclose(abs(centered @ axes), abs(left * values)[:, :2])
    shares = values[:2] ** 2 / (values**2).sum()
    np.testing.assert_allclose(variance_shares(FEATURES, axes), shares, rtol=1e-12)
    assert (axes.max(0) == abs(axes).max(0)).all()


def test_shares_of_constant_features_are_zero():
    assert variance_shares(np.ones((3, 6)), principal_axes(FEATURES)).tolist() == [0, 0]


def test_class_means_and_their_cosines_are_those_of_a_loop():
    units = np.stack([x / np.sqrt((x**2).sum()) for x in FEATURES])
    for labels, count in ((LABELS, 5), (MULTI, 4)):
        membership = class_membership(labels, count)
        rows = [
            [i for i in range(40) if (labels[i] == c if labels.ndim == 1 else labels[i, c] == 1)]
            for c in range(count)
        ]
        assert [np.flatnonzero(column).tolist() for column in membership.T] == rows
        means = [units[r].mean(0) for r in rows]
        np.testing.assert_allclose(
            class_means(FEATURES, membership), [m / np.linalg.norm(m) for m in means]
        )
        expected = [[cosine(a, b) for a in means] for b in means]
        np.testing.assert_allclose(class_similarity(FEATURES, membership), expected)


def test_a_class_without_an_image_and_a_zero_feature_have_no_direction():
    membership = class_membership(np.zeros(3, int), 2)
    assert class_means(np.ones((3, 2)), membership)[1].tolist() == [0, 0]
    assert unit_features(np.zeros((1, 2))).tolist() == [[0, 0]]


@pytest.mark.parametrize(("labels", "count"), [(LABELS, 5), (MULTI, 4)])
def test_precision_is_the_share_of_neighbours_that_share_a_label(labels, count):
    hits = []
    for query in range(40):
        mine = {labels[query]} if labels.ndim == 1 else set(np.flatnonzero(labels[query] == 1))
        others = [i for i in range(40) if i != query]
        nearest = sorted(others, key=lambda i: -cosine(FEATURES[query], FEATURES[i]))[:3]
        for i in nearest if mine else []:
            theirs = {labels[i]} if labels.ndim == 1 else set(np.flatnonzero(labels[i] == 1))
            hits.append(bool(mine & theirs))
    precision = neighbour_precision(FEATURES, class_membership(labels, count), 3)
    assert precision == pytest.approx(np.mean(hits))
    assert 0 < precision < 1


def test_predictions_leave_the_feature_out_of_its_own_mean():
    labels = LABELS.copy()
    labels[labels == 4] = 3
    labels[5] = 4  # Alone in its class.
    units = np.stack([x / np.linalg.norm(x) for x in FEATURES])
    expected = []
    for i in range(40):
        scores = []
        for c in range(5):
            own = [j for j in range(40) if labels[j] == c and j != i]
            scores.append(cosine(units[i], units[own].mean(0)) if own else -np.inf)
        expected.append(int(np.argmax(scores)))
    predictions = nearest_mean_predictions(FEATURES, labels)
    assert predictions.tolist() == expected
    assert predictions[5] != 4


def test_similar_classes_are_side_by_side():
    block = np.array([0, 1, 0, 1, 2, 2, 0, 1])
    similarity = np.where(block[:, None] == block, 0.9, 0.1) + 0.01 * np.eye(8)
    order = class_order(similarity)
    assert sorted(order) == list(range(8))
    assert np.count_nonzero(np.diff(block[order])) == 2
    assert class_order(np.eye(2)).tolist() == [0, 1]


def test_pairs_come_from_the_most_similar_one():
    similarity = np.array([[1, 0.2, 0.7], [0.2, 1, 0.5], [0.7, 0.5, 1]])
    assert most_similar_pairs(similarity, 2) == [(0, 2), (1, 2)]
    assert len(most_similar_pairs(similarity, 9)) == 3
