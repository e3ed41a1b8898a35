"""A run of a few steps, and what tests read from a run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.assembly import Learner, Plan, build_learner
from experiments.config import ModelConfig, SamplingConfig, TrainConfig
from experiments.protocols import build_protocol, config_from_dict
from experiments.protocols.few_shot import FewShotConfig, IntegrationEvaluation
from experiments.runs import restore_run
from experiments.training.run_directory import read_config
from experiments.training.step import TrainState

TINY = FewShotConfig(
    sampling=SamplingConfig(batch_size=16),
    model=ModelConfig(widths=(4, 4, 4, 32)),
    evaluation=IntegrationEvaluation(episodes=50, validation_episodes=20),
    steps=4,
    validate_every=2,
    log_every=1,
)

TINY_OPTIONS = [
    *("--steps", "2", "--evaluation.validation-episodes", "20", "--evaluation.episodes", "20"),
    *("--model.widths", "4", "4", "4", "32", "--sampling.batch-size", "16"),
]
"""The same on the command line, in two steps."""

SHAPE = (16, 16, 1)


def tiny_learner(config: TrainConfig, axis_name: str | None = None) -> Learner:
    """The learner of a run on images of `SHAPE`, with five classes of a hundred images."""
    plan = Plan(config, build_protocol(config), SHAPE, num_features(config))
    return build_learner(plan, np.full(5, 100), 10, axis_name=axis_name)


def num_features(config: TrainConfig) -> int:
    """Features of a backbone that halves images of `SHAPE` four times."""
    return config.model.dim or config.model.widths[-1]


def final_state(directory: Path) -> TrainState:
    """The newest state of a run, as NumPy arrays."""
    return jax.device_get(restore_run(directory, "latest").state)


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of the metrics file."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def metrics_without_clock(directory: Path) -> list[dict[str, Any]]:
    """The same without times, which differ between two runs."""
    return [{k: v for k, v in line.items() if "second" not in k} for line in metrics(directory)]


def config_of(directory: Path) -> Any:
    """The configuration of a run."""
    return config_from_dict(read_config(directory))
