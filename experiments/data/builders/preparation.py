"""Preparing a data set once, even if several processes request it."""

from __future__ import annotations

import logging
import shutil
import warnings
from pathlib import Path
from typing import Any, TypeVar

import tensorflow_datasets as tfds
from tensorflow_datasets.core import constants

from experiments.data.builders.archives import DamagedArchiveError, MissingArchiveError
from experiments.data.builders.base import ImageBuilder
from experiments.data.builders.tasks import FewShotBuilder
from experiments.errors import unreachable
from experiments.storage import exclusive, is_remote, regular, storage_path, writing

_log = logging.getLogger(__name__)

_Builder = TypeVar("_Builder", bound=ImageBuilder)


def prepare(
    cls: type[_Builder], *, data_dir: Path | None = None, manual_dir: Path | None = None
) -> _Builder:
    """Prepares a data set unless that has been done.

    Several processes may call this function at once: one prepares, the others wait. The records
    are moved to their final folder once complete, so an interrupted preparation is never mistaken
    for a prepared data set.

    Args:
      cls: The builder of the data set.
      data_dir: Folder of prepared data sets. Default: that of TFDS, ~/tensorflow_datasets.
      manual_dir: Folder of downloaded archives. Default: `downloads/manual` in `data_dir`.

    Returns:
      The builder of the prepared data set.

    Raises:
      MissingArchiveError: The archives do not exist. The message lists the files and folders.
      DamagedArchiveError: An archive or the prepared data set is damaged. The message names the
        file.
      ExperimentError: The disk is full. The message names the folder.
    """
    builder = make_builder(cls, data_dir)
    if is_prepared(builder):
        return builder
    check_preparable(cls, data_dir)
    manual_dir = manual_root(data_dir, manual_dir)
    # Before anything is written, and before TFDS, whose message names no files.
    cls.check_source(cls.search_path(manual_dir, manual_dir))
    folder = Path(builder.data_dir).parent
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder), exclusive(folder / ".lock"):
        builder = make_builder(cls, data_dir)
        if is_prepared(builder):
            return builder
        for leftover in folder.glob("incomplete.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        _log.warning("preparing %s in %s", cls.name, builder.data_dir)
        _generate(builder, manual_dir)
    return make_builder(cls, data_dir)


def make_builder(cls: type[_Builder], data_dir: Path | None = None) -> _Builder:
    """Creates a builder that reflects what is prepared at this moment.

    Args:
      cls: The builder of the data set.
      data_dir: Folder of prepared data sets. Default: that of TFDS.

    Returns:
      The builder.

    Raises:
      DamagedArchiveError: The prepared data set cannot be read.
    """
    folder = location(cls, data_dir)
    try:
        if not is_remote(folder) and folder.is_dir():
            for path in folder.iterdir():
                regular(path)  # A pipe would never end.
        return cls(data_dir=str(data_root(data_dir)))
    except Exception as error:
        if is_remote(folder) and unreachable(error):
            raise
        # TFDS raises almost any exception when one of its files is damaged.
        raise DamagedArchiveError(
            f"{folder} cannot be read ({type(error).__name__}: {str(error)[:300]}); delete that "
            "folder to prepare the data again"
        ) from error


def data_root(data_dir: Path | None = None) -> Path:
    """The folder of prepared data sets: the given one, or the default of TFDS."""
    return (data_dir or Path(constants.DATA_DIR)).expanduser()


def location(cls: type[ImageBuilder], data_dir: Path | None = None) -> Path:
    """The folder of a data set once it is prepared."""
    return data_root(data_dir) / cls.name / str(cls.VERSION)


def manual_root(data_dir: Path | None = None, manual_dir: Path | None = None) -> Path:
    """The folder of downloaded archives: the given one, or `downloads/manual` as in TFDS.

    For data on an object store, it is that of the default of TFDS: archives are local.
    """
    root = data_root(None if is_remote(data_dir or Path()) else data_dir)
    return (manual_dir or root / "downloads" / "manual").expanduser()


def check_preparable(cls: type[ImageBuilder], data_dir: Path | None) -> None:
    """Raises a `MissingArchiveError` if the folder of prepared data sets is on an object store."""
    root = data_root(data_dir)
    if is_remote(root):
        typed = cls.typed()
        raise MissingArchiveError(
            f"{typed} is not prepared in --data-dir {root}, and data sets are prepared in local "
            f"folders only: run `python -m experiments prepare {typed} --data-dir FOLDER`, then "
            f"`gcloud storage cp -r FOLDER/{cls.name} {root}/`"
        )


def is_prepared(builder: ImageBuilder) -> bool:
    """Whether a data set is completely prepared.

    Args:
      builder: A new builder of the data set.

    Returns:
      True if it is, False if nothing is prepared.

    Raises:
      DamagedArchiveError: Some of its files are missing, or an earlier version prepared it.
    """
    folder = storage_path(builder.data_dir)
    if not folder.exists():
        _refuse_earlier_version(builder, folder.parent)
        return False
    try:
        why = _problem(builder, folder)
    except OSError:
        raise
    except Exception as error:  # As in `make_builder`: TFDS reads some files only here.
        why = f"cannot be read ({type(error).__name__}: {str(error)[:300]})"
    if why:
        raise DamagedArchiveError(f"{folder} {why}; delete that folder to prepare the data again")
    return True


def _problem(builder: ImageBuilder, folder: Path) -> str:
    """What is wrong in the files of a prepared data set and their counts; "" if nothing is."""
    info: Any = builder.info
    missing = [split for split in builder.SPEC.classes if split not in info.splits]
    if not missing:
        files = [path for split in builder.SPEC.classes for path in info.splits[split].filepaths]
        there = {path.name for path in folder.iterdir()}
        missing = [name for path in files if (name := Path(path).name) not in there]
    if missing or not set(builder.SPEC.classes) <= set(info.metadata or ()):
        return f"is not a complete data set ({', '.join(missing) or 'metadata'} missing)"
    stored = getattr(info.features[builder.label_feature()[0]], "names", None)
    seen: dict[str, None] = {}
    for split in builder.SPEC.classes:
        counts, images = info.metadata[split], info.splits[split].num_examples
        files = [folder / Path(path).name for path in info.splits[split].filepaths]
        if not is_remote(folder) and images > sum(path.stat().st_size for path in files):
            return f"is too small for {images} images of the split {split}"
        fits = isinstance(counts, dict) and all(type(count) is int for count in counts.values())
        if not fits or not all(0 <= count <= images for count in counts.values()):
            return f"has impossible counts of {images} images in metadata.json, split {split}"
        if stored is not None and sum(counts.values()) != images:
            return (
                f"has {images} images, but {sum(counts.values())} in metadata.json, split {split}"
            )
        seen |= dict.fromkeys(counts)
        if not issubclass(type(builder), FewShotBuilder) and [*seen] != [*counts]:
            return f"has other classes in metadata.json for the split {split} than for another"
    # TFDS drops spaces at the ends of lines, and blank ones.
    known, listed = ({name.strip() for name in names} - {""} for names in (stored or (), seen))
    if stored is not None and known != listed:
        return "has other classes in metadata.json than in label.labels.txt"
    return ""


def _refuse_earlier_version(builder: ImageBuilder, folder: Path) -> None:
    """Raises if the folder of a data set has what another version of this project prepared."""
    old = sorted(folder.glob("[0-9]*.*.*"))
    if old:
        whole = "whole photographs" if builder.SPEC.whole else "images"
        raise DamagedArchiveError(
            f"{old[-1]} was prepared by another version of jaxloss. This one stores {whole}, "
            "turned by their EXIF orientation, with 16-bit greys, transparent ones on white; "
            "delete that folder to prepare the data again"
        )


def _generate(builder: ImageBuilder, manual_dir: Path) -> None:
    config = tfds.download.DownloadConfig(manual_dir=str(manual_dir), try_download_gcs=False)
    tfds.disable_progress_bar()
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Of damaged EXIF data, a line for each entry; the pixels are read all the same.
            warnings.filterwarnings("ignore", category=UserWarning, module="PIL")
            builder.download_and_prepare(download_config=config, file_format="array_record")
    finally:
        logger.setLevel(level)
