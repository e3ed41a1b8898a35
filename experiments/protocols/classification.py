"""What the protocols of classification share: data by role, accuracy, report.

A data set that has no test split of its own, such as the icons, is split within its classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.config import Folders, TrainConfig
from experiments.contracts import ImageSet
from experiments.data.builders import is_multi_label, split_names
from experiments.data.pipeline import class_counts, load_split
from experiments.data.selection import select
from experiments.errors import ConfigError
from experiments.evaluation.classification import accuracy, evaluate_logits, predict_classes
from experiments.protocols.protocol import Outputs

SPLITS = ("train", "validation", "test")


def stored_splits(name: str) -> tuple[str, str | None]:
    """The splits, as the data set has them, for training (and validation), and for test.

    Raises:
      ConfigError: its images have any number of labels.
    """
    if is_multi_label(name):
        raise ConfigError(f"data.name = {name} has any number of labels an image, not one class")
    splits = split_names(name)
    if "novel" in splits:
        return "+".join(splits), None
    if "test" in splits:
        return "+".join(split for split in splits if split != "test"), "test"
    return "train", "validation"


def load(config: TrainConfig, folders: Folders, split: str) -> ImageSet:
    """The chosen images for training, validation or test."""
    own, test = stored_splits(config.data.name)

    own_labels, test_labels = _labels(config, folders)
    chosen = select(own_labels, config.data, test_labels=test_labels)
    if split not in chosen.rows:
        raise ConfigError(f"no images are held out for {split}; set data.holdout")
    images = load_split(
        config.data.name,
        test if test and split == "test" else own,
        rows=chosen.rows[split],
        data_dir=folders.data_dir,
        manual_dir=folders.manual_dir,
    )
    return dataclasses.replace(
        images,
        labels=np.searchsorted(chosen.classes, images.labels).astype(np.int32),
        class_names=tuple(images.class_names[label] for label in chosen.classes),
    )


def counts(config: TrainConfig, folders: Folders) -> Mapping[str, np.ndarray]:
    """The images of every class for training, validation and test."""
    own, test = _labels(config, folders)
    chosen = select(own, config.data, test_labels=test)
    whole = {"train": own, "validation": own, "test": own if test is None else test}
    return {
        split: np.bincount(
            np.searchsorted(chosen.classes, whole[split][rows]), minlength=len(chosen.classes)
        )
        for split, rows in chosen.rows.items()
    }


def _labels(config: TrainConfig, folders: Folders) -> tuple[np.ndarray, np.ndarray | None]:
    """The labels of the stored images, in the order of `load_split`, without reading an image."""
    own, test = stored_splits(config.data.name)
    stored = class_counts(
        config.data.name, data_dir=folders.data_dir, manual_dir=folders.manual_dir
    )
    parts = [stored[part] for part in own.split("+")]
    joined = np.concatenate(parts) if test is None else np.sum(parts, axis=0)
    return (
        np.repeat(np.arange(len(joined)), joined),
        None if test is None else np.repeat(np.arange(len(stored[test])), stored[test]),
    )


def check(config: TrainConfig, num_features: int, counts: Mapping[str, np.ndarray]) -> None:
    """Raises unless every class has an image for test, and a long tail head, medium and tail."""
    if counts["test"].min() < 1:
        raise ConfigError(f"a class of {config.data.name} has no image for test")
    if config.data.imbalance != 1 and len(counts["train"]) < 3:
        raise ConfigError("head, medium and tail need at least 3 classes; set data.classes")


def validate(config: TrainConfig, outputs: Outputs) -> float:
    """Accuracy."""
    return accuracy(predict_classes(outputs.scores()), outputs.labels)


def evaluate(config: TrainConfig, split: str, outputs: Callable[[str], Outputs]) -> dict[str, Any]:
    """Error rate, calibration, and the accuracies of head, medium and tail classes."""
    of_split = outputs(split)
    long_tailed = config.data.imbalance != 1
    result = evaluate_logits(
        of_split.scores(),
        of_split.labels,
        train_counts=of_split.counts if long_tailed else None,
    )
    values = [result.error, result.accuracy, result.calibration_error]
    if result.groups is not None:
        values += [result.class_mean_accuracy, *result.groups.values()]
    return {
        "result": result._asdict(),
        "metrics": dict(zip(metrics(config), values, strict=True)),
        "train_samples": int(of_split.counts.sum()),
        "classes": len(of_split.counts),
    }


def metrics(config: TrainConfig) -> tuple[str, ...]:
    """Error rate and calibration; of a long tail also accuracies in which every class is alike."""
    names = ("error", "accuracy", "calibration error")
    if config.data.imbalance == 1:
        return names
    return (*names, "class mean accuracy", "head accuracy", "medium accuracy", "tail accuracy")


def describe_data(config: TrainConfig) -> dict[str, Any]:
    """The options of the data that differ from all images of all classes."""
    wanted = dataclasses.asdict(config.data)
    told = ("classes", "samples_per_class", "imbalance", "holdout", "mixup")
    default = dataclasses.asdict(type(config.data)())
    return {name: wanted[name] for name in told if wanted[name] != default[name]}


def report(report: dict[str, Any]) -> list[str]:
    """A line on the data, and a table of the metrics."""
    lines = [
        f"{report['classes']} classes, {report['train_samples']} training images, "
        f"{report['result']['samples']} {report['split']} images",
        "",
    ]
    return lines + metrics_table(report["metrics"])


def metrics_table(metrics: Mapping[str, float | None]) -> list[str]:
    """Metrics in [0, 1] as a table of Markdown, in per cent."""
    values = ("–" if value is None else f"{100 * value:.2f} %" for value in metrics.values())
    return [
        f"| {' | '.join(metrics)} |",
        f"|{'---|' * len(metrics)}",
        f"| {' | '.join(values)} |",
    ]
