"""Stanford Cars: 196 makes, models and years."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from experiments.datasets.archives import names_file
from experiments.datasets.base import TRAIN_TEST, photographs
from experiments.datasets.layouts import Layout, Part, SearchPath
from experiments.datasets.pickles import load_mat
from experiments.datasets.readers import relative
from experiments.datasets.splits import ClassSplit, open_files

_DEVKIT = ("car_devkit.tgz", "cars_devkit.tgz")
_META, _TRAIN = (
    Part(f"devkit/{name}.mat", _DEVKIT, (f"devkit/{name}.mat", f"{name}.mat"))
    for name in ("cars_meta", "cars_train_annos")
)
# The devkit has no classes of the test images.
_TEST = ("cars_test_annos_withlabels.mat", "devkit/cars_test_annos_withlabels.mat")
_TRAIN_IMAGES, _TEST_IMAGES = (
    Part(name, (f"{name}.tgz",), (f"{name}/{name}", name)) for name in ("cars_train", "cars_test")
)


def _read(search_path: SearchPath) -> dict[str, ClassSplit]:
    names = load_mat(_META.locate(search_path), "class_names")["class_names"].tolist()
    train, test = _TRAIN.locate(search_path), search_path.get(*_TEST)
    return {
        "train": _read_list(train, names, _TRAIN_IMAGES.locate(search_path)),
        "test": _read_list(test, names, _TEST_IMAGES.locate(search_path)),
    }


@names_file
def _read_list(path: Path, names: list[str], folder: Path) -> ClassSplit:
    classes: dict[str, list[Path]] = {name: [] for name in names}
    for image in load_mat(path, "annotations")["annotations"]:
        file = PurePosixPath(relative(image["fname"], path)).name
        classes[names[image["class"] - 1]].append(folder / file)
    return ClassSplit({name: sorted(of) for name, of in classes.items()}, open_files, path)


DATASETS = (
    photographs(
        name="cars",
        description="16,185 photographs of 196 cars (Stanford Cars)",
        classes={"train": 196, "test": 196},
        layouts=(
            Layout(
                "the two archives of Krause et al., the devkit and the classes of the test images",
                (_TRAIN_IMAGES.names, _TEST_IMAGES.names, _META.names, _TRAIN.names, _TEST),
                _read,
            ),
        ),
        split_folders=TRAIN_TEST,
        source="Krause et al., 3dRR 2013, https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
        folders=("stanford_cars", "cars", "."),
    ),
)
