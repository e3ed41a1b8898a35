"""The MNIST family: small greyscale images in IDX files."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.datasets.archives import reading
from experiments.datasets.base import Dataset
from experiments.datasets.layouts import Layout, Part, SearchPath
from experiments.datasets.readers import read_idx
from experiments.datasets.splits import ClassSplit, split_of_arrays

_CLOTHES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_HIRAGANA = (
    "あいうえおかきくけこさしすせそたちつてとなにぬねの"
    "はひふへほまみむめもやゆよらりるれろわゐゑをんゝ"
)
_CAPITALS = string.digits + string.ascii_uppercase
# Of 15 letters, the small and the capital form are one class.
_MERGED = f"{_CAPITALS}abdefghnqrt"


def _idx(
    name: str,
    description: str,
    names: Sequence[str],
    prefix: str = "",
    test: str = "t10k",
    archives: tuple[str, ...] = (),
    first: int = 0,
    transposed: bool = False,
    **more: Any,
) -> Dataset:
    """A data set of four IDX files, perhaps in `archives` with other sets.

    Many sets have files of the same names, so that each needs a folder of its own. `names` are
    those of the classes, whose labels count from `first`; `prefix` begins the names of the files,
    of which those for test have `test` in place of `train`. EMNIST stores images `transposed`.
    """

    def part(split: str, kind: str, axes: int) -> Part:
        start, end = f"{prefix}{split}-{kind}", f"idx{axes}-ubyte"
        file = f"{start}-{end}.gz"
        return Part(file, archives, (file, f"{start}-{end}", f"{start}.{end}"))

    parts = {
        split: (part(of, "images", 3), part(of, "labels", 1))
        for split, of in {"train": "train", "test": test}.items()
    }

    def keep(member: str) -> bool:
        return member.rpartition("/")[2].startswith(prefix)

    def read(search_path: SearchPath) -> dict[str, ClassSplit]:
        splits = {}
        for split, of in parts.items():
            path, path_of_labels = (part.locate(search_path, keep) for part in of)
            images, labels = read_idx(path), read_idx(path_of_labels).astype(np.int64) - first
            with reading(path, "IDX file of images"):
                images = images.reshape(len(images), 28, 28, 1)
            images = images.swapaxes(1, 2) if transposed else images
            splits[split] = split_of_arrays(path_of_labels, images, labels, names)
        return splits

    needs = tuple(part.names for of in parts.values() for part in of)
    return Dataset(
        name=name,
        description=f"{description}, 28×28, greyscale",
        classes=dict.fromkeys(parts, len(names)),
        layouts=(Layout("the IDX files, compressed or not", needs, read),),
        image_shape=(28, 28, 1),
        **more,
    )


_KUZUSHIJI: dict[str, Any] = {
    "images_of": "kmnist",
    "source": "Clanuwat et al., 2018, CC BY-SA 4.0, https://github.com/rois-codh/kmnist",
}


def _emnist(split: str, description: str, names: str, first: int = 0) -> Dataset:
    """One of the six splits that EMNIST is published in."""
    return _idx(
        f"emnist_{split}",
        f"{description} (EMNIST {split})",
        names,
        prefix=f"emnist-{split}-",
        test="test",
        archives=("gzip.zip",),
        first=first,
        transposed=True,
        folders=("emnist", "EMNIST/raw", "gzip", "."),
        images_of="mnist",
        source="Cohen et al., IJCNN 2017, https://www.nist.gov/itl/iad/image-group/emnist-dataset",
    )


DATASETS = (
    _idx(
        "fashion_mnist",
        "70,000 photographs of 10 kinds of clothes (Fashion-MNIST)",
        _CLOTHES,
        folders=(
            *("fashion-mnist", "fashion_mnist", "FashionMNIST/raw"),
            "/usr/share/datasets/fashion-mnist",  # Debian's package dataset-fashion-mnist.
        ),
        source="Xiao et al., 2017, https://github.com/zalandoresearch/fashion-mnist",
    ),
    _idx(
        "mnist",
        "70,000 handwritten digits (MNIST)",
        string.digits,
        folders=("mnist", "MNIST/raw"),
        source="LeCun et al., 1998, http://yann.lecun.com/exdb/mnist/",
    ),
    _idx(
        "kmnist",
        "70,000 cursive hiragana of 10 kinds (Kuzushiji-MNIST)",
        "おきすつなはまやれを",
        folders=("kmnist", "KMNIST/raw"),
        **_KUZUSHIJI,
    ),
    _idx(
        "k49",
        "270,912 cursive hiragana of 49 kinds (Kuzushiji-49)",
        _HIRAGANA,
        folders=("k49", "kuzushiji-49"),
        **_KUZUSHIJI,
    ),
    _emnist("balanced", "131,600 handwritten digits and letters of 47 kinds", _MERGED),
    _emnist(
        "byclass",
        "814,255 handwritten digits and letters of 62 kinds",
        _CAPITALS + string.ascii_lowercase,
    ),
    _emnist("bymerge", "814,255 handwritten digits and letters of 47 kinds", _MERGED),
    _emnist("digits", "280,000 handwritten digits", string.digits),
    _emnist("letters", "145,600 handwritten letters", string.ascii_lowercase, first=1),
    _emnist("mnist", "70,000 handwritten digits", string.digits),
)
