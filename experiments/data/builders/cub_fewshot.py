"""CUB few-shot: Caltech-UCSD Birds-200-2011, of which 100 of 200 classes are base classes."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from experiments.data.builders.archives import DamagedArchiveError, MissingArchiveError
from experiments.data.builders.base import photograph_spec
from experiments.data.builders.images import (
    ClassSplit,
    class_name,
    list_folders,
    list_images,
    split_of_files,
)
from experiments.data.builders.layouts import Layout, Part, SearchPath
from experiments.data.builders.readers import column, read_json, relative
from experiments.data.builders.tasks import FewShotBuilder

_SPLITS = {"base": "base", "validation": "val", "novel": "novel"}
_LISTS = tuple(f"{name}.json" for name in _SPLITS.values())
_IMAGES = Part("CUB_200_2011/images", ("CUB_200_2011.tgz", "CUB_200_2011.tar.gz"))


def _images(search_path: SearchPath) -> Path:
    return _IMAGES.locate(search_path, lambda name: f"{_IMAGES.path}/" in name)


def _read_lists(search_path: SearchPath) -> dict[str, ClassSplit]:
    images = _images(search_path)
    return {
        split: _read_list(search_path.get(f"{name}.json"), images)
        for split, name in _SPLITS.items()
    }


def _read_list(path: Path, images: Path) -> ClassSplit:
    content = read_json(path, "label_names", "image_names", "image_labels")
    names = column(content["label_names"], str, f"{path}: label_names")
    files = column(content["image_names"], str, f"{path}: image_names")
    labels = column(content["image_labels"], int, f"{path}: image_labels")
    if len(labels) != len(files):
        raise DamagedArchiveError(f"{path}: image_names and image_labels differ in length")
    classes: dict[str, list[Path]] = {}
    for index, (image, label) in enumerate(zip(files, labels, strict=True)):
        if label >= len(names):
            raise DamagedArchiveError(f"{path}: the label {label} has no name")
        # The paths are absolute paths of the machine on which the list was created.
        own = "/".join(PurePosixPath(image.replace("\\", "/")).parts[-2:])
        file = relative(own, f"{path}: image_names, entry {index}")
        classes.setdefault(names[label], []).append(images / file)
    return split_of_files(classes, path)


def _read_by_rule(search_path: SearchPath) -> dict[str, ClassSplit]:
    """The split of Chen et al., by the rule with which their script creates the lists."""
    found = [name for name in _LISTS if search_path.find(name) is not None]
    if found:
        absent = [name for name in _LISTS if name not in found]
        raise MissingArchiveError(
            f"{search_path.get(found[0])} exists, but not {' and '.join(absent)}; add the missing "
            "lists, or remove the file to split the classes by number"
        )
    images = _images(search_path)
    folders = list_folders(images)
    numbers = [re.match(r"(\d+)\.", path.name) for path in folders]
    splits: dict[str, dict[str, list[Path]]] = {split: {} for split in _SPLITS}
    for index, (folder, number) in enumerate(zip(folders, numbers, strict=True)):
        if number is None or int(number[1]) != index + 1:
            raise DamagedArchiveError(
                f"{images}: the classes should be numbered from 001; {folder.name} is at position "
                f"{index + 1}"
            )
        split = "base" if index % 2 == 0 else "validation" if index % 4 == 1 else "novel"
        splits[split][class_name(folder)] = list_images(folder)
    return {split: split_of_files(classes, images) for split, classes in splits.items()}


class CubFewshot(FewShotBuilder):
    """Caltech-UCSD Birds-200-2011 in the split of Chen et al."""

    name = "cub_fewshot"
    SPEC = photograph_spec(
        description="11,788 photographs of 200 bird species",
        image_shape=(84, 84, 3),
        encoding="png",
        classes={"base": 100, "validation": 50, "novel": 50},
        homepage="https://www.vision.caltech.edu/datasets/cub_200_2011/",
        citation="Chen et al.: A closer look at few-shot classification. ICLR 2019.",
        folders=("cub", "CUB", "cub_fewshot", "."),
        layouts=(
            Layout(
                "images and the lists of Chen et al.",
                (_IMAGES.names, *((name,) for name in _LISTS)),
                _read_lists,
            ),
            Layout(
                "images, split by class number as in Chen et al.", (_IMAGES.names,), _read_by_rule
            ),
        ),
    )
