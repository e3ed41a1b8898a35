"""The data sets: TFDS builders of images whose splits differ in classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.data.archives import DamagedArchiveError, MissingArchiveError
from experiments.data.builders import preparation
from experiments.data.builders.cifar_fs import CifarFs
from experiments.data.builders.cub_fewshot import CubFewshot
from experiments.data.builders.few_shot import FewShotBuilder
from experiments.data.builders.icons.builder import Icons
from experiments.data.builders.inat2017_fewshot import Inat2017Fewshot
from experiments.data.builders.mini_imagenet import MiniImagenet
from experiments.data.builders.tiered_imagenet import TieredImagenet
from experiments.errors import ConfigError

__all__ = [
    "BUILDERS",
    "DatasetStatus",
    "builder_class",
    "dataset_status",
    "describe",
    "image_shape",
    "split_names",
]

BUILDERS: dict[str, type[FewShotBuilder]] = {
    builder.name: builder
    for builder in (Icons, MiniImagenet, TieredImagenet, CubFewshot, CifarFs, Inat2017Fewshot)
}
"""Every data set by its name."""


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
    """Which files go where; empty if it ships with the project."""
    found: tuple[Path, ...]
    """Those of these files that are there."""
    missing: str
    """Why it cannot be prepared now; empty if it is ready or can."""

    def __str__(self) -> str:
        counts = " / ".join(f"{count} {split}" for split, count in self.classes.items())
        lines = [f"{self.name}: {self.description}", f"  classes: {counts}"]
        if self.ready:
            lines.append(f"  ready in {self.location}")
        elif not self.missing:
            lines.append("  prepared on first use" + (" from:" if self.found else ""))
            lines += [f"    {path}" for path in self.found]
        else:
            lines += [f"  {line}" for line in self.missing.splitlines()]
        return "\n".join(lines)


def builder_class(name: str) -> type[FewShotBuilder]:
    """The builder of a data set.

    Args:
        name: The data set.

    Returns:
        The class.

    Raises:
        ConfigError: There is no such data set; the message lists those there are.
    """
    if name not in BUILDERS:
        raise ConfigError(f"no data set {name!r}; there are {', '.join(BUILDERS)}")
    return BUILDERS[name]


def split_names(name: str) -> tuple[str, ...]:
    """The splits of a data set, whether it is prepared or not.

    Args:
        name: The data set.

    Returns:
        `base`, `validation` where the data set has one, and `novel`.

    Raises:
        ConfigError: There is no such data set.
    """
    return tuple(builder_class(name).FACTS.classes)


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
    ready, missing, contents = False, "", {}
    try:
        builder = preparation.make_builder(cls, data_dir)
        ready = preparation.is_prepared(builder)
        if ready:
            contents = {split: builder.info.metadata[split] for split in cls.FACTS.classes}  # pyright: ignore
        elif cls.FACTS.layouts:
            cls.choose_layout(place)
    except (DamagedArchiveError, MissingArchiveError) as error:
        missing = str(error)
    return DatasetStatus(
        name=name,
        description=cls.FACTS.description,
        image_shape=cls.FACTS.image_shape,
        classes={split: len(c) for split, c in contents.items()} or dict(cls.FACTS.classes),
        images={split: sum(counts.values()) for split, counts in contents.items()},
        ready=ready,
        location=preparation.location(cls, data_dir),
        needs=cls.instructions() or "",
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
