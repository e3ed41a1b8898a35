"""Selection of images for training, validation and test: subsets, hold-outs, long tails.

All choices depend on labels and options only, not on the seed of a run. A subset with fewer classes
or images is part of every larger one of the same subset seed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.core.errors import ConfigError
from experiments.core.protocol import ImageSet

TEST_SHARE = 0.3
"""Fraction of every class used for testing if a data set has no test split."""

_CLASSES, _TEST, _VALIDATION, _TRAIN = range(4)


class Selection(NamedTuple):
    """The chosen classes and images."""

    classes: np.ndarray
    """int64 [C], the selected labels, ascending. Their positions are the new labels."""
    rows: dict[str, np.ndarray]
    """The selected images of `train`, `validation` (if any) and `test`: int64, ascending."""

    def counts(self, labels: np.ndarray, split: str) -> np.ndarray:
        """int64 [C], the selected images of every class in a split, whose rows index `labels`."""
        found = np.searchsorted(self.classes, labels[self.rows[split]])
        return np.bincount(found, minlength=len(self.classes))

    def renumber(self, images: ImageSet) -> ImageSet:
        """Images of selected classes, with their new labels."""
        return dataclasses.replace(
            images,
            labels=np.searchsorted(self.classes, images.labels).astype(np.int32),
            class_names=tuple(images.class_names[label] for label in self.classes),
        )


def labels_of(counts: np.ndarray) -> np.ndarray:
    """The ascending labels of images of which every class has a number: int64 [n]."""
    return np.repeat(np.arange(len(counts)), counts)


def select(
    labels: np.ndarray,
    *,
    test_labels: np.ndarray | None = None,
    among: np.ndarray | None = None,
    classes: int = 0,
    samples_per_class: int = 0,
    imbalance: float = 1.0,
    tail_from: Literal["largest", "mean"] = "largest",
    holdout: float = 0.0,
    subset_seed: int = 0,
    option: str = "data.classes",
    names: Sequence[str] = (),
) -> Selection:
    """Selects classes and images; options are those of `classification.ClassificationData`.

    Without `test_labels`, the fraction `TEST_SHARE` of every class becomes the test split; with
    them, the rows of `test` index these, and all other rows `labels`. Classes are chosen `among`
    ascending labels, by default all; the images of a class that are for training, validation and
    test depend neither on these nor on `subset_seed`. `samples_per_class` and `imbalance` only
    reduce the training images. `option`, which sets `classes`, and `names` are for messages. Raises
    a `ConfigError` for what the images of a class do not allow.
    """
    known = np.unique(labels) if among is None else among
    if classes > len(known) or classes == 1:
        raise ConfigError(f"{option} = {classes} must be from 2 to {len(known)}, or 0 for all")
    chosen = known
    if classes:
        chosen = np.sort(_generator(_CLASSES, seed=subset_seed).permutation(known)[:classes])
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
        rows["train"].append(_generator(_TRAIN, label, seed=subset_seed).permutation(own))
        if not own.size or (holdout and not held_out.size):
            raise ConfigError(
                f"class {names[label] if names else label} has too few images to hold out the "
                f"fraction {holdout} of them (--data.holdout); give it more, or choose another"
            )
    available = np.array([part.size for part in rows["train"]])
    wanted = _training_counts(available, samples_per_class, imbalance, tail_from)
    if subset_seed and len(chosen) == len(known) and wanted.sum() == available.sum():
        raise ConfigError(
            f"data.subset_seed = {subset_seed} has no effect, because all classes and all their "
            "training images are used; set it to 0, or choose fewer of them"
        )
    rows["train"] = [part[:count] for part, count in zip(rows["train"], wanted, strict=True)]
    if not holdout:
        del rows["validation"]
    return Selection(
        chosen, {split: np.sort(np.concatenate(parts)) for split, parts in rows.items()}
    )


def _split(rows: np.ndarray, share: float, tag: int, label: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits off a random fraction of the rows; returns the other rows and the fraction."""
    count = int(np.floor(share * rows.size + 0.5))
    shuffled = _generator(tag, label).permutation(rows)
    return shuffled[count:], shuffled[:count]


def _training_counts(
    available: np.ndarray, samples_per_class: int, imbalance: float, tail_from: str
) -> np.ndarray:
    """The number of training images of every class.

    In a long tail, the k-th of C classes by decreasing size keeps `n_max f^{k/(C−1)}` images,
    rounded down, and no more than it has.
    """
    counts, largest = available, available.max()
    if imbalance != 1:
        place = np.empty(len(counts))
        place[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
        if tail_from == "mean":
            largest = counts.mean()
        tail = largest * imbalance ** (place / max(len(counts) - 1, 1))
        # The offset keeps integers that floating-point error puts just below.
        counts = np.minimum(counts, np.floor(tail + 1e-9).astype(np.int64))
    if samples_per_class:
        counts = np.minimum(counts, samples_per_class)
    if counts.min() < 1:
        raise ConfigError(
            f"data.imbalance = {imbalance} leaves a class without an image for training; the tail "
            f"starts at {largest:g} images: set it to 1/{math.floor(largest)} or more"
        )
    return counts


def some_rows(count: int, most: int) -> np.ndarray:
    """All rows of so many images, or a random part of `most`: int64, ascending."""
    return np.sort(np.random.default_rng(0).permutation(count)[:most])


def part_of(images: ImageSet, most: int) -> ImageSet:
    """The images of `some_rows`; they are read when they are indexed."""
    rows = some_rows(len(images.labels), most)
    files = None if images.files is None else images.files[rows]
    return ImageSet(_Rows(images.images, rows), images.labels[rows], images.class_names, files)


class _Rows:
    """Some images of a table, which need not fit into memory."""

    def __init__(self, table: Any, rows: np.ndarray):
        self.table, self.rows, self.shape = table, rows, (len(rows), *table.shape[1:])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.table[self.rows[index]]


def _generator(tag: int, label: int = 0, *, seed: int = 0) -> np.random.Generator:
    # A key has 64 bits for the tag, of which the tags need the lowest eight.
    return np.random.Generator(np.random.Philox(key=[tag + (seed << 8), label]))
