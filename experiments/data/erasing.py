"""Random erasing of one image, on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from experiments.data.resize import candidate_sides


def random_erasing(
    pixels: Array,
    key: Array,
    probability: float,
    *,
    scale: tuple[float, float] = (0.02, 0.33),
    ratio: tuple[float, float] = (0.3, 3.3),
) -> Array:
    """Sets a random box to zero (Zhong et al., AAAI 2020), the mean of normalised pixels.

    Args:
      pixels: float32 [h, w, c], normalised.
      key: Typed PRNG key.
      probability: Probability that there is a box.
      scale: Range of the area of the box, relative to the image.
      ratio: Range of the aspect ratio (height / width) of the box.

    Returns:
      float32 [h, w, c].
    """
    height, width = pixels.shape[:2]
    chance_key, box_key = jax.random.split(key)
    top, left, box_height, box_width = erased_box(box_key, height, width, scale=scale, ratio=ratio)
    rows, columns = jnp.arange(height), jnp.arange(width)
    in_rows = (rows >= top) & (rows < top + box_height)
    in_columns = (columns >= left) & (columns < left + box_width)
    erased = in_rows[:, None] & in_columns & jax.random.bernoulli(chance_key, probability)
    return jnp.where(erased[..., None], 0, pixels)


def erased_box(
    key: Array,
    height: int,
    width: int,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Array:
    """Draws a box as torchvision does.

    The area is uniform in `scale`, the logarithm of the aspect ratio is uniform in `ratio`, and the
    sides are rounded. Of ten attempts, the first box that is lower and narrower than the image is
    placed uniformly.

    Returns:
      int32 [4]: top, left, height, width; both sides are 0 if no attempt succeeds.
    """
    area_key, ratio_key, position_key = jax.random.split(key, 3)
    heights, widths = candidate_sides(area_key, ratio_key, height * width, scale=scale, ratio=ratio)
    fits = (heights < height) & (widths < width)
    first = jnp.argmax(fits)
    sides = jnp.where(fits.any(), jnp.stack([heights[first], widths[first]]), 0)
    places = jnp.array([height, width]) - sides + 1
    return jnp.concatenate([jax.random.randint(position_key, (2,), 0, places), sides])
