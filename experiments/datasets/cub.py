"""Caltech-UCSD Birds-200-2011: the published split of every class, and one for few-shot runs."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from experiments.datasets.archives import (
    DamagedArchiveError,
    MissingArchiveError,
    brief,
    names_file,
)
from experiments.datasets.base import photographs
from experiments.datasets.files import class_name, list_folders, list_images
from experiments.datasets.layouts import Layout, Part, SearchPath, by_split, inside
from experiments.datasets.readers import read_json, read_names, relative, text
from experiments.datasets.splits import ClassSplit, grouped, split_of_files

_ARCHIVES = ("CUB_200_2011.tgz", "CUB_200_2011.tar.gz")
_CUB = Part("CUB_200_2011", _ARCHIVES)
_IMAGES = Part("CUB_200_2011/images", _ARCHIVES)
_LISTS = {"base": "base.json", "validation": "val.json", "novel": "novel.json"}


@names_file
def _read_pairs(path: Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in read_names(path))


def _read(search_path: SearchPath) -> dict[str, ClassSplit]:
    folder = _CUB.locate(search_path)
    names, training = inside(folder, "images.txt"), inside(folder, "train_test_split.txt")
    chosen = _read_pairs(training)
    splits: dict[str, dict[str, list[Path]]] = {"train": {}, "test": {}}
    for number, name in _read_pairs(names).items():
        file = PurePosixPath(relative(name, names))
        if chosen.get(number) not in ("0", "1"):
            raise DamagedArchiveError(f"{training} has no split for the image {brief(number)}")
        split = "train" if chosen[number] == "1" else "test"
        splits[split].setdefault(file.parts[0], []).append(folder / "images" / file)
    return {split: split_of_files(classes, training) for split, classes in splits.items()}


def _few_shot_images(search_path: SearchPath) -> Path:
    return _IMAGES.locate(search_path, lambda name: f"{_IMAGES.path}/" in name)


@names_file
def _read_list(path: Path, search_path: SearchPath) -> ClassSplit:
    images, content = _few_shot_images(search_path), read_json(path)
    names = [text(content["label_names"][label], path) for label in content["image_labels"]]
    # The paths are absolute paths of the machine on which the list was created.
    own = ["/".join(name.replace("\\", "/").split("/")[-2:]) for name in content["image_names"]]
    files = (images / relative(file, path) for file in own)
    return split_of_files(grouped(zip(names, files, strict=True)), path)


def _read_by_rule(search_path: SearchPath) -> dict[str, ClassSplit]:
    """The split of Chen et al., by the rule with which their script creates the lists."""
    if found := search_path.find(*_LISTS.values()):
        raise MissingArchiveError(
            f"{found} exists, but not all of {', '.join(_LISTS.values())}; add the missing lists, "
            "or remove the file to split the classes by number"
        )
    images = _few_shot_images(search_path)
    splits: dict[str, dict[str, list[Path]]] = {split: {} for split in _LISTS}
    for index, folder in enumerate(list_folders(images)):
        if not folder.name.startswith(f"{index + 1:03}."):
            raise DamagedArchiveError(f"{images} has no class {index + 1:03}, but {folder.name}")
        split = "base" if index % 2 == 0 else "validation" if index % 4 == 1 else "novel"
        splits[split][class_name(folder)] = list_images(folder)
    return {split: split_of_files(classes, images) for split, classes in splits.items()}


DATASETS = (
    photographs(
        name="cub",
        description="11,788 photographs of 200 bird species (CUB-200-2011)",
        classes={"train": 200, "test": 200},
        layouts=(Layout("the archive of Wah et al.", (_CUB.names,), _read),),
        source="Wah et al., 2011, https://www.vision.caltech.edu/datasets/cub_200_2011/",
        folders=("cub", "CUB", "."),
    ),
    photographs(
        name="cub_fewshot",
        description="11,788 photographs of 200 bird species",
        classes={"base": 100, "validation": 50, "novel": 50},
        layouts=(
            by_split("images and the lists of Chen et al.", _LISTS, _read_list, _IMAGES.names),
            Layout(
                "images, split by class number as in Chen et al.", (_IMAGES.names,), _read_by_rule
            ),
        ),
        image_shape=(84, 84, 3),
        encoding="png",
        source="Wah et al., 2011, in the split of Chen et al., ICLR 2019",
        images_of="cub",
        folders=("cub", "CUB", "cub_fewshot", "."),
    ),
)
