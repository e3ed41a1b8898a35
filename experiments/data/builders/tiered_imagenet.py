"""tiered-ImageNet: 608 classes of ImageNet, split by their 34 categories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments.data.builders.archives import DamagedArchiveError, load_pickle
from experiments.data.builders.base import DatasetSpec
from experiments.data.builders.images import ClassSplit, Table, split_of_rows
from experiments.data.builders.layouts import FEW_SHOT_PARTS, Layout, SearchPath
from experiments.data.builders.readers import column, entries
from experiments.data.builders.tasks import FewShotBuilder


def _read_pickles(search_path: SearchPath) -> dict[str, ClassSplit]:
    labels, names = {}, {}
    for split, part in FEW_SHOT_PARTS.items():
        labels[split], names[split] = _read_labels(search_path.get(f"{part}_labels.pkl"), split)
    # ImageNet has two classes named crane and two named maillot.
    times = Counter(name for of_split in names.values() for name in of_split)
    splits = {}
    for split, part in FEW_SHOT_PARTS.items():
        classes = {
            name if times[name] == 1 else f"{name} ({split} {label})": np.flatnonzero(
                labels[split] == label
            ).tolist()
            for label, name in enumerate(names[split])
        }
        path = search_path.get(f"{part}_images_png.pkl")
        splits[split] = split_of_rows(classes, _loader(path, len(labels[split])), path)
    return splits


def _read_labels(path: Path, split: str) -> tuple[np.ndarray, list[str]]:
    content = entries(load_pickle(path), path, "label_specific")
    labels = np.array(column(content["label_specific"], int, f"{path}: label_specific"), np.int64)
    count = int(labels.max(initial=-1)) + 1
    names = column(content.get("label_specific_str", ()), str, f"{path}: label_specific_str")
    if not names and count <= len(labels):
        names = [f"{split} class {label:03}" for label in range(count)]
    if count > len(names):
        raise DamagedArchiveError(
            f"{path} names {len(names)} classes, but has a label that is not among them"
        )
    return labels, names


def _loader(path: Path, count: int) -> Callable[[], Table]:
    def load() -> Table:
        images = load_pickle(path)
        several = isinstance(images, list | tuple) or (
            isinstance(images, np.ndarray) and images.ndim
        )
        if not several or len(images) != count:
            raise DamagedArchiveError(
                f"{path} should contain one encoded image per label, {count} in total"
            )
        # A string would be opened as a path.
        if not all(isinstance(image, bytes | np.ndarray) for image in images):
            raise DamagedArchiveError(f"{path} has an image that is neither bytes nor an array")
        return images

    return load


class TieredImagenet(FewShotBuilder):
    """tiered-ImageNet in the split of Ren et al., 84×84."""

    name = "tiered_imagenet"
    SPEC = DatasetSpec(
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
                    for part in FEW_SHOT_PARTS.values()
                    for name in ("images_png", "labels")
                ),
                _read_pickles,
            ),
        ),
    )
