"""Augmentation on the device: uint8 images in, normalised float32 images out.

Each sample is changed by its own key alone, so that the result does not depend on its place in the
batch nor on the device that holds it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from experiments.config import DataConfig
from experiments.data.color import jitter, light
from experiments.data.resize import random_resized_crop, resize_and_center_crop
from experiments.errors import ConfigError


def augment(images: Array, keys: Array, config: DataConfig) -> Array:
    """Crop, mirror, jitter and light every image at random, then normalise.

    With `config.crop_scale`, a random part is stretched to the size that the model sees. Otherwise
    the image is brought to that size as for evaluation, padded and cropped back. The border is
    padded with zeros, not reflected: zero is the background of drawn characters and icons, where a
    reflection would add strokes, and photographs are usually padded so as well.

    Args:
        images: uint8 [n, h, w, c].
        keys: Typed PRNG keys [n], one for each image.
        config: Sizes, crops, mirroring, strength of jitter and lighting, mean and standard
            deviation.

    Returns:
        float32 [n, *seen_shape((h, w, c), config)].

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
        if config.crop_scale:
            size = seen_shape(image.shape, config)[:2]
            (smallest, largest), (narrowest, widest) = config.crop_scale, config.crop_ratio
            image = random_resized_crop(
                *(image, crop_key, size), scale=(smallest, largest), ratio=(narrowest, widest)
            )
        else:
            image = _resized(image, config)
        if config.pad > 0:
            image = _crop(image, crop_key, config.pad)
        if config.flip:
            image = jnp.where(jax.random.bernoulli(flip_key), image[:, ::-1], image)
        pixels = image.astype(jnp.float32) / 255
        if config.color_jitter > 0:
            pixels = jitter(pixels, color_key, config.color_jitter)
        if config.lighting > 0:
            # A key of its own that leaves the other three as they are without lighting.
            pixels = light(pixels, jax.random.fold_in(color_key, 1), config.lighting)
        return _standardize(pixels, config)

    return jax.vmap(one)(images, keys)


def normalize(images: Array, config: DataConfig) -> Array:
    """Cut the middle out, scale to [0, 1], subtract the mean, divide by the standard deviation.

    Args:
        images: uint8 [n, h, w, c].
        config: Sizes; mean and standard deviation, one number or one a channel.

    Returns:
        float32 [n, *seen_shape((h, w, c), config)].

    Raises:
        ValueError: If shapes, types or settings do not fit together.
    """
    _check_images(images, config)
    if config.image_size:
        images = jax.vmap(lambda image: _resized(image, config))(images)
    return _standardize(images.astype(jnp.float32) / 255, config)


def seen_shape(stored: tuple[int, ...], config: DataConfig) -> tuple[int, int, int]:
    """Height, width and channels of the images that a model sees, from those of stored ones."""
    height, width, channels = stored
    size = config.image_size
    return (size, size, channels) if size else (height, width, channels)


def _resized(image: Array, config: DataConfig) -> Array:
    if not config.image_size:
        return image
    return resize_and_center_crop(image, config.resize or config.image_size, config.image_size)


def _check_images(images: Array, config: DataConfig) -> None:
    if images.ndim != 4 or images.dtype != jnp.uint8:
        raise ValueError(
            f"images must be uint8 [n, h, w, c], got {images.dtype} {list(images.shape)}"
        )
    check_settings(config, images.shape[-1])


def check_settings(config: DataConfig, channels: int) -> None:
    """Raises a `ConfigError` unless the settings suit images of so many channels."""
    for name in ("pad", "color_jitter", "lighting"):
        if getattr(config, name) < 0:
            raise ConfigError(f"data.{name} must not be negative, got {getattr(config, name)}")
    if config.color_jitter > 0 and channels not in (1, 3):
        raise ConfigError(f"color_jitter needs 1 or 3 channels, got {channels}")
    if config.lighting > 0 and channels != 3:
        raise ConfigError(f"lighting needs 3 channels, got {channels}")
    if config.resize and not config.image_size:
        raise ConfigError(f"data.resize = {config.resize} needs data.image_size")
    if 0 < config.resize < config.image_size:
        raise ConfigError(
            f"data.resize = {config.resize} must not be below data.image_size = {config.image_size}"
        )
    if config.crop_scale:
        _check_crop(config)
    for name, numbers in (("mean", config.mean), ("std", config.std)):
        if len(numbers) not in (1, channels):
            raise ConfigError(
                f"data.{name} needs one number or one for each of {channels} channels, "
                f"got {numbers}"
            )
    if min(config.std) <= 0:
        raise ConfigError(f"data.std must be positive, got {config.std}")


def _check_crop(config: DataConfig) -> None:
    for name, numbers in (("crop_scale", config.crop_scale), ("crop_ratio", config.crop_ratio)):
        if len(numbers) != 2 or not 0 < numbers[0] <= numbers[1]:
            raise ConfigError(f"data.{name} needs two positive numbers in order, got {numbers}")
    if config.crop_scale[1] > 1:
        raise ConfigError(f"data.crop_scale must not be above 1, got {config.crop_scale}")
    if config.pad > 0:
        raise ConfigError(
            f"data.crop_scale takes the place of data.pad, which must be 0, got {config.pad}"
        )


def _standardize(pixels: Array, config: DataConfig) -> Array:
    mean = jnp.asarray(config.mean, jnp.float32)
    return (pixels - mean) / jnp.asarray(config.std, jnp.float32)


def _crop(image: Array, key: Array, pad: int) -> Array:
    """Pad [h, w, c] with zeros on every side, and cut [h, w, c] out at a random place."""
    top, left = jax.random.randint(key, (2,), 0, 2 * pad + 1)
    padded = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)))
    return lax.dynamic_slice(padded, (top, left, jnp.zeros_like(top)), image.shape)
