"""Layers that the backbones share: convolution, normalisation, pooling, dropout, DropBlock."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

_KERNEL_INIT = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


def conv(
    channels_in: int,
    channels_out: int,
    kernel_size: int,
    *,
    stride: int = 1,
    dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.Conv:
    """A convolution without bias; n pixels become ⌈n / stride⌉.

    The border is padded by half a kernel on both sides. `SAME` would pad by one pixel less on the
    left and above wherever a stride of 2 meets an even size, so that weights trained elsewhere
    would see shifted images.

    Args:
        channels_in: Channels of the input.
        channels_out: Channels of the output.
        kernel_size: Side of the square kernel, odd.
        stride: Distance of two output pixels in the input.
        dtype: Compute type.
        rngs: Source of the initial kernel, normal with variance 2 / fan-out.
    """
    return nnx.Conv(
        channels_in,
        channels_out,
        (kernel_size, kernel_size),
        strides=stride,
        padding=kernel_size // 2,
        use_bias=False,
        dtype=dtype,
        kernel_init=_KERNEL_INIT,
        rngs=rngs,
    )


def batch_norm(channels: int, *, axis_name: str | None, rngs: nnx.Rngs) -> nnx.BatchNorm:
    """Batch normalisation whose running statistics move by a tenth a step.

    float32 whatever the compute type is: nnx would round the running statistics to bfloat16.

    Args:
        channels: Channels of the input.
        axis_name: Device axis over which the batch statistics are synchronised, or None.
        rngs: Source of the initial parameters, ones and zeros.
    """
    return nnx.BatchNorm(
        channels,
        momentum=0.9,
        epsilon=1e-5,
        dtype=jnp.float32,
        axis_name=axis_name,
        rngs=rngs,
    )


class ConvNorm(nnx.Module):
    """A convolution without bias and batch normalisation of its output.

    The convolution computes in `dtype`; statistics and normalisation are float32, and the result
    is `dtype` again.

    Args:
        channels_in: Channels of the input.
        channels_out: Channels of the output.
        kernel_size: Side of the square kernel.
        stride: Distance of two output pixels in the input.
        dtype: Compute type of the convolution.
        axis_name: Device axis over which the batch statistics are synchronised, or None.
        rngs: Source of the initial kernel.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel_size: int,
        *,
        stride: int = 1,
        dtype: DTypeLike,
        axis_name: str | None,
        rngs: nnx.Rngs,
    ):
        self.dtype = dtype
        self.conv = conv(
            channels_in, channels_out, kernel_size, stride=stride, dtype=dtype, rngs=rngs
        )
        self.norm = batch_norm(channels_out, axis_name=axis_name, rngs=rngs)

    def __call__(self, x: Array, *, train: bool) -> Array:
        """Convolve and normalise `x` [n, h, w, channels_in]; in training by its own statistics."""
        return self.norm(self.conv(x), use_running_average=not train).astype(self.dtype)


def halved(size: int, times: int) -> int:
    """The pixels that layers of stride 2 leave of `size`; an odd number is rounded up."""
    return -(-size // 2**times)


def max_pool(x: Array) -> Array:
    """The maximum over windows of 2×2 pixels; an odd last row or column is left out.

    Maxima of two arrays, because the gradient of `lax.reduce_window` is slow on the CPU: it makes a
    training step of Conv4 about 1.7 times as long. That of a maximum over axes is as fast, but
    divides by the number of values that equal the maximum, which is 0 where a compiler computes
    them again with another rounding. Two equal values each take half of the gradient.

    Args:
        x: Float [n, h, w, c].

    Returns:
        Float [n, h // 2, w // 2, c].
    """
    h, w = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    rows = jnp.maximum(x[:, 0:h:2], x[:, 1:h:2])
    return jnp.maximum(rows[:, :, 0:w:2], rows[:, :, 1:w:2])


def overlapping_max_pool(x: Array) -> Array:
    """The maximum over windows of 3×3 pixels at every second pixel; the border counts as −∞.

    Maxima of arrays, for the reason that `max_pool` gives.

    Args:
        x: Float [n, h, w, c].

    Returns:
        Float [n, ⌈h / 2⌉, ⌈w / 2⌉, c].
    """
    h, w = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-jnp.inf)
    rows = jnp.maximum(jnp.maximum(x[:, 0:h:2], x[:, 1 : h + 1 : 2]), x[:, 2 : h + 2 : 2])
    return jnp.maximum(
        jnp.maximum(rows[:, :, 0:w:2], rows[:, :, 1 : w + 1 : 2]), rows[:, :, 2 : w + 2 : 2]
    )


def pool_features(x: Array, pooling: str) -> Array:
    """The features of a last block.

    Args:
        x: Float [n, h, w, c].
        pooling: `flatten` for every position, or `mean` for the mean over the positions.

    Returns:
        float32 [n, h·w·c] or [n, c].
    """
    x = x.astype(jnp.float32)
    return x.mean((1, 2)) if pooling == "mean" else x.reshape(x.shape[0], -1)


def require_keys(keys: Array | None, images: Array, layer: str) -> Array:
    """The keys, if there is one for each image.

    Raises:
        ValueError: There are none, or another number.
    """
    if keys is None or keys.shape != images.shape[:1]:
        held = "None" if keys is None else f"keys of shape {keys.shape}"
        raise ValueError(
            f"{layer} needs keys of shape {images.shape[:1]}, one per image; got {held}"
        )
    return keys


def fold_in(keys: Array, number: int) -> Array:
    """Keys [n] of the samples for a layer, from those for the whole network."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def dropout(x: Array, keys: Array, *, rate: float) -> Array:
    """Set units to zero with probability `rate` and scale the others by 1 / (1 − rate).

    Args:
        x: Float [n, ...].
        keys: Typed PRNG keys [n]; a sample's units depend on its own key alone.
        rate: In [0, 1).

    Returns:
        Float, of the shape and type of `x`.
    """
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(keys)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def drop_block(x: Array, keys: Array, *, rate: float, block_size: int) -> Array:
    """DropBlock: set square blocks of each channel to zero and scale up what remains.

    A block starts at each place where it fits with the probability γ that removes about `rate` of
    the units, γ = rate / b² · h·w / ((h − b + 1)(w − b + 1)) (Ghiasi et al., 2018, eq. 1). The
    remaining units of a sample are scaled by units / units kept. Blocks and scale depend on the
    sample's own key alone, so that a batch split over devices gives the same values.

    Args:
        x: Float [n, h, w, c].
        keys: Typed PRNG keys [n].
        rate: Expected part of the units removed, before overlaps of blocks.
        block_size: Side b of a block; clipped to the map.

    Returns:
        Float [n, h, w, c], of the type of `x`.
    """
    h, w, c = x.shape[1:]
    size_h, size_w = min(block_size, h), min(block_size, w)
    places_h, places_w = h - size_h + 1, w - size_w + 1
    gamma = rate / (size_h * size_w) * (h * w) / (places_h * places_w)

    def kept(key: Array) -> Array:
        starts = jax.random.bernoulli(key, gamma, (places_h, places_w, c)).astype(jnp.float32)
        removed = lax.reduce_window(
            starts,
            0.0,
            lax.max,
            (size_h, size_w, 1),
            (1, 1, 1),
            ((size_h - 1, size_h - 1), (size_w - 1, size_w - 1), (0, 0)),
        )
        mask = 1.0 - removed
        return mask * (mask.size / jnp.maximum(mask.sum(), 1.0))

    return x * jax.vmap(kept)(keys).astype(x.dtype)
