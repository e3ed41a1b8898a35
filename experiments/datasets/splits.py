"""The images of a split as their authors list them, with one class or with any number of labels."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from experiments.datasets.archives import DamagedArchiveError, names_file
from experiments.datasets.images import SourceImage
from experiments.datasets.pickles import load_pickle
from experiments.datasets.readers import text

_Name = TypeVar("_Name")
_Key = TypeVar("_Key")
Table = Sequence[Any] | np.ndarray
"""Pixels uint8 [n, h, w, c], or n encoded images."""
Open = Callable[[], Callable[[Any], SourceImage]]
"""Opens the images of a split. Returns a function from a key to its image."""


def open_files() -> Callable[[Path], SourceImage]:
    """Opens images stored as separate files, whose keys are their paths."""
    return lambda path: SourceImage(path, str(path))


@dataclass(frozen=True)
class ClassSplit:
    """Images with one class each."""

    classes: Mapping[str, Sequence[Any]]
    """The ordered keys of the images of every class: paths, or rows of a table."""
    source: Path | str
    """The file or folder that defines the classes, for messages."""
    open: Open = open_files

    def counts(self) -> dict[str, int]:
        """The number of images of every class."""
        return {name: len(keys) for name, keys in self.classes.items()}

    def labelled(self, names: Sequence[str]) -> list[tuple[Any, Any]]:
        """Every key with the index of its class in `names`, class by class."""
        labels = {name: label for label, name in enumerate(names)}
        return [(key, labels[name]) for name, keys in self.classes.items() for key in keys]


@dataclass(frozen=True)
class MultiLabelSplit:
    """Images with any number of labels each."""

    names: tuple[str, ...]
    """The names of the labels."""
    keys: Sequence[Any]
    """The ordered keys of the images."""
    targets: np.ndarray
    """int8 [n, C]: 1 if the image has the label, 0 if not, −1 if unknown."""
    source: Path | str
    """As in `ClassSplit`."""
    open: Open = open_files

    def counts(self) -> dict[str, int]:
        """The number of images with each label."""
        counts = np.sum(self.targets == 1, axis=0)
        return dict(zip(self.names, counts.tolist(), strict=True))

    def labelled(self, names: Sequence[str]) -> list[tuple[Any, Any]]:
        """Every key with its row of targets."""
        return list(zip(self.keys, self.targets, strict=True))


Split = ClassSplit | MultiLabelSplit


def check_splits(splits: Mapping[str, Split]) -> list[str]:
    """The names of all labels; raises a `DamagedArchiveError` unless the splits fit together.

    Few-shot sets have other classes in every split, all others the same in the same order.
    """
    first_name, first = next(iter(splits.items()))
    seen: dict[str, Path | str] = {}
    for split_name, split in splits.items():
        counts = split.counts()
        if not counts or (isinstance(split, MultiLabelSplit) and not split.keys):
            raise DamagedArchiveError(f"{split.source} has no classes for the split {split_name}")
        for name, count in counts.items():
            if not count and isinstance(split, ClassSplit):
                raise DamagedArchiveError(f"{split.source} has the class {name!r}, without images")
            if "novel" in splits and name in seen:
                raise DamagedArchiveError(
                    f"{split.source} has the class {name!r}, which is also in {seen[name]}"
                )
            seen.setdefault(name, split.source)
        names = [*first.counts()]
        if "novel" not in splits and names != [*counts]:
            differences = sorted(set(names) ^ set(counts)) or ["the order"]
            raise DamagedArchiveError(
                f"{split.source} (split {split_name}) and {first.source} (split {first_name}) must "
                f"have the same classes; they differ in {len(differences)}, for example "
                f"{differences[0]!r}"
            )
    return [*seen]


def split_of_files(classes: Mapping[str, Sequence[Path]], source: Path) -> ClassSplit:
    """The files of every class, sorted; `source` is the file or folder that defines the classes."""
    return ClassSplit(_ordered(classes), source)


def grouped(pairs: Iterable[tuple[_Name, _Key]]) -> dict[_Name, list[_Key]]:
    """The keys of every class, from pairs of both."""
    classes: dict[_Name, list[_Key]] = {}
    for name, key in pairs:
        classes.setdefault(name, []).append(key)
    return classes


def _ordered(classes: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Classes and keys, sorted. One name is one class, however its accents are encoded."""
    merged: dict[str, list[Any]] = {}
    for name, keys in classes.items():
        merged.setdefault(unicodedata.normalize("NFC", name), []).extend(keys)
    return {name: sorted(merged[name]) for name in sorted(merged)}


def split_of_rows(
    classes: Mapping[str, list[int]], load: Callable[[], Table], source: Path
) -> ClassSplit:
    """The rows of every class in the table that `load` reads from the file `source`, sorted."""
    ordered = _ordered(classes)

    def open_table() -> Callable[[int], SourceImage]:
        table = load()
        if (last := max(map(max, ordered.values()))) >= len(table):
            raise DamagedArchiveError(f"{source} has {len(table)} images, and none of row {last}")
        return lambda row: SourceImage(table[row], f"{source}, image {row}")

    return ClassSplit(ordered, source, open_table)


@names_file
def split_of_arrays(
    source: Path, images: np.ndarray, labels: Any, names: Sequence[str]
) -> ClassSplit:
    """A split from images uint8 [n, h, w, c] and labels [n], counted from 0, in memory."""
    labels = np.asarray(labels, np.int64)
    if labels.shape != images.shape[:1]:
        raise ValueError(f"it has {len(images)} images, but {labels.size} labels")
    if not 0 <= labels.min() <= labels.max() < len(names):
        raise ValueError(f"a label is not one of the {len(names)} classes")
    return ClassSplit(
        {name: np.flatnonzero(labels == label).tolist() for label, name in enumerate(names)},
        source,
        lambda: lambda row: SourceImage(images[row], f"{source}, image {row}"),
    )


@names_file
def split_of_pickle(path: Path, prefix: str) -> ClassSplit:
    """A split from a pickle with `data` uint8 [n, h, w, 3] and `labels` [n].

    `prefix` precedes the number of a class that the pickle's `catname2label` does not name: several
    files may each count their classes from zero.
    """
    content = load_pickle(path, "data", "labels")
    names = {label: text(name, path) for name, label in content.get("catname2label", {}).items()}
    rows = enumerate(content["labels"])
    classes = grouped((names.get(label, f"{prefix} {label:03}"), row) for row, label in rows)
    return split_of_rows(classes, lambda: load_pickle(path)["data"], path)
