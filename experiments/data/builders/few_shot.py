"""What the few-shot data sets share: archives in known layouts in, records split by class out."""

from __future__ import annotations

import io
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from experiments.data.archives import (
    DamagedArchiveError,
    MissingArchiveError,
    extract,
    load_pickle,
)

# Images in a record file. TFDS holds the encoded images of one file in memory.
_SHARD = 4096

# A larger image is reduced until its shorter side is so many times the size, then cropped.
_MARGIN = 1.1


@dataclass(frozen=True)
class Picture:
    """One image of an archive, and where it came from."""

    content: Path | bytes | np.ndarray
    """A file, an encoded image (also as an array of bytes), or pixels uint8 [h, w, c]."""
    source: str
    """Names the image in an error message."""


@dataclass(frozen=True)
class Pictures:
    """The images of one split."""

    classes: dict[str, Sequence[Any]]
    """For every class, in order, the keys of its images in order: paths, or rows of a table."""
    open: Callable[[], Callable[[Any], Picture]]
    """Opens the table; what it returns gives the image of a key."""
    source: Path | str
    """The file or folder that says which classes there are, for messages."""


def picture_files(classes: dict[str, list[Path]], source: Path) -> Pictures:
    """Images that are files of their own.

    Args:
        classes: The files of every class.
        source: The file or folder that says which classes there are.

    Returns:
        Classes and files, sorted by name.
    """
    ordered = {name: sorted(classes[name]) for name in sorted(classes)}
    return Pictures(ordered, lambda: lambda path: Picture(path, str(path)), source)


def picture_rows(
    classes: dict[str, list[int]], load: Callable[[], Sequence[Any]], source: Path
) -> Pictures:
    """Images that are rows of a table in one file.

    Args:
        classes: The rows of every class.
        load: Reads the table: pixels uint8 [n, h, w, c], or n encoded images.
        source: The file, for messages.

    Returns:
        Classes and rows, sorted.
    """
    ordered = {name: sorted(classes[name]) for name in sorted(classes)}

    def open_table() -> Callable[[int], Picture]:
        table = load()
        largest = max((row for rows in ordered.values() for row in rows), default=-1)
        if largest >= len(table):
            raise DamagedArchiveError(f"{source} names image {largest} of {len(table)}")
        return lambda row: Picture(table[row], f"{source}, image {row}")

    return Pictures(ordered, open_table, source)


def labelled_pickle(path: Path) -> Pictures:
    """Images from a pickle with `data` uint8 [n, h, w, 3] and `labels` [n].

    Classes are named by `catname2label`, where the pickle has it, or by number.

    Args:
        path: The pickle.

    Returns:
        Its classes and images.

    Raises:
        DamagedArchiveError: It is unreadable or of another form.
    """

    def load() -> tuple[np.ndarray, list[int], dict[int, str]]:
        content = entries(load_pickle(path), path, "data", "labels")
        labels = [int(label) for label in content["labels"]]
        images = pixels(content["data"], path)
        if len(labels) != len(images):
            raise DamagedArchiveError(f"{path}: {len(images)} images, {len(labels)} labels")
        named = content.get("catname2label", {})
        return images, labels, {int(label): str(name) for name, label in named.items()}

    _, labels, names = load()
    classes: dict[str, list[int]] = {}
    for row, label in enumerate(labels):
        classes.setdefault(names.get(label, f"class {label:03}"), []).append(row)
    return picture_rows(classes, lambda: load()[0], path)


def entries(content: Any, path: Path, *names: str) -> dict[str, Any]:
    """A dictionary from a file, checked to hold what is needed.

    Args:
        content: What the file held.
        path: The file, for messages.
        *names: Entries that must be there.

    Returns:
        The dictionary; names that were bytes are strings.

    Raises:
        DamagedArchiveError: It is no dictionary, or an entry is missing.
    """
    if not isinstance(content, dict):
        raise DamagedArchiveError(f"{path} holds {type(content).__name__}, not a dictionary")
    content = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in content.items()}
    missing = [name for name in names if name not in content]
    if missing:
        raise DamagedArchiveError(f"{path} has no entry {', '.join(missing)}")
    return content


