"""Augmentation: what each setting does to the pixels, against Pillow and torchvision."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from experiments.config import DataConfig
from experiments.data import augment as module
from experiments.data.augment import (
    LEVELS,
    OPERATIONS,
    apply_operation,
    check_augmentation,
    cutmix_box,
    describe_augmentation,
    erased_box,
    mix_batch,
    mixup,
    random_box,
    random_resized_crop,
    resize_and_center_crop,
    seen_shape,
    trivial_augment,
)
from experiments.errors import ConfigError
from experiments.presets import PRESETS
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
        np.testing.assert_allclose(image, np.polyval(line, source), atol=4 * FLOAT32)
        assert abs(line[0] - 1) > 1e-4


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


@pytest.mark.long
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


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"pad": 3}, id="pad"),
        pytest.param(CROP, id="resize", marks=pytest.mark.long),
        pytest.param(STRONG, id="strong", marks=pytest.mark.long),
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
        ((16, 16), (16, 16)),
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


@partial(jax.jit, static_argnums=(1, 2), static_argnames=("scale", "ratio"))
def boxes_of(keys, height, width, *, scale, ratio):
    return jax.vmap(lambda key: random_box(key, height, width, scale=scale, ratio=ratio))(keys)


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
    images = np.asarray(images_of(12, (40, 56, 3), 0))
    keys, settings = keys_of(12), {"scale": (0.1, 0.9), "ratio": (0.5, 2.0)}
    found = jax.jit(
        jax.vmap(lambda image, key: random_resized_crop(image, key, (18, 15), **settings))
    )(images, keys)
    assert found.shape == (12, 18, 15, 3)
    boxes = np.asarray(boxes_of(keys, 40, 56, **settings)).tolist()
    assert len({tuple(box) for box in boxes}) == 12
    for image, box, crop in zip(images, boxes, found, strict=True):
        np.testing.assert_allclose(crop, by_pillow(image, (18, 15), tuple(box)), atol=2e-3)


@pytest.mark.long
def test_shares_of_mixup_have_the_beta_distribution():
    """Its larger half, against NumPy."""
    beta = 0.2
    keys = jax.random.split(jax.random.key(0), 3000)
    images, labels = jnp.float32(images_of(2)), jnp.arange(2)
    batch = images, labels, (images[::-1], labels[::-1])
    draw = jax.jit(jax.vmap(lambda key: mixup(*batch, key, beta).share))
    shares = np.asarray(draw(keys))
    assert shares.dtype == np.float32
    drawn = np.random.default_rng(0).beta(beta, beta, 100_000)
    expected = np.maximum(drawn, 1 - drawn)
    assert shares.mean() == pytest.approx(expected.mean(), abs=0.01)
    assert shares.std() == pytest.approx(expected.std(), abs=0.01)


@pytest.mark.long
def test_boxes_have_the_area_of_their_weight_and_are_cut_at_the_border():
    """The distribution is that of the paper's code, drawn another way."""
    height, width, count = 24, 36, 4000
    keys = jax.random.split(jax.random.key(1), count)
    draw = jax.jit(jax.vmap(lambda key: cutmix_box(key, 1.0, height, width)))
    boxes = np.asarray(draw(keys))
    assert boxes.dtype == np.int32
    assert (boxes >= 0).all()
    assert (boxes[:, :2] <= boxes[:, 2:]).all()
    assert (boxes[:, 2:] <= [height, width]).all()

    rng = np.random.default_rng(0)
    centre = rng.integers([height, width], size=(count, 2))
    reach = (0.5 * np.sqrt(1 - rng.beta(1.0, 1.0, (count, 1))) * [height, width]).astype(int)
    corners = np.maximum(centre - reach, 0), np.minimum(centre + reach, [height, width])
    wanted = np.concatenate(corners, 1)
    for found, expected in zip(boxes.T, wanted.T, strict=True):
        assert found.mean() == pytest.approx(expected.mean(), abs=0.6)
        assert found.std() == pytest.approx(expected.std(), rel=0.05)
    areas, expected = (np.prod(b[:, 2:] - b[:, :2], 1).mean() for b in (boxes, wanted))
    assert areas == pytest.approx(expected, abs=0.015 * height * width)


