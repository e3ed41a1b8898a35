"""A backbone followed by a linear layer, batch normalisation, or both."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array

from experiments.models.layers import Backbone, batch_norm


class Projected(Backbone):
    """Features with another dimension, normalised over the batch, or both.

    Args:
      backbone: The backbone.
      dim: Features d of a linear layer, or 0 for none. The layer has a bias unless normalisation,
        which has one, comes after it.
      normalize: End with batch normalisation.
      axis_name: Device axis over which batch statistics are synchronised, or None.
      rngs: Source of the initial parameters.
    """

    def __init__(
        self,
        backbone: Backbone,
        dim: int,
        *,
        normalize: bool,
        axis_name: str | None,
        rngs: nnx.Rngs,
    ):
        self.backbone = backbone
        self.num_features = dim or backbone.num_features
        self.linear = (
            nnx.Linear(backbone.num_features, dim, use_bias=not normalize, rngs=rngs)
            if dim
            else None
        )
        self.norm = (
            batch_norm(self.num_features, axis_name=axis_name, rngs=rngs) if normalize else None
        )

    def __call__(
        self, images: Array, *, train: bool, keys: Array | None = None, step: Array | None = None
    ) -> Array:
        """As `Backbone.__call__`."""
        features = self.backbone(images, train=train, keys=keys, step=step).astype(jnp.float32)
        if self.linear is not None:
            features = self.linear(features)
        if self.norm is not None:
            features = self.norm(features, use_running_average=not train)
        return features
