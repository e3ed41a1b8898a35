"""Conv4: four blocks of a 3×3 convolution, batch normalisation, ReLU and max-pooling."""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array

from experiments.models.layers import (
    Backbone,
    ConvNorm,
    LayerOptions,
    feature_size,
    max_pool,
    pool_features,
)


class Conv4(Backbone):
    """The four-block convolutional backbone of few-shot learning (Vinyals et al., 2016).

    Args:
      widths: Channels of the blocks.
      image_shape: Height, width and channels of an image.
      pooling: `flatten` or `mean` over the positions of the last block.
      options: Options of the layers.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        image_shape: tuple[int, int, int],
        pooling: str,
        options: LayerOptions,
    ):
        height, width, channels = image_shape
        self.pooling = pooling
        last = (height >> len(widths), width >> len(widths), widths[-1])
        self.num_features = feature_size(last, pooling)
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
        return pool_features(x, self.pooling)