@pytest.mark.long
def test_a_mixed_batch_has_the_shares_of_its_pixels_on_any_number_of_devices():
    """The labels with the larger share come first; one of the two ways for a whole batch."""
    # Sample i has the colour i, and so the share of the first colour can be read from the pixels.
    labels = np.arange(8, dtype=np.int32)
    images = jnp.broadcast_to(labels[:, None, None, None], (8, 12, 10, 1)).astype(jnp.float32)
    config = DataConfig(mixup=0.2, cutmix=1.0)
    own = jnp.asarray(labels)
    alone = jax.jit(lambda key: mix_batch(images, own, key, config, axis_name=None))
    spread = jax.pmap(
        lambda x, y, key: mix_batch(x, y, key, config, axis_name="data"),
        "data",
        in_axes=(0, 0, None),
        devices=jax.devices()[:4],
    )
    ways = set()
    for number in range(12):
        key = jax.random.key(number)
        batch = alone(key)
        share, first, second = map(np.asarray, (batch.share, batch.labels, batch.other_labels))
        assert 0.5 <= share <= 1
        np.testing.assert_array_equal(np.sort(first), labels)
        np.testing.assert_array_equal(second, 7 - first)
        mean = np.asarray(batch.images).mean((1, 2, 3))
        np.testing.assert_allclose(mean, share * first + (1 - share) * second, atol=4 * FLOAT32)
        whole = np.isclose(batch.images, np.round(batch.images), atol=4 * FLOAT32).all()
        ways.add("cutmix" if whole else "mixup")
        if number < 4:
            split = spread(images.reshape(4, 2, 12, 10, 1), labels.reshape(4, 2), key)
            np.testing.assert_allclose(split.share, np.full(4, share), rtol=FLOAT32)
            np.testing.assert_allclose(
                split.images.reshape(images.shape), batch.images, rtol=4 * FLOAT32, atol=4 * FLOAT32
            )
            np.testing.assert_array_equal(split.labels.ravel(), first)
            np.testing.assert_array_equal(split.other_labels.ravel(), second)
    assert ways == {"cutmix", "mixup"}
    only = mix_batch(images, own, jax.random.key(0), DataConfig(cutmix=1.0), axis_name=None)
    assert np.isin(only.images, labels).all()


# One compilation for all operations, levels and images.
apply = jax.jit(jax.vmap(apply_operation))
trivially = jax.jit(jax.vmap(trivial_augment))


def photograph(kind: str) -> np.ndarray:
    """Images 23×30 with smooth parts, edges, and channels of different ranges."""
    rng = np.random.default_rng(len(kind))
    rows, columns = np.mgrid[0:23, 0:30]
    waves = [90 + 60 * np.sin(rows / (4 + c) + columns / (7 - c)) for c in range(3)]
    image = np.stack(waves, -1)
    image[5:11, 8:20] = [200, 30, 120]
    if kind == "noise":
        image += rng.normal(0, 40, image.shape)
    if kind == "flat":
        image[...] = [0, 255, 77]
    return image.clip(0, 255).astype(np.uint8)


