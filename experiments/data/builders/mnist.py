"""The MNIST family: small greyscale images in IDX files, some also in files of NumPy."""

from __future__ import annotations

import dataclasses
import gzip
import io
import math
import string
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from experiments.data.builders.archives import DamagedArchiveError
from experiments.data.builders.arrays import array_split
from experiments.data.builders.base import DatasetSpec
from experiments.data.builders.images import ClassSplit
from experiments.data.builders.layouts import Layout, Part, SearchPath
from experiments.data.builders.tasks import ClassificationBuilder

_SIDE = 28
_AXES = {"images": 3, "labels": 1}
"""The axes of the two kinds of files, in the order in which they are read."""
_MOST_BYTES = 2**30
"""Of an array that is read; the largest one published has half as many."""
_FIRST_LABELS = {
    "fashion_mnist": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5],
    "mnist": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4],
}
"""The first training labels of sets whose files have the names of those of others."""
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package `dataset-fashion-mnist` has its files."""

_Arrays = Mapping[str, tuple[np.ndarray, np.ndarray, Path]]
"""For every split the images uint8 [n, 28, 28], the labels uint8 [n], and the file of these."""


# --- Files --------------------------------------------------------------------------------------


def _read_idx(path: Path, kind: str) -> np.ndarray:
    """The images or labels of an IDX file, which may be compressed whatever its name."""
    if path.is_dir():  # As some programs unpack the file.
        raise DamagedArchiveError(f"{path} is a folder; put the file in its place")
    with path.open("rb") as file:
        if file.peek(2)[:2] != b"\x1f\x8b":
            return _read_open_idx(file, path, kind)
        try:
            with gzip.open(file) as unpacked:
                return _read_open_idx(unpacked, path, kind)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DamagedArchiveError(f"{path} is a damaged gzip file: {error}") from error


def _read_open_idx(file: io.BufferedIOBase, path: Path, kind: str) -> np.ndarray:
    """As `_read_idx`. Reads no more than the header says, and one byte: a bomb says less."""
    start = file.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or not start[3]:
        raise DamagedArchiveError(
            f"{path} is not an IDX file: it starts with {start.hex(' ') or 'nothing'}, where "
            f"a file of {kind} has 00 00 08 {_AXES[kind]:02}"
        )
    axes = start[3]
    sizes = file.read(4 * axes)
    if len(sizes) < 4 * axes:
        raise DamagedArchiveError(f"{path} ends within its header")
    if start[2] != 8:
        raise DamagedArchiveError(
            f"{path} has elements of the type {start[2]:#04x}, not unsigned bytes (0x08)"
        )
    shape = tuple(np.frombuffer(sizes, ">u4").tolist())
    size = math.prod(shape)
    if size > _MOST_BYTES:
        raise DamagedArchiveError(
            f"{path} has a header that says {_of(shape)}, above the limit of {_MOST_BYTES:,} bytes"
        )
    content = file.read(size + 1)
    if len(content) != size:
        raise DamagedArchiveError(
            f"{path} should have {size} bytes after its header, which says {_of(shape)}, and has "
            f"{len(content) if len(content) < size else 'more'}"
        )
    try:
        array = np.frombuffer(content, np.uint8).reshape(shape)
    except ValueError as error:  # Of sizes of which one is 0, or too many.
        raise DamagedArchiveError(f"{path} has a damaged header: {error}") from error
    return _checked(array, path, kind)


def _read_npz(path: Path, kind: str, key: str) -> np.ndarray:
    """The images or labels in an array of a file of NumPy."""
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.getinfo(f"{key}.npy")
            with archive.open(member) as file:
                version = npy.read_magic(file)
                old = version == (1, 0)
                header = npy.read_array_header_1_0(file) if old else npy.read_array_header_2_0(file)
                size = math.prod(header[0]) * header[2].itemsize
                if size > _MOST_BYTES or file.tell() + size != member.file_size:
                    raise ValueError(
                        f"it has {member.file_size:,} bytes, and its header says {_of(header[0])}; "
                        f"the limit is {_MOST_BYTES:,} bytes"
                    )
            with archive.open(member) as file:
                array = npy.read_array(file, allow_pickle=False)
    except MemoryError:
        raise
    except Exception as error:
        # A damaged zip file or array can raise almost any exception.
        raise DamagedArchiveError(
            f"{path} is not an .npz file with a readable array {key}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return _checked(array, path, kind)


def _checked(array: np.ndarray, path: Path, kind: str) -> np.ndarray:
    """An array that has the type and the axes of its kind, and at least one element."""
    other = {axes: kind for kind, axes in _AXES.items()}.get(array.ndim)
    if other and other != kind:
        raise DamagedArchiveError(
            f"{path} contains {other}, but should contain {kind}; are the two files swapped?"
        )
    wanted = (len(array) if array.ndim else 0, *[_SIDE] * (_AXES[kind] - 1))
    if array.dtype != np.uint8 or array.shape != wanted:
        expected = f"[n, {_SIDE}, {_SIDE}]" if kind == "images" else "[n]"
        raise DamagedArchiveError(
            f"{path}: {kind} should be uint8 {expected}, not {array.dtype} {list(array.shape)}"
        )
    if not len(array):
        raise DamagedArchiveError(f"{path} has no {kind}")
    return array


def _of(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


# --- Layouts ------------------------------------------------------------------------------------


def _splits(
    name: str, arrays: _Arrays, names: Sequence[str], first: int, transposed: bool
) -> dict[str, ClassSplit]:
    """The splits of a data set, whose labels count its classes from `first`."""
    splits = {}
    for split, (images, labels, source) in arrays.items():
        for other, start in _FIRST_LABELS.items():
            if other != name and labels[: len(start)].tolist() == start:
                raise DamagedArchiveError(
                    f"{source} is the file of {other}, but is in a folder of {name}"
                )
        if transposed:
            images = images.swapaxes(1, 2)
        labels = labels.astype(np.int64) - first
        splits[split] = array_split(images[..., None], labels, list(names), source)
    sizes = [len(images) for images, _, _ in arrays.values()]
    if sizes[0] < sizes[1]:
        train, test = (source for _, _, source in arrays.values())
        raise DamagedArchiveError(
            f"{train} has {sizes[0]} labels, fewer than {test} with {sizes[1]}; are the files for "
            "training and test swapped?"
        )
    return splits


def _idx_files(
    name: str,
    names: Sequence[str],
    *,
    prefix: str = "",
    test: str = "t10k",
    archives: tuple[str, ...] = (),
    first: int = 0,
    transposed: bool = False,
) -> Layout:
    """The layout with four IDX files.

    Args:
      name: The data set.
      names: The names of its classes.
      prefix: What the names of its files begin with.
      test: What the names of the test files have in place of `train`.
      archives: Archives that contain the files, compressed and with other sets.
      first: The label of the first class.
      transposed: Whether the images are stored column by column.

    Returns:
      The layout.
    """

    def part(split: str, kind: str) -> Part:
        start, end = f"{prefix}{split}-{kind}", f"idx{_AXES[kind]}-ubyte"
        file = f"{start}-{end}.gz"
        return Part(file, archives, (file, f"{start}-{end}", f"{start}.{end}"))

    parts = {
        split: [part(of, kind) for kind in _AXES]
        for split, of in {"train": "train", "test": test}.items()
    }

    def keep(member: str) -> bool:
        return member.rpartition("/")[2].startswith(prefix)

    def read(search_path: SearchPath) -> dict[str, ClassSplit]:
        arrays = {}
        for split, of in parts.items():
            paths = [part.locate(search_path, keep) for part in of]
            arrays[split] = (*map(_read_idx, paths, _AXES), paths[1])
        return _splits(name, arrays, names, first, transposed)

    needs = tuple(part.names for of in parts.values() for part in of)
    return Layout("the IDX files, compressed or not", needs, read)


def _npz_files(
    title: str, name: str, names: Sequence[str], files: Mapping[str, Sequence[tuple[str, str]]]
) -> Layout:
    """The layout with arrays in files of NumPy.

    Args:
      title: A short description for messages.
      name: The data set.
      names: The names of its classes.
      files: For every split the file and the array of the images, and those of the labels.

    Returns:
      The layout.
    """

    def read(search_path: SearchPath) -> dict[str, ClassSplit]:
        arrays = {}
        for split, of in files.items():
            paths = [search_path.get(file) for file, _ in of]
            keys = [key for _, key in of]
            arrays[split] = (*map(_read_npz, paths, _AXES, keys), paths[1])
        return _splits(name, arrays, names, 0, False)

    needs = dict.fromkeys(file for of in files.values() for file, _ in of)
    return Layout(title, tuple((file,) for file in needs), read)


def _authors_npz(name: str, names: Sequence[str]) -> Layout:
    """The files of NumPy that the authors of Kuzushiji publish."""
    return _npz_files(
        "the .npz files of its authors",
        name,
        names,
        {
            split: [(f"{name}-{split}-{kind}.npz", "arr_0") for kind in ("imgs", "labels")]
            for split in ("train", "test")
        },
    )


# --- The data sets ------------------------------------------------------------------------------


def _spec(
    description: str,
    names: Sequence[str],
    folders: tuple[str, ...],
    layouts: tuple[Layout, ...],
    homepage: str,
    citation: str,
) -> DatasetSpec:
    """The specification of a data set of the family.

    Many of its data sets have files of the same names, so that each needs a folder of its own.
    """
    return DatasetSpec(
        description=f"{description}, {_SIDE}×{_SIDE}, greyscale",
        image_shape=(_SIDE, _SIDE, 1),
        classes=dict.fromkeys(("train", "test"), len(names)),
        homepage=homepage,
        citation=citation,
        folders=folders,
        layouts=layouts,
    )


_DIGITS = tuple(string.digits)
_CLOTHES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)


class FashionMnist(ClassificationBuilder):
    """Photographs of ten kinds of clothes, shoes and bags (MIT licence).

    Debian's package is found where it is installed.
    """

    name = "fashion_mnist"
    SPEC = _spec(
        "70,000 photographs of 10 kinds of clothes (Fashion-MNIST)",
        _CLOTHES,
        ("fashion-mnist", "fashion_mnist", "FashionMNIST/raw"),
        (_idx_files("fashion_mnist", _CLOTHES),),
        "https://github.com/zalandoresearch/fashion-mnist",
        "Xiao et al.: Fashion-MNIST: a novel image dataset for benchmarking machine learning "
        "algorithms. 2017.",
    )

    @classmethod
    def instructions(cls) -> str:
        """The required files, and where people have them."""
        return (
            f"{super().instructions()}\n"
            "Where they are:\n"
            f"- Debian, Ubuntu: `apt-get install dataset-fashion-mnist`, found in {_DEBIAN}\n"
            "- Keras, once it has loaded them: --manual-dir ~/.keras/datasets\n"
            "- torchvision, with FashionMNIST(ROOT): --manual-dir ROOT"
        )

    @classmethod
    def search_path(cls, manual_dir: Path, scratch: Path) -> SearchPath:
        """The folders of the data set or, where these have no file, that of Debian's package."""
        path = super().search_path(manual_dir, scratch)
        if any(folder.is_dir() and any(folder.iterdir()) for folder in path.folders):
            return path  # Of a file in each folder, none may be of the other.
        return dataclasses.replace(path, folders=(*path.folders, _DEBIAN))