def pixels(array: Any, path: Path) -> np.ndarray:
    """An array from a file, checked to be colour images.

    Args:
        array: What the file held.
        path: The file, for messages.

    Returns:
        uint8 [n, h, w, 3].

    Raises:
        DamagedArchiveError: It is something else.
    """
    array = np.asarray(array)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3:
        raise DamagedArchiveError(
            f"{path}: images should be uint8 [n, h, w, 3], not {array.dtype} {list(array.shape)}"
        )
    return array


def list_images(folder: Path) -> list[Path]:
    """The image files of a folder, without the hidden ones that some systems leave in archives."""
    suffixes = {".jpg", ".jpeg", ".png"}
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in suffixes and not path.name.startswith(".")
    )


@dataclass(frozen=True)
class Place:
    """Where a layout looks for its files."""

    folders: tuple[Path, ...]
    """Searched in this order."""
    scratch: Path
    """Archives are extracted here; removed when the data set is prepared."""

    def find(self, *names: str) -> Path | None:
        """The first that exists of some alternative files or folders.

        Args:
            *names: Paths relative to the folders.

        Returns:
            The path, or None.
        """
        for name, folder in itertools.product(names, self.folders):
            if (folder / name).exists():
                return folder / name
        return None

    def get(self, *names: str) -> Path:
        """The first that exists of some alternative files or folders.

        Args:
            *names: Paths relative to the folders.

        Returns:
            The path.

        Raises:
            MissingArchiveError: None of them exists.
        """
        path = self.find(*names)
        if path is None:
            raise MissingArchiveError(f"no {' or '.join(names)} in {self.folders[0]}")
        return path

    def folder(
        self, name: str, archives: Sequence[str], keep: Callable[[str], bool] | None = None
    ) -> Path:
        """A folder, taken from an archive if it has not been extracted.

        Args:
            name: The folder's path within this place and within the archive.
            archives: Names of the archive that may hold it.
            keep: Which members of the archive are needed; all by default.

        Returns:
            The folder.

        Raises:
            MissingArchiveError: Neither folder nor archive is there.
            DamagedArchiveError: The archive does not hold the folder.
        """
        path = self.find(name)
        if path is not None:
            return path
        archive = self.get(*archives)
        path = self.extract(archive, keep) / name
        if not path.is_dir():
            raise DamagedArchiveError(f"{archive} holds no folder {name}")
        return path

    def extract(self, archive: Path, keep: Callable[[str], bool] | None = None) -> Path:
        """The content of an archive.

        Args:
            archive: A zip or tar.
            keep: Which members are needed; all by default.

        Returns:
            A folder that is there while the data set is prepared.
        """
        return extract(archive, self.scratch / archive.name, keep=keep)


@dataclass(frozen=True)
class Layout:
    """One form in which people have a data set."""

    title: str
    """What it is, for messages."""
    needs: tuple[tuple[str, ...], ...]
    """The files or folders that must be there, each with its alternatives."""
    read: Callable[[Place], dict[str, Pictures]]
    """Finds the images of every split."""

    def describe(self) -> str:
        """The layout and its files, in one line."""
        return f"{self.title}: " + "; ".join(" or ".join(names) for names in self.needs)


class _LocalInfo(tfds.core.DatasetInfo):
    def initialize_from_bucket(self) -> None:
        """Looks nothing up: these data sets are on no server."""


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
    citation: str
    folders: tuple[str, ...] = (".",)
    """Folders of the manual directory in which its files are looked for."""
    layouts: tuple[Layout, ...] = field(default=())


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
        """Which files go where, one line a layout; None if the data set needs none."""
        if not cls.FACTS.layouts:
            return None
        folders = " or ".join(f"{name}/" for name in cls.FACTS.folders if name != ".")
        folders += " or the directory itself" if "." in cls.FACTS.folders else ""
        lines = [f"  - {layout.describe()}" for layout in cls.FACTS.layouts]
        return "\n".join([f"One of these, in {folders}:", *lines])

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
        missing = []
        for layout in cls.FACTS.layouts:
            absent = [names for names in layout.needs if place.find(*names) is None]
            if not absent:
                return layout
            if len(absent) < len(layout.needs):
                listed = "; ".join(" or ".join(names) for names in absent)
                missing.append(f"For {layout.title}, only this is missing: {listed}.")
        raise MissingArchiveError(
            "\n".join(
                [
                    f"{cls.name} is not in {place.folders[-1]}. Put there what you have.",
                    cls.instructions() or "",
                    *missing,
                ]
            )
        )

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
        _check_classes(self.name, splits)
        names = [name for pictures in splits.values() for name in pictures.classes]
        features: Any = self.info.features
        features["label"].names = names
        counts: Any = self.info.metadata
        counts.update(
            {
                split: {name: len(keys) for name, keys in pictures.classes.items()}
                for split, pictures in splits.items()
            }
        )
        labels = {name: label for label, name in enumerate(names)}
        return {
            split: _shards(pictures, labels, self.FACTS.image_shape)
            for split, pictures in splits.items()
        }

    def _download_and_prepare(self, dl_manager: Any, download_config: Any = None) -> None:
        super()._download_and_prepare(dl_manager, download_config)
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def _scratch(self) -> Path:
        # While a data set is being prepared, data_dir is TFDS's incomplete directory, which goes
        # if the preparation fails.
        return Path(self.data_dir) / "extracted"

    # TFDS prints these two on standard output.
    def _log_download_bytes(self) -> None:
        pass

    def _log_download_done(self) -> None:
        pass


