"""The data sets: one TFDS builder each, for all layouts in which the data set is distributed."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

from experiments.data.builders import folder, preparation
from experiments.data.builders.archives import DamagedArchiveError, MissingArchiveError
from experiments.data.builders.arrays import Cifar10, Cifar100, Stl10, Svhn, SvhnExtra
from experiments.data.builders.base import ImageBuilder
from experiments.data.builders.caltech import Caltech101, Caltech256
from experiments.data.builders.cars import Cars
from experiments.data.builders.cifar_fs import CifarFs
from experiments.data.builders.coco import Coco
from experiments.data.builders.cub import Cub
from experiments.data.builders.cub_fewshot import CubFewshot
from experiments.data.builders.flowers import Flowers102
from experiments.data.builders.icons.builder import Icons
from experiments.data.builders.imagenet import Imagenet, Imagenet200
from experiments.data.builders.inat2017_fewshot import Inat2017Fewshot
from experiments.data.builders.kanji import Kanji, KanjiRadicals
from experiments.data.builders.listed import Aircraft, Dtd, Food101, Pets, Sun397
from experiments.data.builders.mini_imagenet import MiniImagenet
from experiments.data.builders.mnist import (
    K49,
    EmnistBalanced,
    EmnistByclass,
    EmnistBymerge,
    EmnistDigits,
    EmnistLetters,
    EmnistMnist,
    FashionMnist,
    Kmnist,
    Mnist,
)
from experiments.data.builders.nus_wide import NusWide
from experiments.data.builders.tasks import MultiLabelBuilder
from experiments.data.builders.tiered_imagenet import TieredImagenet
from experiments.data.builders.voc import Voc2007
from experiments.errors import ConfigError, unknown

__all__ = [
    "BUILDERS",
    "DatasetStatus",
    "builder_class",
    "dataset_status",
    "describe",
    "image_shape",
    "is_multi_label",
    "overview",
    "pinned",
    "plain_name",
    "share_images",
    "short_name",
    "split_names",
]

BUILDERS: dict[str, type[ImageBuilder]] = {
    builder.name: builder
    for builder in (
        Icons,
        Kanji,
        KanjiRadicals,
        MiniImagenet,
        TieredImagenet,
        CubFewshot,
        CifarFs,
        Inat2017Fewshot,
        Imagenet,
        Imagenet200,
        Food101,
        Caltech256,
        Sun397,
        Cifar10,
        Cifar100,
        Svhn,
        SvhnExtra,
        Stl10,
        FashionMnist,
        Mnist,
        Kmnist,
        K49,
        EmnistBalanced,
        EmnistByclass,
        EmnistBymerge,
        EmnistDigits,
        EmnistLetters,
        EmnistMnist,
        Aircraft,
        Caltech101,
        Cars,
        Cub,
        Dtd,
        Flowers102,
        Pets,
        Coco,
        Voc2007,
        NusWide,
    )
}
"""Every data set by name."""

_SHARE_IMAGES = (
    {"imagenet", "imagenet200", "mini_imagenet", "tiered_imagenet", "stl10"},
    {"cifar100", "cifar_fs"},
    {"svhn", "svhn_extra"},
    {"cub", "cub_fewshot"},
    {"caltech101", "caltech256"},
    {"kanji", "kanji_radicals"},
    {"kmnist", "k49"},
    {
        *("mnist", "emnist_balanced", "emnist_byclass", "emnist_bymerge"),
        *("emnist_digits", "emnist_letters", "emnist_mnist"),
    },
)
"""Groups of data sets that contain some of the same images, each with its own splits."""
_SIZES = range(8, 2049)


@dataclass(frozen=True)
class DatasetStatus:
    """A data set, and which of its files exist."""

    name: str
    description: str
    """One line."""
    classes: dict[str, int]
    """Number of classes in every split: of the prepared data, or as published."""
    ready: bool
    """Whether the data set is prepared."""
    location: Path
    """The folder of the prepared data set."""
    found: tuple[Path, ...]
    """Those of its files to download that exist."""
    missing: str
    """Why the data set cannot be prepared now. Empty if it is prepared, or can be."""
    details: tuple[str, ...] = ()
    """Further lines."""

    @property
    def state(self) -> str:
        """In a word."""
        return "prepared" if self.ready else "missing" if self.missing else "available"

    def __str__(self) -> str:
        classes = " / ".join(f"{count} {split}" for split, count in self.classes.items())
        if len(set(self.classes.values())) == 1:
            classes = f"{max(self.classes.values())} in {', '.join(self.classes)}"
        lines = [f"{self.name}: {self.description}", f"  classes: {classes}"]
        lines += [f"  {line}" for line in self.details]
        if self.ready:
            lines.append(f"  prepared in {self.location}")
        elif not self.missing:
            lines.append("  prepared on first use" + (", from:" if self.found else ""))
            lines += [f"    {path}" for path in self.found]
        else:
            lines += [f"  {line}" for line in self.missing.splitlines()]
        return "\n".join(lines)


def builder_class(name: str) -> type[ImageBuilder]:
    """The builder of a data set.

    Args:
      name: The data set, or `folder:PATH` with images of one's own. `NAME@SIZE`, such as
        `imagenet@128`, stores the images of a resizable data set at another size. Every size is
        prepared separately.

    Returns:
      The class.

    Raises:
      ConfigError: The data set does not exist. The message lists the available ones.
      DamagedArchiveError: A file in a folder of one's own is unreadable.
    """
    if not is_own(name):
        return _known_builder(name)
    size = folder.parse(name).size
    _check_size(name, size or str(_SIZES[0]))
    return folder.folder_builder(name)


@functools.cache
def _known_builder(name: str) -> type[ImageBuilder]:
    plain, at, size = name.partition("@")
    if plain not in BUILDERS:
        if "/" in name or Path(name).expanduser().is_dir():
            raise ConfigError(
                f"no data set {name}; for images of your own, set {folder.PREFIX}{name}"
            )
        own = f"{folder.PREFIX}PATH has images of your own"
        raise unknown("data set", plain, BUILDERS, f"available: {', '.join(BUILDERS)}; {own}")
    cls = BUILDERS[plain]
    if not at:
        return cls
    spec = cls.SPEC
    height, width, channels = spec.image_shape
    if not spec.resizable:
        raise ConfigError(f"{plain} is only available at {height}×{width}, not as {name!r}")
    _check_size(name, size)
    if int(size) == height == width:
        return cls
    spec = dataclasses.replace(
        spec,
        image_shape=(int(size), int(size), channels),
        description=spec.description.replace(f"{height}×{width}", f"{int(size)}×{int(size)}"),
    )
    return type(
        f"{cls.__name__}At{int(size)}",
        (cls,),
        {
            "__doc__": cls.__doc__,
            "__module__": cls.__module__,
            "name": f"{plain}_at_{int(size)}",
            "SPEC": spec,
        },
    )


def _check_size(name: str, size: str) -> None:
    if not (size.isascii() and size.isdecimal() and int(size) in _SIZES):
        raise ConfigError(
            f"{name!r}: the size after the @ must be {_SIZES[0]} to {_SIZES[-1]} pixels"
        )


def is_own(name: str) -> bool:
    """Whether a data set is a folder of one's own."""
    return name.startswith(folder.PREFIX)


