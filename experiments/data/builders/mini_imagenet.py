"""mini-ImageNet: 100 classes of ImageNet with 600 images each."""

from __future__ import annotations

from pathlib import Path

from experiments.data.builders.archives import DamagedArchiveError, load_pickle
from experiments.data.builders.base import photograph_spec
from experiments.data.builders.images import ClassSplit, split_of_files, split_of_rows
from experiments.data.builders.layouts import FEW_SHOT_PARTS, Layout, SearchPath, labelled_pickles
from experiments.data.builders.readers import column, entries, pixels, read_table, relative, text
from experiments.data.builders.tasks import FewShotBuilder

_CACHES = {split: f"mini-imagenet-cache-{part}.pkl" for split, part in FEW_SHOT_PARTS.items()}
_PHASES = {
    "base": "miniImageNet_category_split_train_phase_train.pickle",
    "validation": "miniImageNet_category_split_val.pickle",
    "novel": "miniImageNet_category_split_test.pickle",
}


def _read_folder(search_path: SearchPath) -> dict[str, ClassSplit]:
    images = search_path.get("images")
    return {
        split: _read_list(search_path.get(f"{part}.csv"), images)
        for split, part in FEW_SHOT_PARTS.items()
    }


def _read_list(path: Path, images: Path) -> ClassSplit:
    classes: dict[str, list[Path]] = {}
    header, rows = read_table(path)
    if not {"filename", "label"} <= {*header}:
        raise DamagedArchiveError(f"{path} should start with the line filename,label")
    for number, row in rows:
        file = relative(row["filename"], f"{path}, line {number}: filename")
        label = text(row["label"], f"{path}, line {number}: label")
        classes.setdefault(label, []).append(images / Path(file).name)
    return split_of_files(classes, path)


def _read_caches(search_path: SearchPath) -> dict[str, ClassSplit]:
    return {split: _read_cache(search_path.get(name)) for split, name in _CACHES.items()}


def _read_cache(path: Path) -> ClassSplit:
    def load() -> dict:
        return entries(load_pickle(path), path, "image_data", "class_dict")

    classes = {
        text(name, f"{path}: class_dict"): column(rows, int, f"{path}: class_dict")
        for name, rows in entries(load()["class_dict"], path).items()
    }
    return split_of_rows(classes, lambda: pixels(load()["image_data"], path), path)


class MiniImagenet(FewShotBuilder):
    """mini-ImageNet in the split of Ravi and Larochelle."""

    name = "mini_imagenet"
    SPEC = photograph_spec(
        description="60,000 photographs of 100 classes of ImageNet",
        image_shape=(84, 84, 3),
        encoding="png",
        classes={"base": 64, "validation": 16, "novel": 20},
        homepage="https://github.com/twitter-research/meta-learning-lstm",
        citation="Ravi and Larochelle: Optimization as a model for few-shot learning. ICLR 2017.",
        folders=("mini-imagenet", "mini_imagenet", "miniImageNet", "."),
        layouts=(
            Layout(
                "images and the lists of Ravi and Larochelle",
                (("images",), ("train.csv",), ("val.csv",), ("test.csv",)),
                _read_folder,
            ),
            Layout(
                "pickles with image_data and class_dict",
                tuple((name,) for name in _CACHES.values()),
                _read_caches,
            ),
            labelled_pickles("pickles with data and labels", _PHASES),
        ),
    )
