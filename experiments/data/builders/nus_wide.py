"""NUS-WIDE: photographs from Flickr with any of 81 concepts."""

from __future__ import annotations

import ast
import csv
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.data.archives import DamagedArchiveError
from experiments.data.builders.frame import photograph_facts
from experiments.data.builders.kinds import MultiLabelBuilder
from experiments.data.builders.layouts import Layout, Part, Place, inside
from experiments.data.builders.pictures import LabelledPictures, open_files, read_lines

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


def _present(
    names: tuple[str, ...],
    files: Sequence[str],
    targets: np.ndarray,
    folder: Path,
    source: Path,
) -> LabelledPictures:
    """Those images that have a label, and a file: many are no longer on Flickr."""
    keys, rows, absent = [], [], 0
    for row in np.flatnonzero((targets == 1).any(axis=1)).tolist():
        parts = files[row].replace("\\", "/").strip("/").split("/")
        # With the folder of a concept above it, or all in one.
        paths = (folder / "/".join(parts[-2:]), folder / parts[-1])
        path = next((path for path in paths if path.exists()), None)
        if path is None or ".." in parts:
            absent += 1
        else:
            keys.append(path)
            rows.append(row)
    if not keys:
        raise DamagedArchiveError(f"{folder} has none of the images that {source} names")
    if absent:
        _log.warning(
            "nus_wide: %d of %d images of %s are missing, and left out",
            *(absent, absent + len(keys), source),
        )
    return LabelledPictures(names, keys, targets[rows], open_files, source)


def _read_published(place: Place) -> dict[str, LabelledPictures]:
    folder = place.get(*_IMAGES)
    concepts, labels = _CONCEPTS.locate(place), _LABELS.locate(place)
    names = tuple(line.strip() for line in read_lines(concepts) if line.strip())
    splits = {}
    for split, part in _SPLITS.items():
        path = _LISTS[split].locate(place)
        files = [line.strip() for line in read_lines(path) if line.strip()]
        targets = np.empty((len(files), len(names)), np.int8)
        for column, name in enumerate(names):
            targets[:, column] = _read_column(
                inside(labels, f"Labels_{name}_{part}.txt"), len(files)
            )
        splits[split] = _present(names, files, targets, folder, path)
    return splits


def _read_column(path: Path, count: int) -> np.ndarray:
    values = [line.strip() for line in read_lines(path) if line.strip()]
    if len(values) != count or not set(values) <= {"0", "1"}:
        raise DamagedArchiveError(f"{path} should have {count} lines of 0 or 1")
    return np.array(values).astype(np.int8)


def _read_table(place: Place) -> dict[str, LabelledPictures]:
    folder, path = place.get(*_IMAGES), place.get(*_TABLE)
    reader = csv.DictReader(read_lines(path))
    if not {"filepath", "label", "split_name"} <= set(reader.fieldnames or ()):
        raise DamagedArchiveError(f"{path} should begin with the line filepath,label,split_name")
    found: dict[str, list[tuple[str, list[str]]]] = {"train": [], "test": []}
    for row in reader:
        split = "train" if row["split_name"] == "train" else "test"
        try:
            labels = ast.literal_eval(row["label"])
        except (ValueError, SyntaxError, TypeError):
            labels = None
        if not isinstance(labels, list) or not row["filepath"]:
            raise DamagedArchiveError(f"{path}, line {reader.line_num}: no list of labels")
        found[split].append((row["filepath"], [str(label) for label in labels]))
    names = sorted({label for of in found.values() for _, labels in of for label in labels})
    columns = {name: column for column, name in enumerate(names)}
    splits = {}
    for split, of in found.items():
        targets = np.zeros((len(of), len(names)), np.int8)
        for row, (_, labels) in enumerate(of):
            targets[row, [columns[label] for label in labels]] = 1
        splits[split] = _present(tuple(names), [file for file, _ in of], targets, folder, path)
    return splits


class NusWide(MultiLabelBuilder):
    """81 concepts; images without a label, and those that are not on the disk, are left out."""

    name = "nus_wide"
    FACTS = photograph_facts(
        description="209,347 photographs with any of 81 concepts (NUS-WIDE), 256×256",
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
