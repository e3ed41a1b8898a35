"""Residual networks of ImageNet and CIFAR, and wide ones: a stem, stages of blocks, pooling."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from experiments.core.config import ModelConfig
from experiments.models import layers as of
from experiments.models.layers import Backbone, ConvNorm, LayerOptions, batch_norm, conv

_WIDE_STEM = 16

Convolutions = tuple[tuple[int, int, int], ...]
"""Output channels, kernel size and stride of every convolution in a block."""


class ResNet(Backbone):
    """A residual network (He et al., 2016): ResNet-18 and -50, and ResNet-32 for CIFAR.

    The first block of every stage except the first halves height and width. `block` gives the
    convolutions of a block: `basic`, or `bottleneck`. The first layers are a convolution of 7×7
    with stride 2 and max-pooling, and the shortcuts that change the shape 1×1 convolutions (option
    B of the paper). With `small_stem`, they are one of 3×3, and the shortcuts as in the options.
    """

    def __init__(
        self,
        config: ModelConfig,
        channels: int,
        options: LayerOptions,
        *,
        block: Callable[[int, int], Convolutions],
        small_stem: bool = False,
    ):
        self.config, self.small_stem = config, small_stem
        kernel_size, stride = (3, 1) if small_stem else (7, 2)
        shortcut = {"pad": 0, "conv3x3": 3}[config.shortcut] if small_stem else 1
        self.stem = ConvNorm(channels, config.widths[0], kernel_size, options, stride=stride)
        self.stages, channels = nnx.List([]), config.widths[0]
        for stage, (width, number) in enumerate(zip(config.widths, config.blocks, strict=True)):
            self.stages.append(nnx.List([]))
            for index in range(number):
                convolutions = block(width, 2 if stage > 0 and index == 0 else 1)
                layer = ResidualBlock(channels, convolutions, options, shortcut=shortcut)
                self.stages[-1].append(layer)
                channels = layer.channels_out

    def _last_map(self, x: Array, *, train: bool, keys: Array | None, step: Array | None) -> Array:
        x = self.stem(x, train=train)
        # Pooling before ReLU gives the same values, because ReLU is monotonic.
        x = jax.nn.relu(x if self.small_stem else of.max_pool(x, size=3))
        number = 0
        for index, stage in enumerate(self.stages, start=1):
            for block in stage:
                x = block(x, train=train)
                if train:
                    after = len(self.stages) - index
                    x = of.drop_after_block(
                        x, keys, step, self.config, number=number, stages_after=after
                    )
                number += 1
        return x


class ResidualBlock(nnx.Module):
    """Consecutive convolutions plus a shortcut.

    `shortcut` is the size of its kernel where the shape changes. With 0, it subsamples, and adds
    channels of zeros (option A of the paper).
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
            more = self.channels_out - x.shape[-1]
            widths = ((0, 0), (0, 0), (0, 0), (more // 2, more - more // 2))
            x = jnp.pad(x[:, :: self.stride, :: self.stride], widths)
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


class NormReluConv(nnx.Module):
    """Batch normalisation, ReLU, and a 3×3 convolution without bias."""

    def __init__(self, c_in: int, c_out: int, options: LayerOptions, *, stride: int = 1):
        self.norm = batch_norm(c_in, options)
        self.conv = conv(c_in, c_out, 3, options, stride=stride)

    def activate(self, x: Array, *, train: bool) -> Array:
        """The input of the convolution: `x` after normalisation and ReLU."""
        return jax.nn.relu(self.norm(x, use_running_average=not train)).astype(x.dtype)


class WideBlock(nnx.Module):
    """Two convolutions, each after normalisation and ReLU, plus a shortcut.

    If the block changes the shape, the shortcut is a 1×1 convolution of the activated input.
    Otherwise it is the input itself. The stride is that of the first convolution, and dropout comes
    before the second.
    """

    def __init__(self, c_in: int, c_out: int, options: LayerOptions, stride: int, rate: float):
        self.dropout_rate = rate
        self.first = NormReluConv(c_in, c_out, options, stride=stride)
        self.second = NormReluConv(c_out, c_out, options)
        changes_shape = stride != 1 or c_in != c_out
        self.shortcut = conv(c_in, c_out, 1, options, stride=stride) if changes_shape else None

    def __call__(self, x: Array, *, train: bool, keys: Array | None) -> Array:
        """Maps `x` [n, h, w, c_in] to [n, ⌈h / stride⌉, ⌈w / stride⌉, c_out]; keys [n]: drops."""
        y = self.first.activate(x, train=train)
        if self.shortcut is not None:
            x = self.shortcut(y)
        y = self.second.activate(self.first.conv(y), train=train)
        if keys is not None:
            y = of.dropout(y, keys, rate=self.dropout_rate)
        return x + self.second.conv(y)


class WideResNet(Backbone):
    """A wide residual network (Zagoruyko and Komodakis, 2016), WRN-d-k.

    d = 4 + 2·(number of blocks) and k = widths / (16, 32, 64): WRN-28-10 has four blocks in every
    stage and the widths 160, 320, 640. The first block of every stage except the first halves
    height and width.
    """

    def __init__(self, config: ModelConfig, channels: int, options: LayerOptions):
        self.config = config
        self.stem = conv(channels, _WIDE_STEM, 3, options)
        layers, channels = [], _WIDE_STEM
        for stage, (width, number) in enumerate(zip(config.widths, config.blocks, strict=True)):
            for index in range(number):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(WideBlock(channels, width, options, stride, config.dropout))
                channels = width
        self.blocks = nnx.List(layers)
        self.norm = batch_norm(channels, options)

    def _last_map(self, x: Array, *, train: bool, keys: Array | None, step: Array | None) -> Array:
        dropping = train and self.config.dropout > 0
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(x, train=train, keys=of.fold_in(keys, i) if dropping else None)
        return jax.nn.relu(self.norm(x, use_running_average=not train))
