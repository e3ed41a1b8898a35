"""Oxford Flowers: 102 flowers, with labels and splits in MATLAB files."""

from __future__ import annotations

from experiments.datasets.archives import reading
from experiments.datasets.base import photographs
from experiments.datasets.layouts import Layout, Part, SearchPath
from experiments.datasets.pickles import load_mat
from experiments.datasets.splits import ClassSplit, grouped, split_of_files

_SPLITS = {"train": "trnid", "validation": "valid", "test": "tstid"}
_IMAGES = Part("jpg", ("102flowers.tgz",), ("jpg", "102flowers/jpg"))
_LABELS = ("imagelabels.mat",)
_IDS = ("setid.mat",)


def _read(search_path: SearchPath) -> dict[str, ClassSplit]:
    images, ids = _IMAGES.locate(search_path), search_path.get(*_IDS)
    labels = load_mat(search_path.get(*_LABELS), "labels")["labels"]
    numbers, splits = load_mat(ids, *_SPLITS.values()), {}
    for split, variable in _SPLITS.items():
        with reading(ids, "list of images"):
            # The archive does not name the classes.
            classes = grouped(
                (f"flower {labels[number - 1]:03}", images / f"image_{number:05}.jpg")
                for number in numbers[variable].tolist()
            )
        splits[split] = split_of_files(classes, ids)
    return splits


DATASETS = (
    photographs(
        name="flowers102",
        description="8,189 photographs of 102 flower species (Oxford)",
        classes=dict.fromkeys(_SPLITS, 102),
        layouts=(
            Layout(
                "the archive and files of Nilsback et al.", (_IMAGES.names, _LABELS, _IDS), _read
            ),
        ),
        source="Nilsback and Zisserman, ICVGIP 2008, https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
        folders=("flowers-102", "flowers102", "."),
    ),
)
