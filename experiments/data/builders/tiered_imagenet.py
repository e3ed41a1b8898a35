"""tiered-ImageNet: 608 classes of ImageNet, split by their 34 categories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.archives import DamagedArchiveError, load_pickle
from experiments.data.builders.few_shot import (
    Facts,
    FewShotBuilder,
    Layout,
    Pictures,
    Place,
    entries,
    picture_rows,
)

_SPLITS = {"base": "train", "validation": "val", "novel": "test"}


def _read_pickles(place: Place) -> dict[str, Pictures]:
    return {
        split: _read_pair(
            place.get(f"{part}_labels.pkl"), place.get(f"{part}_images_png.pkl"), split
        )
        for split, part in _SPLITS.items()
    }


def _read_pair(labels_path: Path, images_path: Path, split: str) -> Pictures:
    content = entries(load_pickle(labels_path), labels_path, "label_specific")
    labels = np.asarray(content["label_specific"]).astype(np.int64).ravel()
    names = _class_names(content, labels, labels_path, split)

    def load() -> Sequence[Any]:
        images = load_pickle(images_path)
        if not isinstance(images, list | tuple | np.ndarray) or len(images) != len(labels):
            raise DamagedArchiveError(
                f"{images_path} should hold {len(labels)} encoded images, as {labels_path.name} "
                "has labels"
            )
        return images

    classes = {
        name: np.flatnonzero(labels == label).tolist() for label, name in enumerate(names)
    }
    return picture_rows(classes, load, images_path)


def _class_names(
    content: dict[str, Any], labels: np.ndarray, path: Path, split: str
) -> list[str]:
    """A name for every label: as given, or with its category or number where that is not one's own.

    ImageNet has two cranes and two maillots.
    """
    count = int(labels.max(initial=-1)) + 1
    if "label_specific_str" not in content:
        return [f"{split} {label:03}" for label in range(count)]
    given = [str(name) for name in content["label_specific_str"]]
    if labels.min(initial=0) < 0 or count > len(given):
        raise DamagedArchiveError(f"{path} names {len(given)} classes, but labels up to {count}")
    shared = {name for name, times in Counter(given).items() if times > 1}
    shared |= {"crane", "maillot"} & set(given)
    return [
        f"{name} ({split} {label:03})" if name in shared else name
        for label, name in enumerate(given)
    ]


class TieredImagenet(FewShotBuilder):
    """tiered-ImageNet in the split of Ren et al., 84×84."""

    name = "tiered_imagenet"
    FACTS = Facts(
        description="779,165 photographs of 608 classes of ImageNet, 84×84",
        image_shape=(84, 84, 3),
        classes={"base": 351, "validation": 97, "novel": 160},
        homepage="https://github.com/renmengye/few-shot-ssl-public",
        citation="Ren et al.: Meta-learning for semi-supervised few-shot classification. ICLR 2018.",
        folders=("tiered-imagenet", "tiered_imagenet", "tieredImageNet", "."),
        layouts=(
            Layout(
                "pickles of Ren et al.",
                tuple(
                    (f"{part}_{name}.pkl",)
                    for part in _SPLITS.values()
                    for name in ("images_png", "labels")
                ),
                _read_pickles,
            ),
        ),
    )
