"""MS-COCO: photographs with labels for 80 categories, from the instance annotations."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from experiments.data.builders.archives import DamagedArchiveError
from experiments.data.builders.base import photograph_spec
from experiments.data.builders.images import MultiLabelSplit, open_files, read_json
from experiments.data.builders.layouts import Layout, Part, SearchPath
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
    content = read_json(path, *_ENTRIES, object_hook=_without_outlines)
    try:
        categories = sorted(
            (int(entry["id"]), str(entry["name"])) for entry in content["categories"]
        )
        columns = {number: column for column, (number, _) in enumerate(categories)}
        files = sorted(
            (PurePosixPath(entry["file_name"]).name, int(entry["id"]))
            for entry in content["images"]
        )
        rows = {number: row for row, (_, number) in enumerate(files)}
        targets = np.zeros((len(files), len(columns)), np.int8)
        for entry in content["annotations"]:
            targets[rows[entry["image_id"]], columns[entry["category_id"]]] = 1
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedArchiveError(
            f"{path}: an entry lacks a field, or refers to a missing image or category: {error}"
        ) from error
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
