"""mini-ImageNet: 100 classes of ImageNet with 600 images each."""

from __future__ import annotations

import csv
from pathlib import Path

from experiments.data.archives import DamagedArchiveError, load_pickle
from experiments.data.builders.frame import Facts
from experiments.data.builders.kinds import FewShotBuilder
from experiments.data.builders.layouts import Layout, Place
from experiments.data.builders.pictures import (
    Pictures,
    entries,
    labelled_pickle,
    picture_files,
    picture_rows,
    pixels,
    read_lines,
    text,
)

_SPLITS = {"base": "train", "validation": "val", "novel": "test"}
_CACHES = {split: f"mini-imagenet-cache-{part}.pkl" for split, part in _SPLITS.items()}
_PHASES = {
    "base": "miniImageNet_category_split_train_phase_train.pickle",
    "validation": "miniImageNet_category_split_val.pickle",
    "novel": "miniImageNet_category_split_test.pickle",
}


def _read_folder(place: Place) -> dict[str, Pictures]:
    images = place.get("images")
    return {split: _read_list(place.get(f"{part}.csv"), images) for split, part in _SPLITS.items()}


def _read_list(path: Path, images: Path) -> Pictures:
    classes: dict[str, list[Path]] = {}
    rows = csv.DictReader(read_lines(path))
    if not {"filename", "label"} <= set(rows.fieldnames or ()):
        raise DamagedArchiveError(f"{path} should begin with the line filename,label")
    for row in rows:
        if not row["filename"] or not row["label"]:
            raise DamagedArchiveError(f"{path}, line {rows.line_num}: no filename and label")
        classes.setdefault(row["label"], []).append(images / Path(row["filename"]).name)
    return picture_files(classes, path)


def _read_caches(place: Place) -> dict[str, Pictures]:
    return {split: _read_cache(place.get(name)) for split, name in _CACHES.items()}


def _read_cache(path: Path) -> Pictures:
    def load() -> dict:
        return entries(load_pickle(path), path, "image_data", "class_dict")

    classes = {
        text(name): [int(row) for row in rows] for name, rows in load()["class_dict"].items()
    }
    return picture_rows(classes, lambda: pixels(load()["image_data"], path), path)


def _read_phases(place: Place) -> dict[str, Pictures]:
    return {
        split: labelled_pickle(place.get(name), f"{split} class") for split, name in _PHASES.items()
    }


class MiniImagenet(FewShotBuilder):
    """mini-ImageNet in the split of Ravi and Larochelle, 84×84."""

    name = "mini_imagenet"
    FACTS = Facts(
        description="60,000 photographs of 100 classes of ImageNet, 84×84",
        image_shape=(84, 84, 3),
        sizes=True,
        classes={"base": 64, "validation": 16, "novel": 20},
        homepage="https://github.com/twitter-research/meta-learning-lstm",
        citation="Ravi and Larochelle: Optimization as a model for few-shot learning. ICLR 2017.",
        folders=("mini-imagenet", "mini_imagenet", "miniImageNet", "."),
        layouts=(
            Layout(
                "images and the lists of Ravi and Larochelle",
                (("images",), ("train.csv",), ("val.csv",), ("test.csv",)),
                _read_folder,
            ),
            Layout(
                "pickles with image_data and class_dict",
                tuple((name,) for name in _CACHES.values()),
                _read_caches,
            ),
            Layout(
                "pickles with data and labels",
                tuple((name,) for name in _PHASES.values()),
                _read_phases,
            ),
        ),
    )
