"""Oxford Flowers: 102 flowers, with labels and splits in MATLAB files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.data.archives import DamagedArchiveError, load_mat
from experiments.data.builders.frame import photograph_facts
from experiments.data.builders.kinds import ClassificationBuilder
from experiments.data.builders.layouts import Layout, Part, Place, class_folders
from experiments.data.builders.pictures import Pictures, picture_files

_SPLITS = {"train": "trnid", "validation": "valid", "test": "tstid"}
_IMAGES = Part("jpg", ("102flowers.tgz",), ("jpg", "102flowers/jpg"))
_LABELS = ("imagelabels.mat",)
_IDS = ("setid.mat",)


def _read(place: Place) -> dict[str, Pictures]:
    images, path, ids = _IMAGES.locate(place), place.get(*_LABELS), place.get(*_IDS)
    labels = np.atleast_1d(load_mat(path, "labels")["labels"])
    numbers = load_mat(ids, *_SPLITS.values())
    splits = {}
    for split, variable in _SPLITS.items():
        classes: dict[str, list[Path]] = {}
        for number in np.atleast_1d(numbers[variable]).tolist():
            if not 1 <= number <= len(labels):
                raise DamagedArchiveError(f"{ids} names image {number}, but {path} has no label")
            # The archive has no names for the classes.
            name = f"flower {int(labels[number - 1]):03}"
            classes.setdefault(name, []).append(images / f"image_{number:05}.jpg")
        splits[split] = picture_files(classes, ids)
    return splits


class Flowers102(ClassificationBuilder):
    """102 flowers."""

    name = "flowers102"
    FACTS = photograph_facts(
        description="8,189 photographs of 102 flowers (Oxford), 256×256",
        classes=dict.fromkeys(_SPLITS, 102),
        homepage="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
        citation="Nilsback and Zisserman: Automated flower classification over a large number of "
        "classes. ICVGIP 2008.",
        folders=("flowers-102", "flowers102", "."),
        layouts=(
            Layout(
                "the archive and files of Nilsback et al.", (_IMAGES.names, _LABELS, _IDS), _read
            ),
            class_folders(
                "flowers102",
                {
                    "train": ("train",),
                    "validation": ("val", "valid", "validation"),
                    "test": ("test",),
                },
            ),
        ),
    )
