"""Accuracies, calibration and average precision against NumPy, SciPy and scikit-learn."""

import json
import math
from itertools import combinations

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax
from sklearn.metrics import average_precision_score, confusion_matrix

from experiments.evaluation.classification import (
    average_precisions,
    calibration,
    evaluate_logits,
    evaluate_scores,
    frequency_groups,
    shared_predictions,
    softmax_confidences,
)
from tests.tolerances import FLOAT64

CLASSES = 7


def sample(n=400, seed=0):
    """Logits and uneven labels, right in about two thirds of the rows; class 5 never occurs."""
    random = np.random.default_rng(seed)
    labels = random.choice([0, 1, 2, 3, 4, 6], size=n, p=[0.35, 0.25, 0.15, 0.1, 0.1, 0.05])
    logits = random.normal(size=(n, CLASSES)).astype(np.float32)
    logits[np.arange(n), labels] += 1.7
    return logits, labels


def calibration_error(logits, labels, bins):
    """Guo et al., bin by bin, (b/B, (b + 1)/B], in float64."""
    confidences = softmax(logits.astype(np.float64), axis=1).max(1)
    gaps = confidences - (logits.argmax(1) == labels)
    inside = [(b / bins < confidences) & (confidences <= (b + 1) / bins) for b in range(bins)]
    return sum(abs(gaps[rows].sum()) for rows in inside) / len(labels)


def test_frequency_groups_follow_the_counts_and_not_the_order_of_classes():
    random = np.random.default_rng(0)
    cifar_100_lt = (500 * 0.01 ** (np.arange(100) / 99)).astype(int)
    for counts in (cifar_100_lt, *(random.integers(1, 30, n) for n in (3, 4, 10, 50, 81, 179))):
        # Classes of one size go to the groups in their order.
        order = sorted(range(len(counts)), key=lambda c: -counts[c])
        head, medium = 36 * len(counts) // 100, 71 * len(counts) // 100
        groups = frequency_groups(counts)
        assert {name: classes.tolist() for name, classes in groups.items()} == {
            "head": sorted(order[:head]),
            "medium": sorted(order[head:medium]),
            "tail": sorted(order[medium:]),
        }
    assert [len(classes) for classes in frequency_groups(cifar_100_lt).values()] == [36, 35, 29]


def shares_pair_by_pair(predictions, labels):
    """Of the pairs with one label, as the mean over labels, and of all pairs."""

    def share(rows):
        return np.mean([predictions[i] == predictions[j] for i, j in combinations(rows, 2)])

    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    of_labels = [share(rows) for rows in members if len(rows) > 1]
    of_all = share(range(len(labels))) if len(labels) > 1 else None
    return np.mean(of_labels) if of_labels else None, of_all


@pytest.mark.parametrize(
    "sizes",
    [(9, 2, 0, 30, 1, 4), (1, 20), (5,), (1, 1, 1), (1,), (0, 0), ()],
    ids=lambda sizes: "-".join(map(str, sizes)) or "none",
)
def test_shared_predictions_are_those_of_a_count_pair_by_pair(sizes):
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(len(sizes)), np.array(sizes, int)).astype(np.int32)
    labels = random.permutation(labels)
    # Some are given to a class of their label, the others to any; class 7 is never predicted.
    anywhere = random.choice([0, 1, 2, 3, 4, 5, 6, 8], len(labels))
    predictions = np.where(random.random(len(labels)) < 0.5, labels % 3, anywhere)
    found = shared_predictions(predictions, labels)
    expected = dict(zip(("share", "chance"), shares_pair_by_pair(predictions, labels), strict=True))
    assert found == pytest.approx(expected, rel=FLOAT64)


@pytest.mark.parametrize(("bins", "scale"), [(1, 0.3), (10, 1.0), (15, 4.0)])
def test_calibration_is_that_of_its_bins(bins, scale):
    logits, labels = sample()
    logits *= np.float32(scale)
    found = calibration(softmax_confidences(logits), logits.argmax(1) == labels, bins=bins)
    expected = calibration_error(logits, labels, bins)
    assert found.error == pytest.approx(expected, rel=1e-9)
    assert expected > 0.01


def test_bins_are_closed_on_the_right():
    # 1/5 = 3/15 ends bin 2, 1 ends bin 14, and 0 belongs to the first.
    found = calibration(np.array([0.2, 0.2000001, 1.0, 0.0]), np.array([1, 0, 1, 0], bool))
    expected = np.zeros(15, int)
    expected[[0, 2, 3, 14]] = 1
    np.testing.assert_array_equal(found.counts, expected)
    assert found.error == pytest.approx((0.8 + 0.2000001) / 4)
    assert found.accuracies[2] == 1
    assert found.confidences[2] == pytest.approx(0.2)
    assert math.isnan(found.accuracies[1])
    for bins in range(1, 40):  # Every edge falls into the bin that it ends.
        found = calibration(np.arange(1, bins + 1) / bins, np.ones(bins, bool), bins=bins)
        np.testing.assert_array_equal(found.counts, np.ones(bins))


