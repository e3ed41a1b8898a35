"""What the protocols of classification share: data, linear classifier, accuracy, calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxloss
from experiments.core.config import CountOrZero, DataConfig, Folders, Ratio, Seed, Share
from experiments.core.errors import ConfigError
from experiments.core.protocol import (
    ClassCounts,
    Loss,
    Metric,
    Objective,
    Outputs,
    OutputsOf,
    Part,
    Problem,
    Protocol,
    measured,
)
from experiments.data.pipeline import load_labels, load_split, stored_counts
from experiments.data.selection import Selection, labels_of, select
from experiments.datasets import lookup
from experiments.evaluation.classification import evaluate_logits
from experiments.reporting.run import metrics_table

SPLITS = ("train", "validation", "test")

_METRICS = (
    Metric("error", higher_is_better=False),
    Metric("accuracy"),
    Metric("calibration error", higher_is_better=False),
    # Of long tails alone.
    *(Metric(f"{classes} accuracy") for classes in ("class mean", "head", "medium", "tail")),
)

ClassSplit = Literal["all", "base", "validation", "novel"]
"""Classes of a data set that holds classes out."""


@dataclass(frozen=True)
class ClassificationData(DataConfig):
    """Which images of a data set with one class per image, and how they are augmented."""

    class_split: ClassSplit = "all"
    """Classes to choose from: all, or those of one split of a data set that holds classes out."""
    classes: CountOrZero = 0
    """Number of classes, the same in every run; 0: all."""
    samples_per_class: CountOrZero = 0
    """Largest number of training images per class; 0: all."""
    subset_seed: Seed = 0
    """Seed that chooses these classes and training images; 0 if all are used."""
    imbalance: Ratio = 1.0
    """Long tail: training images of the rarest class over those of the largest; 1: as stored."""
    tail_from: Literal["largest", "mean"] = "largest"
    """Size of a long tail's largest class: that of the largest stored one, or the mean size."""
    holdout: Share = 0.0
    """Fraction of each class's training images that is held out for validation. Of a folder with
    validation images of its own, these validate, whatever the fraction."""


class Classification(Protocol):
    """A protocol of classification, whose subclass adds the objective."""

    splits = SPLITS
    validation_metric = Metric("accuracy")

    def __init__(self, data: ClassificationData, label: str):
        self.data, self.long_tail = data, data.imbalance != 1
        self.metrics = _METRICS if self.long_tail else _METRICS[:3]
        options, default = (*ClassificationData.__annotations__, "mixup"), ClassificationData()
        changed = {o: vars(data)[o] for o in options if vars(data)[o] != vars(default)[o]}
        self.description = {"label": label, **changed}

    def parts(self, folders: Folders) -> dict[str, Part]:
        return parts(self.data, folders)

    def check_data(self, num_features: int, counts: ClassCounts) -> None:
        if counts["test"].min() < 1:
            raise ConfigError(
                f"a class of {self.data.name} has no image for test; give every class 2 or more"
            )
        if self.long_tail and len(counts["train"]) < 3:
            raise ConfigError("head, medium and tail need at least 3 classes; set data.classes")

    def validate(self, outputs: Outputs) -> float:
        return float((outputs.logits().argmax(1) == outputs.labels).mean())

    def calibrated(self, outputs: Outputs) -> np.ndarray:
        """The logits [n, C] whose softmax is the confidence."""
        return outputs.logits()

    def evaluate(self, split: str, outputs_of_split: OutputsOf) -> dict[str, Any]:
        outputs = outputs_of_split(split)
        result = evaluate_logits(
            outputs.logits(),
            outputs.labels,
            train_counts=outputs.class_counts if self.long_tail else None,
            calibrated=self.calibrated(outputs),
        )
        values = [result[name] for name in ("error", "accuracy", "calibration_error")]
        if self.long_tail:
            values += [result["class_mean_accuracy"], *result["groups"].values()]
        return {
            "result": result,
            "metrics": measured(_METRICS[: len(values)], values),
            # Of always predicting the class with the most training images.
            "chance": float((outputs.labels == outputs.class_counts.argmax()).mean()),
            "train_samples": int(outputs.class_counts.sum()),
            "classes": len(outputs.class_counts),
        }

    def report(self, results: dict[str, Any]) -> list[str]:
        _, accuracy, *others = results["metrics"]  # The error is 100 % less the accuracy.
        chance = Metric("chance").measured(results["chance"])
        return [
            f"{results['classes']} classes, {results['train_samples']} training images, "
            f"{results['result']['samples']} {results['split']} images",
            "",
            *metrics_table([accuracy, chance, *others]),
        ]


