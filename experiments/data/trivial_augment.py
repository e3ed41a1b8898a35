"""TrivialAugment of one image, on the device: one random operation of a random strength.

The operations are those of torchvision's `TrivialAugmentWide` on Pillow images, with bilinear
interpolation and black outside the image. Pixels are whole numbers, and as in Pillow fractions are
cut off, so that pixels differ from Pillow's by at most 1 of 255, where rounding does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

OPERATIONS = (
    *("identity", "shear x", "shear y", "translate x", "translate y", "rotate"),
    *("brightness", "colour", "contrast", "sharpness"),
    *("posterize", "solarize", "autocontrast", "equalize"),
)
LEVELS = 31
"""Strengths of an operation."""

_GROUPS = np.array([0, *[1] * 5, *[2] * 4, 3, 4, 5, 6])
"""The function in `apply_operation` that computes each operation."""
_SHEAR, _SHIFT, _ANGLE, _FACTOR, _BITS = 0.99, 32, 135, 0.99, 6
"""Greatest strengths: per pixel, pixels, degrees, change of a factor, bits removed."""


def trivial_augment(image: Array, key: Array) -> Array:
    """Applies one operation at random (Müller and Hutter, ICCV 2021, "wide").

    Args:
      image: Whole numbers from 0 to 255, float32 [h, w, c], with 1 or 3 channels.
      key: Typed PRNG key.

    Returns:
      The same type and shape.
    """
    operation_key, level_key, sign_key = jax.random.split(key, 3)
    return apply_operation(
        image,
        jax.random.randint(operation_key, (), 0, len(OPERATIONS)),
        jax.random.randint(level_key, (), 0, LEVELS),
        jax.random.bernoulli(sign_key),
    )


def apply_operation(
    image: Array, operation: ArrayLike, level: ArrayLike, negative: ArrayLike
) -> Array:
    """Applies an operation.

    Args:
      image: As in `trivial_augment`.
      operation: Its position in `OPERATIONS`.
      level: Its strength, 0 to `LEVELS` − 1.
      negative: Whether the strength of a geometric operation or a factor is negative.
    """
    operation = jnp.asarray(operation)
    share = jnp.asarray(level) / (LEVELS - 1)
    signed = jnp.where(negative, -share, share)
    branches = (
        lambda: image,
        lambda: _transform(image, _matrix(operation - 1, signed, image.shape)),
        lambda: _blend(image, operation - 6, 1 + _FACTOR * signed),
        lambda: _posterize(image, jnp.round(_BITS * share)),
        lambda: jnp.where(image < 255 * (1 - share), image, 255 - image),
        lambda: _autocontrast(image),
        lambda: _equalize(image),
    )
    return lax.switch(jnp.asarray(_GROUPS)[operation], branches)


def _matrix(operation: Array, signed: Array, shape: tuple[int, ...]) -> Array:
    """The map [2, 3] from the places of pixels to where their values come from."""
    one, zero = jnp.ones(()), jnp.zeros(())
    shear = _SHEAR * signed
    shift = -jnp.trunc(_SHIFT * signed)
    angle = -jnp.deg2rad(_ANGLE * signed)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    # Of a right angle: places on the border between pixels must not depend on rounding.
    cos = jnp.where(jnp.abs(cos) < 1e-6, 0, cos)
    y, x = shape[0] / 2, shape[1] / 2
    rows = [
        ((one, shear, zero), (zero, one, zero)),
        ((one, zero, zero), (shear, one, zero)),
        ((one, zero, shift), (zero, one, zero)),
        ((one, zero, zero), (zero, one, shift)),
        ((cos, sin, x - cos * x - sin * y), (-sin, cos, y + sin * x - cos * y)),
    ]
    return jnp.array(rows)[operation]


def _transform(image: Array, matrix: Array) -> Array:
    """Bilinear interpolation at mapped places, with 0 outside the image."""
    height, width = image.shape[:2]
    y, x = jnp.meshgrid(jnp.arange(height) + 0.5, jnp.arange(width) + 0.5, indexing="ij")
    (a, b, c), (d, e, f) = matrix
    x, y = a * x + b * y + c, d * x + e * y + f
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)

    def around(place: Array, size: int) -> tuple[Array, Array, Array]:
        first = jnp.floor(place - 0.5)
        low, high = (jnp.clip(first + i, 0, size - 1).astype(jnp.int32) for i in (0, 1))
        return low, high, (place - 0.5 - first)[..., None]

    (left, right, dx), (top, bottom, dy) = around(x, width), around(y, height)

    def along(rows: Array) -> Array:
        return image[rows, left] + dx * (image[rows, right] - image[rows, left])

    upper = along(top)
    values = jnp.floor(upper + dy * (along(bottom) - upper))
    return jnp.where(inside[..., None], values, 0)


def _blend(image: Array, operation: Array, factor: Array) -> Array:
    """Moves an image away from a version without brightness, colour, contrast or sharpness."""
    grey = _grey(image)
    plain = (
        lambda: jnp.zeros_like(image),
        lambda: jnp.broadcast_to(grey, image.shape),
        lambda: jnp.full_like(image, jnp.floor(grey.mean() + 0.5)),
        lambda: _smooth(image),
    )
    other = lax.switch(operation, plain)
    return jnp.floor(jnp.clip(other + factor * (image - other), 0, 255))


def _grey(image: Array) -> Array:
    """The greyscale image [h, w, 1], rounded as in Pillow."""
    if image.shape[-1] == 1:
        return image
    red, green, blue = jnp.moveaxis(image.astype(jnp.int32), -1, 0)
    grey = (19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16
    return grey.astype(image.dtype)[..., None]


def _smooth(image: Array) -> Array:
    """Means over 3×3 pixels, of which the middle one counts five times; the border stays."""
    height, width = image.shape[:2]
    shifted = [image[i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3)]
    inner = image[1:-1, 1:-1]
    # Whole numbers below 2^24 are exact.
    means = jnp.floor((sum(shifted[1:], shifted[0]) + 4 * inner) / 13 + 0.5)
    return image.at[1:-1, 1:-1].set(means)


def _posterize(image: Array, removed: Array) -> Array:
    step = jnp.exp2(removed)
    return jnp.floor(image / step) * step


def _autocontrast(image: Array) -> Array:
    """Stretches every channel to the range from 0 to 255."""
    values = image.astype(jnp.int32)
    low, high = values.min((0, 1)), values.max((0, 1))
    stretched = 255 * (values - low) // jnp.maximum(high - low, 1)
    return jnp.where(high > low, stretched, values).astype(image.dtype)


def _equalize(image: Array) -> Array:
    """Makes the histogram of every channel as even as possible."""
    values = image.astype(jnp.int32)

    def channel(values: Array) -> Array:
        counts = jnp.zeros(256, jnp.int32).at[values].add(1)
        step = (values.size - counts[values.max()]) // 255
        before = jnp.cumsum(counts) - counts
        table = jnp.clip((step // 2 + before) // jnp.maximum(step, 1), 0, 255)
        return jnp.where(step > 0, table[values], values)

    return jax.vmap(channel, -1, -1)(values).astype(image.dtype)
