"""Sets of small images that come as arrays: CIFAR-10, CIFAR-100, SVHN, STL-10."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.archives import DamagedArchiveError, load_mat, load_pickle
from experiments.data.builders.frame import Facts
from experiments.data.builders.kinds import ClassificationBuilder
from experiments.data.builders.layouts import Layout, Part, Place, inside
from experiments.data.builders.pictures import (
    Picture,
    Pictures,
    entries,
    read_lines,
    text,
)


def _rows(images: np.ndarray, labels: Any, names: list[str], source: Path) -> Pictures:
    """Images uint8 [n, h, w, 3] with a number from 0 each."""
    labels = np.asarray(labels).ravel()
    if labels.dtype.kind not in "iu" or len(labels) != len(images):
        raise DamagedArchiveError(f"{source}: {len(images)} images, but {labels.size} labels")
    if labels.size and not 0 <= labels.min() <= labels.max() < len(names):
        raise DamagedArchiveError(f"{source}: a label is not among the {len(names)} classes")
    return Pictures(
        {name: np.flatnonzero(labels == label).tolist() for label, name in enumerate(names)},
        lambda: lambda row: Picture(images[row], f"{source}, image {row}"),
        source,
    )


# --- CIFAR --------------------------------------------------------------------------------------


def _cifar(
    part: Part, meta: tuple[str, str], files: dict[str, tuple[str, ...]], labels: str
) -> Layout:
    """The "python version": pickles with rows of red, green and blue planes."""

    def read(place: Place) -> dict[str, Pictures]:
        folder = part.locate(place)
        path = inside(folder, meta[0])
        names = [text(name) for name in entries(load_pickle(path), path, meta[1])[meta[1]]]
        return {split: _batches(folder, of, labels, names) for split, of in files.items()}

    return Layout("the archive for Python", (part.names,), read)


def _batches(folder: Path, files: tuple[str, ...], key: str, names: list[str]) -> Pictures:
    images, labels = [], []
    for file in files:
        content = entries(load_pickle(inside(folder, file)), folder / file, "data", key)
        data = np.asarray(content["data"])
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
            raise DamagedArchiveError(
                f"{folder / file}: data should be uint8 [n, 3072], not {data.dtype} "
                f"{list(data.shape)}"
            )
        images.append(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels.append(np.asarray(content[key]).ravel())
    source = folder / files[0] if len(files) == 1 else folder
    return _rows(np.concatenate(images), np.concatenate(labels), names, source)


class Cifar10(ClassificationBuilder):
    """10 kinds of animals and vehicles."""

    name = "cifar10"
    FACTS = Facts(
        description="60,000 photographs of 10 classes (CIFAR-10), 32×32",
        image_shape=(32, 32, 3),
        classes={"train": 10, "test": 10},
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        citation="Krizhevsky: Learning multiple layers of features from tiny images. 2009.",
        folders=("cifar10", "cifar-10", "."),
        layouts=(
            _cifar(
                Part("cifar-10-batches-py", ("cifar-10-python.tar.gz",)),
                ("batches.meta", "label_names"),
                {
                    "train": tuple(f"data_batch_{i}" for i in range(1, 6)),
                    "test": ("test_batch",),
                },
                "labels",
            ),
        ),
    )


class Cifar100(ClassificationBuilder):
    """100 classes, by their fine labels."""

    name = "cifar100"
    FACTS = Facts(
        description="60,000 photographs of 100 classes (CIFAR-100), 32×32",
        image_shape=(32, 32, 3),
        classes={"train": 100, "test": 100},
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        citation="Krizhevsky: Learning multiple layers of features from tiny images. 2009.",
        folders=("cifar100", "cifar-100", "."),
        layouts=(
            _cifar(
                Part("cifar-100-python", ("cifar-100-python.tar.gz",)),
                ("meta", "fine_label_names"),
                {"train": ("train",), "test": ("test",)},
                "fine_labels",
            ),
        ),
    )


# --- SVHN ---------------------------------------------------------------------------------------


def _read_digits(place: Place) -> dict[str, Pictures]:
    splits = {}
    for split in ("train", "test"):
        path = place.get(f"{split}_32x32.mat")
        content = load_mat(path, "X", "y")
        images, labels = content["X"], np.atleast_1d(content["y"])
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
            raise DamagedArchiveError(
                f"{path}: X should be uint8 [32, 32, 3, n], not {images.dtype} {list(images.shape)}"
            )
        if labels.dtype.kind not in "iuf":
            raise DamagedArchiveError(f"{path}: y holds no numbers")
        # The digit 0 is class 10.
        labels = np.where(labels == 10, 0, labels.astype(np.int64))
        images = np.ascontiguousarray(np.moveaxis(images, -1, 0))
        splits[split] = _rows(images, labels, [str(digit) for digit in range(10)], path)
    return splits


class Svhn(ClassificationBuilder):
    """Digits of house numbers."""

    name = "svhn"
    FACTS = Facts(
        description="99,289 digits of house numbers (SVHN, cropped, without extra), 32×32",
        image_shape=(32, 32, 3),
        classes={"train": 10, "test": 10},
        homepage="http://ufldl.stanford.edu/housenumbers/",
        citation="Netzer et al.: Reading digits in natural images with unsupervised feature "
        "learning. NIPS Workshop 2011.",
        folders=("svhn", "SVHN", "."),
        layouts=(
            Layout(
                "the MATLAB files of cropped digits",
                (("train_32x32.mat",), ("test_32x32.mat",)),
                _read_digits,
            ),
        ),
    )


# --- STL-10 -------------------------------------------------------------------------------------

_STL = Part("stl10_binary", ("stl10_binary.tar.gz",))
_STL_BYTES = 3 * 96 * 96


def _read_binary(place: Place) -> dict[str, Pictures]:
    wanted = ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "class_names.txt")
    folder = _STL.locate(place, _ends_with(wanted))
    for name in wanted:
        inside(folder, name)
    names = [line.strip() for line in read_lines(folder / "class_names.txt") if line.strip()]
    splits = {}
    for split in ("train", "test"):
        path = folder / f"{split}_X.bin"
        if path.stat().st_size % _STL_BYTES:
            raise DamagedArchiveError(f"{path} is cut off: not a multiple of {_STL_BYTES} bytes")
        # Planes of red, green and blue, each column by column.
        images = np.fromfile(path, np.uint8).reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1)
        labels = np.fromfile(folder / f"{split}_y.bin", np.uint8).astype(np.int64) - 1
        splits[split] = _rows(images, labels, names, path)
    return splits


def _ends_with(names: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda member: member.rpartition("/")[2] in names


class Stl10(ClassificationBuilder):
    """10 kinds of animals and vehicles; the images without labels are left out."""

    name = "stl10"
    FACTS = Facts(
        description="13,000 labelled photographs of 10 classes (STL-10), 96×96",
        image_shape=(96, 96, 3),
        classes={"train": 10, "test": 10},
        homepage="https://cs.stanford.edu/~acoates/stl10/",
        citation="Coates et al.: An analysis of single-layer networks in unsupervised feature "
        "learning. AISTATS 2011.",
        folders=("stl10", "."),
        layouts=(Layout("the binary archive", (_STL.names,), _read_binary),),
    )
