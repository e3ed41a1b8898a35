"""A backbone whose features go through a linear layer and batch normalisation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from experiments.models.layers import batch_norm


class Projected(nnx.Module):
    """Features of another dimension, normalised over the batch.

    Args:
        backbone: A module with `num_features`, called as `backbone(images, train=..., keys=...)`.
        dim: Features d of the linear layer, which has no bias: the normalisation has one.
        axis_name: Device axis over which the batch statistics are synchronised, or None.
        rngs: Source of the initial parameters.
    """

    def __init__(self, backbone: Any, dim: int, *, axis_name: str | None, rngs: nnx.Rngs):
        self.backbone = backbone
        self.linear = nnx.Linear(backbone.num_features, dim, use_bias=False, rngs=rngs)
        self.norm = batch_norm(dim, axis_name=axis_name, rngs=rngs)
        self.num_features = dim

    def __call__(self, images: Array, *, train: bool, keys: Array | None = None) -> Array:
        """Features of a batch.

        Args:
            images: float32 [n, h, w, c], normalised.
            train: Normalise by the batch's statistics and update the running ones.
            keys: Typed PRNG keys [n] for the backbone.

        Returns:
            float32 [n, dim].
        """
        features = self.backbone(images, train=train, keys=keys)
        projected = self.linear(features.astype(jnp.float32))
        return self.norm(projected, use_running_average=not train)
