"""Caltech-101 and Caltech-256: folders of classes, from which so many images a class are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from experiments.data.archives import DamagedArchiveError, extract
from experiments.data.builders.frame import photograph_facts
from experiments.data.builders.kinds import ClassificationBuilder
from experiments.data.builders.layouts import Layout, Part, Place, class_folders
from experiments.data.builders.pictures import Pictures, list_images, picture_files


def _split(folder: Path, count: int, omit: tuple[str, ...] = ()) -> dict[str, Pictures]:
    """Draws `count` training images of every class; the others are for testing.

    The draw goes by a hash of class and file name, so it is the same everywhere, and an image
    more or less moves at most one other.
    """
    splits: dict[str, dict[str, list[Path]]] = {"train": {}, "test": {}}
    for path in folder.iterdir():
        if path.is_dir() and path.name not in omit and not path.name.startswith("."):
            images = sorted(list_images(path), key=_place_in_draw)
            if len(images) <= count:
                raise DamagedArchiveError(
                    f"{path} has {len(images)} images; {count} are to learn from"
                )
            splits["train"][path.name] = images[:count]
            splits["test"][path.name] = images[count:]
    return {split: picture_files(classes, folder) for split, classes in splits.items()}


def _place_in_draw(path: Path) -> bytes:
    return hashlib.sha256(f"{path.parent.name}/{path.name}".encode()).digest()


def _drawn(part: Part, read: Callable[[Place], dict[str, Pictures]]) -> Layout:
    return Layout("the images of Caltech, drawn by a fixed rule", (part.names,), read)


_101 = Part(
    "101_ObjectCategories",
    ("101_ObjectCategories.tar.gz", "caltech-101.zip"),
    ("caltech-101/101_ObjectCategories", "101_ObjectCategories"),
)
_256 = Part("256_ObjectCategories", ("256_ObjectCategories.tar",))


def _locate_101(place: Place) -> Path:
    archive = place.find("caltech-101.zip")
    if archive is None or place.find(*_101.names[:-1]) is not None:
        return _101.locate(place)
    # The zip of 2022 holds the tar of 2003.
    inner = "101_ObjectCategories.tar.gz"
    tars = sorted(
        place.extract(archive, lambda name: name.endswith(f"/{inner}")).glob(f"*/{inner}")
    )
    if not tars:
        raise DamagedArchiveError(f"{archive} holds no {inner}")
    return extract(tars[0], place.scratch / inner) / _101.path


class Caltech101(ClassificationBuilder):
    """101 kinds of objects and a background class; 30 images a class to learn from."""

    name = "caltech101"
    FACTS = photograph_facts(
        description="9,144 photographs of 101 kinds of objects and of background, 256×256",
        classes={"train": 102, "test": 102},
        homepage="https://data.caltech.edu/records/mzrjq-6wc02",
        citation="Fei-Fei et al.: Learning generative visual models from few training examples. "
        "CVPR Workshop 2004.",
        folders=("caltech101", "."),
        layouts=(
            _drawn(_101, lambda place: _split(_locate_101(place), 30)),
            class_folders("caltech101", {"train": ("train",), "test": ("test", "val")}),
        ),
    )


class Caltech256(ClassificationBuilder):
    """256 kinds of objects, without the clutter class; 60 images a class to learn from."""

    name = "caltech256"
    FACTS = photograph_facts(
        description="29,780 photographs of 256 kinds of objects, 256×256",
        classes={"train": 256, "test": 256},
        homepage="https://data.caltech.edu/records/nyy15-4j048",
        citation="Griffin et al.: Caltech-256 object category dataset. Caltech report 7694, 2007.",
        folders=("caltech256", "."),
        layouts=(
            _drawn(_256, lambda place: _split(_256.locate(place), 60, omit=("257.clutter",))),
            class_folders("caltech256", {"train": ("train",), "test": ("test", "val")}),
        ),
    )