def pinned(name: str) -> str:
    """The name of a data set for the configuration of a run.

    That of a folder of one's own has its absolute path and a hash of its content.
    """
    return folder.pinned(name) if is_own(name) else name


def short_name(name: str) -> str:
    """The name of a data set in titles and names of files."""
    return folder.short_name(name) if is_own(name) else name


def plain_name(name: str) -> str:
    """The name of a data set at any size; of a folder of one's own, that of its content."""
    if not is_own(name):
        return name.partition("@")[0]
    return f"{folder.PREFIX}{folder.parse(folder.pinned(name)).content}"


def split_names(name: str) -> tuple[str, ...]:
    """The splits of a data set. It need not be prepared.

    Args:
      name: The data set.

    Returns:
      `base`, `validation` (optional) and `novel` of a few-shot data set; `train` alone of a folder
      of one's own without splits; `train`, `validation` or `extra` (optional) and `test` of any
      other.

    Raises:
      ConfigError: The data set does not exist.
    """
    return tuple(builder_class(name).SPEC.classes)


def is_multi_label(name: str) -> bool:
    """Whether an image of a data set can have any number of labels.

    Args:
      name: The data set.

    Returns:
      True if the labels are int8 [n, C], False if they are classes [n].

    Raises:
      ConfigError: The data set does not exist.
    """
    return issubclass(builder_class(name), MultiLabelBuilder)


