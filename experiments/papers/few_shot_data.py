"""What the protocols A and E share: classes that a data set holds out, or chosen by a seed.

Of a set that holds no classes out, such as `fashion_mnist`, `base_classes` classes are base classes
and all others novel; none is left for validation. Its training images of base classes are for
training, and its test images of all classes for evaluation. Of a folder without splits, all images
of base classes are for training, and all of novel ones for evaluation.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from experiments.core.config import CountOrZero, DataConfig, Folders, Seed, Share
from experiments.core.errors import ConfigError
from experiments.core.processes import is_first
from experiments.core.protocol import ImageSet, Outputs, Part, Protocol
from experiments.data.augment import seen_shape
from experiments.data.pipeline import load_labels, load_split, stored_counts
from experiments.data.sampling import episode_classes
from experiments.data.selection import Selection, labels_of, select
from experiments.datasets import lookup, share_images
from experiments.evaluation.few_shot import (
    EpisodeConfig,
    accuracies_of,
    configured_episodes,
    prototype_predictions,
)
from experiments.papers.classification import selected, stored_splits
from jaxloss.sampling import Episodes

_log = logging.getLogger(__name__)

Predict: TypeAlias = Callable[[np.ndarray, Episodes], np.ndarray]
"""From features [n, d] and episodes to predicted classes, int32 [E, N, Q]."""

_OTHER_IMAGES = {"mini_imagenet": "imagenet", "tiered_imagenet": "imagenet"}
"""Few-shot sets made from training images alone of another set, whose test images are new to it."""


@dataclass(frozen=True)
class FewShotData(DataConfig):
    """Which classes of a data set are for training, and how images are augmented."""

    base_classes: CountOrZero = 0
    """Number of base classes, the same in every run; 0: all. In a data set that holds no classes
    out, the others are novel; of a folder without splits, 0 is half of the classes."""
    subset_seed: Seed = 0
    """Seed that chooses these classes; 0 if all are used."""


@dataclass(frozen=True)
class MarginData(FewShotData):
    """Which images of one data set or two, and how they are augmented."""

    holdout: Share = 0.0
    """Fraction of each base class's images that is held out for the episodes of base classes."""
    base_test: str = ""
    """Data set with test images of the base classes; empty: held-out or training images."""
    novel: str = ""
    """Few-shot data set of the validation and novel classes, with all classes of NAME as base."""


def holds_classes_out(name: str) -> bool:
    """Whether a data set has splits of base and novel classes."""
    return {"base", "novel"} <= set(lookup(name).classes)


def test_split(name: str) -> str | None:
    """The stored test split of a data set that holds no classes out, if there is one."""
    return None if holds_classes_out(name) else stored_splits(name)[1]


