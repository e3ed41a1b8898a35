"""The images of protocol E: those of a few-shot data set, a part of them, or two sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from experiments.config import DataConfig, Folders, Pixels, Seed, Share
from experiments.contracts import ImageSet
from experiments.data.augment import seen_shape
from experiments.data.builders import builder_class, image_shape, share_images, split_names
from experiments.data.pipeline import class_names, load_split, stored_counts
from experiments.data.selection import Selection, labels_of, select
from experiments.errors import ConfigError
from experiments.protocols import few_shot

_OTHER_IMAGES = {"mini_imagenet": "imagenet", "tiered_imagenet": "imagenet"}
"""Few-shot sets made from training images alone of another set, whose test images are new to it."""
SELECTION = {"base": "train", "held-out": "validation"}
"""The splits of the base classes, and their names in `select`."""


@dataclass(frozen=True)
class MarginData(DataConfig):
    """Which images of a few-shot data set, and how they are augmented."""

    holdout: Share = 0.0
    """Fraction of each base class's images that is held out for the episodes of base classes."""
    base_test: str = ""
    """Data set with test images of the base classes; empty: held-out or training images."""
    novel: str = ""
    """Few-shot data set of the validation and novel classes, with all classes of NAME as base."""
    base_classes: Pixels = 0
    """Number of base classes, the same in every run; 0: all."""
    subset_seed: Seed = 0
    """Seed that chooses these classes; 0 if all are used."""


def load(data: MarginData, folders: Folders, split: str) -> ImageSet:
    """The images of the base, validation or novel classes, or the untrained images of base ones."""
    read = partial(load_split, **vars(folders))
    if split not in SELECTION:
        return read(novel_name(data), split)
    if split == "held-out" and data.base_test:
        names, rows, labels = _other_images(data, folders)
        images = read(data.base_test, "test", rows=rows)
        return dataclasses.replace(images, labels=labels, class_names=names)
    chosen, _ = _select_base(data, folders)
    rows = chosen.rows[SELECTION[split]] if data.holdout or data.base_classes else None
    return chosen.renumber(read(data.name, _base_splits(data), rows=rows))


def counts_by_split(data: MarginData, folders: Folders) -> Mapping[str, np.ndarray]:
    """The number of images of every base, validation and novel class.

    `held-out` has the images of base classes that are not for training, if there are any.
    """
    counts = {**few_shot.counts_by_split(novel_name(data), folders)}
    chosen, labels = _select_base(data, folders)
    for split, part in SELECTION.items():
        if part in chosen.rows:
            counts[split] = chosen.counts(labels, part)
    if data.base_test:
        names, _, labels = _other_images(data, folders)
        counts["held-out"] = np.bincount(labels, minlength=len(names))
    return counts


def novel_name(data: MarginData) -> str:
    """The data set of the validation and novel classes."""
    return data.novel or data.name


def _base_splits(data: MarginData) -> str:
    return "+".join(split_names(data.name)) if data.novel else "base"


def _select_base(data: MarginData, folders: Folders) -> tuple[Selection, np.ndarray]:
    """The chosen base classes, and the labels of all base images in the order of `load_split`."""
    own = few_shot.counts_by_split(data.name, folders)
    labels = labels_of(np.concatenate([own[split] for split in _base_splits(data).split("+")]))
    chosen = select(
        labels,
        test_labels=np.zeros(0, labels.dtype),
        classes=data.base_classes,
        subset_seed=data.subset_seed,
        holdout=data.holdout,
        option="data.base_classes",
    )
    return chosen, labels


def _other_images(
    data: MarginData, folders: Folders
) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """The names of the base classes; rows and labels of their test images in `data.base_test`."""
    own = class_names(data.name, _base_splits(data), **vars(folders))
    names = tuple(own[label] for label in _select_base(data, folders)[0].classes)
    stored = class_names(data.base_test, "test", **vars(folders))
    if missing := set(names) - set(stored):
        raise ConfigError(
            f"data.base_test = {data.base_test} lacks {len(missing)} of the {len(names)} base "
            f"classes of {data.name}, such as {min(missing)}; prepare both from archives that name "
            "classes alike, or set data.holdout instead"
        )
    numbers = {name: number for number, name in enumerate(names)}
    positions = np.array([numbers.get(name, -1) for name in stored], np.int32)
    labels = np.repeat(positions, stored_counts(data.base_test, **vars(folders))["test"])
    rows = np.flatnonzero(labels >= 0)
    return names, rows, labels[rows]


def check_options(data: MarginData) -> None:
    """Checks that the options fit together."""
    if data.novel and share_images(data.name, data.novel):
        raise ConfigError(
            f"data.novel = {data.novel} shares images with data.name = {data.name}, all of which "
            "are for training; choose another set, or leave data.novel empty to use the "
            "validation and novel classes of data.name"
        )
    if data.base_test and data.holdout:
        raise ConfigError(
            f"data.holdout = {data.holdout} and data.base_test = {data.base_test} exclude each "
            "other: the episodes of base classes take the images of one of them; set the other to "
            "its default"
        )
    other = _OTHER_IMAGES.get(data.name.partition("@")[0])
    if data.base_test and data.base_test.partition("@")[0] != other:
        instead = f"{other}, or " if other else ""
        raise ConfigError(
            f"data.base_test = {data.base_test} is not known to have images of the classes of "
            f"{data.name} that are not in it; set it to {instead}empty and use data.holdout"
        )
    published = builder_class(data.name).SPEC.classes
    # A set without base classes is refused where its splits are read.
    available = sum(published.get(split, 0) for split in _base_splits(data).split("+"))
    if data.base_classes == 1 or 0 < available < data.base_classes:
        raise ConfigError(
            f"data.base_classes = {data.base_classes} must be from 2 to {available}, or 0 for all"
        )


def check_shapes(data: MarginData) -> None:
    """Checks that the images of all sets have one shape."""
    options = {"name": data.name, "novel": data.novel, "base_test": data.base_test}
    shapes = {
        option: "×".join(map(str, seen_shape(image_shape(name), data)))
        for option, name in options.items()
        if name
    }
    for option, shape in shapes.items():
        if shape != shapes["name"]:
            raise ConfigError(
                f"images of {data.name} are {shapes['name']}, those of data.{option} = "
                f"{options[option]} are {shape}; set data.image_size to resize both, and choose "
                "sets with the same channels"
            )


def has_held_out(data: MarginData) -> bool:
    """Whether there are images of base classes that are not for training."""
    return bool(data.holdout or data.base_test)


def parts_of(data: MarginData, split: str) -> list[str]:
    """The splits that the evaluation of a split measures, where the data has them."""
    available = ("base", *split_names(novel_name(data)))
    requested = ("novel", "validation", "base") if split == "novel" else (split,)
    return [part for part in requested if part in available]
