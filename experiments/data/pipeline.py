"""Loading data sets by name: prepared on first use, read at once or batch by batch."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import tensorflow_datasets as tfds
from PIL import Image

from experiments.core.errors import ConfigError
from experiments.core.protocol import ImageSet, Photographs
from experiments.datasets import lookup
from experiments.datasets.archives import DamagedArchiveError, readable
from experiments.datasets.files import is_image, left_out, list_files
from experiments.datasets.images import SourceImage, of_every_image
from experiments.datasets.preparation import Prepared, prepare, read_labels

_log = logging.getLogger(__name__)

_MEMORY_LIMIT = 8 * 2**30
"""Default upper limit of the pixels of a split in memory, in bytes."""
_DAMAGE = (RuntimeError, OSError, ValueError, KeyError, SyntaxError, Image.DecompressionBombError)
"""The record reader detects most damage; the rest yields records without a readable image."""


class RecordImages:
    """Images that are read from the record files when they are indexed.

    They are the records `rows`, int [n], of a TFDS data source with encoded images; `folder` is for
    messages. Those of different sizes are `Photographs`.
    """

    def __init__(self, source: Any, spec: Any, folder: Path, rows: np.ndarray):
        self._source, self._folder, self._rows, self._whole = source, folder, rows, spec.whole
        self.shape = (len(self._rows), *spec.array_shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        rows = self._rows[index]
        images = np.zeros((rows.size, *self.shape[1:]), np.uint8)
        sizes = np.zeros((rows.size, 2), np.int32) if self._whole else None
        flat = rows.ravel().tolist()
        # Images that a thread decodes at once. Each call of `__getitems__` starts threads of its
        # own.
        chunk = min(max(len(flat) // 64, 8), 128)

        def decode(start: int) -> None:
            records = self._source.__getitems__(flat[start : start + chunk])
            for row, record in enumerate(records, start):
                encoded = io.BytesIO(record["image"])
                with Image.open(encoded, formats=("PNG", "JPEG")) as image:
                    if max(image.size) > max(self.shape[1:3]):
                        raise ValueError(f"it has an image of {image.width}×{image.height} pixels")
                    pixels = np.asarray(image).reshape(image.height, image.width, -1)
                if sizes is None:
                    images[row] = pixels
                    continue
                sizes[row] = height, width = pixels.shape[:2]
                if height > width:
                    pixels = pixels.swapaxes(0, 1)
                images[row, : len(pixels), : pixels.shape[1]] = pixels

        with _naming_damage(self._folder), ThreadPoolExecutor() as pool:
            list(pool.map(decode, range(0, len(flat), chunk)))
        shaped = images.reshape(*rows.shape, *self.shape[1:])
        return shaped if sizes is None else Photographs(shaped, sizes.reshape(*rows.shape, 2))


def stored_counts(
    name: str, *, data_dir: Path | None = None, manual_dir: Path | None = None
) -> dict[str, np.ndarray]:
    """The number of images of every class or label: int64 [C] by split; as `load_split` else."""
    counts = prepare(lookup(name), data_dir=data_dir, manual_dir=manual_dir).counts
    return {split: np.array([*of.values()], np.int64) for split, of in counts.items()}


def load_labels(
    name: str, split: str, *, data_dir: Path | None = None, manual_dir: Path | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels in the order of the records, and class names; as `load_split`, but reads no images."""
    return _labelled(name, split, data_dir, manual_dir)[1:]


