"""Stanford Cars: 196 makes, models and years."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from experiments.data.builders.archives import DamagedArchiveError, load_mat
from experiments.data.builders.base import photograph_spec
from experiments.data.builders.images import ClassSplit, open_files
from experiments.data.builders.layouts import (
    TRAIN_TEST_FOLDERS,
    Layout,
    Part,
    SearchPath,
    class_folders,
)
from experiments.data.builders.readers import column, records
from experiments.data.builders.tasks import ClassificationBuilder

_DEVKIT = ("car_devkit.tgz", "cars_devkit.tgz")
_META = Part("devkit/cars_meta.mat", _DEVKIT, ("devkit/cars_meta.mat", "cars_meta.mat"))
_TRAIN = Part(
    "devkit/cars_train_annos.mat", _DEVKIT, ("devkit/cars_train_annos.mat", "cars_train_annos.mat")
)
# The devkit has no classes of the test images.
_TEST = ("cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat")
_TRAIN_IMAGES = Part("cars_train", ("cars_train.tgz",), ("cars_train/cars_train", "cars_train"))
_TEST_IMAGES = Part("cars_test", ("cars_test.tgz",), ("cars_test/cars_test", "cars_test"))
_ALL = ("cars_annos.mat",)
_ALL_IMAGES = Part("car_ims", ("car_ims.tgz",))


def _annotations(path: Path, **fields: type) -> list[tuple]:
    return records(load_mat(path, "annotations"), "annotations", path, **fields)


def _pictures(path: Path, names: list[str], entries: list[tuple], folder: Path) -> ClassSplit:
    """The images of a folder, from the file and the class of each."""
    classes: dict[str, list[Path]] = {name: [] for name in names}
    for file, label in entries:
        if not 1 <= label <= len(names):
            raise DamagedArchiveError(f"{path}: the class {label} has no name")
        classes[names[label - 1]].append(folder / PurePosixPath(file).name)
    return ClassSplit({name: sorted(of) for name, of in classes.items()}, open_files, path)


def _names(path: Path) -> list[str]:
    names = column(load_mat(path, "class_names")["class_names"], str, f"{path}: class_names")
    if len({*names}) < len(names):
        raise DamagedArchiveError(f"{path} has a class twice")
    return names


def _read_two(search_path: SearchPath) -> dict[str, ClassSplit]:
    names = _names(_META.locate(search_path))
    splits = {}
    for split, path, images in (
        ("train", _TRAIN.locate(search_path), _TRAIN_IMAGES.locate(search_path)),
        ("test", search_path.get(*_TEST), _TEST_IMAGES.locate(search_path)),
    ):
        entries = _annotations(path, fname=Path, **{"class": int})
        splits[split] = _pictures(path, names, entries, images)
    return splits


def _read_one(search_path: SearchPath) -> dict[str, ClassSplit]:
    path, images = search_path.get(*_ALL), _ALL_IMAGES.locate(search_path)
    names = _names(path)
    entries = _annotations(path, relative_im_path=Path, test=int, **{"class": int})
    return {
        split: _pictures(path, names, [(f, label) for f, t, label in entries if t == test], images)
        for test, split in enumerate(("train", "test"))
    }


class Cars(ClassificationBuilder):
    """196 cars by make, model and year."""

    name = "cars"
    SPEC = photograph_spec(
        description="16,185 photographs of 196 cars (Stanford Cars)",
        classes={"train": 196, "test": 196},
        homepage="https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
        citation="Krause et al.: 3D object representations for fine-grained categorization. "
        "3dRR 2013.",
        folders=("stanford_cars", "cars", "."),
        layouts=(
            Layout(
                "the two archives of Krause et al., the devkit and the classes of the test images",
                (_TRAIN_IMAGES.names, _TEST_IMAGES.names, _META.names, _TRAIN.names, _TEST),
                _read_two,
            ),
            Layout("the archive of all images", (_ALL_IMAGES.names, _ALL), _read_one),
            class_folders("cars", TRAIN_TEST_FOLDERS),
        ),
    )
