"""NUS-WIDE: photographs from Flickr with labels for 81 concepts."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.data.builders.archives import DamagedArchiveError
from experiments.data.builders.base import photograph_spec
from experiments.data.builders.images import MultiLabelSplit, open_files
from experiments.data.builders.layouts import Layout, Part, SearchPath, inside
from experiments.data.builders.readers import column, no_labels, read_lines, read_table, relative
from experiments.data.builders.tasks import MultiLabelBuilder

_log = logging.getLogger(__name__)

_IMAGES = ("Flickr", "images")
_TABLE = ("nus_wid_data.csv", "nus_wide_data.csv")
_SPLITS = {"train": "Train", "test": "Test"}
_LABEL = r"(?:'[^'\\]*'|\"[^\"\\]*\")"
_LABEL_LIST = rf"\[\s*(?:{_LABEL}\s*(?:,\s*|(?=\])))*\]"
"""A Python list of strings."""
_CONCEPTS = Part("Concepts81.txt", ("ConceptsList.zip",), ("ConceptsList/Concepts81.txt",))
_LISTS = {
    split: Part(f"{part}Imagelist.txt", ("ImageList.zip",), (f"ImageList/{part}Imagelist.txt",))
    for split, part in _SPLITS.items()
}
_LABELS = Part(
    "TrainTestLabels", ("Groundtruth.zip",), ("Groundtruth/TrainTestLabels", "TrainTestLabels")
)


def _available(
    names: tuple[str, ...], files: Sequence[str], targets: np.ndarray, folder: Path, source: Path
) -> MultiLabelSplit:
    """The images that have a label and a file. Many images are no longer on Flickr."""
    keys, rows, absent = [], [], 0
    for row in np.flatnonzero((targets == 1).any(axis=1)).tolist():
        parts = relative(files[row], f"{source}, image {row + 1}").split("/")
        # In one folder per concept, or all in one folder.
        paths = (folder / "/".join(parts[-2:]), folder / parts[-1])
        path = next((path for path in paths if path.exists()), None)
        if path is None:
            absent += 1
        else:
            keys.append(path)
            rows.append(row)
    if not keys:
        raise DamagedArchiveError(f"{folder} has none of the images listed in {source}")
    if absent:
        _log.warning(
            "nus_wide: %d of %d images of %s are missing and are left out",
            absent,
            absent + len(keys),
            source,
        )
    return MultiLabelSplit(names, keys, targets[rows], open_files, source)


def _read_published(search_path: SearchPath) -> dict[str, MultiLabelSplit]:
    folder = search_path.get(*_IMAGES)
    concepts, labels = _CONCEPTS.locate(search_path), _LABELS.locate(search_path)
    names = tuple(line.strip() for line in read_lines(concepts) if line.strip())
    if not all(re.fullmatch(r"[\w -]{1,100}", name) for name in names):
        raise DamagedArchiveError(f"{concepts} should have a concept in every line")
    splits = {}
    for split, part in _SPLITS.items():
        path = _LISTS[split].locate(search_path)
        files = [line.strip() for line in read_lines(path) if line.strip()]
        targets = no_labels(len(files), names, path)
        for number, name in enumerate(names):
            path_of_name = inside(labels, f"Labels_{name}_{part}.txt")
            targets[:, number] = _read_column(path_of_name, len(files))
        splits[split] = _available(names, files, targets, folder, path)
    return splits


def _read_column(path: Path, count: int) -> np.ndarray:
    values = [line.strip() for line in read_lines(path) if line.strip()]
    if len(values) != count or not set(values) <= {"0", "1"}:
        raise DamagedArchiveError(f"{path} should have {count} lines of 0 or 1")
    return np.array(values).astype(np.int8)


def _read_table(search_path: SearchPath) -> dict[str, MultiLabelSplit]:
    folder, path = search_path.get(*_IMAGES), search_path.get(*_TABLE)
    header, rows = read_table(path)
    if not {"filepath", "label", "split_name"} <= {*header}:
        raise DamagedArchiveError(f"{path} should start with the line filepath,label,split_name")
    found: dict[str, list[tuple[str, list[str]]]] = {"train": [], "test": []}
    for number, row in rows:
        split = {"train": "train", "val": "test", "test": "test"}.get(row["split_name"])
        if split is None or not re.fullmatch(_LABEL_LIST, row["label"]):
            raise DamagedArchiveError(
                f"{path}, line {number}: expected a file, a list of labels, and train, val or test"
            )
        labels = [label[1:-1] for label in re.findall(_LABEL, row["label"])]
        found[split].append((row["filepath"], column(labels, str, f"{path}, line {number}")))
    names = sorted({label for images in found.values() for _, labels in images for label in labels})
    columns = {name: column for column, name in enumerate(names)}
    splits = {}
    for split, images in found.items():
        targets = no_labels(len(images), names, path)
        for row, (_, labels) in enumerate(images):
            targets[row, [columns[label] for label in labels]] = 1
        splits[split] = _available(
            tuple(names), [file for file, _ in images], targets, folder, path
        )
    return splits


class NusWide(MultiLabelBuilder):
    """81 concepts; images without a label or without a file are left out."""

    name = "nus_wide"
    SPEC = photograph_spec(
        description="209,347 photographs with labels for 81 concepts (NUS-WIDE)",
        classes={"train": 81, "test": 81},
        homepage="https://lms.comp.nus.edu.sg/wp-content/uploads/2019/research/nuswide/"
        "NUS-WIDE.html",
        citation="Chua et al.: NUS-WIDE: a real-world web image database from National University "
        "of Singapore. CIVR 2009.",
        folders=("nus-wide", "NUS-WIDE", "nus_wide"),
        layouts=(
            Layout(
                "the images and the published lists",
                (
                    _IMAGES,
                    _CONCEPTS.names,
                    *dict.fromkeys(part.names for part in _LISTS.values()),
                    _LABELS.names,
                ),
                _read_published,
            ),
            Layout("the images and the table of Ben-Baruch et al.", (_IMAGES, _TABLE), _read_table),
        ),
    )
