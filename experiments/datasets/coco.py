"""MS-COCO: photographs with labels for 80 categories, from the instance annotations."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from experiments.datasets.archives import DamagedArchiveError
from experiments.datasets.base import photographs
from experiments.datasets.layouts import Layout, Part, SearchPath
from experiments.datasets.readers import multi_hot, read_json, records
from experiments.datasets.splits import MultiLabelSplit, open_files

_ENTRIES = ("images", "annotations", "categories")
_FIELDS = frozenset({*_ENTRIES, "id", "file_name", "name", "image_id", "category_id"})


def _layout(year: int) -> Layout:
    images, annotations = {}, {}
    for split, part in {"train": f"train{year}", "test": f"val{year}"}.items():
        file = f"instances_{part}.json"
        annotations[split] = Part(
            f"annotations/{file}",
            (f"annotations_trainval{year}.zip",),
            (f"annotations/{file}", file),
        )
        images[split] = Part(part, (f"{part}.zip",), (part, f"images/{part}"))

    def read(search_path: SearchPath) -> dict[str, MultiLabelSplit]:
        return {
            split: _read_instances(
                annotations[split].locate(search_path, lambda name: "instances_" in name),
                images[split].locate(search_path),
            )
            for split in images
        }

    needs = [part.names for group in (images, annotations) for part in group.values()]
    return Layout(f"images and instance annotations of {year}", tuple(needs), read)


def _read_instances(path: Path, folder: Path) -> MultiLabelSplit:
    content = read_json(path, *_ENTRIES, object_hook=_without_outlines)
    categories = dict(sorted(found := records(content, "categories", path, id=int, name=str)))
    images = records(content, "images", path, file_name=Path, id=int)
    files = {n: name for name, n in sorted((PurePosixPath(file).name, n) for file, n in images)}
    if len(files) < len(images) or len(categories) < len(found):
        raise DamagedArchiveError(f"{path} has an image or a category twice")
    own: dict[int, set[int]] = {number: set() for number in files}
    for image, category in records(content, "annotations", path, image_id=int, category_id=int):
        if image not in own or category not in categories:
            raise DamagedArchiveError(
                f"{path}: an annotation refers to the missing image {image} or category {category}"
            )
        own[image].add(category)
    targets, keys = multi_hot([*own.values()], [*categories]), [*files.values()]
    labelled = np.flatnonzero(targets.any(axis=1))
    return MultiLabelSplit(
        names=tuple(categories.values()),
        keys=[folder / keys[row] for row in labelled],
        targets=targets[labelled],
        open=open_files,
        source=path,
    )


def _without_outlines(entry: dict[str, Any]) -> dict[str, Any]:
    """Drops the outlines of the instances, which are most of the file, while it is read."""
    return {name: value for name, value in entry.items() if name in _FIELDS}


# Images without an annotated object are left out, 702 of the 82,783 for training and 367 of the
# 40,504 for test in 2014. The test split is that for validation, as in the papers.
DATASETS = (
    photographs(
        name="coco",
        description="122,218 photographs with labels for 80 categories (MS-COCO; test: its "
        "validation images)",
        classes={"train": 80, "test": 80},
        layouts=(_layout(2014), _layout(2017)),
        source="Lin et al., ECCV 2014, https://cocodataset.org/",
        multi_label=True,
        folders=("coco", "COCO", "mscoco", "."),
    ),
)