def test_confidences_neither_overflow_nor_round():
    found = softmax_confidences(np.array([[1e4, 0, 0], [0, 0, 0], [20, 0, 0]], np.float32))
    np.testing.assert_allclose(found, [1, 1 / 3, 1 / (1 + 2 * math.exp(-20))], rtol=1e-14)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_results_are_those_of_the_confusion_matrix(array):
    logits, labels = sample()
    counts = [300, 200, 100, 50, 40, 30, 20]
    result = evaluate_logits(array(logits), array(labels), train_counts=counts)
    matrix = confusion_matrix(labels, logits.argmax(1), labels=range(CLASSES))
    right, count = np.diag(matrix), matrix.sum(1)
    assert 0.5 < result["accuracy"] < 0.9
    expected = right[count > 0] / count[count > 0]
    accuracy = right.sum() / len(labels)
    numbers = len(labels), accuracy, 1 - accuracy, expected.mean()
    assert list(result.values())[:4] == pytest.approx(numbers, rel=1e-12)
    assert result["calibration_error"] == pytest.approx(calibration_error(logits, labels, 15))
    assert result["class_accuracies"][5] is None  # It has no sample.
    found = [share for share in result["class_accuracies"] if share is not None]
    assert found == pytest.approx(expected, rel=1e-12)
    # 36 % and 71 % of seven classes: 0 and 1 are the head, 2 and 3 medium, 4, 5 and 6 the tail.
    head, medium, tail = map(np.mean, np.split(expected, [2, 4]))
    assert result["groups"] == pytest.approx({"head": head, "medium": medium, "tail": tail})
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert evaluate_logits(logits, labels)["groups"] is None
    # Two of three classes have no sample.
    few = evaluate_logits(logits[:, 3:6], labels * 0, train_counts=[3, 1, 2])
    assert few["groups"] == {"head": few["accuracy"], "medium": None, "tail": None}
    scaled = evaluate_logits(logits, labels, calibrated=0.1 * logits)
    assert scaled["accuracy"] == result["accuracy"]
    assert scaled["calibration_error"] == pytest.approx(calibration_error(0.1 * logits, labels, 15))


def multi_label_sample(n=60, classes=9, seed=0, unknown=0.15, rounded=False):
    """Scores and targets that agree in part; class 4 and samples 7, 8 have no positive."""
    random = np.random.default_rng(seed)
    targets = (random.random((n, classes)) < 0.25).astype(np.int32)
    scores = (random.normal(size=(n, classes)) + 1.2 * targets).astype(np.float32)
    scores = np.round(scores * 2) / 2 if rounded else scores
    targets[random.random((n, classes)) < unknown] = -1
    targets[:, 4] = np.minimum(targets[:, 4], 0)
    targets[7:9] = np.minimum(targets[7:9], 0)
    return scores, targets


def precision_by_sklearn(scores, targets):
    known = targets >= 0
    if not (targets > 0).any():
        return np.nan
    return average_precision_score(targets[known] > 0, scores[known])


@pytest.mark.parametrize("rounded", [False, True])
def test_means_equal_scikit_learn_also_where_scores_are_equal(rounded):
    scores, targets = multi_label_sample(rounded=rounded)
    assert len(np.unique(scores)) < 20 or not rounded
    result = evaluate_scores(scores, targets)
    of_classes = [precision_by_sklearn(s, t) for s, t in zip(scores.T, targets.T, strict=True)]
    of_samples = [precision_by_sklearn(s, t) for s, t in zip(scores, targets, strict=True)]
    samples = np.isfinite(of_samples).sum()
    precisions, means = result.pop("class_precisions"), map(np.nanmean, (of_classes, of_samples))
    expected = *means, 8, 1, samples, 60 - samples
    assert list(result.values()) == pytest.approx(expected, rel=1e-12)
    assert samples <= 58
    assert precisions.pop(4) is None
    assert precisions == pytest.approx(np.delete(of_classes, 4), rel=1e-12)
    json.dumps(result | {"class_precisions": precisions}, allow_nan=False)


def test_many_rows_are_computed_in_parts():
    scores, targets = multi_label_sample(n=3, classes=2**20)
    whole = average_precisions(scores, targets)
    for row in range(3):
        (alone,) = average_precisions(scores[[row]], targets[[row]])
        assert whole[row] == alone


def test_some_target_must_be_positive():
    scores, targets = multi_label_sample()
    for rows in (60, 0):
        with pytest.raises(ValueError, match="no target is positive"):
            evaluate_scores(scores[:rows], np.minimum(targets, 0)[:rows])
