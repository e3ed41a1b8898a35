"""Data sets with one list of files per split: Food-101, SUN397, DTD, Aircraft, Pets, Cars."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from experiments.datasets.archives import DamagedArchiveError, brief, names_file
from experiments.datasets.base import Dataset, photographs
from experiments.datasets.layouts import PARTS, Layout, Part, SearchPath, inside
from experiments.datasets.pickles import load_mat
from experiments.datasets.readers import read_names, relative, text
from experiments.datasets.splits import ClassSplit, grouped, split_of_files

Parse = Callable[[str], tuple[str, str] | None]
"""Parses a line into a class and a file relative to the image folder; None if it is malformed."""


def _listed(
    name: str,
    description: str,
    classes: int,
    title: str,
    images: Part,
    lists: Part,
    files: Mapping[str, str],
    parse: Parse,
    below: str = ".",
    **more: Any,
) -> Dataset:
    """A data set with the image folder `below` of `images`, and one of the `lists` per split."""

    def read(search_path: SearchPath) -> dict[str, ClassSplit]:
        folder = lists.locate(search_path)
        paths = {split: inside(folder, file) for split, file in files.items()}
        listed = {split: _read_list(path, parse) for split, path in paths.items()}
        needed = {file for classes in listed.values() for of in classes.values() for file in of}

        def keep(member: str) -> bool:
            path = f"/{PurePosixPath(member).as_posix()}"
            return path.partition(f"/{images.path}/")[2] in needed

        # If the lists are in the same archive, all of it is already extracted.
        top = images.locate(search_path, keep) / below
        return {
            split: split_of_files(
                {name: [top / file for file in of] for name, of in classes.items()}, paths[split]
            )
            for split, classes in listed.items()
        }

    return photographs(
        name=name,
        description=description,
        classes=dict.fromkeys(files, classes),
        layouts=(Layout(title, tuple(dict.fromkeys((images.names, lists.names))), read),),
        **more,
    )


def _read_list(path: Path, parse: Parse) -> dict[str, list[str]]:
    def entry(line: str) -> tuple[str, str]:
        place = f"{path}, line {brief(line)}"
        if (found := parse(line)) is None:
            raise DamagedArchiveError(f"{place}: expected an image and a class")
        return text(found[0], place), relative(found[1], place)

    return grouped(entry(line) for line in read_names(path) if not line.startswith("#"))


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


# --- Stanford Cars ------------------------------------------------------------------------------

_DEVKIT = ("car_devkit.tgz", "cars_devkit.tgz")
_META, _TRAIN = (
    Part(f"devkit/{name}.mat", _DEVKIT, (f"devkit/{name}.mat", f"{name}.mat"))
    for name in ("cars_meta", "cars_train_annos")
)
# The devkit has no classes of the test images.
_TEST = ("cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat")
_TRAIN_IMAGES, _TEST_IMAGES = (
    Part(name, (f"{name}.tgz",), (f"{name}/{name}", name)) for name in ("cars_train", "cars_test")
)


def _read_cars(search_path: SearchPath) -> dict[str, ClassSplit]:
    names = load_mat(_META.locate(search_path), "class_names")["class_names"].tolist()
    train, test = _TRAIN.locate(search_path), search_path.get(*_TEST)
    return {
        "train": _read_annotations(train, names, _TRAIN_IMAGES.locate(search_path)),
        "test": _read_annotations(test, names, _TEST_IMAGES.locate(search_path)),
    }


@names_file
def _read_annotations(path: Path, names: list[str], folder: Path) -> ClassSplit:
    classes: dict[str, list[Path]] = {name: [] for name in names}
    for image in load_mat(path, "annotations")["annotations"]:
        file = PurePosixPath(relative(image["fname"], path)).name
        classes[names[image["class"] - 1]].append(folder / file)
    return ClassSplit({name: sorted(of) for name, of in classes.items()}, path)


# --- All ----------------------------------------------------------------------------------------

_FOOD = Part("food-101", ("food-101.tar.gz",))
_TEXTURES = ("dtd-r1.0.1.tar.gz", "dtd-r1.0.tar.gz")
_AIRCRAFT = Part("fgvc-aircraft-2013b", ("fgvc-aircraft-2013b.tar.gz",))

DATASETS = (
    _listed(
        "food101",
        "101,000 photographs of 101 dishes",
        101,
        "the archive of Bossard et al.",
        _FOOD,
        _FOOD,
        {"train": "meta/train.txt", "test": "meta/test.txt"},
        _by_folder(".jpg"),
        below="images",
        source="Bossard et al., ECCV 2014, https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        folders=("food101", "."),
    ),
    # The first of ten published partitions: 50 images per class and split.
    _listed(
        "sun397",
        "39,700 photographs of 397 scenes (the first partition of SUN397)",
        397,
        "images and partitions of Xiao et al.",
        # The data set's own folder may have the same name and contain the archive.
        Part("SUN397", ("SUN397.tar.gz",), contains="a"),
        Part(".", ("Partitions.zip",), ("Partitions", "SUN397/Partitions")),
        {"train": "Training_01.txt", "test": "Testing_01.txt"},
        _scene,
        source="Xiao et al., CVPR 2010, https://vision.princeton.edu/projects/2010/SUN/",
        folders=("sun397", "SUN397", "."),
    ),
    _listed(
        "dtd",
        "5,640 photographs of 47 textures (the first split of DTD)",
        47,
        "the archive of Cimpoi et al.",
        Part("dtd/images", _TEXTURES),
        Part("dtd/labels", _TEXTURES),
        {split: f"{part}1.txt" for split, part in PARTS.items()},
        _by_folder(),
        source="Cimpoi et al., CVPR 2014, https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        folders=("dtd", "."),
    ),
    _listed(
        "aircraft",
        "10,000 photographs of 100 variants of aircraft (FGVC-Aircraft)",
        100,
        "the archive of Maji et al.",
        _AIRCRAFT,
        _AIRCRAFT,
        {split: f"data/images_variant_{part}.txt" for split, part in PARTS.items()},
        _number_and_class,
        below="data/images",
        source="Maji et al., 2013, https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/",
        folders=("aircraft", "."),
    ),
    _listed(
        "pets",
        "7,349 photographs of 37 breeds of cats and dogs (Oxford-IIIT)",
        37,
        "the archives of Parkhi et al.",
        Part("images", ("images.tar.gz",)),
        Part("annotations", ("annotations.tar.gz",)),
        {"train": "trainval.txt", "test": "test.txt"},
        _breed,
        source="Parkhi et al., CVPR 2012, https://www.robots.ox.ac.uk/~vgg/data/pets/",
        # The archives have generic names, so they must be in the data set's own folder.
        folders=("oxford-iiit-pet", "pets"),
    ),
    photographs(
        name="cars",
        description="16,185 photographs of 196 cars (Stanford Cars)",
        classes={"train": 196, "test": 196},
        layouts=(
            Layout(
                "the two archives of Krause et al., the devkit and the classes of the test images",
                (_TRAIN_IMAGES.names, _TEST_IMAGES.names, _META.names, _TRAIN.names, _TEST),
                _read_cars,
            ),
        ),
        source="Krause et al., 3dRR 2013, https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
        folders=("stanford_cars", "cars", "."),
    ),
)
