"""Augmentation on the device: uint8 images in, normalised float32 images out.

Each sample is changed by its own key alone, so that the result does not depend on its place in the
batch nor on the device that holds it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from experiments.config import DataConfig
from experiments.errors import ConfigError

# ITU-R BT.601, the weights of a grey image.
_LUMA = (0.299, 0.587, 0.114)


def augment(images: Array, keys: Array, config: DataConfig) -> Array:
    """Crop, mirror and jitter every image at random, then normalise.

    The border is padded with zeros, not reflected: zero is the background of drawn characters and
    icons, where a reflection would add strokes, and photographs are usually padded so as well.
    Brightness, contrast and saturation are multiplied by factors uniform in
    [max(0, 1 − s), 1 + s], s = `config.color_jitter`; a grey image has no saturation.

    Args:
        images: uint8 [n, h, w, c].
        keys: Typed PRNG keys [n], one for each image.
        config: Padding, mirroring, strength of the jitter, mean and standard deviation.

    Returns:
        float32 [n, h, w, c].

    Raises:
        ValueError: If shapes, types or settings do not fit together.
    """
    _check_images(images, config)
    if keys.shape != images.shape[:1]:
        raise ValueError(
            f"augment needs keys of shape {images.shape[:1]}, one per image; got {keys.shape}"
        )

    def one(image: Array, key: Array) -> Array:
        crop_key, flip_key, color_key = jax.random.split(key, 3)
        if config.pad > 0:
            image = _crop(image, crop_key, config.pad)
        if config.flip:
            image = jnp.where(jax.random.bernoulli(flip_key), image[:, ::-1], image)
        pixels = image.astype(jnp.float32) / 255
        if config.color_jitter > 0:
            pixels = _jitter(pixels, color_key, config.color_jitter)
        return _standardize(pixels, config)

    return jax.vmap(one)(images, keys)


def normalize(images: Array, config: DataConfig) -> Array:
    """Scale pixels to [0, 1], subtract the mean and divide by the standard deviation.

    Args:
        images: uint8 [n, h, w, c].
        config: Mean and standard deviation, one number or one a channel.

    Returns:
        float32 [n, h, w, c].

    Raises:
        ValueError: If shapes, types or settings do not fit together.
    """
    _check_images(images, config)
    return _standardize(images.astype(jnp.float32) / 255, config)


def _check_images(images: Array, config: DataConfig) -> None:
    if images.ndim != 4 or images.dtype != jnp.uint8:
        raise ValueError(
            f"images must be uint8 [n, h, w, c], got {images.dtype} {list(images.shape)}"
        )
    check_settings(config, images.shape[-1])


def check_settings(config: DataConfig, channels: int) -> None:
    """Raises a `ConfigError` unless the settings suit images of so many channels."""
    if config.pad < 0 or config.color_jitter < 0:
        raise ConfigError(
            f"pad and color_jitter must not be negative, got {config.pad}, {config.color_jitter}"
        )
    if config.color_jitter > 0 and channels not in (1, 3):
        raise ConfigError(f"color_jitter needs 1 or 3 channels, got {channels}")
    for name, numbers in (("mean", config.mean), ("std", config.std)):
        if len(numbers) not in (1, channels):
            raise ConfigError(
                f"data.{name} needs one number or one for each of {channels} channels, "
                f"got {numbers}"
            )
    if min(config.std) <= 0:
        raise ConfigError(f"data.std must be positive, got {config.std}")


def _standardize(pixels: Array, config: DataConfig) -> Array:
    mean = jnp.asarray(config.mean, jnp.float32)
    return (pixels - mean) / jnp.asarray(config.std, jnp.float32)


def _crop(image: Array, key: Array, pad: int) -> Array:
    """Pad [h, w, c] with zeros on every side, and cut [h, w, c] out at a random place."""
    top, left = jax.random.randint(key, (2,), 0, 2 * pad + 1)
    padded = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)))
    return lax.dynamic_slice(padded, (top, left, jnp.zeros_like(top)), image.shape)


def _jitter(pixels: Array, key: Array, strength: float) -> Array:
    """Brightness, contrast and, of colours, saturation of [h, w, c] in [0, 1]."""
    low, high = max(0.0, 1 - strength), 1 + strength
    brightness, contrast, saturation = jax.random.uniform(key, (3,), minval=low, maxval=high)
    pixels = jnp.clip(pixels * brightness, 0, 1)
    level = _grey(pixels).mean()
    pixels = jnp.clip(level + contrast * (pixels - level), 0, 1)
    if pixels.shape[-1] == 1:
        return pixels
    grey = _grey(pixels)
    return jnp.clip(grey + saturation * (pixels - grey), 0, 1)


def _grey(pixels: Array) -> Array:
    """The grey image [h, w, 1] of [h, w, c]."""
    if pixels.shape[-1] == 1:
        return pixels
    return (pixels * jnp.asarray(_LUMA, pixels.dtype)).sum(-1, keepdims=True)
