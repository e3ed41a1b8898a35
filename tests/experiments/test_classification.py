"""Accuracies, calibration and average precision against explicit loops and scikit-learn."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from experiments.evaluation.classification import (
    calibration,
    evaluate_logits,
    frequency_groups,
    mean_accuracy,
    predict_classes,
    softmax_confidences,
)
from experiments.evaluation.multilabel import average_precisions, evaluate_scores

CLASSES = 7


def sample(n=400, seed=0):
    """Logits and uneven labels, right in about two thirds of the rows; class 5 never occurs."""
    random = np.random.default_rng(seed)
    labels = random.choice([0, 1, 2, 3, 4, 6], size=n, p=[0.35, 0.25, 0.15, 0.1, 0.1, 0.05])
    logits = random.normal(size=(n, CLASSES)).astype(np.float32)
    logits[np.arange(n), labels] += 1.7
    return logits, labels


def accuracies_by_loops(logits, labels):
    right, count = [0] * CLASSES, [0] * CLASSES
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        right[label] += row.index(max(row)) == label
        count[label] += 1
    return right, count


def calibration_by_loops(logits, labels, bins):
    """Guo et al.: every bin (b/B, (b + 1)/B] in turn, every sample in turn, float64."""
    confidences, correct = [], []
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        total = sum(math.exp(z - max(row)) for z in row)
        confidences.append(1 / total)
        correct.append(row.index(max(row)) == label)
    error = 0.0
    for b in range(bins):
        inside = [i for i, p in enumerate(confidences) if b / bins < p <= (b + 1) / bins]
        if inside:
            mean_correct = sum(correct[i] for i in inside) / len(inside)
            mean_confidence = sum(confidences[i] for i in inside) / len(inside)
            error += len(inside) / len(confidences) * abs(mean_correct - mean_confidence)
    return error


def test_frequency_groups_are_those_of_cifar_lt():
    counts = [int(500 * 0.01 ** (c / 99)) for c in range(100)]
    found = {name: classes.tolist() for name, classes in frequency_groups(counts).items()}
    parts = {"head": range(36), "medium": range(36, 71), "tail": range(71, 100)}
    assert found == {name: list(part) for name, part in parts.items()}
    groups = frequency_groups([int(5000 * 0.01 ** (c / 9)) for c in range(10)])
    found = {name: classes.tolist() for name, classes in groups.items()}
    assert found == {"head": [0, 1, 2], "medium": [3, 4, 5, 6], "tail": [7, 8, 9]}


def test_frequency_groups_follow_the_counts_and_not_the_order_of_classes():
    random = np.random.default_rng(0)
    for classes in (3, 4, 10, 50, 81, 179):
        counts = random.integers(1, 30, classes)
        groups = frequency_groups(counts)
        joined = np.concatenate(list(groups.values()))
        np.testing.assert_array_equal(np.sort(joined), np.arange(classes))
        assert all(len(group) and (np.diff(group) > 0).all() for group in groups.values())
        least = [counts[group].min() for group in groups.values()]
        most = [counts[group].max() for group in groups.values()]
        assert least[0] >= most[1]
        assert least[1] >= most[2]
        assert 0 <= 0.36 * classes - len(groups["head"]) < 1
    # Classes of one size go to the groups in their order.
    np.testing.assert_array_equal(frequency_groups([4] * 10)["head"], [0, 1, 2])


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_equals_the_loops(bins):
    logits, labels = sample()
    for scale in (0.3, 1.0, 4.0):
        scaled = (scale * logits).astype(np.float32)
        found = calibration(
            softmax_confidences(scaled), predict_classes(scaled) == labels, bins=bins
        )
        expected = calibration_by_loops(scaled, labels, bins)
        assert found.error == pytest.approx(expected, rel=1e-9)
        assert expected > 0.01
        assert found.counts.sum() == len(labels)


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
    # Every edge of every number of bins falls into the bin that it ends.
    for bins in range(1, 40):
        edges = np.arange(1, bins + 1) / bins
        counts = calibration(edges, np.ones(bins, bool), bins=bins).counts
        np.testing.assert_array_equal(counts, np.ones(bins))


def test_confidences_neither_overflow_nor_round():
    found = softmax_confidences(np.array([[1e4, 0, 0], [0, 0, 0], [20, 0, 0]], np.float32))
    np.testing.assert_allclose(found, [1, 1 / 3, 1 / (1 + 2 * math.exp(-20))], rtol=1e-14)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_results_equal_the_loops(array):
    logits, labels = sample()
    counts = [300, 200, 100, 50, 40, 30, 20]
    result = evaluate_logits(array(logits), array(labels), train_counts=counts)
    right, count = accuracies_by_loops(logits, labels)
    assert 0.5 < result.accuracy < 0.9
    assert result.accuracy == pytest.approx(sum(right) / sum(count), rel=1e-12)
    assert result.error == pytest.approx(1 - result.accuracy)
    assert result.samples == sum(count)
    assert result.calibration_error == pytest.approx(calibration_by_loops(logits, labels, 15))
    expected = [r / n if n else None for r, n in zip(right, count, strict=True)]
    assert expected[5] is None
    assert result.class_accuracies == pytest.approx(expected, rel=1e-12)
    mean = np.mean([share for share in expected if share is not None])
    assert result.class_mean_accuracy == pytest.approx(mean)
    assert mean_accuracy(np.array([np.nan])) is None
    # 36 % and 71 % of seven classes: 0 and 1 are the head, 2 and 3 medium, 4, 5 and 6 the tail;
    # of class 5 there is no sample.
    assert result.groups is not None
    for group, members in {"head": (0, 1), "medium": (2, 3), "tail": (4, 6)}.items():
        mean = np.mean([right[c] / count[c] for c in members])
        assert result.groups[group] == pytest.approx(mean)
    assert json.loads(json.dumps(result._asdict(), allow_nan=False)) == result._asdict()
    assert evaluate_logits(logits, labels).groups is None
    scaled = evaluate_logits(logits, labels, calibrated=0.1 * logits)
    assert scaled.accuracy == result.accuracy
    expected = calibration_by_loops(0.1 * logits, labels, 15)
    assert scaled.calibration_error == pytest.approx(expected)
    assert scaled.calibration_error != pytest.approx(result.calibration_error, rel=0.01)


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
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_means_equal_scikit_learn_also_where_scores_are_equal(rounded, array):
    scores, targets = multi_label_sample(rounded=rounded)
    assert len(np.unique(scores)) < 20 or not rounded
    result = evaluate_scores(array(scores), array(targets))
    of_classes = [precision_by_sklearn(s, t) for s, t in zip(scores.T, targets.T, strict=True)]
    of_samples = [precision_by_sklearn(s, t) for s, t in zip(scores, targets, strict=True)]
    assert result.map_class == pytest.approx(np.nanmean(of_classes), rel=1e-12)
    assert result.map_sample == pytest.approx(np.nanmean(of_samples), rel=1e-12)
    assert result.classes == 8
    assert result.classes_without_positive == 1
    assert result.samples == np.isfinite(of_samples).sum()
    assert result.samples + result.samples_without_positive == 60
    assert result.samples_without_positive >= 2
    assert result.class_precisions[4] is None
    assert result.class_precisions[3] == pytest.approx(of_classes[3], rel=1e-12)
    assert json.loads(json.dumps(result._asdict(), allow_nan=False)) == result._asdict()


def test_the_two_means_differ_and_order_alone_matters():
    scores, targets = multi_label_sample()
    result = evaluate_scores(scores, targets)
    assert abs(result.map_class - result.map_sample) > 0.02
    monotone = evaluate_scores(np.exp(scores.astype(np.float64)) * 3 - 5, targets)
    assert monotone == result
    # A shift of each class changes what is compared within a sample, and not within a class.
    shifted = evaluate_scores(scores + 3 * np.arange(9, dtype=np.float32), targets)
    assert shifted.map_class == pytest.approx(result.map_class)
    assert shifted.map_sample < result.map_sample - 0.05
    transposed = evaluate_scores(scores.T, targets.T)
    assert transposed.map_class == result.map_sample
    assert transposed.map_sample == result.map_class


def test_many_rows_are_computed_in_parts():
    scores, targets = multi_label_sample(n=500, classes=40)
    scores, targets = np.tile(scores, (20, 3)), np.tile(targets, (20, 3))
    scores += np.random.default_rng(1).normal(size=scores.shape)
    found = average_precisions(scores, targets, elements_at_once=10_000)
    np.testing.assert_array_equal(found, average_precisions(scores, targets))


def test_wrong_arguments_name_the_problem():
    scores, targets = multi_label_sample()
    with pytest.raises(ValueError, match="no target is positive"):
        evaluate_scores(scores, np.minimum(targets, 0))
    with pytest.raises(ValueError, match="no target is positive"):
        evaluate_scores(scores[:0], targets[:0])
