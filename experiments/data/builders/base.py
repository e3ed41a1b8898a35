"""The base of all builders: images in, record files in a fixed order out."""

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

from experiments.data.builders.archives import MissingArchiveError
from experiments.data.builders.images import LONGEST, Encoding, encode
from experiments.data.builders.layouts import Layout, SearchPath

# Images per record file. TFDS keeps the encoded images of one file in memory.
_IMAGES_PER_FILE = 4096


@dataclass(frozen=True)
class DatasetSpec:
    """The properties of a data set that are known before it is prepared."""

    description: str
    """One line."""
    image_shape: tuple[int, int, int]
    """Height, width and channels of the stored images. Of `whole` ones, both are the largest
    length of the shorter side."""
    classes: dict[str, int]
    """The published number of classes in every split."""
    homepage: str
    citation: str = ""
    resizable: bool = False
    """Whether the images can be stored at another size."""
    whole: bool = False
    """Whether the images have different sizes and are stored uncropped: see `encode`."""
    mean: tuple[float, ...] = ()
    """Mean of the pixel values in [0, 1] of every channel, where it is measured."""
    std: tuple[float, ...] = ()
    """Their standard deviation."""
    version: str = "1.0.0"
    """Of what is stored. A higher one where the same files would now give other images or classes;
    what earlier versions prepared is refused."""
    encoding: Encoding = "png"
    """How images are stored: lossless, or as JPEG with a third of the bytes."""
    background: str = "white"
    """The colour that transparent images are laid on."""
    bits: int = 16
    """How many bits count in greys of 16 bits; see `read_image`."""
    folders: tuple[str, ...] = (".",)
    """Where in the manual directory the files may be: names of the data set's own folder, and `.`
    for the directory itself."""
    layouts: tuple[Layout, ...] = ()
    """The supported layouts. Empty if the data set is part of the project or of a package."""

    @property
    def array_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an array that holds any of the images."""
        height, width, channels = self.image_shape
        return height, LONGEST * width if self.whole else width, channels

    @property
    def own_folders(self) -> tuple[str, ...]:
        """Possible names of the data set's own folder."""
        return tuple(name for name in self.folders if name != ".")


photograph_spec = functools.partial(
    DatasetSpec,
    image_shape=(256, 256, 3),
    resizable=True,
    whole=True,
    version="4.0.0",
    encoding="jpeg",
)
"""The specification of photographs of any size, which are stored whole.

Version 1 had their centre squares; version 2 had no EXIF orientation, no 16-bit greys, and fewer
formats; version 3 dropped transparency.
"""


