"""What the builders share: pictures in, record files in a fixed order out."""

from __future__ import annotations

import functools
import io
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

from experiments.data.archives import MissingArchiveError
from experiments.data.builders.layouts import Layout, Place
from experiments.data.builders.pictures import Encoding, encode

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
    sizes: bool = False
    """Whether the images may be stored at another size."""
    margin: float = 1.1
    """The shorter side of another image becomes so many times the size before the centre is cut."""
    encoding: Encoding = "png"
    """How the images are stored: exactly, or as JPEG, at a third of the bytes."""
    requires: str = ""
    """What must be installed."""
    folders: tuple[str, ...] = (".",)
    """Where in the manual directory its files are looked for: the names of its own folder, and `.`
    for the directory itself."""
    layouts: tuple[Layout, ...] = ()
    """The forms in which it is read; none if it ships with the project."""

    @property
    def own(self) -> tuple[str, ...]:
        """The names that its own folder may have."""
        return tuple(name for name in self.folders if name != ".")


photograph_facts = functools.partial(
    Facts, image_shape=(256, 256, 3), sizes=True, margin=1.0, encoding="jpeg"
)
"""Facts of photographs of any size: stored as the largest square in their middle."""


class ImageBuilder(tfds.core.ShardBasedBuilder, skip_registration=True):
    """A TFDS builder of images, written in order and read without TensorFlow.

    A data set is its `FACTS`: the layouts in which it is found, each with a function that
    returns the images of every split. What a label is, and which splits share their classes, is
    told by its kind, one of the three in `kinds`. TFDS's `GeneratorBasedBuilder` is not used
    because beyond a gigabyte it sorts through TensorFlow's files, even with shuffling off.
    """

    VERSION = tfds.core.Version("1.0.0")
    FACTS: ClassVar[Facts]

    def __init_subclass__(cls, **kwargs: Any):
        # The explicit table `BUILDERS` is the only registry.
        super().__init_subclass__(skip_registration=True, **kwargs)
        if hasattr(cls, "FACTS"):  # not a kind of data sets
            cls.MANUAL_DOWNLOAD_INSTRUCTIONS = cls.instructions()

    @classmethod
    def instructions(cls) -> str | None:
        """Which files go where, for every layout; None if the data set needs none."""
        if not cls.FACTS.layouts:
            return None
        own = [f"{name}/" for name in cls.FACTS.own]
        where = "its " + ("own folder, called " if len(own) > 1 else "") + " or ".join(own)
        if "." in cls.FACTS.folders:
            where = f"that directory or in {where}"
        lines = [f"It takes one of these, in {where}:"]
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
        folders = tuple(manual_dir / name for name in cls.FACTS.folders)
        return Place(folders, scratch, cls.FACTS.own)

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
            if layout.begun(place):
                nearly.append(f"For {layout.title}, this is missing: {'; '.join(missing)}.")
        folders = place.folders[-1:] if "." in cls.FACTS.folders else place.folders
        where = " or ".join(map(str, folders))
        absent = "not all" if nearly else "not"
        message = f"{cls.name} is not prepared, and its files are {absent} in {where}."
        raise MissingArchiveError("\n".join([message, cls.instructions() or "", *nearly]))

    @classmethod
    def check_source(cls, place: Place) -> None:
        """Raises unless the data set can be prepared, as far as can be seen without reading.

        Args:
            place: Where the archives are looked for.

        Raises:
            MissingArchiveError: Something is not there; the message says what goes where.
        """
        if cls.FACTS.layouts:
            cls.choose_layout(place)

    def read_splits(self, place: Place) -> Mapping[str, Any]:
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

    # --- What a kind of data set says -----------------------------------------------------------

    @classmethod
    def label_feature(cls) -> tuple[str, Any]:
        """The name and the TFDS feature of a record's label."""
        raise NotImplementedError

    @classmethod
    def check(cls, splits: Mapping[str, Any]) -> None:
        """Raises DamagedArchiveError unless the splits fit together."""
        raise NotImplementedError

    @classmethod
    def class_names(cls, splits: Mapping[str, Any]) -> list[str]:
        """The names of all labels."""
        raise NotImplementedError

    @classmethod
    def counts(cls, pictures: Any) -> dict[str, int]:
        """How many images of a split every class has; goes into the metadata."""
        raise NotImplementedError

    @classmethod
    def items(cls, pictures: Any, names: list[str]) -> list[tuple[Any, Any]]:
        """The keys of a split's images, each with its label, in the order of the records."""
        raise NotImplementedError

    @classmethod
    def write_beside(cls, folder: Path, splits: Mapping[str, Any]) -> None:
        """Writes what is kept beside the records; nothing by default."""

    @classmethod
    def read_labels(
        cls, folder: Path, split: str, metadata: Mapping[str, Mapping[str, int]]
    ) -> np.ndarray:
        """The labels of a split, in the order of its records, without reading these.

        Args:
            folder: Where the data set is prepared.
            split: The split.
            metadata: The counts of every split.

        Returns:
            What `ImageSet.labels` is.

        Raises:
            DamagedArchiveError: They cannot be read.
        """
        # Images are written class by class.
        counts = list(metadata[split].values())
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    # --- What TFDS asks for ---------------------------------------------------------------------

    def _info(self) -> tfds.core.DatasetInfo:
        name, feature = self.label_feature()
        return _LocalInfo(
            builder=self,
            description=self.FACTS.description,
            homepage=self.FACTS.homepage,
            citation=self.FACTS.citation,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(
                        shape=self.FACTS.image_shape,
                        dtype=np.uint8,
                        encoding_format=self.FACTS.encoding,
                    ),
                    name: feature,
                }
            ),
            supervised_keys=("image", name),
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
        self.check(splits)
        names = self.class_names(splits)
        self.name_classes(names)
        metadata: Any = self.info.metadata
        for split, pictures in splits.items():
            metadata[split] = self.counts(pictures)
        self.write_beside(Path(self.data_dir), splits)
        return {split: self._shards(pictures, names) for split, pictures in splits.items()}

    def name_classes(self, names: list[str]) -> None:
        """Tells the label's feature its names, which are in the archives."""
        features: Any = self.info.features
        features[self.label_feature()[0]].names = names

    def _shards(self, pictures: Any, names: list[str]) -> list:
        """For every record file a function that gives its records; TFDS calls them in order."""
        items = self.items(pictures, names)
        records = enumerate(self._records(pictures, items))
        return [lambda: itertools.islice(records, _SHARD) for _ in range(0, len(items), _SHARD)]

    def _records(self, pictures: Any, items: list[tuple[Any, Any]]) -> Iterator[dict[str, Any]]:
        read, facts, (name, _) = pictures.open(), self.FACTS, self.label_feature()

        def record(item: tuple[Any, Any]) -> dict[str, Any]:
            key, label = item
            content = encode(
                read(key), facts.image_shape, margin=facts.margin, encoding=facts.encoding
            )
            return {"image": io.BytesIO(content), name: label}

        rest = iter(items)
        # Pillow lets other threads run while it decodes, resizes and encodes.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            while chunk := list(itertools.islice(rest, 256)):
                yield from pool.map(record, chunk)

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
