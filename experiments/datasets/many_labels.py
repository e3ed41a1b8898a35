"""Photographs with any number of labels each: MS-COCO, VOC 2007, NUS-WIDE."""

from __future__ import annotations

import ast
import logging
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from experiments.datasets.archives import DamagedArchiveError, names_file, reading
from experiments.datasets.base import photographs
from experiments.datasets.layouts import PARTS, Layout, Part, SearchPath, inside
from experiments.datasets.readers import (
    multi_hot,
    read_json,
    read_names,
    read_table,
    read_xml,
    relative,
    text,
)
from experiments.datasets.splits import MultiLabelSplit

_log = logging.getLogger(__name__)

# --- MS-COCO --------------------------------------------------------------------------------------

_FIELDS = frozenset(
    {"images", "annotations", "categories", "id", "file_name", "name", "image_id", "category_id"}
)


def _coco(year: int) -> Layout:
    images, annotations = {}, {}
    for split, part in {"train": f"train{year}", "test": f"val{year}"}.items():
        file = f"instances_{part}.json"
        annotations[split] = Part(
            f"annotations/{file}",
            (f"annotations_trainval{year}.zip",),
            (f"annotations/{file}", file),
        )
        images[split] = Part(part, (f"{part}.zip",), (part, f"images/{part}"))

    def read(search_path: SearchPath) -> dict[str, MultiLabelSplit]:
        return {
            split: _read_instances(
                annotations[split].locate(search_path, lambda name: "instances_" in name),
                images[split].locate(search_path),
            )
            for split in images
        }

    needs = [part.names for group in (images, annotations) for part in group.values()]
    return Layout(f"images and instance annotations of {year}", tuple(needs), read)


@names_file
def _read_instances(path: Path, folder: Path) -> MultiLabelSplit:
    # Without the outlines of the instances, which are most of the file.
    content = read_json(path, lambda entry: {n: v for n, v in entry.items() if n in _FIELDS})
    categories = dict(sorted((entry["id"], entry["name"]) for entry in content["categories"]))
    files = {
        entry["id"]: PurePosixPath(relative(entry["file_name"], path)).name
        for entry in content["images"]
    }
    own: dict[int, set[int]] = {number: set() for number in sorted(files, key=files.__getitem__)}
    for entry in content["annotations"]:
        own[entry["image_id"]].add(entry["category_id"])
    labelled = {number: labels for number, labels in own.items() if labels}
    return MultiLabelSplit(
        tuple(categories.values()),
        [folder / files[number] for number in labelled],
        multi_hot([*labelled.values()], [*categories]),
        path,
    )


# --- VOC ------------------------------------------------------------------------------------------

_VOC = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)


def _list_of(part: str, archive: str) -> Part:
    path = f"VOC2007/ImageSets/Main/{part}.txt"
    return Part(f"VOCdevkit/{path}", (archive,), (f"VOCdevkit/{path}", path))


# The list of images. Images and annotations are in folders above.
_VOC_TRAIN = _list_of("train", "VOCtrainval_06-Nov-2007.tar")
_VOC_TEST = _list_of("test", "VOCtest_06-Nov-2007.tar")


def _keep(member: str) -> bool:
    return any(f"/{name}/" in member for name in ("Annotations", "ImageSets", "JPEGImages"))


def _read_voc(search_path: SearchPath) -> dict[str, MultiLabelSplit]:
    train = _VOC_TRAIN.locate(search_path, _keep)
    return {
        "train": _read_images(train),
        "validation": _read_images(inside(train.parent, "val.txt")),
        "test": _read_images(_VOC_TEST.locate(search_path, _keep)),
    }


def _read_images(path: Path) -> MultiLabelSplit:
    top = path.parents[2]
    images = [relative(line.split()[0], path) for line in read_names(path)]
    rows = [_read_objects(top / "Annotations" / f"{image}.xml") for image in images]
    return MultiLabelSplit(
        _VOC,
        [top / "JPEGImages" / f"{image}.jpg" for image in images],
        np.array(rows, np.int8).reshape(len(images), len(_VOC)),
        path,
    )


