"""What the backbones share: their interface, convolution, normalisation, pooling, dropout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from experiments.core.config import ModelConfig
from experiments.models.convolution import Conv

_KERNEL_INIT = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


class Backbone(nnx.Module):
    """A module that maps images to features, built from options and the shape of an image."""

    config: ModelConfig
    num_features: int  # d; `build_backbone` sets it.

    def __call__(
        self, images: Array, *, train: bool, keys: Array | None = None, step: Array | None = None
    ) -> Array:
        """The features float32 [n, d] of normalised images, float32 [n, h, w, c].

        With `train`, it normalises with the statistics of the batch, updates the running ones, and
        drops units, with typed PRNG `keys` [n]; `step` counts the training steps before this one.
        """
        x = self._last_map(images, train=train, keys=keys, step=step).astype(jnp.float32)
        return x.mean((1, 2)) if self.config.pooling == "mean" else x.reshape(x.shape[0], -1)

    def _last_map(self, x: Array, *, train: bool, keys: Array | None, step: Array | None) -> Array:
        """The feature map [n, h, w, c] that is pooled; arguments are those of `__call__`."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayerOptions:
    """The options that all layers of a backbone share."""

    dtype: DTypeLike  # Of convolutions. Parameters, statistics and features are float32.
    axis_name: str | None  # Device axis over which batch statistics are synchronised.
    rngs: nnx.Rngs  # Source of the initial parameters.


def conv(
    channels_in: int, channels_out: int, kernel_size: int, options: LayerOptions, *, stride: int = 1
) -> nnx.Conv:
    """A square convolution without bias, from n to ⌈n / stride⌉ pixels.

    The initial kernel is normal with variance 2 / fan-out. Padding is half the (odd) kernel size on
    both sides; `SAME` would shift the images relative to weights that were trained elsewhere.
    """
    kind, size = Conv if stride == 1 else nnx.Conv, (kernel_size, kernel_size)
    common: Any = {"dtype": options.dtype, "kernel_init": _KERNEL_INIT, "rngs": options.rngs}
    common |= {"strides": stride, "padding": kernel_size // 2, "use_bias": False}
    return kind(channels_in, channels_out, size, **common)


def batch_norm(channels: int, options: LayerOptions) -> nnx.BatchNorm:
    """Batch normalisation in float32: nnx would round the running statistics to bfloat16."""
    common: Any = {"axis_name": options.axis_name, "rngs": options.rngs}
    return nnx.BatchNorm(channels, momentum=0.9, epsilon=1e-5, dtype=jnp.float32, **common)


class ConvNorm(nnx.Module):
    """A convolution without bias, followed by batch normalisation; returns the compute type."""

    def __init__(self, c_in: int, c_out: int, kernel_size: int, options: LayerOptions, **stride):
        self.dtype = options.dtype
        self.conv = conv(c_in, c_out, kernel_size, options, **stride)
        self.norm = batch_norm(c_out, options)

    def __call__(self, x: Array, *, train: bool) -> Array:
        """Convolves and normalises `x` [n, h, w, channels_in]."""
        return self.norm(self.conv(x), use_running_average=not train).astype(self.dtype)


def max_pool(x: Array, size: int = 2) -> Array:
    """Max-pooling of [n, h, w, c] with stride 2 over windows of 2×2 pixels, or 3×3 padded with −∞.

    A maximum of arrays: with `nnx.max_pool`, a training step of Conv4 takes 1.7 times as long on a
    CPU.
    """
    pad = size // 3
    x = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), constant_values=-jnp.inf)
    for axis in (1, 2):
        end = (x.shape[axis] - size) // 2 * 2 + 1
        seen = [lax.slice_in_dim(x, k, end + k, 2, axis) for k in range(size)]
        x = reduce(larger, seen)
    return x


@jax.custom_jvp
def larger(a: Array, b: Array) -> Array:
    """The maximum of two arrays of one shape; two equal values each receive half the gradient.

    Here the two are compared with each other, so that one gets the gradient. With `jnp.maximum`,
    the compiler may round a value another time, and neither equals the maximum.
    """
    return jnp.maximum(a, b)


@larger.defjvp
def _larger_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (a, b), (of_a, of_b) = primals, tangents
    half = jnp.asarray(0.5, a.dtype)
    share = half * (a > b) + half * (a >= b)
    return larger(a, b), share * of_a + (1 - share) * of_b


