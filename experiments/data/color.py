"""Random colour changes of one image, on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

# Luma coefficients of ITU-R BT.601.
_LUMA = (0.299, 0.587, 0.114)
# Principal components of ImageNet's pixels in [0, 1]: standard deviations, and directions as
# columns (Krizhevsky et al., 2012; values of fb.resnet.torch).
_DEVIATIONS = (0.2175, 0.0188, 0.0045)
_DIRECTIONS = (
    (-0.5675, 0.7192, 0.4009),
    (-0.5808, -0.0045, -0.8140),
    (-0.5836, -0.6948, 0.4203),
)


def jitter(pixels: Array, key: Array, strength: float) -> Array:
    """Changes brightness, contrast and, for colour images, saturation.

    Each factor is uniform in [max(0, 1 − s), 1 + s] with s = `strength`.

    Args:
      pixels: float32 [h, w, c] in [0, 1].
      key: Typed PRNG key.
      strength: Strength s of the changes.

    Returns:
      float32 [h, w, c] in [0, 1].
    """
    low, high = max(0.0, 1 - strength), 1 + strength
    brightness, contrast, saturation = jax.random.uniform(key, (3,), minval=low, maxval=high)
    pixels = jnp.clip(pixels * brightness, 0, 1)
    level = _grey(pixels).mean()
    pixels = jnp.clip(level + contrast * (pixels - level), 0, 1)
    if pixels.shape[-1] == 1:
        return pixels
    grey = _grey(pixels)
    return jnp.clip(grey + saturation * (pixels - grey), 0, 1)


def add_lighting(pixels: Array, key: Array, deviation: float) -> Array:
    """Adds one random colour to all pixels, along the principal components of ImageNet.

    The coordinate of each component is normal, with `deviation` times the standard deviation of
    ImageNet's pixels. The result is not clipped.

    Args:
      pixels: float32 [h, w, 3] in [0, 1].
      key: Typed PRNG key.
      deviation: Standard deviation relative to ImageNet's.

    Returns:
      float32 [h, w, 3].
    """
    amounts = deviation * jax.random.normal(key, (3,)) * jnp.asarray(_DEVIATIONS)
    return pixels + (jnp.asarray(_DIRECTIONS) * amounts).sum(1)


def _grey(pixels: Array) -> Array:
    """The greyscale image [h, w, 1] of [h, w, c]."""
    if pixels.shape[-1] == 1:
        return pixels
    return (pixels * jnp.asarray(_LUMA, pixels.dtype)).sum(-1, keepdims=True)
