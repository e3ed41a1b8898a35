"""Preparing a data set once, as record files of TFDS, and what is read of them but the images."""

from __future__ import annotations

import io
import itertools
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core import constants

from experiments.core.errors import unreachable
from experiments.core.storage import exclusive, is_remote, regular, storage_path, writing
from experiments.datasets.archives import DamagedArchiveError, MissingArchiveError, reading
from experiments.datasets.base import Dataset
from experiments.datasets.images import Damaged, encode
from experiments.datasets.splits import MultiLabelSplit, Split, check_splits

_log = logging.getLogger(__name__)

_IMAGES_PER_FILE = 4096
"""TFDS keeps the encoded images of one file in memory."""
_AGAIN = "delete that folder to prepare the data again"


class Records(tfds.core.ShardBasedBuilder, skip_registration=True):
    """The TFDS builder of any data set: it writes images in a fixed order, without TensorFlow.

    TFDS's `GeneratorBasedBuilder` does not fit: above one gigabyte it sorts through TensorFlow's
    file system, even with shuffling disabled.
    """

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, dataset: Dataset, data_dir: Path | None = None, source: Path = Path()):
        """Takes what is prepared in `data_dir` at this moment; `source` has archives to prepare."""
        self.dataset, self._source = dataset, source
        self.name = dataset.name  # pyright: ignore[reportAttributeAccessIssue]
        self.VERSION = tfds.core.Version(dataset.version)
        super().__init__(data_dir=str(data_root(data_dir)))

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """The number of images of every class or label, by split."""
        return self.info.metadata  # pyright: ignore[reportReturnType]

    def _info(self) -> tfds.core.DatasetInfo:
        spec = self.dataset
        height, width, channels = spec.image_shape
        shape = (None, None, channels) if spec.whole else (height, width, channels)
        name, label = "label", tfds.features.ClassLabel()
        if spec.multi_label:
            name, label = "labels", tfds.features.Tensor(shape=(None,), dtype=np.int8)
        image = tfds.features.Image(shape=shape, dtype=np.uint8, encoding_format=spec.encoding)
        return _LocalInfo(
            builder=self,
            description=spec.description,
            citation=spec.source,
            features=tfds.features.FeaturesDict({"image": image, name: label}),
            supervised_keys=("image", name),
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(),
        )

    def _shard_iterators_per_split(self, dl_manager: Any) -> dict[str, list]:
        # TFDS has set `data_dir` to its temporary directory, which it removes on failure.
        folder = Path(self.data_dir)
        splits = self.dataset.read(self.dataset.search_path(self._source, folder / "extracted"))
        names = check_splits(splits)
        if not self.dataset.multi_label:
            self.info.features["label"].names = names  # pyright: ignore
        self.counts.update({name: split.counts() for name, split in splits.items()})
        for name, split in splits.items():
            if isinstance(split, MultiLabelSplit):
                np.save(folder / f"targets-{name}.npy", split.targets)
        return {name: self._files(split, names) for name, split in splits.items()}

    def _files(self, split: Split, names: list[str]) -> list:
        """For every record file a function that yields its records. TFDS calls them in order."""
        items = split.labelled(names)
        records = enumerate(self._records(split, items))
        count = -(-len(items) // _IMAGES_PER_FILE)
        # The last one reaches the end, where what is damaged is raised.
        files = [lambda: itertools.islice(records, _IMAGES_PER_FILE)] * (count - 1)
        return [*files, lambda: records]

    def _records(self, split: Split, items: list[tuple[Any, Any]]) -> Iterator[dict[str, Any]]:
        read, spec = split.open(), self.dataset
        name = "labels" if spec.multi_label else "label"
        damaged = Damaged()

        def record(item: tuple[Any, Any]) -> dict[str, Any] | None:
            with damaged:
                content = encode(
                    read(item[0]),
                    spec.image_shape,
                    whole=spec.whole,
                    encoding=spec.encoding,
                    background=spec.background,
                    bits=spec.bits,
                )
                return {"image": io.BytesIO(content), name: item[1]}

        rest = iter(items)
        # Pillow releases the GIL while it decodes, resizes and encodes.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            while chunk := list(itertools.islice(rest, 256)):
                yield from filter(None, pool.map(record, chunk))
        spec.verify()
        damaged.check(len(items))

    def _download_and_prepare(self, *args: Any, **kwargs: Any) -> None:
        super()._download_and_prepare(*args, **kwargs)
        shutil.rmtree(Path(self.data_dir) / "extracted", ignore_errors=True)

    # TFDS prints these two messages on standard output.
    def _log_download_bytes(self) -> None:
        pass

    def _log_download_done(self) -> None:
        pass


class _LocalInfo(tfds.core.DatasetInfo):
    def initialize_from_bucket(self) -> None:
        """Does not access the network: no server has information on these data sets."""


def prepare(
    dataset: Dataset, *, data_dir: Path | None = None, manual_dir: Path | None = None
) -> Records:
    """Prepares a data set unless that has been done.

    Several processes may call this function at once: one prepares, the others wait. The records
    are moved to their final folder once complete, so an interrupted preparation is never mistaken
    for a prepared data set.

    Args:
      dataset: The data set.
      data_dir: Folder of prepared data sets. Default: that of TFDS, ~/tensorflow_datasets.
      manual_dir: Folder of downloaded archives. Default: `downloads/manual` in `data_dir`.

    Raises:
      MissingArchiveError: The archives do not exist. The message lists the files and folders.
      DamagedArchiveError: An archive or the prepared data set is damaged. The message names the
        file.
      ExperimentError: The disk is full. The message names the folder.
    """
    if (builder := prepared(dataset, data_dir)) is not None:
        return builder
    check_preparable(dataset, data_dir, manual_dir)  # Before anything is written.
    folder = location(dataset, data_dir).parent
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder), exclusive(folder / ".lock"):
        if (builder := prepared(dataset, data_dir)) is not None:
            return builder
        for leftover in folder.glob("incomplete.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        _log.warning("preparing %s in %s", dataset.name, location(dataset, data_dir))
        _generate(Records(dataset, data_dir, manual_root(data_dir, manual_dir)))
    return Records(dataset, data_dir)


def _generate(builder: Records) -> None:
    tfds.disable_progress_bar()
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    try:
        with warnings.catch_warnings():
            # Of damaged EXIF data, a line for each entry; the pixels are read all the same.
            warnings.filterwarnings("ignore", category=UserWarning, module="PIL")
            builder.download_and_prepare(download_config=config, file_format="array_record")
    finally:
        logger.setLevel(level)


def data_root(data_dir: Path | None = None) -> Path:
    """The folder of prepared data sets: the given one, or the default of TFDS."""
    return (data_dir or Path(constants.DATA_DIR)).expanduser()


def location(dataset: Dataset, data_dir: Path | None = None) -> Path:
    """The folder of a data set once it is prepared."""
    return data_root(data_dir) / dataset.name / dataset.version


def manual_root(data_dir: Path | None = None, manual_dir: Path | None = None) -> Path:
    """The folder of downloaded archives: the given one, or `downloads/manual` as in TFDS.

    For data on an object store, it is that of the default of TFDS: archives are local.
    """
    root = data_root(None if is_remote(data_dir or Path()) else data_dir)
    return (manual_dir or root / "downloads" / "manual").expanduser()


def check_preparable(dataset: Dataset, data_dir: Path | None, manual_dir: Path | None) -> None:
    """Raises a `MissingArchiveError` unless all files exist, and the data can be written."""
    root, name = data_root(data_dir), dataset.argument or dataset.name
    if is_remote(root):
        raise MissingArchiveError(
            f"{name} is not prepared in --data-dir {root}, and data sets are prepared in local "
            f"folders only: run `python -m experiments prepare {name} --data-dir FOLDER`, then "
            f"`gcloud storage cp -r FOLDER/{dataset.name} {root}/`"
        )
    dataset.layout(dataset.search_path(manual_root(data_dir, manual_dir), Path()))


def prepared(dataset: Dataset, data_dir: Path | None = None) -> Records | None:
    """The records of a data set, or None if nothing is prepared.

    Raises:
      DamagedArchiveError: Some of its files are missing, or an earlier version prepared it.
    """
    folder = storage_path(str(location(dataset, data_dir)))
    if not folder.exists():
        if old := sorted(folder.parent.glob("[0-9]*.*.*")):
            raise DamagedArchiveError(f"{old[-1]} was prepared by another version; {_AGAIN}")
        return None
    try:
        if not is_remote(folder):
            for path in folder.iterdir():
                regular(path)  # A pipe would never end.
        builder = Records(dataset, data_dir)
        why = _problem(builder, folder)
    except Exception as error:
        if is_remote(folder) and unreachable(error):
            raise
        # TFDS raises almost any exception when one of its files is damaged.
        why = f"cannot be read ({type(error).__name__}: {str(error)[:300]})"
    else:
        if not why:
            return builder
    raise DamagedArchiveError(f"{folder} {why}; {_AGAIN}")


def _problem(builder: Records, folder: Path) -> str:
    """What is wrong in the files of a prepared data set and their counts; "" if nothing is."""
    info: Any = builder.info
    dataset, seen = builder.dataset, list[str]()
    there = {path.name: path for path in folder.iterdir()}
    for split in dataset.classes:
        if split not in info.splits or split not in (info.metadata or ()):
            return f"is not a complete data set ({split} missing)"
        files = [Path(path).name for path in info.splits[split].filepaths]
        if missing := [name for name in files if name not in there]:
            return f"is not a complete data set ({', '.join(missing)} missing)"
        counts, images = info.metadata[split], info.splits[split].num_examples
        if not is_remote(folder) and images > sum(there[name].stat().st_size for name in files):
            return f"is too small for {images} images of the split {split}"
        fits = isinstance(counts, dict) and all(type(count) is int for count in counts.values())
        fits = fits and all(0 <= count <= images for count in counts.values())
        if not fits or (not dataset.multi_label and sum(counts.values()) != images):
            return f"has impossible counts of {images} images in metadata.json, split {split}"
        seen = seen or [*counts]
        if not dataset.few_shot and seen != [*counts]:
            return f"has other classes in metadata.json for the split {split} than for another"
    return ""


def read_labels(builder: Records, split: str) -> np.ndarray:
    """The labels of a split as in `ImageSet.labels`, in the order of the records; reads no record.

    Images of one class each are written class by class.
    """
    counts = list(builder.counts[split].values())
    if not builder.dataset.multi_label:
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    path = storage_path(str(builder.data_dir)) / f"targets-{split}.npy"
    try:
        with reading(path, "array of NumPy"):
            targets = np.load(io.BytesIO(regular(path).read_bytes()), allow_pickle=False)
            if targets.dtype != np.int8 or targets.min() < -1 or targets.max() > 1:
                raise ValueError("it has other numbers than −1, 0 and 1")
            if (targets == 1).sum(axis=0).tolist() != counts:
                raise ValueError("its counts are not those of metadata.json")
            return targets
    except DamagedArchiveError as error:
        raise DamagedArchiveError(f"{error}; {_AGAIN}") from error
