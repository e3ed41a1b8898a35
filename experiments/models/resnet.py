"""The residual networks of ImageNet and CIFAR: a stem, stages of blocks, pooling."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from experiments.models.layers import (
    NO_DROPS,
    Backbone,
    ConvNorm,
    DropOptions,
    LayerOptions,
    drop_after_block,
    drop_keys,
    feature_size,
    halved,
    overlapping_max_pool,
    pool_features,
)

Convolutions = tuple[tuple[int, int, int], ...]
"""Output channels, kernel size and stride of every convolution in a block."""


class ResNet(Backbone):
    """A residual network (He et al., 2016): ResNet-18 and -50, and ResNet-32 for CIFAR.

    The first block of every stage except the first halves height and width.

    Args:
      widths: Channels of the stages.
      blocks: Number of blocks in every stage.
      image_shape: Height, width and channels of an image.
      pooling: `flatten` or `mean` over the positions of the last block.
      options: Options of the layers.
      block: The convolutions of a block, as a function of the width of its stage and its stride:
        `basic`, or `bottleneck`, whose output has four times as many channels.
      small_stem: Start with one 3×3 convolution, instead of 7×7 with stride 2 and max-pooling.
      shortcut: Kernel size of the convolutions, with normalisation, that are the shortcuts of
        blocks that change the shape: 1 is option B of the paper. 0: these shortcuts subsample and
        add zero channels (option A).
      drops: What is dropped after each block.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        blocks: tuple[int, ...],
        image_shape: tuple[int, int, int],
        pooling: str,
        options: LayerOptions,
        *,
        block: Callable[[int, int], Convolutions],
        small_stem: bool,
        shortcut: int = 1,
        drops: DropOptions = NO_DROPS,
    ):
        channels = image_shape[-1]
        self.pooling = pooling
        self.small_stem = small_stem
        self.drops = drops
        kernel_size, stride = (3, 1) if small_stem else (7, 2)
        self.stem = ConvNorm(channels, widths[0], kernel_size, options, stride=stride)
        stages, channels = [], widths[0]
        for stage, (width, number) in enumerate(zip(widths, blocks, strict=True)):
            layers = nnx.List([])
            for index in range(number):
                stride = 2 if stage > 0 and index == 0 else 1
                convolutions = block(width, stride)
                layers.append(ResidualBlock(channels, convolutions, options, shortcut=shortcut))
                channels = layers[-1].channels_out
            stages.append(layers)
        self.stages = nnx.List(stages)

        halvings = len(widths) - 1 + (0 if small_stem else 2)
        last = (halved(image_shape[0], halvings), halved(image_shape[1], halvings), channels)
        self.num_features = feature_size(last, pooling)

    def __call__(
        self, images: Array, *, train: bool, keys: Array | None = None, step: Array | None = None
    ) -> Array:
        """As `Backbone.__call__`."""
        keys = drop_keys(self.drops, keys, step, images, train=train)
        x = self.stem(images, train=train)
        # Pooling before ReLU gives the same values, because ReLU is monotonic.
        x = jax.nn.relu(x if self.small_stem else overlapping_max_pool(x))
        number = 0
        for stages_after, stage in zip(range(len(self.stages))[::-1], self.stages, strict=True):
            for block in stage:
                x = block(x, train=train)
                if keys is not None:
                    x = drop_after_block(
                        x, keys, step, self.drops, number=number, stages_after=stages_after
                    )
                number += 1
        return pool_features(x, self.pooling)


class ResidualBlock(nnx.Module):
    """Consecutive convolutions plus a shortcut.

    Args:
      channels_in: Input channels.
      convolutions: The convolutions.
      options: Options of the layers.
      shortcut: As in `ResNet`.
    """

    def __init__(
        self, channels_in: int, convolutions: Convolutions, options: LayerOptions, *, shortcut: int
    ):
        self.channels_out = convolutions[-1][0]
        self.stride = math.prod(stride for _, _, stride in convolutions)
        inputs = (channels_in, *(channels for channels, _, _ in convolutions))
        self.layers = nnx.List(
            ConvNorm(c_in, c_out, kernel_size, options, stride=stride)
            for c_in, (c_out, kernel_size, stride) in zip(inputs, convolutions, strict=False)
        )
        changes_shape = self.stride != 1 or channels_in != self.channels_out
        self.shortcut = (
            ConvNorm(channels_in, self.channels_out, shortcut, options, stride=self.stride)
            if shortcut and changes_shape
            else None
        )

    def __call__(self, x: Array, *, train: bool) -> Array:
        """Maps `x` [n, h, w, channels_in] to [n, ⌈h / stride⌉, ⌈w / stride⌉, channels_out]."""
        y = self.layers[0](x, train=train)
        for layer in self.layers[1:]:
            y = layer(jax.nn.relu(y), train=train)
        if self.shortcut is None:
            x = subsample(x, self.stride, self.channels_out)
        else:
            x = self.shortcut(x, train=train)
        return jax.nn.relu(y + x)


def basic(width: int, stride: int) -> Convolutions:
    """The convolutions of a block of ResNet-18 and ResNet-32."""
    return (width, 3, stride), (width, 3, 1)


def bottleneck(width: int, stride: int) -> Convolutions:
    """The convolutions of a block of ResNet-50.

    The stride belongs to the 3×3 convolution, not to the 1×1 convolution before it. Published
    weights assume this variant, also known as version 1.5.
    """
    return (width, 1, 1), (width, 3, stride), (4 * width, 1, 1)


def subsample(x: Array, stride: int, channels: int) -> Array:
    """Selects every `stride`-th pixel of `x` [n, h, w, c], and pads the channels with zeros."""
    more = channels - x.shape[-1]
    return jnp.pad(
        x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (more // 2, more - more // 2))
    )