class ImageBuilder(tfds.core.ShardBasedBuilder, skip_registration=True):
    """A TFDS builder that writes images in a fixed order and reads them without TensorFlow.

    A data set is a subclass with a `SPEC`. The layouts of the specification list the images of
    every split. The three subclasses in `tasks` define the labels, and whether the splits share
    their classes.

    TFDS's `GeneratorBasedBuilder` does not fit: above one gigabyte it sorts through TensorFlow's
    file system, even with shuffling disabled.
    """

    VERSION = tfds.core.Version("1.0.0")  # That of SPEC, in a data set.
    SPEC: ClassVar[DatasetSpec]

    def __init_subclass__(cls, **kwargs: Any):
        # The explicit table `BUILDERS` is the only registry.
        super().__init_subclass__(skip_registration=True, **kwargs)
        if hasattr(cls, "SPEC"):  # A data set, not one of the classes in `tasks`.
            cls.MANUAL_DOWNLOAD_INSTRUCTIONS = cls.instructions()
            cls.VERSION = tfds.core.Version(cls.SPEC.version)

    @classmethod
    def typed(cls) -> str:
        """The name as the command line takes it."""
        return cls.name.replace("_at_", "@")

    @classmethod
    def details(cls) -> list[str]:
        """Lines on what is known before the data is prepared, for `datasets NAME`; none here."""
        return []

    @classmethod
    def remarks(cls) -> list[str]:
        """Sentences on what is odd in the data, for the log and the report of a run; none here."""
        return []

    @classmethod
    def instructions(cls) -> str | None:
        """The required files of every layout; None if the data set needs no files."""
        if not cls.SPEC.layouts:
            return None
        own = [f"{name}/" for name in cls.SPEC.own_folders]
        where = "its " + ("own folder, named " if len(own) > 1 else "") + " or ".join(own)
        if "." in cls.SPEC.folders:
            where = f"that directory or in {where}"
        lines = [f"It needs one of the following, in {where}:"]
        return "\n- ".join([*lines, *(layout.describe() for layout in cls.SPEC.layouts)])

    @classmethod
    def search_path(cls, manual_dir: Path, scratch: Path) -> SearchPath:
        """The folders in which the files of the data set are looked up.

        Args:
          manual_dir: The directory of downloaded archives.
          scratch: Where archives are extracted.

        Returns:
          The search path.
        """
        folders = tuple(manual_dir / name for name in cls.SPEC.folders)
        return SearchPath(folders, scratch, cls.SPEC.own_folders)

    @classmethod
    def choose_layout(cls, search_path: SearchPath) -> Layout:
        """The first layout whose files all exist.

        Args:
          search_path: Where to look.

        Returns:
          The layout.

        Raises:
          MissingArchiveError: No layout is complete. The message lists the files and folders.
        """
        partial = []
        for layout in cls.SPEC.layouts:
            missing = layout.missing(search_path)
            if not missing:
                return layout
            if layout.is_partial(search_path):
                partial.append(f"Missing for {layout.title}: {'; '.join(missing)}.")
        folders = search_path.folders[-1:] if "." in cls.SPEC.folders else search_path.folders
        where = " or ".join(map(str, folders))
        absent = "not all" if partial else "not"
        message = f"{cls.name} is not prepared, and its files are {absent} in {where}."
        raise MissingArchiveError("\n".join([message, cls.instructions() or "", *partial]))

    @classmethod
    def check_source(cls, search_path: SearchPath) -> None:
        """Raises unless all required files exist. Does not read them.

        Args:
          search_path: Where the archives are looked up.

        Raises:
          MissingArchiveError: A file is missing. The message lists the files and folders.
        """
        if cls.SPEC.layouts:
            cls.choose_layout(search_path)

    def read_splits(self, search_path: SearchPath) -> Mapping[str, Any]:
        """Lists the images of every split, from the first complete layout.

        Args:
          search_path: Where the archives are.

        Returns:
          For every split a `ClassSplit` or `MultiLabelSplit`.

        Raises:
          MissingArchiveError: No layout is complete.
          DamagedArchiveError: A file is unreadable, or its content is not as expected.
        """
        return self.choose_layout(search_path).read(search_path)

    # --- Defined by the classes in `tasks` ------------------------------------------------------

    @classmethod
    def label_feature(cls) -> tuple[str, Any]:
        """The name and the TFDS feature of a record's label."""
        raise NotImplementedError

    @classmethod
    def check_splits(cls, splits: Mapping[str, Any]) -> None:
        """Raises DamagedArchiveError unless the splits are consistent."""
        raise NotImplementedError

    @classmethod
    def class_names(cls, splits: Mapping[str, Any]) -> list[str]:
        """The names of all labels."""
        raise NotImplementedError

    @classmethod
    def class_counts(cls, split: Any) -> dict[str, int]:
        """The number of images of every class in a split, for the metadata."""
        raise NotImplementedError

    @classmethod
    def labelled_keys(cls, split: Any, names: list[str]) -> list[tuple[Any, Any]]:
        """The key and the label of every image of a split, in the order of the records."""
        raise NotImplementedError

    @classmethod
    def write_targets(cls, folder: Path, splits: Mapping[str, Any]) -> None:
        """Writes labels that `read_labels` cannot derive from the metadata; none by default."""

    @classmethod
    def read_labels(
        cls, folder: Path, split: str, metadata: Mapping[str, Mapping[str, int]]
    ) -> np.ndarray:
        """Reads the labels of a split without its records.

        Args:
          folder: The folder of the prepared data set.
          split: The split.
          metadata: The class counts of every split.

        Returns:
          The labels as in `ImageSet.labels`, in the order of the records.

        Raises:
          DamagedArchiveError: The labels cannot be read.
        """
        # Images are written class by class.
        counts = list(metadata[split].values())
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    # --- Called by TFDS -------------------------------------------------------------------------

    def _info(self) -> tfds.core.DatasetInfo:
        name, feature = self.label_feature()
        height, width, channels = self.SPEC.image_shape
        if self.SPEC.whole:
            height = width = None
        return _LocalInfo(
            builder=self,
            description=self.SPEC.description,
            homepage=self.SPEC.homepage,
            citation=self.SPEC.citation,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(
                        shape=(height, width, channels),
                        dtype=np.uint8,
                        encoding_format=self.SPEC.encoding,
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
        if self.SPEC.layouts:
            try:
                manual_dir = Path(dl_manager.manual_dir)
            except AssertionError as error:
                # Absent or empty. The files may be where a package has put them.
                manual_dir = self._scratch
                try:
                    self.check_source(self.search_path(manual_dir, self._scratch))
                except MissingArchiveError:
                    raise MissingArchiveError(str(error)) from None
        splits = self.read_splits(self.search_path(manual_dir, self._scratch))
        self.check_splits(splits)
        names = self.class_names(splits)
        self.set_class_names(names)
        metadata: Any = self.info.metadata
        for name, split in splits.items():
            metadata[name] = self.class_counts(split)
        self.write_targets(Path(self.data_dir), splits)
        return {name: self._shards(split, names) for name, split in splits.items()}

    def set_class_names(self, names: list[str]) -> None:
        """Stores the class names in the label's feature."""
        features: Any = self.info.features
        features[self.label_feature()[0]].names = names

    def _shards(self, split: Any, names: list[str]) -> list:
        """For every record file a function that yields its records. TFDS calls them in order."""
        items = self.labelled_keys(split, names)
        records = enumerate(self._records(split, items))
        count = -(-len(items) // _IMAGES_PER_FILE)
        return [lambda: itertools.islice(records, _IMAGES_PER_FILE)] * count

    def _records(self, split: Any, items: list[tuple[Any, Any]]) -> Iterator[dict[str, Any]]:
        read, spec, (name, _) = split.open(), self.SPEC, self.label_feature()
        how = {option: vars(spec)[option] for option in ("whole", "encoding", "background", "bits")}

        def record(item: tuple[Any, Any]) -> dict[str, Any]:
            key, label = item
            content = encode(read(key), spec.image_shape, **how)
            return {"image": io.BytesIO(content), name: label}

        rest = iter(items)
        # Pillow releases the GIL while it decodes, resizes and encodes.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            while chunk := list(itertools.islice(rest, 256)):
                yield from pool.map(record, chunk)

    def _download_and_prepare(self, dl_manager: Any, download_config: Any = None) -> None:
        super()._download_and_prepare(dl_manager, download_config)
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def _scratch(self) -> Path:
        # During preparation, data_dir is TFDS's temporary directory. TFDS removes it on failure.
        return Path(self.data_dir) / "extracted"

    # TFDS prints these two messages on standard output.
    def _log_download_bytes(self) -> None:
        pass

    def _log_download_done(self) -> None:
        pass


class _LocalInfo(tfds.core.DatasetInfo):
    def initialize_from_bucket(self) -> None:
        """Does not access the network: no server has information on these data sets."""
