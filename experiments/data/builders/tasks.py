"""The three types of data sets: few-shot, classification and multi-label."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from experiments.data.builders.archives import DamagedArchiveError, reading
from experiments.data.builders.base import ImageBuilder
from experiments.data.builders.images import ClassSplit, MultiLabelSplit
from experiments.storage import regular


class _SingleLabelBuilder(ImageBuilder):
    """A data set with one class per image. Images are written class by class."""

    @classmethod
    def label_feature(cls) -> tuple[str, Any]:
        """The class."""
        return "label", tfds.features.ClassLabel()

    @classmethod
    def class_counts(cls, split: ClassSplit) -> dict[str, int]:
        """The number of images of every class."""
        return {name: len(keys) for name, keys in split.classes.items()}

    @classmethod
    def labelled_keys(cls, split: ClassSplit, names: list[str]) -> list[tuple[Any, Any]]:
        """Every key with the index of its class in `names`."""
        labels = {name: label for label, name in enumerate(names)}
        return [(key, labels[name]) for name, keys in split.classes.items() for key in keys]


class FewShotBuilder(_SingleLabelBuilder):
    """A data set whose splits `base`, `validation` and `novel` have disjoint classes."""

    @classmethod
    def check_splits(cls, splits: Mapping[str, ClassSplit]) -> None:
        """Raises unless every class belongs to one split and has images."""
        seen: dict[str, str] = {}
        for split_name, split in splits.items():
            _check_not_empty(split_name, split)
            for name in split.classes:
                if name in seen:
                    raise DamagedArchiveError(
                        f"{split.source} lists the class {name!r}, which is also in {seen[name]}"
                    )
                seen[name] = str(split.source)

    @classmethod
    def class_names(cls, splits: Mapping[str, ClassSplit]) -> list[str]:
        """The classes of all splits, one split after the other."""
        return [name for split in splits.values() for name in split.classes]


class ClassificationBuilder(_SingleLabelBuilder):
    """A data set whose splits `train`, `validation` (optional) and `test` share their classes."""

    @classmethod
    def check_splits(cls, splits: Mapping[str, ClassSplit]) -> None:
        """Raises unless every split has images of every class."""
        first_name, first = next(iter(splits.items()))
        for split_name, split in splits.items():
            _check_not_empty(split_name, split)
            differences = sorted(set(first.classes) ^ set(split.classes))
            if differences:
                raise DamagedArchiveError(
                    f"{split.source} (split {split_name}) and {first.source} (split {first_name}) "
                    f"must have the same classes; {len(differences)} classes are in only one of "
                    f"them, for example {differences[0]!r}"
                )
            if list(split.classes) != list(first.classes):
                raise DamagedArchiveError(f"{split.source}: the classes are in another order")

    @classmethod
    def class_names(cls, splits: Mapping[str, ClassSplit]) -> list[str]:
        """The classes, in the order of the archive."""
        return list(next(iter(splits.values())).classes)


class MultiLabelBuilder(ImageBuilder):
    """A data set whose images have any number of labels. The splits share the labels.

    The `labels` of a record are int8 [C]: 1 if the image has the label, 0 if not, −1 if unknown.
    """

    @classmethod
    def label_feature(cls) -> tuple[str, Any]:
        """One number per label. The archives determine how many there are."""
        return "labels", tfds.features.Tensor(shape=(None,), dtype=np.int8)

    def set_class_names(self, names: list[str]) -> None:
        """Does nothing: the metadata has the names."""

    @classmethod
    def check_splits(cls, splits: Mapping[str, MultiLabelSplit]) -> None:
        """Raises unless every split has images, and all have the same labels."""
        first = next(iter(splits.values()))
        for split_name, split in splits.items():
            shape = len(split.keys), len(split.names)
            if split.targets.shape != shape or 0 in shape:
                raise DamagedArchiveError(
                    f"{split.source} has {shape[0]} images and {shape[1]} labels for the split "
                    f"{split_name}, with targets {list(split.targets.shape)}"
                )
            if split.names != first.names:
                raise DamagedArchiveError(f"{split.source} has other labels than {first.source}")
            if len({*split.names}) < len(split.names):
                raise DamagedArchiveError(f"{split.source} has a label twice")

    @classmethod
    def class_names(cls, splits: Mapping[str, MultiLabelSplit]) -> list[str]:
        """The labels."""
        return list(next(iter(splits.values())).names)

    @classmethod
    def class_counts(cls, split: MultiLabelSplit) -> dict[str, int]:
        """The number of images with each label."""
        counts = np.sum(split.targets == 1, axis=0)
        return dict(zip(split.names, counts.tolist(), strict=True))

    @classmethod
    def labelled_keys(cls, split: MultiLabelSplit, names: list[str]) -> list[tuple[Any, Any]]:
        """Every key with its row of targets."""
        return list(zip(split.keys, split.targets, strict=True))

    @classmethod
    def write_targets(cls, folder: Path, splits: Mapping[str, MultiLabelSplit]) -> None:
        """Writes the targets of every split to a file, to be read without the images."""
        for name, split in splits.items():
            np.save(_targets_file(folder, name), split.targets)

    @classmethod
    def read_labels(
        cls, folder: Path, split: str, metadata: Mapping[str, Mapping[str, int]]
    ) -> np.ndarray:
        """Reads the targets of a split, int8 [n, C]."""
        path = _targets_file(folder, split)
        again = "delete that folder to prepare the data again"
        try:
            with reading(path, "array of NumPy"):
                targets = np.load(io.BytesIO(regular(path).read_bytes()), allow_pickle=False)
        except DamagedArchiveError as error:
            raise DamagedArchiveError(f"{error}; {again}") from error
        counts = list(metadata[split].values())
        fits = isinstance(targets, np.ndarray) and targets.dtype == np.int8 and targets.ndim == 2
        fits = fits and targets.min(initial=0) >= -1 and targets.max(initial=0) <= 1
        if not fits or (targets == 1).sum(axis=0).tolist() != counts:
            raise DamagedArchiveError(f"{path} is damaged; {again}")
        return targets


def _check_not_empty(split_name: str, split: ClassSplit) -> None:
    """Raises DamagedArchiveError unless a split has classes, each with images."""
    if not split.classes:
        raise DamagedArchiveError(f"{split.source} has no classes for the split {split_name}")
    for name, keys in split.classes.items():
        if not keys:
            raise DamagedArchiveError(f"{split.source} lists the class {name!r}, without images")


def _targets_file(folder: Path, split: str) -> Path:
    return folder / f"targets-{split}.npy"
