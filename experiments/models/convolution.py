"""Convolutions whose gradients are fast on CPUs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

_ROWS = 2048
"""About as many positions at a time share a product: their channels fit into a core's cache."""
_FEW_CHANNELS = 3


class Conv(nnx.Conv):
    """`nnx.Conv` for a square kernel of odd size, stride 1, padding by half the size, no bias.

    On CPUs it computes the gradient of the kernel in another way than XLA, and so the convolution
    of images with one channel. Accelerators, and types other than float32, keep XLA's convolution.
    """

    def __call__(self, inputs: Array) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Convolves `inputs` [n, h, w, c]."""
        dtype = self.dtype or inputs.dtype
        return convolve(inputs.astype(dtype), self.kernel[...].astype(dtype))


def convolve(x: Array, kernel: Array) -> Array:
    """The convolution that keeps height and width, padded with zeros.

    It has no forward mode.

    Args:
      x: [n, h, w, c].
      kernel: [k, k, c, o] with odd k, of the type of `x`.

    Returns:
      [n, h, w, o].

    Raises:
      ValueError: The numbers of channels differ.
    """
    if x.shape[-1] != kernel.shape[2]:
        raise ValueError(
            f"a kernel for {kernel.shape[2]} channels does not fit images of {x.shape[-1]}"
        )
    if x.dtype != jnp.float32:
        return _by_xla(x, kernel)
    # Inside `shard_map`, the kernel then varies over the devices as the images do, so that JAX sums
    # the gradients of the devices.
    return _convolve(x, kernel + jnp.sum(jnp.zeros_like(x[:1, :1, :1, :1])))


@jax.custom_vjp
def _convolve(x: Array, kernel: Array) -> Array:
    if x.shape[-1] > 1:
        return _by_xla(x, kernel)
    return lax.platform_dependent(x, kernel, cpu=_of_one_channel, default=_by_xla)


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _convolve(x, kernel), (x, kernel)


def _backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    (of_x,) = jax.vjp(lambda x: _by_xla(x, kernel), x)[1](gradient)
    of_kernel = lax.platform_dependent(
        x, gradient, kernel, cpu=_kernel_gradient, default=_kernel_gradient_by_xla
    )
    return of_x, of_kernel


_convolve.defvjp(_forward, _backward)


def _by_xla(x: Array, kernel: Array) -> Array:
    half = kernel.shape[0] // 2
    return lax.conv_general_dilated(
        x, kernel, (1, 1), [(half, half)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _kernel_gradient_by_xla(x: Array, gradient: Array, kernel: Array) -> Array:
    return jax.vjp(lambda kernel: _by_xla(x, kernel), kernel)[1](gradient)[0]


def _of_one_channel(x: Array, kernel: Array) -> Array:
    """A sum of shifted images, each times o numbers: one pass that writes the result."""
    size = len(kernel)
    shifted = _shifted(x, size)
    terms = [shifted(i, j) * kernel[i, j, 0] for i in range(size) for j in range(size)]
    return functools.reduce(operator.add, terms)


def _kernel_gradient(x: Array, gradient: Array, kernel: Array) -> Array:
    """For every place in the kernel a product of `gradient` with shifted images.

    XLA's convolution for it is large in height and width, which takes 1.1 to 2.2 times as long.
    """
    size, channels, channels_out = kernel.shape[1:]
    form = _few_channels if channels <= _FEW_CHANNELS else _in_turns
    return form(x, gradient, size).reshape(size, size, channels, channels_out)


def _in_turns(x: Array, gradient: Array, size: int) -> Array:
    """The sum of `_many_channels` over parts of the batch."""
    n, h, w, _ = x.shape
    together = max(k for k in range(1, n + 1) if n % k == 0 and (k == 1 or k * h * w <= _ROWS))
    turns = n // together
    # Turns are not the leading axis, so that a batch that is spread over devices stays there.
    parts = [a.reshape(together, turns, *a.shape[1:]) for a in (x, gradient)]

    def of_turn(turn: Array | int) -> Array:
        images, share = (lax.dynamic_index_in_dim(a, turn, 1, False) for a in parts)
        return _many_channels(images, share, size)

    return lax.fori_loop(1, turns, lambda turn, total: total + of_turn(turn), of_turn(0))


def _many_channels(x: Array, gradient: Array, size: int) -> Array:
    """[size², c, o] for x [n, h, w, c] and gradient [n, h, w, o]."""
    channels = x.shape[-1]
    # The product of two matrices that are not transposed is twice as fast.
    transposed = lax.optimization_barrier(gradient.reshape(-1, gradient.shape[-1]).T)
    shifted = _shifted(x, size)
    products = [
        transposed @ lax.optimization_barrier(shifted(i, j)).reshape(-1, channels)
        for i in range(size)
        for j in range(size)
    ]
    return jnp.stack(products).transpose(0, 2, 1)


def _few_channels(x: Array, gradient: Array, size: int) -> Array:
    """[size²·c, o]: a single product with all shifted images, which are small."""
    channels = x.shape[-1]
    half = size // 2
    h, w = x.shape[1:3]
    padded = lax.optimization_barrier(
        jnp.pad(x.transpose(3, 0, 1, 2), ((0, 0), (0, 0), (half, half), (half, half)))
    )
    shifted = [
        padded[:, :, i : i + h, j : j + w].reshape(channels, -1)
        for i in range(size)
        for j in range(size)
    ]
    rows = gradient.reshape(-1, gradient.shape[-1])
    return lax.optimization_barrier(jnp.concatenate(shifted)) @ rows


def _shifted(x: Array, size: int) -> Callable[[int, int], Array]:
    """From a place in the kernel to the part of the padded images [n, h, w, c] that it sees."""
    h, w, c = x.shape[1:]
    half = size // 2
    padded = jnp.pad(x, ((0, 0), (half, half), (half, half), (0, 0)))
    # Rows as vectors are copied several numbers at a time.
    rows = lax.optimization_barrier(padded.reshape(len(x), h + 2 * half, -1))

    def at(i: int, j: int) -> Array:
        return rows[:, i : i + h, j * c : (j + w) * c].reshape(len(x), h, w, c)

    return at
