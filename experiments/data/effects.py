"""Random effects on one image, on the device: colours, erased boxes, TrivialAugment."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

_ATTEMPTS = 10
"""Boxes that are drawn until one fits, as in torchvision."""

# --- Colours --------------------------------------------------------------------------------------

# Luma coefficients of ITU-R BT.601.
_LUMA = (0.299, 0.587, 0.114)
# Principal components of ImageNet's pixels in [0, 1]: standard deviations, and directions as
# columns (Krizhevsky et al., 2012; values of fb.resnet.torch).
_DEVIATIONS = (0.2175, 0.0188, 0.0045)
_DIRECTIONS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))


def jitter(pixels: Array, key: Array, strength: float) -> Array:
    """Changes brightness, contrast and, for colour images, saturation of [h, w, c] in [0, 1].

    Each factor is uniform in [max(0, 1 − s), 1 + s] with s = `strength`.
    """
    low, high = max(0.0, 1 - strength), 1 + strength
    brightness, contrast, saturation = jax.random.uniform(key, (3,), minval=low, maxval=high)
    pixels = jnp.clip(pixels * brightness, 0, 1)
    level = _luma(pixels).mean()
    pixels = jnp.clip(level + contrast * (pixels - level), 0, 1)
    if pixels.shape[-1] == 1:
        return pixels
    grey = _luma(pixels)
    return jnp.clip(grey + saturation * (pixels - grey), 0, 1)


def add_lighting(pixels: Array, key: Array, deviation: float) -> Array:
    """Adds one random colour to all pixels [h, w, 3], along the principal components of ImageNet.

    The coordinate of each component is normal, with `deviation` times the standard deviation of
    ImageNet's pixels. The result is not clipped.
    """
    amounts = deviation * jax.random.normal(key, (3,)) * jnp.asarray(_DEVIATIONS)
    return pixels + (jnp.asarray(_DIRECTIONS) * amounts).sum(1)


def _luma(pixels: Array) -> Array:
    """The greyscale image [h, w, 1] of [h, w, c]."""
    if pixels.shape[-1] == 1:
        return pixels
    return (pixels * jnp.asarray(_LUMA, pixels.dtype)).sum(-1, keepdims=True)


# --- Random boxes ---------------------------------------------------------------------------------


def random_sides(
    key: Array,
    area: ArrayLike,
    fits: Callable[[Array, Array], Array],
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[Array, Array, Array, Array]:
    """Draws the sides of a box: of ten attempts, the first one that fits.

    The area is uniform, in the range `scale` relative to `area`, and so is the logarithm of the
    first side over the second, in the range `ratio`. `fits` says of first and second sides, int32
    [10], which of the boxes fit.

    Returns:
      The first and the second side, rounded, int32 []; whether a box fits; a key for its position.
    """
    area_key, ratio_key, position_key = jax.random.split(key, 3)
    areas = jax.random.uniform(area_key, (_ATTEMPTS,), minval=scale[0], maxval=scale[1])
    areas *= area
    low, high = jnp.log(jnp.asarray(ratio, jnp.float32))
    ratios = jnp.exp(jax.random.uniform(ratio_key, (_ATTEMPTS,), minval=low, maxval=high))
    sides = jnp.sqrt(areas * ratios), jnp.sqrt(areas / ratios)
    first, second = (jnp.round(side).astype(jnp.int32) for side in sides)
    fitting = fits(first, second)
    chosen = jnp.argmax(fitting)
    return first[chosen], second[chosen], fitting.any(), position_key


def in_box(box: Iterable[Array], height: int, width: int) -> Array:
    """Whether a pixel is between top, left, bottom and right (exclusive): bool [h, w, 1]."""
    top, left, bottom, right = box
    rows, columns = jnp.arange(height)[:, None, None], jnp.arange(width)[:, None]
    return (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)


def random_erasing(pixels: Array, key: Array, probability: float) -> Array:
    """Sets a random box of normalised pixels [h, w, c] to zero, their mean.

    Zhong et al., AAAI 2020. There is a box with this probability.
    """
    height, width = pixels.shape[:2]
    chance_key, box_key = jax.random.split(key)
    top, left, box_height, box_width = erased_box(box_key, height, width)
    inside = in_box((top, left, top + box_height, left + box_width), height, width)
    return jnp.where(inside & jax.random.bernoulli(chance_key, probability), 0, pixels)


def erased_box(key: Array, height: int, width: int) -> Array:
    """Draws a box as torchvision does, of 2 to 33 % of the area and an aspect ratio of 0.3 to 3.3.

    Of ten attempts, the first box that is lower and narrower than the image is placed uniformly.

    Returns:
      int32 [4]: top, left, height, width; both sides are 0 if no attempt succeeds.
    """
    first, second, found, position_key = random_sides(
        key,
        height * width,
        lambda heights, widths: (heights < height) & (widths < width),
        scale=(0.02, 0.33),
        ratio=(0.3, 3.3),
    )
    sides = jnp.where(found, jnp.stack([first, second]), 0)
    places = jnp.array([height, width]) - sides + 1
    return jnp.concatenate([jax.random.randint(position_key, (2,), 0, places), sides])


# --- TrivialAugment -------------------------------------------------------------------------------

# The operations are those of torchvision's `TrivialAugmentWide` on Pillow images, with bilinear
# interpolation and black outside the image. Pixels are whole numbers, and as in Pillow fractions
# are cut off, so that pixels differ from Pillow's by at most 1 of 255, where rounding does.
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

    The image has whole numbers from 0 to 255, float32 [h, w, c], and 1 or 3 channels.
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
    """Applies the operation at a place in `OPERATIONS`, with a strength from 0 to `LEVELS` − 1.

    With `negative`, the strength of a geometric operation or a factor is below 0.
    """
    operation = jnp.asarray(operation)
    share = jnp.asarray(level) / (LEVELS - 1)
    signed = jnp.where(negative, -share, share)
    step = jnp.exp2(jnp.round(_BITS * share))
    branches = (
        lambda: image,
        lambda: _transform(image, _matrix(operation - 1, signed, image.shape)),
        lambda: _blend(image, operation - 6, 1 + _FACTOR * signed),
        lambda: jnp.floor(image / step) * step,
        lambda: jnp.where(image < 255 * (1 - share), image, 255 - image),
        lambda: _autocontrast(image),
        lambda: _equalize(image),
    )
    return lax.switch(jnp.asarray(_GROUPS)[operation], branches)


def _matrix(operation: Array, signed: Array, shape: tuple[int, ...]) -> Array:
    """The map [2, 3] from the places of pixels to where their values come from."""
    shear = _SHEAR * signed
    shift = -jnp.trunc(_SHIFT * signed)
    angle = -jnp.deg2rad(_ANGLE * signed)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    # Of a right angle: places on the border between pixels must not depend on rounding.
    cos = jnp.where(jnp.abs(cos) < 1e-6, 0, cos)
    y, x = shape[0] / 2, shape[1] / 2
    rows = [
        ((1, shear, 0), (0, 1, 0)),
        ((1, 0, 0), (shear, 1, 0)),
        ((1, 0, shift), (0, 1, 0)),
        ((1, 0, 0), (0, 1, shift)),
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
