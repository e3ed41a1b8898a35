"""Augmentation: what each setting does to the pixels, against Pillow and torchvision."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from experiments.core.config import DataConfig
from experiments.core.errors import ConfigError
from experiments.core.protocol import Photographs
from experiments.data import augment as module
from experiments.data.augment import (
    check_augmentation,
    describe_augmentation,
    mix_batch,
    random_box,
    random_resized_crop,
    resize_and_center_crop,
    seen_shape,
)
from tests.tolerances import FLOAT32

# Compiled as a whole: compiling one operation after the other takes several times as long.
augment = jax.jit(module.augment, static_argnames="config")
normalize = jax.jit(module.normalize, static_argnames="config")

PLAIN = DataConfig(mean=(0.0,), std=(1.0,), pad=0, flip=False, color_jitter=0.0)


def images_of(n, shape=(9, 12, 3), low=1, high=256, seed=0):
    pixels = np.random.default_rng(seed).integers(low, high, (n, *shape))
    return jnp.asarray(pixels, jnp.uint8)


def keys_of(n, seed=0):
    return jax.random.split(jax.random.key(seed), n)


def pixels_of(images):
    return np.asarray(images, np.float32) / 255


def test_normalize_is_its_formula():
    images = images_of(4)
    config = replace(PLAIN, mean=(0.2, 0.4, 0.6), std=(0.1, 0.5, 2.0))
    expected = (np.asarray(images, np.float64) / 255 - [0.2, 0.4, 0.6]) / [0.1, 0.5, 2.0]
    found = normalize(images, config)
    chex.assert_type(found, jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=32 * FLOAT32, atol=FLOAT32)
    # One number serves all the channels; and augmenting by nothing only normalises.
    config = replace(PLAIN, mean=(0.25,), std=(0.5,))
    expected = (pixels_of(images) - 0.25) / 0.5
    np.testing.assert_allclose(normalize(images, config), expected, atol=FLOAT32)
    chex.assert_trees_all_close(augment(images, keys_of(4), config), normalize(images, config))


def test_crops_are_windows_of_the_padded_image():
    images = images_of(200, (6, 8, 1))
    found = np.asarray(augment(images, keys_of(200), replace(PLAIN, pad=2)))
    padded = np.pad(pixels_of(images)[..., 0], ((0, 0), (2, 2), (2, 2)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (6, 8), (1, 2))
    same = np.isclose(windows, found[:, None, None, ..., 0], atol=FLOAT32).all((3, 4))
    assert (same.sum((1, 2)) == 1).all()
    assert same.any(0).all()


def test_half_of_the_images_are_mirrored():
    images = images_of(400, (3, 4, 3))
    found = np.asarray(augment(images, keys_of(400), replace(PLAIN, flip=True)))
    same = np.isclose(found, pixels_of(images), atol=FLOAT32).all((1, 2, 3))
    mirrored = np.isclose(found, pixels_of(images)[:, :, ::-1], atol=FLOAT32).all((1, 2, 3))
    assert (same ^ mirrored).all()
    assert 150 < mirrored.sum() < 250


def grey_of(pixels):
    return pixels @ np.array([0.299, 0.587, 0.114])


def test_jitter_of_colours_is_brightness_contrast_saturation():
    # Pixels in the middle, a weak jitter: nothing is clipped, and all three factors are visible.
    images = images_of(100, (5, 5, 3), 100, 150)
    found = np.asarray(augment(images, keys_of(100), replace(PLAIN, color_jitter=0.2)), np.float64)
    pixels = pixels_of(images).astype(np.float64)
    factors = []
    for image, source in zip(found, pixels, strict=True):
        brightness = grey_of(image).mean() / grey_of(source).mean()
        level = grey_of(source).mean()
        contrast = np.polyfit(grey_of(source).ravel() - level, grey_of(image).ravel(), 1)[0]
        colour = (source - grey_of(source)[..., None]).ravel()
        saturation = np.polyfit(colour, (image - grey_of(image)[..., None]).ravel(), 1)[0]
        expected = brightness * level + contrast * (grey_of(source) - level)
        expected = expected[..., None] + saturation * colour.reshape(source.shape)
        np.testing.assert_allclose(image, expected, atol=4 * FLOAT32)
        factors.append((brightness, contrast / brightness, saturation / contrast))
    factors = np.asarray(factors)
    assert ((factors > 0.799) & (factors < 1.201)).all()
    assert ((factors.min(0) < 0.83) & (factors.max(0) > 1.17)).all()
    assert (abs(np.corrcoef(factors.T) - np.eye(3)) < 0.4).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_jitter_stays_in_the_range_of_pixels(channels):
    images = images_of(50, (6, 6, channels), 0)
    found = np.asarray(augment(images, keys_of(50), replace(PLAIN, color_jitter=1.5)))
    assert (found.min(), found.max()) == (0, pytest.approx(1))


def test_light_is_one_colour_along_the_components_of_imagenet():
    """And leaves the other random numbers as they are."""
    images, keys = images_of(3000, (2, 2, 3), 100, 150), keys_of(3000)
    config = replace(PLAIN, pad=1, flip=True, color_jitter=0.4)
    unlit = np.asarray(augment(images, keys, config), np.float64)
    added = augment(images, keys, replace(config, lighting=0.1)) - unlit
    np.testing.assert_allclose(added, added[:, :1, :1] + np.zeros((1, 2, 2, 1)), atol=FLOAT32)
    # The covariance of ImageNet's pixels: its values and vectors were published rounded.
    values = np.array([0.2175, 0.0188, 0.0045])
    vectors = np.array(
        [[-0.5675, -0.5808, -0.5836], [0.7192, -0.0045, -0.6948], [0.4009, -0.8140, 0.4203]]
    )
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(3), atol=1e-3)
    amounts = added[:, 0, 0] @ vectors.T / values
    np.testing.assert_allclose(np.cov(amounts.T), 0.01 * np.eye(3), atol=1.5e-3)
    np.testing.assert_allclose(amounts.mean(0), 0, atol=0.01)


@pytest.mark.parametrize("resize", [10, 0])
def test_images_are_seen_in_the_size_that_was_asked_for(resize):
    images, keys = images_of(3, (20, 30, 3)), keys_of(3)
    config = replace(PLAIN, image_size=8, resize=resize)
    middle = jax.jit(jax.vmap(lambda image: resize_and_center_crop(image, resize or 8, 8)))
    expected = np.asarray(middle(images)) / 255
    found = normalize(images, config)
    np.testing.assert_allclose(found, expected, atol=4 * FLOAT32)
    # Without a random resized crop, training sees the same, and pads and crops it.
    found = augment(images, keys, config)
    np.testing.assert_allclose(found, expected, atol=4 * FLOAT32)
    padded = jax.eval_shape(partial(augment, config=replace(config, pad=2)), images, keys)
    assert padded.shape == (3, *seen_shape((20, 30, 3), config)) == (3, 8, 8, 3)


CROP = {"crop_scale": (0.1, 1.0), "image_size": 10, "lighting": 0.1}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"pad": 3}, id="pad"),
        pytest.param(CROP, id="resize", marks=pytest.mark.long),
    ],
)
def test_a_sample_follows_its_key_and_not_its_place(changes):
    config = replace(PLAIN, flip=True, color_jitter=0.4, **changes)
    images, keys = images_of(8), keys_of(8)
    run = partial(augment, config=config)
    whole = run(images, keys)
    chex.assert_trees_all_equal(run(images, keys), whole)
    chex.assert_trees_all_close(run(images[::-1], keys[::-1])[::-1], whole, atol=FLOAT32)
    assert bool((run(images, keys_of(8, 1)) != whole).any((1, 2, 3)).all())

    # Also as a batch of two.
    parallel = jax.pmap(partial(augment, config=config), devices=jax.devices()[:4])
    split = parallel(images.reshape(4, 2, 9, 12, 3), keys.reshape(4, 2))
    chex.assert_trees_all_close(np.asarray(split).reshape(whole.shape), whole, atol=FLOAT32)


@pytest.mark.parametrize(
    ("channels", "changes", "message"),
    [
        (2, {"color_jitter": 0.1}, "1 or 3 channels, got 2"),
        (3, {"mean": (0.1, 0.2)}, r"data\.mean needs one number, or one for each channel"),
        (1, {"lighting": 0.1}, "lighting needs 3 channels, got 1"),
        (3, {"image_size": 8, "resize": 7}, "resize = 7 must not be below .* = 8"),
        (3, {"resize": 7}, "resize = 7 must not be below .* = 0, which must be set"),
        (3, {"crop_scale": (0.5, 0.1)}, "crop_scale needs two numbers in ascending order"),
        (3, {"crop_scale": (0.5, 1.0), "pad": 1}, r"replaces data\.pad = 1"),
        (3, {"mixed_labels": "larger"}, r"larger needs data\.mixup"),
    ],
)
def test_wrong_settings_name_the_problem(channels, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_augmentation(replace(PLAIN, **changes), channels)


def by_pillow(image, size, box=None):
    """In floats, channel by channel: without Pillow's rounding."""
    top, left, height, width = box or (0, 0, *image.shape[:2])
    part = image[top : top + height, left : left + width].astype(np.float32)
    channels = [
        np.asarray(Image.fromarray(channel).resize(size[::-1], Image.Resampling.BILINEAR))
        for channel in np.moveaxis(part, -1, 0)
    ]
    return np.stack(channels, -1)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((31, 47), (12, 12)),  # both shrink
        ((13, 9), (20, 33)),  # both grow
        ((40, 10), (17, 23)),
        ((100, 3), (7, 1)),
        ((1, 1), (4, 5)),
    ],
)
def test_resizing_equals_pillow(shape, size):
    image = np.asarray(images_of(1, (*shape, 3), 0)[0])
    # The box is the whole image.
    ratio = (shape[1] / shape[0],) * 2
    crop = partial(random_resized_crop, size=size, scale=(1.0, 1.0), ratio=ratio)
    found = np.asarray(jax.jit(crop)(image, jax.random.key(0)))
    np.testing.assert_allclose(found, by_pillow(image, size), atol=2e-3)
    # Of uint8 images Pillow rounds twice.
    rounded = Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR)
    assert np.abs(np.asarray(rounded, np.float32) - found).max() <= 1.01