def init_linear_head(problem: Problem, key: Array, *, scale: float = 1.0) -> dict[str, Array]:
    """The first `kernel` [d, C], with standard deviation scale / √d, and `bias` [C], float32."""
    num_classes = len(problem.class_counts)
    shape = (problem.num_features, num_classes)
    return {
        "kernel": scale * jax.nn.initializers.lecun_normal()(key, shape, jnp.float32),
        # The prior of a class. A constant bias does not change the softmax; with zeros, binary
        # cross-entropy starts at C·log 2, and its first steps destroy the backbone.
        "bias": jnp.full(num_classes, -jnp.log(max(num_classes - 1, 1)), jnp.float32),
    }


def init_kernel(problem: Problem, key: Array) -> dict[str, Array]:
    """The same without a bias, and with PyTorch's deviation: of cosines, gradients depend on it."""
    return {"kernel": init_linear_head(problem, key, scale=3**-0.5)["kernel"]}


def head_logits(features: Array, head: dict[str, Array], objective_state: Any) -> Array:
    """The logits [n, C] of features [n, d], as `Objective.logits`."""
    return jaxloss.linear_logits(features, head["kernel"], head["bias"])


def train_accuracy(logits: Array, labels: Array) -> dict[str, Array]:
    """For the metrics log: the fraction of largest logits [n, C] that are at the label [n]."""
    correct = jnp.argmax(logits, axis=1) == labels
    return {"train_accuracy": jnp.mean(correct.astype(jnp.float32))}


def objective_of_logits(
    init_head: Callable[[Array], Any],
    logits_of: Callable[[Array, Any, Any], Array],
    loss_of: Callable[[Array, Array], Array],
    *,
    accuracy: bool = True,
) -> Objective:
    """The objective of a loss of logits [n, C] and labels; with `accuracy`, these are [n]."""

    def loss(features: Array, labels: Array, head: Any, objective_state: Any) -> Loss:
        logits = logits_of(features, head, objective_state)
        means = train_accuracy(logits, labels) if accuracy else {}
        return Loss(loss_of(logits, labels), objective_state, means)

    return Objective(init_head, loss, logits_of)


def stored_splits(name: str) -> tuple[str, str | None]:
    """The stored splits for training and validation, and the one for test if there is one."""
    if lookup(name).multi_label:
        raise ConfigError(
            f"data.name = {name} has any number of labels per image, and one is needed; "
            "choose the preset folder-labels, or name the column of the CSV file label"
        )
    splits = tuple(lookup(name).classes)
    if "novel" in splits or splits == ("train",):
        return "+".join(splits), None
    if "test" in splits:
        return "+".join(split for split in splits if split != "test"), "test"
    return "train", "validation"


def parts(data: ClassificationData, folders: Folders) -> dict[str, Part]:
    """The selected images for training, test and, if any are held out, validation.

    A data set without a test split, such as the icons, is split within its classes.
    """
    name, split, dataset = data.name, data.class_split, lookup(data.name)
    joined, test = stored_splits(name)
    validates = dataset.own and joined == "train+validation" and test is not None
    if validates:
        joined = "train"
    if split != "all" and not {split, "novel"} <= {*dataset.classes}:
        raise ConfigError(
            f"{name} does not hold {split} classes out: it has the splits "
            f"{', '.join(dataset.classes)}; choose all classes"
        )
    stored = stored_counts(name, **vars(folders))
    own = joined.split("+")
    counts = [stored[part] for part in own]
    labels = labels_of(np.concatenate(counts) if test is None else np.sum(counts, axis=0))
    indexed: dict[str, tuple[np.ndarray, str]] = dict.fromkeys(SPLITS, (labels, joined))
    if test is not None:
        indexed["test"] = labels_of(stored[test]), test
    among = None
    if split != "all":
        # The labels that the classes of a split have among those of the joined splits.
        before = sum(len(stored[part]) for part in own[: own.index(split)])
        among = before + np.arange(len(stored[split]))
    chosen = select(
        labels,
        test_labels=None if test is None else indexed["test"][0],
        among=among,
        classes=data.classes,
        samples_per_class=data.samples_per_class,
        imbalance=data.imbalance,
        tail_from=data.tail_from,
        holdout=0.0 if validates else data.holdout,
        subset_seed=data.subset_seed,
        names=load_labels(name, joined, **vars(folders))[1],
    )
    if validates:
        indexed["validation"] = labels_of(stored["validation"]), "validation"
        chosen.rows["validation"] = np.flatnonzero(
            np.isin(indexed["validation"][0], chosen.classes)
        )
    return {part: selected(chosen, part, *indexed[part], name, folders) for part in chosen.rows}


def selected(
    chosen: Selection, split: str, labels: np.ndarray, stored: str, name: str, folders: Folders
) -> Part:
    """The chosen images of a split, which are rows of a `stored` one with ascending labels."""
    read = partial(load_split, name, stored, rows=chosen.rows[split], **vars(folders))
    return Part(partial(chosen.counts, labels, split), lambda: chosen.renumber(read()))
