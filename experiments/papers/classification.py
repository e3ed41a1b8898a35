"""What the protocols of classification share: data splits, accuracy, calibration, report.

A data set without a test split of its own, such as the icons, is split within its classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from experiments.core.config import CountOrZero, DataConfig, Folders, Ratio, Seed, Share
from experiments.core.errors import ConfigError
from experiments.core.protocol import Metric, Objective, Outputs, Part, Problem, Protocol, measured
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
)
_LONG_TAIL_METRICS = tuple(
    Metric(f"{classes} accuracy") for classes in ("class mean", "head", "medium", "tail")
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


def build(
    data: ClassificationData,
    *,
    label: str,
    objective: Callable[[Problem], Objective],
    check_options: Callable[[int], None] = lambda num_features: None,
    calibrated: Callable[[Outputs], np.ndarray] = lambda outputs: outputs.logits(),
    extra_results: Callable[[Outputs], dict[str, Any]] = lambda outputs: {},
    note: str = "",
) -> Protocol:
    """A protocol of classification, with a label of its loss and a sentence to end its report.

    `calibrated` gives the logits [n, C] whose softmax is the confidence.
    """
    is_long_tail = data.imbalance != 1
    metrics = _METRICS + (_LONG_TAIL_METRICS if is_long_tail else ())
    options = *ClassificationData.__annotations__, "mixup"
    default = vars(ClassificationData())
    changed = {o: vars(data)[o] for o in options if vars(data)[o] != default[o]}

    def check_data(num_features: int, counts: Mapping[str, np.ndarray]) -> None:
        if counts["test"].min() < 1:
            raise ConfigError(
                f"a class of {data.name} has no image for test; give every class 2 or more"
            )
        if is_long_tail and len(counts["train"]) < 3:
            raise ConfigError("head, medium and tail need at least 3 classes; set data.classes")

    def evaluate(split: str, outputs_of_split: Callable[[str], Outputs]) -> dict[str, Any]:
        outputs = outputs_of_split(split)
        result = evaluate_logits(
            outputs.logits(),
            outputs.labels,
            train_counts=outputs.class_counts if is_long_tail else None,
            calibrated=calibrated(outputs),
        )
        values = [result.error, result.accuracy, result.calibration_error]
        if result.groups is not None:
            values += [result.class_mean_accuracy, *result.groups.values()]
        return {
            "result": result._asdict(),
            "metrics": measured(metrics, values),
            "train_samples": int(outputs.class_counts.sum()),
            "classes": len(outputs.class_counts),
            **extra_results(outputs),
        }

    def report(results: dict[str, Any]) -> list[str]:
        return [
            f"{results['classes']} classes, {results['train_samples']} training images, "
            f"{results['result']['samples']} {results['split']} images",
            "",
            *metrics_table(results["metrics"]),
            *(["", note] if note else []),
        ]

    return Protocol(
        splits=SPLITS,
        parts=partial(parts, data),
        check_options=check_options,
        check_data=check_data,
        objective=objective,
        validation_metric=Metric("accuracy"),
        validate=lambda outputs: float((outputs.logits().argmax(1) == outputs.labels).mean()),
        metrics=metrics,
        evaluate=evaluate,
        description={"label": label, **changed},
        report=report,
    )


def stored_splits(name: str) -> tuple[str, str | None]:
    """The stored splits for training and validation, and the one for test if there is one."""
    if lookup(name).multi_label:
        raise ConfigError(
            f"data.name = {name} has any number of labels per image, and classification needs one; "
            "choose a preset of several labels, such as folder-labels"
        )
    splits = tuple(lookup(name).classes)
    if "novel" in splits or splits == ("train",):
        return "+".join(splits), None
    if "test" in splits:
        return "+".join(split for split in splits if split != "test"), "test"
    return "train", "validation"


def parts(data: ClassificationData, folders: Folders) -> dict[str, Part]:
    """The selected images for training, test and, if any are held out, validation."""
    name, split, dataset = data.name, data.class_split, lookup(data.name)
    splits, (joined, test) = dataset.classes, stored_splits(name)
    validates = dataset.own and joined == "train+validation" and test is not None
    if validates:
        joined = "train"
    if split != "all" and (split not in splits or "novel" not in splits):
        raise ConfigError(
            f"{name} does not hold {split} classes out: it has the splits {', '.join(splits)}; "
            "choose all classes"
        )
    stored = stored_counts(name, **vars(folders))
    own = joined.split("+")
    counts = [stored[part] for part in own]
    labels = labels_of(np.concatenate(counts) if test is None else np.sum(counts, axis=0))
    test_labels = None if test is None else labels_of(stored[test])
    among = None
    if split != "all":
        # The labels that the classes of a split have among those of the joined splits.
        before = sum(len(stored[part]) for part in own[: own.index(split)])
        among = before + np.arange(len(stored[split]))
    chosen = select(
        labels,
        test_labels=test_labels,
        among=among,
        classes=data.classes,
        samples_per_class=data.samples_per_class,
        imbalance=data.imbalance,
        tail_from=data.tail_from,
        holdout=0.0 if validates else data.holdout,
        subset_seed=data.subset_seed,
        names=load_labels(name, joined, **vars(folders))[1],
    )
    indexed = dict.fromkeys(chosen.rows, (labels, joined))  # What the rows of a part index.
    if test is not None and test_labels is not None:
        indexed["test"] = test_labels, test
    if validates:
        own_labels = labels_of(stored["validation"])
        chosen.rows["validation"] = np.flatnonzero(np.isin(own_labels, chosen.classes))
        indexed["validation"] = own_labels, "validation"
    return {
        part: selected(chosen, part, own_labels, name, place, folders)
        for part, (own_labels, place) in indexed.items()
    }


def selected(
    chosen: Selection, split: str, labels: np.ndarray, name: str, stored: str, folders: Folders
) -> Part:
    """The chosen images of a split, which are rows of a stored one with ascending labels."""
    read = partial(load_split, name, stored, rows=chosen.rows[split], **vars(folders))
    return Part(partial(chosen.counts, labels, split), lambda: chosen.renumber(read()))