class NovelClasses(Protocol):
    """A protocol that trains on base classes, and is evaluated in episodes of novel ones."""

    splits = ("base", "validation", "novel")

    def __init__(self, data: FewShotData, evaluation: EpisodeConfig):
        self.data, self.evaluation = MarginData(**vars(data)), evaluation

    def _base_splits(self) -> str:
        """The stored splits with the training images of base classes."""
        name = self.data.name
        whole = self.data.novel or not holds_classes_out(name)
        return stored_splits(name)[0] if whole else "base"

    def _number_of_base_classes(self) -> int:
        """How many classes are chosen as base classes; 0: none are chosen."""
        data, classes = self.data, lookup(self.data.name).classes
        if data.base_classes or data.novel or [*classes] != ["train"]:
            return data.base_classes
        return (classes["train"] + 1) // 2

    def has_held_out(self) -> bool:
        """Whether there are images of base classes that are not for training."""
        data = self.data
        return bool(data.holdout or data.base_test or test_split(data.name))

    def parts_of(self, split: str) -> list[str]:
        """The splits that the evaluation of a split measures, where the data has them."""
        name = self.data.novel or self.data.name
        of_novel = tuple(lookup(name).classes) if holds_classes_out(name) else ("novel",)
        available = ("base", *of_novel)
        requested = ("novel", "validation", "base") if split == "novel" else (split,)
        found = [part for part in requested if part in available]
        if not found:
            raise ConfigError(f"{name} has no {split} classes; it has {', '.join(available)}")
        return found

    def parts(self, folders: Folders) -> dict[str, Part]:
        """The images of `base` and `novel`, and of `validation` and `held-out` if there are any.

        The images of `held-out` are those of base classes that are not for training. The validation
        and novel classes are those of `data.novel`, or of `data.name`, of which otherwise all
        classes are base classes.
        """
        data = self.data
        name, own, test, novel = data.name, self._base_splits(), test_split(data.name), data.novel
        stored = stored_counts(name, **vars(folders))
        counts = [stored[part] for part in own.split("+")]
        labels = labels_of(
            np.concatenate(counts) if holds_classes_out(name) else np.sum(counts, axis=0)
        )
        test_labels = labels_of(stored[test]) if test else np.zeros(0, labels.dtype)
        chosen = select(
            labels,
            test_labels=test_labels,
            classes=self._number_of_base_classes(),
            subset_seed=data.subset_seed,
            holdout=data.holdout,
            option="data.base_classes",
        )
        found = {"base": selected(chosen, "train", labels, own, name, folders)}
        if novel or holds_classes_out(name):
            others = stored_counts(novel or name, **vars(folders))
            found |= {
                split: Part(
                    partial(others.__getitem__, split),
                    partial(load_split, novel or name, split, **vars(folders)),
                )
                for split in others
                if split != "base"
            }
        else:
            classes, of = np.setdiff1d(labels, chosen.classes), test_labels if test else labels
            left = Selection(classes, {"test": np.flatnonzero(np.isin(of, classes))})
            found["novel"] = selected(left, "test", of, test or own, name, folders)
        if data.base_test:
            found["held-out"] = self._other_images(chosen, folders)
        elif data.holdout:
            found["held-out"] = selected(chosen, "validation", labels, own, name, folders)
        elif test:
            found["held-out"] = selected(chosen, "test", test_labels, test, name, folders)
        return found

    def _other_images(self, chosen: Selection, folders: Folders) -> Part:
        """The images of base classes in `data.base_test`, which is read for this part alone."""
        data, base = self.data, self._base_splits()

        def matched() -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
            every = load_labels(data.name, base, **vars(folders))[1]
            names = tuple(every[label] for label in chosen.classes)
            stored = load_labels(data.base_test, "test", **vars(folders))[1]
            if missing := set(names) - set(stored):
                raise ConfigError(
                    f"data.base_test = {data.base_test} lacks {len(missing)} of the {len(names)} "
                    f"base classes of {data.name}, such as {min(missing)}; prepare both from "
                    "archives that name classes alike, or set data.holdout instead"
                )
            numbers = {name: number for number, name in enumerate(names)}
            positions = np.array([numbers.get(name, -1) for name in stored], np.int32)
            labels = np.repeat(positions, stored_counts(data.base_test, **vars(folders))["test"])
            rows = np.flatnonzero(labels >= 0)
            return names, rows, labels[rows]

        def load() -> ImageSet:
            names, rows, labels = matched()
            images = load_split(data.base_test, "test", rows=rows, **vars(folders))
            return dataclasses.replace(images, labels=labels, class_names=names)

        return Part(lambda: np.bincount(matched()[2], minlength=len(chosen.classes)), load)

    def check_options(self, num_features: int) -> None:
        """Checks that data sets and options fit together, and that there are enough classes."""
        data, name = self.data, self.data.name
        if data.novel and share_images(name, data.novel):
            raise ConfigError(
                f"data.novel = {data.novel} shares images with data.name = {name}, all of which "
                "are for training; choose another set, or leave data.novel empty to use the "
                "validation and novel classes of data.name"
            )
        if data.base_test and data.holdout:
            raise ConfigError(
                f"data.holdout = {data.holdout} and data.base_test = {data.base_test} exclude each "
                "other: the episodes of base classes take the images of one of them; set the other "
                "to its default"
            )
        other = _OTHER_IMAGES.get(name.partition("@")[0])
        if data.base_test and data.base_test.partition("@")[0] != other:
            instead = f"{other}, or " if other else ""
            raise ConfigError(
                f"data.base_test = {data.base_test} is not known to have images of the classes of "
                f"{name} that are not in it; set it to {instead}empty and use data.holdout"
            )
        classes, number = lookup(name).classes, self._number_of_base_classes()
        novel, drawn = data.novel, not holds_classes_out(name)
        stored_splits(name)  # Raises if an image has several labels.
        if not holds_classes_out(novel or name) and (novel or not number):
            raise ConfigError(
                f"{'data.novel' if novel else 'data.name'} = {novel or name} has the splits "
                f"{', '.join(lookup(novel or name).classes)}, and few-shot evaluation needs base "
                "and novel classes"
                + ("" if novel else "; set data.base_classes, so that the others are novel")
            )
        available = sum(classes.get(split, 0) for split in self._base_splits().split("+"))
        if drawn:
            available = max(classes.values()) - (0 if novel else 2)
        if drawn and available < 2:
            raise ConfigError(
                f"{name} has {max(classes.values())} classes, and few-shot evaluation needs at "
                "least four classes, two base and two novel ones; add classes, or choose the "
                "preset folder"
            )
        if number == 1 or 0 < available < number:
            raise ConfigError(
                f"data.base_classes = {number} must be from 2 to {available}"
                + (", or 0 for all" if novel or not drawn else "")
            )

    def check_shapes(self) -> None:
        """Checks that the images of all sets have one shape."""

        def shape_of(name: str) -> str:
            return "×".join(map(str, seen_shape(lookup(name).image_shape, self.data)))

        own = shape_of(self.data.name)
        for option in ("novel", "base_test"):
            if (name := vars(self.data)[option]) and (shape := shape_of(name)) != own:
                raise ConfigError(
                    f"images of {self.data.name} are {own}, those of data.{option} = {name} are "
                    f"{shape}; set data.image_size to resize both, and choose sets with the same "
                    "channels"
                )

    def check_classes(self, counts: np.ndarray, classes: str, shots: Iterable[int]) -> None:
        """Checks that classes of these sizes [C] give the episodes; logs if some are too small."""
        evaluation = self.evaluation
        for number in dict.fromkeys(shots):
            try:
                found = episode_classes(counts, evaluation.ways, number, evaluation.queries)
            except ConfigError as error:
                reason, ways = str(error).removeprefix("evaluation: "), evaluation.ways
                large = int((counts >= number + evaluation.queries).sum())
                fits = f"pass --evaluation.ways {large}, or" if 1 < large < ways else "pass"
                raise ConfigError(
                    f"the {classes} do not give the evaluation: {reason}; {fits} a smaller "
                    "--evaluation.queries, --evaluation.shots or --evaluation.ways"
                ) from error
            if len(found) < len(counts) and is_first():
                _log.warning(
                    "%d-shot episodes draw from %d of %d %s, those with at least %d images",
                    *(number, len(found), len(counts), classes, number + evaluation.queries),
                )

    def accuracy_in_episodes(
        self, outputs: Outputs, shots: int, predict: Predict | None = None
    ) -> float:
        """Mean accuracy in the episodes of a validation, by default of the nearest prototype."""
        evaluation = self.evaluation
        predict = predict or partial(prototype_predictions, distance=evaluation.validation_distance)
        episodes = configured_episodes(
            evaluation, outputs.labels, shots=shots, num_episodes=evaluation.validation_episodes
        )
        return float(np.mean(accuracies_of(predict(outputs.features, episodes))))
