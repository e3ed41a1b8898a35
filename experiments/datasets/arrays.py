"""Small images, most of them in arrays: CIFAR-10, CIFAR-100, CIFAR-FS, SVHN, STL-10."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.core.storage import regular
from experiments.datasets.base import Dataset
from experiments.datasets.files import list_images
from experiments.datasets.layouts import (
    FEW_SHOT_PARTS,
    Layout,
    Part,
    SearchPath,
    by_split,
    inside,
    labelled_pickles,
)
from experiments.datasets.pickles import load_mat, load_pickle
from experiments.datasets.readers import read_names, relative
from experiments.datasets.splits import ClassSplit, split_of_arrays, split_of_files


def _cifar(
    classes: int, folder: str, meta: tuple[str, str], label: str, files: dict[str, tuple[str, ...]]
) -> Dataset:
    """CIFAR-10 or CIFAR-100, from pickles with rows of red, green and blue planes.

    `meta` are the file with the names of the classes and its entry; `files` are those of a split.
    """
    part = Part(folder, (f"cifar-{classes}-python.tar.gz",))

    def read(search_path: SearchPath) -> dict[str, ClassSplit]:
        folder, splits = part.locate(search_path), {}
        names = load_pickle(inside(folder, meta[0]), meta[1])[meta[1]]
        for split, batches in files.items():
            paths = [inside(folder, file) for file in batches]
            contents = [load_pickle(path, "data", label) for path in paths]
            planes = np.concatenate([np.reshape(c["data"], (-1, 3, 32, 32)) for c in contents])
            labels = np.concatenate([c[label] for c in contents])
            splits[split] = split_of_arrays(paths[0], planes.transpose(0, 2, 3, 1), labels, names)
        return splits

    return Dataset(
        name=f"cifar{classes}",
        description=f"60,000 photographs of {classes} classes (CIFAR-{classes}), 32×32",
        classes={"train": classes, "test": classes},
        layouts=(Layout("the archive for Python", (part.names,), read),),
        image_shape=(32, 32, 3),
        source="Krizhevsky, 2009, https://www.cs.toronto.edu/~kriz/cifar.html",
        folders=(f"cifar{classes}", f"cifar-{classes}", "."),
    )


_FS_IMAGES = "cifar100/data"
_FS_LISTS = {
    split: f"cifar100/splits/bertinetto/{part}.txt" for split, part in FEW_SHOT_PARTS.items()
}
_FS_PICKLES = {split: f"CIFAR_FS_{part}.pickle" for split, part in FEW_SHOT_PARTS.items()}


def _read_list(path: Path, search_path: SearchPath) -> ClassSplit:
    images, names = search_path.get(_FS_IMAGES), [relative(n, path) for n in read_names(path)]
    return split_of_files({name: list_images(images / name) for name in names}, path)


def _svhn(name: str, description: str, files: tuple[str, ...]) -> Dataset:
    """SVHN with the splits of `files`, each a MATLAB file."""

    def read_digits(path: Path, search_path: SearchPath) -> ClassSplit:
        content = load_mat(path, "X", "y")
        images = np.ascontiguousarray(np.moveaxis(content["X"], -1, 0))
        # The digit 0 has the label 10.
        labels = np.where(content["y"] == 10, 0, content["y"])
        return split_of_arrays(path, images, labels, "0123456789")

    needs = {split: f"{split}_32x32.mat" for split in files}
    return Dataset(
        name=name,
        description=description,
        classes=dict.fromkeys(files, 10),
        layouts=(by_split("the MATLAB files of cropped digits", needs, read_digits),),
        image_shape=(32, 32, 3),
        source="Netzer et al., NIPS Workshop 2011, http://ufldl.stanford.edu/housenumbers/",
        images_of="svhn",
        folders=("svhn", "SVHN", "."),
    )


_STL = Part("stl10_binary", ("stl10_binary.tar.gz",))
_STL_FILES = ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "class_names.txt")


def _read_binary(search_path: SearchPath) -> dict[str, ClassSplit]:
    folder = _STL.locate(search_path, lambda member: member.rpartition("/")[2] in _STL_FILES)
    files = {name: inside(folder, name) for name in _STL_FILES}
    names, splits = read_names(files["class_names.txt"]), {}
    for split in ("train", "test"):
        path = files[f"{split}_X.bin"]
        # Red, green and blue planes in column-major order.
        content, size = np.fromfile(regular(path), np.uint8), 3 * 96 * 96
        images = content[: len(content) // size * size].reshape(-1, 3, 96, 96)
        labels = np.fromfile(regular(files[f"{split}_y.bin"]), np.uint8).astype(np.int64) - 1
        splits[split] = split_of_arrays(path, images.transpose(0, 3, 2, 1), labels, names)
    return splits


DATASETS = (
    Dataset(
        name="cifar_fs",
        description="60,000 photographs of the 100 classes of CIFAR-100, 32×32",
        classes={"base": 64, "validation": 16, "novel": 20},
        layouts=(
            by_split("images and lists of Bertinetto et al.", _FS_LISTS, _read_list, (_FS_IMAGES,)),
            labelled_pickles("pickles of MetaOptNet", _FS_PICKLES),
        ),
        image_shape=(32, 32, 3),
        source="Bertinetto et al., ICLR 2019, https://github.com/bertinetto/r2d2",
        images_of="cifar100",
        version="3.0.0",  # As version 4 of photographs.
        folders=("cifar-fs", "cifar_fs", "CIFAR-FS", "."),
    ),
    _cifar(
        10,
        folder="cifar-10-batches-py",
        meta=("batches.meta", "label_names"),
        label="labels",
        files={"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
    ),
    _cifar(
        100,
        folder="cifar-100-python",
        meta=("meta", "fine_label_names"),
        label="fine_labels",
        files={"train": ("train",), "test": ("test",)},
    ),
    _svhn(
        "svhn",
        "99,289 digits of house numbers (SVHN, cropped, without extra), 32×32",
        ("train", "test"),
    ),
    # A set of its own, because `extra_32x32.mat` is large (1.3 GB), and most uses of SVHN leave its
    # easier digits out. Classification trains on `train` and `extra`.
    _svhn(
        "svhn_extra",
        "630,420 digits of house numbers (SVHN, cropped, with extra), 32×32",
        ("train", "extra", "test"),
    ),
    Dataset(
        name="stl10",
        description="13,000 labelled photographs of 10 classes (STL-10), 96×96",
        classes={"train": 10, "test": 10},
        layouts=(Layout("the binary archive", (_STL.names,), _read_binary),),
        image_shape=(96, 96, 3),
        source="Coates et al., AISTATS 2011, https://cs.stanford.edu/~acoates/stl10/",
        images_of="imagenet",
        folders=("stl10", "."),
    ),
)
