"""Photographs keep their borders, from the archive to the crops."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from experiments.core.config import DataConfig
from experiments.core.protocol import Photographs
from experiments.data import augment as module
from experiments.data.augment import random_box, random_resized_crop, resize_and_center_crop
from experiments.data.pipeline import load_split
from experiments.datasets.images import SourceImage, encode
from experiments.papers.presets import PRESETS
from tests.experiments.fake_archives import decode, whole_images

augment = jax.jit(module.augment, static_argnames="config")
normalize = jax.jit(module.normalize, static_argnames="config")

SIZES = {"landscape": (90, 160), "portrait": (160, 90), "square": (48, 48)}
"""Height and width of a photograph of every class."""
BORDERS = ("left", "right", "top", "bottom")


def marked(height: int, width: int, border: str) -> np.ndarray:
    """A black photograph with a red band along a border, an eighth of that side wide."""
    pixels = np.zeros((height, width, 3), np.uint8)
    turned = pixels if border in ("left", "right") else pixels.swapaxes(0, 1)
    eighth = turned.shape[1] // 8
    turned[:, slice(-eighth, None) if border in ("right", "bottom") else slice(eighth), 0] = 255
    return pixels


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("photographs")
    folders = {"data_dir": root / "data", "manual_dir": root / "manual"}
    for part in ("train", "val"):
        for name, size in SIZES.items():
            (root / "manual/food101" / part / name).mkdir(parents=True)
            for number, border in enumerate(BORDERS):
                path = root / f"manual/food101/{part}/{name}/{number}.png"
                Image.fromarray(marked(*size, border)).save(path)
    load_split("food101@32", "test", **folders)
    return folders


def test_photographs_are_stored_whole(prepared):
    """And read alike from memory and from records."""
    stored = load_split("food101@32", "test", **prepared)
    images = stored.images[:]
    whole = whole_images(images)
    assert [image.shape[:2] for image in whole] == [
        size for size in ((32, 56), (56, 32), (32, 32)) for _ in BORDERS
    ]
    for row, image in enumerate(whole):
        name, border = stored.class_names[stored.labels[row]], BORDERS[row % 4]
        small = Image.fromarray(marked(*SIZES[name], border)).resize(image.shape[1::-1], 2)
        assert np.abs(image.astype(int) - np.asarray(small)).mean() < 3
    beyond = load_split("food101@32", "test", memory_limit=0, **prepared).images
    for index in (np.array([5, 0, 5]), np.array([[1, 2], [3, 11]]), slice(None, None, 3), 7):
        found = beyond[index]
        np.testing.assert_array_equal(found.pixels, images.pixels[index])
        np.testing.assert_array_equal(found.sizes, images.sizes[index])
        assert (found.pixels.dtype, found.sizes.dtype) == (np.uint8, np.int32)


def at_32(preset: str) -> DataConfig:
    """A preset's options for crops, for photographs whose shorter side is 32; colours as stored."""
    data = PRESETS[preset].config.data
    return replace(
        DataConfig(mean=(0.0,), std=(1.0,), pad=0, flip=False),
        image_size=32 * data.image_size // data.resize,
        resize=32,
        resize_to_square=data.resize_to_square,
        crop_scale=data.crop_scale,
    )


def sees_mark(views) -> np.ndarray:
    return np.asarray((np.asarray(views)[..., 0] > 0.5).any((1, 2)))


def rows_of(stored, name) -> np.ndarray:
    return np.flatnonzero(stored.labels == stored.class_names.index(name))


@pytest.mark.parametrize("name", SIZES)
def test_random_crops_see_the_mark_at_every_border(prepared, name):
    stored = load_split("food101@32", "train", **prepared)
    for row in rows_of(stored, name):
        images, keys = stored.images[np.full(100, row)], jax.random.split(jax.random.key(0), 100)
        assert 5 < sees_mark(augment(images, keys, at_32("imagenet-groups"))).sum() < 95


@pytest.mark.parametrize(
    ("preset", "visible"),
    [
        # 28 of 57 × 32 pixels in the centre: the band along the shorter side ends at pixel 7.
        ("imagenet-groups", {"landscape": BORDERS[2:], "portrait": BORDERS[:2], "square": BORDERS}),
        # All of the photograph is resized to a square, of which 27 of 32 pixels are seen.
        ("mini-imagenet-margin", dict.fromkeys(SIZES, BORDERS)),
    ],
)
def test_the_test_transform_sees_the_marks_that_the_papers_sees(prepared, preset, visible):
    stored = load_split("food101@32", "test", **prepared)
    for name, borders in visible.items():
        seen = sees_mark(normalize(stored.images[rows_of(stored, name)], at_32(preset)))
        assert tuple(np.array(BORDERS)[seen]) == borders


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
NARROW = INCEPTION | {"ratio": (0.1, 0.2)}
SHAPES = [(16, 32), (32, 16), (30, 2), (9, 21), (1, 1), (16, 16)]


@pytest.mark.parametrize(
    "crop",
    [
        lambda image, key: random_resized_crop(image, key, (8, 8), **INCEPTION),
        pytest.param(
            lambda image, key: random_resized_crop(image, key, (20, 20), **NARROW),
            marks=pytest.mark.long,
        ),
        lambda image, key: resize_and_center_crop(image, 12, 8),
        lambda image, key: resize_and_center_crop(image, 12, 7, to_square=True),
    ],
    ids=["random", "random and narrow", "centre", "square"],
)
def test_a_photograph_is_cropped_as_an_image_of_its_size(crop):
    rng = np.random.default_rng(1)
    images = [rng.integers(0, 256, (*shape, 3), np.uint8) for shape in SHAPES]
    keys = jax.random.split(jax.random.key(3), len(SHAPES))
    found = jax.jit(jax.vmap(crop))(in_arrays(images), keys)
    for image, key, result in list(zip(images, keys, found, strict=True))[::2]:
        np.testing.assert_allclose(result, jax.jit(crop)(jnp.asarray(image), key), atol=1e-3)


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
    covered = np.zeros(sides, bool)
    for top, left, h, w in found:
        covered[top : top + h, left : left + w] = True
    # Only a box in the very corner covers its pixel.
    assert covered[8:-8, 8:-8].all()
    assert all(line.any() for line in (covered[0], covered[-1], covered[:, 0], covered[:, -1]))
    expected = boxes_by_torchvision(height, width, **INCEPTION, count=count)

    def described(boxes):
        top, left, h, w = boxes.T
        return top + h / 2, left + w / 2, h * w / (height * width), np.log(w / h)

    for ours, theirs in zip(described(found), described(expected), strict=True):
        error = 4 * np.hypot(ours.std(), theirs.std()) / np.sqrt(count)
        assert abs(ours.mean() - theirs.mean()) <= error
        own, wanted = (np.quantile(x, (0.1, 0.25, 0.5, 0.75, 0.9)) for x in (ours, theirs))
        np.testing.assert_allclose(own, wanted, atol=0.15 * theirs.std())
