"""CUB: Caltech-UCSD Birds-200-2011 with its published split of every class."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from experiments.data.builders.archives import DamagedArchiveError, brief
from experiments.data.builders.base import photograph_spec
from experiments.data.builders.images import ClassSplit, split_of_files
from experiments.data.builders.layouts import (
    TRAIN_TEST_FOLDERS,
    Layout,
    Part,
    SearchPath,
    class_folders,
    inside,
)
from experiments.data.builders.readers import read_lines, relative
from experiments.data.builders.tasks import ClassificationBuilder

_CUB = Part("CUB_200_2011", ("CUB_200_2011.tgz", "CUB_200_2011.tar.gz"))


def _read_pairs(path: Path) -> dict[str, str]:
    pairs = {}
    for line in filter(str.strip, read_lines(path)):
        number, _, value = line.strip().partition(" ")
        if not value or number in pairs:
            raise DamagedArchiveError(
                f"{path}: no number and value, or a repeated number: {brief(line)}"
            )
        pairs[number] = value
    return pairs


def _read(search_path: SearchPath) -> dict[str, ClassSplit]:
    folder = _CUB.locate(search_path)
    names, training = inside(folder, "images.txt"), inside(folder, "train_test_split.txt")
    chosen = _read_pairs(training)
    splits: dict[str, dict[str, list[Path]]] = {"train": {}, "test": {}}
    for number, name in _read_pairs(names).items():
        file = PurePosixPath(relative(name, f"{names}, image {brief(number)}"))
        if chosen.get(number) not in ("0", "1") or len(file.parts) != 2:
            raise DamagedArchiveError(
                f"{training} has no split for image {brief(number)}, or it is in no folder"
            )
        split = "train" if chosen[number] == "1" else "test"
        splits[split].setdefault(file.parts[0], []).append(folder / "images" / file)
    return {split: split_of_files(classes, training) for split, classes in splits.items()}


class Cub(ClassificationBuilder):
    """200 species of birds."""

    name = "cub"
    SPEC = photograph_spec(
        description="11,788 photographs of 200 bird species (CUB-200-2011)",
        classes={"train": 200, "test": 200},
        homepage="https://www.vision.caltech.edu/datasets/cub_200_2011/",
        citation="Wah et al.: The Caltech-UCSD Birds-200-2011 dataset. CNS-TR-2011-001.",
        folders=("cub", "CUB", "."),
        layouts=(
            Layout("the archive of Wah et al.", (_CUB.names,), _read),
            class_folders("cub", TRAIN_TEST_FOLDERS),
        ),
    )
