"""iNaturalist 2017 few-shot (meta-iNat): 1,135 species, of which 908 are base classes."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from experiments.data.builders.archives import DamagedArchiveError, load_torch_list
from experiments.data.builders.base import photograph_spec
from experiments.data.builders.images import ClassSplit, list_images, split_of_files
from experiments.data.builders.layouts import Layout, Part, SearchPath, read_folders
from experiments.data.builders.readers import column, read_json, records
from experiments.data.builders.tasks import FewShotBuilder

_IMAGES = Part("train_val_images", ("train_val_images.tar.gz", "train_val2017.tar.gz"))
_BOXES = ("train_2017_bboxes.json", "train_2017_bboxes.zip")
_SPLIT = "inat2017_fewshot_split.json"
_CATEGORIES = {
    "base": ("meta_iNat_traincats.pth", "meta_iNat_split/meta_iNat_traincats.pth"),
    "novel": ("meta_iNat_testcats.pth", "meta_iNat_split/meta_iNat_testcats.pth"),
}


def _read_boxes(search_path: SearchPath) -> tuple[Path, dict[int, str], dict[int, list[str]]]:
    """The file, the species of every category, and its images that have a bounding box."""
    path = search_path.get(*_BOXES)
    if path.suffix == ".zip":
        [*found] = search_path.extract(path).rglob(_BOXES[0])
        if not found:
            raise DamagedArchiveError(f"{path} contains no {_BOXES[0]}")
        path = found[0]
    content = read_json(path, "annotations", "images", "categories", most=2**30)
    species = dict(records(content, "categories", path, id=int, name=str))
    files = dict(records(content, "images", path, id=int, file_name=Path))
    images: dict[int, dict[str, None]] = {}
    for image, category in records(content, "annotations", path, image_id=int, category_id=int):
        if image not in files:
            raise DamagedArchiveError(f"{path} has an annotation of the unknown image {image}")
        images.setdefault(category, {})[files[image]] = None
    return path, species, {category: list(names) for category, names in images.items()}


def _read_categories(search_path: SearchPath) -> dict[str, ClassSplit]:
    path, species, boxed = _read_boxes(search_path)
    splits: dict[str, dict[str, list[str]]] = {}
    for split, names in _CATEGORIES.items():
        splits[split], listed = {}, search_path.get(*names)
        for category in column(load_torch_list(listed), int, listed):
            if category not in species:
                raise DamagedArchiveError(f"{listed}: {path} has no class {category}")
            splits[split][species[category]] = boxed.get(category, [])
    return {
        split: split_of_files(classes, search_path.get(*_CATEGORIES[split]))
        for split, classes in _locate(search_path, splits).items()
    }


def _read_species(search_path: SearchPath) -> dict[str, ClassSplit]:
    path = search_path.get(_SPLIT)
    lists = read_json(path, "base", "novel")
    species_of = {
        split: column(column(lists[split], str, f"{path}: {split}"), Path, f"{path}: {split}")
        for split in ("base", "novel")
    }
    if search_path.find(*_BOXES):
        _, species, boxed = _read_boxes(search_path)
        files = {name: boxed.get(category, []) for category, name in species.items()}
        splits = {
            split: {name: files.get(name, []) for name in names}
            for split, names in species_of.items()
        }
        located = _locate(search_path, splits)
    else:
        every = {name for names in species_of.values() for name in names}
        images = _IMAGES.locate(
            search_path, lambda member: PurePosixPath(member).parent.name in every
        )
        folders = {folder.name: folder for folder in sorted(images.glob("*/*/"))}
        located = {
            split: {name: list_images(folders.get(name) or images / name) for name in names}
            for split, names in species_of.items()
        }
    return {split: split_of_files(classes, path) for split, classes in located.items()}


def _locate(
    search_path: SearchPath, splits: dict[str, dict[str, list[str]]]
) -> dict[str, dict[str, list[Path]]]:
    """Finds image files by their names in the annotations, which include the image folder."""
    every = {name for classes in splits.values() for names in classes.values() for name in names}
    top = _IMAGES.locate(
        search_path, lambda member: PurePosixPath(member).as_posix() in every
    ).parent
    return {
        split: {name: [top / file for file in files] for name, files in classes.items()}
        for split, classes in splits.items()
    }


def _read_prepared(search_path: SearchPath) -> dict[str, ClassSplit]:
    return {
        "base": read_folders(search_path.get("meta_iNat/train")),
        "novel": read_folders(search_path.get("meta_iNat/test")),
    }


class Inat2017Fewshot(FewShotBuilder):
    """iNaturalist 2017 in the split of Wertheimer and Hariharan (meta-iNat)."""

    name = "inat2017_fewshot"
    SPEC = photograph_spec(
        description="243,986 photographs of 1,135 species",
        image_shape=(84, 84, 3),
        encoding="png",
        classes={"base": 908, "novel": 227},
        homepage="https://github.com/visipedia/inat_comp/tree/master/2017",
        citation=(
            "Wertheimer and Hariharan: Few-shot learning with localization in realistic settings. "
            "CVPR 2019."
        ),
        folders=("inat2017", "inat2017_fewshot", "."),
        layouts=(
            Layout(
                "the competition's images and bounding boxes with the category lists of FRN",
                (_IMAGES.names, _BOXES, *_CATEGORIES.values()),
                _read_categories,
            ),
            Layout(
                "the images prepared by FRN's script",
                (("meta_iNat/train",), ("meta_iNat/test",)),
                _read_prepared,
            ),
            Layout(
                'the competition\'s images and your own split {"base": [species, ...], "novel": '
                "[...]} (only images with a bounding box if the boxes are available)",
                (_IMAGES.names, (_SPLIT,)),
                _read_species,
            ),
        ),
    )
