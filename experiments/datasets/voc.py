"""VOC 2007: photographs with labels for 20 classes of objects."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.datasets.archives import names_file
from experiments.datasets.base import photographs
from experiments.datasets.layouts import Layout, Part, SearchPath, inside
from experiments.datasets.readers import read_names, read_xml, relative
from experiments.datasets.splits import MultiLabelSplit, open_files

_NAMES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)


def _list_of(part: str, archive: str) -> Part:
    path = f"VOC2007/ImageSets/Main/{part}.txt"
    return Part(f"VOCdevkit/{path}", (archive,), (f"VOCdevkit/{path}", path))


# The list of images. Images and annotations are in folders above.
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
    images = [relative(line.split()[0], path) for line in read_names(path)]
    rows = [_read_objects(top / "Annotations" / f"{image}.xml") for image in images]
    return MultiLabelSplit(
        names=_NAMES,
        keys=[top / "JPEGImages" / f"{image}.jpg" for image in images],
        targets=np.array(rows, np.int8).reshape(len(images), len(_NAMES)),
        open=open_files,
        source=path,
    )


@names_file
def _read_objects(path: Path) -> list[int]:
    """Reads the targets of one image from its objects, some of which may be difficult."""
    targets = [0] * len(_NAMES)
    for entry in read_xml(path).findall("object"):
        column = _NAMES.index(entry.findtext("name", "").strip())
        if entry.findtext("difficult", "0").strip() != "1":
            targets[column] = 1
        elif targets[column] == 0:
            targets[column] = -1
    return targets


# A label is unknown if all objects of the class are difficult. The papers train on
# `train+validation`.
DATASETS = (
    photographs(
        name="voc2007",
        description="9,963 photographs with labels for 20 classes (Pascal VOC 2007)",
        classes=dict.fromkeys(("train", "validation", "test"), len(_NAMES)),
        layouts=(Layout("the archives of the challenge", (_TRAIN.names, _TEST.names), _read),),
        source="Everingham et al., IJCV 2010, http://host.robots.ox.ac.uk/pascal/VOC/voc2007/",
        multi_label=True,
        folders=("voc2007", "."),
    ),
)
