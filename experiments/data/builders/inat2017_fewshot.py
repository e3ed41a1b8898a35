"""iNaturalist 2017 few-shot (meta-iNat): 1,135 species, 908 to learn from."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from experiments.data.archives import DamagedArchiveError, load_torch_list
from experiments.data.builders.frame import Facts
from experiments.data.builders.kinds import FewShotBuilder
from experiments.data.builders.layouts import Layout, Place
from experiments.data.builders.pictures import Pictures, list_images, picture_files, read_json

_IMAGES = "train_val_images"
_ARCHIVES = ("train_val_images.tar.gz", "train_val2017.tar.gz")
_BOXES = ("train_2017_bboxes.json", "train_2017_bboxes.zip")
_SPLIT = "inat2017_fewshot_split.json"
_CATEGORIES = {
    "base": ("meta_iNat_traincats.pth", "meta_iNat_split/meta_iNat_traincats.pth"),
    "novel": ("meta_iNat_testcats.pth", "meta_iNat_split/meta_iNat_testcats.pth"),
}


def _read_boxes(place: Place) -> tuple[Path, dict[int, str], dict[int, list[str]]]:
    """The file, species by category, and the image files with a bounding box by category."""
    path = place.get(*_BOXES)
    if path.suffix == ".zip":
        [*found] = place.extract(path).rglob(_BOXES[0])
        if not found:
            raise DamagedArchiveError(f"{path} holds no {_BOXES[0]}")
        path = found[0]
    content = read_json(path, "annotations", "images", "categories")
    try:
        species = {int(entry["id"]): str(entry["name"]) for entry in content["categories"]}
        files = {entry["id"]: str(entry["file_name"]) for entry in content["images"]}
        images: dict[int, dict[str, None]] = {}
        for entry in content["annotations"]:
            category = images.setdefault(int(entry["category_id"]), {})
            category[files[entry["image_id"]]] = None
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedArchiveError(f"{path} has an entry without {error}") from error
    return path, species, {category: list(names) for category, names in images.items()}


def _read_categories(place: Place) -> dict[str, Pictures]:
    path, species, boxed = _read_boxes(place)
    splits: dict[str, dict[str, list[str]]] = {}
    for split, names in _CATEGORIES.items():
        splits[split] = {}
        for category in load_torch_list(place.get(*names)):
            if category not in species:
                raise DamagedArchiveError(f"{place.get(*names)}: {path} has no class {category}")
            splits[split][species[category]] = boxed.get(category, [])
    return {
        split: picture_files(classes, place.get(*_CATEGORIES[split]))
        for split, classes in _locate(place, splits).items()
    }


def _read_species(place: Place) -> dict[str, Pictures]:
    path = place.get(_SPLIT)
    lists = read_json(path, "base", "novel")
    wanted = {split: [str(name) for name in lists[split]] for split in ("base", "novel")}
    if place.find(*_BOXES):
        _, species, boxed = _read_boxes(place)
        files = {name: boxed.get(category, []) for category, name in species.items()}
        splits = {
            split: {name: files.get(name, []) for name in names} for split, names in wanted.items()
        }
        located = _locate(place, splits)
    else:
        every = {name for names in wanted.values() for name in names}
        images = place.folder(
            _IMAGES, _ARCHIVES, lambda member: PurePosixPath(member).parent.name in every
        )
        folders = {folder.name: folder for folder in sorted(images.glob("*/*/"))}
        located = {
            split: {name: list_images(folders.get(name, images / name)) for name in names}
            for split, names in wanted.items()
        }
    return {split: picture_files(classes, path) for split, classes in located.items()}


def _locate(
    place: Place, splits: dict[str, dict[str, list[str]]]
) -> dict[str, dict[str, list[Path]]]:
    """Image files by their names in the annotations, which begin with the images' folder."""
    every = {name for classes in splits.values() for names in classes.values() for name in names}
    top = place.folder(
        _IMAGES, _ARCHIVES, lambda member: PurePosixPath(member).as_posix() in every
    ).parent
    return {
        split: {name: [top / file for file in files] for name, files in classes.items()}
        for split, classes in splits.items()
    }


def _read_prepared(place: Place) -> dict[str, Pictures]:
    splits = {}
    for split, part in (("base", "train"), ("novel", "test")):
        folder = place.get(f"meta_iNat/{part}")
        classes = {path.name: list_images(path) for path in folder.iterdir() if path.is_dir()}
        splits[split] = picture_files(classes, folder)
    return splits


class Inat2017Fewshot(FewShotBuilder):
    """iNaturalist 2017 in the split of Wertheimer and Hariharan (meta-iNat), 84×84."""

    name = "inat2017_fewshot"
    FACTS = Facts(
        description="243,986 photographs of 1,135 species, 84×84",
        image_shape=(84, 84, 3),
        sizes=True,
        classes={"base": 908, "novel": 227},
        homepage="https://github.com/visipedia/inat_comp/tree/master/2017",
        citation=(
            "Wertheimer and Hariharan: Few-shot learning with localization in realistic settings. "
            "CVPR 2019."
        ),
        folders=("inat2017", "inat2017_fewshot", "."),
        layouts=(
            Layout(
                "the competition's images with boxes and the category lists of FRN",
                ((_IMAGES, *_ARCHIVES), _BOXES, *_CATEGORIES.values()),
                _read_categories,
            ),
            Layout(
                "the images that FRN's script prepares",
                (("meta_iNat/train",), ("meta_iNat/test",)),
                _read_prepared,
            ),
            Layout(
                'the competition\'s images and your own split {"base": [species, ...], "novel": '
                "[...]} (only images with a box, if the boxes are there)",
                ((_IMAGES, *_ARCHIVES), (_SPLIT,)),
                _read_species,
            ),
        ),
    )
