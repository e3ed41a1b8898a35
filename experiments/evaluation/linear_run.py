"""Linear evaluation of a run on any data set: its frozen features, and classifiers on them."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.config import DataConfig, Folders, TrainConfig, check_config
from experiments.data.augment import seen_shape
from experiments.data.builders import image_shape, share_images
from experiments.data.pipeline import load_split
from experiments.data.selection import select
from experiments.errors import ConfigError, DivergedError, ExperimentError
from experiments.evaluation.few_shot import extract_features
from experiments.evaluation.linear import Labelled, evaluate_linear
from experiments.evaluation.run import describe_run, restore_run
from experiments.protocols import protocol_of, run_from_dict
from experiments.protocols.classification import stored_splits
from experiments.training.checkpoints import checkpoints_folder, read_config
from experiments.training.step import build_embed


def evaluate_run_linear(
    path: Path,
    folders: Folders,
    *,
    data: str,
    holdout: float = 0.2,
    which: str = "best",
) -> dict[str, Any]:
    """Transfer of a run's features to a data set, by linear classifiers of 45 penalties.

    Images are normalised as in the training, and not augmented. Those of another size than the
    model saw are resized and cut to it.

    Args:
      path: a run directory that `train` made, or the directory of its checkpoints.
      folders: where data lies.
      data: the data set; one without a test split is split within its classes, one that holds
        classes out is joined before.
      holdout: share of each class's training images on which the penalty is chosen.
      which: the checkpoint, as in `restore_run`.

    Returns:
      A report as JSON types: that of `describe_run` under `run`, and `data`, `step`,
      `num_features`, `image_size`, `stored_size`, `classes`, `holdout`, `seen_in_training` (in
      words, what the backbone was trained on where test images may be among it, or it shares images
      with the data set), and the fields of a `LinearResult` under `result`.

    Raises:
      CheckpointError: there is no such checkpoint, or it is damaged.
      ConfigError: the data set cannot be split so, or its images do not fit the model.
      DivergedError: the features are not finite.
    """
    if not 0 < holdout < 1:
        raise ConfigError(
            f"holdout must be above 0 and below 1, got {holdout}: the penalty is chosen on images "
            "held out"
        )
    run = restore_run(path, which)
    seen_by_model = seen_shape(image_shape(run.config.data.name), run.config.data)
    preparation = _fitting(run.config.data, data, seen_by_model)
    check_config(preparation, "data.")
    splitting = DataConfig(name=data, holdout=holdout)

    embed = build_embed(run.setup.graphdef, preparation)
    own, test = stored_splits(data)

    def features_of(split: str) -> Labelled:
        images = load_split(data, split, data_dir=folders.data_dir, manual_dir=folders.manual_dir)
        features = extract_features(partial(embed, run.state), images.images)
        if not np.isfinite(features).all():
            raise DivergedError(run.step, "a feature of an image is not finite")
        return Labelled(features, images.labels)

    whole = features_of(own)
    tested = whole if test is None else features_of(test)
    chosen = select(
        np.asarray(whole.labels),
        splitting,
        test_labels=None if test is None else np.asarray(tested.labels),
    )
    result = evaluate_linear(
        _rows(whole, chosen.rows["train"]),
        _rows(whole, chosen.rows["validation"]),
        _rows(tested, chosen.rows["test"]),
    )
    return {
        "run": describe_run(run.config),
        "data": data,
        "step": run.step,
        "num_features": run.setup.num_features,
        "image_size": list(seen_by_model[:2]),
        "stored_size": list(image_shape(data)[:2]),
        "classes": len(chosen.classes),
        "holdout": holdout,
        "seen_in_training": _seen_in_training(run.config, data),
        "result": result._asdict(),
    }


def _seen_in_training(config: TrainConfig, data: str) -> str:
    """What the backbone was trained on, in words, where test images may be among it; or nothing.

    Of one data set, at whatever sizes, protocols that hold images out leave the same ones out as
    the split for test does; those that hold classes out train on all images of the others. Two sets
    that share images count as seen, whichever of them are for test. So does what a run has seen
    whose weights this one started from, as far as that run is still there.
    """
    trained_on = config.data.name
    if trained_on.partition("@")[0] == data.partition("@")[0]:
        if "base" in protocol_of(config).splits:
            return (
                f"base classes of {trained_on}, so that test images are among those that it has "
                "seen"
            )
    elif share_images(trained_on, data):
        return f"{trained_on}, which shares images with {data}"
    return _seen_before(config, data)


def _seen_before(config: TrainConfig, data: str) -> str:
    """The same of the run that gave the weights to start from; a file does not tell."""
    if not config.model.weights or not Path(config.model.weights).is_dir():
        return ""
    try:
        before = run_from_dict(read_config(checkpoints_folder(Path(config.model.weights)).parent))
    except ExperimentError:
        return ""
    return _seen_in_training(before, data)


def _fitting(trained_with: DataConfig, data: str, seen: tuple[int, int, int]) -> DataConfig:
    """How images of a data set become what the model saw in its training.

    Raises:
      ConfigError: they have other channels, or another size and the model saw no squares.
    """
    height, width, channels = image_shape(data)
    if channels != seen[2]:
        raise ConfigError(
            f"images of {data} have {channels} channels, and the run was trained on images of "
            f"{seen[2]}; choose a data set of as many"
        )
    if (height, width) == seen[:2] or trained_with.image_size:
        return trained_with
    if seen[0] != seen[1]:
        raise ConfigError(
            f"images of {data} are {height}×{width}, and the run was trained on {seen[0]}×"
            f"{seen[1]}, which is no square to resize to; train it with data.image_size"
        )
    return dataclasses.replace(trained_with, image_size=seen[0])


def _rows(data: Labelled, rows: np.ndarray) -> Labelled:
    return Labelled(np.asarray(data.features)[rows], np.asarray(data.labels)[rows])