@pytest.mark.parametrize(
    ("shape", "shorter", "size", "to_square"),
    [
        ((50, 71), 32, 28, False),
        ((71, 50), 33, 28, False),
        ((20, 20), 24, 24, False),
        ((30, 50), 24, 20, True),
    ],
)
def test_resize_and_center_crop(shape, shorter, size, to_square):
    image = np.asarray(images_of(1, (*shape, 3), 0)[0])
    whole = [shorter if to_square else side * shorter // min(shape) for side in shape]
    top, left = (round((side - size) / 2) for side in whole)
    expected = by_pillow(image, tuple(whole))[top : top + size, left : left + size]
    crop = partial(resize_and_center_crop, shorter=shorter, size=size, to_square=to_square)
    found = jax.jit(crop)(image)
    assert found.shape == (size, size, 3)
    np.testing.assert_allclose(found, expected, atol=2e-3)


def boxes_of(keys, height, width, **settings):
    box = partial(random_box, height=height, width=width, **settings)
    return [tuple(of) for of in np.asarray(jax.jit(jax.vmap(box))(keys)).tolist()]


@pytest.mark.parametrize(
    ("shape", "ratio", "expected"),
    [
        # No try fits: the middle, as much of it as the ratio allows.
        ((20, 100), (0.75, 4 / 3), (0, 36, 20, 27)),
        ((100, 20), (0.75, 4 / 3), (36, 0, 27, 20)),
        ((1, 9), (0.1, 0.2), (0, 4, 1, 1)),
    ],
)
def test_a_box_that_never_fits_is_the_middle(shape, ratio, expected):
    assert {*boxes_of(keys_of(20), *shape, scale=(1.0, 1.0), ratio=ratio)} == {expected}


def test_random_resized_crop_shows_its_box_alone():
    images = np.asarray(images_of(12, (40, 56, 3), 0))
    keys, settings = keys_of(12), {"scale": (0.1, 0.9), "ratio": (0.5, 2.0)}
    crop = partial(random_resized_crop, size=(18, 15), **settings)
    found = jax.jit(jax.vmap(crop))(images, keys)
    boxes = boxes_of(keys, 40, 56, **settings)
    assert len({*boxes}) == 12
    for image, box, crop in zip(images, boxes, found, strict=True):
        np.testing.assert_allclose(crop, by_pillow(image, (18, 15), box), atol=2e-3)


INCEPTION = {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3)}


