"""ResNet-12: four residual blocks of three convolutions, as in few-shot learning."""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array

from experiments.models.layers import (
    Backbone,
    ConvNorm,
    LayerOptions,
    drop_block,
    feature_size,
    fold_in,
    max_pool,
    pool_features,
    require_keys,
)

_SLOPE = 0.1
_DROP_BLOCK_SIZE = 5
_BLOCKS_WITH_DROP_BLOCK = 2


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
      drop_rate: Rate of DropBlock (blocks of 5×5) after each of the last two blocks.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        image_shape: tuple[int, int, int],
        pooling: str,
        options: LayerOptions,
        *,
        drop_rate: float,
    ):
        height, width, channels = image_shape
        self.pooling = pooling
        self.drop_rate = drop_rate
        last = (height >> len(widths), width >> len(widths), widths[-1])
        self.num_features = feature_size(last, pooling)
        self.blocks = nnx.List(
            PooledBlock(c_in, c_out, options)
            for c_in, c_out in zip((channels, *widths), widths, strict=False)
        )

    def __call__(self, images: Array, *, train: bool, keys: Array | None = None) -> Array:
        """As `Backbone.__call__`."""
        dropping = train and self.drop_rate > 0
        keys = require_keys(keys, images, "DropBlock") if dropping else None
        x = images
        for i, block in enumerate(self.blocks):
            x = block(x, train=train)
            if keys is not None and i >= len(self.blocks) - _BLOCKS_WITH_DROP_BLOCK:
                own = fold_in(keys, i)
                x = drop_block(x, own, rate=self.drop_rate, block_size=_DROP_BLOCK_SIZE)
        return pool_features(x, self.pooling)
