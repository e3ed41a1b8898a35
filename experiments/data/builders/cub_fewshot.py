"""CUB few-shot: the 200 birds of Caltech-UCSD Birds-200-2011, 100 to learn from."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from experiments.data.archives import DamagedArchiveError, MissingArchiveError
from experiments.data.builders.frame import Facts
from experiments.data.builders.kinds import FewShotBuilder
from experiments.data.builders.layouts import Layout, Place
from experiments.data.builders.pictures import Pictures, list_images, picture_files, read_json

_SPLITS = {"base": "base", "validation": "val", "novel": "novel"}
_LISTS = tuple(f"{name}.json" for name in _SPLITS.values())
_IMAGES = "CUB_200_2011/images"
_ARCHIVES = ("CUB_200_2011.tgz", "CUB_200_2011.tar.gz")


def _images(place: Place) -> Path:
    return place.folder(_IMAGES, _ARCHIVES, lambda name: f"{_IMAGES}/" in name)


def _read_lists(place: Place) -> dict[str, Pictures]:
    images = _images(place)
    return {split: _read_list(place.get(f"{name}.json"), images) for split, name in _SPLITS.items()}


def _read_list(path: Path, images: Path) -> Pictures:
    content = read_json(path, "label_names", "image_names", "image_labels")
    names, labels = content["label_names"], content["image_labels"]
    if len(labels) != len(content["image_names"]):
        raise DamagedArchiveError(f"{path}: image_names and image_labels differ in length")
    classes: dict[str, list[Path]] = {}
    for image, label in zip(content["image_names"], labels, strict=True):
        if not 0 <= label < len(names):
            raise DamagedArchiveError(f"{path}: the label {label} has no name")
        # The paths are those of the machine on which the list was made.
        parts = PurePosixPath(image.replace("\\", "/")).parts
        classes.setdefault(names[label], []).append(images.joinpath(*parts[-2:]))
    return picture_files(classes, path)


def _read_by_rule(place: Place) -> dict[str, Pictures]:
    """The split of Chen et al. without their lists, which their script makes by this rule."""
    found = [name for name in _LISTS if place.find(name) is not None]
    if found:
        absent = [name for name in _LISTS if name not in found]
        raise MissingArchiveError(
            f"{place.get(found[0])} is there, but not {' and '.join(absent)}; put these beside it, "
            "or remove it to have the classes split by their number"
        )
    images = _images(place)
    folders = sorted(path for path in images.iterdir() if path.is_dir())
    numbers = [re.match(r"(\d+)\.", path.name) for path in folders]
    splits: dict[str, dict[str, list[Path]]] = {split: {} for split in _SPLITS}
    for index, (folder, number) in enumerate(zip(folders, numbers, strict=True)):
        if number is None or int(number[1]) != index + 1:
            raise DamagedArchiveError(
                f"{images}: the classes should be numbered from 001 on; {folder.name} is in place "
                f"{index + 1}"
            )
        split = "base" if index % 2 == 0 else "validation" if index % 4 == 1 else "novel"
        splits[split][folder.name] = list_images(folder)
    return {split: picture_files(classes, images) for split, classes in splits.items()}


class CubFewshot(FewShotBuilder):
    """Caltech-UCSD Birds-200-2011 in the split of Chen et al., 84×84."""

    name = "cub_fewshot"
    FACTS = Facts(
        description="11,788 photographs of 200 birds, 84×84",
        image_shape=(84, 84, 3),
        sizes=True,
        classes={"base": 100, "validation": 50, "novel": 50},
        homepage="https://www.vision.caltech.edu/datasets/cub_200_2011/",
        citation="Chen et al.: A closer look at few-shot classification. ICLR 2019.",
        folders=("cub", "CUB", "cub_fewshot", "."),
        layouts=(
            Layout(
                "images and the lists of Chen et al.",
                ((_IMAGES, *_ARCHIVES), *((name,) for name in _LISTS)),
                _read_lists,
            ),
            Layout(
                "images, split by class number as Chen et al. do",
                ((_IMAGES, *_ARCHIVES),),
                _read_by_rule,
            ),
        ),
    )
