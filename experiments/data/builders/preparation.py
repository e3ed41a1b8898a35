"""Writing a data set's records once, whichever process comes first."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TypeVar

import tensorflow_datasets as tfds
from tensorflow_datasets.core import constants

from experiments.data.archives import DamagedArchiveError
from experiments.data.builders.frame import ImageBuilder
from experiments.files import exclusive

_log = logging.getLogger(__name__)

_Builder = TypeVar("_Builder", bound=ImageBuilder)


def prepare(
    cls: type[_Builder], *, data_dir: Path | None = None, manual_dir: Path | None = None
) -> _Builder:
    """Writes a data set's records if they are not there.

    Several processes may call this at once: one prepares, the others wait. The records appear
    under their name when they are complete, so an interrupted preparation leaves nothing that
    could be taken for data.

    Args:
        cls: The data set's builder.
        data_dir: Where prepared data sets are kept; by default TFDS's, ~/tensorflow_datasets.
        manual_dir: Where downloaded archives lie; by default `downloads/manual` in `data_dir`.

    Returns:
        The builder of the prepared data set.

    Raises:
        MissingArchiveError: The archives are not there; the message says which files go where.
        DamagedArchiveError: An archive, or the prepared data, is damaged; the message names the
            file.
    """
    builder = make_builder(cls, data_dir)
    if is_prepared(builder):
        return builder
    manual_dir = manual_root(data_dir, manual_dir)
    # Before anything is written, and before TFDS, whose message names no files.
    cls.check_source(cls.place(manual_dir, manual_dir))
    folder = Path(builder.data_dir).parent
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / ".lock", wait=True) as alone:
        builder = make_builder(cls, data_dir)
        if is_prepared(builder):
            return builder
        if alone:
            for leftover in folder.glob("incomplete.*"):
                shutil.rmtree(leftover, ignore_errors=True)
        _log.info("preparing %s in %s", cls.name, builder.data_dir)
        try:
            _generate(builder, manual_dir)
        except OSError:
            # Without a lock another process may have been faster; its records are as good.
            if not is_prepared(make_builder(cls, data_dir)):
                raise
    return make_builder(cls, data_dir)


def make_builder(cls: type[_Builder], data_dir: Path | None = None) -> _Builder:
    """A builder that knows what is prepared at this moment.

    Args:
        cls: The data set's builder.
        data_dir: Where prepared data sets are kept; by default TFDS's.

    Returns:
        The builder.

    Raises:
        DamagedArchiveError: The prepared data cannot be read.
    """
    try:
        return cls(data_dir=str(data_root(data_dir)))
    except Exception as error:
        # The readers of TFDS's files raise nearly anything when one is damaged.
        raise DamagedArchiveError(
            f"{location(cls, data_dir)} cannot be read ({type(error).__name__}: {error}); delete "
            "that folder, and it is prepared again"
        ) from error


def data_root(data_dir: Path | None = None) -> Path:
    """Where prepared data sets are kept: what was given, or TFDS's default."""
    return Path(data_dir or constants.DATA_DIR).expanduser()


def location(cls: type[ImageBuilder], data_dir: Path | None = None) -> Path:
    """The folder in which a data set is or will be prepared."""
    return data_root(data_dir) / cls.name / str(cls.VERSION)


def manual_root(data_dir: Path | None = None, manual_dir: Path | None = None) -> Path:
    """Where downloaded archives lie: what was given, or TFDS's `downloads/manual`."""
    return Path(manual_dir or data_root(data_dir) / "downloads" / "manual").expanduser()


def is_prepared(builder: ImageBuilder) -> bool:
    """Whether a data set's records are there, all of them.

    Args:
        builder: Its builder, just made.

    Returns:
        True if they are, False if there are none.

    Raises:
        DamagedArchiveError: Some are missing.
    """
    folder = Path(builder.data_dir)
    if not folder.exists():
        return False
    info = builder.info
    missing = [split for split in builder.FACTS.classes if split not in info.splits]
    if not missing:
        files = [path for split in builder.FACTS.classes for path in info.splits[split].filepaths]
        missing = [Path(path).name for path in files if not Path(path).exists()]
    if missing or not set(builder.FACTS.classes) <= set(info.metadata or ()):
        raise DamagedArchiveError(
            f"{folder} is not a complete data set ({', '.join(missing) or 'metadata'} missing); "
            "delete that folder, and it is prepared again"
        )
    return True


def _generate(builder: ImageBuilder, manual_dir: Path) -> None:
    config = tfds.download.DownloadConfig(manual_dir=str(manual_dir), try_download_gcs=False)
    tfds.disable_progress_bar()
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        builder.download_and_prepare(download_config=config, file_format="array_record")
    finally:
        logger.setLevel(level)