@names_file
def _read_objects(path: Path) -> list[int]:
    """Reads the targets of one image from its objects, some of which may be difficult."""
    targets = [0] * len(_VOC)
    for entry in read_xml(path).findall("object"):
        column = _VOC.index(entry.findtext("name", "").strip())
        if entry.findtext("difficult", "0").strip() != "1":
            targets[column] = 1
        elif targets[column] == 0:
            targets[column] = -1
    return targets


# --- NUS-WIDE -------------------------------------------------------------------------------------

_IMAGES = ("Flickr", "images")
_TABLE = ("nus_wid_data.csv", "nus_wide_data.csv")
_CONCEPTS = Part("Concepts81.txt", ("ConceptsList.zip",), ("ConceptsList/Concepts81.txt",))
_LISTS = {
    part: Part(f"{part}Imagelist.txt", ("ImageList.zip",), (f"ImageList/{part}Imagelist.txt",))
    for part in ("Train", "Test")
}
_LABELS = Part(
    "TrainTestLabels", ("Groundtruth.zip",), ("Groundtruth/TrainTestLabels", "TrainTestLabels")
)


def _available(
    names: Sequence[str], files: Sequence[str], targets: np.ndarray, folder: Path, source: Path
) -> MultiLabelSplit:
    """The images that have a label and a file. Many images are no longer on Flickr."""
    found: dict[int, Path] = {}
    labelled = np.flatnonzero((targets == 1).any(axis=1)).tolist()
    for row in labelled:
        parts = relative(files[row], source).split("/")
        # In one folder per concept, or all in one folder.
        paths = (folder / "/".join(parts[-2:]), folder / parts[-1])
        if (path := next((path for path in paths if path.exists()), None)) is not None:
            found[row] = path
    if absent := len(labelled) - len(found):
        _log.warning("nus_wide: %d images of %s are missing and are left out", absent, source)
    return MultiLabelSplit(tuple(names), [*found.values()], targets[[*found]], source)


def _read_published(search_path: SearchPath) -> dict[str, MultiLabelSplit]:
    folder, labels = search_path.get(*_IMAGES), _LABELS.locate(search_path)
    names = [relative(name, "a concept") for name in read_names(_CONCEPTS.locate(search_path))]
    splits = {}
    for part, images in _LISTS.items():
        path = images.locate(search_path)
        files = read_names(path)
        lists = [inside(labels, f"Labels_{name}_{part}.txt") for name in names]
        targets = np.stack([_read_column(file, len(files)) for file in lists], axis=1)
        splits[part.lower()] = _available(names, files, targets, folder, path)
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
    splits = {}
    for split, images in found.items():
        targets = multi_hot([labels for _, labels in images], names)
        splits[split] = _available(names, [file for file, _ in images], targets, folder, path)
    return splits


_PUBLISHED = (_IMAGES, *(part.names for part in (_CONCEPTS, *_LISTS.values(), _LABELS)))

DATASETS = (
    # Images without an annotated object are left out, 702 of the 82,783 for training and 367 of the
    # 40,504 for test in 2014. The test split is that for validation, as in the papers.
    photographs(
        name="coco",
        description="122,218 photographs with labels for 80 categories (MS-COCO; test: its "
        "validation images)",
        classes={"train": 80, "test": 80},
        layouts=(_coco(2014), _coco(2017)),
        source="Lin et al., ECCV 2014, https://cocodataset.org/",
        multi_label=True,
        folders=("coco", "COCO", "mscoco", "."),
    ),
    # A label is unknown if all objects of the class are difficult. The papers train on
    # `train+validation`.
    photographs(
        name="voc2007",
        description="9,963 photographs with labels for 20 classes (Pascal VOC 2007)",
        classes=dict.fromkeys(PARTS, len(_VOC)),
        layouts=(
            Layout("the archives of the challenge", (_VOC_TRAIN.names, _VOC_TEST.names), _read_voc),
        ),
        source="Everingham et al., IJCV 2010, http://host.robots.ox.ac.uk/pascal/VOC/voc2007/",
        multi_label=True,
        folders=("voc2007", "."),
    ),
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
