"""Optimisers and learning rates, against PyTorch's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
import torch

from experiments.core.config import OptimizerConfig
from experiments.training.step import build_optimizer, learning_rate
from tests.tolerances import FLOAT32

START = {
    "backbone": {"kernel": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)},
    "classifier": {"kernel": np.linspace(2, -1, 6, dtype=np.float32).reshape(3, 2)},
}
STEPS = 5
SGD = {"learning_rate": 0.3, "weight_decay": 0.1}


def gradients(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), START)


def after(config: OptimizerConfig) -> dict[str, Any]:
    optimizer = build_optimizer(config, STEPS)
    params, state = START, optimizer.init(START)
    for step in range(STEPS):
        updates, state = optimizer.update(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.map(np.asarray, params)


def after_torch(
    config: OptimizerConfig, build: Callable[..., torch.optim.Optimizer]
) -> dict[str, Any]:
    """The same in PyTorch, whose learning rate is set step by step."""
    params = {
        part: {"kernel": torch.tensor(tree["kernel"], requires_grad=True)}
        for part, tree in START.items()
    }
    share = {"backbone": config.backbone_rate, "classifier": 1.0}
    groups = [{"params": [tree["kernel"]], "lr": 1.0} for tree in params.values()]
    optimizer = build(groups, weight_decay=config.weight_decay)
    rate = learning_rate(config, STEPS)
    for step in range(STEPS):
        for group, (part, tree) in zip(optimizer.param_groups, params.items(), strict=True):
            group["lr"] = share[part] * float(rate(step))  # pyright: ignore[reportArgumentType]
            tree["kernel"].grad = torch.tensor(gradients(step)[part]["kernel"])
        optimizer.step()
    return {part: {"kernel": tree["kernel"].detach().numpy()} for part, tree in params.items()}


@pytest.mark.parametrize(
    ("options", "build"),
    [
        ({"nesterov": False, **SGD}, partial(torch.optim.SGD, momentum=0.9)),
        ({"nesterov": True, **SGD}, partial(torch.optim.SGD, momentum=0.9, nesterov=True)),
        ({"kind": "adam", "warmup_from": 1 / 16, "backbone_rate": 1.0}, torch.optim.Adam),
        # The decay is no part of the gradient, and follows the learning rate.
        ({"kind": "adamw"}, torch.optim.AdamW),
    ],
    ids=["sgd", "nesterov", "adam", "adamw"],
)
def test_updates_are_those_of_pytorch(options, build):
    """With a rate of its own for the backbone, except for Adam."""
    common = {"learning_rate": 0.03, "weight_decay": 0.5, "warmup_steps": 2, "backbone_rate": 0.1}
    config = OptimizerConfig(**common | options)
    rtol = (4 if config.kind == "sgd" else 32) * FLOAT32
    chex.assert_trees_all_close(after(config), after_torch(config, build), rtol=rtol)


@pytest.mark.parametrize("decay_all", [False, True])
@pytest.mark.parametrize(
    "options", [{"kind": "adamw"}, {"momentum": 0.0, "nesterov": False}], ids=["adamw", "sgd"]
)
def test_weight_decay_spares_biases_and_normalisation_unless_it_is_for_all(options, decay_all):
    config = OptimizerConfig(learning_rate=1.0, weight_decay=0.1, decay_all=decay_all, **options)
    optimizer = build_optimizer(config, 10)
    params = {"kernel": np.ones((2, 3), np.float32), "scale": np.ones(3, np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    expected = {"kernel": np.full((2, 3), -0.1), "scale": np.full(3, -0.1 * decay_all)}
    chex.assert_trees_all_close(updates, expected, rtol=FLOAT32)


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        (
            {"learning_rate": 0.8, "warmup_steps": 4, "warmup_from": 1 / 4},
            12,
            {0: 0.2, 2: 0.5, 4: 0.8, 8: 0.4, 12: 0},
        ),
        (
            {"learning_rate": 1.0, "schedule": "step", "decay_steps": (3, 6), "warmup_steps": 2},
            9,
            {0: 0, 1: 0.5, 2: 1, 3: 0.1, 5: 0.1, 6: 0.01},
        ),
    ],
    ids=["cosine", "step"],
)
def test_schedules(options, steps, expected):
    rate: Any = learning_rate(OptimizerConfig(**options), steps)
    found = [float(rate(step)) for step in expected]
    np.testing.assert_allclose(found, list(expected.values()), rtol=4 * FLOAT32, atol=1e-7)
