"""From a data set's name to its images in memory: prepared on first use, read once."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from experiments.data.archives import DamagedArchiveError
from experiments.data.builders import builder_class
from experiments.data.builders.few_shot import FewShotBuilder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_log = logging.getLogger(__name__)


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
    """int32 [n], 0 to C−1 within the split, ascending."""
    class_names: tuple[str, ...]
    """The name of every label."""


class RecordImages:
    """Images read from the record files when they are asked for.

    Args:
        source: The TFDS data source of one split, images encoded.
        image_shape: Height, width and channels.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, source: Any, image_shape: tuple[int, int, int]):
        self._source = source
        self._rows = np.arange(len(source))
        self.shape = (len(source), *image_shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        rows = self._rows[index]
        images = np.empty((rows.size, *self.shape[1:]), self.dtype)
        _read(self._source, rows.ravel().tolist(), images)
        return images.reshape(*rows.shape, *self.shape[1:])


def load_split(
    name: str,
    split: str,
    *,
    data_dir: Path | None = None,
    manual_dir: Path | None = None,
    memory_limit: int = 8 * 2**30,
) -> ImageSet:
    """Reads a split, and prepares the data set before if that has not been done.

    Args:
        name: The data set.
        split: `base`, `validation` or `novel`.
        data_dir: Where prepared data sets are kept; by default TFDS's, ~/tensorflow_datasets.
        manual_dir: Where downloaded archives lie; by default `downloads/manual` in `data_dir`.
        memory_limit: Bytes of pixels up to which the images are read into memory at once; of a
            larger split, each is read when it is asked for.

    Returns:
        Images, labels and class names.

    Raises:
        ValueError: There is no such data set, or it has no such split.
        MissingArchiveError: It is not prepared and its archives are not there; the message says
            which files go where.
        DamagedArchiveError: An archive, or the prepared data, is damaged; the message names the
            file.
    """
    splits = builder_class(name).FACTS.classes
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}; it has {', '.join(splits)}")
    builder = prepare(name, data_dir=data_dir, manual_dir=manual_dir)
    counts: dict[str, int] = builder.info.metadata[split]  # pyright: ignore
    labels = np.repeat(np.arange(len(counts), dtype=np.int32), list(counts.values()))
    with _quiet():
        source = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
    if len(source) != len(labels):
        raise DamagedArchiveError(
            f"{builder.data_dir} holds {len(source)} images of {split}, but names {len(labels)}; "
            "delete that folder, and it is prepared again"
        )
    images = RecordImages(source, builder.FACTS.image_shape)
    if np.prod(images.shape) <= memory_limit:
        images = images[:]
    return ImageSet(images, labels, tuple(counts))


def prepare(
    name: str, *, data_dir: Path | None = None, manual_dir: Path | None = None
) -> FewShotBuilder:
    """Writes a data set's records if they are not there.

    Several processes may call this at once: one prepares, the others wait. The records appear
    under their name when they are complete, so an interrupted preparation leaves nothing that
    could be taken for data.

    Args:
        name: The data set.
        data_dir: Where prepared data sets are kept; by default TFDS's, ~/tensorflow_datasets.
        manual_dir: Where downloaded archives lie; by default `downloads/manual` in `data_dir`.

    Returns:
        The builder of the prepared data set.

    Raises:
        ValueError: There is no such data set.
        MissingArchiveError: The archives are not there; the message says which files go where.
        DamagedArchiveError: An archive, or the prepared data, is damaged; the message names the
            file.
    """
    builder = _builder(name, data_dir)
    if is_prepared(builder):
        return builder
    folder = Path(builder.data_dir).parent
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder / ".lock") as alone:
        if not is_prepared(builder):
            if alone:
                for leftover in folder.glob("incomplete.*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            _log.info("preparing %s in %s", name, builder.data_dir)
            _generate(builder, manual_dir or default_manual_dir(builder))
    return _builder(name, data_dir)


def is_prepared(builder: FewShotBuilder) -> bool:
    """Whether a data set's records are there, all of them.

    Args:
        builder: Its builder.

    Returns:
        True if they are, False if there are none.

    Raises:
        DamagedArchiveError: Some are missing.
    """
    folder = Path(builder.data_dir)
    if not folder.exists():
        return False
    try:
        fresh = type(builder)(data_dir=str(builder.data_dir_root))
        files = [
            Path(path)
            for split in builder.FACTS.classes
            for path in fresh.info.splits[split].filepaths
        ]
        if all(split in (fresh.info.metadata or {}) for split in builder.FACTS.classes) and all(
            path.exists() for path in files
        ):
            return True
    except (KeyError, OSError, ValueError):
        pass
    raise DamagedArchiveError(
        f"{folder} is not a complete data set; delete that folder, and it is prepared again"
    )


def default_manual_dir(builder: FewShotBuilder) -> Path:
    """Where downloaded archives are looked for if no other directory is given."""
    return Path(builder.data_dir_root) / "downloads" / "manual"


def _builder(name: str, data_dir: Path | None) -> FewShotBuilder:
    cls = builder_class(name)
    with _quiet():
        return cls(data_dir=None if data_dir is None else str(Path(data_dir).expanduser()))


def _generate(builder: FewShotBuilder, manual_dir: Path) -> None:
    if builder.FACTS.layouts:
        # Before TFDS does it, whose message would not name the missing files.
        builder.choose_layout(builder.place(manual_dir, manual_dir))
    config = tfds.download.DownloadConfig(manual_dir=str(manual_dir), try_download_gcs=False)
    try:
        with _quiet():
            builder.download_and_prepare(download_config=config, file_format="array_record")
    except OSError:
        # Without a lock another process may have been faster; its records are as good.
        if not is_prepared(builder):
            raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and log lines of TFDS."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    tfds.disable_progress_bar()
    try:
        yield
    finally:
        tfds.enable_progress_bar()
        logger.setLevel(level)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Waits until no other process is here; False where the system has no such lock."""
    with contextlib.ExitStack() as stack:
        locked = False
        if fcntl is not None:
            with contextlib.suppress(OSError):
                file = stack.enter_context(open(path, "w"))
                fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, or by death
                locked = True
        yield locked


def _read(source: Any, rows: list[int], out: np.ndarray, chunk: int = 1024) -> None:
    """Decodes records into an array, in all threads."""

    def decode(row: int, record: dict[str, Any]) -> None:
        with Image.open(io.BytesIO(record["image"])) as image:
            out[row] = np.asarray(image).reshape(out.shape[1:])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(rows), chunk):
            records = source.__getitems__(rows[start : start + chunk])
            list(pool.map(decode, range(start, start + len(records)), records))
