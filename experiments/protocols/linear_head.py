"""The linear classifier that several protocols train."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jaxloss


def linear_head(
    key: Array, num_features: int, num_classes: int, *, scale: float = 1.0
) -> dict[str, Array]:
    """`kernel` [d, C], of deviation scale / √d, and `bias` [C], float32, before training."""
    shape = (num_features, num_classes)
    return {
        "kernel": scale * jax.nn.initializers.lecun_normal()(key, shape, jnp.float32),
        # The prior of a class. A constant bias leaves the softmax as it is; with zeros, binary
        # cross-entropy starts at C·log 2, and its first steps wreck the backbone.
        "bias": jnp.full(num_classes, -jnp.log(max(num_classes - 1, 1)), jnp.float32),
    }


def linear_scores(features: Array, head: dict[str, Array], memory: Any) -> Array:
    """The logits [n, C] of features [n, d], as an objective's scores."""
    return jaxloss.linear_logits(features, head["kernel"], head["bias"])
