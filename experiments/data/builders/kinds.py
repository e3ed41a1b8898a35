"""The three kinds of data sets: by class, by image, and of many labels an image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from experiments.data.archives import DamagedArchiveError
from experiments.data.builders.frame import ImageBuilder
from experiments.data.builders.pictures import LabelledPictures, Pictures


class _OneLabelBuilder(ImageBuilder):
    """Every image is of one class; images are written class by class."""

    @classmethod
    def label_feature(cls) -> tuple[str, Any]:
        """A class."""
        return "label", tfds.features.ClassLabel()

    @classmethod
    def counts(cls, pictures: Pictures) -> dict[str, int]:
        """How many images every class has."""
        return {name: len(keys) for name, keys in pictures.classes.items()}

    @classmethod
    def items(cls, pictures: Pictures, names: list[str]) -> list[tuple[Any, Any]]:
        """Every image with its class's number among the names."""
        labels = {name: label for label, name in enumerate(names)}
        return [(key, labels[name]) for name, keys in pictures.classes.items() for key in keys]


class FewShotBuilder(_OneLabelBuilder):
    """A data set whose splits, `base`, `validation` and `novel`, differ in classes."""

    @classmethod
    def check(cls, splits: Mapping[str, Pictures]) -> None:
        """Raises unless every class is in one split, with images."""
        seen: dict[str, str] = {}
        for split, pictures in splits.items():
            check_filled(split, pictures)
            for name in pictures.classes:
                if name in seen:
                    raise DamagedArchiveError(
                        f"{pictures.source} names the class {name!r}, which is also in {seen[name]}"
                    )
                seen[name] = str(pictures.source)

    @classmethod
    def class_names(cls, splits: Mapping[str, Pictures]) -> list[str]:
        """The classes of all splits, one split after the other."""
        return [name for pictures in splits.values() for name in pictures.classes]


class ClassificationBuilder(_OneLabelBuilder):
    """A data set whose splits, `train`, maybe `validation`, and `test`, share their classes."""

    @classmethod
    def check(cls, splits: Mapping[str, Pictures]) -> None:
        """Raises unless every split has every class, with images."""
        first, reference = next(iter(splits.items()))
        for split, pictures in splits.items():
            check_filled(split, pictures)
            odd = sorted(set(reference.classes) ^ set(pictures.classes))
            if odd:
                raise DamagedArchiveError(
                    f"{pictures.source} does not have the same classes for the split {split} as "
                    f"{reference.source} for the split {first}: {len(odd)} are in one only, such "
                    f"as {odd[0]!r}"
                )
            if list(pictures.classes) != list(reference.classes):
                raise DamagedArchiveError(f"{pictures.source}: classes in another order")

    @classmethod
    def class_names(cls, splits: Mapping[str, Pictures]) -> list[str]:
        """The classes, in the order of the archive."""
        return list(next(iter(splits.values())).classes)


class MultiLabelBuilder(ImageBuilder):
    """A data set whose images have any number of labels; its splits share the labels.

    A record's `labels` are int8 [C]: 1 for a label that the image has, 0 for one that it has not,
    and −1 where that is unknown.
    """

    @classmethod
    def label_feature(cls) -> tuple[str, Any]:
        """A number for every label; how many there are is in the archives."""
        return "labels", tfds.features.Tensor(shape=(None,), dtype=np.int8)

    def name_classes(self, names: list[str]) -> None:
        """The names are those of the metadata."""

    @classmethod
    def check(cls, splits: Mapping[str, LabelledPictures]) -> None:
        """Raises unless the splits share their labels, and every split has images."""
        reference = next(iter(splits.values()))
        for split, pictures in splits.items():
            shape = len(pictures.keys), len(pictures.names)
            if pictures.targets.shape != shape or 0 in shape:
                raise DamagedArchiveError(
                    f"{pictures.source} has {shape[0]} images and {shape[1]} labels for the split "
                    f"{split}, with targets {list(pictures.targets.shape)}"
                )
            if pictures.names != reference.names:
                raise DamagedArchiveError(
                    f"{pictures.source} has other labels than {reference.source}"
                )

    @classmethod
    def class_names(cls, splits: Mapping[str, LabelledPictures]) -> list[str]:
        """The labels."""
        return list(next(iter(splits.values())).names)

    @classmethod
    def counts(cls, pictures: LabelledPictures) -> dict[str, int]:
        """How many images have every label."""
        counts = np.sum(pictures.targets == 1, axis=0)
        return dict(zip(pictures.names, counts.tolist(), strict=True))

    @classmethod
    def items(cls, pictures: LabelledPictures, names: list[str]) -> list[tuple[Any, Any]]:
        """Every image with its row of targets."""
        return list(zip(pictures.keys, pictures.targets, strict=True))

    @classmethod
    def write_beside(cls, folder: Path, splits: Mapping[str, LabelledPictures]) -> None:
        """Writes the targets of every split, so that they can be had without the images."""
        for split, pictures in splits.items():
            np.save(_targets_file(folder, split), pictures.targets)

    @classmethod
    def read_labels(
        cls, folder: Path, split: str, metadata: Mapping[str, Mapping[str, int]]
    ) -> np.ndarray:
        """The targets of a split: int8 [n, C]."""
        path = _targets_file(folder, split)
        try:
            targets = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DamagedArchiveError(
                f"{path} cannot be read ({error}); delete that folder, and it is prepared again"
            ) from error
        counts = list(metadata[split].values())
        if targets.dtype != np.int8 or (targets == 1).sum(axis=0).tolist() != counts:
            raise DamagedArchiveError(
                f"{path} is damaged; delete that folder, and it is prepared again"
            )
        return targets


def check_filled(split: str, pictures: Pictures) -> None:
    """Raises DamagedArchiveError unless there are classes, each with images."""
    if not pictures.classes:
        raise DamagedArchiveError(f"{pictures.source} has no classes for the split {split}")
    for name, keys in pictures.classes.items():
        if not keys:
            raise DamagedArchiveError(
                f"{pictures.source} names the class {name!r}, of which there are no images"
            )


def _targets_file(folder: Path, split: str) -> Path:
    return folder / f"targets-{split}.npy"