def load_split(
    name: str,
    split: str,
    *,
    rows: np.ndarray | None = None,
    data_dir: Path | None = None,
    manual_dir: Path | None = None,
    memory_limit: int | None = None,
) -> ImageSet:
    """Loads a split. Prepares the data set if necessary.

    Args:
      split: `base`, `validation` or `novel` of a few-shot data set; `train`, `validation` or
        `test` of any other; or several, as in `train+validation`, of which few-shot sets
        concatenate the classes.
      rows: Integers [k], the images to load, in order. Default: all images.
      data_dir, manual_dir: See `Folders`.
      memory_limit: Images with up to this number of bytes of pixels are read into memory, larger
        splits when they are indexed. Default: a quarter of the available memory, at most 8 GiB.
    """
    found, labels, class_names = _labelled(name, split, data_dir, manual_dir)
    folder = found.data_dir
    encoded = {"image": tfds.decode.SkipDecoding()}
    with _naming_damage(folder):
        source = found.builder.as_data_source(split=split, decoders=encoded)  # pyright: ignore
        if len(source) != len(labels):
            raise RuntimeError(f"{len(source)} images of {split}, but {len(labels)} labels")
    order = np.arange(len(labels))
    if "+" in split and labels.ndim == 1:
        order = np.argsort(labels, kind="stable")
    order = order if rows is None else order[rows]
    labels = labels[order]
    images: Any = RecordImages(source, found.dataset, folder, order)
    if memory_limit is None:
        memory_limit = min(psutil.virtual_memory().available // 4, _MEMORY_LIMIT)
    if np.prod(images.shape) <= memory_limit:
        images = images[:]
    names = [path for part in split.split("+") for path in found.dataset.files.get(part, ())]
    files = np.array(names, object)[order] if names else None
    return ImageSet(images, labels, class_names, files)


def new_images(
    name: str,
    images: Any,
    class_names: tuple[str, ...],
    skip: Callable[[str], None] | None = None,
) -> ImageSet:
    """Images without labels, resized as those of the data set `name`.

    They are uint8 [n, h, w, 1 or 3], or paths of files and folders, one or several; of a folder,
    all images, also in its subfolders. A `DamagedArchiveError` names what cannot be read; with
    `skip`, which is called with the reasons, only where nothing can.
    """
    files, dtype = None, getattr(images, "dtype", np.dtype(object))
    if dtype.kind not in "OU":
        if dtype != np.uint8 or images.ndim != 4 or images.shape[-1] not in (1, 3):
            given = f"{dtype} {list(images.shape)}"
            raise ConfigError(f"new images must be uint8 [n, h, w, 1 or 3], or paths; got {given}")
        of = [SourceImage(row, f"image {i}") for i, row in enumerate(np.asarray(images))]
    else:
        given = [images] if isinstance(images, str | os.PathLike) else images
        files = [file for path in map(Path, given) for file in _images_of(path.expanduser())]
        of = [SourceImage(file, readable(file)) for file in files]
        files = np.array([str(file) for file in files], object)
    if not of:
        raise ConfigError("there is no image; give JPEG or PNG files, or folders with some")
    dataset = lookup(name)
    numbers, one = range(len(of)), len(of) == 1
    left_out = None if skip is None or one else lambda _, reason: skip(reason)
    found = dict(of_every_image(lambda i: (i, dataset.encode(of[i])), numbers, left_out))
    if not found:
        raise DamagedArchiveError("none of the images can be read")
    files = None if files is None else files[[*found]]
    stored = [{"image": content} for content in found.values()]
    source = SimpleNamespace(__getitems__=lambda rows: [stored[row] for row in rows])
    table = RecordImages(source, dataset, Path(), np.arange(len(stored)))
    labels = np.full((len(stored), len(class_names)), -1, np.int8)
    labels = labels if dataset.multi_label else labels[:, 0].astype(np.int32)
    return ImageSet(table, labels, class_names, files)


def _images_of(path: Path) -> list[Path]:
    """The images of a folder, sorted, or the file; the log says what is left out."""
    if not path.is_dir():
        return [path]
    found = sorted(list_files(path))
    images = [file for file in found if is_image(file.name)]
    for line in left_out({*found} - {*images}, path, "file", "of other kinds"):
        _log.warning("%s: %s", readable(path), line)
    return images


def _labelled(
    name: str, split: str, data_dir: Path | None, manual_dir: Path | None
) -> tuple[Prepared, np.ndarray, tuple[str, ...]]:
    """Prepares a data set that has the split; reads its labels and class names.

    The classes of several few-shot splits are different ones, those of other splits the same.
    """
    dataset = lookup(name)
    parts, known = split.split("+"), dataset.classes
    if unknown := [part for part in parts if part not in known]:
        raise ConfigError(f"{name} has no split {unknown[0]!r}; it has {', '.join(known)}")
    if len(set(parts)) < len(parts):
        raise ConfigError(f"{split!r} contains a split twice")
    builder = prepare(dataset, data_dir=data_dir, manual_dir=manual_dir)
    labels = [read_labels(builder, part) for part in parts]
    names = [tuple(builder.counts[part]) for part in parts]
    if not dataset.few_shot:
        return builder, np.concatenate(labels), names[0]
    first = np.cumsum([0, *map(len, names)]).tolist()
    shifted = [part + start for part, start in zip(labels, first, strict=False)]
    return builder, np.concatenate(shifted, dtype=np.int32), tuple(itertools.chain(*names))


@contextlib.contextmanager
def _naming_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise DamagedArchiveError(
            f"{folder} is damaged ({error}); delete that folder to prepare the data again"
        ) from error
