"""Small images, most of them in arrays: CIFAR-10, CIFAR-100, CIFAR-FS, SVHN, STL-10."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from experiments.datasets.archives import DamagedArchiveError
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
from experiments.datasets.readers import array, column, entries, read_bytes, read_names
from experiments.datasets.splits import ClassSplit, split_of_arrays, split_of_files

# --- CIFAR --------------------------------------------------------------------------------------


def _cifar(
    classes: int,
    folder: str,
    meta: tuple[str, str],
    labels: str,
    files: dict[str, tuple[str, ...]],
) -> Dataset:
    """CIFAR-10 or CIFAR-100, read from the archive for Python.

    Args:
      classes: Number of classes.
      folder: The folder in the archive.
      meta: The file with the names of the classes, and its entry.
      labels: The entry with the labels.
      files: The files of every split: pickles with rows of red, green and blue planes.
    """
    part = Part(folder, (f"cifar-{classes}-python.tar.gz",))

    def read(search_path: SearchPath) -> dict[str, ClassSplit]:
        folder = part.locate(search_path)
        path = inside(folder, meta[0])
        listed = entries(load_pickle(path), path, meta[1])[meta[1]]
        names = column(listed, str, f"{path}: {meta[1]}")
        return {
            split: _read_batches([inside(folder, file) for file in batches], labels, names)
            for split, batches in files.items()
        }

    return Dataset(
        name=f"cifar{classes}",
        description=f"60,000 photographs of {classes} classes (CIFAR-{classes}), 32×32",
        classes={"train": classes, "test": classes},
        layouts=(Layout("the archive for Python", (part.names,), read),),
        image_shape=(32, 32, 3),
        source="Krizhevsky, 2009, https://www.cs.toronto.edu/~kriz/cifar.html",
        folders=(f"cifar{classes}", f"cifar-{classes}", "."),
    )


def _read_batches(paths: list[Path], key: str, names: list[str]) -> ClassSplit:
    images, labels = [], list[int]()
    for path in paths:
        content = entries(load_pickle(path), path, "data", key)
        images.append(array(content["data"], (None, 3072), f"{path}: data"))
        own = column(content[key], int, f"{path}: {key}")
        if len(own) != len(images[-1]):
            raise DamagedArchiveError(f"{path}: {len(images[-1])} images, but {len(own)} labels")
        labels += own
    pixels = np.concatenate(images).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return split_of_arrays(pixels, labels, names, paths[0] if len(paths) == 1 else paths[0].parent)


_FS_IMAGES = "cifar100/data"
_FS_LISTS = {
    split: f"cifar100/splits/bertinetto/{part}.txt" for split, part in FEW_SHOT_PARTS.items()
}
_FS_PICKLES = {split: f"CIFAR_FS_{part}.pickle" for split, part in FEW_SHOT_PARTS.items()}


def _read_list(path: Path, search_path: SearchPath) -> ClassSplit:
    images, names = search_path.get(_FS_IMAGES), column(read_names(path), Path, path)
    return split_of_files({name: list_images(images / name) for name in names}, path)


# --- SVHN ---------------------------------------------------------------------------------------


def _read_digits(search_path: SearchPath, files: tuple[str, ...]) -> dict[str, ClassSplit]:
    splits = {}
    for split in files:
        path = search_path.get(f"{split}_32x32.mat")
        content = load_mat(path, "X", "y")
        images = np.moveaxis(array(content["X"], (32, 32, 3, None), f"{path}: X"), -1, 0)
        # The digit 0 has the label 10.
        labels = [0 if label == 10 else label for label in column(content["y"], int, f"{path}: y")]
        digits = [str(digit) for digit in range(10)]
        splits[split] = split_of_arrays(np.ascontiguousarray(images), labels, digits, path)
    return splits


def _svhn(name: str, description: str, files: tuple[str, ...]) -> Dataset:
    """SVHN with the splits of `files`, each a MATLAB file."""
    needs = tuple((f"{split}_32x32.mat",) for split in files)
    read = functools.partial(_read_digits, files=files)
    return Dataset(
        name=name,
        description=description,
        classes=dict.fromkeys(files, 10),
        layouts=(Layout("the MATLAB files of cropped digits", needs, read),),
        image_shape=(32, 32, 3),
        source="Netzer et al., NIPS Workshop 2011, http://ufldl.stanford.edu/housenumbers/",
        images_of="svhn",
        folders=("svhn", "SVHN", "."),
    )


# --- STL-10 -------------------------------------------------------------------------------------

_STL = Part("stl10_binary", ("stl10_binary.tar.gz",))
_STL_FILES = ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "class_names.txt")
_STL_BYTES = 3 * 96 * 96


def _read_binary(search_path: SearchPath) -> dict[str, ClassSplit]:
    folder = _STL.locate(search_path, lambda member: member.rpartition("/")[2] in _STL_FILES)
    files = {name: inside(folder, name) for name in _STL_FILES}
    names = read_names(files["class_names.txt"])
    splits = {}
    for split in ("train", "test"):
        path = files[f"{split}_X.bin"]
        content = read_bytes(path)
        if len(content) % _STL_BYTES:
            raise DamagedArchiveError(f"{path} is truncated: it has no {_STL_BYTES} bytes an image")
        # Red, green and blue planes in column-major order.
        images = np.frombuffer(content, np.uint8).reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1)
        labels = np.frombuffer(read_bytes(files[f"{split}_y.bin"]), np.uint8)
        splits[split] = split_of_arrays(images, labels.astype(np.int64) - 1, names, path)
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
        labels="labels",
        files={"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
    ),
    _cifar(
        100,
        folder="cifar-100-python",
        meta=("meta", "fine_label_names"),
        labels="fine_labels",
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
