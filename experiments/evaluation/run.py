"""The evaluation of a run: it needs a checkpoint, not a live trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.config import Folders, TrainConfig, check_config
from experiments.errors import ConfigError
from experiments.evaluation.outputs import build_outputs
from experiments.protocols import Outputs, Protocol, protocol_of, run_from_dict
from experiments.training.checkpoints import (
    CHECKPOINTS_FOLDER,
    CheckpointError,
    Checkpoints,
    checkpoints_folder,
)
from experiments.training.state import Setup, TrainState, initial_setup


def run_directory(path: Path) -> Path:
    """The directory of the run that a path names: the run's own, or that of its checkpoints."""
    path = Path(path)
    inside = path.resolve().name == CHECKPOINTS_FOLDER and checkpoints_folder(path) == path
    return path.resolve().parent if inside else path


class Restored(NamedTuple):
    """A checkpoint with all that is needed to use it."""

    config: TrainConfig
    protocol: Protocol
    setup: Setup
    state: TrainState
    step: int
    counts: np.ndarray
    """int64 [C], training images of every class."""
    validation: float | None
    """What the best checkpoint is chosen by."""


def restore_run(path: Path, which: str = "best") -> Restored:
    """A checkpoint of a run; its configuration is the one that the checkpoint holds.

    Args:
      path: a run directory that `train` made, or the directory of its checkpoints.
      which: the checkpoint: `best` by validation (the latest where there was none), `latest`, or
        the number of a step.

    Raises:
      CheckpointError: there is no such checkpoint, or it is damaged.
      ConfigError: `which` is none of these.
    """
    with Checkpoints(checkpoints_folder(path), read_only=True) as checkpoints:
        step = _chosen_step(checkpoints, which)
        meta = checkpoints.meta(step)
        config = run_from_dict(meta["config"])
        protocol = protocol_of(config)
        # Runs from before there were counts have the number of classes alone.
        counts = np.array(meta.get("counts") or [1] * meta["num_classes"], np.int64)
        height, width, channels = meta["image_shape"]
        setup = initial_setup(
            config, protocol.objective, image_shape=(height, width, channels), counts=counts
        )
        state = checkpoints.restore(setup.state, step).state
        validation = checkpoints.accuracy(step)
    return Restored(config, protocol, setup, state, step, counts, validation)


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


def describe_run(config: TrainConfig) -> dict[str, Any]:
    """What a report says of a run before it tells of results, as JSON types."""
    return {
        "protocol": config.protocol,
        "loss": config.loss.name,
        "sampling": config.sampling.strategy,
        "seed": config.seed,
        "data": config.data.name,
        "weights": config.model.weights,
    } | protocol_of(config).describe(config)


def evaluate_run(
    path: Path,
    folders: Folders,
    *,
    split: str | None = None,
    which: str = "best",
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The results of a checkpoint, as its protocol has them.

    Args:
      path: a run directory that `train` made, or the directory of its checkpoints.
      folders: where data lies.
      split: one of the protocol's splits; by default the one for evaluation.
      which: as in `restore_run`.
      overrides: values that replace those of the configuration's `evaluation`.

    Returns:
      A report as JSON types: that of `describe_run`, and `num_features`, `split`, `step` and what
      the protocol's evaluation gives, `metrics` among it.

    Raises:
      CheckpointError: there is no such checkpoint, or it is damaged.
      ConfigError: there is no such split, or it cannot be evaluated so.
      DivergedError: the features are not finite.
    """
    run = restore_run(path, which)
    config, protocol = run.config, run.protocol
    split = split or protocol.splits[-1]
    if split not in protocol.splits:
        raise ConfigError(
            f"protocol {config.protocol} has no split {split!r}; it has "
            f"{', '.join(protocol.splits)}"
        )
    if overrides:
        evaluation: Any = getattr(config, "evaluation", None)
        known = {f.name for f in dataclasses.fields(evaluation)} if evaluation else set()
        known -= set(protocol_of(config).for_validation)
        if unknown := overrides.keys() - known:
            raise ConfigError(
                f"the evaluation of protocol {config.protocol} has no {', '.join(sorted(unknown))}"
            )
        # Any: not every protocol has an evaluation with options.
        changed: Any = {"evaluation": dataclasses.replace(evaluation, **overrides)}
        config = dataclasses.replace(config, **changed)
    check_config(config)
    outputs_of = build_outputs(run.setup, config.data, run.counts)

    def outputs(split: str) -> Outputs:
        return outputs_of(run.state, protocol.load(config, folders, split))

    return (
        describe_run(config)
        | {"num_features": run.setup.num_features, "split": split, "step": run.step}
        | {"validation": run.validation}
        | protocol.evaluate(config, split, outputs)
    )
