"""The backbones of few-shot learning: four blocks, each of which ends in max-pooling."""

from __future__ import annotations

import jax
from flax import nnx
from jax import Array

from experiments.core.config import ModelConfig
from experiments.models.layers import Backbone, ConvNorm, LayerOptions, drop_after_block, max_pool

_SLOPE = 0.1


class Conv4(Backbone):
    """The convolutional backbone of few-shot learning (Vinyals et al., 2016)."""

    def __init__(self, config: ModelConfig, channels: int, options: LayerOptions):
        self.config = config
        self.layers = nnx.List(
            ConvNorm(c_in, c_out, 3, options)
            for c_in, c_out in zip((channels, *config.widths), config.widths, strict=False)
        )

    def _last_map(self, x: Array, *, train: bool, keys: Array | None, step: Array | None) -> Array:
        for layer in self.layers:
            # Pooling before ReLU gives the same values, because ReLU is monotonic.
            x = jax.nn.relu(max_pool(layer(x, train=train)))
        return x


class PooledBlock(nnx.Module):
    """Three 3×3 convolutions plus a 1×1 shortcut, max-pooling and leaky ReLU."""

    def __init__(self, channels_in: int, channels_out: int, options: LayerOptions):
        self.first, self.second, self.third = (
            ConvNorm(channels, channels_out, 3, options)
            for channels in (channels_in, channels_out, channels_out)
        )
        self.shortcut = ConvNorm(channels_in, channels_out, 1, options)

    def __call__(self, x: Array, *, train: bool) -> Array:
        """Maps `x` [n, h, w, channels_in] to [n, h // 2, w // 2, channels_out]."""
        y = jax.nn.leaky_relu(self.first(x, train=train), _SLOPE)
        y = jax.nn.leaky_relu(self.second(y, train=train), _SLOPE)
        y = self.third(y, train=train) + self.shortcut(x, train=train)
        # Pooling before leaky ReLU gives the same values, because leaky ReLU is monotonic.
        return jax.nn.leaky_relu(max_pool(y), _SLOPE)


class ResNet12(Backbone):
    """The residual backbone of few-shot learning (Lee et al., 2019), 12.4 million parameters."""

    def __init__(self, config: ModelConfig, channels: int, options: LayerOptions):
        self.config = config
        self.blocks = nnx.List(
            PooledBlock(c_in, c_out, options)
            for c_in, c_out in zip((channels, *config.widths), config.widths, strict=False)
        )

    def _last_map(self, x: Array, *, train: bool, keys: Array | None, step: Array | None) -> Array:
        for i, block in enumerate(self.blocks):
            x = block(x, train=train)
            if train:
                after = len(self.blocks) - 1 - i
                x = drop_after_block(x, keys, step, self.config, number=i, stages_after=after)
        return x
