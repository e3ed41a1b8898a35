"""Wide residual networks: normalisation before the convolutions, three wide stages."""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from experiments.models.layers import (
    batch_norm,
    conv,
    dropout,
    fold_in,
    halved,
    pool_features,
    require_keys,
)

_STEM_WIDTH = 16


class NormReluConv(nnx.Module):
    """Batch normalisation, ReLU, and a 3×3 convolution without bias.

    Args:
        channels_in: Channels of the input.
        channels_out: Channels of the output.
        stride: Of the convolution.
        dtype: Compute type of the convolution; normalisation is float32.
        axis_name: Device axis over which the batch statistics are synchronised, or None.
        rngs: Source of the initial parameters.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        *,
        stride: int = 1,
        dtype: DTypeLike,
        axis_name: str | None,
        rngs: nnx.Rngs,
    ):
        self.norm = batch_norm(channels_in, axis_name=axis_name, rngs=rngs)
        self.conv = conv(channels_in, channels_out, 3, stride=stride, dtype=dtype, rngs=rngs)

    def activate(self, x: Array, *, train: bool) -> Array:
        """What is convolved: `x` after normalisation and ReLU."""
        return jax.nn.relu(self.norm(x, use_running_average=not train)).astype(x.dtype)


class WideBlock(nnx.Module):
    """Two convolutions after normalisation and ReLU, beside a shortcut.

    Where the number of channels changes, the shortcut is a 1×1 convolution of the activated input;
    otherwise it is the input itself.

    Args:
        channels_in: Channels of the input.
        channels_out: Channels of the output.
        stride: Of the first convolution.
        dropout_rate: Rate of dropout before the second convolution.
        dtype: Compute type.
        axis_name: Device axis over which the batch statistics are synchronised, or None.
        rngs: Source of the initial parameters.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        *,
        stride: int,
        dropout_rate: float,
        dtype: DTypeLike,
        axis_name: str | None,
        rngs: nnx.Rngs,
    ):
        self.dropout_rate = dropout_rate
        self.first = NormReluConv(
            channels_in, channels_out, stride=stride, dtype=dtype, axis_name=axis_name, rngs=rngs
        )
        self.second = NormReluConv(
            channels_out, channels_out, dtype=dtype, axis_name=axis_name, rngs=rngs
        )
        changes = stride != 1 or channels_in != channels_out
        self.shortcut = (
            conv(channels_in, channels_out, 1, stride=stride, dtype=dtype, rngs=rngs)
            if changes
            else None
        )

    def __call__(self, x: Array, *, train: bool, keys: Array | None) -> Array:
        """Map `x` [n, h, w, channels_in] to [n, ⌈h / stride⌉, ⌈w / stride⌉, channels_out].

        Dropout is applied where there are `keys` [n].
        """
        y = self.first.activate(x, train=train)
        if self.shortcut is not None:
            x = self.shortcut(y)
        y = self.second.activate(self.first.conv(y), train=train)
        if keys is not None:
            y = dropout(y, keys, rate=self.dropout_rate)
        return x + self.second.conv(y)


class WideResNet(nnx.Module):
    """A wide residual network (Zagoruyko and Komodakis, 2016), WRN-d-k.

    d = 4 + 2·(number of blocks) and k = widths / (16, 32, 64): WRN-28-10 has four blocks in every
    stage and the widths 160, 320, 640. The first block of every stage but the first halves height
    and width.

    Args:
        widths: Channels of the stages.
        blocks: Number of blocks in every stage.
        image_shape: Height, width and channels of an image.
        pooling: `flatten` or `mean` over the positions of the last block.
        dropout_rate: Rate of dropout between the two convolutions of every block.
        dtype: Compute type; parameters, statistics and features are float32.
        axis_name: Device axis over which the batch statistics are synchronised, or None.
        rngs: Source of the initial parameters.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        blocks: tuple[int, ...],
        image_shape: tuple[int, int, int],
        *,
        pooling: str,
        dropout_rate: float,
        dtype: DTypeLike,
        axis_name: str | None,
        rngs: nnx.Rngs,
    ):
        height, width, channels = image_shape
        self.pooling = pooling
        self.dropout_rate = dropout_rate
        halvings = len(widths) - 1
        positions = halved(height, halvings) * halved(width, halvings)
        self.num_features = widths[-1] * (1 if pooling == "mean" else positions)

        self.stem = conv(channels, _STEM_WIDTH, 3, dtype=dtype, rngs=rngs)
        layers, channels = [], _STEM_WIDTH
        for stage, (width, number) in enumerate(zip(widths, blocks, strict=True)):
            for place in range(number):
                layers.append(
                    WideBlock(
                        *(channels, width),
                        stride=2 if stage > 0 and place == 0 else 1,
                        dropout_rate=dropout_rate,
                        dtype=dtype,
                        axis_name=axis_name,
                        rngs=rngs,
                    )
                )
                channels = width
        self.blocks = nnx.List(layers)
        self.norm = batch_norm(channels, axis_name=axis_name, rngs=rngs)

    def __call__(self, images: Array, *, train: bool, keys: Array | None = None) -> Array:
        """Features of a batch.

        Args:
            images: float32 [n, h, w, c], normalised.
            train: Normalise by the batch's statistics, update the running ones, apply dropout.
            keys: Typed PRNG keys [n], one for each image; dropout needs them in training.

        Returns:
            float32 [n, num_features].

        Raises:
            ValueError: If dropout is on in training and `keys` does not hold a key per image.
        """
        dropping = train and self.dropout_rate > 0
        keys = require_keys(keys, images, "dropout") if dropping else None
        x = self.stem(images)
        for i, block in enumerate(self.blocks):
            x = block(x, train=train, keys=None if keys is None else fold_in(keys, i))
        x = jax.nn.relu(self.norm(x, use_running_average=not train))
        return pool_features(x, self.pooling)
