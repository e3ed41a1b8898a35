"""The icons: the few-shot data set that ships with the project."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from experiments.data.builders.frame import Facts
from experiments.data.builders.kinds import FewShotBuilder
from experiments.data.builders.layouts import Place
from experiments.data.builders.pictures import Picture, Pictures

_SPLITS = {"base": "base", "validation": "val", "novel": "novel"}


def _read_icons(folder: Path) -> dict[str, Pictures]:
    facts = json.loads((folder / "icons.json").read_text(encoding="utf-8"))
    with np.load(folder / "icons.npz") as arrays:
        images, labels = arrays["images"][..., None], arrays["labels"]

    def picture(row: int) -> Picture:
        return Picture(images[row], f"icons.npz, image {row}")

    return {
        split: Pictures(
            {
                name: np.flatnonzero(labels == label).tolist()
                for label, (name, where) in enumerate(
                    zip(facts["classes"], facts["split"], strict=True)
                )
                if where == tag
            },
            lambda: picture,
            "icons.json",
        )
        for split, tag in _SPLITS.items()
    }


class Icons(FewShotBuilder):
    """8,526 drawings of 179 concepts by 124 icon sets, 32×32, grey."""

    name = "icons"
    FACTS = Facts(
        description="8,526 icons of 179 concepts, 32×32, grey; ships with the project",
        image_shape=(32, 32, 1),
        classes={"base": 100, "validation": 29, "novel": 50},
        homepage="https://iconify.design/",
        citation="",
    )

    def read_splits(self, place: Place) -> dict[str, Pictures]:
        """The icons of every split, from the files beside this module."""
        return _read_icons(Path(__file__).parent)
