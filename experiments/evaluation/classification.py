"""Classification: accuracies, calibration and, with several labels, mean average precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax import Array

Values: TypeAlias = np.ndarray | Array

# Scores ranked at once: bounds the work space to about 100 MB.
_ELEMENTS_AT_ONCE = 2**21


class Calibration(NamedTuple):
    """The expected calibration error, and bins [B] with their means, NaN in an empty one."""

    error: float
    counts: np.ndarray
    confidences: np.ndarray
    accuracies: np.ndarray


def class_accuracies(predictions: Values, labels: Values, num_classes: int) -> np.ndarray:
    """The accuracy of every class: float64 [C], in [0, 1]; NaN for a class without a sample."""
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    right = np.bincount(labels[predictions == labels], minlength=num_classes)
    return _ratio(right, np.bincount(labels, minlength=num_classes))


def shared_predictions(predictions: Values, labels: Values) -> dict[str, float | None]:
    """The pairs of different samples that are given to the same class, whichever it is.

    Predictions and labels are integers [n] from 0, and need not number the same classes. `share` is
    that of the pairs with one label, the mean over the labels that have a pair; `chance` that of
    all pairs, the mean of the share over all permutations of the labels. None without a pair.
    """
    predictions, labels = np.asarray(predictions), np.asarray(labels)
    counts = np.zeros([values.max(initial=-1) + 1 for values in (labels, predictions)], np.int64)
    np.add.at(counts, (labels, predictions), 1)

    def share(counts: np.ndarray) -> float | None:
        sizes = counts.sum(1)
        counts, pairs = counts[sizes > 1], (sizes * (sizes - 1))[sizes > 1]
        return float(np.mean((counts * (counts - 1)).sum(1) / pairs)) if len(pairs) else None

    return {"share": share(counts), "chance": share(counts.sum(0, keepdims=True))}


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
) -> dict[str, Any]:
    """All metrics of a classification by logits [n, C], finite, of samples with labels [n].

    They are JSON types: fractions in [0, 1], or None without a sample. The accuracy on the `groups`
    head, medium and tail needs `train_counts`, as `frequency_groups` takes them. The softmax of
    `calibrated`, by default of the logits, is the confidence.
    """
    predictions, labels = np.asarray(logits).argmax(1), np.asarray(labels)
    confidences = softmax_confidences(logits if calibrated is None else calibrated)
    per_class = class_accuracies(predictions, labels, logits.shape[1])
    right, groups = float((predictions == labels).mean()), None
    if train_counts is not None:
        own = {name: per_class[of] for name, of in frequency_groups(train_counts).items()}
        present = {name: values[~np.isnan(values)] for name, values in own.items()}
        groups = {name: float(of.mean()) if len(of) else None for name, of in present.items()}
    return {
        "samples": len(labels),
        "accuracy": right,
        "error": 1 - right,
        "class_mean_accuracy": float(np.nanmean(per_class)),
        "class_accuracies": [as_json_number(value) for value in per_class],
        "groups": groups,
        "calibration_error": calibration(confidences, predictions == labels).error,
    }


def as_json_number(value: float) -> float | None:
    """The number, or None in place of NaN, which JSON does not have."""
    return None if np.isnan(value) else float(value)


def _ratio(totals: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`totals / counts` in float64, NaN where the count is 0."""
    return np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)


def average_precisions(scores: Values, targets: Values) -> np.ndarray:
    r"""The average precision of the ranking in every row, as scikit-learn defines it.

    .. math:: \mathrm{AP} = \sum_k (R_k - R_{k-1}) P_k

    over the thresholds k from the highest score to the lowest; equal scores are one threshold.
    Scores are finite [rows, items]; targets above 0 are positive, 0 negative, below 0 unknown,
    which the ranking leaves out. The result is float64 [rows]; NaN for a row without a positive.
    """
    scores, targets = np.asarray(scores), np.asarray(targets)
    rows, items = scores.shape
    step = max(1, _ELEMENTS_AT_ONCE // max(items, 1))
    parts = [slice(start, start + step) for start in range(0, rows, step)]
    return np.concatenate([np.empty(0), *(_precisions(scores[p], targets[p]) for p in parts)])


def evaluate_scores(scores: Values, targets: Values) -> dict[str, Any]:
    """mAP@class and mAP@sample (Kobayashi, CVPR 2023), over what has a positive; one must have.

    Scores [n, C] are logits or anything that orders like them; targets as `average_precisions`. The
    result has JSON types: mAPs in [0, 1], how many classes and samples they are the mean of, how
    many have no positive, and the average precision of each class, None without a positive.
    """
    of_samples = average_precisions(scores, targets)
    of_classes = average_precisions(np.asarray(scores).T, np.asarray(targets).T)
    classes, samples = (int((~np.isnan(of)).sum()) for of in (of_classes, of_samples))
    if not samples:
        raise ValueError("no target is positive")
    return {
        "map_class": float(np.nanmean(of_classes)),
        "map_sample": float(np.nanmean(of_samples)),
        "classes": classes,
        "classes_without_positive": len(of_classes) - classes,
        "samples": samples,
        "samples_without_positive": len(of_samples) - samples,
        "class_precisions": [as_json_number(value) for value in of_classes],
    }


def _precisions(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The mean, over the positives of a row, of the precision down to their score."""
    from scipy.stats import rankdata  # Slow to import; `--help` does not need it.

    positive = targets > 0
    # A score ranks behind all that are at least as high. Unknown items are behind every other.
    # Newer versions of SciPy rank float32 scores by float32 numbers.
    orders = (np.where(targets < 0, -np.inf, scores), np.where(positive, scores, -np.inf))
    ranks, hits = (rankdata(-x, method="max", axis=1).astype(np.float64) for x in orders)
    count = positive.sum(1)
    total = np.where(positive, hits / ranks, 0).sum(1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
