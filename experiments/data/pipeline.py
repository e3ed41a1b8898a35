"""From a data set's name to its images: prepared on first use, read once or batch by batch."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import psutil
import tensorflow_datasets as tfds
from PIL import Image

from experiments.data.archives import DamagedArchiveError
from experiments.data.builders import builder_class
from experiments.data.builders.frame import ImageBuilder
from experiments.data.builders.kinds import FewShotBuilder
from experiments.data.builders.preparation import prepare
from experiments.errors import ConfigError

_T = TypeVar("_T")
_MEMORY_LIMIT = 8 * 2**30
"""Bytes of a split's pixels that are read into memory at once, at most."""


class ImageTable(Protocol):
    """Images by index: an array in memory, or records read when they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, height, width, channels)."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """uint8."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class ImageSet:
    """The images of one split, in an order that is the same on every machine."""

    images: ImageTable
    """uint8 [n, h, w, c]; `images[indices]` reads those of an int array [k]."""
    labels: np.ndarray
    """int32 [n], 0 to C−1 within the split, ascending; or, where an image has any number of
    labels, int8 [n, C]: 1, 0, or −1 where that is unknown."""
    class_names: tuple[str, ...]
    """The name of every label."""


class RecordImages:
    """Images read from the record files when they are asked for.

    Args:
        source: A TFDS data source, images encoded.
        image_shape: Height, width and channels.
        folder: Where the record files are, for messages.
        rows: int [n], which records, in which order; all by default.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self,
        source: Any,
        image_shape: tuple[int, int, int],
        folder: Path,
        rows: np.ndarray | None = None,
    ):
        self._source = source
        self._folder = folder
        self._rows = np.arange(len(source)) if rows is None else rows
        self.shape = (len(self._rows), *image_shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        rows = self._rows[index]
        images = np.empty((rows.size, *self.shape[1:]), self.dtype)
        with _damage_named(self._folder):
            _read(self._source, rows.ravel().tolist(), images)
        return images.reshape(*rows.shape, *self.shape[1:])


def batches(read: Callable[[int], _T], first: int, last: int, *, ahead: bool) -> Iterator[_T]:
    """The batches of the steps from `first` up to `last`, in order.

    Args:
        read: A batch, by the number of its step.
        first: Where to begin.
        last: Where to end; not a step any more.
        ahead: Read two before they are asked for, in a thread of Grain's, so that a step need not
            wait for its images. What `read` raises is raised when its batch is asked for.
    """
    if not ahead:
        return map(read, range(first, last))
    import grain  # With it comes JAX, which nothing else about data takes.

    steps = grain.MapDataset.range(first, last).map(read)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(steps.to_iter_dataset(options))


def class_counts(
    name: str, *, data_dir: Path | None = None, manual_dir: Path | None = None
) -> dict[str, np.ndarray]:
    """How many images every class has; prepares the data set before if that has not been done.

    Args:
        name: The data set.
        data_dir: As in `load_split`.
        manual_dir: As in `load_split`.

    Returns:
        For every split int64 [C], in the order of its labels; where an image has any number of
        labels, how many images have each.

    Raises:
        ConfigError: There is no such data set.
        MissingArchiveError: As in `load_split`.
        DamagedArchiveError: As in `load_split`.
    """
    builder = prepare(builder_class(name), data_dir=data_dir, manual_dir=manual_dir)
    metadata: dict[str, dict[str, int]] = builder.info.metadata  # pyright: ignore
    return {
        split: np.array(list(metadata[split].values()), np.int64) for split in builder.FACTS.classes
    }


def load_targets(
    name: str, split: str, *, data_dir: Path | None = None, manual_dir: Path | None = None
) -> np.ndarray:
    """The labels of images that have any number of them, without reading an image.

    Args:
        name: The data set.
        split: As in `load_split`.
        data_dir: As in `load_split`.
        manual_dir: As in `load_split`.

    Returns:
        int8 [n, C]: 1, 0, or −1 where that is unknown; in the order of `load_split`.

    Raises:
        ConfigError: There is no such data set or split.
        MissingArchiveError: As in `load_split`.
        DamagedArchiveError: As in `load_split`.
    """
    builder = _prepared(name, split, data_dir, manual_dir)
    return _labels(builder, split)[0]


def load_split(
    name: str,
    split: str,
    *,
    rows: np.ndarray | None = None,
    data_dir: Path | None = None,
    manual_dir: Path | None = None,
    memory_limit: int | None = None,
) -> ImageSet:
    """Reads a split, and prepares the data set before if that has not been done.

    Args:
        name: The data set.
        split: `base`, `validation` or `novel` of a few-shot set; `train`, `validation` or `test`
            of another, or several of these, as in `train+validation`. In several splits of a
            few-shot set, which differ in classes, the classes follow each other.
        rows: int [k], which images of the split, in which order; no other image is read. All by
            default.
        data_dir: Where prepared data sets are kept; by default TFDS's, ~/tensorflow_datasets.
        manual_dir: Where downloaded archives lie; by default `downloads/manual` in `data_dir`.
        memory_limit: Bytes of pixels up to which the images are read into memory at once; of a
            larger split, each is read when it is asked for. By default a quarter of the memory that
            is available, but not more than 8 GiB.

    Returns:
        Images, labels and class names.

    Raises:
        ConfigError: There is no such data set, or it has no such split.
        MissingArchiveError: It is not prepared and its archives are not there; the message says
            which files go where.
        DamagedArchiveError: An archive, or the prepared data, is damaged; the message names the
            file.
    """
    builder = _prepared(name, split, data_dir, manual_dir)
    folder = Path(builder.data_dir)
    labels, class_names = _labels(builder, split)
    encoded = {"image": tfds.decode.SkipDecoding()}
    with _damage_named(folder):
        source = builder.as_data_source(split=split, decoders=encoded)  # pyright: ignore
        if len(source) != len(labels):
            raise RuntimeError(f"{len(source)} images of {split}, but {len(labels)} labels")
    order = np.arange(len(labels))
    if "+" in split and labels.ndim == 1:
        order = np.argsort(labels, kind="stable")
    if rows is not None:
        order = order[rows]
    labels = labels[order]
    images = RecordImages(source, builder.FACTS.image_shape, folder, order)
    if memory_limit is None:
        memory_limit = min(psutil.virtual_memory().available // 4, _MEMORY_LIMIT)
    if np.prod(images.shape) <= memory_limit:
        images = images[:]
    return ImageSet(images, labels, class_names)


def _prepared(
    name: str, split: str, data_dir: Path | None, manual_dir: Path | None
) -> ImageBuilder:
    """The builder of a data set that has the split, prepared."""
    cls = builder_class(name)
    parts = split.split("+")
    unknown = [part for part in parts if part not in cls.FACTS.classes]
    if unknown:
        raise ConfigError(
            f"{name} has no split {unknown[0]!r}; it has {', '.join(cls.FACTS.classes)}"
        )
    if len(set(parts)) < len(parts):
        raise ConfigError(f"{split!r}: a split comes twice")
    return prepare(cls, data_dir=data_dir, manual_dir=manual_dir)


def _labels(builder: ImageBuilder, split: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """The labels of a split, in the order of its records, and their names."""
    parts = split.split("+")
    metadata: dict[str, dict[str, int]] = builder.info.metadata  # pyright: ignore
    return _join(
        [builder.read_labels(Path(builder.data_dir), part, metadata) for part in parts],
        [tuple(metadata[part]) for part in parts],
        apart=isinstance(builder, FewShotBuilder),
    )


def _join(
    labels: list[np.ndarray], names: list[tuple[str, ...]], *, apart: bool
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The labels of several splits as those of one, and their names.

    Args:
        labels: Those of every split.
        names: Those of every split.
        apart: Whether the splits differ in classes; then these follow each other.
    """
    if not apart:
        return np.concatenate(labels), names[0]
    first = np.cumsum([0, *map(len, names)]).tolist()
    shifted = [of + start for of, start in zip(labels, first, strict=False)]
    return np.concatenate(shifted, dtype=np.int32), tuple(name for of in names for name in of)


@contextlib.contextmanager
def _damage_named(folder: Path) -> Iterator[None]:
    try:
        yield
    # The reader of record files finds most damage; some comes as records without an image.
    except (RuntimeError, OSError, ValueError, KeyError, SyntaxError) as error:
        raise DamagedArchiveError(
            f"{folder} is damaged ({error}); delete that folder, and it is prepared again"
        ) from error


def _read(source: Any, rows: list[int], out: np.ndarray, chunk: int = 1024) -> None:
    """Decodes records into an array, in all threads."""

    def decode(row: int, record: dict[str, Any]) -> None:
        with Image.open(io.BytesIO(record["image"])) as image:
            out[row] = np.asarray(image).reshape(out.shape[1:])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(rows), chunk):
            records = source.__getitems__(rows[start : start + chunk])
            list(pool.map(decode, range(start, start + len(records)), records))
