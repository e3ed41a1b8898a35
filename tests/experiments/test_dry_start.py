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
from experiments.assembly import Plan, build_network, plan_run
from experiments.compilation import num_classes
from experiments.config import ModelConfig, TrainConfig
from experiments.contracts import Photographs
from experiments.data.augment import seen_shape
from experiments.data.builders import builder_class, image_shape, is_multi_label
from experiments.models.layers import Backbone
from experiments.presets import PRESETS
from experiments.protocols import hyperspherical
from experiments.training.step import Batch, TrainState, build_step

EMBEDDED = [
    name
    for name, preset in PRESETS.items()
    if preset.config.data.name in ("icons", "kanji", "kanji_radicals@32")
]
EXECUTED = ["cifar-fs", "cifar100-sphere", "imagenet200-sphere", "cifar10-lt", "cifar100-lt"]
"""Presets on photographs whose step is compiled and run, not only traced: ResNet-12, and every
variant of ResNet-32."""
BLOCKS = {"resnet32": (1, 1, 1), "resnet18": (1,) * 4, "resnet50": (1,) * 4, "swin": (2,) * 4}
"""The fewest that have all that is in a network. More of them take seconds, and say no more."""


def network(name: str) -> tuple[ModelConfig, tuple[int, ...]]:
    """The options of a preset's model, and the shape of the images that it receives."""
    config = PRESETS[name].config
    return config.model, seen_shape(image_shape(config.data.name), config.data)


REPRESENTATIVES = {
    network(name): name
    for name in PRESETS
    if name not in EMBEDDED and network(name) not in map(network, EXECUTED)
}.values()
"""A preset for every network that is not executed. The others are traced with `Pooled`."""
IMAGES = 2


class Pooled(Backbone):
    """A backbone that is traced at once, of as many features as the preset's own."""

    def __init__(self, num_features: int, channels: int, rngs: nnx.Rngs):
        self.num_features = num_features
        self.linear = nnx.Linear(channels, num_features, rngs=rngs)

    def __call__(self, images, *, train, keys=None, step=None):
        return self.linear(images.mean((1, 2)))


@pytest.fixture(autouse=True)
def quick_prototypes(monkeypatch):
    """Prototypes of any directions: those of 1,000 classes take half a minute."""

    def directions(num_prototypes: int, dim: int, seed: int) -> np.ndarray:
        found = np.random.default_rng(seed).normal(size=(dim, num_prototypes))
        return (found / np.linalg.norm(found, axis=0)).astype(np.float32)

    monkeypatch.setattr(hyperspherical, "spread_prototypes", directions)


@pytest.fixture
def config_of(tmp_path) -> Callable[[str], TrainConfig]:
    """The configuration of a preset, with the fewest blocks.

    Those of a pretrained backbone get a file to start from.
    """

    def config_of(name: str) -> TrainConfig:
        config = PRESETS[name].config
        blocks = BLOCKS.get(config.model.backbone, ())
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, blocks=blocks))
        if config.optimizer.backbone_rate == 1:
            return config
        weights = tmp_path / "weights.safetensors"
        weights.touch()
        return dataclasses.replace(
            config, model=dataclasses.replace(config.model, weights=str(weights))
        )

    return config_of


def first_step(
    plan: Plan, classes: int
) -> Callable[[Any, Any], tuple[TrainState, TrainState, Any]]:
    """From images and labels: the states before and after the first step, and its metrics."""
    counts = np.maximum(500 - 4 * np.arange(classes), 20)

    def first_step(images, labels):
        network = build_network(plan, counts, steps_per_epoch=max(plan.config.steps // 50, 1))
        step = build_step(
            network.graphdef,
            network.objective,
            network.optimizer,
            plan.config.data,
            key=jax.random.key(0),
            axis_name=None,
        )
        state, metrics = step(network.state, Batch(images, labels))
        if network.objective.after_epoch is not None:
            objective_state, _ = network.objective.after_epoch(state.objective_state)
            state = state._replace(objective_state=objective_state)
        return network.state, state, metrics

    return first_step


def fake_batch(name: str, classes: int) -> Batch:
    rng = np.random.default_rng(0)
    spec = builder_class(name).SPEC
    images = rng.integers(0, 256, (IMAGES, *spec.array_shape), np.uint8)
    if spec.whole:
        images = Photographs(images, np.array([spec.array_shape[:2]] * IMAGES, np.int32))
    labels = np.array([1, 0], np.int32)
    if is_multi_label(name):
        labels = np.eye(classes, dtype=np.int8)[labels]
    return Batch(images, labels)


def test_every_variant_of_resnet32_is_executed():
    models = {network(name)[0] for name in PRESETS}
    variants = {model for model in models if model.backbone == "resnet32"}
    assert variants <= {network(name)[0] for name in EXECUTED}


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in EMBEDDED])
def test_a_preset_on_photographs_starts(name, config_of, monkeypatch):
    plan = plan_run(config_of(name))
    classes = num_classes(plan)
    if name not in REPRESENTATIVES:
        monkeypatch.setattr(
            assembly,
            "build_backbone",
            lambda config, *, image_shape, axis_name, rngs: Pooled(
                plan.num_features, image_shape[-1], rngs
            ),
        )
    before, after, metrics = jax.eval_shape(
        first_step(plan, classes), *fake_batch(plan.config.data.name, classes)
    )
    assert_same_shapes(before, after)
    assert (metrics["loss"].shape, metrics["loss"].dtype) == ((), jnp.float32)


@pytest.mark.parametrize(
    "name", [*EMBEDDED, *(pytest.param(n, marks=pytest.mark.slow) for n in EXECUTED)]
)
def test_a_preset_takes_a_step(name, config_of):
    plan = plan_run(config_of(name))
    classes = num_classes(plan)
    batch = fake_batch(plan.config.data.name, classes)
    before, after, metrics = jax.jit(first_step(plan, classes))(*batch)
    assert_same_shapes(before, after)
    assert after.step == 1
    assert all(np.isfinite(value) for value in metrics.values()), metrics


def assert_same_shapes(before: TrainState, after: TrainState) -> None:
    """A second step can follow the first."""
    shapes = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) for state in (before, after)
    ]
    assert shapes[0] == shapes[1]
