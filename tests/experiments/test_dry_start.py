"""Every preset starts: its options fit, and its training step takes two images of its data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import assembly
from experiments.assembly import Plan, build_learner, plan_run
from experiments.compilation import num_classes
from experiments.config import TrainConfig
from experiments.contracts import Photographs
from experiments.data.augment import seen_shape
from experiments.data.builders import builder_class, image_shape, is_multi_label
from experiments.models.layers import Backbone
from experiments.presets import PRESETS
from experiments.protocols import hyperspherical
from experiments.training.step import Batch, TrainState, build_step

BLOCKS = {"resnet32": (1, 1, 1), "resnet18": (1,) * 4, "resnet50": (1,) * 4, "swin": (2,) * 4}
"""The fewest that have all that is in a network. More of them take seconds, and say no more."""


def network(name: str) -> tuple[Any, ...]:
    """The options of a preset's model, and the shape of the images that it receives."""
    config = PRESETS[name].config
    return config.model, seen_shape(image_shape(config.data.name), config.data)


REPRESENTATIVES = {network(name): name for name in PRESETS}.values()
"""A preset for every network. The others are traced with `Pooled`."""


class Pooled(Backbone):
    """A backbone that is traced and compiled at once, with as many features as the preset's own."""

    def __init__(self, num_features: int, channels: int, rngs: nnx.Rngs):
        self.num_features = num_features
        self.linear = nnx.Linear(channels, num_features, rngs=rngs)

    def __call__(self, images, *, train, keys=None, step=None):
        return self.linear(images.mean((1, 2)))


@pytest.fixture(autouse=True)
def quick_prototypes(monkeypatch):
    """Prototypes of any directions: those of 1,000 classes take half a minute."""

    def directions(num_prototypes: int, dim: int) -> np.ndarray:
        found = np.random.default_rng(0).normal(size=(dim, num_prototypes))
        return (found / np.linalg.norm(found, axis=0)).astype(np.float32)

    monkeypatch.setattr(hyperspherical, "spread_prototypes", directions)


@pytest.fixture
def plan_of(tmp_path, monkeypatch) -> Callable[..., Plan]:
    """The plan of a preset with the fewest blocks, or with `Pooled`.

    Presets that start from a pretrained backbone get a file to start from.
    """

    def plan_of(name: str, *, pooled: bool) -> Plan:
        config: TrainConfig = PRESETS[name].config
        changes: dict[str, Any] = {"blocks": BLOCKS.get(config.model.backbone, ())}
        if config.optimizer.backbone_rate != 1:
            (tmp_path / "weights.safetensors").touch()
            changes["weights"] = str(tmp_path / "weights.safetensors")
        plan = plan_run(
            dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))
        )
        if pooled:

            def build_backbone(config, *, image_shape, axis_name, rngs):
                return Pooled(plan.num_features, image_shape[-1], rngs)

            monkeypatch.setattr(assembly, "build_backbone", build_backbone)
        return plan

    return plan_of


def first_step(plan: Plan) -> Callable[[Any, Any], tuple[TrainState, TrainState, Any]]:
    """From images and labels: the states before and after the first step, and its metrics."""
    counts = np.maximum(500 - 4 * np.arange(num_classes(plan)), 20)

    def first_step(images, labels):
        learner = build_learner(plan, counts, steps_per_epoch=max(plan.config.steps // 50, 1))
        step = build_step(
            learner.graphdef,
            learner.objective,
            learner.optimizer,
            plan.config.data,
            key=jax.random.key(0),
            axis_name=None,
        )
        state, metrics = step(learner.state, Batch(images, labels))
        if learner.objective.after_epoch is not None:
            objective_state, _ = learner.objective.after_epoch(state.objective_state)
            state = state._replace(objective_state=objective_state)
        return learner.state, state, metrics

    return first_step


def fake_batch(plan: Plan) -> Batch:
    """Two images of the data set of a run."""
    rng, name = np.random.default_rng(0), plan.config.data.name
    spec = builder_class(name).SPEC
    images = rng.integers(0, 256, (2, *spec.array_shape), np.uint8)
    if spec.whole:
        images = Photographs(images, np.array([spec.array_shape[:2]] * 2, np.int32))
    labels = np.array([1, 0], np.int32)
    if is_multi_label(name):
        labels = np.eye(num_classes(plan), dtype=np.int8)[labels]
    return Batch(images, labels)


@pytest.mark.parametrize("name", PRESETS)
def test_a_second_step_can_follow_the_first(name, plan_of):
    """Weak types are equal, too: otherwise a run compiles its step twice."""
    plan = plan_of(name, pooled=name not in REPRESENTATIVES)
    before, after, metrics = jax.eval_shape(first_step(plan), *fake_batch(plan))
    kinds = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), state)
        for state in (before, after)
    ]
    assert kinds[0] == kinds[1]
    assert (metrics["loss"].shape, metrics["loss"].dtype) == ((), jnp.float32)


def test_the_metrics_of_the_first_step_are_finite(plan_of):
    """Of the protocol of which no test trains a run."""
    plan = plan_of("icons-two-way", pooled=True)
    _, after, metrics = jax.jit(first_step(plan))(*fake_batch(plan))
    assert after.step == 1
    assert all(np.isfinite(value) for value in metrics.values()), metrics
