"""Photographs with a list of files for every split: Food-101, SUN397, DTD, Aircraft, Pets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from experiments.data.archives import DamagedArchiveError
from experiments.data.builders.frame import photograph_facts
from experiments.data.builders.kinds import ClassificationBuilder
from experiments.data.builders.layouts import Layout, Part, Place, class_folders, inside
from experiments.data.builders.pictures import Pictures, picture_files, read_lines

Parse = Callable[[str], tuple[str, str] | None]
"""From a line to a class and a file within the folder of images; None if it has another form."""


def _listed(
    title: str, images: Part, lists: Part, files: Mapping[str, str], parse: Parse, below: str = "."
) -> Layout:
    """Image files in a folder, maybe `below` another, and a list of them for every split."""

    def read(place: Place) -> dict[str, Pictures]:
        folder = lists.locate(place)
        paths = {split: inside(folder, file) for split, file in files.items()}
        wanted = {split: _read_list(path, parse) for split, path in paths.items()}
        needed = {file for classes in wanted.values() for of in classes.values() for file in of}

        def keep(member: str) -> bool:
            return _within(images.path, member) in needed

        # If the lists are in the same archive, it has been extracted as a whole.
        top = images.locate(place, keep) / below
        return {
            split: picture_files(
                {name: [top / file for file in of] for name, of in classes.items()}, paths[split]
            )
            for split, classes in wanted.items()
        }

    return Layout(title, tuple(dict.fromkeys((images.names, lists.names))), read)


def _within(folder: str, member: str) -> str:
    """A member's path within a folder of the archive."""
    return f"/{PurePosixPath(member).as_posix()}".partition(f"/{folder}/")[2]


def _read_list(path: Path, parse: Parse) -> dict[str, list[str]]:
    classes: dict[str, list[str]] = {}
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip() or line.startswith("#"):
            continue
        entry = parse(line.strip())
        if entry is None or ".." in PurePosixPath(entry[1]).parts:
            raise DamagedArchiveError(f"{path}, line {number}: no image and class: {line!r}")
        classes.setdefault(entry[0], []).append(entry[1])
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
    # As in /a/apartment_building/outdoor/sun_aaa.jpg: letter, class, file.
    match = re.fullmatch(r"/?(\w/(.+)/[^/]+)", line)
    return (match[2], match[1]) if match else None


_FOOD = Part("food-101", ("food-101.tar.gz",))


class Food101(ClassificationBuilder):
    """101 dishes."""

    name = "food101"
    FACTS = photograph_facts(
        description="101,000 photographs of 101 dishes, 256×256",
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
            class_folders("food101", {"train": ("train",), "test": ("test", "val")}),
        ),
    )


class Sun397(ClassificationBuilder):
    """397 scenes, the first of its ten published partitions: 50 images a class in each split."""

    name = "sun397"
    FACTS = photograph_facts(
        description="39,700 photographs of 397 scenes (the first partition of SUN397), 256×256",
        classes={"train": 397, "test": 397},
        homepage="https://vision.princeton.edu/projects/2010/SUN/",
        citation="Xiao et al.: SUN database: large-scale scene recognition from abbey to zoo. "
        "CVPR 2010.",
        folders=("sun397", "SUN397", "."),
        layouts=(
            _listed(
                "images and partitions of Xiao et al.",
                # A set's own folder may have that name, too, and hold the archive.
                Part("SUN397", ("SUN397.tar.gz",), holds="a"),
                Part(".", ("Partitions.zip",), ("Partitions", "SUN397/Partitions")),
                {"train": "Training_01.txt", "test": "Testing_01.txt"},
                _scene,
            ),
            class_folders("sun397", {"train": ("train",), "test": ("test", "val")}),
        ),
    )


_THREE = {"train": "train", "validation": "val", "test": "test"}
_THREE_FOLDERS = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}
_TEXTURES = ("dtd-r1.0.1.tar.gz", "dtd-r1.0.tar.gz")


class Dtd(ClassificationBuilder):
    """47 textures, the first of the ten published splits."""

    name = "dtd"
    FACTS = photograph_facts(
        description="5,640 photographs of 47 textures (the first split of DTD), 256×256",
        classes=dict.fromkeys(_THREE, 47),
        homepage="https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        citation="Cimpoi et al.: Describing textures in the wild. CVPR 2014.",
        folders=("dtd", "."),
        layouts=(
            _listed(
                "the archive of Cimpoi et al.",
                Part("dtd/images", _TEXTURES),
                Part("dtd/labels", _TEXTURES),
                {split: f"{part}1.txt" for split, part in _THREE.items()},
                _by_folder(),
            ),
            class_folders("dtd", _THREE_FOLDERS),
        ),
    )


_AIRCRAFT = Part("fgvc-aircraft-2013b", ("fgvc-aircraft-2013b.tar.gz",))


class Aircraft(ClassificationBuilder):
    """100 variants of aircraft."""

    name = "aircraft"
    FACTS = photograph_facts(
        description="10,000 photographs of 100 variants of aircraft (FGVC-Aircraft), 256×256",
        classes=dict.fromkeys(_THREE, 100),
        homepage="https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/",
        citation="Maji et al.: Fine-grained visual classification of aircraft. arXiv:1306.5151.",
        folders=("aircraft", "."),
        layouts=(
            _listed(
                "the archive of Maji et al.",
                _AIRCRAFT,
                _AIRCRAFT,
                {split: f"data/images_variant_{part}.txt" for split, part in _THREE.items()},
                _number_and_class,
                below="data/images",
            ),
            class_folders("aircraft", _THREE_FOLDERS),
        ),
    )


class Pets(ClassificationBuilder):
    """37 breeds of cats and dogs."""

    name = "pets"
    FACTS = photograph_facts(
        description="7,349 photographs of 37 breeds of cats and dogs (Oxford-IIIT), 256×256",
        classes={"train": 37, "test": 37},
        homepage="https://www.robots.ox.ac.uk/~vgg/data/pets/",
        citation="Parkhi et al.: Cats and dogs. CVPR 2012.",
        # The archives' names are anyone's, so they must be in a folder of the set's own.
        folders=("oxford-iiit-pet", "pets"),
        layouts=(
            _listed(
                "the archives of Parkhi et al.",
                Part("images", ("images.tar.gz",)),
                Part("annotations", ("annotations.tar.gz",)),
                {"train": "trainval.txt", "test": "test.txt"},
                _breed,
            ),
            class_folders(".", {"train": ("train",), "test": ("test", "val")}),
        ),
    )
