"""The residual networks of ImageNet and CIFAR: a stem, stages of blocks, pooling."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from experiments.models.layers import ConvNorm, halved, overlapping_max_pool, pool_features


class ResNet(nnx.Module):
    """A residual network (He et al., 2016): ResNet-18 and -50, and ResNet-32 for CIFAR.

    The first block of every stage but the first halves height and width.

    Args:
        widths: Channels of the stages.
        blocks: Number of blocks in every stage.
        image_shape: Height, width and channels of an image.
        block: The convolutions of a block, from its stage's width and its stride: `basic`, or
            `bottleneck`, whose output has four times as many channels.
        small_stem: One 3×3 convolution at first, in place of 7×7 with stride 2 and max-pooling.
        project: Where a block changes the shape, its shortcut is a 1×1 convolution with
            normalisation (option B of the paper); otherwise every second pixel, between channels
            of zeros (option A).
        pooling: `flatten` or `mean` over the positions of the last block.
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
        block: Callable[[int, int], tuple[tuple[int, int, int], ...]],
        small_stem: bool = False,
        project: bool = True,
        pooling: str,
        dtype: DTypeLike,
        axis_name: str | None,
        rngs: nnx.Rngs,
    ):
        channels = image_shape[-1]
        self.pooling = pooling
        self.small_stem = small_stem
        kernel_size, stride = (3, 1) if small_stem else (7, 2)
        self.stem = ConvNorm(
            *(channels, widths[0], kernel_size),
            stride=stride,
            dtype=dtype,
            axis_name=axis_name,
            rngs=rngs,
        )
        stages, channels = [], widths[0]
        for stage, (width, number) in enumerate(zip(widths, blocks, strict=True)):
            layers = nnx.List([])
            for place in range(number):
                layers.append(
                    ResidualBlock(
                        channels,
                        block(width, 2 if stage > 0 and place == 0 else 1),
                        project=project,
                        dtype=dtype,
                        axis_name=axis_name,
                        rngs=rngs,
                    )
                )
                channels = layers[-1].channels_out
            stages.append(layers)
        self.stages = nnx.List(stages)

        halvings = len(widths) - 1 + (0 if small_stem else 2)
        positions = halved(image_shape[0], halvings) * halved(image_shape[1], halvings)
        self.num_features = channels * (1 if pooling == "mean" else positions)

    def __call__(self, images: Array, *, train: bool, keys: Array | None = None) -> Array:
        """Features of a batch.

        Args:
            images: float32 [n, h, w, c], normalised.
            train: Normalise by the batch's statistics and update the running ones.
            keys: Unused; the backbones share one signature.

        Returns:
            float32 [n, num_features].
        """
        del keys
        x = self.stem(images, train=train)
        # Pool, then ReLU: equal to the usual order, since ReLU does not decrease.
        x = jax.nn.relu(x if self.small_stem else overlapping_max_pool(x))
        for stage in self.stages:
            for block in stage:
                x = block(x, train=train)
        return pool_features(x, self.pooling)


class ResidualBlock(nnx.Module):
    """Convolutions, one after the other, beside a shortcut.

    Args:
        channels_in: Channels of the input.
        convolutions: Channels of the output, kernel size and stride of each.
        project: As in `ResNet`.
        dtype: Compute type.
        axis_name: Device axis over which the batch statistics are synchronised, or None.
        rngs: Source of the initial parameters.
    """

    def __init__(
        self,
        channels_in: int,
        convolutions: tuple[tuple[int, int, int], ...],
        *,
        project: bool,
        dtype: DTypeLike,
        axis_name: str | None,
        rngs: nnx.Rngs,
    ):
        def layer(c_in: int, c_out: int, kernel_size: int, stride: int) -> ConvNorm:
            return ConvNorm(
                *(c_in, c_out, kernel_size),
                stride=stride,
                dtype=dtype,
                axis_name=axis_name,
                rngs=rngs,
            )

        self.channels_out = convolutions[-1][0]
        self.stride = math.prod(stride for _, _, stride in convolutions)
        inputs = (channels_in, *(channels for channels, _, _ in convolutions))
        self.layers = nnx.List(
            layer(c_in, *convolution)
            for c_in, convolution in zip(inputs, convolutions, strict=False)
        )
        changes = self.stride != 1 or channels_in != self.channels_out
        self.shortcut = (
            layer(channels_in, self.channels_out, 1, self.stride) if project and changes else None
        )

    def __call__(self, x: Array, *, train: bool) -> Array:
        """Map `x` [n, h, w, channels_in] to [n, ⌈h / stride⌉, ⌈w / stride⌉, channels_out]."""
        y = self.layers[0](x, train=train)
        for layer in self.layers[1:]:
            y = layer(jax.nn.relu(y), train=train)
        if self.shortcut is None:
            x = subsample(x, self.stride, self.channels_out)
        else:
            x = self.shortcut(x, train=train)
        return jax.nn.relu(y + x)


def basic(width: int, stride: int) -> tuple[tuple[int, int, int], ...]:
    """The convolutions of ResNet-18's and ResNet-32's blocks."""
    return (width, 3, stride), (width, 3, 1)


def bottleneck(width: int, stride: int) -> tuple[tuple[int, int, int], ...]:
    """The convolutions of ResNet-50's blocks.

    The 3×3 convolution has the stride, not the 1×1 before it: so has the network that published
    weights belong to, which is also called version 1.5.
    """
    return (width, 1, 1), (width, 3, stride), (4 * width, 1, 1)


def subsample(x: Array, stride: int, channels: int) -> Array:
    """Every `stride`-th pixel of `x` [n, h, w, c], between channels of zeros."""
    more = channels - x.shape[-1]
    return jnp.pad(
        x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (more // 2, more - more // 2))
    )
