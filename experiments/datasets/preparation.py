"""Preparing a data set once, as record files of TFDS, and what is read of them but the images."""

from __future__ import annotations

import io
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath
from tensorflow_datasets.core import constants

from experiments.core.errors import unreachable
from experiments.core.storage import (
    exclusive,
    is_remote,
    load_json,
    storage_path,
    write_json,
    writing,
)
from experiments.datasets.archives import DamagedArchiveError, MissingArchiveError
from experiments.datasets.base import Dataset
from experiments.datasets.images import of_every_image
from experiments.datasets.splits import MultiLabelSplit, check_splits

_log = logging.getLogger(__name__)

_AGAIN = "delete that folder to prepare the data again"


class Prepared(NamedTuple):
    """A prepared data set."""

    dataset: Dataset
    data_dir: Path
    """Its own folder."""
    builder: tfds.core.DatasetBuilder
    """Reads the records."""
    counts: dict[str, dict[str, int]]
    """The number of images of every class or label, by split."""


def prepare(
    dataset: Dataset, *, data_dir: Path | None = None, manual_dir: Path | None = None
) -> Prepared:
    """Prepares a data set unless that has been done; folders are those of `Folders`.

    Several processes may call this function at once: one prepares, the others wait. The records
    are moved to their final folder once complete, so an interrupted preparation is never mistaken
    for a prepared data set. Raises a `MissingArchiveError` or a `DamagedArchiveError`.
    """
    while (found := prepared(dataset, data_dir)) is None:
        check_preparable(dataset, data_dir, manual_dir)  # Before anything is written.
        target = location(dataset, data_dir)
        partial = target.with_name(f"incomplete.{dataset.version}")
        target.parent.mkdir(parents=True, exist_ok=True)
        with writing(target.parent), exclusive(target.with_name(".lock")):
            if not target.exists():  # Another process was not faster.
                _log.warning("preparing %s in %s", dataset.name, target)
                shutil.rmtree(partial, ignore_errors=True)
                try:
                    _write(dataset, partial, manual_root(data_dir, manual_dir))
                    partial.rename(target)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    return found


def _write(dataset: Dataset, folder: Path, manual_dir: Path) -> None:
    """Writes the records of all splits, in a fixed order, and what TFDS needs to read them."""
    folder.mkdir()
    splits = dataset.read(dataset.search_path(manual_dir, folder / "extracted"))
    names = check_splits(splits)
    shape = (None, None, dataset.image_shape[2]) if dataset.whole else dataset.image_shape
    name, label = "label", tfds.features.ClassLabel(names=names)
    if dataset.multi_label:
        name, label = "labels", tfds.features.Tensor(shape=(None,), dtype=np.int8)
    image = tfds.features.Image(shape=shape, dtype=np.uint8, encoding_format=dataset.encoding)
    features = tfds.features.FeaturesDict({"image": image, name: label})
    template = tfds.core.ShardedFileTemplate(
        dataset_name=dataset.name, data_dir=epath.Path(folder), filetype_suffix="array_record"
    )
    infos = []
    for part, split in splits.items():
        items = split.labelled(names)
        writer = ArrayRecordWriter(
            str(folder / f"{dataset.name}-{part}.array_record-00000-of-00001"), "group_size:1"
        )
        read, size = split.open(), 0

        def record(item: tuple[Any, Any], read: Callable = read) -> bytes:
            content = dataset.encode(read(item[0]))
            example = features.encode_example({"image": io.BytesIO(content), name: item[1]})
            return features.serialize_example(example)

        try:
            for content in of_every_image(record, items):
                writer.write(content)
                size += len(content)
        finally:
            writer.close()
        infos.append(tfds.core.SplitInfo(part, [len(items)], size, template))
        if isinstance(split, MultiLabelSplit):
            np.save(folder / f"targets-{part}.npy", split.targets)
    dataset.verify()
    write_json(folder / "metadata.json", {part: split.counts() for part, split in splits.items()})
    tfds.folder_dataset.write_metadata(
        data_dir=folder,
        features=features,
        split_infos=infos,
        version=dataset.version,
        filename_template=template,
        check_data=False,
        description=dataset.description,
        citation=dataset.source,
    )
    shutil.rmtree(folder / "extracted", ignore_errors=True)


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
    dataset.layout(dataset.search_path(manual_root(data_dir, manual_dir)))


def prepared(dataset: Dataset, data_dir: Path | None = None) -> Prepared | None:
    """A data set as it was prepared, or None if nothing is.

    Raises:
      DamagedArchiveError: Some of its files are missing, or an earlier version prepared it.
    """
    folder = storage_path(str(location(dataset, data_dir)))
    if not folder.exists():
        if old := sorted(folder.parent.glob("[0-9]*.*.*")):
            raise DamagedArchiveError(f"{old[-1]} was prepared by another version; {_AGAIN}")
        return None
    try:
        builder = tfds.builder_from_directory(folder)
        found = Prepared(dataset, folder, builder, load_json(folder / "metadata.json"))
        for split in dataset.classes:
            info, total = builder.info.splits[split], sum(found.counts[split].values())
            absent = [str(path) for path in info.filepaths if not path.exists()]
            if absent or (total != info.num_examples and not dataset.multi_label):
                raise ValueError(f"{split}: {', '.join(absent) or 'other counts'}")
    except Exception as error:  # TFDS raises almost any when one of its files is damaged.
        if is_remote(folder) and unreachable(error):
            raise
        why = f"{type(error).__name__}: {str(error)[:300]}"
        raise DamagedArchiveError(f"{folder} is no complete data set ({why}); {_AGAIN}") from error
    return found


def read_labels(found: Prepared, split: str) -> np.ndarray:
    """The labels of a split as in `ImageSet.labels`, in the order of the records; reads no record.

    Images of one class each are written class by class.
    """
    counts = list(found.counts[split].values())
    if not found.dataset.multi_label:
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    path = found.data_dir / f"targets-{split}.npy"
    try:
        targets = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
        if (targets == 1).sum(axis=0).tolist() != counts:
            raise ValueError("its counts are not those of metadata.json")
    except Exception as error:  # NumPy raises several kinds.
        raise DamagedArchiveError(f"{path} is damaged ({error}); {_AGAIN}") from error
    return targets
