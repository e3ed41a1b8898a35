"""The classes of few-shot learning: those that a data set holds out, or chosen by a seed.

A data set such as `icons` holds its validation and novel classes out. Of one that holds none out,
such as `fashion_mnist`, `base_classes` classes are base classes and all others novel; none is left
for validation. Its training images of base classes are for training, and its test images of all
classes for evaluation. Of a folder without splits, all images of base classes are for training, and
all of novel ones for evaluation.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import numpy as np

from experiments.config import DataConfig, Folders, Pixels, Seed
from experiments.contracts import Part
from experiments.data.builders import builder_class, split_names
from experiments.data.pipeline import class_names, load_split, stored_counts
from experiments.data.selection import Selection, labels_of, select
from experiments.errors import ConfigError
from experiments.protocols.classification import selected, stored_splits


@dataclass(frozen=True)
class FewShotData(DataConfig):
    """Which classes of a data set are for training, and how images are augmented."""

    base_classes: Pixels = 0
    """Number of base classes, the same in every run; 0: all. In a data set that holds no classes
    out, the others are novel; of a folder without splits, 0 is half of the classes."""
    subset_seed: Seed = 0
    """Seed that chooses these classes; 0 if all are used."""


def holds_classes_out(name: str) -> bool:
    """Whether a data set has splits of base and novel classes."""
    return {"base", "novel"} <= set(split_names(name))


def test_split(name: str) -> str | None:
    """The stored test split of a data set that holds no classes out, if there is one."""
    return None if holds_classes_out(name) else stored_splits(name)[1]


def check_base_classes(data: FewShotData, novel: str = "") -> None:
    """Checks that there are enough classes; `novel` is as in `parts`."""
    classes, number = builder_class(data.name).SPEC.classes, _number_of_base_classes(data, novel)
    drawn = not holds_classes_out(data.name)
    if not holds_classes_out(novel or data.name) and (novel or not number):
        raise ConfigError(
            f"{'data.novel' if novel else 'data.name'} = {novel or data.name} has the splits "
            f"{', '.join(split_names(novel or data.name))}, and few-shot evaluation needs base and "
            "novel classes"
            + ("" if novel else "; set data.base_classes, so that the others are novel")
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


def parts(
    data: FewShotData,
    folders: Folders,
    *,
    holdout: float = 0.0,
    novel: str = "",
    base_test: str = "",
) -> dict[str, Part]:
    """The images of `base` and `novel`, and of `validation` and `held-out` if there are any.

    The images of `held-out` are those of base classes that are not for training. With `holdout`,
    they are this fraction of every base class; with `base_test`, the test images of that data set.
    The validation and novel classes are those of the data set `novel`, or of `data.name`, of which
    otherwise all classes are base classes.
    """
    check_base_classes(data, novel)
    name, own, test = data.name, _base_splits(data.name, novel), test_split(data.name)
    stored = stored_counts(name, **vars(folders))
    counts = [stored[part] for part in own.split("+")]
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
    found = {"base": selected(chosen, "train", labels, name, own, folders)}
    if novel or holds_classes_out(name):
        others = stored_counts(novel or name, **vars(folders))
        found |= {
            split: Part(counts, partial(load_split, novel or name, split, **vars(folders)))
            for split, counts in others.items()
            if split != "base"
        }
    else:
        classes, from_labels = np.setdiff1d(labels, chosen.classes), test_labels if test else labels
        left = Selection(classes, {"test": np.flatnonzero(np.isin(from_labels, classes))})
        found["novel"] = selected(left, "test", from_labels, name, test or own, folders)
    if base_test:
        every = class_names(name, own, **vars(folders))
        names = tuple(every[label] for label in chosen.classes)
        found["held-out"] = _other_images(name, names, base_test, folders)
    elif holdout:
        found["held-out"] = selected(chosen, "validation", labels, name, own, folders)
    elif test:
        found["held-out"] = selected(chosen, "test", test_labels, name, test, folders)
    return found


def _other_images(name: str, names: tuple[str, ...], base_test: str, folders: Folders) -> Part:
    """The test images of another data set of the base classes of `name`, by their names."""
    stored = class_names(base_test, "test", **vars(folders))
    if missing := set(names) - set(stored):
        raise ConfigError(
            f"data.base_test = {base_test} lacks {len(missing)} of the {len(names)} base "
            f"classes of {name}, such as {min(missing)}; prepare both from archives that name "
            "classes alike, or set data.holdout instead"
        )
    numbers = {name: number for number, name in enumerate(names)}
    positions = np.array([numbers.get(name, -1) for name in stored], np.int32)
    labels = np.repeat(positions, stored_counts(base_test, **vars(folders))["test"])
    rows = np.flatnonzero(labels >= 0)
    read = partial(load_split, base_test, "test", rows=rows, **vars(folders))
    own = {"labels": labels[rows], "class_names": names}
    counts = np.bincount(labels[rows], minlength=len(names))
    return Part(counts, lambda: dataclasses.replace(read(), **own))


def _base_splits(name: str, novel: str) -> str:
    """The stored splits with the training images of base classes."""
    return stored_splits(name)[0] if novel or not holds_classes_out(name) else "base"