def operation_by_pillow(image, operation, level, negative):
    """The same operation as torchvision applies it with Pillow."""
    picture = Image.fromarray(image)
    share = (-1 if negative else 1) * level / 30

    def moved(*matrix: float) -> Image.Image:
        return picture.transform(
            picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
        )

    def enhanced(kind: Any) -> Image.Image:
        return kind(picture).enhance(1 + 0.99 * share)

    threshold: Any = 255 * (1 - level / 30)
    done = {
        "identity": lambda: picture,
        "shear x": lambda: moved(1, 0.99 * share, 0, 0, 1, 0),
        "shear y": lambda: moved(1, 0, 0, 0.99 * share, 1, 0),
        "translate x": lambda: moved(1, 0, -int(32 * share), 0, 1, 0),
        "translate y": lambda: moved(1, 0, 0, 0, 1, -int(32 * share)),
        "rotate": lambda: picture.rotate(135 * share, Image.Resampling.BILINEAR),
        "brightness": lambda: enhanced(ImageEnhance.Brightness),
        "colour": lambda: enhanced(ImageEnhance.Color),
        "contrast": lambda: enhanced(ImageEnhance.Contrast),
        "sharpness": lambda: enhanced(ImageEnhance.Sharpness),
        "posterize": lambda: ImageOps.posterize(picture, 8 - round(level / 5)),
        "solarize": lambda: ImageOps.solarize(picture, threshold),
        "autocontrast": lambda: ImageOps.autocontrast(picture),
        "equalize": lambda: ImageOps.equalize(picture),
    }
    return np.asarray(done[operation]())


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_equals_pillow(operation):
    cases = [
        (photograph(kind), level, negative)
        for kind in ("plain", "noise", "flat")
        for level in (0, 1, 7, 13, 20, 29, 30)
        for negative in (False, True)
    ]
    images, levels, signs = (np.stack(column) for column in zip(*cases, strict=True))
    number = np.full(len(cases), OPERATIONS.index(operation))
    found = np.asarray(apply(images.astype(np.float32), number, levels, signs))
    assert found.dtype == np.float32
    assert (found == np.round(found)).all()
    assert found.min() >= 0
    assert found.max() <= 255
    expected = np.stack(
        [operation_by_pillow(image, operation, level, sign) for image, level, sign in cases]
    )
    difference = np.abs(found - expected)
    # Pixels whose place rounds to the other side of the image's border.
    assert (difference > 1).mean() < 1e-3
    assert (difference > 0).mean() < 0.02
    if operation != "identity":
        assert np.abs(expected.astype(int) - images).mean() > 1


def test_a_grey_image_has_no_colour_to_lose():
    image = photograph("noise")[..., :1]
    numbers = np.array([OPERATIONS.index(name) for name in ("colour", "contrast")])
    last = np.full(2, LEVELS - 1), np.zeros(2, bool)
    same, contrast = np.asarray(apply(np.stack(2 * [image]).astype(np.float32), numbers, *last))
    np.testing.assert_array_equal(same, image)
    expected = ImageEnhance.Contrast(Image.fromarray(image[..., 0])).enhance(1.99)
    assert np.abs(contrast[..., 0] - np.asarray(expected)).max() <= 1


@pytest.mark.long
def test_all_operations_are_equally_likely_and_follow_the_key_of_the_image():
    image = photograph("plain").astype(np.float32)[:12, :12]
    count = 1400
    keys = jax.random.split(jax.random.key(0), count)
    found = np.asarray(trivially(jnp.broadcast_to(image, (count, *image.shape)), keys))
    # Every operation at every level and sign; those without any appear as often in total.
    grid = np.meshgrid(range(len(OPERATIONS)), range(LEVELS), (False, True), indexing="ij")
    numbers, levels, signs = (axis.ravel() for axis in grid)
    possible = np.asarray(
        apply(jnp.broadcast_to(image, (len(numbers), *image.shape)), numbers, levels, signs)
    )
    for statistic in (lambda x: (x == image).all((1, 2, 3)), lambda x: x.mean((1, 2, 3)) / 255):
        drawn, all_of_them = statistic(found), statistic(possible)
        deviation = all_of_them.std() / math.sqrt(count)
        assert drawn.mean() == pytest.approx(all_of_them.mean(), abs=4 * deviation)
    some = np.asarray(trivially(jnp.broadcast_to(image, (100, *image.shape)), keys[40:140]))
    np.testing.assert_array_equal(some, found[40:140])


def test_the_augmentations_that_are_on_are_named():
    for preset in ("folder", "folder-few-shot", "folder-labels"):
        assert describe_augmentation(PRESETS[preset].config.data) == (
            "crops of 50 to 100 % of the area, mirror images (--data.no-flip for none), color "
            "jitter 0.3"
        )
    config = DataConfig(flip=False, lighting=0.1, trivial_augment=True, erasing=0.25, cutmix=1)
    named = "shifts by up to 4 pixels, TrivialAugment, lighting 0.1, erasing 0.25, cutmix 1"
    assert describe_augmentation(config) == named
    assert describe_augmentation(DataConfig(flip=False, pad=0)) == "none"
