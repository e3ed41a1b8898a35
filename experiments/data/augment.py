"""Augmentation on the device: uint8 images in, normalised float32 images out.

Every sample has its own key. The result depends neither on its position in the batch nor on the
device. Only mixup and CutMix concern the whole batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from experiments.config import DataConfig
from experiments.contracts import Photographs
from experiments.data.effects import (
    add_lighting,
    in_box,
    jitter,
    random_erasing,
    random_sides,
    trivial_augment,
)
from experiments.errors import ConfigError

jax.tree_util.register_dataclass(Photographs, ["pixels", "sizes"], [])


def check_data_options(config: DataConfig, channels: int) -> None:
    """Raises a `ConfigError` unless the options fit each other and the number of channels."""
    of_colors = {"color_jitter": (1, 3), "trivial_augment": (1, 3), "lighting": (3,)}
    for name, allowed in of_colors.items():
        if vars(config)[name] and channels not in allowed:
            needed = " or ".join(map(str, allowed))
            raise ConfigError(f"data.{name} needs {needed} channels, got {channels}")
    if config.mixed_labels == "larger" and not (config.mixup or config.cutmix):
        raise ConfigError("data.mixed_labels = larger needs data.mixup or data.cutmix")
    if config.resize and not config.image_size:
        raise ConfigError(f"data.resize = {config.resize} needs data.image_size")
    if 0 < config.resize < config.image_size:
        raise ConfigError(
            f"data.resize = {config.resize} must not be below data.image_size = {config.image_size}"
        )
    if config.crop_scale:
        for name in ("crop_scale", "crop_ratio"):
            given = vars(config)[name]
            if len(given) != 2 or given[0] > given[1]:
                raise ConfigError(f"data.{name} needs two numbers in ascending order, got {given}")
        if config.crop_scale[1] > 1:
            raise ConfigError(f"data.crop_scale must not be above 1, got {config.crop_scale}")
        if config.pad:
            raise ConfigError(f"data.crop_scale replaces data.pad = {config.pad}; set it to 0")
    for name in ("mean", "std"):
        given = vars(config)[name]
        if len(given) not in (1, channels):
            raise ConfigError(f"data.{name} needs one number, or one for each channel; got {given}")


def augment(images: Array | Photographs, keys: Array, config: DataConfig) -> Array:
    """Randomly crops, flips, changes and recolours every image, normalises it and erases a box.

    With `config.crop_scale`, a random crop is resized to the input size of the model. Otherwise the
    image is resized as for evaluation, padded, and cropped back at a random position. The padding
    is zero: a reflection would add strokes to characters and icons.

    Args:
      images: uint8 [n, h, w, c], or `Photographs`.
      keys: Typed PRNG keys [n], one per image.
      config: The options, checked by `check_data_options`.

    Returns:
      float32 [n, *seen_shape(image_shape, config)], with the image shape of the data set.
    """
    ranges: Any = {"scale": config.crop_scale, "ratio": config.crop_ratio}

    def one(image: Any, key: Array) -> Array:
        crop_key, flip_key, color_key = jax.random.split(key, 3)
        if config.crop_scale:
            image = random_resized_crop(image, crop_key, _output_size(image, config), **ranges)
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
    """Resizes, crops and normalises the images for evaluation; the rest is as in `augment`."""
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
    shorter = config.resize or size
    return resize_and_center_crop(image, shorter, size, to_square=config.resize_to_square)


def _standardize(pixels: Array, config: DataConfig) -> Array:
    mean = jnp.asarray(config.mean, jnp.float32)
    return (pixels - mean) / jnp.asarray(config.std, jnp.float32)


def _crop(image: Array, key: Array, pad: int) -> Array:
    """Pads [h, w, c] with zeros on every side, and crops [h, w, c] at a random position."""
    top, left = jax.random.randint(key, (2,), 0, 2 * pad + 1)
    padded = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)))
    return lax.dynamic_slice(padded, (top, left, jnp.zeros_like(top)), image.shape)


# --- Resizing and cropping of one image -----------------------------------------------------------

# Resizing is bilinear with antialiasing, as in Pillow's `Image.resize(..., Image.BILINEAR)`: an
# output pixel is a weighted mean of the input pixels around its position. The weights form a
# triangle that spans two pixels of the coarser grid. Pillow rounds uint8 images after each axis, so
# that its pixels differ by up to 1 of 255.
#
# `jax.image.scale_and_translate` does not fit random crops: near their border it also averages
# pixels outside.


def resize_and_center_crop(
    image: Array | Photographs, shorter: int, size: int, *, to_square: bool = False
) -> Array:
    """Resizes an image [h, w, c] to a given shorter side, and crops a square at the centre.

    The longer side is rounded down, or with `to_square` as long as the shorter one. The position of
    the square is rounded to the nearest pixel, with ties to even. The result is float32
    [size, size, c], in the range of the input; `shorter` is at least `size`.
    """
    height, width = _sides(image)

    def crop(side: ArrayLike) -> _Crop:
        resized = shorter if to_square else side * shorter // jnp.minimum(height, width)
        return _Crop(0, side, resized, jnp.round((resized - size) / 2))

    return _resample(image, crop(height), crop(width), (size, size))


def random_resized_crop(
    image: Array | Photographs,
    key: Array,
    size: tuple[int, int],
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Array:
    """Crops a random box, and resizes it to float32 [*size, c], in the range of the input.

    Pixels outside the box have no influence. The size of `Photographs` is square; `scale` and
    `ratio` are as in `random_box`.
    """
    height, width = _sides(image)
    top, left, box_height, box_width = random_box(key, height, width, scale=scale, ratio=ratio)
    rows, columns = _Crop(top, box_height, size[0]), _Crop(left, box_width, size[1])
    return _resample(image, rows, columns, size)


def random_box(
    key: Array,
    height: ArrayLike,
    width: ArrayLike,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Array:
    """Draws a box of an image as Inception and torchvision do.

    Of ten attempts, the first box that fits is placed uniformly. If none fits, the box is at the
    centre of the image, as large as the range of aspect ratios permits.

    `scale` is the range of the area of the box, relative to the image, and `ratio` that of its
    aspect ratio (width / height). The result is int32 [4]: top, left, height, width.
    """

    def fits(widths: Array, heights: Array) -> Array:
        return (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)

    box_width, box_height, found, position_key = random_sides(
        key, height * width, fits, scale=scale, ratio=ratio
    )
    sides = jnp.stack([box_height, box_width])
    top_left = jax.random.randint(position_key, (2,), 0, jnp.array([height, width]) - sides + 1)

    # At least one pixel: the aspect ratio may be impossible.
    fallback_width = jnp.clip(jnp.round(height * ratio[1]).astype(jnp.int32), 1, width)
    fallback_height = jnp.clip(jnp.round(width / ratio[0]).astype(jnp.int32), 1, height)
    place = [(height - fallback_height) // 2, (width - fallback_width) // 2]
    fallback = jnp.array([*place, fallback_height, fallback_width], jnp.int32)
    return jnp.where(found, jnp.concatenate([top_left, sides]), fallback)


class _Crop(NamedTuple):
    """Along one axis: a box of the image, which is resized, and the first pixel that is kept."""

    start: ArrayLike
    """First input pixel of the box."""
    length: ArrayLike
    """Input pixels of the box."""
    resized: ArrayLike
    """Pixels that the box is resized to."""
    first: ArrayLike = 0
    """The first of them that is an output pixel."""


def _sides(image: Array | Photographs) -> tuple[Any, Any]:
    """Height and width."""
    if isinstance(image, Photographs):
        return image.sizes[0], image.sizes[1]
    return image.shape[0], image.shape[1]


def _resample(
    image: Array | Photographs, rows: _Crop, columns: _Crop, size: tuple[int, int]
) -> Array:
    """The output pixels along both axes of an image; those of a transposed one are exchanged."""
    if not isinstance(image, Photographs):
        return _interpolate(image, rows, columns, size)
    transposed = image.sizes[0] > image.sizes[1]
    first, second = (
        jax.tree.map(lambda own, other: jnp.where(transposed, other, own), *crops)
        for crops in ((rows, columns), (columns, rows))
    )
    result = _interpolate(image.pixels, first, second, size)
    return jnp.where(transposed, result.swapaxes(0, 1), result)


def _interpolation_weights(side: int, crop: _Crop, size: int) -> Array:
    """The weights of the input pixels in each output pixel along one axis: float32 [size, side].

    Rows sum to one, and columns outside the box are zero.
    """
    length = jnp.asarray(crop.length, jnp.float32)
    start = jnp.asarray(crop.start, jnp.float32)
    step = length / crop.resized
    centers = start + (crop.first + jnp.arange(size) + 0.5) * step
    pixels = jnp.arange(side) + 0.5
    distance = jnp.abs(pixels - centers[:, None]) / jnp.maximum(step, 1.0)
    in_box = (pixels > start) & (pixels < start + length)
    weights = jnp.where(in_box, jnp.maximum(1.0 - distance, 0.0), 0.0)
    return weights / weights.sum(1, keepdims=True)


def _interpolate(image: Array, rows: _Crop, columns: _Crop, size: tuple[int, int]) -> Array:
    # The highest precision: accelerators round the factors by default.
    return jnp.einsum(
        "ih,jw,hwc->ijc",
        _interpolation_weights(image.shape[0], rows, size[0]),
        _interpolation_weights(image.shape[1], columns, size[1]),
        image.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
        optimize="optimal",
    )


# --- Two samples in one image ---------------------------------------------------------------------


class MixedBatch(NamedTuple):
    """Mixed images with both of their labels, for losses of two labels."""

    images: Array
    """Float [n, ...]."""
    labels: Array
    """Integers [n] or [n, C], the labels with the larger share."""
    other_labels: Array
    """The labels with the smaller share, as `labels`."""
    share: Array
    """float32 [] in [0.5, 1], the share of `labels`."""


def mix_batch(
    images: Array, labels: Array, key: Array, config: DataConfig, *, axis_name: str | None
) -> MixedBatch:
    """Mixes a batch by mixup or CutMix; where both are set, by one of them at random.

    Sample i of the global batch has the partner n − 1 − i, whatever the number of devices; it is
    random if the order of the batch is. The whole batch has one share λ ~ Beta(β, β), and one box,
    as in the papers' code: they depend on `key` alone. The loss of a mixed batch is
    λ·ℓ(x, y) + (1 − λ)·ℓ(x, y'), where y' is the label of the partner.

    Images are floats [n, h, w, c], after all other augmentations; labels are [n] or [n, C]. The key
    is the same on all devices of the axis.
    """
    partners = _opposite(images, axis_name), _opposite(labels, axis_name)
    if not config.cutmix:
        return mixup(images, labels, partners, key, config.mixup)
    by_cutmix = cutmix(images, labels, partners, jax.random.fold_in(key, 1), config.cutmix)
    if not config.mixup:
        return by_cutmix
    by_mixup = mixup(images, labels, partners, key, config.mixup)
    first = jax.random.bernoulli(jax.random.fold_in(key, 2))
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), by_mixup, by_cutmix)


def mixup(
    images: Array, labels: Array, partners: tuple[Array, Array], key: Array, beta: float
) -> MixedBatch:
    """Adds the partners' images (Zhang et al., ICLR 2018); a sample's own share is the larger."""
    others, other_labels = partners
    # The distribution is symmetric.
    share = jax.random.beta(key, beta, beta, dtype=jnp.float32)
    share = jnp.maximum(share, 1 - share)
    return MixedBatch(share * images + (1 - share) * others, labels, other_labels, share)


def cutmix(
    images: Array, labels: Array, partners: tuple[Array, Array], key: Array, beta: float
) -> MixedBatch:
    """Replaces a box by that of the partners' images (Yun et al., ICCV 2019)."""
    others, other_labels = partners
    height, width = images.shape[1:3]
    box = top, left, bottom, right = cutmix_box(key, beta, height, width)
    area = (bottom - top) * (right - left)
    share = 1 - area.astype(jnp.float32) / (height * width)
    larger = share >= 0.5
    return MixedBatch(
        jnp.where(in_box(box, height, width), others, images),
        jnp.where(larger, labels, other_labels),
        jnp.where(larger, other_labels, labels),
        jnp.maximum(share, 1 - share),
    )


def cutmix_box(key: Array, beta: float, height: int, width: int) -> Array:
    """Draws the box of CutMix: its area is 1 − λ of the image, λ ~ Beta(β, β).

    The centre is uniform over the pixels, and the half sides are rounded down. What is outside the
    image is cut off, so that the box may be smaller, or empty.

    Returns:
      int32 [4]: top, left, bottom, right, the last two exclusive.
    """
    weight_key, center_key = jax.random.split(key)
    share = jax.random.beta(weight_key, beta, beta, dtype=jnp.float32)
    sides = jnp.array([height, width])
    center = jax.random.randint(center_key, (2,), 0, sides)
    halves = (0.5 * jnp.sqrt(1 - share) * sides).astype(jnp.int32)
    corners = jnp.maximum(center - halves, 0), jnp.minimum(center + halves, sides)
    return jnp.concatenate(corners).astype(jnp.int32)


def _opposite(x: Array, axis_name: str | None) -> Array:
    """The global batch in reversed order."""
    if axis_name is None:
        return x[::-1]
    last = lax.axis_size(axis_name) - 1
    return lax.ppermute(x[::-1], axis_name, [(i, last - i) for i in range(last + 1)])
