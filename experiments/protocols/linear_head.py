"""The linear classifier of several protocols, and its accuracy during training."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxloss


def init_linear_head(
    key: Array, num_features: int, num_classes: int, *, scale: float = 1.0
) -> dict[str, Array]:
    """The first `kernel` [d, C], with standard deviation scale / √d, and `bias` [C], float32."""
    shape = (num_features, num_classes)
    return {
        "kernel": scale * jax.nn.initializers.lecun_normal()(key, shape, jnp.float32),
        # The prior of a class. A constant bias does not change the softmax; with zeros, binary
        # cross-entropy starts at C·log 2, and its first steps destroy the backbone.
        "bias": jnp.full(num_classes, -jnp.log(max(num_classes - 1, 1)), jnp.float32),
    }


def head_logits(features: Array, head: dict[str, Array], objective_state: Any) -> Array:
    """The logits [n, C] of features [n, d], as `Objective.logits`."""
    return jaxloss.linear_logits(features, head["kernel"], head["bias"])


def train_accuracy(logits: Array, labels: Array) -> dict[str, Array]:
    """For the metrics log: the fraction of largest logits [n, C] that are at the label [n]."""
    correct = jnp.argmax(logits, axis=1) == labels
    return {"train_accuracy": jnp.mean(correct.astype(jnp.float32))}