def fold_in(keys: Array | None, number: int) -> Array:
    """Derives the keys [n] of one layer from those of the network; raises if there are none."""
    if keys is None:
        raise ValueError("dropout needs keys, one per image; got None")
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def drop_after_block(
    x: Array, keys: Array | None, step: Any, config: ModelConfig, *, number: int, stages_after: int
) -> Array:
    """Drops units of `x` [n, h, w, c]: DropBlock in the last two stages, dropout before them.

    Each block of the network has its `number`, and draws its own numbers. See Lee et al.,
    Meta-Learning with Differentiable Convex Optimization, CVPR 2019 (ResNet-12).
    """
    rate: Any = config.drop_block if stages_after < 2 else config.dropout
    if not rate:
        return x
    keys = fold_in(keys, number)
    if stages_after >= 2:
        return dropout(x, keys, rate=rate)
    if config.drop_block_steps:
        rate *= jnp.minimum(jnp.asarray(step) / config.drop_block_steps, 1.0)
    return drop_block(x, keys, rate=rate, block_size=config.drop_block_size)


def dropout(x: Array, keys: Array, *, rate: float, whole: bool = False) -> Array:
    """Sets units of `x` [n, ...] to zero with probability `rate`, scales others by 1 / (1 − rate).

    There is one typed PRNG key per sample. With `whole`, it drops whole samples: stochastic depth.
    """
    shape = (1,) * (x.ndim - 1) if whole else x.shape[1:]
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(keys)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def drop_block(x: Array, keys: Array, *, rate: float | Array, block_size: int) -> Array:
    """DropBlock: sets square blocks of every channel to zero, and scales the remaining units.

    At every position where a block fits, it is dropped with probability
    γ = rate / b² · h·w / ((h − b + 1)(w − b + 1)), so that about `rate` of the units are dropped
    (Ghiasi et al., 2018, eq. 1). The remaining units of a sample are scaled by units / units kept.
    There is one typed PRNG key per sample of `x` [n, h, w, c]. A block is at most as large as x.
    """
    h, w, c = x.shape[1:]
    size_h, size_w = min(block_size, h), min(block_size, w)
    places_h, places_w = h - size_h + 1, w - size_w + 1
    gamma = rate / (size_h * size_w) * (h * w) / (places_h * places_w)

    def kept(key: Array) -> Array:
        starts = jax.random.bernoulli(key, gamma, (places_h, places_w, c)).astype(jnp.float32)
        pad = ((size_h - 1, size_h - 1), (size_w - 1, size_w - 1), (0, 0))
        blocks = (size_h, size_w, 1)
        mask = 1.0 - lax.reduce_window(starts, 0.0, lax.max, blocks, (1, 1, 1), pad)
        return mask * (mask.size / jnp.maximum(mask.sum(), 1.0))

    return x * jax.vmap(kept)(keys).astype(x.dtype)


class Projected(Backbone):
    """Features with another dimension (`dim` > 0), normalised over the batch, or both.

    The linear layer has a bias, and starts as `torch.nn.Linear` does, unless batch normalisation,
    which has a bias, comes after it.
    """

    def __init__(self, backbone: Backbone, config: ModelConfig, options: LayerOptions):
        inputs, normalize = backbone.num_features, config.projection != "linear"
        self.backbone, self.num_features = backbone, config.dim or inputs
        bound = inputs**-0.5  # The kernel is uniform in ±bound, too.
        uniform = partial(jax.random.uniform, minval=-bound, maxval=bound)
        kernel = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        start: Any = {} if normalize else {"kernel_init": kernel, "bias_init": uniform}
        start |= {"use_bias": not normalize, "rngs": options.rngs}
        self.linear = nnx.Linear(inputs, config.dim, **start) if config.dim else None
        self.norm = batch_norm(self.num_features, options) if normalize else None

    def __call__(
        self, images: Array, *, train: bool, keys: Array | None = None, step: Array | None = None
    ) -> Array:
        """As `Backbone.__call__`."""
        features = self.backbone(images, train=train, keys=keys, step=step).astype(jnp.float32)
        if self.linear is not None:
            features = self.linear(features)
        if self.norm is not None:
            features = self.norm(features, use_running_average=not train)
        return features
