"""The triplet loss by hand, and its memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss.harness import QUICK, compiled, enable_x64, widen
from tests.jaxloss.loss_table import make_features, make_labels


def make_rows(seed, n=14, dim=5):
    """Rows with duplicates within a class and between classes."""
    rng = np.random.default_rng(seed)
    features, labels = make_features(rng, n, np.float64, dim), make_labels(rng, n)
    same = np.flatnonzero(labels == 0)
    features[same[1]], features[np.flatnonzero(labels == 1)[0]] = (
        features[same[0]],
        features[same[2]],
    )
    return features, labels


def ours(features, labels, **options):
    with enable_x64(True):
        loss = jax.jit(
            jax.value_and_grad(partial(jaxloss.triplet_loss, **options)), compiler_options=QUICK
        )
        return widen(loss(jnp.asarray(features), jnp.asarray(labels)))


def check(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n", [14, 45])
def test_semihard_rule(n):
    """A loop over positive pairs, with gradients by hand for squared distances."""
    features, labels = make_rows(2, n)
    labels = labels if n < 20 else (np.arange(n) > 4).astype(labels.dtype)
    value, gradient, number = 0.0, np.zeros_like(features), 0
    square = np.sum((features[:, None] - features[None]) ** 2, axis=2)
    fell_back = 0
    for a in range(n):
        negatives = [j for j in range(n) if labels[j] != labels[a]]
        for p in range(n):
            if p == a or labels[p] != labels[a]:
                continue
            farther = [j for j in negatives if square[a, j] > square[a, p] + 1e-12]
            fell_back += not farther
            if farther:
                chosen = min(farther, key=lambda j: square[a, j])
            else:
                chosen = max(negatives, key=lambda j: square[a, j])
            term = square[a, p] - square[a, chosen] + 0.5
            number += 1
            if term > 0:
                value += term
                gradient[a] += 2 * (features[chosen] - features[p])
                gradient[p] += 2 * (features[p] - features[a])
                gradient[chosen] += 2 * (features[a] - features[chosen])
    assert 0 < fell_back < number
    options = {"mining": "semihard", "margin": 0.5, "squared": True, "normalize": False}
    check(ours(features, labels, **options), (value / number, gradient / number))


def test_all_triplets_of_large_classes():
    """Each of the n³ terms, for classes of more samples than are compared at a time."""
    features, _ = make_rows(7, 45)
    labels = np.arange(45) > 4

    def loss(x):
        squares = jnp.sum((x[:, None] - x[None]) ** 2, axis=2)
        terms = jax.nn.relu(squares[:, :, None] - squares[:, None, :] + 0.5)
        same = labels[:, None] == labels[None]
        used = (same & ~np.eye(45, dtype=bool))[:, :, None] & ~same[:, None, :] & (terms > 0)
        return jnp.mean(terms, where=used)

    with enable_x64(True):
        expected = widen(jax.value_and_grad(loss)(jnp.asarray(features)))
    options = {"mining": "all", "margin": 0.5, "squared": True, "normalize": False}
    check(ours(features, labels.astype(int), **options), expected)


@pytest.mark.parametrize("mining", ["hard", "semihard", "all"])
def test_nan_in_a_row_without_positives_shows(mining):
    """The row is a negative of every anchor, and the farthest one of some."""
    features, labels = make_rows(8)
    features[5], labels[5] = np.nan, 99
    value, _ = ours(features, labels, mining=mining)
    assert np.isnan(value)


@pytest.mark.parametrize("mining", ["hard", "semihard", "all"])
def test_no_references(mining):
    features, labels = map(jnp.asarray, make_rows(9))
    loss = partial(jaxloss.triplet_loss, mining=mining, reference_labels=labels[:0])

    def value(features):
        return loss(features, labels, references=features[:0])

    result, gradient = jax.value_and_grad(value)(features)
    assert result == 0
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.slow
def test_mean_is_over_triplets():
    """The sum and the number of terms, weighted by sample."""
    features, labels = map(jnp.asarray, make_rows(3))
    loss = partial(jaxloss.triplet_loss, features, labels, mining="all", margin=0.1)
    weights = jnp.linspace(0.5, 2.0, len(labels), dtype=features.dtype)
    means, total = loss(reduction="none"), loss(reduction="sum", sample_weights=weights)
    ones = [
        loss(reduction="sum", sample_weights=row)
        for row in jnp.eye(len(labels), dtype=features.dtype)
    ]
    counts = jnp.stack(ones) / jnp.where(means == 0, 1, means)
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-3)
    assert len(set(np.round(counts).tolist())) > 3
    np.testing.assert_allclose(total, jnp.sum(weights * means * counts), rtol=1e-5)
    mean = loss(sample_weights=weights)
    np.testing.assert_allclose(mean, total / jnp.sum(weights * counts), rtol=1e-5)


@pytest.mark.parametrize("mining", ["hard", "semihard", "all"])
def test_blocks_bound_the_memory(mining):
    """All distances would be 1 GiB, without their order."""
    loss = partial(jaxloss.triplet_loss, mining=mining)
    _, memory = compiled(loss, ((16384, 512), np.float32), ((16384,), np.int32))
    assert memory < 150 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"mining": "semihard"}, {"mining": "all", "soft": True}])
def test_blocks_bound_the_memory_of_the_gradient(options):
    loss = jax.grad(partial(jaxloss.triplet_loss, block_size=16, **options))
    _, memory = compiled(loss, ((4096, 16), np.float32), ((4096,), np.int32))
    assert memory < 16 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"mining": "semihard"}, {"mining": "all"}], ids=str)
def test_second_derivatives(options):
    """Those of a block are computed again, in forward and in reverse mode."""
    features, labels = make_rows(4, n=9)
    features += 0.1 * np.random.default_rng(5).normal(size=features.shape)
    direction = np.random.default_rng(6).normal(size=features.shape)
    with enable_x64(True):
        loss = partial(jaxloss.triplet_loss, labels=jnp.asarray(labels), block_size=4, **options)
        gradient = jax.jit(jax.grad(loss), compiler_options=QUICK)
        x, v, step = jnp.asarray(features), jnp.asarray(direction), 1e-5
        value, slope = jax.jvp(loss, (x,), (v,))
        np.testing.assert_allclose(slope, jnp.vdot(gradient(x), v), rtol=1e-10)
        _, got = jax.jvp(gradient, (x,), (v,))
        expected = (gradient(x + step * v) - gradient(x - step * v)) / (2 * step)
        assert value > 0
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)
