"""Augmentation: what each setting does to the pixels, and that a sample follows its own key."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.config import DataConfig
from experiments.data import augment as module
from experiments.data.augment import (
    check_data_options,
    erased_box,
    resize_and_center_crop,
    seen_shape,
)
from experiments.errors import ConfigError

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
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    # One number serves all the channels; and augmenting by nothing only normalises.
    config = replace(PLAIN, mean=(0.25,), std=(0.5,))
    np.testing.assert_allclose(normalize(images, config), (pixels_of(images) - 0.25) / 0.5, 1e-5)
    chex.assert_trees_all_close(augment(images, keys_of(4), config), normalize(images, config))


def test_crops_are_windows_of_the_padded_image():
    images = images_of(200, (6, 8, 1))
    found = np.asarray(augment(images, keys_of(200), replace(PLAIN, pad=2)))
    padded = np.pad(pixels_of(images), ((0, 0), (2, 2), (2, 2), (0, 0)))
    places = []
    for image, source in zip(found, padded, strict=True):
        matches = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if np.allclose(source[i : i + 6, j : j + 8], image, atol=1e-6)
        ]
        assert len(matches) == 1
        places += matches
    assert len(set(places)) == 25


def test_half_of_the_images_are_mirrored():
    images = images_of(400, (3, 4, 3))
    found = np.asarray(augment(images, keys_of(400), replace(PLAIN, flip=True)))
    same = np.isclose(found, pixels_of(images), atol=1e-6).all((1, 2, 3))
    mirrored = np.isclose(found, pixels_of(images)[:, :, ::-1], atol=1e-6).all((1, 2, 3))
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
        np.testing.assert_allclose(image, expected, atol=1e-5)
        factors.append((brightness, contrast / brightness, saturation / contrast))
    factors = np.asarray(factors)
    assert (factors > 0.799).all()
    assert (factors < 1.201).all()
    assert (factors.min(0) < 0.83).all()
    assert (factors.max(0) > 1.17).all()
    assert (abs(np.corrcoef(factors.T) - np.eye(3)) < 0.4).all()


def test_jitter_stays_in_the_range_of_pixels_and_is_affine_in_grey():
    for channels in (1, 3):
        images = images_of(50, (6, 6, channels), 0)
        found = np.asarray(augment(images, keys_of(50), replace(PLAIN, color_jitter=1.5)))
        assert found.min() == 0
        assert found.max() == pytest.approx(1)
    images = images_of(20, (5, 5, 1), 100, 150)
    found = np.asarray(augment(images, keys_of(20), replace(PLAIN, color_jitter=0.2)))
    for image, source in zip(found, pixels_of(images), strict=True):
        line = np.polyfit(source.ravel(), image.ravel(), 1)
        np.testing.assert_allclose(image, np.polyval(line, source), atol=1e-5)
        assert abs(line[0] - 1) > 1e-4


def test_light_is_one_colour_along_the_components_of_imagenet():
    """And leaves the other random numbers as they are."""
    images, keys = images_of(3000, (2, 2, 3), 100, 150), keys_of(3000)
    config = replace(PLAIN, pad=1, flip=True, color_jitter=0.4)
    unlit = np.asarray(augment(images, keys, config), np.float64)
    added = augment(images, keys, replace(config, lighting=0.1)) - unlit
    np.testing.assert_allclose(added, added[:, :1, :1] + np.zeros((1, 2, 2, 1)), atol=1e-6)
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
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # Without a random resized crop, training sees the same, and pads and crops it.
    found = augment(images, keys, config)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    padded = jax.eval_shape(partial(augment, config=replace(config, pad=2)), images, keys)
    assert padded.shape == (3, *seen_shape((20, 30, 3), config)) == (3, 8, 8, 3)


def test_erased_boxes_have_the_distribution_of_torchvision():
    height, width, count = 40, 20, 4000
    keys = jax.random.split(jax.random.key(0), count)
    draw = jax.jit(jax.vmap(lambda key: erased_box(key, height, width)))
    found = np.asarray(draw(keys))
    assert found.dtype == np.int32
    assert (found[:, :2] + found[:, 2:] <= [height, width]).all()
    rng = np.random.default_rng(0)
    wanted = []
    while len(wanted) < count:
        area = height * width * rng.uniform(0.02, 0.33)
        ratio = np.exp(rng.uniform(np.log(0.3), np.log(3.3)))
        h, w = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if h < height and w < width:
            wanted.append((rng.integers(height - h + 1), rng.integers(width - w + 1), h, w))
    for numbers, expected in zip(found.T, np.array(wanted).T, strict=True):
        assert numbers.mean() == pytest.approx(expected.mean(), rel=0.03)
        assert numbers.std() == pytest.approx(expected.std(), rel=0.06)


def test_erasing_sets_a_box_of_some_images_to_the_mean():
    """The last step: it does not change what normalisation makes of the other pixels."""
    images, keys = images_of(400, (8, 11, 3)), keys_of(400)
    config = replace(PLAIN, mean=(0.5,), std=(0.25,), flip=True, erasing=0.3)
    found = np.asarray(augment(images, keys, config))
    before = np.asarray(augment(images, keys, replace(config, erasing=0.0)))
    changed = np.abs(found - before).max(-1) > 1e-4
    assert (found[changed] == 0).all()
    erased = changed.sum((1, 2)) > 0
    assert erased.mean() == pytest.approx(0.3, abs=0.07)
    for image in changed[erased]:
        rows, columns = np.flatnonzero(image.any(1)), np.flatnonzero(image.any(0))
        assert image.sum() == (np.ptp(rows) + 1) * (np.ptp(columns) + 1)


def test_trivial_augment_changes_whole_numbers_before_the_colours():
    images, keys = images_of(30), keys_of(30)
    found = np.asarray(augment(images, keys, replace(PLAIN, trivial_augment=True))) * 255
    np.testing.assert_allclose(found, np.round(found), atol=1e-3)
    assert 0.4 < (np.abs(found - images) > 0.5).any((1, 2, 3)).mean() < 1


CROP = {"crop_scale": (0.1, 1.0), "image_size": 10, "lighting": 0.1}
STRONG = {"trivial_augment": True, "erasing": 0.5}


@pytest.mark.parametrize("changes", [{"pad": 3}, CROP, STRONG], ids=["pad", "resize", "strong"])
def test_a_sample_follows_its_key_and_not_its_place(changes):
    config = replace(PLAIN, flip=True, color_jitter=0.4, **changes)
    images, keys = images_of(8), keys_of(8)
    run = partial(augment, config=config)
    whole = run(images, keys)
    chex.assert_trees_all_equal(run(images, keys), whole)
    chex.assert_trees_all_close(run(images[::-1], keys[::-1])[::-1], whole, atol=1e-6)
    assert bool((run(images, keys_of(8, 1)) != whole).any((1, 2, 3)).all())

    # Also as a batch of two.
    parallel = jax.pmap(partial(augment, config=config), devices=jax.devices()[:4])
    split = parallel(images.reshape(4, 2, 9, 12, 3), keys.reshape(4, 2))
    chex.assert_trees_all_close(np.asarray(split).reshape(whole.shape), whole, atol=1e-6)


@pytest.mark.parametrize(
    ("channels", "changes", "message"),
    [
        (2, {"color_jitter": 0.1}, "1 or 3 channels, got 2"),
        (2, {"trivial_augment": True}, "trivial_augment needs 1 or 3 channels, got 2"),
        (3, {"mean": (0.1, 0.2)}, r"data\.mean needs one number, or one for each channel"),
        (1, {"lighting": 0.1}, "lighting needs 3 channels, got 1"),
        (3, {"image_size": 8, "resize": 7}, "resize = 7 must not be below .* = 8"),
        (3, {"crop_scale": (0.1,)}, "crop_scale needs two numbers"),
        (3, {"crop_scale": (0.5, 0.1)}, "crop_scale needs two numbers in ascending order"),
        (3, {"crop_scale": (0.5, 1.0), "pad": 1}, r"replaces data\.pad = 1"),
    ],
)
def test_wrong_settings_name_the_problem(channels, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_data_options(replace(PLAIN, **changes), channels)
