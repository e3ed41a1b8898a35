"""Which images of a data set are for training, validation and test: subsets, hold-outs, long tails.

All choices are the same in every run: they depend on labels and options, not on the run's seed. A
subset of fewer classes or images is part of every larger one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from experiments.errors import ConfigError

TEST_SHARE = 0.3
"""Share of each class's images that is for test where a data set has no test split of its own."""

_CLASSES, _TEST, _VALIDATION, _TRAIN = range(4)


class Selection(NamedTuple):
    """The chosen classes and images."""

    classes: np.ndarray
    """int64 [C], the labels that are kept, ascending; the new labels are their places."""
    rows: dict[str, np.ndarray]
    """For `train`, `validation` (where there is one) and `test`: int64, ascending, which images."""


def select(
    labels: np.ndarray,
    *,
    test_labels: np.ndarray | None = None,
    classes: int = 0,
    samples_per_class: int = 0,
    imbalance: float = 1.0,
    holdout: float = 0.0,
) -> Selection:
    """Chooses classes and images.

    Args:
        labels: Integers [n], of the images for training; those for test as well if
            `test_labels` is None, and then the test takes `TEST_SHARE` of each class.
        test_labels: Integers [m], of the images for test.
        classes: Number of classes to choose; 0 for all.
        samples_per_class: Largest number of training images per class; 0 for all.
        imbalance: Training images of the rarest class divided by those of the most frequent one.
        holdout: Fraction of each class's training images for validation.

    Returns:
        Selection; the rows of `test` index the test labels where there are some, all others the
        labels. Validation and test images stay as they are when `samples_per_class` and
        `imbalance` thin out the training.

    Raises:
        ConfigError: More classes are asked for than there are, or a class is left without an image
            for training, or for validation where some are to be held out.
    """
    known = np.unique(labels)
    if classes > len(known) or classes == 1:
        raise ConfigError(f"data.classes = {classes} must be from 2 to {len(known)}, or 0 for all")
    chosen = known
    if classes:
        chosen = np.sort(_generator(_CLASSES).permutation(known)[:classes])
    rows: dict[str, list[np.ndarray]] = {"train": [], "validation": [], "test": []}
    for label in chosen.tolist():
        own = np.flatnonzero(labels == label)
        if test_labels is None:
            own, test = _split(own, TEST_SHARE, _TEST, label)
        else:
            test = np.flatnonzero(test_labels == label)
        rows["test"].append(test)
        own, held_out = _split(own, holdout, _VALIDATION, label)
        rows["validation"].append(held_out)
        rows["train"].append(_generator(_TRAIN, label).permutation(own))
        if not own.size or (holdout and not held_out.size):
            raise ConfigError(f"class {label} has too few images for data.holdout = {holdout}")
    available = np.array([part.size for part in rows["train"]])
    wanted = _training_counts(available, samples_per_class, imbalance)
    rows["train"] = [part[:count] for part, count in zip(rows["train"], wanted, strict=True)]
    if not holdout:
        del rows["validation"]
    return Selection(
        chosen, {split: np.sort(np.concatenate(parts)) for split, parts in rows.items()}
    )


def _split(rows: np.ndarray, share: float, tag: int, label: int) -> tuple[np.ndarray, np.ndarray]:
    """All rows but the share, and the share, rounded."""
    count = int(np.floor(share * rows.size + 0.5))
    shuffled = _generator(tag, label).permutation(rows)
    return shuffled[count:], shuffled[:count]


def _training_counts(available: np.ndarray, samples_per_class: int, imbalance: float) -> np.ndarray:
    """How many images every class keeps.

    Of a long tail, class number k by falling size, of C, keeps `n_max f^{k/(C−1)}`, rounded down.
    """
    counts = available
    if imbalance != 1:
        place = np.empty(len(counts))
        place[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
        tail = counts.max() * imbalance ** (place / max(len(counts) - 1, 1))
        # A product that is a whole number but for its last digit is not rounded down.
        counts = np.minimum(counts, np.floor(tail + 1e-9).astype(np.int64))
    if samples_per_class:
        counts = np.minimum(counts, samples_per_class)
    if counts.min() < 1:
        raise ConfigError(
            f"data.imbalance = {imbalance} leaves a class without an image for training; "
            f"the largest has {available.max()}: set it to 1/{available.max()} or more"
        )
    return counts


def _generator(*stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=[stream[0], stream[1] if stream[1:] else 0]))
