"""tiered-ImageNet: 608 classes of ImageNet, split by their 34 categories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments.data.archives import DamagedArchiveError, load_pickle
from experiments.data.builders.frame import Facts
from experiments.data.builders.kinds import FewShotBuilder
from experiments.data.builders.layouts import Layout, Place
from experiments.data.builders.pictures import Pictures, Table, entries, picture_rows, text

_SPLITS = {"base": "train", "validation": "val", "novel": "test"}


def _read_pickles(place: Place) -> dict[str, Pictures]:
    labels, names = {}, {}
    for split, part in _SPLITS.items():
        labels[split], names[split] = _read_labels(place.get(f"{part}_labels.pkl"), split)
    # ImageNet has two cranes and two maillots.
    times = Counter(name for given in names.values() for name in given)
    splits = {}
    for split, part in _SPLITS.items():
        classes = {
            name if times[name] == 1 else f"{name} ({split} {label})": np.flatnonzero(
                labels[split] == label
            ).tolist()
            for label, name in enumerate(names[split])
        }
        path = place.get(f"{part}_images_png.pkl")
        splits[split] = picture_rows(classes, _loader(path, len(labels[split])), path)
    return splits


def _read_labels(path: Path, split: str) -> tuple[np.ndarray, list[str]]:
    content = entries(load_pickle(path), path, "label_specific")
    try:
        labels = np.asarray(content["label_specific"]).astype(np.int64).ravel()
    except (TypeError, ValueError) as error:
        raise DamagedArchiveError(f"{path}: label_specific holds no numbers") from error
    count = int(labels.max(initial=-1)) + 1
    names = [text(name) for name in content.get("label_specific_str", ())]
    names = names or [f"{split} class {label:03}" for label in range(count)]
    if labels.min(initial=0) < 0 or count > len(names):
        raise DamagedArchiveError(f"{path} names {len(names)} classes, but has the label {count}")
    return labels, names


def _loader(path: Path, count: int) -> Callable[[], Table]:
    def load() -> Table:
        images = load_pickle(path)
        if not isinstance(images, list | tuple | np.ndarray) or len(images) != count:
            raise DamagedArchiveError(
                f"{path} should hold as many encoded images as there are labels, {count}"
            )
        return images

    return load


class TieredImagenet(FewShotBuilder):
    """tiered-ImageNet in the split of Ren et al., 84×84."""

    name = "tiered_imagenet"
    FACTS = Facts(
        description="779,165 photographs of 608 classes of ImageNet, 84×84",
        image_shape=(84, 84, 3),
        classes={"base": 351, "validation": 97, "novel": 160},
        homepage="https://github.com/renmengye/few-shot-ssl-public",
        citation=(
            "Ren et al.: Meta-learning for semi-supervised few-shot classification. ICLR 2018."
        ),
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
