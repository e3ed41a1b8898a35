"""Resizing and cropping of one image on the device; `jax.vmap` makes them batch functions.

Resizing is bilinear with antialiasing, as Pillow's `Image.resize(..., Image.BILINEAR)` does it: a
pixel is the mean of the pixels around its place, weighted by a triangle that is as wide as two
pixels of the coarser of the two grids. Pillow rounds to whole numbers after each of the two
directions, so that its uint8 images differ by up to 1 of 255.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

_TRIES = 10


def resize(image: Array, size: tuple[int, int]) -> Array:
    """The whole image, stretched to another size.

    Args:
        image: [h, w, c], integers or floats.
        size: New height and width.

    Returns:
        float32 [*size, c], in the range of the input.
    """
    height, width = image.shape[:2]
    return _resample(
        image, _weights(height, 0, height, size[0]), _weights(width, 0, width, size[1])
    )


def resize_and_center_crop(image: Array, shorter: int, size: int) -> Array:
    """Resize so that the shorter side has so many pixels, and cut a square out of the middle.

    The longer side is rounded down to whole pixels, and the place of the square to the nearest,
    halves to even.

    Args:
        image: [h, w, c], integers or floats.
        shorter: Pixels of the shorter side; at least `size`.
        size: Side of the square.

    Returns:
        float32 [size, size, c], in the range of the input.
    """
    if not 0 < size <= shorter:
        raise ValueError(f"a square of {size} does not fit into a shorter side of {shorter} pixels")

    def weights(side: int) -> Array:
        whole = side * shorter // min(image.shape[:2])
        first = round((whole - size) / 2)
        return _weights(side, 0, side, whole)[first : first + size]

    return _resample(image, weights(image.shape[0]), weights(image.shape[1]))


def random_resized_crop(
    image: Array,
    key: Array,
    size: tuple[int, int],
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Array:
    """A random part of the image, stretched to a size; nothing around the part is seen.

    Args:
        image: [h, w, c], integers or floats.
        key: Typed PRNG key.
        size: New height and width.
        scale: Bounds of the part's area, relative to the image's.
        ratio: Bounds of the part's width / height.

    Returns:
        float32 [*size, c], in the range of the input.
    """
    height, width = image.shape[:2]
    box = random_box(key, height, width, scale=scale, ratio=ratio)
    top, left, box_height, box_width = box
    return _resample(
        image,
        _weights(height, top, box_height, size[0]),
        _weights(width, left, box_width, size[1]),
    )


def random_box(
    key: Array,
    height: int,
    width: int,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Array:
    """A part of an image, as Inception's training and torchvision choose it.

    Area uniform in `scale`, logarithm of the ratio uniform in `ratio`, sides rounded to pixels; of
    ten tries the first that fits into the image, at a uniform place. If none fits: the middle of
    the image, as much as the ratio allows.

    Args:
        key: Typed PRNG key.
        height: Of the image, in pixels.
        width: Of the image, in pixels.
        scale: Bounds of the area, relative to the image's.
        ratio: Bounds of width / height.

    Returns:
        int32 [4]: top, left, height, width.
    """
    area_key, ratio_key, place_key = jax.random.split(key, 3)
    areas = jax.random.uniform(area_key, (_TRIES,), minval=scale[0], maxval=scale[1])
    areas *= height * width
    bounds = jnp.log(jnp.asarray(ratio, jnp.float32))
    ratios = jnp.exp(jax.random.uniform(ratio_key, (_TRIES,), minval=bounds[0], maxval=bounds[1]))
    heights = jnp.round(jnp.sqrt(areas / ratios)).astype(jnp.int32)
    widths = jnp.round(jnp.sqrt(areas * ratios)).astype(jnp.int32)
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)
    first = jnp.argmax(fits)
    within = jnp.stack([heights[first], widths[first]])
    top_left = jax.random.randint(place_key, (2,), 0, jnp.array([height, width]) - within + 1)

    # At least the narrowest of images has a pixel: a ratio may be out of its reach.
    fallback_width = min(width, max(1, round(height * ratio[1])))
    fallback_height = min(height, max(1, round(width / ratio[0])))
    middle = [
        *((height - fallback_height) // 2, (width - fallback_width) // 2),
        *(fallback_height, fallback_width),
    ]
    return jnp.where(fits.any(), jnp.concatenate([top_left, within]), jnp.array(middle, jnp.int32))


def _weights(side: int, start: ArrayLike, length: ArrayLike, size: int) -> Array:
    """How much each of `side` pixels counts in each of `size` that show `length` from `start`."""
    length = jnp.asarray(length, jnp.float32)
    start = jnp.asarray(start, jnp.float32)
    step = length / size
    centers = start + (jnp.arange(size) + 0.5) * step
    pixels = jnp.arange(side) + 0.5
    distance = jnp.abs(pixels - centers[:, None]) / jnp.maximum(step, 1.0)
    shown = (pixels > start) & (pixels < start + length)
    weights = jnp.where(shown, jnp.maximum(1.0 - distance, 0.0), 0.0)
    return weights / weights.sum(1, keepdims=True)


def _resample(image: Array, rows: Array, columns: Array) -> Array:
    # The highest precision: an accelerator would round pixels to bfloat16 by default.
    return jnp.einsum(
        *("ih,jw,hwc->ijc", rows, columns, image.astype(jnp.float32)),
        precision=lax.Precision.HIGHEST,
        optimize="optimal",
    )
