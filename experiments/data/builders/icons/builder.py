"""Icons: the few-shot data set that is part of the project."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from experiments.data.builders.base import DatasetSpec
from experiments.data.builders.images import ClassSplit, SourceImage
from experiments.data.builders.layouts import SearchPath
from experiments.data.builders.tasks import FewShotBuilder

_SPLITS = {"base": "base", "validation": "val", "novel": "novel"}


def class_names(split: str) -> list[str]:
    """The names of the classes of a split, in the order of their labels; needs no prepared data."""
    index = json.loads((Path(__file__).parent / "icons.json").read_text(encoding="utf-8"))
    pairs = zip(index["classes"], index["split"], strict=True)
    return [name for name, where in pairs if where == _SPLITS[split]]


def _read_icons(folder: Path) -> dict[str, ClassSplit]:
    index = json.loads((folder / "icons.json").read_text(encoding="utf-8"))
    with np.load(folder / "icons.npz") as arrays:
        images, labels = arrays["images"][..., None], arrays["labels"]

    def picture(row: int) -> SourceImage:
        return SourceImage(images[row], f"icons.npz, image {row}")

    return {
        split: ClassSplit(
            {
                name: np.flatnonzero(labels == label).tolist()
                for label, (name, where) in enumerate(
                    zip(index["classes"], index["split"], strict=True)
                )
                if where == tag
            },
            lambda: picture,
            "icons.json",
        )
        for split, tag in _SPLITS.items()
    }


class Icons(FewShotBuilder):
    """8,526 drawings of 179 concepts from 124 icon sets, 32×32, greyscale."""

    name = "icons"
    SPEC = DatasetSpec(
        description="8,526 icons of 179 concepts, 32×32, greyscale; part of the project",
        image_shape=(32, 32, 1),
        classes={"base": 100, "validation": 29, "novel": 50},
        homepage="https://iconify.design/",
    )

    def read_splits(self, search_path: SearchPath) -> dict[str, ClassSplit]:
        """Lists the icons of every split, from the files next to this module."""
        return _read_icons(Path(__file__).parent)
