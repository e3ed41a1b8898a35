"""The images of protocol E: those of a data set, a part of them, or two sets."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.config import Folders, Share
from experiments.contracts import Part
from experiments.data.augment import seen_shape
from experiments.data.builders import image_shape, share_images, split_names
from experiments.errors import ConfigError
from experiments.protocols import few_shot_data
from experiments.protocols.few_shot_data import FewShotData, holds_classes_out

_OTHER_IMAGES = {"mini_imagenet": "imagenet", "tiered_imagenet": "imagenet"}
"""Few-shot sets made from training images alone of another set, whose test images are new to it."""


@dataclass(frozen=True)
class MarginData(FewShotData):
    """Which images of one data set or two, and how they are augmented."""

    holdout: Share = 0.0
    """Fraction of each base class's images that is held out for the episodes of base classes."""
    base_test: str = ""
    """Data set with test images of the base classes; empty: held-out or training images."""
    novel: str = ""
    """Few-shot data set of the validation and novel classes, with all classes of NAME as base."""


def parts(data: MarginData, folders: Folders) -> dict[str, Part]:
    """As `few_shot_data.parts`, with all options."""
    options = {option: vars(data)[option] for option in ("holdout", "novel", "base_test")}
    return few_shot_data.parts(data, folders, **options)


def novel_name(data: MarginData) -> str:
    """The data set of the validation and novel classes."""
    return data.novel or data.name


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
    few_shot_data.check_base_classes(data, data.novel)


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
    return bool(data.holdout or data.base_test or few_shot_data.test_split(data.name))


def parts_of(data: MarginData, split: str) -> list[str]:
    """The splits that the evaluation of a split measures, where the data has them."""
    of_novel = split_names(novel_name(data)) if holds_classes_out(novel_name(data)) else ("novel",)
    available = ("base", *of_novel)
    requested = ("novel", "validation", "base") if split == "novel" else (split,)
    found = [part for part in requested if part in available]
    if not found:
        name = novel_name(data)
        raise ConfigError(f"{name} has no {split} classes; it has {', '.join(available)}")
    return found
