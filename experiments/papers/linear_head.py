"""The linear classifier of several protocols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxloss
from experiments.core.protocol import Loss, Objective, Problem


def init_linear_head(problem: Problem, key: Array, *, scale: float = 1.0) -> dict[str, Array]:
    """The first `kernel` [d, C], with standard deviation scale / √d, and `bias` [C], float32."""
    num_classes = len(problem.class_counts)
    shape = (problem.num_features, num_classes)
    return {
        "kernel": scale * jax.nn.initializers.lecun_normal()(key, shape, jnp.float32),
        # The prior of a class. A constant bias does not change the softmax; with zeros, binary
        # cross-entropy starts at C·log 2, and its first steps destroy the backbone.
        "bias": jnp.full(num_classes, -jnp.log(max(num_classes - 1, 1)), jnp.float32),
    }


def init_kernel(problem: Problem, key: Array) -> dict[str, Array]:
    """The same without a bias, and with PyTorch's deviation: of cosines, gradients depend on it."""
    return {"kernel": init_linear_head(problem, key, scale=3**-0.5)["kernel"]}


def head_logits(features: Array, head: dict[str, Array], objective_state: Any) -> Array:
    """The logits [n, C] of features [n, d], as `Objective.logits`."""
    return jaxloss.linear_logits(features, head["kernel"], head["bias"])


def train_accuracy(logits: Array, labels: Array) -> dict[str, Array]:
    """For the metrics log: the fraction of largest logits [n, C] that are at the label [n]."""
    correct = jnp.argmax(logits, axis=1) == labels
    return {"train_accuracy": jnp.mean(correct.astype(jnp.float32))}


def objective_of_logits(
    init_head: Callable[[Array], Any],
    logits_of: Callable[[Array, Any, Any], Array],
    loss_of: Callable[[Array, Array], Array],
    *,
    accuracy: bool = True,
) -> Objective:
    """The objective of a loss of logits [n, C] and labels; with `accuracy`, these are [n]."""

    def loss(features: Array, labels: Array, head: Any, objective_state: Any) -> Loss:
        logits = logits_of(features, head, objective_state)
        means = train_accuracy(logits, labels) if accuracy else {}
        return Loss(loss_of(logits, labels), objective_state, means)

    return Objective(init_head, loss, logits_of)
