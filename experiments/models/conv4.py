"""Conv4: four blocks of a 3×3 convolution, batch normalisation, ReLU and max-pooling."""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array

from experiments.config import ModelConfig
from experiments.models.layers import Backbone, ConvNorm, LayerOptions, Shape, max_pool


class Conv4(Backbone):
    """The four-block convolutional backbone of few-shot learning (Vinyals et al., 2016)."""

    def __init__(self, config: ModelConfig, image_shape: Shape, options: LayerOptions):
        height, width, channels = image_shape
        widths = config.widths
        self.set_features(config, (height >> len(widths), width >> len(widths), widths[-1]))
        self.layers = nnx.List(
            ConvNorm(c_in, c_out, 3, options)
            for c_in, c_out in zip((channels, *widths), widths, strict=False)
        )

    def __call__(
        self, images: Array, *, train: bool, keys: Array | None = None, step: Array | None = None
    ) -> Array:
        """As `Backbone.__call__`."""
        x = images
        for layer in self.layers:
            # Pooling before ReLU gives the same values, because ReLU is monotonic.
            x = jax.nn.relu(max_pool(layer(x, train=train)))
        return self.pooled(x)
