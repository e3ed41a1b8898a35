"""What the builders share: pictures in, record files in order of class out."""

from __future__ import annotations

import io
import itertools
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

from experiments.data.archives import DamagedArchiveError, MissingArchiveError
from experiments.data.builders.layouts import Layout, Place
from experiments.data.builders.pictures import Pictures, to_png

# Images in a record file. TFDS holds the encoded images of one file in memory.
_SHARD = 4096


@dataclass(frozen=True)
class Facts:
    """What is known of a data set before it is prepared."""

    description: str
    """One line."""
    image_shape: tuple[int, int, int]
    """Height, width and channels of the images as stored."""
    classes: dict[str, int]
    """Number of classes in every split, as published."""
    homepage: str
    citation: str = ""
    folders: tuple[str, ...] = (".",)
    """Folders of the manual directory in which its files are looked for."""
    layouts: tuple[Layout, ...] = ()
    """The forms in which it is read; none if it ships with the project."""


class FewShotBuilder(tfds.core.ShardBasedBuilder, skip_registration=True):
    """A TFDS builder of images split by class, written in order and read without TensorFlow.

    A data set is its `FACTS`: the layouts in which it is found, each with a function that
    returns the images of every split. TFDS's `GeneratorBasedBuilder` is not used because beyond
    a gigabyte it sorts through TensorFlow's files, even with shuffling off.
    """

    VERSION = tfds.core.Version("1.0.0")
    FACTS: ClassVar[Facts]

    def __init_subclass__(cls, **kwargs: Any):
        # The explicit table `BUILDERS` is the only registry.
        super().__init_subclass__(skip_registration=True, **kwargs)
        cls.MANUAL_DOWNLOAD_INSTRUCTIONS = cls.instructions()

    @classmethod
    def instructions(cls) -> str | None:
        """Which files go where, for every layout; None if the data set needs none."""
        if not cls.FACTS.layouts:
            return None
        folders = " or ".join(f"{name}/" for name in cls.FACTS.folders if name != ".")
        lines = [f"It takes one of these, in that directory or in its {folders}:"]
        return "\n- ".join([*lines, *(layout.describe() for layout in cls.FACTS.layouts)])

    @classmethod
    def place(cls, manual_dir: Path, scratch: Path) -> Place:
        """Where the data set's files are looked for.

        Args:
            manual_dir: The directory of downloaded archives.
            scratch: Where archives are extracted.

        Returns:
            The place.
        """
        return Place(tuple(manual_dir / name for name in cls.FACTS.folders), scratch)

    @classmethod
    def choose_layout(cls, place: Place) -> Layout:
        """The first layout whose files are all there.

        Args:
            place: Where to look.

        Returns:
            The layout.

        Raises:
            MissingArchiveError: None is complete; the message says which files go where.
        """
        nearly = []
        for layout in cls.FACTS.layouts:
            missing = layout.missing(place)
            if not missing:
                return layout
            if len(missing) < len(layout.needs):
                nearly.append(f"For {layout.title}, this is missing: {'; '.join(missing)}.")
        message = f"{cls.name} is not prepared, and its files are not in {place.folders[-1]}."
        raise MissingArchiveError("\n".join([message, cls.instructions() or "", *nearly]))

    def read_splits(self, place: Place) -> dict[str, Pictures]:
        """The images of every split, from the first layout that is complete.

        Args:
            place: Where the archives are.

        Returns:
            For every split its classes and images.

        Raises:
            MissingArchiveError: No layout is complete.
            DamagedArchiveError: A file is unreadable or does not hold what it should.
        """
        return self.choose_layout(place).read(place)

    def _info(self) -> tfds.core.DatasetInfo:
        return _LocalInfo(
            builder=self,
            description=self.FACTS.description,
            homepage=self.FACTS.homepage,
            citation=self.FACTS.citation,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(
                        shape=self.FACTS.image_shape, dtype=np.uint8, encoding_format="png"
                    ),
                    # The names are in the archives, so they are set when these are read.
                    "label": tfds.features.ClassLabel(),
                }
            ),
            supervised_keys=("image", "label"),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(),
        )

    def _shard_iterators_per_split(self, dl_manager: Any) -> dict[str, list]:
        manual_dir = Path()
        if self.FACTS.layouts:
            try:
                manual_dir = Path(dl_manager.manual_dir)
            except AssertionError as error:
                raise MissingArchiveError(str(error)) from None
        splits = self.read_splits(self.place(manual_dir, self._scratch))
        _check_classes(splits)
        names = [name for pictures in splits.values() for name in pictures.classes]
        features: Any = self.info.features
        features["label"].names = names
        # Images are written class by class, so these counts are the labels.
        metadata: Any = self.info.metadata
        for split, pictures in splits.items():
            metadata[split] = {name: len(keys) for name, keys in pictures.classes.items()}
        labels = {name: label for label, name in enumerate(names)}
        shape = self.FACTS.image_shape
        return {split: _shards(pictures, labels, shape) for split, pictures in splits.items()}

    def _download_and_prepare(self, dl_manager: Any, download_config: Any = None) -> None:
        super()._download_and_prepare(dl_manager, download_config)
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def _scratch(self) -> Path:
        # While a data set is being prepared, data_dir is TFDS's incomplete directory, which is
        # removed if the preparation fails.
        return Path(self.data_dir) / "extracted"

    # TFDS prints these two on standard output.
    def _log_download_bytes(self) -> None:
        pass

    def _log_download_done(self) -> None:
        pass


class _LocalInfo(tfds.core.DatasetInfo):
    def initialize_from_bucket(self) -> None:
        """Looks nothing up: these data sets are on no server."""


def _check_classes(splits: dict[str, Pictures]) -> None:
    seen: dict[str, str] = {}
    for split, pictures in splits.items():
        source = pictures.source
        if not pictures.classes:
            raise DamagedArchiveError(f"{source} has no classes for the split {split}")
        for name, keys in pictures.classes.items():
            if not keys:
                raise DamagedArchiveError(
                    f"{source} names the class {name!r}, of which there are no images"
                )
            if name in seen:
                raise DamagedArchiveError(
                    f"{source} names the class {name!r}, which is also in {seen[name]}"
                )
            seen[name] = str(source)


def _shards(pictures: Pictures, labels: dict[str, int], shape: tuple[int, int, int]) -> list:
    """For every record file a function that gives its records; TFDS calls them in order."""
    total = sum(len(keys) for keys in pictures.classes.values())
    records = enumerate(_records(pictures, labels, shape))
    return [lambda: itertools.islice(records, _SHARD) for _ in range(0, total, _SHARD)]


def _records(
    pictures: Pictures, labels: dict[str, int], shape: tuple[int, int, int]
) -> Iterator[dict[str, Any]]:
    read = pictures.open()

    def record(item: tuple[str, Any]) -> dict[str, Any]:
        name, key = item
        return {"image": io.BytesIO(to_png(read(key), shape)), "label": labels[name]}

    items = ((name, key) for name, keys in pictures.classes.items() for key in keys)
    # Pillow lets other threads run while it decodes, resizes and encodes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while chunk := list(itertools.islice(items, 256)):
            yield from pool.map(record, chunk)
