"""Multi-label classification: mean average precision over classes and over samples."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from experiments.evaluation.classification import Values, as_json_number

# Scores ranked at once: bounds the work space to about 100 MB.
_ELEMENTS_AT_ONCE = 2**21


class MultilabelResult(NamedTuple):
    """The outcome of a multi-label classification, as JSON types."""

    map_class: float
    """Mean over the classes of the average precision that ranks the samples, in [0, 1]."""
    map_sample: float
    """Mean over the samples of the average precision that ranks the classes, in [0, 1]."""
    classes: int
    """Classes with a positive sample: those that `map_class` is the mean of."""
    classes_without_positive: int
    samples: int
    """Samples with a positive class: those that `map_sample` is the mean of."""
    samples_without_positive: int
    class_precisions: list[float | None]
    """The average precision of each class; None without a positive sample."""


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


def evaluate_scores(scores: Values, targets: Values) -> MultilabelResult:
    """mAP@class and mAP@sample (Kobayashi, CVPR 2023), over what has a positive; one must have.

    Scores [n, C] are logits or anything that orders like them; targets as `average_precisions`.
    """
    of_samples = average_precisions(scores, targets)
    of_classes = average_precisions(np.asarray(scores).T, np.asarray(targets).T)
    classes, samples = (int((~np.isnan(of)).sum()) for of in (of_classes, of_samples))
    if not samples:
        raise ValueError("no target is positive")
    return MultilabelResult(
        map_class=float(np.nanmean(of_classes)),
        map_sample=float(np.nanmean(of_samples)),
        classes=classes,
        classes_without_positive=len(of_classes) - classes,
        samples=samples,
        samples_without_positive=len(of_samples) - samples,
        class_precisions=[as_json_number(value) for value in of_classes],
    )


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
