"""A run of a few steps, and what tests read from a run directory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chex
import jax
import pytest
from flax import nnx

from experiments import run as run_module
from experiments.core.config import ModelConfig, SamplingConfig
from experiments.models.layers import Backbone
from experiments.papers import config_from_dict
from experiments.papers.few_shot import FewShotConfig, IntegrationEvaluation
from experiments.run import load_run
from experiments.training.checkpoints import Checkpoints
from experiments.training.run_directory import read_config
from experiments.training.step import TrainState


class Pooled(Backbone):
    """A backbone that is traced and compiled at once."""

    def __init__(self, num_features: int, channels: int, rngs: nnx.Rngs):
        self.num_features = num_features
        self.linear = nnx.Linear(channels, num_features, rngs=rngs)

    def __call__(self, images, *, train, keys=None, step=None):
        return self.linear(images.mean((1, 2)))


@contextlib.contextmanager
def light_backbones() -> Iterator[None]:
    """Trains `Pooled` in the place of every backbone."""
    build = run_module.build_backbone

    def build_backbone(config, *, rngs, image_shape, axis_name):
        options = {"image_shape": image_shape, "axis_name": axis_name}
        known = nnx.eval_shape(lambda: build(config, rngs=nnx.Rngs(0), **options))
        return Pooled(known.num_features, image_shape[-1], rngs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "build_backbone", build_backbone)
        yield


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


def final_state(directory: Path) -> TrainState:
    return jax.device_get(load_run(directory, "latest").state)


def metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def metrics_without_clock(directory: Path) -> list[dict[str, Any]]:
    """The same without times, which differ between two runs."""
    return [{k: v for k, v in line.items() if "second" not in k} for line in metrics(directory)]


def assert_equal_runs(one: Path, other: Path) -> None:
    """Every bit of their final states, and all metrics; no checkpoint of the first was damaged."""
    assert not [*(one / "checkpoints").glob("damaged-*")], "a checkpoint was moved"
    chex.assert_trees_all_equal(final_state(one), final_state(other))
    assert metrics_without_clock(one) == metrics_without_clock(other), "the metrics differ"


def config_of(directory: Path) -> Any:
    return config_from_dict(read_config(directory))


def saved_steps(directory: Path) -> list[int]:
    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.steps()


def files_below(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def flip_bits(checkpoint: Path) -> None:
    """In the largest file, which holds arrays. A single bit of it can be harmless."""
    path, content = max(files_below(checkpoint).items(), key=lambda item: len(item[1]))
    path.write_bytes(bytes(byte ^ (i % 50 == 0) for i, byte in enumerate(content)))
