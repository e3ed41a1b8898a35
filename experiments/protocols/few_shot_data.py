"""The classes of few-shot learning: those that a data set holds out, or chosen by a seed.

A data set such as `icons` holds its validation and novel classes out. Of one that holds none out,
such as `fashion_mnist`, `base_classes` classes are base classes and all others novel; none is left
for validation. Its training images of base classes are for training, and its test images of all
classes for evaluation. Of a folder without splits, all images of base classes are for training, and
all of novel ones for evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from experiments.config import DataConfig, Folders, Pixels, Seed
from experiments.contracts import ImageSet
from experiments.data.builders import builder_class, split_names
from experiments.data.pipeline import load_split, stored_counts
from experiments.data.selection import Selection, labels_of, select
from experiments.errors import ConfigError
from experiments.protocols.classification import stored_splits


@dataclass(frozen=True)
class FewShotData(DataConfig):
    """Which classes of a data set are for training, and how images are augmented."""

    base_classes: Pixels = 0
    """Number of base classes, the same in every run; 0: all. In a data set that holds no classes
    out, the others are novel; of a folder without splits, 0 is half of the classes."""
    subset_seed: Seed = 0
    """Seed that chooses these classes; 0 if all are used."""


class Part(NamedTuple):
    """The images of a split of a protocol."""

    name: str
    """The data set."""
    stored: str
    """Its split or splits."""
    counts: np.ndarray
    """int64 [C], the images of every class."""
    chosen: Selection | None = None
    """The classes and images; None: all of them."""
    rows: str = ""
    """Which rows of `chosen`."""

    @property
    def classes(self) -> np.ndarray:
        """int64 [C], the stored labels of the classes."""
        return np.arange(len(self.counts)) if self.chosen is None else self.chosen.classes

    def load(self, folders: Folders) -> ImageSet:
        """The images, with labels from 0 to C−1."""
        if self.chosen is None:
            return load_split(self.name, self.stored, **vars(folders))
        rows = self.chosen.rows[self.rows]
        return self.chosen.renumber(load_split(self.name, self.stored, rows=rows, **vars(folders)))


def holds_classes_out(name: str) -> bool:
    """Whether a data set has splits of base and novel classes."""
    return {"base", "novel"} <= set(split_names(name))


def test_split(name: str) -> str | None:
    """The stored test split of a data set that holds no classes out, if there is one."""
    return None if holds_classes_out(name) else stored_splits(name)[1]


def held_out_counts(name: str, folders: Folders) -> Mapping[str, np.ndarray]:
    """The images of every class, by split, of a data set that must hold classes out."""
    if not holds_classes_out(name):
        raise ConfigError(
            f"data.name = {name} has the splits {', '.join(split_names(name))}, and few-shot "
            "evaluation needs base and novel classes"
        )
    return stored_counts(name, **vars(folders))


def check_base_classes(data: FewShotData, novel: str = "") -> None:
    """Checks that there are enough classes; `novel` is as in `parts`."""
    classes, number = builder_class(data.name).SPEC.classes, _number_of_base_classes(data, novel)
    drawn = not holds_classes_out(data.name)
    if drawn and not novel and not number:
        raise ConfigError(
            f"data.name = {data.name} has the splits {', '.join(classes)}, and few-shot "
            "evaluation needs base and novel classes; set data.base_classes, so that the others "
            "are novel"
        )
    available = sum(classes.get(split, 0) for split in _base_splits(data.name, novel).split("+"))
    if drawn:
        available = max(classes.values()) - (not novel)
    if number == 1 or 0 < available < number:
        raise ConfigError(
            f"data.base_classes = {number} must be from 2 to {available}"
            + (", or 0 for all" if novel or not drawn else "")
        )


def _number_of_base_classes(data: FewShotData, novel: str) -> int:
    """How many classes are chosen as base classes; 0: none are chosen."""
    if data.base_classes or novel or split_names(data.name) != ("train",):
        return data.base_classes
    return (builder_class(data.name).SPEC.classes["train"] + 1) // 2


def load(data: FewShotData, folders: Folders, split: str, **options: Any) -> ImageSet:
    """The images of a split; options are those of `parts`."""
    found = parts(data, folders, **options)
    if split not in found:
        raise ConfigError(f"{data.name} has no {split} classes; it has {', '.join(found)}")
    return found[split].load(folders)


def parts(
    data: FewShotData, folders: Folders, *, holdout: float = 0.0, novel: str = ""
) -> dict[str, Part]:
    """The images of `base` and `novel`, and of `validation` and `held-out` if there are any.

    The images of `held-out` are those of base classes that are not for training. With `holdout`,
    they are this fraction of every base class. The validation and novel classes are those of the
    data set `novel`, or of `data.name`, of which otherwise all classes are base classes.
    """
    check_base_classes(data, novel)
    name, own = data.name, _base_splits(data.name, novel)
    stored = stored_counts(name, **vars(folders))
    counts = [stored[part] for part in own.split("+")]
    test = test_split(name)
    labels = labels_of(
        np.concatenate(counts) if holds_classes_out(name) else np.sum(counts, axis=0)
    )
    test_labels = labels_of(stored[test]) if test else np.zeros(0, labels.dtype)
    chosen = select(
        labels,
        test_labels=test_labels,
        classes=_number_of_base_classes(data, novel),
        subset_seed=data.subset_seed,
        holdout=holdout,
        option="data.base_classes",
    )

    def part(rows: str) -> Part:
        return Part(name, own, chosen.counts(labels, rows), chosen, rows)

    found = {"base": part("train")}
    if novel or holds_classes_out(name):
        of_novel = held_out_counts(novel or name, folders)
        others = [split for split in of_novel if split != "base"]
        found |= {split: Part(novel or name, split, of_novel[split]) for split in others}
    else:
        classes, from_labels = np.setdiff1d(labels, chosen.classes), test_labels if test else labels
        left = Selection(classes, {"test": np.flatnonzero(np.isin(from_labels, classes))})
        found["novel"] = Part(name, test or own, left.counts(from_labels, "test"), left, "test")
    if holdout:
        found["held-out"] = part("validation")
    elif test:
        found["held-out"] = Part(name, test, chosen.counts(test_labels, "test"), chosen, "test")
    return found


def _base_splits(name: str, novel: str) -> str:
    """The stored splits with the training images of base classes."""
    return stored_splits(name)[0] if novel or not holds_classes_out(name) else "base"