class Mnist(ClassificationBuilder):
    """Handwritten digits."""

    name = "mnist"
    SPEC = _spec(
        "70,000 handwritten digits (MNIST)",
        _DIGITS,
        ("mnist", "MNIST/raw"),
        (
            _idx_files("mnist", _DIGITS),
            _npz_files(
                "the file of Keras",
                "mnist",
                _DIGITS,
                {
                    split: [("mnist.npz", f"{axis}_{split}") for axis in "xy"]
                    for split in ("train", "test")
                },
            ),
        ),
        "http://yann.lecun.com/exdb/mnist/",
        "LeCun et al.: Gradient-based learning applied to document recognition. Proceedings of "
        "the IEEE, 1998.",
    )


_KUZUSHIJI = (
    "https://github.com/rois-codh/kmnist",
    "Clanuwat et al.: Deep learning for classical Japanese literature. 2018 (CC BY-SA 4.0).",
)
_TEN_HIRAGANA = tuple("おきすつなはまやれを")
_HIRAGANA = (
    *"あいうえおかきくけこさしすせそたちつてとなにぬねの",
    *"はひふへほまみむめもやゆよらりるれろわゐゑをんゝ",
)


class Kmnist(ClassificationBuilder):
    """Ten hiragana in old cursive writing."""

    name = "kmnist"
    SPEC = _spec(
        "70,000 cursive hiragana of 10 kinds (Kuzushiji-MNIST)",
        _TEN_HIRAGANA,
        ("kmnist", "KMNIST/raw"),
        (_idx_files("kmnist", _TEN_HIRAGANA), _authors_npz("kmnist", _TEN_HIRAGANA)),
        *_KUZUSHIJI,
    )


