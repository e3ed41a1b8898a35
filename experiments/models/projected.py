"""A backbone followed by a linear layer and batch normalisation."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array

from experiments.models.layers import Backbone, batch_norm


class Projected(Backbone):
    """Features with another dimension, normalised over the batch.

    Args:
      backbone: The backbone.
      dim: Features d of the linear layer. It has no bias, because the normalisation has one.
      axis_name: Device axis over which batch statistics are synchronised, or None.
      rngs: Source of the initial parameters.
    """

    def __init__(self, backbone: Backbone, dim: int, *, axis_name: str | None, rngs: nnx.Rngs):
        self.backbone = backbone
        self.linear = nnx.Linear(backbone.num_features, dim, use_bias=False, rngs=rngs)
        self.norm = batch_norm(dim, axis_name=axis_name, rngs=rngs)
        self.num_features = dim

    def __call__(
        self, images: Array, *, train: bool, keys: Array | None = None, step: Array | None = None
    ) -> Array:
        """As `Backbone.__call__`."""
        features = self.backbone(images, train=train, keys=keys, step=step)
        projected = self.linear(features.astype(jnp.float32))
        return self.norm(projected, use_running_average=not train)
