"""Few-shot evaluation of a run directory: it needs a checkpoint, not a live trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.config import EvaluationConfig, Folders, TrainConfig, from_dict, to_dict
from experiments.data.pipeline import load_split
from experiments.evaluation.few_shot import evaluate_features, extract_features
from experiments.training.checkpoints import CheckpointError, Checkpoints, read_config
from experiments.training.objective import parse_loss
from experiments.training.state import initial_setup
from experiments.training.step import build_embed


def _chosen_step(checkpoints: Checkpoints, which: str) -> int:
    if which in ("best", "latest"):
        best = checkpoints.best_step() if which == "best" else None
        step = checkpoints.latest_step() if best is None else best
        if step is None:
            raise CheckpointError("the run holds no checkpoint; train it first")
        return step
    if not which.isdecimal():
        raise ValueError(f"checkpoint must be best, latest or the number of a step, got {which!r}")
    return int(which)


def evaluate_run(
    directory: Path,
    folders: Folders,
    *,
    split: str = "novel",
    which: str = "best",
    evaluation: EvaluationConfig | None = None,
) -> dict[str, Any]:
    """Few-shot accuracy of a checkpoint on classes that training has not seen.

    Args:
      directory: a run directory that `train` made.
      folders: where data lies.
      split: `novel`, `validation` or `base`.
      which: the checkpoint: `best` by validation accuracy (the latest where a data set has no
        validation classes), `latest`, or the number of a step.
      evaluation: episodes and distance; those of the run's configuration by default.

    Returns:
      A report as JSON types: `loss`, `sampling`, `seed`, `step`, `split`, `distance` and `results`,
      one entry for each number of shots with `accuracy`, `interval`, `episodes`, `hash`.

    Raises:
      CheckpointError: there is no such checkpoint, or it is damaged.
      ValueError: the split cannot give such episodes.
    """
    config = from_dict(TrainConfig, read_config(directory))
    evaluation = evaluation or config.evaluation
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        step = _chosen_step(checkpoints, which)
        meta = checkpoints.meta(step)
        height, width, channels = meta["image_shape"]
        setup = initial_setup(
            config, image_shape=(height, width, channels), num_classes=meta["num_classes"]
        )
        state = checkpoints.restore(setup.state, step).state
    images = load_split(
        config.data.name, split, data_dir=folders.data_dir, manual_dir=folders.manual_dir
    )
    embed = build_embed(setup.graphdef, config.data)
    features = extract_features(lambda batch: embed(state, batch), images.images)
    results = evaluate_features(features, images.labels, config=evaluation)
    return {
        "loss": config.loss.name,
        "label": parse_loss(config.loss.name).label,
        "power": config.loss.power,
        "num_features": setup.num_features,
        "sampling": config.sampling.strategy,
        "seed": config.seed,
        "data": config.data.name,
        "split": split,
        "step": step,
        "evaluation": to_dict(evaluation),
        "results": [result._asdict() for result in results],
    }
