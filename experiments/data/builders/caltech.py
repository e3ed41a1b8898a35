"""Caltech-101 and Caltech-256: class folders without published splits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from experiments.data.builders.archives import DamagedArchiveError, extract
from experiments.data.builders.base import photograph_spec
from experiments.data.builders.images import (
    ClassSplit,
    class_name,
    list_folders,
    list_images,
    split_of_files,
)
from experiments.data.builders.layouts import (
    TRAIN_TEST_FOLDERS,
    Layout,
    Part,
    SearchPath,
    class_folders,
)
from experiments.data.builders.tasks import ClassificationBuilder


def _split(folder: Path, count: int, omit: tuple[str, ...] = ()) -> dict[str, ClassSplit]:
    """Selects `count` training images of every class; the remaining images are the test split.

    The order is that of a hash of class and file name. It is the same on every machine, and adding
    or removing one image moves at most one other image to the other split.
    """
    splits: dict[str, dict[str, list[Path]]] = {"train": {}, "test": {}}
    for path in list_folders(folder):
        if path.name not in omit:
            name, images = class_name(path), sorted(list_images(path), key=_order)
            if len(images) <= count:
                raise DamagedArchiveError(
                    f"{path} has {len(images)} images; more than {count} are needed"
                )
            splits["train"][name] = images[:count]
            splits["test"][name] = images[count:]
    return {split: split_of_files(classes, folder) for split, classes in splits.items()}


def _order(path: Path) -> bytes:
    return hashlib.sha256(os.fsencode(f"{path.parent.name}/{path.name}")).digest()


def _layout(part: Part, read: Callable[[SearchPath], dict[str, ClassSplit]]) -> Layout:
    return Layout("the images of Caltech, split by a fixed rule", (part.names,), read)


_101 = Part(
    "101_ObjectCategories",
    ("101_ObjectCategories.tar.gz", "caltech-101.zip"),
    ("caltech-101/101_ObjectCategories", "101_ObjectCategories"),
)
_256 = Part("256_ObjectCategories", ("256_ObjectCategories.tar",))


def _locate_101(search_path: SearchPath) -> Path:
    archive = search_path.find("caltech-101.zip")
    if archive is None or search_path.find(*_101.names[:-1]) is not None:
        return _101.locate(search_path)
    # The zip file of 2022 contains the tar file of 2003.
    inner = "101_ObjectCategories.tar.gz"
    tars = sorted(
        search_path.extract(archive, lambda name: name.endswith(f"/{inner}")).glob(f"*/{inner}")
    )
    if not tars:
        raise DamagedArchiveError(f"{archive} contains no {inner}")
    return extract(tars[0], search_path.scratch / inner) / _101.path


class Caltech101(ClassificationBuilder):
    """101 categories of objects and a background class; 30 training images per class."""

    name = "caltech101"
    SPEC = photograph_spec(
        description="9,144 photographs of 101 categories of objects and of background",
        classes={"train": 102, "test": 102},
        homepage="https://data.caltech.edu/records/mzrjq-6wc02",
        citation="Fei-Fei et al.: Learning generative visual models from few training examples. "
        "CVPR Workshop 2004.",
        folders=("caltech101", "."),
        layouts=(
            _layout(_101, lambda search_path: _split(_locate_101(search_path), 30)),
            class_folders("caltech101", TRAIN_TEST_FOLDERS),
        ),
    )


class Caltech256(ClassificationBuilder):
    """256 categories of objects, without the clutter class; 60 training images per class."""

    name = "caltech256"
    SPEC = photograph_spec(
        description="29,780 photographs of 256 categories of objects",
        classes={"train": 256, "test": 256},
        homepage="https://data.caltech.edu/records/nyy15-4j048",
        citation="Griffin et al.: Caltech-256 object category dataset. Caltech report 7694, 2007.",
        folders=("caltech256", "."),
        layouts=(
            _layout(
                _256,
                lambda search_path: _split(_256.locate(search_path), 60, omit=("257.clutter",)),
            ),
            class_folders("caltech256", TRAIN_TEST_FOLDERS),
        ),
    )
