"""ImageNet-1K (ILSVRC 2012), and the 200 classes of Tiny ImageNet."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.data.builders.archives import (
    DamagedArchiveError,
    TarMember,
    brief,
    load_mat,
    tar_members,
)
from experiments.data.builders.base import DatasetSpec, photograph_spec
from experiments.data.builders.images import (
    ClassSplit,
    SourceImage,
    class_name,
    list_folders,
    list_images,
    split_of_files,
)
from experiments.data.builders.layouts import (
    Layout,
    Part,
    SearchPath,
    class_folders,
    has_class_folders,
    inside,
    read_folders,
)
from experiments.data.builders.readers import read_lines, read_table, records, relative, text
from experiments.data.builders.tasks import ClassificationBuilder

# --- ImageNet-1K --------------------------------------------------------------------------------

_KAGGLE = "ILSVRC/Data/CLS-LOC"
_TRAIN = ("imagenet/train", f"{_KAGGLE}/train", "ILSVRC2012_img_train.tar")
_TEST = ("imagenet/val", f"{_KAGGLE}/val", "ILSVRC2012_img_val.tar")
_DEVKIT = Part("ILSVRC2012_devkit_t12", ("ILSVRC2012_devkit_t12.tar.gz",))
_SOLUTION = "LOC_val_solution.csv"


def _read(search_path: SearchPath) -> dict[str, ClassSplit]:
    train = search_path.get(*_TRAIN)
    splits = {"train": read_folders(train) if train.is_dir() else _read_train_tar(train)}
    test = search_path.get(*_TEST)
    if test.is_dir() and has_class_folders(test):
        splits["test"] = read_folders(test)
    else:
        splits["test"] = _read_numbered(test, _validation_classes(search_path))
    return splits


def _open_members() -> Callable[[TarMember], SourceImage]:
    return lambda member: SourceImage(member.read(), f"{member.archive}, {member.name}")


def _read_train_tar(path: Path) -> ClassSplit:
    """Reads the tar file of training images, which contains one tar file per class."""
    classes: dict[str, list[TarMember]] = {}
    for member in tar_members(path):
        match = re.search(r"(n\d+)\.tar/[^/]+$", member.name)
        if match:
            classes.setdefault(match[1], []).append(member)
    return _members(classes, path)


def _members(classes: dict[str, list[TarMember]], path: Path) -> ClassSplit:
    ordered = {
        name: sorted(classes[name], key=lambda member: member.name) for name in sorted(classes)
    }
    return ClassSplit(ordered, _open_members, path)


def _read_numbered(path: Path, class_of: dict[str, str]) -> ClassSplit:
    """Reads images named ILSVRC2012_val_00000001.JPEG and so on, in a folder or a tar file."""
    found: list[Any] = list_images(path) if path.is_dir() else tar_members(path)
    files = {Path(file.name).stem: file for file in found}
    absent = sorted(set(class_of) - set(files))
    if absent:
        raise DamagedArchiveError(
            f"{path} lacks {len(absent)} of {len(class_of)} images, for example {absent[0][:80]}"
        )
    classes: dict[str, list[Any]] = {}
    for stem, name in class_of.items():
        classes.setdefault(name, []).append(files[stem])
    return split_of_files(classes, path) if path.is_dir() else _members(classes, path)


def _validation_classes(search_path: SearchPath) -> dict[str, str]:
    """The class of every validation image, by file name without extension."""
    path = search_path.find(_SOLUTION, f"ILSVRC/{_SOLUTION}")
    if path is not None:
        header, rows = read_table(path)
        if len(header) != 2:
            raise DamagedArchiveError(
                f"{path} should have lines like ILSVRC2012_val_1,n0144 1 1 9 9"
            )
        stem, prediction = header
        return {
            row[stem]: text(row[prediction].partition(" ")[0], f"{path}, line {number}")
            for number, row in rows
        }
    devkit = _DEVKIT.locate(search_path)
    path = inside(devkit, "data/meta.mat")
    truth = inside(devkit, "data/ILSVRC2012_validation_ground_truth.txt")
    names = dict(records(load_mat(path, "synsets"), "synsets", path, ILSVRC2012_ID=int, WNID=str))
    class_of = {}
    for number, line in enumerate(filter(str.strip, read_lines(truth)), 1):
        if not re.fullmatch(r"\d{1,9}", line.strip()) or int(line) not in names:
            raise DamagedArchiveError(f"{truth}, line {number}: unknown class {brief(line)}")
        class_of[f"ILSVRC2012_val_{number:08}"] = names[int(line)]
    return class_of


class Imagenet(ClassificationBuilder):
    """1,000 classes of ImageNet; `test` contains the 50,000 validation images of 2012.

    Classes are named and ordered by their WordNet identifiers.
    """

    name = "imagenet"
    SPEC = photograph_spec(
        description="1,331,167 photographs of 1,000 classes (ILSVRC 2012; test: its validation "
        "images)",
        classes={"train": 1000, "test": 1000},
        homepage="https://www.image-net.org/challenges/LSVRC/2012/",
        citation="Russakovsky et al.: ImageNet large scale visual recognition challenge. "
        "IJCV 2015.",
        folders=("imagenet", "ImageNet", "ILSVRC2012", "."),
        layouts=(
            Layout(
                "the archives of the challenge, or the folders of Kaggle",
                (_TRAIN, _TEST, (*_DEVKIT.names, _SOLUTION, f"ILSVRC/{_SOLUTION}")),
                _read,
                by_class=(_TRAIN,),
            ),
            class_folders("imagenet", {"train": ("train",), "test": ("val", "validation")}),
        ),
    )


# --- ImageNet-200 -------------------------------------------------------------------------------

_TINY = Part("tiny-imagenet-200", ("tiny-imagenet-200.zip",))


def _read_tiny(search_path: SearchPath) -> dict[str, ClassSplit]:
    folder = _TINY.locate(search_path, lambda member: "/test/" not in member)
    annotations, images = inside(folder, "val/val_annotations.txt"), folder / "val/images"
    classes = list_folders(inside(folder, "train"))
    train = {class_name(path): list_images(path / "images") for path in classes}
    test: dict[str, list[Path]] = {}
    for number, line in enumerate(read_lines(annotations), 1):
        file, name, *_ = [*line.split("\t"), "", ""]
        place = f"{annotations}, line {number}"
        if not name or "/" in relative(file, place):
            raise DamagedArchiveError(f"{place}: expected an image and a class, got {brief(line)}")
        test.setdefault(text(name, place), []).append(images / file)
    return {
        "train": split_of_files(train, folder / "train"),
        "test": split_of_files(test, annotations),
    }


class Imagenet200(ClassificationBuilder):
    """200 classes of ImageNet at 64×64 (Tiny ImageNet); `test` contains its validation images."""

    name = "imagenet200"
    SPEC = DatasetSpec(
        description="110,000 photographs of 200 classes of ImageNet (Tiny ImageNet; test: its "
        "validation images), 64×64",
        image_shape=(64, 64, 3),
        classes={"train": 200, "test": 200},
        homepage="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        citation="Le and Yang: Tiny ImageNet visual recognition challenge. Stanford, 2015.",
        resizable=True,
        version="3.0.0",  # As version 4 of photographs.
        folders=("imagenet200", "."),
        layouts=(
            Layout("the archive of Tiny ImageNet", (_TINY.names,), _read_tiny),
            class_folders("imagenet200", {"train": ("train",), "test": ("val", "test")}),
        ),
    )