def boxes_by_torchvision(height, width, scale, ratio, count):
    """`RandomResizedCrop.get_params`, with NumPy."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        for _ in range(10):
            area = height * width * rng.uniform(*scale)
            aspect = np.exp(rng.uniform(*np.log(ratio)))
            w, h = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                box = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1), h, w
                break
        else:
            w = min(width, round(height * max(ratio)))
            h = min(height, round(width / min(ratio)))
            box = (height - h) // 2, (width - w) // 2, h, w
        found.append(box)
    return np.array(found)


@pytest.mark.parametrize("sides", [(384, 256), (100, 512)])
def test_regions_of_random_crops_are_those_of_torchvision(sides):
    """They cover the whole image; areas and aspect ratios are relative to its true size."""
    (height, width), count = sides, 4000
    found = np.array(boxes_of(keys_of(count), *sides, **INCEPTION))
    assert (found >= 0).all()
    assert (found[:, :2] + found[:, 2:] <= sides).all()
    assert (found[:, :2].min(0) == 0).all()
    assert ((found[:, :2] + found[:, 2:]).max(0) == sides).all()
    expected = boxes_by_torchvision(height, width, **INCEPTION, count=count)

    def described(boxes):
        top, left, h, w = boxes.T
        return top + h / 2, left + w / 2, h * w / (height * width), np.log(w / h)

    for ours, theirs in zip(described(found), described(expected), strict=True):
        error = 4 * np.hypot(ours.std(), theirs.std()) / np.sqrt(count)
        assert abs(ours.mean() - theirs.mean()) <= error
        own, wanted = (np.quantile(x, (0.1, 0.25, 0.5, 0.75, 0.9)) for x in (ours, theirs))
        np.testing.assert_allclose(own, wanted, atol=0.15 * theirs.std())


def in_arrays(images: list[np.ndarray]) -> Photographs:
    """Photographs as they are read, in arrays of 16 × 32, with noise where there is no image."""
    pixels = np.random.default_rng(0).integers(0, 256, (len(images), 16, 32, 3), np.uint8)
    for image, out in zip(images, pixels, strict=True):
        flat = image.swapaxes(0, 1) if image.shape[0] > image.shape[1] else image
        out[: flat.shape[0], : flat.shape[1]] = flat
    return Photographs(pixels, np.array([image.shape[:2] for image in images], np.int32))


@pytest.mark.parametrize(
    "changes",
    [{"crop_scale": (0.08, 1.0)}, {"resize": 12}, {"resize": 12, "resize_to_square": True}],
)
def test_a_photograph_is_seen_as_an_image_of_its_size(changes):
    rng, shapes = np.random.default_rng(1), [(16, 32), (32, 16), (30, 2), (9, 21), (1, 1), (16, 16)]
    images = [rng.integers(0, 256, (1, *shape, 3), np.uint8) for shape in shapes]
    photographs, keys = in_arrays([image for (image,) in images]), keys_of(len(images), 3)
    config = replace(PLAIN, image_size=8, **changes)
    found = augment(photographs, keys, config), normalize(photographs, config)
    for n in (0, 1, 3, 4):
        alone = augment(images[n], keys[n : n + 1], config), normalize(images[n], config)
        for all_of, (one,) in zip(found, alone, strict=True):
            np.testing.assert_allclose(all_of[n], one, atol=1e-5)
    # Without a size, squares of the stored one.
    stored = replace(config, image_size=0, resize=0)
    assert jax.eval_shape(partial(augment, config=stored), photographs, keys).shape[1:3] == (16, 16)


@pytest.mark.long
def test_shares_of_mixup_have_the_beta_distribution():
    """Its larger half, against NumPy."""
    beta, keys = 0.2, keys_of(3000)
    images, labels = jnp.float32(images_of(2)), jnp.arange(2)
    draw = jax.vmap(lambda key: mix_batch(images, labels, key, beta, axis_name=None).share)
    shares = np.asarray(jax.jit(draw)(keys))
    drawn = np.random.default_rng(0).beta(beta, beta, 100_000)
    expected = np.maximum(drawn, 1 - drawn)
    assert shares.mean() == pytest.approx(expected.mean(), abs=0.01)
    assert shares.std() == pytest.approx(expected.std(), abs=0.01)


def test_a_mixed_batch_has_the_shares_of_its_pixels_on_any_number_of_devices():
    # Sample i has the colour i, so that the shares can be read from the pixels.
    labels = jnp.arange(8)
    images = jnp.broadcast_to(labels[:, None, None, None], (8, 3, 2, 1)).astype(jnp.float32)
    alone = jax.jit(lambda key: mix_batch(images, labels, key, 0.8, axis_name=None))
    spread = jax.pmap(
        lambda x, y, key: mix_batch(x, y, key, 0.8, axis_name="data"),
        "data",
        in_axes=(0, 0, None),
        devices=jax.devices()[:4],
    )
    for key in keys_of(4):
        batch, split = alone(key), spread(images.reshape(4, 2, 3, 2, 1), labels.reshape(4, 2), key)
        share = float(batch.share)
        assert (share >= 0.5, share < 1, batch.share.dtype) == (True, True, np.float32)
        mixed = share * labels + (1 - share) * labels[::-1]
        expected = np.broadcast_to(mixed[:, None, None, None], images.shape)
        np.testing.assert_allclose(split.share, np.full(4, share), rtol=FLOAT32)
        for found in (batch, split):
            found_images = found.images.reshape(images.shape)
            np.testing.assert_allclose(found_images, expected, atol=8 * FLOAT32)
            np.testing.assert_array_equal(found.labels.ravel(), labels)
            np.testing.assert_array_equal(found.other_labels.ravel(), labels[::-1])


def test_the_augmentations_that_are_on_are_named():
    config = DataConfig(flip=False, lighting=0.1, mixup=0.25)
    assert describe_augmentation(config) == "shifts by up to 4 pixels, lighting 0.1, mixup 0.25"
    assert describe_augmentation(DataConfig(flip=False, pad=0)) == "none"
