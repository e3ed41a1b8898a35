"""Data sets with one list of files per split: Food-101, SUN397, DTD, Aircraft, Pets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from experiments.data.builders.archives import DamagedArchiveError, brief
from experiments.data.builders.base import photograph_spec
from experiments.data.builders.images import ClassSplit, split_of_files
from experiments.data.builders.layouts import (
    TRAIN_TEST_FOLDERS,
    TRAIN_VALIDATION_TEST_FOLDERS,
    Layout,
    Part,
    SearchPath,
    class_folders,
    inside,
)
from experiments.data.builders.readers import read_lines, relative, text
from experiments.data.builders.tasks import ClassificationBuilder

Parse = Callable[[str], tuple[str, str] | None]
"""Parses a line into a class and a file relative to the image folder; None if it is malformed."""


def _listed(
    title: str, images: Part, lists: Part, files: Mapping[str, str], parse: Parse, below: str = "."
) -> Layout:
    """The layout with one image folder and one list of its files per split.

    Args:
      title: A short description for messages.
      images: The image folder, or its parent (see `below`).
      lists: The folder of the lists.
      files: The list of every split.
      parse: Parses a line of a list.
      below: The image folder within `images`.

    Returns:
      The layout.
    """

    def read(search_path: SearchPath) -> dict[str, ClassSplit]:
        folder = lists.locate(search_path)
        paths = {split: inside(folder, file) for split, file in files.items()}
        listed = {split: _read_list(path, parse) for split, path in paths.items()}
        needed = {file for classes in listed.values() for of in classes.values() for file in of}

        def keep(member: str) -> bool:
            return _within(images.path, member) in needed

        # If the lists are in the same archive, all of it is already extracted.
        top = images.locate(search_path, keep) / below
        return {
            split: split_of_files(
                {name: [top / file for file in of] for name, of in classes.items()}, paths[split]
            )
            for split, classes in listed.items()
        }

    return Layout(title, tuple(dict.fromkeys((images.names, lists.names))), read)


def _within(folder: str, member: str) -> str:
    """The path of an archive member relative to a folder."""
    return f"/{PurePosixPath(member).as_posix()}".partition(f"/{folder}/")[2]


def _read_list(path: Path, parse: Parse) -> dict[str, list[str]]:
    classes: dict[str, list[str]] = {}
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip() or line.startswith("#"):
            continue
        entry, place = parse(line.strip()), f"{path}, line {number}"
        if entry is None:
            raise DamagedArchiveError(f"{place}: expected an image and a class, got {brief(line)}")
        classes.setdefault(text(entry[0], place), []).append(relative(entry[1], place))
    return classes


def _by_folder(ending: str = "") -> Parse:
    def parse(line: str) -> tuple[str, str] | None:
        name, slash, file = line.partition("/")
        return (name, line + ending) if name and slash and file else None

    return parse


def _number_and_class(line: str) -> tuple[str, str] | None:
    number, space, name = line.partition(" ")
    return (name, f"{number}.jpg") if space and number.isalnum() else None


def _breed(line: str) -> tuple[str, str] | None:
    match = re.match(r"([\w-]+)_\d+(?=\s)", line)
    return (match[1], f"{match[0]}.jpg") if match else None


def _scene(line: str) -> tuple[str, str] | None:
    # For example /a/apartment_building/outdoor/sun_aaa.jpg: letter, class, file.
    match = re.fullmatch(r"/?(\w/(.+)/[^/]+)", line)
    return (match[2], match[1]) if match else None


_FOOD = Part("food-101", ("food-101.tar.gz",))


class Food101(ClassificationBuilder):
    """101 dishes."""

    name = "food101"
    SPEC = photograph_spec(
        description="101,000 photographs of 101 dishes",
        classes={"train": 101, "test": 101},
        homepage="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        citation="Bossard et al.: Food-101 - mining discriminative components with random forests. "
        "ECCV 2014.",
        folders=("food101", "."),
        layouts=(
            _listed(
                "the archive of Bossard et al.",
                _FOOD,
                _FOOD,
                {"train": "meta/train.txt", "test": "meta/test.txt"},
                _by_folder(".jpg"),
                below="images",
            ),
            class_folders("food101", TRAIN_TEST_FOLDERS),
        ),
    )


class Sun397(ClassificationBuilder):
    """397 scenes, in the first of ten published partitions: 50 images per class and split."""

    name = "sun397"
    SPEC = photograph_spec(
        description="39,700 photographs of 397 scenes (the first partition of SUN397)",
        classes={"train": 397, "test": 397},
        homepage="https://vision.princeton.edu/projects/2010/SUN/",
        citation="Xiao et al.: SUN database: large-scale scene recognition from abbey to zoo. "
        "CVPR 2010.",
        folders=("sun397", "SUN397", "."),
        layouts=(
            _listed(
                "images and partitions of Xiao et al.",
                # The data set's own folder may have the same name and contain the archive.
                Part("SUN397", ("SUN397.tar.gz",), contains="a"),
                Part(".", ("Partitions.zip",), ("Partitions", "SUN397/Partitions")),
                {"train": "Training_01.txt", "test": "Testing_01.txt"},
                _scene,
            ),
            class_folders("sun397", TRAIN_TEST_FOLDERS),
        ),
    )


_PARTS = {"train": "train", "validation": "val", "test": "test"}
_TEXTURES = ("dtd-r1.0.1.tar.gz", "dtd-r1.0.tar.gz")


class Dtd(ClassificationBuilder):
    """47 textures, in the first of ten published splits."""

    name = "dtd"
    SPEC = photograph_spec(
        description="5,640 photographs of 47 textures (the first split of DTD)",
        classes=dict.fromkeys(_PARTS, 47),
        homepage="https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        citation="Cimpoi et al.: Describing textures in the wild. CVPR 2014.",
        folders=("dtd", "."),
        layouts=(
            _listed(
                "the archive of Cimpoi et al.",
                Part("dtd/images", _TEXTURES),
                Part("dtd/labels", _TEXTURES),
                {split: f"{part}1.txt" for split, part in _PARTS.items()},
                _by_folder(),
            ),
            class_folders("dtd", TRAIN_VALIDATION_TEST_FOLDERS),
        ),
    )


_AIRCRAFT = Part("fgvc-aircraft-2013b", ("fgvc-aircraft-2013b.tar.gz",))


class Aircraft(ClassificationBuilder):
    """100 variants of aircraft."""

    name = "aircraft"
    SPEC = photograph_spec(
        description="10,000 photographs of 100 variants of aircraft (FGVC-Aircraft)",
        classes=dict.fromkeys(_PARTS, 100),
        homepage="https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/",
        citation="Maji et al.: Fine-grained visual classification of aircraft. arXiv:1306.5151.",
        folders=("aircraft", "."),
        layouts=(
            _listed(
                "the archive of Maji et al.",
                _AIRCRAFT,
                _AIRCRAFT,
                {split: f"data/images_variant_{part}.txt" for split, part in _PARTS.items()},
                _number_and_class,
                below="data/images",
            ),
            class_folders("aircraft", TRAIN_VALIDATION_TEST_FOLDERS),
        ),
    )


class Pets(ClassificationBuilder):
    """37 breeds of cats and dogs."""

    name = "pets"
    SPEC = photograph_spec(
        description="7,349 photographs of 37 breeds of cats and dogs (Oxford-IIIT)",
        classes={"train": 37, "test": 37},
        homepage="https://www.robots.ox.ac.uk/~vgg/data/pets/",
        citation="Parkhi et al.: Cats and dogs. CVPR 2012.",
        # The archives have generic names, so they must be in the data set's own folder.
        folders=("oxford-iiit-pet", "pets"),
        layouts=(
            _listed(
                "the archives of Parkhi et al.",
                Part("images", ("images.tar.gz",)),
                Part("annotations", ("annotations.tar.gz",)),
                {"train": "trainval.txt", "test": "test.txt"},
                _breed,
            ),
            class_folders(".", TRAIN_TEST_FOLDERS),
        ),
    )
