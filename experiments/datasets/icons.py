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


def _read(search_path: SearchPath) -> dict[str, ClassSplit]:
    index = json.loads((FOLDER / "icons.json").read_text(encoding="utf-8"))
    with np.load(FOLDER / "icons.npz") as arrays:
        images, labels = arrays["images"][..., None], arrays["labels"]

    def picture(row: int) -> SourceImage:
        return SourceImage(images[row], f"icons.npz, image {row}")

    classes: dict[str, dict[str, list[int]]] = {part: {} for part in _SPLITS.values()}
    for label, (name, part) in enumerate(zip(index["classes"], index["split"], strict=True)):
        classes[part][name] = np.flatnonzero(labels == label).tolist()
    return {
        split: ClassSplit(classes[part], "icons.json", lambda: picture)
        for split, part in _SPLITS.items()
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
