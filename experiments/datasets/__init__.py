"""The data sets: one table of all, each with the layouts in which people have its files."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from experiments.core.errors import ConfigError, unknown
from experiments.datasets import (
    arrays,
    caltech,
    cub,
    flowers,
    folder,
    icons,
    imagenet,
    inat2017_fewshot,
    kanji,
    listed,
    many_labels,
    mnist,
    preparation,
)
from experiments.datasets.archives import DamagedArchiveError, MissingArchiveError
from experiments.datasets.base import Dataset
from experiments.datasets.folder import PREFIX, is_own, pinned, short_name

__all__ = ["DATASETS", "PREFIX", "Dataset", "pinned", "short_name"]

_MODULES = (
    *(icons, kanji, cub, inat2017_fewshot, imagenet, arrays, mnist),
    *(listed, caltech, flowers, many_labels),
)
DATASETS = {dataset.name: dataset for module in _MODULES for dataset in module.DATASETS}
"""Every data set by name."""


def lookup(name: str) -> Dataset:
    """A data set by its name; a `ConfigError` if it does not exist.

    `folder:PATH` has images of one's own. `NAME@SIZE`, such as `imagenet@128`, stores the images of
    a resizable data set at another size. Every size is prepared separately.
    """
    plain, at, size = name.partition("@")
    if is_own(name):
        at = size = folder.parse(name).size
    if at and not (size.isascii() and size.isdecimal() and 8 <= int(size) <= 2048):
        raise ConfigError(f"{name!r}: the size after the @ must be 8 to 2048 pixels")
    if is_own(name):
        return folder.own_dataset(name)
    if plain not in DATASETS:
        if name == "folder" or "/" in name or Path(name).expanduser().is_dir():
            path = "PATH" if name == "folder" else name
            raise ConfigError(f"no data set {name}; for images of your own, set {PREFIX}{path}")
        own = f"{PREFIX}PATH has images of your own"
        raise unknown("data set", plain, DATASETS, f"available: {', '.join(DATASETS)}; {own}")
    dataset = DATASETS[plain]
    height, width, channels = dataset.image_shape
    if at and not dataset.resizable:
        raise ConfigError(f"{plain} is only available at {height}×{width}, not as {name!r}")
    if not at or (side := int(size)) == height == width:
        return dataset
    return dataclasses.replace(
        dataset,
        name=f"{plain}_at_{side}",
        argument=f"{plain}@{side}",
        image_shape=(side, side, channels),
        description=dataset.description.replace(f"{height}×{width}", f"{side}×{side}"),
    )


def plain_name(name: str) -> str:
    """The name of a data set at any size; of a folder of one's own, that of its content."""
    own = is_own(name) and f"{PREFIX}{folder.parse(pinned(name)).content}"
    return own or name.partition("@")[0]


def share_images(name: str, other: str) -> bool:
    """Whether two data sets may contain the same images, at any sizes."""
    if is_own(name) or is_own(other):
        return is_own(name) and is_own(other) and folder.overlap(name, other)
    plain = [plain_name(of) for of in (name, other)]
    first, second = ((of in DATASETS and DATASETS[of].images_of) or of for of in plain)
    return first == second


@dataclass(frozen=True)
class DatasetStatus:
    """A data set, and whether it is prepared."""

    name: str
    dataset: Dataset
    classes: dict[str, int]
    """Number of classes in every split: of the prepared data, or as published."""
    ready: bool
    """Whether it is prepared."""
    location: Path
    """The folder of the prepared data set."""
    missing: str
    """Why it cannot be prepared now. Empty if it is prepared, or can be."""

    @property
    def state(self) -> str:
        """In a word."""
        return "prepared" if self.ready else "missing" if self.missing else "available"

    @property
    def description(self) -> str:
        """In a line."""
        side = f", shorter side {self.dataset.image_shape[0]}" if self.dataset.whole else ""
        return self.dataset.description + side

    def __str__(self) -> str:
        classes = " / ".join(f"{count} {split}" for split, count in self.classes.items())
        lines = [f"{self.name}: {self.description}", f"  classes: {classes}"]
        lines += [f"  {line}" for line in self.dataset.details]
        state = f"prepared in {self.location}" if self.ready else "prepared on first use"
        lines += [f"  {line}" for line in (self.missing or state).splitlines()]
        return "\n".join(lines)


def describe(
    name: str, data_dir: Path | None = None, manual_dir: Path | None = None
) -> DatasetStatus:
    """A data set and its state, without preparing or loading it; folders as in `prepare`."""
    dataset = lookup(name)
    found, missing, classes = None, "", dataset.classes
    try:
        found = preparation.prepared(dataset, data_dir)
        if found is None:
            preparation.check_preparable(dataset, data_dir, manual_dir)
        else:
            classes = {split: len(found.counts[split]) for split in classes}
    except (DamagedArchiveError, MissingArchiveError) as error:
        missing = str(error)
    location = preparation.location(dataset, data_dir)
    return DatasetStatus(name, dataset, classes, found is not None, location, missing)


def overview(data_dir: Path | None = None, manual_dir: Path | None = None) -> list[str]:
    """Every data set in a line, below the folders."""
    status = [describe(name, data_dir, manual_dir) for name in DATASETS]
    width = max(map(len, DATASETS))
    return [
        f"Prepared data sets: {preparation.data_root(data_dir)}",
        f"Files that you download: {preparation.manual_root(data_dir, manual_dir)}",
        "Available data sets are prepared on first use. `datasets NAME` prints what one needs.",
        "",
        *(f"{s.name:{width}}  {s.state:9}  {s.description}" for s in status),
        f"{PREFIX}PATH: images of your own; `datasets {PREFIX}PATH` lists them",
    ]
