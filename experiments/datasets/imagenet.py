"""ImageNet (ILSVRC 2012), and parts of it: Tiny, mini- and tiered-ImageNet."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from experiments.datasets.archives import TarMember, names_file, reading, tar_members
from experiments.datasets.base import Dataset, photographs
from experiments.datasets.files import class_name, list_folders, list_images, read_folders
from experiments.datasets.images import SourceImage
from experiments.datasets.layouts import (
    FEW_SHOT_PARTS,
    Layout,
    Part,
    SearchPath,
    by_split,
    inside,
    labelled_pickles,
)
from experiments.datasets.pickles import load_mat, load_pickle
from experiments.datasets.readers import read_names, read_table, relative, text
from experiments.datasets.splits import ClassSplit, Table, grouped, split_of_files, split_of_rows

# --- ImageNet-1K --------------------------------------------------------------------------------

_KAGGLE = "ILSVRC/Data/CLS-LOC"
_FOLDERS = ("imagenet", "ImageNet", "ILSVRC2012")
_TRAIN, _TEST = (
    (*(f"{own}/{part}" for own in (*_FOLDERS, _KAGGLE)), f"ILSVRC2012_img_{part}.tar")
    for part in ("train", "val")
)
_DEVKIT = Part("ILSVRC2012_devkit_t12", ("ILSVRC2012_devkit_t12.tar.gz",))
_SOLUTION = "LOC_val_solution.csv"


def _read(search_path: SearchPath) -> dict[str, ClassSplit]:
    train = search_path.get(*_TRAIN)
    splits = {"train": read_folders(train) if train.is_dir() else _read_train_tar(train)}
    test = search_path.get(*_TEST)
    if test.is_dir() and list_folders(test):
        splits["test"] = read_folders(test)
    else:
        splits["test"] = _read_numbered(test, _validation_classes(search_path))
    return splits


def _read_train_tar(path: Path) -> ClassSplit:
    """Reads the tar file of training images, which contains one tar file per class."""
    found = [(re.search(r"(n\d+)\.tar/[^/]+$", of.name), of) for of in tar_members(path)]
    return _members(grouped((match[1], member) for match, member in found if match), path)


def _members(classes: dict[str, list[TarMember]], path: Path) -> ClassSplit:
    ordered = {name: sorted(classes[name], key=attrgetter("name")) for name in sorted(classes)}
    return ClassSplit(
        ordered, path, lambda: lambda member: SourceImage(member.read(), f"{path}, {member.name}")
    )


@names_file
def _read_numbered(path: Path, class_of: dict[str, str]) -> ClassSplit:
    """Reads images named ILSVRC2012_val_00000001.JPEG and so on, in a folder or a tar file."""
    found: list[Any] = list_images(path) if path.is_dir() else tar_members(path)
    files = {Path(file.name).stem: file for file in found}
    classes = grouped((name, files[stem]) for stem, name in class_of.items())
    return split_of_files(classes, path) if path.is_dir() else _members(classes, path)


def _validation_classes(search_path: SearchPath) -> dict[str, str]:
    """The class of every validation image, by file name without extension."""
    path = search_path.find(_SOLUTION, f"ILSVRC/{_SOLUTION}")
    if path is not None:
        _, rows = read_table(path, "imageid", "predictionstring")
        return {r["imageid"]: text(r["predictionstring"].split(" ")[0], path) for _, r in rows}
    devkit = _DEVKIT.locate(search_path)
    path = inside(devkit, "data/meta.mat")
    truth = inside(devkit, "data/ILSVRC2012_validation_ground_truth.txt")
    with reading(truth, f"list of classes of {path}"):
        synsets = load_mat(path, "synsets")["synsets"]
        names = {synset["ILSVRC2012_ID"]: text(synset["WNID"], path) for synset in synsets}
        return {
            f"ILSVRC2012_val_{number:08}": names[int(line)]
            for number, line in enumerate(read_names(truth), 1)
        }


# --- ImageNet-200 -------------------------------------------------------------------------------

_TINY = Part("tiny-imagenet-200", ("tiny-imagenet-200.zip",))


def _read_tiny(search_path: SearchPath) -> dict[str, ClassSplit]:
    folder = _TINY.locate(search_path, lambda member: "/test/" not in member)
    annotations, images = inside(folder, "val/val_annotations.txt"), folder / "val/images"
    classes = list_folders(inside(folder, "train"))
    train = {class_name(path): list_images(path / "images") for path in classes}
    with reading(annotations, "list of images"):
        rows = [line.split("\t") for line in read_names(annotations)]
        test = grouped((name, images / relative(file, annotations)) for file, name, *_ in rows)
    return {
        "train": split_of_files(train, folder / "train"),
        "test": split_of_files(test, annotations),
    }


# --- mini-ImageNet --------------------------------------------------------------------------------

_LISTS = {split: f"{part}.csv" for split, part in FEW_SHOT_PARTS.items()}
_CACHES = {split: f"mini-imagenet-cache-{part}.pkl" for split, part in FEW_SHOT_PARTS.items()}
_PHASES = {
    "base": "miniImageNet_category_split_train_phase_train.pickle",
    "validation": "miniImageNet_category_split_val.pickle",
    "novel": "miniImageNet_category_split_test.pickle",
}


def _read_list(path: Path, search_path: SearchPath) -> ClassSplit:
    images = search_path.get("images")

    def entry(place: str, row: dict[str, str]) -> tuple[str, Path]:
        return text(row["label"], place), images / Path(relative(row["filename"], place)).name

    rows = read_table(path, "filename", "label")[1]
    return split_of_files(grouped(entry(f"{path}, line {n}", row) for n, row in rows), path)


@names_file
def _read_cache(path: Path, search_path: SearchPath) -> ClassSplit:
    rows = load_pickle(path, "image_data", "class_dict")["class_dict"]
    classes = {text(name, path): [*map(int, of)] for name, of in rows.items()}
    return split_of_rows(classes, lambda: load_pickle(path)["image_data"], path)


# --- tiered-ImageNet ------------------------------------------------------------------------------

_NEEDS = tuple(
    (f"{part}_{name}.pkl",) for part in FEW_SHOT_PARTS.values() for name in ("images_png", "labels")
)


def _read_pickles(search_path: SearchPath) -> dict[str, ClassSplit]:
    found = {
        split: _read_labels(search_path.get(f"{part}_labels.pkl"), split)
        for split, part in FEW_SHOT_PARTS.items()
    }
    # ImageNet has two classes named crane and two named maillot.
    times = Counter(name for names, _ in found.values() for name in names)
    splits = {}
    for split, (names, labels) in found.items():
        classes = {
            name if times[name] == 1 else f"{name} ({split} {label})": np.flatnonzero(
                labels == label
            ).tolist()
            for label, name in enumerate(names)
        }
        path = search_path.get(f"{FEW_SHOT_PARTS[split]}_images_png.pkl")
        splits[split] = split_of_rows(classes, partial(_load_encoded, path), path)
    return splits


@names_file
def _read_labels(path: Path, split: str) -> tuple[list[str], np.ndarray]:
    content = load_pickle(path, "label_specific")
    labels = np.array(content["label_specific"], np.int64)
    count = int(labels.max()) + 1
    names = [text(name, path) for name in content.get("label_specific_str", ())]
    names = names or [f"{split} class {label:03}" for label in range(count)]
    if count > len(names):
        raise ValueError(f"it names {len(names)} classes, and has other labels")
    return names, labels


@names_file
def _load_encoded(path: Path) -> Table:
    images = load_pickle(path)
    # A string would be opened as a path.
    if not all(isinstance(image, bytes | np.ndarray) for image in images):
        raise ValueError("it has an image that is neither bytes nor an array")
    return images


DATASETS = (
    # Classes are named and ordered by their WordNet identifiers.
    photographs(
        name="imagenet",
        description="1,331,167 photographs of 1,000 classes (ILSVRC 2012; test: its validation "
        "images)",
        classes={"train": 1000, "test": 1000},
        layouts=(
            Layout(
                "the archives of the challenge, or the folders of Kaggle",
                (_TRAIN, _TEST, (*_DEVKIT.names, _SOLUTION, f"ILSVRC/{_SOLUTION}")),
                _read,
            ),
        ),
        test_folders=("val", "validation"),
        source="Russakovsky et al., IJCV 2015, https://www.image-net.org/challenges/LSVRC/2012/",
        folders=(*_FOLDERS, "."),
    ),
    photographs(
        name="imagenet200",
        description="110,000 photographs of 200 classes of ImageNet (Tiny ImageNet; test: its "
        "validation images), 64×64",
        classes={"train": 200, "test": 200},
        layouts=(Layout("the archive of Tiny ImageNet", (_TINY.names,), _read_tiny),),
        test_folders=("val", "test"),
        image_shape=(64, 64, 3),
        whole=False,
        encoding="png",
        source="Le and Yang, Stanford 2015, http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        images_of="imagenet",
        version="3.0.0",  # As version 4 of photographs.
        folders=("imagenet200", "."),
    ),
    photographs(
        name="mini_imagenet",
        description="60,000 photographs of 100 classes of ImageNet",
        classes={"base": 64, "validation": 16, "novel": 20},
        layouts=(
            by_split(
                "images and the lists of Ravi and Larochelle", _LISTS, _read_list, ("images",)
            ),
            by_split("pickles with image_data and class_dict", _CACHES, _read_cache),
            labelled_pickles("pickles with data and labels", _PHASES),
        ),
        image_shape=(84, 84, 3),
        encoding="png",
        source="Ravi and Larochelle, ICLR 2017, https://github.com/twitter-research/meta-learning-lstm",
        images_of="imagenet",
        folders=("mini-imagenet", "mini_imagenet", "miniImageNet", "."),
    ),
    Dataset(
        name="tiered_imagenet",
        description="779,165 photographs of 608 classes of ImageNet, 84×84",
        classes={"base": 351, "validation": 97, "novel": 160},
        layouts=(Layout("pickles of Ren et al.", _NEEDS, _read_pickles),),
        image_shape=(84, 84, 3),
        source="Ren et al., ICLR 2018, https://github.com/renmengye/few-shot-ssl-public",
        images_of="imagenet",
        folders=("tiered-imagenet", "tiered_imagenet", "tieredImageNet", "."),
    ),
)
