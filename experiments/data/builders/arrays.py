"""Data sets of small images stored as arrays: CIFAR-10, CIFAR-100, SVHN, STL-10."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.builders.archives import DamagedArchiveError, load_mat, load_pickle, reading
from experiments.data.builders.base import DatasetSpec
from experiments.data.builders.images import ClassSplit, SourceImage
from experiments.data.builders.layouts import Layout, Part, SearchPath, inside
from experiments.data.builders.readers import column, entries, read_lines
from experiments.data.builders.tasks import ClassificationBuilder
from experiments.storage import regular


def array_split(images: np.ndarray, labels: Any, names: list[str], source: Path) -> ClassSplit:
    """A split from images uint8 [n, h, w, 3] and labels [n], counted from 0."""
    labels = np.array(column(labels, int, f"{source}: labels"), np.int64)
    if len(labels) != len(images):
        raise DamagedArchiveError(f"{source}: {len(images)} images, but {labels.size} labels")
    if len({*names}) < len(names):
        raise DamagedArchiveError(f"{source}: two of the classes have one name")
    if labels.size and not 0 <= labels.min() <= labels.max() < len(names):
        raise DamagedArchiveError(f"{source}: a label is not one of the {len(names)} classes")
    return ClassSplit(
        {name: np.flatnonzero(labels == label).tolist() for label, name in enumerate(names)},
        lambda: lambda row: SourceImage(images[row], f"{source}, image {row}"),
        source,
    )


# --- CIFAR --------------------------------------------------------------------------------------


def _cifar_spec(
    classes: int,
    folder: str,
    names: tuple[str, str],
    labels: str,
    files: dict[str, tuple[str, ...]],
) -> DatasetSpec:
    """The specification of CIFAR-10 or CIFAR-100, read from the archive for Python.

    Args:
      classes: Number of classes.
      folder: The folder in the archive.
      names: The file with the names of the classes, and its entry.
      labels: The entry with the labels.
      files: The files of every split: pickles with rows of red, green and blue planes.

    Returns:
      The specification.
    """
    part = Part(folder, (f"cifar-{classes}-python.tar.gz",))

    def read(search_path: SearchPath) -> dict[str, ClassSplit]:
        folder = part.locate(search_path)
        path = inside(folder, names[0])
        listed = entries(load_pickle(path), path, names[1])[names[1]]
        class_names = column(listed, str, f"{path}: {names[1]}")
        return {
            split: _read_batches(folder, batches, labels, class_names)
            for split, batches in files.items()
        }

    return DatasetSpec(
        description=f"60,000 photographs of {classes} classes (CIFAR-{classes}), 32×32",
        image_shape=(32, 32, 3),
        classes={"train": classes, "test": classes},
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        citation="Krizhevsky: Learning multiple layers of features from tiny images. 2009.",
        folders=(f"cifar{classes}", f"cifar-{classes}", "."),
        layouts=(Layout("the archive for Python", (part.names,), read),),
    )


def _read_batches(folder: Path, files: tuple[str, ...], key: str, names: list[str]) -> ClassSplit:
    images, labels = [], list[int]()
    for file in files:
        content = entries(load_pickle(inside(folder, file)), folder / file, "data", key)
        data = content["data"]
        if not isinstance(data, np.ndarray):
            raise DamagedArchiveError(f"{folder / file}: data should be an array")
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
            raise DamagedArchiveError(
                f"{folder / file}: data should be uint8 [n, 3072], not {data.dtype} "
                f"{list(data.shape)}"
            )
        images.append(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        own = column(content[key], int, f"{folder / file}: {key}")
        if len(own) != len(data):
            raise DamagedArchiveError(f"{folder / file}: {len(data)} images, but {len(own)} labels")
        labels += own
    source = folder / files[0] if len(files) == 1 else folder
    return array_split(np.concatenate(images), labels, names, source)


class Cifar10(ClassificationBuilder):
    """10 classes of animals and vehicles."""

    name = "cifar10"
    SPEC = _cifar_spec(
        10,
        folder="cifar-10-batches-py",
        names=("batches.meta", "label_names"),
        labels="labels",
        files={"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
    )


class Cifar100(ClassificationBuilder):
    """100 classes, from the fine labels."""

    name = "cifar100"
    SPEC = _cifar_spec(
        100,
        folder="cifar-100-python",
        names=("meta", "fine_label_names"),
        labels="fine_labels",
        files={"train": ("train",), "test": ("test",)},
    )


# --- SVHN ---------------------------------------------------------------------------------------


def _read_digits(files: tuple[str, ...], search_path: SearchPath) -> dict[str, ClassSplit]:
    splits = {}
    for split in files:
        path = search_path.get(f"{split}_32x32.mat")
        content = load_mat(path, "X", "y")
        images, labels = content["X"], column(content["y"], int, f"{path}: y")
        if not isinstance(images, np.ndarray):
            raise DamagedArchiveError(f"{path}: X should be an array")
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
            raise DamagedArchiveError(
                f"{path}: X should be uint8 [32, 32, 3, n], not {images.dtype} {list(images.shape)}"
            )
        labels = [0 if label == 10 else label for label in labels]  # The digit 0 has the label 10.
        images = np.ascontiguousarray(np.moveaxis(images, -1, 0))
        splits[split] = array_split(images, labels, [str(digit) for digit in range(10)], path)
    return splits


def _svhn_spec(description: str, files: tuple[str, ...]) -> DatasetSpec:
    """The specification of SVHN with the splits of `files`, each a MATLAB file."""
    return DatasetSpec(
        description=description,
        image_shape=(32, 32, 3),
        classes=dict.fromkeys(files, 10),
        homepage="http://ufldl.stanford.edu/housenumbers/",
        citation="Netzer et al.: Reading digits in natural images with unsupervised feature "
        "learning. NIPS Workshop 2011.",
        folders=("svhn", "SVHN", "."),
        layouts=(
            Layout(
                "the MATLAB files of cropped digits",
                tuple((f"{split}_32x32.mat",) for split in files),
                partial(_read_digits, files),
            ),
        ),
    )


class Svhn(ClassificationBuilder):
    """Digits of house numbers."""

    name = "svhn"
    SPEC = _svhn_spec(
        "99,289 digits of house numbers (SVHN, cropped, without extra), 32×32", ("train", "test")
    )


class SvhnExtra(ClassificationBuilder):
    """Digits of house numbers, with the easier digits of `extra` as a split of their own.

    A set of its own, because `extra_32x32.mat` is large (1.3 GB), and most uses of SVHN leave it
    out. Classification trains on `train` and `extra`.
    """

    name = "svhn_extra"
    SPEC = _svhn_spec(
        "630,420 digits of house numbers (SVHN, cropped, with extra), 32×32",
        ("train", "extra", "test"),
    )


# --- STL-10 -------------------------------------------------------------------------------------

_STL = Part("stl10_binary", ("stl10_binary.tar.gz",))
_STL_BYTES = 3 * 96 * 96


def _read_binary(search_path: SearchPath) -> dict[str, ClassSplit]:
    files = ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "class_names.txt")
    folder = _STL.locate(search_path, _ends_with(files))
    for name in files:
        inside(folder, name)
    names = [line.strip() for line in read_lines(folder / "class_names.txt") if line.strip()]
    splits = {}
    for split in ("train", "test"):
        path = folder / f"{split}_X.bin"
        if path.stat().st_size % _STL_BYTES:
            raise DamagedArchiveError(
                f"{path} is truncated: its size is not a multiple of {_STL_BYTES} bytes"
            )
        with reading(path, "binary file"):
            # Red, green and blue planes in column-major order.
            images = np.fromfile(regular(path), np.uint8).reshape(-1, 3, 96, 96)
            images = images.transpose(0, 3, 2, 1)
            labels = np.fromfile(regular(folder / f"{split}_y.bin"), np.uint8).astype(np.int64) - 1
        splits[split] = array_split(images, labels, names, path)
    return splits


def _ends_with(names: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda member: member.rpartition("/")[2] in names


class Stl10(ClassificationBuilder):
    """10 classes of animals and vehicles, without the unlabelled images."""

    name = "stl10"
    SPEC = DatasetSpec(
        description="13,000 labelled photographs of 10 classes (STL-10), 96×96",
        image_shape=(96, 96, 3),
        classes={"train": 10, "test": 10},
        homepage="https://cs.stanford.edu/~acoates/stl10/",
        citation="Coates et al.: An analysis of single-layer networks in unsupervised feature "
        "learning. AISTATS 2011.",
        folders=("stl10", "."),
        layouts=(Layout("the binary archive", (_STL.names,), _read_binary),),
    )
