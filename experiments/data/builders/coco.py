"""MS-COCO: photographs with labels for 80 categories, from the instance annotations."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from experiments.data.builders.archives import DamagedArchiveError
from experiments.data.builders.base import photograph_spec
from experiments.data.builders.images import MultiLabelSplit, open_files
from experiments.data.builders.layouts import Layout, Part, SearchPath
from experiments.data.builders.readers import no_labels, read_json, records
from experiments.data.builders.tasks import MultiLabelBuilder

_ENTRIES = ("images", "annotations", "categories")
_FIELDS = frozenset({*_ENTRIES, "id", "file_name", "name", "image_id", "category_id"})


def _layout(year: int) -> Layout:
    parts = {"train": "train", "test": "val"}
    annotations = {
        split: Part(
            f"annotations/instances_{part}{year}.json",
            (f"annotations_trainval{year}.zip",),
            (f"annotations/instances_{part}{year}.json", f"instances_{part}{year}.json"),
        )
        for split, part in parts.items()
    }
    images = {
        split: Part(
            f"{part}{year}", (f"{part}{year}.zip",), (f"{part}{year}", f"images/{part}{year}")
        )
        for split, part in parts.items()
    }

    def read(search_path: SearchPath) -> dict[str, MultiLabelSplit]:
        def keep(name: str) -> bool:
            return "instances_" in name

        return {
            split: _read_instances(
                annotations[split].locate(search_path, keep), images[split].locate(search_path)
            )
            for split in parts
        }

    needs = [part.names for group in (images, annotations) for part in group.values()]
    return Layout(f"images and instance annotations of {year}", tuple(dict.fromkeys(needs)), read)


def _read_instances(path: Path, folder: Path) -> MultiLabelSplit:
    content = read_json(path, *_ENTRIES, object_hook=_without_outlines, most=2**30)
    categories = sorted(records(content, "categories", path, id=int, name=str))
    columns = {number: column for column, (number, _) in enumerate(categories)}
    images = records(content, "images", path, file_name=Path, id=int)
    files = sorted((PurePosixPath(file).name, number) for file, number in images)
    rows = {number: row for row, (_, number) in enumerate(files)}
    if len(rows) < len(files) or len(columns) < len(categories):
        raise DamagedArchiveError(f"{path} has an image or a category twice")
    targets = no_labels(len(files), categories, path)
    for image, category in records(content, "annotations", path, image_id=int, category_id=int):
        if image not in rows or category not in columns:
            raise DamagedArchiveError(
                f"{path}: an annotation refers to the missing image {image} or category {category}"
            )
        targets[rows[image], columns[category]] = 1
    labelled = np.flatnonzero(targets.any(axis=1))
    return MultiLabelSplit(
        names=tuple(name for _, name in categories),
        keys=[folder / files[row][0] for row in labelled],
        targets=targets[labelled],
        open=open_files,
        source=path,
    )


def _without_outlines(entry: dict[str, Any]) -> dict[str, Any]:
    """Drops the outlines of the instances, which are most of the file, while it is read."""
    return {name: value for name, value in entry.items() if name in _FIELDS}


class Coco(MultiLabelBuilder):
    """80 categories of objects; `test` contains the validation images, as in the papers.

    Images without an annotated object are left out, 702 of the 82,783 for training and 367 of the
    40,504 for test in 2014.
    """

    name = "coco"
    SPEC = photograph_spec(
        description="122,218 photographs with labels for 80 categories (MS-COCO; test: its "
        "validation images)",
        classes={"train": 80, "test": 80},
        homepage="https://cocodataset.org/",
        citation="Lin et al.: Microsoft COCO: common objects in context. ECCV 2014.",
        folders=("coco", "COCO", "mscoco", "."),
        layouts=(_layout(2014), _layout(2017)),
    )
