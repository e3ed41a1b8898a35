"""VOC 2007: photographs with labels for 20 classes of objects."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from experiments.data.builders.archives import DamagedArchiveError, brief
from experiments.data.builders.base import photograph_spec
from experiments.data.builders.images import MultiLabelSplit, open_files
from experiments.data.builders.layouts import Layout, Part, SearchPath, inside
from experiments.data.builders.readers import read_lines, read_xml
from experiments.data.builders.tasks import MultiLabelBuilder

_NAMES = (
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)


def _list_of(part: str, archive: str) -> Part:
    path = f"VOC2007/ImageSets/Main/{part}.txt"
    return Part(f"VOCdevkit/{path}", (archive,), (f"VOCdevkit/{path}", path))


# The list of images. The lists of classes are next to it; images and annotations are above.
_TRAIN = _list_of("train", "VOCtrainval_06-Nov-2007.tar")
_TEST = _list_of("test", "VOCtest_06-Nov-2007.tar")


def _keep(member: str) -> bool:
    return any(f"/{name}/" in member for name in ("Annotations", "ImageSets", "JPEGImages"))


def _read(search_path: SearchPath) -> dict[str, MultiLabelSplit]:
    train = _TRAIN.locate(search_path, _keep)
    return {
        "train": _read_split(train),
        "validation": _read_split(inside(train.parent, "val.txt")),
        "test": _read_split(_TEST.locate(search_path, _keep)),
    }


def _read_split(path: Path) -> MultiLabelSplit:
    top = path.parents[2]
    images = [line.split()[0] for line in read_lines(path) if line.strip()]
    if not all(re.fullmatch(r"[\w-]{1,100}", image) for image in images):
        raise DamagedArchiveError(
            f"{path} should have lines that start with the number of an image"
        )
    files = [path.with_name(f"{name}_{path.name}") for name in _NAMES]
    if all(file.exists() for file in files):
        columns = [_read_column(file, images) for file in files]
        targets = np.stack(columns, axis=1)
    else:
        rows = [_read_objects(top / "Annotations" / f"{image}.xml") for image in images]
        targets = np.array(rows, np.int8).reshape(len(images), len(_NAMES))
    return MultiLabelSplit(
        names=_NAMES,
        keys=[top / "JPEGImages" / f"{image}.jpg" for image in images],
        targets=targets,
        open=open_files,
        source=path,
    )


def _read_column(path: Path, images: list[str]) -> np.ndarray:
    """Reads the targets of one class. In the file, 0 means that all objects are difficult."""
    meaning = {"1": 1, "-1": 0, "0": -1}
    lines = [line.split() for line in read_lines(path) if line.strip()]
    if not all(len(line) == 2 and line[1] in meaning for line in lines):
        raise DamagedArchiveError(f"{path} should have lines of an image and 1, −1 or 0")
    values = {image: meaning[value] for image, value in lines}
    absent = [image for image in images if image not in values]
    if absent:
        raise DamagedArchiveError(f"{path} has no line for {brief(absent[0])}")
    return np.array([values[image] for image in images], np.int8)


def _read_objects(path: Path) -> list[int]:
    """Reads the targets of one image from its objects, some of which may be difficult."""
    if not path.exists():
        raise DamagedArchiveError(f"{path} is missing")
    targets = [0] * len(_NAMES)
    for entry in read_xml(path).findall("object"):
        name = (entry.findtext("name") or "").strip()
        if name not in _NAMES:
            raise DamagedArchiveError(f"{path} has an object of the unknown class {brief(name)}")
        column = _NAMES.index(name)
        if (entry.findtext("difficult") or "0").strip() != "1":
            targets[column] = 1
        elif targets[column] == 0:
            targets[column] = -1
    return targets


class Voc2007(MultiLabelBuilder):
    """20 classes of objects. A label is unknown if all objects of the class are difficult.

    The papers train on `train+validation`.
    """

    name = "voc2007"
    SPEC = photograph_spec(
        description="9,963 photographs with labels for 20 classes (Pascal VOC 2007)",
        classes=dict.fromkeys(("train", "validation", "test"), len(_NAMES)),
        homepage="http://host.robots.ox.ac.uk/pascal/VOC/voc2007/",
        citation="Everingham et al.: The Pascal visual object classes (VOC) challenge. IJCV 2010.",
        folders=("voc2007", "."),
        layouts=(
            Layout(
                "the archives of the challenge, with lists of classes or annotations",
                (_TRAIN.names, _TEST.names),
                _read,
            ),
        ),
    )
