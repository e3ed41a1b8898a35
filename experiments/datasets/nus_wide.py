"""NUS-WIDE: photographs from Flickr with labels for 81 concepts."""

from __future__ import annotations

import ast
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.datasets.archives import DamagedArchiveError, reading
from experiments.datasets.base import photographs
from experiments.datasets.layouts import Layout, Part, SearchPath, inside
from experiments.datasets.readers import multi_hot, read_names, read_table, relative, text
from experiments.datasets.splits import MultiLabelSplit, open_files

_log = logging.getLogger(__name__)

_IMAGES = ("Flickr", "images")
_TABLE = ("nus_wid_data.csv", "nus_wide_data.csv")
_SPLITS = {"train": "Train", "test": "Test"}
_CONCEPTS = Part("Concepts81.txt", ("ConceptsList.zip",), ("ConceptsList/Concepts81.txt",))
_LISTS = {
    split: Part(f"{part}Imagelist.txt", ("ImageList.zip",), (f"ImageList/{part}Imagelist.txt",))
    for split, part in _SPLITS.items()
}
_LABELS = Part(
    "TrainTestLabels", ("Groundtruth.zip",), ("Groundtruth/TrainTestLabels", "TrainTestLabels")
)


def _available(
    names: Sequence[str], files: Sequence[str], targets: np.ndarray, folder: Path, source: Path
) -> MultiLabelSplit:
    """The images that have a label and a file. Many images are no longer on Flickr."""
    keys, rows, absent = [], [], 0
    for row in np.flatnonzero((targets == 1).any(axis=1)).tolist():
        parts = relative(files[row], source).split("/")
        # In one folder per concept, or all in one folder.
        paths = (folder / "/".join(parts[-2:]), folder / parts[-1])
        path = next((path for path in paths if path.exists()), None)
        if path is None:
            absent += 1
        else:
            keys.append(path)
            rows.append(row)
    if absent:
        _log.warning("nus_wide: %d images of %s are missing and are left out", absent, source)
    return MultiLabelSplit(tuple(names), keys, targets[rows], open_files, source)


def _read_published(search_path: SearchPath) -> dict[str, MultiLabelSplit]:
    folder, labels = search_path.get(*_IMAGES), _LABELS.locate(search_path)
    names = [relative(name, "a concept") for name in read_names(_CONCEPTS.locate(search_path))]
    splits = {}
    for split, part in _SPLITS.items():
        path = _LISTS[split].locate(search_path)
        files = read_names(path)
        lists = [inside(labels, f"Labels_{name}_{part}.txt") for name in names]
        targets = np.stack([_read_column(file, len(files)) for file in lists], axis=1)
        splits[split] = _available(names, files, targets, folder, path)
    return splits


def _read_column(path: Path, count: int) -> np.ndarray:
    values = read_names(path)
    if len(values) != count or not set(values) <= {"0", "1"}:
        raise DamagedArchiveError(f"{path} should have {count} lines of 0 or 1")
    return np.array(values).astype(np.int8)


def _read_table(search_path: SearchPath) -> dict[str, MultiLabelSplit]:
    folder, path = search_path.get(*_IMAGES), search_path.get(*_TABLE)
    found: dict[str, list[tuple[str, list[str]]]] = {"train": [], "test": []}
    with reading(path, "table of images"):
        for _, row in read_table(path, "filepath", "label", "split_name")[1]:
            split = {"train": "train", "val": "test", "test": "test"}[row["split_name"]]
            labels = [text(label, path) for label in ast.literal_eval(row["label"])]
            found[split].append((row["filepath"], labels))
    names = sorted({label for images in found.values() for _, labels in images for label in labels})
    return {
        split: _available(
            names,
            [file for file, _ in images],
            multi_hot([labels for _, labels in images], names),
            folder,
            path,
        )
        for split, images in found.items()
    }


_PUBLISHED = (
    _IMAGES,
    _CONCEPTS.names,
    *dict.fromkeys(part.names for part in _LISTS.values()),
    _LABELS.names,
)
DATASETS = (
    photographs(
        name="nus_wide",
        description="209,347 photographs with labels for 81 concepts (NUS-WIDE)",
        classes={"train": 81, "test": 81},
        layouts=(
            Layout("the images and the published lists", _PUBLISHED, _read_published),
            Layout("the images and the table of Ben-Baruch et al.", (_IMAGES, _TABLE), _read_table),
        ),
        source="Chua et al., CIVR 2009",
        multi_label=True,
        folders=("nus-wide", "NUS-WIDE", "nus_wide"),
    ),
)