def _check_classes(name: str, splits: dict[str, Pictures]) -> None:
    seen: dict[str, str] = {}
    for split, pictures in splits.items():
        if not pictures.classes:
            raise DamagedArchiveError(f"{pictures.source} has no classes ({name}, {split})")
        for label, keys in pictures.classes.items():
            if not keys:
                raise DamagedArchiveError(
                    f"{pictures.source} names the class {label!r} ({name}, {split}), "
                    "of which there are no images"
                )
            if label in seen:
                raise DamagedArchiveError(
                    f"{pictures.source} names the class {label!r} ({name}, {split}), "
                    f"which is also in {seen[label]}"
                )
            seen[label] = split


def _shards(pictures: Pictures, labels: dict[str, int], shape: tuple[int, int, int]) -> list:
    """For every record file a function that gives its records; they are called in order."""
    total = sum(len(keys) for keys in pictures.classes.values())
    records = enumerate(_records(pictures, labels, shape))
    return [lambda: itertools.islice(records, _SHARD) for _ in range(0, total, _SHARD)]


def _records(
    pictures: Pictures, labels: dict[str, int], shape: tuple[int, int, int]
) -> Iterator[dict[str, Any]]:
    read = pictures.open()

    def record(name: str, key: Any) -> dict[str, Any]:
        return {"image": io.BytesIO(to_png(read(key), shape)), "label": labels[name]}

    pairs = ((name, key) for name, keys in pictures.classes.items() for key in keys)
    # Pillow lets other threads run while it decodes, resizes and encodes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while chunk := list(itertools.islice(pairs, 256)):
            yield from pool.map(record, *zip(*chunk, strict=True))


def to_png(picture: Picture, shape: tuple[int, int, int]) -> bytes:
    """An image at the size of the data set, as PNG.

    An image of the right size stays as it is, pixel for pixel. Any other is resized until its
    shorter side is 1.1 times the size (bilinear with antialiasing), and its centre cut out.

    Args:
        picture: The image.
        shape: Height, width and channels, 1 or 3.

    Returns:
        The encoded image.

    Raises:
        DamagedArchiveError: It cannot be read; the message names it.
    """
    height, width, channels = shape
    content = picture.content
    try:
        if isinstance(content, np.ndarray) and content.ndim == 3:
            image = Image.fromarray(np.squeeze(content, -1) if channels == 1 else content)
        else:
            # OpenCV encodes to an array of bytes.
            content = content.tobytes() if isinstance(content, np.ndarray) else content
            image = Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)
        with image:
            image = image.convert("L" if channels == 1 else "RGB")
        if image.size != (width, height):
            scale = _MARGIN * max(width / image.width, height / image.height)
            enlarged = (round(image.width * scale), round(image.height * scale))
            image = image.resize(enlarged, Image.Resampling.BILINEAR)
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))
    # Pillow's readers raise SyntaxError, among others, on files that are cut off.
    except (OSError, ValueError, TypeError, SyntaxError, EOFError) as error:
        raise DamagedArchiveError(f"{picture.source} is no readable image: {error}") from error
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=3)
    return buffer.getvalue()
