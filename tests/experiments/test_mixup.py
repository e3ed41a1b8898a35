"""Mixup: partners, weights, and equality over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.config import DataConfig
from experiments.contracts import Loss, Objective
from experiments.data.augment import cutmix_box, mix_batch, mixup
from experiments.training.step import Batch, TrainState, build_step


def batch_of(n=8):
    images = np.random.default_rng(0).normal(size=(n, 3, 4, 2)).astype(np.float32)
    return images, np.arange(n, dtype=np.int32) * 10


def with_partners(images, labels):
    images, labels = jnp.asarray(images), jnp.asarray(labels)
    return images, labels, (images[::-1], labels[::-1])


def test_shares_of_mixup_have_the_beta_distribution():
    """Its larger half, against NumPy."""
    beta = 0.2
    keys = jax.random.split(jax.random.key(0), 3000)
    batch = with_partners(*batch_of(2))
    draw = jax.jit(jax.vmap(lambda key: mixup(*batch, key, beta).share))
    shares = np.asarray(draw(keys))
    assert shares.dtype == np.float32
    drawn = np.random.default_rng(0).beta(beta, beta, 100_000)
    expected = np.maximum(drawn, 1 - drawn)
    assert shares.mean() == pytest.approx(expected.mean(), abs=0.01)
    assert shares.std() == pytest.approx(expected.std(), abs=0.01)


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
    wanted = []
    for _ in range(count):
        half = 0.5 * np.sqrt(1 - rng.beta(1.0, 1.0))
        y, x = rng.integers(height), rng.integers(width)
        h, w = int(half * height), int(half * width)
        wanted.append((max(y - h, 0), max(x - w, 0), min(y + h, height), min(x + w, width)))
    for found, expected in zip(boxes.T, np.array(wanted).T, strict=True):
        assert found.mean() == pytest.approx(expected.mean(), abs=0.6)
        assert found.std() == pytest.approx(expected.std(), rel=0.05)
    areas, wanted_areas = (
        ((b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])).mean() / (height * width)
        for b in (boxes, np.array(wanted))
    )
    assert areas == pytest.approx(wanted_areas, abs=0.015)


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
        share, first, second = (
            np.asarray(x) for x in (batch.share, batch.labels, batch.other_labels)
        )
        assert 0.5 <= share <= 1
        np.testing.assert_array_equal(np.sort(first), labels)
        np.testing.assert_array_equal(second, 7 - first)
        mean = np.asarray(batch.images).mean((1, 2, 3))
        np.testing.assert_allclose(mean, share * first + (1 - share) * second, atol=1e-5)
        whole = np.isclose(batch.images, np.round(batch.images), atol=1e-5).all()
        ways.add("cutmix" if whole else "mixup")
        if number < 4:
            split = spread(images.reshape(4, 2, 12, 10, 1), labels.reshape(4, 2), key)
            np.testing.assert_allclose(split.share, np.full(4, share), rtol=1e-6)
            np.testing.assert_allclose(
                split.images.reshape(images.shape), batch.images, rtol=1e-5, atol=1e-5
            )
            np.testing.assert_array_equal(split.labels.ravel(), first)
            np.testing.assert_array_equal(split.other_labels.ravel(), second)
    assert ways == {"cutmix", "mixup"}
    only = mix_batch(images, own, jax.random.key(0), DataConfig(cutmix=1.0), axis_name=None)
    assert np.isin(only.images, labels).all()


class _MeanPixel(nnx.Module):
    """One feature: the mean of the pixels times a parameter."""

    def __init__(self):
        self.factor = nnx.Param(jnp.ones(()))

    def __call__(self, images, *, train, keys, step):
        return self.factor[...] * images.mean(axis=(1, 2, 3))[:, None]


@pytest.mark.parametrize("mixed_labels", ["both", "larger"])
def test_a_step_mixes_the_losses_of_its_labels(mixed_labels):
    """The loss of mixed images is shared by their labels as the pixels are, or has one label."""

    def loss(features, labels, head, objective_state):
        value = jnp.mean(features[:, 0] * labels)
        return Loss(value, objective_state, {"of the first": features[0, 0]})

    graphdef, params, statistics = nnx.split(_MeanPixel(), nnx.Param, ...)
    optimizer = optax.sgd(1.0)
    state = TrainState(
        jnp.int32(0), {"backbone": params, "classifier": {}}, statistics, optimizer.init({}), ()
    )
    objective = Objective(lambda key: {}, loss, lambda features, head, objective_state: features)
    data = DataConfig(
        mean=(0.0,), std=(1.0,), pad=0, flip=False, mixup=1.0, mixed_labels=mixed_labels
    )
    step = jax.jit(
        build_step(graphdef, objective, optimizer, data, key=jax.random.key(5), axis_name=None)
    )

    pixels, labels = np.array([10, 250, 40, 120], np.uint8), np.array([3, 1, 0, 7], np.int32)
    shares = []
    for number in range(4):
        images = np.tile(pixels[:, None, None, None], (1, 2, 2, 1))
        at = state._replace(step=jnp.int32(number), opt_state=optimizer.init(state.params))
        after, metrics = step(at, Batch(images, labels))
        own, partner = pixels / 255, pixels[::-1] / 255
        share = (metrics["of the first"] - partner[0]) / (own[0] - partner[0])
        mixed = share * own + (1 - share) * partner
        weight = share if mixed_labels == "both" else 1
        expected = weight * np.mean(mixed * labels) + (1 - weight) * np.mean(mixed * labels[::-1])
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-4)
        # The loss is the parameter, 1, times its derivative.
        factor = after.params["backbone"]["factor"][...]
        np.testing.assert_allclose(factor, 1 - expected, rtol=1e-4)
        shares.append(float(share))
    # A sample's own label has the larger share; every step has another.
    assert min(shares) >= 0.5
    assert max(shares) < 1
    assert len(set(shares)) == 4
