"""MS-COCO: photographs with labels for 80 categories, from the instance annotations."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import numpy as np

from experiments.datasets.archives import names_file
from experiments.datasets.base import photographs
from experiments.datasets.layouts import Layout, Part, SearchPath
from experiments.datasets.readers import multi_hot, read_json, relative
from experiments.datasets.splits import MultiLabelSplit, open_files

_FIELDS = frozenset(
    {"images", "annotations", "categories", "id", "file_name", "name", "image_id", "category_id"}
)


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


@names_file
def _read_instances(path: Path, folder: Path) -> MultiLabelSplit:
    # Without the outlines of the instances, which are most of the file.
    content = read_json(path, lambda entry: {n: v for n, v in entry.items() if n in _FIELDS})
    categories = dict(sorted((entry["id"], entry["name"]) for entry in content["categories"]))
    files = {entry["id"]: relative(entry["file_name"], path) for entry in content["images"]}
    own: dict[int, set[int]] = {
        number: set() for number in sorted(files, key=lambda n: PurePosixPath(files[n]).name)
    }
    for entry in content["annotations"]:
        own[entry["image_id"]].add(entry["category_id"])
    targets = multi_hot([*own.values()], [*categories])
    keys = [folder / PurePosixPath(files[number]).name for number in own]
    labelled = np.flatnonzero(targets.any(axis=1))
    return MultiLabelSplit(
        names=tuple(categories.values()),
        keys=[keys[row] for row in labelled],
        targets=targets[labelled],
        open=open_files,
        source=path,
    )


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
