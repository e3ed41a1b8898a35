"""ResNet-12: four residual blocks of three convolutions, as in few-shot learning."""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array

from experiments.models.layers import (
    Backbone,
    ConvNorm,
    DropOptions,
    LayerOptions,
    drop_after_block,
    drop_keys,
    feature_size,
    max_pool,
    pool_features,
)

_SLOPE = 0.1


class PooledBlock(nnx.Module):
    """Three 3×3 convolutions plus a 1×1 shortcut, max-pooling and leaky ReLU.

    Args:
      channels_in: Input channels.
      channels_out: Output channels.
      options: Options of the layers.
    """

    def __init__(self, channels_in: int, channels_out: int, options: LayerOptions):
        self.first = ConvNorm(channels_in, channels_out, 3, options)
        self.second = ConvNorm(channels_out, channels_out, 3, options)
        self.third = ConvNorm(channels_out, channels_out, 3, options)
        self.shortcut = ConvNorm(channels_in, channels_out, 1, options)

    def __call__(self, x: Array, *, train: bool) -> Array:
        """Maps `x` [n, h, w, channels_in] to [n, h // 2, w // 2, channels_out]."""
        y = jax.nn.leaky_relu(self.first(x, train=train), _SLOPE)
        y = jax.nn.leaky_relu(self.second(y, train=train), _SLOPE)
        y = self.third(y, train=train) + self.shortcut(x, train=train)
        # Pooling before leaky ReLU gives the same values, because leaky ReLU is monotonic.
        return jax.nn.leaky_relu(max_pool(y), _SLOPE)


class ResNet12(Backbone):
    """The residual backbone of few-shot learning (Lee et al., 2019), 12.4 million parameters.

    Args:
      widths: Channels of the four blocks.
      image_shape: Height, width and channels of an image.
      pooling: `flatten` or `mean` over the positions of the last block.
      options: Options of the layers.
      drops: What is dropped after each block; a stage is one block.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        image_shape: tuple[int, int, int],
        pooling: str,
        options: LayerOptions,
        *,
        drops: DropOptions,
    ):
        height, width, channels = image_shape
        self.pooling = pooling
        self.drops = drops
        last = (height >> len(widths), width >> len(widths), widths[-1])
        self.num_features = feature_size(last, pooling)
        self.blocks = nnx.List(
            PooledBlock(c_in, c_out, options)
            for c_in, c_out in zip((channels, *widths), widths, strict=False)
        )

    def __call__(
        self, images: Array, *, train: bool, keys: Array | None = None, step: Array | None = None
    ) -> Array:
        """As `Backbone.__call__`."""
        keys = drop_keys(self.drops, keys, step, images, train=train)
        x = images
        for i, block in enumerate(self.blocks):
            x = block(x, train=train)
            if keys is not None:
                after = len(self.blocks) - 1 - i
                x = drop_after_block(x, keys, step, self.drops, number=i, stages_after=after)
        return pool_features(x, self.pooling)
