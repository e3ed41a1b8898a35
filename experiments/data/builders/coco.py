"""MS-COCO: photographs with any of 80 kinds of objects, from its annotations of instances."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from experiments.data.archives import DamagedArchiveError
from experiments.data.builders.frame import photograph_facts
from experiments.data.builders.kinds import MultiLabelBuilder
from experiments.data.builders.layouts import Layout, Part, Place
from experiments.data.builders.pictures import LabelledPictures, entries, open_files

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

    def read(place: Place) -> dict[str, LabelledPictures]:
        def keep(name: str) -> bool:
            return "instances_" in name

        return {
            split: _read_instances(
                annotations[split].locate(place, keep), images[split].locate(place)
            )
            for split in parts
        }

    needs = [part.names for group in (images, annotations) for part in group.values()]
    return Layout(f"images and instances of {year}", tuple(dict.fromkeys(needs)), read)


def _read_instances(path: Path, folder: Path) -> LabelledPictures:
    content = entries(_load_json(path), path, *_ENTRIES)
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
            f"{path}: an entry lacks a field, or names what is not there: {error}"
        ) from error
    return LabelledPictures(
        names=tuple(name for _, name in categories),
        keys=[folder / name for name, _ in files],
        targets=targets,
        open=open_files,
        source=path,
    )


def _load_json(path: Path) -> Any:
    """The file's object without the outlines of the instances, which are most of it."""

    def needed(entry: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in entry.items() if name in _FIELDS}

    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file, object_hook=needed)
    except ValueError as error:
        raise DamagedArchiveError(f"{path} is no JSON: {error}") from error


class Coco(MultiLabelBuilder):
    """80 kinds of objects; `test` are the validation images, as in the papers.

    Every image is kept, also the few without an object.
    """

    name = "coco"
    FACTS = photograph_facts(
        description="123,287 photographs with any of 80 kinds of objects (MS-COCO; its validation "
        "images to test), 256×256",
        classes={"train": 80, "test": 80},
        homepage="https://cocodataset.org/",
        citation="Lin et al.: Microsoft COCO: common objects in context. ECCV 2014.",
        folders=("coco", "COCO", "mscoco", "."),
        layouts=(_layout(2014), _layout(2017)),
    )
