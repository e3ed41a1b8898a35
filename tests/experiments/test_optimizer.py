"""Optimisers and learning rates, against PyTorch's."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest
import torch

from experiments.config import OptimizerConfig
from experiments.errors import ConfigError
from experiments.presets import PRESETS
from experiments.runs import _schedule_in_epochs
from experiments.training.optimizer import build_optimizer, learning_rate

START = {
    "backbone": {"kernel": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)},
    "classifier": {"kernel": np.linspace(2, -1, 6, dtype=np.float32).reshape(3, 2)},
}
STEPS = 5


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
    config: OptimizerConfig, build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
) -> dict[str, Any]:
    """The same in PyTorch, whose learning rate is set step by step."""
    params = {
        part: {"kernel": torch.tensor(tree["kernel"], requires_grad=True)}
        for part, tree in START.items()
    }
    share = {"backbone": config.backbone_rate, "classifier": 1.0}
    optimizer = build([{"params": [tree["kernel"]], "lr": 1.0} for tree in params.values()])
    rate = learning_rate(config, STEPS)
    for step in range(STEPS):
        for group, (part, tree) in zip(optimizer.param_groups, params.items(), strict=True):
            group["lr"] = share[part] * float(rate(step))  # pyright: ignore[reportArgumentType]
            tree["kernel"].grad = torch.tensor(gradients(step)[part]["kernel"])
        optimizer.step()
    return {part: {"kernel": tree["kernel"].detach().numpy()} for part, tree in params.items()}


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_that_of_pytorch_with_a_rate_of_its_own_for_the_backbone(nesterov):
    config = OptimizerConfig(
        learning_rate=0.3, nesterov=nesterov, weight_decay=0.1, backbone_rate=0.1
    )
    expected = after_torch(
        config,
        lambda groups: torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1, nesterov=nesterov),
    )
    chex.assert_trees_all_close(after(config), expected, rtol=1e-5)


def test_adam_is_that_of_pytorch_with_its_weight_decay():
    config = OptimizerConfig(
        kind="adam", learning_rate=0.03, weight_decay=0.5, warmup_steps=2, warmup_from=1 / 16
    )
    expected = after_torch(config, lambda groups: torch.optim.Adam(groups, weight_decay=0.5))
    chex.assert_trees_all_close(after(config), expected, rtol=1e-4)


def test_adamw_is_that_of_pytorch_with_a_rate_of_its_own_for_the_backbone():
    """The decay is no part of the gradient, and follows the learning rate."""
    config = OptimizerConfig(
        kind="adamw", learning_rate=0.03, weight_decay=0.5, warmup_steps=2, backbone_rate=0.1
    )
    expected = after_torch(config, lambda groups: torch.optim.AdamW(groups, weight_decay=0.5))
    chex.assert_trees_all_close(after(config), expected, rtol=1e-4)


@pytest.mark.parametrize("decay_all", [False, True])
def test_decay_of_adamw_spares_what_it_shall(decay_all):
    config = OptimizerConfig(kind="adamw", learning_rate=1.0, weight_decay=0.1, decay_all=decay_all)
    optimizer = build_optimizer(config, 10)
    params = {"kernel": np.ones((2, 3), np.float32), "scale": np.ones(3, np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    expected = {"kernel": np.full((2, 3), -0.1), "scale": np.full(3, -0.1 * decay_all)}
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)


def test_weight_decay_spares_biases_and_normalisation():
    config = OptimizerConfig(learning_rate=1.0, momentum=0.0, nesterov=False, weight_decay=0.1)
    optimizer = build_optimizer(config, 10)
    params = {"kernel": np.ones((2, 3), np.float32), "scale": np.ones(3, np.float32)}
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    chex.assert_trees_all_close(
        updates, {"kernel": np.full((2, 3), -0.1, np.float32), "scale": np.zeros(3, np.float32)}
    )


def test_weight_decay_of_all_parameters():
    config = OptimizerConfig(
        learning_rate=1.0, momentum=0.0, nesterov=False, weight_decay=0.1, decay_all=True
    )
    optimizer = build_optimizer(config, 10)
    params = {"kernel": np.ones((2, 3), np.float32), "scale": np.ones(3, np.float32)}
    updates, _ = optimizer.update(
        jax.tree.map(np.zeros_like, params), optimizer.init(params), params
    )
    chex.assert_trees_all_close(updates, jax.tree.map(lambda leaf: -0.1 * leaf, params))


def test_schedules():
    cosine = learning_rate(OptimizerConfig(learning_rate=0.4, warmup_steps=4), 12)
    rates = np.array([float(cosine(step)) for step in (0, 2, 4, 8, 12)])  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(rates, [0, 0.2, 0.4, 0.2, 0], atol=1e-7)
    config = OptimizerConfig(learning_rate=1.0, schedule="step", decay_steps=(3, 6), warmup_steps=2)
    by_steps = learning_rate(config, 9)
    rates = np.array([float(by_steps(step)) for step in (1, 2, 3, 5, 6)])  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(rates, [0.5, 1, 0.1, 0.1, 0.01], rtol=1e-5)
    from_a_part = OptimizerConfig(learning_rate=0.8, warmup_steps=4, warmup_from=1 / 4)
    warming = learning_rate(from_a_part, 12)
    rates = np.array([float(warming(step)) for step in (0, 2, 4, 8)])  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(rates, [0.2, 0.5, 0.8, 0.4], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": 9}, "optimizer.warmup_steps = 9 must be below steps = 9"),
        (
            {"schedule": "step", "decay_steps": (3, 9)},
            r"optimizer.decay_steps = \(3, 9\) must lie between optimizer.warmup_steps = 0 and st",
        ),
        (
            {"schedule": "step", "decay_steps": (3,), "warmup_steps": 3},
            r"decay_steps = \(3,\) must lie between optimizer.warmup_steps = 3 and steps = 9",
        ),
        (
            {"schedule": "cosine", "decay_steps": (3,)},
            r"optimizer.schedule = cosine does not fit optimizer.decay_steps = \(3,\)",
        ),
        ({"schedule": "step"}, r"optimizer.schedule = step does not fit .*decay_steps = \(\)"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        learning_rate(OptimizerConfig(**options), 9)


def test_a_schedule_is_printed_in_epochs_of_the_available_images():
    config = PRESETS["imagenet-groups"].config
    assert _schedule_in_epochs(config, 5004) == (
        "An epoch is 5,004 steps: the run has 120 epochs, and its learning rate is divided by ten "
        "after epochs 30, 60, 90."
    )
    # Of 100 classes alone, as many steps are not the paper's 180 epochs.
    assert "the run has 1211 epochs" in _schedule_in_epochs(config, 496)
