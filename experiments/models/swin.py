"""Swin Transformer: attention in windows that are shifted in every other block."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from experiments.core.config import ModelConfig
from experiments.models.layers import Backbone, LayerOptions, dropout, fold_in

WINDOW = 7
"""Side of a window, in patches."""
HEAD_WIDTH = 32
"""Channels of an attention head."""
_PATCH = 4
_INIT = nnx.initializers.normal(0.02)


class Swin(Backbone):
    """A Swin Transformer (Liu et al., ICCV 2021). Swin-T has widths 96, 192, 384, 768.

    Patches of 4×4 pixels become vectors; between the stages, 2×2 neighbours become one. Images of
    any size are padded at the right and below, so that windows of 7×7 patches cover them.

    Stochastic depth leaves out a branch with a probability that rises linearly from 0 in the first
    block to its value in the last.
    """

    def __init__(self, config: ModelConfig, channels: int, options: LayerOptions):
        self.config, widths = config, config.widths
        patches: Any = {"kernel_size": (_PATCH, _PATCH), "strides": _PATCH, "padding": "VALID"}
        self.patch = nnx.Conv(
            channels, widths[0], dtype=options.dtype, rngs=options.rngs, **patches
        )
        self.patch_norm = _layer_norm(widths[0], options)
        rates = iter(np.linspace(0, config.stochastic_depth, sum(config.blocks)).tolist())
        self.stages = nnx.List(
            nnx.List(
                Block(channels, WINDOW // 2 * (index % 2), next(rates), options)
                for index in range(number)
            )
            for channels, number in zip(widths, config.blocks, strict=True)
        )
        self.merges = nnx.List(
            Merge(before, after, options) for before, after in itertools.pairwise(widths)
        )
        self.norm = _layer_norm(widths[-1], options)

    def _last_map(self, x: Array, *, train: bool, keys: Array | None, step: Array | None) -> Array:
        x = self.patch_norm(self.patch(x))
        number = 0
        for index, stage in enumerate(self.stages):
            if index > 0:
                x = self.merges[index - 1](x)
            for block in stage:
                x = block(x, number, train=train, keys=keys)
                number += 1
        return self.norm(x)


class Block(nnx.Module):
    """Attention and a perceptron with one hidden layer, each with a shortcut.

    `rate` is the probability that a branch is left out for an image; see `WindowAttention`.
    """

    def __init__(self, channels: int, shift: int, rate: float, options: LayerOptions):
        self.rate = rate
        self.attention_norm = _layer_norm(channels, options)
        self.attention = WindowAttention(channels, shift, options)
        self.hidden_norm = _layer_norm(channels, options)
        self.hidden = _linear(channels, 4 * channels, options)
        self.output = _linear(4 * channels, channels, options)

    def __call__(self, x: Array, number: int, *, train: bool, keys: Array | None) -> Array:
        """Maps `x` float32 [n, h, w, C] to the same shape; `number` is that of the block."""

        def added(branch: Array, place: int) -> Array:
            branch = branch.astype(jnp.float32)
            if train and self.rate > 0:
                branch = dropout(branch, fold_in(keys, place), rate=self.rate, whole=True)
            return x + branch

        x = added(self.attention(self.attention_norm(x)), 2 * number)
        hidden = jax.nn.gelu(self.hidden(self.hidden_norm(x)), approximate=False)
        return added(self.output(hidden), 2 * number + 1)


class WindowAttention(nnx.Module):
    """Self-attention between the patches of a window, with a bias by relative position.

    Windows are shifted up and left by `shift` patches. The patches that leave the image come back
    at the other side, in windows where they attend to their like alone.
    """

    def __init__(self, channels: int, shift: int, options: LayerOptions):
        self.shift = shift
        self.heads = channels // HEAD_WIDTH
        self.inputs = _linear(channels, 3 * channels, options)
        self.output = _linear(channels, channels, options)
        places = (2 * WINDOW - 1) ** 2
        self.position_bias = nnx.Param(_INIT(options.rngs.params(), (places, self.heads)))

    def __call__(self, x: Array) -> Array:
        """Maps `x` [n, h, w, C] to the same shape."""
        n, height, width, channels = x.shape
        padded = tuple(math.ceil(side / WINDOW) * WINDOW for side in (height, width))
        x = jnp.pad(x, ((0, 0), (0, padded[0] - height), (0, padded[1] - width), (0, 0)))
        # One window covers an axis: there is nothing to shift.
        shifts = tuple(self.shift if side > WINDOW else 0 for side in padded)
        x = jnp.roll(x, [-shift for shift in shifts], (1, 2))

        x = self.inputs(_windows(x))
        query, key, value = jnp.moveaxis(x.reshape(*x.shape[:3], 3, self.heads, HEAD_WIDTH), 3, 0)
        query *= HEAD_WIDTH**-0.5
        logits = jnp.einsum("nwqhd,nwkhd->nwhqk", query, key, preferred_element_type=jnp.float32)
        logits += jnp.moveaxis(self.position_bias[...][_RELATIVE_PLACES], -1, 0)
        same = same_region(padded, shifts)[:, None]
        weights = jax.nn.softmax(jnp.where(same, logits, -jnp.inf), axis=-1)
        x = jnp.einsum("nwhqk,nwkhd->nwqhd", weights.astype(value.dtype), value)
        x = self.output(x.reshape(*x.shape[:3], channels))

        rows, columns = (side // WINDOW for side in padded)
        x = x.reshape(n, rows, columns, WINDOW, WINDOW, channels).swapaxes(2, 3)
        x = jnp.roll(x.reshape(n, *padded, channels), shifts, (1, 2))
        return x[:, :height, :width]


class Merge(nnx.Module):
    """Makes one vector of 2×2 neighbours; an odd last row or column is padded with zeros."""

    def __init__(self, channels_in: int, channels_out: int, options: LayerOptions):
        self.norm = _layer_norm(4 * channels_in, options)
        self.reduction = _linear(4 * channels_in, channels_out, options, bias=False)

    def __call__(self, x: Array) -> Array:
        """Maps [n, h, w, channels_in] to float32 [n, ⌈h / 2⌉, ⌈w / 2⌉, channels_out]."""
        x = jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, x.shape[2] % 2), (0, 0)))
        # Row by row in each column: the order of published weights.
        neighbours = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduction(self.norm(jnp.concatenate(neighbours, -1))).astype(jnp.float32)


def same_region(padded: tuple[int, ...], shifts: tuple[int, ...]) -> np.ndarray:
    """Which patches of a window were neighbours before the shift: bool [windows, 49, 49]."""
    rows, columns = (np.arange(side) >= side - n for side, n in zip(padded, shifts, strict=True))
    region = _windows((2 * rows[:, None] + columns)[None, :, :, None])[0]
    return region == region.swapaxes(1, 2)


def _windows(x: Any) -> Any:
    """The patches of every window of [n, h, w, c]: [n, windows, 49, c]."""
    n, height, width, channels = x.shape
    x = x.reshape(n, height // WINDOW, WINDOW, width // WINDOW, WINDOW, channels).swapaxes(2, 3)
    return x.reshape(n, -1, WINDOW**2, channels)


_PLACES = np.stack(np.divmod(np.arange(WINDOW**2), WINDOW), -1)
_RELATIVE_PLACES = (_PLACES[:, None] - _PLACES + WINDOW - 1) @ [2 * WINDOW - 1, 1]
"""The row of the table of biases for each pair of patches in a window: int [49, 49]."""


def _linear(c_in: int, c_out: int, options: LayerOptions, *, bias: bool = True) -> nnx.Linear:
    common: Any = {"dtype": options.dtype, "kernel_init": _INIT, "rngs": options.rngs}
    return nnx.Linear(c_in, c_out, use_bias=bias, **common)


def _layer_norm(channels: int, options: LayerOptions) -> nnx.LayerNorm:
    """Layer normalisation in float32."""
    return nnx.LayerNorm(
        channels, epsilon=1e-5, dtype=jnp.float32, use_fast_variance=False, rngs=options.rngs
    )
