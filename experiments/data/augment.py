"""Augmentation on the device: uint8 images in, normalised float32 images out.

Every sample has its own key. The result depends neither on its position in the batch nor on the
device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from experiments.config import DataConfig
from experiments.contracts import Photographs
from experiments.data.color import add_lighting, jitter
from experiments.data.erasing import random_erasing
from experiments.data.resize import random_resized_crop, resize_and_center_crop
from experiments.data.trivial_augment import trivial_augment
from experiments.errors import ConfigError


def augment(images: Array | Photographs, keys: Array, config: DataConfig) -> Array:
    """Randomly crops, flips, changes and recolours every image, normalises it and erases a box.

    With `config.crop_scale`, a random crop is resized to the input size of the model. Otherwise the
    image is resized as for evaluation, padded, and cropped back at a random position. The padding
    is zero, not a reflection: zero is the background of characters and icons, where a reflection
    would add strokes, and it is also common for photographs.

    Args:
      images: uint8 [n, h, w, c], or `Photographs`.
      keys: Typed PRNG keys [n], one per image.
      config: The options for sizes, crops, flips, TrivialAugment, colours, normalisation and
        erasing.

    Returns:
      float32 [n, *seen_shape(image_shape, config)], with the image shape of the data set.

    Raises:
      ValueError: Shapes, types or options are inconsistent.
    """
    _check_images(images, config)
    if keys.shape != images.shape[:1]:
        raise ValueError(
            f"augment needs keys of shape {images.shape[:1]}, one per image; got {keys.shape}"
        )

    def one(image: Any, key: Array) -> Array:
        crop_key, flip_key, color_key = jax.random.split(key, 3)
        if config.crop_scale:
            (smallest, largest), (narrowest, widest) = config.crop_scale, config.crop_ratio
            image = random_resized_crop(
                image,
                crop_key,
                _output_size(image, config),
                scale=(smallest, largest),
                ratio=(narrowest, widest),
            )
        else:
            image = _resized(image, config)
        if config.pad > 0:
            image = _crop(image, crop_key, config.pad)
        if config.flip:
            image = jnp.where(jax.random.bernoulli(flip_key), image[:, ::-1], image)
        # Later options take keys of their own, so that they do not change other random numbers.
        if config.trivial_augment:
            image = jnp.round(image.astype(jnp.float32))
            image = trivial_augment(image, jax.random.fold_in(color_key, 2))
        pixels = image.astype(jnp.float32) / 255
        if config.color_jitter > 0:
            pixels = jitter(pixels, color_key, config.color_jitter)
        if config.lighting > 0:
            pixels = add_lighting(pixels, jax.random.fold_in(color_key, 1), config.lighting)
        pixels = _standardize(pixels, config)
        if config.erasing > 0:
            pixels = random_erasing(pixels, jax.random.fold_in(color_key, 3), config.erasing)
        return pixels

    return jax.vmap(one)(images, keys)


def normalize(images: Array | Photographs, config: DataConfig) -> Array:
    """Resizes and crops the images for evaluation, and normalises them.

    Pixels are scaled to [0, 1] and standardised with `config.mean` and `config.std`.

    Args:
      images: uint8 [n, h, w, c], or `Photographs`.
      config: The options for sizes and normalisation.

    Returns:
      float32 [n, *seen_shape(image_shape, config)], with the image shape of the data set.

    Raises:
      ValueError: Shapes, types or options are inconsistent.
    """
    _check_images(images, config)
    return _standardize(center_crops(images, config).astype(jnp.float32) / 255, config)


def center_crops(images: Array | Photographs, config: DataConfig) -> Array:
    """The images as evaluation crops them, without normalisation: [n, h, w, c], from 0 to 255."""
    return jax.vmap(lambda image: _resized(image, config))(images)


def seen_shape(stored: tuple[int, ...], config: DataConfig) -> tuple[int, int, int]:
    """The input shape of the model (height, width, channels), from that of the data set."""
    height, width, channels = stored
    size = config.image_size
    return (size, size, channels) if size else (height, width, channels)


def _output_size(image: Array | Photographs, config: DataConfig) -> tuple[int, int]:
    """Height and width of what the model receives."""
    if config.image_size:
        return config.image_size, config.image_size
    height, width = image.shape[:2]
    return height, height if isinstance(image, Photographs) else width


def _resized(image: Array | Photographs, config: DataConfig) -> Array:
    if not config.image_size and not isinstance(image, Photographs):
        return image
    size, _ = _output_size(image, config)
    return resize_and_center_crop(
        image, config.resize or size, size, to_square=config.resize_to_square
    )


def _check_images(images: Array | Photographs, config: DataConfig) -> None:
    if len(images.shape) != 4 or images.dtype != jnp.uint8:
        raise ValueError(
            f"images must be uint8 [n, h, w, c], got {images.dtype} {list(images.shape)}"
        )
    check_settings(config, images.shape[-1])


def check_settings(config: DataConfig, channels: int) -> None:
    """Raises a `ConfigError` unless the options fit each other and the number of channels."""
    if config.color_jitter > 0 and channels not in (1, 3):
        raise ConfigError(f"color_jitter needs 1 or 3 channels, got {channels}")
    if config.trivial_augment and channels not in (1, 3):
        raise ConfigError(f"data.trivial_augment needs 1 or 3 channels, got {channels}")
    if config.mixed_labels == "larger" and not (config.mixup or config.cutmix):
        raise ConfigError("data.mixed_labels = larger needs data.mixup or data.cutmix")
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
                f"data.{name} needs one number, or one for each of {channels} channels; "
                f"got {numbers}"
            )


def _check_crop(config: DataConfig) -> None:
    for name, numbers in (("crop_scale", config.crop_scale), ("crop_ratio", config.crop_ratio)):
        if len(numbers) != 2 or numbers[0] > numbers[1]:
            raise ConfigError(f"data.{name} needs two numbers in ascending order, got {numbers}")
    if config.crop_scale[1] > 1:
        raise ConfigError(f"data.crop_scale must not be above 1, got {config.crop_scale}")
    if config.pad > 0:
        raise ConfigError(f"data.crop_scale replaces data.pad, which must be 0, got {config.pad}")


def _standardize(pixels: Array, config: DataConfig) -> Array:
    mean = jnp.asarray(config.mean, jnp.float32)
    return (pixels - mean) / jnp.asarray(config.std, jnp.float32)


def _crop(image: Array, key: Array, pad: int) -> Array:
    """Pads [h, w, c] with zeros on every side, and crops [h, w, c] at a random position."""
    top, left = jax.random.randint(key, (2,), 0, 2 * pad + 1)
    padded = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)))
    return lax.dynamic_slice(padded, (top, left, jnp.zeros_like(top)), image.shape)
