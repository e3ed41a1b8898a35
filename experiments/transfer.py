"""Protocol F: transfer of a run's frozen features to a data set, by linear classifiers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from experiments.config import DataConfig, Folders, TrainConfig, check_config
from experiments.data.builders import builder_class, image_shape, share_images
from experiments.data.pipeline import load_split
from experiments.data.selection import select
from experiments.errors import ConfigError, ExperimentError
from experiments.evaluation.linear import Labelled, evaluate_linear
from experiments.protocols import build_protocol, config_from_dict
from experiments.protocols.classification import stored_splits
from experiments.runs import describe_run, restore_run
from experiments.storage import storage_path
from experiments.training.checkpoints import checkpoints_folder
from experiments.training.outputs import build_features
from experiments.training.run_directory import read_config


def evaluate_run_linear(
    path: Path,
    folders: Folders,
    *,
    data: str,
    holdout: float = 0.2,
    which: str = "best",
) -> dict[str, Any]:
    """Trains linear classifiers with 45 L2 penalties on the features of a data set.

    Images are normalised as in training and not augmented. They are resized and cropped where their
    size differs from that of training.

    Args:
      path, which: The run and its checkpoint, as in `restore_run`.
      folders: Where data is stored.
      data: The data set; one without a test split is split within its classes, one that holds
        classes out is joined before.
      holdout: Fraction of each class's training images on which the penalty is chosen.

    Returns:
      A report as JSON types: that of `describe_run` under `run`, and `data`, `step`,
      `num_features`, `image_size`, `stored_size` (of photographs stored whole, the shorter side),
      `classes`, `holdout`, `seen_in_training` (a phrase, empty unless the backbone was trained on
      images of this data set), `notes`, and the fields of a `LinearResult` under `result`.

    Raises:
      CheckpointError: There is no such checkpoint, or none is intact.
      ConfigError: The data set cannot be split so, or its images do not fit the model.
      DivergedError: The features are not finite.
    """
    if not 0 < holdout < 1:
        raise ConfigError(
            f"holdout must be above 0 and below 1, got {holdout}: the penalty is chosen on "
            "held-out images"
        )
    run = restore_run(path, which)
    config, shape = run.plan.config, run.plan.image_shape
    preparation = _preparation(config.data, data, shape)
    check_config(preparation, "data.")
    features_of = build_features(run.network.graphdef, preparation)
    own, test = stored_splits(data)

    def read(split: str) -> Labelled:
        images = load_split(data, split, data_dir=folders.data_dir, manual_dir=folders.manual_dir)
        return Labelled(features_of(run.state, images.images), images.labels)

    whole = read(own)
    tested = whole if test is None else read(test)
    chosen = select(
        np.asarray(whole.labels),
        holdout=holdout,
        test_labels=None if test is None else np.asarray(tested.labels),
    )
    result = evaluate_linear(
        _rows(whole, chosen.rows["train"]),
        _rows(whole, chosen.rows["validation"]),
        _rows(tested, chosen.rows["test"]),
    )
    description, stored = describe_run(config, run.plan.protocol), builder_class(data).SPEC
    return {
        "run": description,
        "version": description["version"],
        "commit": description["commit"],
        "data": data,
        "step": run.step,
        "num_features": run.plan.num_features,
        "image_size": list(shape[:2]),
        "stored_size": list(stored.image_shape[: 1 if stored.whole else 2]),
        "classes": len(chosen.classes),
        "holdout": holdout,
        "seen_in_training": _seen_in_training(
            config, data, holds_classes_out="base" in run.plan.protocol.splits
        ),
        "notes": run.notes,
        "result": result._asdict(),
    }


def _seen_in_training(config: TrainConfig, data: str, *, holds_classes_out: bool) -> str:
    """What the backbone was trained on if test images may be among it, as a phrase; else empty.

    Protocols that hold images out leave out the same ones as the test split here, whatever the
    image size; protocols that hold classes out train on all images of the others. Two sets that
    share images count as seen. So do the images of the run whose weights this one started from, as
    far as that run still exists.
    """
    trained_on = config.data.name
    if trained_on.partition("@")[0] == data.partition("@")[0]:
        if holds_classes_out:
            return f"base classes of {trained_on}, which include test images"
    elif share_images(trained_on, data):
        return f"{trained_on}, which shares images with {data}"
    return _seen_before(config, data)


def _seen_before(config: TrainConfig, data: str) -> str:
    """The same for the run that gave the initial weights; unknown for a file of weights."""
    if not config.model.weights or not storage_path(config.model.weights).is_dir():
        return ""
    try:
        before = config_from_dict(
            read_config(checkpoints_folder(storage_path(config.model.weights)).parent)
        )
    except ExperimentError:
        return ""
    holds_classes_out = "base" in build_protocol(before).splits
    return _seen_in_training(before, data, holds_classes_out=holds_classes_out)


def _preparation(trained_with: DataConfig, data: str, seen: tuple[int, int, int]) -> DataConfig:
    """How images of a data set are brought to the size and normalisation of training.

    Raises:
      ConfigError: They have other channels, or another size and the model was not trained on
        square images.
    """
    height, width, channels = image_shape(data)
    if channels != seen[2]:
        raise ConfigError(
            f"images of {data} have {channels} channels, and the run was trained on {seen[2]}; "
            "choose a data set with as many channels"
        )
    if (height, width) == seen[:2] or trained_with.image_size:
        return trained_with
    if seen[0] != seen[1]:
        raise ConfigError(
            f"images of {data} are {height}×{width}, and the run was trained on {seen[0]}×"
            f"{seen[1]}, which is not square; train it with data.image_size"
        )
    return dataclasses.replace(trained_with, image_size=seen[0])


def _rows(data: Labelled, rows: np.ndarray) -> Labelled:
    return Labelled(np.asarray(data.features)[rows], np.asarray(data.labels)[rows])
