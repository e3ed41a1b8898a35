"""Photographs keep their borders, from the archive to the crops."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from experiments.core.protocol import Photographs
from experiments.data.augment import random_box, random_resized_crop, resize_and_center_crop
from experiments.data.pipeline import load_split
from experiments.datasets.images import SourceImage, encode
from tests.experiments.fake_archives import decode, whole_images

SIZES = [(90, 160), (160, 90), (48, 48)]
"""Height and width of photographs, each with a red band along every border."""
BORDERS = ("left", "right", "top", "bottom")


def marked(height: int, width: int, border: str) -> np.ndarray:
    """A black photograph with a red band along a border, an eighth of that side wide."""
    pixels = np.zeros((height, width, 3), np.uint8)
    turned = pixels if border in ("left", "right") else pixels.swapaxes(0, 1)
    eighth = turned.shape[1] // 8
    turned[:, slice(-eighth, None) if border in ("right", "bottom") else slice(eighth), 0] = 255
    return pixels


def test_photographs_are_stored_whole(dirs):
    """And read alike from memory and from records."""
    images = [marked(*size, border) for size in SIZES for border in BORDERS]
    for part, name in itertools.product(("train", "val"), ("ant", "bee")):
        folder = dirs["manual_dir"] / "food101" / part / name
        folder.mkdir(parents=True)
        for number, image in enumerate(images):
            Image.fromarray(image).save(folder / f"{number:02}.png")
    stored = load_split("food101@32", "test", **dirs).images[:]
    whole = whole_images(stored)
    expected = [size for size in ((32, 56), (56, 32), (32, 32)) for _ in BORDERS]
    assert [image.shape[:2] for image in whole] == 2 * expected
    for image, source in zip(whole, 2 * images, strict=True):
        small = Image.fromarray(source).resize(image.shape[1::-1], 2)
        assert np.abs(image.astype(int) - np.asarray(small)).mean() < 3
    beyond = load_split("food101@32", "test", memory_limit=0, **dirs).images
    for index in (np.array([5, 0, 5]), np.array([[1, 2], [3, 11]]), slice(None, None, 3), 7):
        found = beyond[index]
        np.testing.assert_array_equal(found.pixels, stored.pixels[index])
        np.testing.assert_array_equal(found.sizes, stored.sizes[index])
        assert (found.pixels.dtype, found.sizes.dtype) == (np.uint8, np.int32)


@pytest.mark.parametrize(
    ("size", "stored"),
    [
        ((500, 375), (341, 256)),
        ((375, 500), (256, 341)),
        ((1000, 500), (512, 256)),
        # Longer than 2:1: all of it is kept, at a lower resolution.
        ((3000, 500), (512, 85)),
        ((5, 3000), (1, 512)),
        ((600, 200), (512, 170)),
        # Small images keep their pixels.
        ((200, 180), (200, 180)),
    ],
)
def test_sizes_of_whole_photographs(size, stored):
    """Width and height."""
    columns, rows = np.meshgrid(*(np.linspace(0, 255, side) for side in size))
    pixels = np.stack([columns, rows, 0 * rows], -1).astype(np.uint8)
    image = decode(encode(SourceImage(pixels, "a"), (256, 256, 3), whole=True))
    assert image.shape[1::-1] == stored
    longer = int(np.argmax(size))
    line = image[:, :, longer].mean(longer)  # Along the longer side.
    assert line[0] <= 2
    assert line[-1] >= 253
    if size == stored:
        np.testing.assert_array_equal(image, pixels)


def in_arrays(images: list[np.ndarray]) -> Photographs:
    """Photographs as they are read, in arrays of 16 × 32, with noise where there is no image."""
    pixels = np.random.default_rng(0).integers(0, 256, (len(images), 16, 32, 3), np.uint8)
    for image, out in zip(images, pixels, strict=True):
        flat = image.swapaxes(0, 1) if image.shape[0] > image.shape[1] else image
        out[: flat.shape[0], : flat.shape[1]] = flat
    return Photographs(pixels, np.array([image.shape[:2] for image in images], np.int32))


INCEPTION = {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3)}
SHAPES = [(16, 32), (32, 16), (30, 2), (9, 21), (1, 1), (16, 16)]


@pytest.mark.parametrize(
    "crop",
    [
        partial(random_resized_crop, size=(8, 8), **INCEPTION),
        partial(resize_and_center_crop, shorter=12, size=8),
        partial(resize_and_center_crop, shorter=12, size=7, to_square=True),
    ],
    ids=["random", "centre", "square"],
)
def test_a_photograph_is_cropped_as_an_image_of_its_size(crop):
    rng = np.random.default_rng(1)
    images = [rng.integers(0, 256, (*shape, 3), np.uint8) for shape in SHAPES]
    keys = jax.random.split(jax.random.key(3), len(SHAPES))
    random = crop.func is random_resized_crop
    one = jax.jit(lambda image, key: crop(image, key=key) if random else crop(image))
    found = jax.jit(jax.vmap(one))(in_arrays(images), keys)
    for image, key, result in list(zip(images, keys, found, strict=True))[::2]:
        np.testing.assert_allclose(result, one(jnp.asarray(image), key), atol=1e-3)


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
    count = 4000
    keys = jax.random.split(jax.random.key(0), count)
    draw = jax.jit(jax.vmap(partial(random_box, **INCEPTION), (0, None, None)))
    found = np.asarray(draw(keys, *map(jnp.int32, sides)))
    height, width = sides
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
