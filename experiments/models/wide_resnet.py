"""Wide residual networks: three wide stages, with normalisation before the convolutions."""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array

from experiments.config import ModelConfig
from experiments.models.layers import (
    Backbone,
    LayerOptions,
    Shape,
    batch_norm,
    conv,
    dropout,
    fold_in,
    halved,
)

_STEM_WIDTH = 16


class NormReluConv(nnx.Module):
    """Batch normalisation, ReLU, and a 3×3 convolution without bias."""

    def __init__(
        self, channels_in: int, channels_out: int, options: LayerOptions, *, stride: int = 1
    ):
        self.norm = batch_norm(channels_in, options)
        self.conv = conv(channels_in, channels_out, 3, options, stride=stride)

    def activate(self, x: Array, *, train: bool) -> Array:
        """The input of the convolution: `x` after normalisation and ReLU."""
        return jax.nn.relu(self.norm(x, use_running_average=not train)).astype(x.dtype)


class WideBlock(nnx.Module):
    """Two convolutions, each after normalisation and ReLU, plus a shortcut.

    If the block changes the shape, the shortcut is a 1×1 convolution of the activated input.
    Otherwise it is the input itself. The stride is that of the first convolution, and dropout comes
    before the second.
    """

    def __init__(
        self, channels_in: int, channels_out: int, options: LayerOptions, stride: int, rate: float
    ):
        self.dropout_rate = rate
        self.first = NormReluConv(channels_in, channels_out, options, stride=stride)
        self.second = NormReluConv(channels_out, channels_out, options)
        changes_shape = stride != 1 or channels_in != channels_out
        self.shortcut = (
            conv(channels_in, channels_out, 1, options, stride=stride) if changes_shape else None
        )

    def __call__(self, x: Array, *, train: bool, keys: Array | None) -> Array:
        """Maps `x` [n, h, w, channels_in] to [n, ⌈h / stride⌉, ⌈w / stride⌉, channels_out].

        Dropout is applied if there are `keys` [n].
        """
        y = self.first.activate(x, train=train)
        if self.shortcut is not None:
            x = self.shortcut(y)
        y = self.second.activate(self.first.conv(y), train=train)
        if keys is not None:
            y = dropout(y, keys, rate=self.dropout_rate)
        return x + self.second.conv(y)


class WideResNet(Backbone):
    """A wide residual network (Zagoruyko and Komodakis, 2016), WRN-d-k.

    d = 4 + 2·(number of blocks) and k = widths / (16, 32, 64): WRN-28-10 has four blocks in every
    stage and the widths 160, 320, 640. The first block of every stage except the first halves
    height and width.
    """

    def __init__(self, config: ModelConfig, image_shape: Shape, options: LayerOptions):
        height, width, channels = image_shape
        self.dropout_rate = config.dropout
        halvings = len(config.widths) - 1
        last = (halved(height, halvings), halved(width, halvings), config.widths[-1])
        self.set_features(config, last)
        self.stem = conv(channels, _STEM_WIDTH, 3, options)
        layers, channels = [], _STEM_WIDTH
        for stage, (width, number) in enumerate(zip(config.widths, config.blocks, strict=True)):
            for index in range(number):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(WideBlock(channels, width, options, stride, config.dropout))
                channels = width
        self.blocks = nnx.List(layers)
        self.norm = batch_norm(channels, options)

    def _last_map(self, x: Array, *, train: bool, keys: Array | None, step: Array | None) -> Array:
        dropping = train and self.dropout_rate > 0
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(x, train=train, keys=fold_in(keys, i) if dropping else None)
        return jax.nn.relu(self.norm(x, use_running_average=not train))
