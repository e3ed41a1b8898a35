"""TrivialAugment against Pillow, operation by operation."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from experiments.data.augment import LEVELS, OPERATIONS, apply_operation, trivial_augment

# One compilation for all operations, levels and images.
apply = jax.jit(jax.vmap(apply_operation))
augment = jax.jit(jax.vmap(trivial_augment))


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


KINDS = ("plain", "noise", "flat")


def by_pillow(image: np.ndarray, operation: str, level: int, negative: bool) -> np.ndarray:
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
        for kind in KINDS
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
    expected = np.stack([by_pillow(image, operation, level, sign) for image, level, sign in cases])
    difference = np.abs(found - expected)
    # Pixels whose place rounds to the other side of the image's border.
    assert (difference > 1).mean() < 1e-3
    assert (difference > 0).mean() < 0.02
    if operation != "identity":
        assert np.abs(expected.astype(int) - images).mean() > 1


def test_a_grey_image_has_no_colour_to_lose():
    image = photograph("noise")[..., :1].astype(np.float32)[None]

    def on(name):
        return np.asarray(apply(image, jnp.array([OPERATIONS.index(name)]), *LAST))

    np.testing.assert_array_equal(on("colour"), image)
    picture = Image.fromarray(image[0, ..., 0].astype(np.uint8))
    expected = ImageEnhance.Contrast(picture).enhance(1.99)
    assert np.abs(on("contrast")[0, ..., 0] - np.asarray(expected)).max() <= 1


LAST = (jnp.array([LEVELS - 1]), jnp.array([False]))


def test_all_operations_are_equally_likely_and_follow_the_key_of_the_image():
    image = photograph("plain").astype(np.float32)[:12, :12]
    count = 1400
    keys = jax.random.split(jax.random.key(0), count)
    found = np.asarray(augment(jnp.broadcast_to(image, (count, *image.shape)), keys))
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
    some = np.asarray(augment(jnp.broadcast_to(image, (100, *image.shape)), keys[40:140]))
    np.testing.assert_array_equal(some, found[40:140])
