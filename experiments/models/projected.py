"""A backbone followed by a linear layer, batch normalisation, or both."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from experiments.models.layers import Backbone, LayerOptions, batch_norm

_PYTORCH_KERNEL = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
"""Uniform in ±1/√(inputs), as `torch.nn.Linear` starts."""


class Projected(Backbone):
    """Features with another dimension, normalised over the batch, or both.

    Args:
      backbone: The backbone.
      dim: Features d of a linear layer, or 0 for none. The layer has a bias, and starts as
        `torch.nn.Linear` does, unless normalisation, which has a bias, comes after it.
      options: Options of the layers.
      normalize: End with batch normalisation.
    """

    def __init__(self, backbone: Backbone, dim: int, options: LayerOptions, *, normalize: bool):
        self.backbone = backbone
        self.num_features = dim or backbone.num_features
        self.linear = _linear(backbone.num_features, dim, bias=not normalize, rngs=options.rngs)
        self.norm = batch_norm(self.num_features, options) if normalize else None

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


def _linear(inputs: int, dim: int, *, bias: bool, rngs: nnx.Rngs) -> nnx.Linear | None:
    if not dim:
        return None
    if not bias:
        return nnx.Linear(inputs, dim, use_bias=False, rngs=rngs)
    bound = inputs**-0.5

    def bias_init(key: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return nnx.Linear(inputs, dim, kernel_init=_PYTORCH_KERNEL, bias_init=bias_init, rngs=rngs)
