"""Few-shot evaluation of a run: it needs a checkpoint, not a live trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.config import (
    EvaluationConfig,
    Folders,
    TrainConfig,
    check_config,
    from_dict,
    to_dict,
)
from experiments.data.pipeline import load_split
from experiments.data.sampling import check_episodes
from experiments.errors import ConfigError, DivergedError
from experiments.evaluation.few_shot import evaluate_features, extract_features
from experiments.loss_names import parse_loss
from experiments.training.checkpoints import CHECKPOINTS_FOLDER, CheckpointError, Checkpoints
from experiments.training.state import initial_setup
from experiments.training.step import build_embed


def run_directory(path: Path) -> Path:
    """The directory of the run that a path names: the run's own, or that of its checkpoints."""
    path = Path(path)
    inside = path.resolve().name == CHECKPOINTS_FOLDER and not (path / CHECKPOINTS_FOLDER).is_dir()
    return path.resolve().parent if inside else path


def _chosen_step(checkpoints: Checkpoints, which: str) -> int:
    if which in ("best", "latest"):
        best = checkpoints.best_step() if which == "best" else None
        step = checkpoints.latest_step() if best is None else best
        if step is None:
            raise CheckpointError("the run holds no checkpoint; train it first")
        return step
    if not which.isdecimal():
        raise ConfigError(f"checkpoint must be best, latest or the number of a step, got {which!r}")
    return int(which)


def describe_run(config: TrainConfig, evaluation: EvaluationConfig) -> dict[str, Any]:
    """What a report says of a run before it tells of results, as JSON types."""
    name = parse_loss(config.loss.name)
    return {
        "loss": config.loss.name,
        "label": name.label,
        "power": config.loss.power,
        "sampling": config.sampling.strategy,
        "seed": config.seed,
        "data": config.data.name,
        "evaluation": to_dict(evaluation),
    }


def evaluate_run(
    path: Path,
    folders: Folders,
    *,
    split: str = "novel",
    which: str = "best",
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Few-shot accuracy of a checkpoint on classes that training has not seen.

    The run's configuration is the one that its checkpoint holds.

    Args:
      path: a run directory that `train` made, or the directory of its checkpoints.
      folders: where data lies.
      split: `novel`, `validation` or `base`.
      which: the checkpoint: `best` by validation accuracy (the latest where a data set has no
        validation classes), `latest`, or the number of a step.
      overrides: values of an `EvaluationConfig` that replace those of the run's configuration.

    Returns:
      A report as JSON types: that of `describe_run`, and `num_features`, `split`, `step` and
      `results`, one entry for each number of shots with `accuracy`, `interval`, `episodes`, `hash`.

    Raises:
      CheckpointError: there is no such checkpoint, or it is damaged.
      ConfigError: the split cannot give such episodes.
      DivergedError: the features are not finite.
    """
    path = Path(path)
    folder = path / CHECKPOINTS_FOLDER if (path / CHECKPOINTS_FOLDER).is_dir() else path
    with Checkpoints(folder, read_only=True) as checkpoints:
        step = _chosen_step(checkpoints, which)
        meta = checkpoints.meta(step)
        config = from_dict(TrainConfig, meta["config"])
        evaluation = dataclasses.replace(config.evaluation, **overrides or {})
        check_config(evaluation)
        height, width, channels = meta["image_shape"]
        setup = initial_setup(
            config, image_shape=(height, width, channels), num_classes=meta["num_classes"]
        )
        state = checkpoints.restore(setup.state, step).state
    images = load_split(
        config.data.name, split, data_dir=folders.data_dir, manual_dir=folders.manual_dir
    )
    for shots in evaluation.shots:
        check_episodes(images.labels, ways=evaluation.ways, shots=shots, queries=evaluation.queries)
    embed = build_embed(setup.graphdef, config.data)
    features = extract_features(lambda batch: embed(state, batch), images.images)
    if not np.isfinite(features).all():
        raise DivergedError(step, f"a feature of a {split} image is not finite")
    results = evaluate_features(features, images.labels, config=evaluation)
    return describe_run(config, evaluation) | {
        "num_features": setup.num_features,
        "split": split,
        "step": step,
        "results": [result._asdict() for result in results],
    }
