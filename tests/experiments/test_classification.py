"""Accuracies and calibration against explicit loops, and their edge cases."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.evaluation.classification import (
    accuracy,
    calibration,
    class_accuracies,
    evaluate_logits,
    frequency_groups,
    mean_accuracy,
    predict_classes,
    softmax_confidences,
)

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


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_accuracies_equal_the_loops(array):
    logits, labels = sample()
    right, count = accuracies_by_loops(logits, labels)
    predictions = predict_classes(array(logits))
    found = accuracy(predictions, array(labels))
    assert type(found) is float
    assert 0.5 < found < 0.9
    assert found == pytest.approx(sum(right) / sum(count), rel=1e-12)
    per_class = class_accuracies(predictions, array(labels), CLASSES)
    assert math.isnan(per_class[5])
    for c in (0, 1, 2, 3, 4, 6):
        assert per_class[c] == pytest.approx(right[c] / count[c], rel=1e-12)


def test_a_group_without_samples_has_no_accuracy():
    logits, labels = sample()
    per_class = class_accuracies(predict_classes(logits), labels, CLASSES)
    assert mean_accuracy(per_class[[3, 5]]) == per_class[3]
    assert mean_accuracy(per_class[[5]]) is None


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


def test_the_summary_is_made_of_the_single_metrics():
    logits, labels = sample()
    counts = [300, 200, 100, 50, 40, 30, 20]
    result = evaluate_logits(logits, labels, train_counts=counts)
    right, count = accuracies_by_loops(logits, labels)
    assert result.accuracy == pytest.approx(sum(right) / sum(count))
    assert result.error == pytest.approx(1 - result.accuracy)
    assert result.samples == sum(count)
    assert result.calibration_error == pytest.approx(calibration_by_loops(logits, labels, 15))
    assert result.class_accuracies[5] is None
    assert result.class_accuracies[6] == pytest.approx(right[6] / count[6])
    mean = np.mean([right[c] / count[c] for c in range(CLASSES) if count[c]])
    assert result.class_mean_accuracy == pytest.approx(mean)
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
