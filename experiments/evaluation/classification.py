"""Classification: accuracy over samples, classes and groups of classes, and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from jax import Array

Values: TypeAlias = np.ndarray | Array


class Calibration(NamedTuple):
    """The expected calibration error, and bins [B] with their means, NaN in an empty one."""

    error: float
    counts: np.ndarray
    confidences: np.ndarray
    accuracies: np.ndarray


class ClassificationResult(NamedTuple):
    """The outcome of a classification, as JSON types; all but the counts in [0, 1]."""

    samples: int
    accuracy: float
    error: float
    """1 − accuracy."""
    class_mean_accuracy: float
    """Mean of the accuracies of the classes."""
    class_accuracies: list[float | None]
    """None for a class without a sample."""
    groups: dict[str, float | None] | None
    """Accuracy on head, medium and tail classes, where training counts were given."""
    calibration_error: float


class SharedPredictions(NamedTuple):
    """How often two samples are given to the same class; None where there is no pair."""

    share: float | None
    """Of the pairs of samples with one label: the mean over labels."""
    chance: float | None
    """Of all pairs of samples: the mean of the share over all permutations of the labels."""


def class_accuracies(predictions: Values, labels: Values, num_classes: int) -> np.ndarray:
    """The accuracy of every class: float64 [C], in [0, 1]; NaN for a class without a sample."""
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    right = np.bincount(labels[predictions == labels], minlength=num_classes)
    return _ratio(right, np.bincount(labels, minlength=num_classes))


def shared_predictions(predictions: Values, labels: Values) -> SharedPredictions:
    """The pairs of different samples that are given to the same class, whichever it is.

    Predictions and labels are integers [n] from 0, and need not number the same classes. A label
    with fewer than two samples has no pair, and is not in the mean.
    """
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    counts = np.zeros([values.max(initial=-1) + 1 for values in (labels, predictions)], np.int64)
    np.add.at(counts, (labels, predictions), 1)

    def share(counts: np.ndarray) -> float | None:
        sizes = counts.sum(1)
        counts, pairs = counts[sizes > 1], (sizes * (sizes - 1))[sizes > 1]
        return float(np.mean((counts * (counts - 1)).sum(1) / pairs)) if len(pairs) else None

    return SharedPredictions(share(counts), share(counts.sum(0, keepdims=True)))


def frequency_groups(train_counts: Values | Sequence[int]) -> dict[str, np.ndarray]:
    """Head, medium and tail: classes by how many training samples they have.

    The 36 % of the C ≥ 3 classes with the most samples are the head, those up to 71 % medium, the
    others the tail, each number rounded down: classes 0–35, 36–70 and 71–99 of CIFAR-100-LT. Of
    classes of one size the first count as larger. Classes of a group are int64 and rising.
    """
    counts = np.asarray(train_counts)
    cuts = [share * len(counts) // 100 for share in (36, 71)]
    parts = np.split(np.argsort(-counts, kind="stable"), cuts)
    return {name: np.sort(p) for name, p in zip(("head", "medium", "tail"), parts, strict=True)}


def mean_accuracy(accuracies: np.ndarray) -> float | None:
    """The mean of the accuracies of the classes that have a sample; None if none has."""
    present = accuracies[~np.isnan(accuracies)]
    return float(present.mean()) if len(present) else None


def softmax_confidences(logits: Values) -> np.ndarray:
    """The largest probability of the softmax in every row of [n, C]: float64 [n]."""
    logits = np.asarray(logits, np.float64)
    return 1 / np.exp(logits - logits.max(1, keepdims=True)).sum(1)


def calibration(confidences: Values, correct: Values, *, bins: int = 15) -> Calibration:
    r"""Expected calibration error over bins of equal width (Guo et al., ICML 2017, eq. 3).

    Bin b of B has the confidences [n] in ((b − 1)/B, b/B], the first also 0. Bools [n] say which
    predictions are `correct`.
    """
    confidences, correct = np.asarray(confidences, np.float64), np.asarray(correct)
    # b/B as a division, so that a confidence of exactly b/B is equal to its edge.
    bin_of = np.searchsorted(np.arange(1, bins) / bins, confidences, side="left")
    counts = np.bincount(bin_of, minlength=bins)
    mean_correct = _ratio(np.bincount(bin_of, correct, minlength=bins), counts)
    mean_confidence = _ratio(np.bincount(bin_of, confidences, minlength=bins), counts)
    gaps = counts * np.abs(mean_correct - mean_confidence)
    error = float(np.nansum(gaps) / len(confidences))
    return Calibration(error, counts, mean_confidence, mean_correct)


def evaluate_logits(
    logits: Values,
    labels: Values,
    *,
    train_counts: Values | Sequence[int] | None = None,
    calibrated: Values | None = None,
) -> ClassificationResult:
    """All metrics of a classification by logits [n, C], finite, of samples with labels [n].

    The accuracy on head, medium and tail needs `train_counts`, as `frequency_groups` takes them.
    The softmax of `calibrated`, by default of the logits, is the confidence.
    """
    predictions, labels = np.asarray(logits).argmax(1), np.asarray(labels)
    confidences = softmax_confidences(logits if calibrated is None else calibrated)
    per_class = class_accuracies(predictions, labels, logits.shape[1])
    right, groups = float((predictions == labels).mean()), None
    if train_counts is not None:
        members = frequency_groups(train_counts)
        groups = {name: mean_accuracy(per_class[own]) for name, own in members.items()}
    return ClassificationResult(
        samples=len(labels),
        accuracy=right,
        error=1 - right,
        class_mean_accuracy=float(np.nanmean(per_class)),
        class_accuracies=[as_json_number(value) for value in per_class],
        groups=groups,
        calibration_error=calibration(confidences, predictions == labels).error,
    )


def as_json_number(value: float) -> float | None:
    """The number, or None in place of NaN, which JSON does not have."""
    return None if np.isnan(value) else float(value)


def _ratio(totals: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`totals / counts` in float64, NaN where the count is 0."""
    return np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)
