"""iNaturalist 2017 few-shot (meta-iNat): 1,135 species, of which 908 are base classes."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from experiments.datasets.archives import DamagedArchiveError
from experiments.datasets.base import photographs
from experiments.datasets.layouts import Layout, Part, SearchPath, class_folders, inside
from experiments.datasets.pickles import load_torch_list
from experiments.datasets.readers import column, read_json, records
from experiments.datasets.splits import ClassSplit, split_of_files

_IMAGES = Part("train_val_images", ("train_val_images.tar.gz", "train_val2017.tar.gz"))
_BOXES = ("train_2017_bboxes.json", "train_2017_bboxes.zip")
_CATEGORIES = {
    "base": ("meta_iNat_traincats.pth", "meta_iNat_split/meta_iNat_traincats.pth"),
    "novel": ("meta_iNat_testcats.pth", "meta_iNat_split/meta_iNat_testcats.pth"),
}


def _read(search_path: SearchPath) -> dict[str, ClassSplit]:
    """The images that have a bounding box, by species."""
    path = search_path.get(*_BOXES)
    if path.suffix == ".zip":
        path = inside(search_path.extract(path), _BOXES[0])
    content = read_json(path, "annotations", "images", "categories")
    species = dict(records(content, "categories", path, id=int, name=str))
    files = dict(records(content, "images", path, id=int, file_name=Path))
    boxed: dict[int, dict[str, None]] = {}
    for image, category in records(content, "annotations", path, image_id=int, category_id=int):
        if image not in files:
            raise DamagedArchiveError(f"{path} has an annotation of the unknown image {image}")
        boxed.setdefault(category, {})[files[image]] = None
    splits: dict[str, dict[str, list[str]]] = {}
    for split, names in _CATEGORIES.items():
        splits[split], listed = {}, search_path.get(*names)
        for category in column(load_torch_list(listed), int, listed):
            if category not in species:
                raise DamagedArchiveError(f"{listed}: {path} has no class {category}")
            splits[split][species[category]] = [*boxed.get(category, ())]
    needed = {name for classes in splits.values() for names in classes.values() for name in names}
    # The names of files in the annotations include the folder of the images.
    images = _IMAGES.locate(search_path, lambda name: PurePosixPath(name).as_posix() in needed)
    return {
        split: split_of_files(
            {name: [images.parent / file for file in files] for name, files in classes.items()},
            search_path.get(*_CATEGORIES[split]),
        )
        for split, classes in splits.items()
    }


DATASETS = (
    photographs(
        name="inat2017_fewshot",
        description="243,986 photographs of 1,135 species",
        classes={"base": 908, "novel": 227},
        layouts=(
            Layout(
                "the competition's images and bounding boxes with the category lists of FRN",
                (_IMAGES.names, _BOXES, *_CATEGORIES.values()),
                _read,
            ),
            # As FRN's script prepares the images.
            class_folders(["meta_iNat"], {"base": ("train",), "novel": ("test",)}),
        ),
        image_shape=(84, 84, 3),
        encoding="png",
        source="Wertheimer and Hariharan, CVPR 2019, https://github.com/visipedia/inat_comp",
        folders=("inat2017", "inat2017_fewshot", "."),
    ),
)
