"""Resizing against Pillow, and the boxes of random resized crops."""

from functools import partial

import jax
import numpy as np
import pytest
from PIL import Image

from experiments.data.augment import random_box, random_resized_crop, resize_and_center_crop


def image_of(height, width, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


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
        ((16, 16), (16, 16)),
        ((100, 3), (7, 1)),
        ((1, 1), (4, 5)),
    ],
)
def test_resizing_equals_pillow(shape, size):
    image = image_of(*shape)
    # The box is the whole image.
    ratio = (shape[1] / shape[0],) * 2
    crop = partial(random_resized_crop, size=size, scale=(1.0, 1.0), ratio=ratio)
    found = np.asarray(jax.jit(crop)(image, jax.random.key(0)))
    np.testing.assert_allclose(found, by_pillow(image, size), atol=2e-3)
    # Of uint8 images Pillow rounds twice.
    rounded = Image.fromarray(image).resize(size[::-1], Image.Resampling.BILINEAR)
    assert np.abs(np.asarray(rounded, np.float32) - found).max() <= 1.01


@pytest.mark.parametrize(
    ("shape", "shorter", "size"), [((50, 71), 32, 28), ((71, 50), 33, 28), ((20, 20), 24, 24)]
)
def test_resize_and_center_crop(shape, shorter, size):
    image = image_of(*shape)
    whole = [side * shorter // min(shape) for side in shape]
    top, left = (round((side - size) / 2) for side in whole)
    expected = by_pillow(image, tuple(whole))[top : top + size, left : left + size]
    found = jax.jit(partial(resize_and_center_crop, shorter=shorter, size=size))(image)
    assert found.shape == (size, size, 3)
    np.testing.assert_allclose(found, expected, atol=2e-3)


@partial(jax.jit, static_argnums=(1, 2), static_argnames=("scale", "ratio"))
def boxes_of(keys, height, width, *, scale, ratio):
    return jax.vmap(lambda key: random_box(key, height, width, scale=scale, ratio=ratio))(keys)


def keys_of(n, seed=0):
    return jax.random.split(jax.random.key(seed), n)


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
    boxes = boxes_of(keys_of(20), *shape, scale=(1.0, 1.0), ratio=ratio)
    assert {tuple(box) for box in np.asarray(boxes).tolist()} == {expected}


def test_random_resized_crop_shows_its_box_alone():
    images = np.stack([image_of(40, 56, seed=seed) for seed in range(12)])
    keys, settings = keys_of(12), {"scale": (0.1, 0.9), "ratio": (0.5, 2.0)}
    found = jax.jit(
        jax.vmap(lambda image, key: random_resized_crop(image, key, (18, 15), **settings))
    )(images, keys)
    assert found.shape == (12, 18, 15, 3)
    boxes = np.asarray(boxes_of(keys, 40, 56, **settings)).tolist()
    assert len({tuple(box) for box in boxes}) == 12
    for image, box, crop in zip(images, boxes, found, strict=True):
        np.testing.assert_allclose(crop, by_pillow(image, (18, 15), tuple(box)), atol=2e-3)