class K49(ClassificationBuilder):
    """48 hiragana and an iteration mark in old cursive writing; some are rare."""

    name = "k49"
    SPEC = _spec(
        "270,912 cursive hiragana of 49 kinds (Kuzushiji-49)",
        _HIRAGANA,
        ("k49", "kuzushiji-49"),
        (_authors_npz("k49", _HIRAGANA), _idx_files("k49", _HIRAGANA)),
        *_KUZUSHIJI,
    )


_CAPITALS = (*_DIGITS, *string.ascii_uppercase)
_MERGED = (*_CAPITALS, *"abdefghnqrt")
"""Of 15 letters, the small and the capital form are one class."""


def _emnist(description: str, split: str, names: Sequence[str], *, first: int = 0) -> DatasetSpec:
    """The specification of one of the six splits that EMNIST is published in."""
    layout = _idx_files(
        f"emnist_{split}",
        names,
        prefix=f"emnist-{split}-",
        test="test",
        archives=("gzip.zip",),
        first=first,
        transposed=True,
    )
    return _spec(
        f"{description} (EMNIST {split})",
        names,
        ("emnist", "EMNIST/raw", "gzip", "."),
        (layout,),
        "https://www.nist.gov/itl/products-and-services/emnist-dataset",
        "Cohen et al.: EMNIST: extending MNIST to handwritten letters. IJCNN 2017.",
    )


