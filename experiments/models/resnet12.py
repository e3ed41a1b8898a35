"""ResNet-12: four residual blocks of three convolutions, as few-shot learning uses it."""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from experiments.models.layers import (
    ConvNorm,
    drop_block,
    fold_in,
    max_pool,
    pool_features,
    require_keys,
)

_SLOPE = 0.1
_DROP_BLOCK_SIZE = 5
_BLOCKS_WITH_DROP_BLOCK = 2


class ResidualBlock(nnx.Module):
    """Three 3×3 convolutions beside a 1×1 shortcut, their sum, max-pooling and leaky ReLU.

    Args:
        channels_in: Channels of the input.
        channels_out: Channels of the output.
        dtype: Compute type.
        axis_name: Device axis over which the batch statistics are synchronised, or None.
        rngs: Source of the initial parameters.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        *,
        dtype: DTypeLike,
        axis_name: str | None,
        rngs: nnx.Rngs,
    ):
        def layer(channels: int, kernel_size: int) -> ConvNorm:
            return ConvNorm(
                channels, channels_out, kernel_size, dtype=dtype, axis_name=axis_name, rngs=rngs
            )

        self.first = layer(channels_in, 3)
        self.second = layer(channels_out, 3)
        self.third = layer(channels_out, 3)
        self.shortcut = layer(channels_in, 1)

    def __call__(self, x: Array, *, train: bool) -> Array:
        """Map `x` [n, h, w, channels_in] to [n, h // 2, w // 2, channels_out]."""
        y = jax.nn.leaky_relu(self.first(x, train=train), _SLOPE)
        y = jax.nn.leaky_relu(self.second(y, train=train), _SLOPE)
        y = self.third(y, train=train) + self.shortcut(x, train=train)
        # Pool, then leaky ReLU: equal to the usual order, since leaky ReLU increases.
        return jax.nn.leaky_relu(max_pool(y), _SLOPE)


class ResNet12(nnx.Module):
    """The residual backbone of few-shot learning (Lee et al., 2019), 12.4 million parameters.

    Args:
        widths: Channels of the four blocks.
        image_shape: Height, width and channels of an image.
        pooling: `flatten` or `mean` over the positions of the last block.
        drop_rate: Rate of DropBlock (blocks of 5×5) after each of the last two blocks.
        dtype: Compute type; parameters, statistics and features are float32.
        axis_name: Device axis over which the batch statistics are synchronised, or None.
        rngs: Source of the initial parameters.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        image_shape: tuple[int, int, int],
        *,
        pooling: str,
        drop_rate: float,
        dtype: DTypeLike,
        axis_name: str | None,
        rngs: nnx.Rngs,
    ):
        height, width, channels = image_shape
        self.pooling = pooling
        self.drop_rate = drop_rate
        positions = (height >> len(widths)) * (width >> len(widths))
        self.num_features = widths[-1] * (1 if pooling == "mean" else positions)
        self.blocks = nnx.List(
            ResidualBlock(c_in, c_out, dtype=dtype, axis_name=axis_name, rngs=rngs)
            for c_in, c_out in zip((channels, *widths), widths, strict=False)
        )

    def __call__(self, images: Array, *, train: bool, keys: Array | None = None) -> Array:
        """Features of a batch.

        Args:
            images: float32 [n, h, w, c], normalised.
            train: Normalise by the batch's statistics, update the running ones, apply DropBlock.
            keys: Typed PRNG keys [n], one for each image; DropBlock needs them in training.

        Returns:
            float32 [n, num_features].

        Raises:
            ValueError: If DropBlock is on in training and `keys` does not hold a key per image.
        """
        dropping = train and self.drop_rate > 0
        keys = require_keys(keys, images, "DropBlock") if dropping else None
        x = images
        for i, block in enumerate(self.blocks):
            x = block(x, train=train)
            if keys is not None and i >= len(self.blocks) - _BLOCKS_WITH_DROP_BLOCK:
                own = fold_in(keys, i)
                x = drop_block(x, own, rate=self.drop_rate, block_size=_DROP_BLOCK_SIZE)
        return pool_features(x, self.pooling)
