"""Caltech-101 and Caltech-256: class folders without published splits."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from experiments.datasets.archives import extract
from experiments.datasets.base import photographs
from experiments.datasets.files import class_name, list_folders, list_images
from experiments.datasets.layouts import Layout, Part, SearchPath, inside
from experiments.datasets.splits import ClassSplit, split_of_files

_TITLE = "the images of Caltech, split by a fixed rule"
_INNER = "101_ObjectCategories.tar.gz"
_101 = Part(
    "101_ObjectCategories",
    (_INNER, "caltech-101.zip"),
    ("caltech-101/101_ObjectCategories", "101_ObjectCategories"),
)
_256 = Part("256_ObjectCategories", ("256_ObjectCategories.tar",))


def _split(folder: Path, count: int, omit: str = "") -> dict[str, ClassSplit]:
    """Selects `count` training images of every class; the remaining images are the test split.

    The order is that of a hash of class and file name. It is the same on every machine, and adding
    or removing one image moves at most one other image to the other split.
    """

    def order(path: Path) -> bytes:
        return hashlib.sha256(os.fsencode(f"{path.parent.name}/{path.name}")).digest()

    folders = (path for path in list_folders(folder) if path.name != omit)
    images = {class_name(path): sorted(list_images(path), key=order) for path in folders}
    return {
        split: split_of_files({name: files[part] for name, files in images.items()}, folder)
        for split, part in (("train", slice(count)), ("test", slice(count, None)))
    }


def _read_101(search_path: SearchPath) -> dict[str, ClassSplit]:
    archive = search_path.find("caltech-101.zip")
    if archive is None or search_path.find(*_101.names[:-1]) is not None:
        return _split(_101.locate(search_path), 30)
    # The zip file of 2022 contains the tar file of 2003.
    folder = search_path.extract(archive, lambda name: name.endswith(f"/{_INNER}"))
    return _split(extract(inside(folder, _INNER), search_path.scratch / _INNER) / _101.path, 30)


def _read_256(search_path: SearchPath) -> dict[str, ClassSplit]:
    return _split(_256.locate(search_path), 60, omit="257.clutter")


DATASETS = (
    photographs(
        name="caltech101",
        description="9,144 photographs of 101 categories of objects and of background",
        classes={"train": 102, "test": 102},
        layouts=(Layout(_TITLE, (_101.names,), _read_101),),
        source="Fei-Fei et al., CVPR Workshop 2004, https://data.caltech.edu/records/mzrjq-6wc02",
        folders=("caltech101", "."),
    ),
    photographs(  # Without the class of clutter.
        name="caltech256",
        description="29,780 photographs of 256 categories of objects",
        classes={"train": 256, "test": 256},
        layouts=(Layout(_TITLE, (_256.names,), _read_256),),
        source="Griffin et al., Caltech 2007, https://data.caltech.edu/records/nyy15-4j048",
        images_of="caltech101",
        folders=("caltech256", "."),
    ),
)