def share_images(name: str, other: str) -> bool:
    """Whether two data sets may contain the same images, at any sizes.

    Args:
      name: One of them.
      other: The other.

    Returns:
      True if they are the same data set, or were made from the same images.
    """
    if is_own(name) and is_own(other):
        return folder.overlap(name, other)
    both = {plain_name(name), plain_name(other)}
    return len(both) == 1 or any(both <= names for names in _SHARE_IMAGES)


def image_shape(name: str) -> tuple[int, int, int]:
    """The shape of the images of a data set. It need not be prepared.

    Args:
      name: The data set.

    Returns:
      Height, width and channels. For photographs of different sizes, those of the squares that
      models receive unless data.image_size is set.

    Raises:
      ConfigError: The data set does not exist.
    """
    return builder_class(name).SPEC.image_shape


def describe(
    name: str, data_dir: Path | None = None, manual_dir: Path | None = None
) -> DatasetStatus:
    """Describes a data set and its state, without preparing or loading it.

    Args:
      name: The data set.
      data_dir: Folder of prepared data sets. Default: that of TFDS, ~/tensorflow_datasets.
      manual_dir: Folder of downloaded archives. Default: `downloads/manual` in `data_dir`.

    Returns:
      The status.

    Raises:
      ConfigError: The data set does not exist.
    """
    cls = builder_class(name)
    manual_dir = preparation.manual_root(data_dir, manual_dir)
    search_path = cls.search_path(manual_dir, manual_dir)
    files = dict.fromkeys(
        alternative
        for layout in cls.SPEC.layouts
        for names in layout.needs
        for alternative in names
    )
    ready, missing, contents = False, "", {}
    try:
        builder = preparation.make_builder(cls, data_dir)
        ready = preparation.is_prepared(builder)
        if ready:
            contents = {split: builder.info.metadata[split] for split in cls.SPEC.classes}  # pyright: ignore
        else:
            preparation.check_preparable(cls, data_dir)
            cls.check_source(search_path)
    except (DamagedArchiveError, MissingArchiveError) as error:
        missing = str(error)
    return DatasetStatus(
        name=name,
        description=cls.SPEC.description
        + (f", shorter side {cls.SPEC.image_shape[0]}" if cls.SPEC.whole else ""),
        classes={split: len(c) for split, c in contents.items()} or dict(cls.SPEC.classes),
        ready=ready,
        location=preparation.location(cls, data_dir),
        found=tuple(path for path in map(search_path.find, files) if path is not None),
        missing=missing,
        details=tuple(cls.details()),
    )


def dataset_status(
    data_dir: Path | None = None, manual_dir: Path | None = None
) -> list[DatasetStatus]:
    """Describes every data set and its state.

    Args:
      data_dir: As in `describe`.
      manual_dir: As in `describe`.

    Returns:
      One status per data set.
    """
    return [describe(name, data_dir, manual_dir) for name in BUILDERS]


def overview(data_dir: Path | None = None, manual_dir: Path | None = None) -> list[str]:
    """Every data set in a line, below the folders.

    Args:
      data_dir: As in `describe`.
      manual_dir: As in `describe`.

    Returns:
      The lines.
    """
    status = dataset_status(data_dir, manual_dir)
    width = max(len(s.name) for s in status)
    return [
        f"Prepared data sets: {preparation.data_root(data_dir)}",
        f"Files that you download: {preparation.manual_root(data_dir, manual_dir)}",
        "Available data sets are prepared on first use. `datasets NAME` prints what one needs.",
        "",
        *(f"{s.name:{width}}  {s.state:9}  {s.description}" for s in status),
        f"{folder.PREFIX}PATH: images of your own; `datasets {folder.PREFIX}PATH` lists them",
    ]