class EmnistBalanced(ClassificationBuilder):
    """Digits and letters, equally many of each class."""

    name = "emnist_balanced"
    SPEC = _emnist("131,600 handwritten digits and letters of 47 kinds", "balanced", _MERGED)


class EmnistByclass(ClassificationBuilder):
    """Digits, capital and small letters."""

    name = "emnist_byclass"
    SPEC = _emnist(
        "814,255 handwritten digits and letters of 62 kinds",
        "byclass",
        (*_CAPITALS, *string.ascii_lowercase),
    )


class EmnistBymerge(ClassificationBuilder):
    """Digits and letters, of which some have one class for the small and the capital form."""

    name = "emnist_bymerge"
    SPEC = _emnist("814,255 handwritten digits and letters of 47 kinds", "bymerge", _MERGED)


class EmnistDigits(ClassificationBuilder):
    """Digits, equally many of each."""

    name = "emnist_digits"
    SPEC = _emnist("280,000 handwritten digits", "digits", _DIGITS)


class EmnistLetters(ClassificationBuilder):
    """Letters, small or capital; the labels in the files count from 1."""

    name = "emnist_letters"
    SPEC = _emnist("145,600 handwritten letters", "letters", tuple(string.ascii_lowercase), first=1)


class EmnistMnist(ClassificationBuilder):
    """As many digits as MNIST has, but others."""

    name = "emnist_mnist"
    SPEC = _emnist("70,000 handwritten digits", "mnist", _DIGITS)
