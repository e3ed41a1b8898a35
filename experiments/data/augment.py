"""Augmentation on the device: uint8 images in, normalised float32 images out.

Every sample has its own key. The result depends neither on its position in the batch nor on the
device. Only mixup concerns the whole batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from experiments.core.config import DataConfig
from experiments.core.errors import ConfigError
from experiments.core.protocol import Photographs

jax.tree_util.register_dataclass(Photographs, ["pixels", "sizes"], [])

_ATTEMPTS = 10
"""Boxes that are drawn until one fits, as in torchvision."""

_CROP_RATIO = (3 / 4, 4 / 3)
"""Smallest and largest width / height of a random resized crop, as in torchvision."""


def sample_keys(key: Array, step: Array, num_samples: int, axis_name: str | None) -> Array:
    """A key for every sample, from the step and its position in the global batch."""
    positions = jnp.arange(num_samples)
    if axis_name is not None:
        positions = positions + lax.axis_index(axis_name) * num_samples
    step_key = jax.random.fold_in(key, step)
    return jax.vmap(partial(jax.random.fold_in, step_key))(positions)


def check_augmentation(config: DataConfig, channels: int) -> None:
    """Raises a `ConfigError` unless the options fit each other and the number of channels."""
    for name, allowed in {"color_jitter": (1, 3), "lighting": (3,)}.items():
        if vars(config)[name] and channels not in allowed:
            needed = " or ".join(map(str, allowed))
            raise ConfigError(f"data.{name} needs {needed} channels, got {channels}")
    if config.mixed_labels == "larger" and not config.mixup:
        raise ConfigError("data.mixed_labels = larger needs data.mixup")
    if config.resize and not 0 < config.image_size <= config.resize:
        raise ConfigError(
            f"data.resize = {config.resize} must not be below data.image_size = "
            f"{config.image_size}, which must be set"
        )
    if config.crop_scale:
        given = config.crop_scale
        if len(given) != 2 or given[0] > given[1]:
            raise ConfigError(f"data.crop_scale needs two numbers in ascending order, got {given}")
        if config.pad:
            raise ConfigError(f"data.crop_scale replaces data.pad = {config.pad}; set it to 0")
    for name in ("mean", "std"):
        given = vars(config)[name]
        if len(given) not in (0, 1, channels):
            raise ConfigError(f"data.{name} needs one number, or one for each channel; got {given}")


def describe_augmentation(config: DataConfig) -> str:
    """The augmentations that are on, in words."""
    crops = " to ".join(f"{100 * share:g}" for share in config.crop_scale)
    words = {
        f"crops of {crops} % of the area": config.crop_scale,
        f"shifts by up to {config.pad} pixels": config.pad,
        "mirror images (--data.no-flip for none)": config.flip,
    }
    strengths = "color_jitter", "lighting", "mixup"
    words |= {f"{n.replace('_', ' ')} {vars(config)[n]:g}": vars(config)[n] for n in strengths}
    return ", ".join(word for word, is_on in words.items() if is_on) or "none"


def augment(images: Array | Photographs, keys: Array, config: DataConfig) -> Array:
    """Randomly crops, flips and recolours every image, and normalises it.

    With `config.crop_scale`, a random crop is resized to the input size of the model. Otherwise the
    image is resized as for evaluation, padded, and cropped back at a random position. The padding
    is zero: a reflection would add strokes to characters and icons.

    Images are uint8 [n, h, w, c], or `Photographs`, with typed PRNG keys [n]; the result is float32
    [n, *seen_shape(image_shape, config)], with the image shape of the data set.
    """

    def one(image: Any, key: Array) -> Array:
        crop_key, flip_key, color_key = jax.random.split(key, 3)
        if config.crop_scale:
            height, width = (config.image_size or side for side in image.shape[:2])
            size = (height, height) if isinstance(image, Photographs) else (height, width)
            image = random_resized_crop(
                image, crop_key, size, scale=config.crop_scale, ratio=_CROP_RATIO
            )
        else:
            image = _resized(image, config)
        if config.pad > 0:
            pad, shape = config.pad, image.shape
            top, left = jax.random.randint(crop_key, (2,), 0, 2 * pad + 1)
            image = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)))
            image = lax.dynamic_slice(image, (top, left, jnp.zeros_like(top)), shape)
        if config.flip:
            image = jnp.where(jax.random.bernoulli(flip_key), image[:, ::-1], image)
        pixels = image.astype(jnp.float32) / 255
        if config.color_jitter > 0:
            pixels = _jitter(pixels, color_key, config.color_jitter)
        if config.lighting > 0:  # With a key of its own: it changes no other random numbers.
            pixels = _add_lighting(pixels, jax.random.fold_in(color_key, 1), config.lighting)
        return _standardize(pixels, config)

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
    return (config.image_size or height, config.image_size or width, channels)


def _resized(image: Array | Photographs, config: DataConfig) -> Array:
    if not config.image_size and not isinstance(image, Photographs):
        return image
    size = config.image_size or image.shape[0]
    shorter = config.resize or size
    return resize_and_center_crop(image, shorter, size, to_square=config.resize_to_square)


def _standardize(pixels: Array, config: DataConfig) -> Array:
    mean, std = (jnp.asarray(value or 0.5, jnp.float32) for value in (config.mean, config.std))
    return (pixels - mean) / std


# --- Resizing and cropping of one image -----------------------------------------------------------

# Resizing is bilinear with antialiasing, as in Pillow's `Image.resize(..., Image.BILINEAR)`: the
# weights of input pixels are a triangle that spans two pixels of the coarser grid. Pillow rounds
# uint8 images after each axis, so that its pixels differ by up to 1 of 255. Near the border of a
# random crop, `jax.image.scale_and_translate` would also average pixels outside.


def resize_and_center_crop(
    image: Array | Photographs, shorter: int, size: int, *, to_square: bool = False
) -> Array:
    """Resizes an image to a shorter side of at least `size`, crops float32 [size, size, c].

    The longer side is rounded down, or with `to_square` as long as the shorter one. The square is
    at the centre, rounded to the nearest pixel, with ties to even.
    """
    height, width = _sides(image)

    def crop(side: ArrayLike) -> _Crop:
        resized = shorter if to_square else side * shorter // jnp.minimum(height, width)
        return _Crop(0, side, resized, jnp.round((resized - size) / 2))

    return _resample(image, (crop(height), crop(width)), (size, size))


def random_resized_crop(
    image: Array | Photographs,
    key: Array,
    size: tuple[int, int],
    *,
    scale: tuple[float, ...],
    ratio: tuple[float, float],
) -> Array:
    """Crops a `random_box`, and resizes it to float32 [*size, c]; a square one of `Photographs`.

    Pixels outside the box have no influence.
    """
    height, width = _sides(image)
    top, left, box_height, box_width = random_box(key, height, width, scale=scale, ratio=ratio)
    crops = _Crop(top, box_height, size[0]), _Crop(left, box_width, size[1])
    return _resample(image, crops, size)


def random_box(
    key: Array,
    height: ArrayLike,
    width: ArrayLike,
    *,
    scale: tuple[float, ...],
    ratio: tuple[float, float],
) -> Array:
    """Draws a box as Inception and torchvision do: top, left, height and width, int32 [4].

    It is the first of ten random boxes that fits into the image: the area relative to the image is
    uniform in the range `scale`, the logarithm of width / height in that of `ratio`, and so is the
    place. If none fits, the box is at the centre, as large as the range of `ratio` permits.
    """
    whole = jnp.array([height, width])
    area_key, ratio_key, position_key = jax.random.split(key, 3)
    areas = jax.random.uniform(area_key, (_ATTEMPTS,), minval=scale[0], maxval=scale[1])
    areas *= whole.prod()
    low, high = jnp.log(jnp.asarray(ratio, jnp.float32))
    ratios = jnp.exp(jax.random.uniform(ratio_key, (_ATTEMPTS,), minval=low, maxval=high))
    sides = jnp.stack([jnp.sqrt(areas / ratios), jnp.sqrt(areas * ratios)], axis=1)
    sides = jnp.round(sides).astype(jnp.int32)
    fits = ((sides > 0) & (sides <= whole)).all(1)
    first = sides[jnp.argmax(fits)]
    top_left = jax.random.randint(position_key, (2,), 0, whole - first + 1)
    # At least one pixel: the aspect ratio may be impossible.
    most = jnp.round(jnp.array([width / ratio[0], height * ratio[1]])).astype(jnp.int32)
    most = jnp.clip(most, 1, whole)
    centred = jnp.concatenate([(whole - most) // 2, most])
    return jnp.where(fits.any(), jnp.concatenate([top_left, first]), centred)


class _Crop(NamedTuple):
    """Along one axis, a box of input pixels, resized, and the first of these that is an output."""

    start: ArrayLike
    length: ArrayLike
    resized: ArrayLike
    first: ArrayLike = 0


def _sides(image: Array | Photographs) -> tuple[Any, Any]:
    """Height and width."""
    if isinstance(image, Photographs):
        return image.sizes[0], image.sizes[1]
    return image.shape[0], image.shape[1]


def _resample(
    image: Array | Photographs, crops: tuple[_Crop, _Crop], size: tuple[int, int]
) -> Array:
    """The output pixels along both axes of an image; those of a transposed one are exchanged."""
    if not isinstance(image, Photographs):
        return _interpolate(image, crops, size)
    transposed = image.sizes[0] > image.sizes[1]
    choose = partial(jax.tree.map, partial(jnp.where, transposed))
    result = _interpolate(image.pixels, choose(crops[::-1], crops), size)
    return choose(result.swapaxes(0, 1), result)


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
    inside = (pixels > start) & (pixels < start + length)
    weights = jnp.where(inside, jnp.maximum(1.0 - distance, 0.0), 0.0)
    return weights / weights.sum(1, keepdims=True)


def _interpolate(image: Array, crops: tuple[_Crop, _Crop], size: tuple[int, int]) -> Array:
    rows, columns = map(_interpolation_weights, image.shape[:2], crops, size)
    # The highest precision: accelerators round the factors by default.
    return jnp.einsum(
        "ih,jw,hwc->ijc",
        rows,
        columns,
        image.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
        optimize="optimal",
    )


# --- Colours --------------------------------------------------------------------------------------

# Luma coefficients of ITU-R BT.601.
_LUMA = (0.299, 0.587, 0.114)
# Principal components of ImageNet's pixels in [0, 1]: standard deviations, and directions as
# columns (Krizhevsky et al., 2012; values of fb.resnet.torch).
_DEVIATIONS = (0.2175, 0.0188, 0.0045)
_DIRECTIONS = ((-0.5675, 0.7192, 0.4009), (-0.5808, -0.0045, -0.8140), (-0.5836, -0.6948, 0.4203))


def _jitter(pixels: Array, key: Array, strength: float) -> Array:
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


def _luma(pixels: Array) -> Array:
    """The greyscale image [h, w, 1] of [h, w, c]."""
    if pixels.shape[-1] == 1:
        return pixels
    return (pixels * jnp.asarray(_LUMA, pixels.dtype)).sum(-1, keepdims=True)


def _add_lighting(pixels: Array, key: Array, deviation: float) -> Array:
    """Adds one random colour to all pixels [h, w, 3], along the principal components of ImageNet.

    The coordinate of each component is normal, with `deviation` times the standard deviation of
    ImageNet's pixels. The result is not clipped.
    """
    amounts = deviation * jax.random.normal(key, (3,)) * jnp.asarray(_DEVIATIONS)
    return pixels + (jnp.asarray(_DIRECTIONS) * amounts).sum(1)


# --- Two samples in one image ---------------------------------------------------------------------


class MixedBatch(NamedTuple):
    """Mixed images with both of their labels; `share` in [0.5, 1] is that of `labels`."""

    images: Array
    labels: Array
    other_labels: Array
    share: Array


def mix_batch(
    images: Array, labels: Array, key: Array, beta: float, *, axis_name: str | None
) -> MixedBatch:
    """Adds to each image of a batch that of a partner (mixup, Zhang et al., ICLR 2018).

    Sample i of the global batch has the partner n − 1 − i, whatever the number of devices; it is
    random if the order of the batch is. The whole batch has one share λ ~ Beta(β, β), as in the
    paper's code: it depends on `key`, the same on all devices, alone. The larger of λ and 1 − λ is
    that of the sample itself. The loss of a mixed batch is λ·ℓ(x, y) + (1 − λ)·ℓ(x, y'), where y'
    is the label of the partner. Images are floats [n, h, w, c], after all other augmentations;
    labels are [n] or [n, C].
    """

    def opposite(x: Array) -> Array:
        """The global batch in reversed order."""
        if axis_name is None:
            return x[::-1]
        last = lax.axis_size(axis_name) - 1
        return lax.ppermute(x[::-1], axis_name, [(i, last - i) for i in range(last + 1)])

    # The distribution is symmetric.
    share = jax.random.beta(key, beta, beta, dtype=jnp.float32)
    share = jnp.maximum(share, 1 - share)
    mixed = share * images + (1 - share) * opposite(images)
    return MixedBatch(mixed, labels, opposite(labels), share)
