"""iNaturalist 2017 few-shot (meta-iNat): 1,135 species, of which 908 are base classes."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from experiments.datasets.archives import names_file, reading
from experiments.datasets.base import photographs
from experiments.datasets.layouts import Layout, Part, SearchPath, class_folders, inside
from experiments.datasets.pickles import load_torch_list
from experiments.datasets.readers import read_json, relative, text
from experiments.datasets.splits import ClassSplit, grouped, split_of_files

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
    species, boxed = _read_boxes(path)
    splits: dict[str, dict[str, set[str]]] = {}
    for split, names in _CATEGORIES.items():
        listed = search_path.get(*names)
        with reading(listed, f"list of categories of {path.name}"):
            splits[split] = {species[n]: {*boxed.get(n, ())} for n in load_torch_list(listed)}
    needed = {file for classes in splits.values() for files in classes.values() for file in files}
    # The names of files in the annotations include the folder of the images.
    images = _IMAGES.locate(search_path, lambda name: PurePosixPath(name).as_posix() in needed)
    return {
        split: split_of_files(
            {name: [images.parent / file for file in files] for name, files in classes.items()},
            search_path.get(*_CATEGORIES[split]),
        )
        for split, classes in splits.items()
    }


@names_file
def _read_boxes(path: Path) -> tuple[dict[int, str], dict[int, list[str]]]:
    """The name of every category, and its images, once for every box."""
    content = read_json(path)
    species = {entry["id"]: text(entry["name"], path) for entry in content["categories"]}
    files = {entry["id"]: relative(entry["file_name"], path) for entry in content["images"]}
    boxes = ((entry["category_id"], files[entry["image_id"]]) for entry in content["annotations"])
    return species, grouped(boxes)


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
