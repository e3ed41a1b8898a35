"""Icons: the few-shot data set that is part of the project."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from experiments.datasets.base import Dataset
from experiments.datasets.images import SourceImage
from experiments.datasets.layouts import Layout, SearchPath
from experiments.datasets.splits import ClassSplit

FOLDER = Path(__file__).with_name("icons")
_SPLITS = {"base": "base", "validation": "val", "novel": "novel"}


def _labels(split: str) -> dict[str, int]:
    """The classes of a split, and the label of each in the file of images."""
    index = json.loads((FOLDER / "icons.json").read_text(encoding="utf-8"))
    pairs = zip(index["classes"], index["split"], strict=True)
    return {name: label for label, (name, of) in enumerate(pairs) if of == _SPLITS[split]}


def class_names(split: str) -> list[str]:
    """The names of the classes of a split, in the order of their labels; needs no prepared data."""
    return [*_labels(split)]


def _read(search_path: SearchPath) -> dict[str, ClassSplit]:
    with np.load(FOLDER / "icons.npz") as arrays:
        images, labels = arrays["images"][..., None], arrays["labels"]

    def picture(row: int) -> SourceImage:
        return SourceImage(images[row], f"icons.npz, image {row}")

    return {
        split: ClassSplit(
            {name: np.flatnonzero(labels == of).tolist() for name, of in _labels(split).items()},
            "icons.json",
            lambda: picture,
        )
        for split in _SPLITS
    }


DATASETS = (
    Dataset(
        name="icons",
        description="8,526 icons of 179 concepts, 32×32, greyscale; part of the project",
        classes={"base": 100, "validation": 29, "novel": 50},
        layouts=(Layout("the files of the project", (), _read),),
        image_shape=(32, 32, 1),
        source="https://iconify.design/",
    ),
)
