"""The data sets: TFDS builders, each for one set in the forms in which people have it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

from experiments.data.archives import DamagedArchiveError, MissingArchiveError
from experiments.data.builders import preparation
from experiments.data.builders.arrays import Cifar10, Cifar100, Stl10, Svhn
from experiments.data.builders.caltech import Caltech101, Caltech256
from experiments.data.builders.cars import Cars
from experiments.data.builders.cifar_fs import CifarFs
from experiments.data.builders.coco import Coco
from experiments.data.builders.cub import Cub
from experiments.data.builders.cub_fewshot import CubFewshot
from experiments.data.builders.flowers import Flowers102
from experiments.data.builders.frame import ImageBuilder
from experiments.data.builders.icons.builder import Icons
from experiments.data.builders.imagenet import Imagenet, Imagenet200
from experiments.data.builders.inat2017_fewshot import Inat2017Fewshot
from experiments.data.builders.kanji import Kanji
from experiments.data.builders.kinds import MultiLabelBuilder
from experiments.data.builders.listed import Aircraft, Dtd, Food101, Pets, Sun397
from experiments.data.builders.mini_imagenet import MiniImagenet
from experiments.data.builders.nus_wide import NusWide
from experiments.data.builders.tiered_imagenet import TieredImagenet
from experiments.data.builders.voc import Voc2007
from experiments.errors import ConfigError

__all__ = [
    "BUILDERS",
    "DatasetStatus",
    "builder_class",
    "dataset_status",
    "describe",
    "image_shape",
    "is_multi_label",
    "share_images",
    "split_names",
]

BUILDERS: dict[str, type[ImageBuilder]] = {
    builder.name: builder
    for builder in (
        *(Icons, Kanji, MiniImagenet, TieredImagenet, CubFewshot, CifarFs, Inat2017Fewshot),
        *(Imagenet, Imagenet200, Food101, Caltech256, Sun397, Cifar10, Cifar100, Svhn, Stl10),
        *(Aircraft, Caltech101, Cars, Cub, Dtd, Flowers102, Pets),
        *(Coco, Voc2007, NusWide),
    )
}
"""Every data set by its name."""

_SHARE_IMAGES = (
    {"imagenet", "imagenet200", "mini_imagenet", "tiered_imagenet", "stl10"},
    {"cifar100", "cifar_fs"},
    {"cub", "cub_fewshot"},
    {"caltech101", "caltech256"},
)
"""Sets that were made from the same images, or some of them; each splits them in its own way."""
_SIZES = range(8, 2049)


@dataclass(frozen=True)
class DatasetStatus:
    """A data set, and what is there of it."""

    name: str
    description: str
    """One line."""
    image_shape: tuple[int, int, int]
    """Height, width and channels."""
    classes: dict[str, int]
    """Number of classes in every split: of the prepared data, or as published."""
    images: dict[str, int]
    """Number of images in every split of the prepared data; empty before."""
    ready: bool
    """Whether it is prepared."""
    location: Path
    """Where it is or will be prepared."""
    needs: str
    """Which files go where, or what must be installed; empty if it ships with the project."""
    found: tuple[Path, ...]
    """Those of these files that are there."""
    missing: str
    """Why it cannot be prepared now; empty if it is ready or can."""

    def __str__(self) -> str:
        counts = " / ".join(f"{count} {split}" for split, count in self.classes.items())
        if len(set(self.classes.values())) == 1:
            counts = f"{max(self.classes.values())} in {', '.join(self.classes)}"
        lines = [f"{self.name}: {self.description}", f"  classes: {counts}"]
        if self.ready:
            lines.append(f"  ready in {self.location}")
        elif not self.missing:
            lines.append("  prepared on first use" + (" from:" if self.found else ""))
            lines += [f"    {path}" for path in self.found]
        else:
            lines += [f"  {line}" for line in self.missing.splitlines()]
        return "\n".join(lines)


@functools.cache
def builder_class(name: str) -> type[ImageBuilder]:
    """The builder of a data set.

    Args:
        name: The data set; `NAME@SIZE` is one of photographs or drawings with its images stored at
            another size, such as `imagenet@128`. It is prepared apart.

    Returns:
        The class.

    Raises:
        ConfigError: There is no such data set; the message lists those there are.
    """
    plain, at, size = name.partition("@")
    if plain not in BUILDERS:
        raise ConfigError(f"no data set {plain!r}; there are {', '.join(BUILDERS)}")
    cls = BUILDERS[plain]
    if not at:
        return cls
    facts = cls.FACTS
    height, width, channels = facts.image_shape
    if not facts.sizes:
        raise ConfigError(f"{plain} has one size, {height}×{width}: {name!r} cannot be had")
    if not (size.isascii() and size.isdecimal() and int(size) in _SIZES):
        raise ConfigError(
            f"{name!r}: after the @ comes the size, {_SIZES[0]} to {_SIZES[-1]} pixels"
        )
    if int(size) == height == width:
        return cls
    facts = dataclasses.replace(
        facts,
        image_shape=(int(size), int(size), channels),
        description=facts.description.replace(f"{height}×{width}", f"{int(size)}×{int(size)}"),
    )
    return type(
        f"{cls.__name__}At{int(size)}",
        (cls,),
        {
            "__doc__": cls.__doc__,
            "__module__": cls.__module__,
            "name": f"{plain}_at_{int(size)}",
            "FACTS": facts,
        },
    )


def split_names(name: str) -> tuple[str, ...]:
    """The splits of a data set, whether it is prepared or not.

    Args:
        name: The data set.

    Returns:
        Of a few-shot set `base`, `validation` where it has one, and `novel`; of any other `train`,
        `validation` where its archives have one, and `test`.

    Raises:
        ConfigError: There is no such data set.
    """
    return tuple(builder_class(name).FACTS.classes)


def is_multi_label(name: str) -> bool:
    """Whether the labels of a data set are rows int8 [C] instead of classes.

    Args:
        name: The data set.

    Returns:
        True if they are.

    Raises:
        ConfigError: There is no such data set.
    """
    return issubclass(builder_class(name), MultiLabelBuilder)


def share_images(name: str, other: str) -> bool:
    """Whether two data sets, at whatever sizes, are one or were made from the same images.

    Args:
        name: One of them.
        other: The other.

    Returns:
        True if they are, or were.
    """
    both = {plain.partition("@")[0] for plain in (name, other)}
    return len(both) == 1 or any(both <= names for names in _SHARE_IMAGES)


def image_shape(name: str) -> tuple[int, int, int]:
    """Height, width and channels of a data set's images, whether it is prepared or not.

    Args:
        name: The data set.

    Returns:
        The shape.

    Raises:
        ConfigError: There is no such data set.
    """
    return builder_class(name).FACTS.image_shape


def describe(
    name: str, data_dir: Path | None = None, manual_dir: Path | None = None
) -> DatasetStatus:
    """What a data set is, and what is there of it, without preparing or loading it.

    Args:
        name: The data set.
        data_dir: Where prepared data sets are kept; by default TFDS's, ~/tensorflow_datasets.
        manual_dir: Where downloaded archives lie; by default `downloads/manual` in `data_dir`.

    Returns:
        Its status.

    Raises:
        ConfigError: There is no such data set.
    """
    cls = builder_class(name)
    manual_dir = preparation.manual_root(data_dir, manual_dir)
    place = cls.place(manual_dir, manual_dir)
    wanted = dict.fromkeys(
        alternative
        for layout in cls.FACTS.layouts
        for names in layout.needs
        for alternative in names
    )
    ready, missing, contents, images = False, "", {}, {}
    try:
        builder = preparation.make_builder(cls, data_dir)
        ready = preparation.is_prepared(builder)
        if ready:
            contents = {split: builder.info.metadata[split] for split in cls.FACTS.classes}  # pyright: ignore
            images = {split: builder.info.splits[split].num_examples for split in cls.FACTS.classes}
        else:
            cls.check_source(place)
    except (DamagedArchiveError, MissingArchiveError) as error:
        missing = str(error)
    return DatasetStatus(
        name=name,
        description=cls.FACTS.description,
        image_shape=cls.FACTS.image_shape,
        classes={split: len(c) for split, c in contents.items()} or dict(cls.FACTS.classes),
        images=images,
        ready=ready,
        location=preparation.location(cls, data_dir),
        needs=cls.instructions() or cls.FACTS.requires,
        found=tuple(path for path in map(place.find, wanted) if path is not None),
        missing=missing,
    )


def dataset_status(
    data_dir: Path | None = None, manual_dir: Path | None = None
) -> list[DatasetStatus]:
    """Every data set, and what is there of it.

    Args:
        data_dir: Where prepared data sets are kept; by default TFDS's, ~/tensorflow_datasets.
        manual_dir: Where downloaded archives lie; by default `downloads/manual` in `data_dir`.

    Returns:
        One status a data set.
    """
    return [describe(name, data_dir, manual_dir) for name in BUILDERS]
