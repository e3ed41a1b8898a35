"""Properties of the metric losses that the contract does not cover."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from jaxloss.core.linear import negative_squared_distances
from tests.jaxloss.harness import array_shapes, compiled, enable_x64
from tests.jaxloss.loss_table import make_features, make_labels
from tests.tolerances import FLOAT32

nca: Any = jax.jit(jaxloss.nca_loss, static_argnames=("temperature", "reduction"))
proto: Any = jax.jit(
    jaxloss.prototypical_loss, static_argnames=("temperature", "num_classes", "reduction")
)
MINING = ("hard", "semihard", "all")


def test_no_array_of_samples_by_samples_by_dimensions():
    n, dim = 48, 16
    rng = np.random.default_rng(50)
    features = jnp.asarray(make_features(rng, n, np.float32, dim))
    labels = jnp.asarray(rng.integers(0, 32, n))
    shapes = array_shapes(jax.value_and_grad(nca), features, labels)
    assert (n, dim) in shapes
    assert max(int(np.prod(shape)) for shape in shapes) <= n * n


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [nca, proto, partial(proto, num_classes=4)], ids=["nca", "proto", "proto_c"]
)
def test_large_offset_keeps_accuracy(loss):
    """Without centring, inner products of features far from zero cancel."""
    rng = np.random.default_rng(54)
    features = (make_features(rng, 12, np.float64) + 1000).astype(np.float32)
    labels = make_labels(rng, 12)
    where = np.arange(12) != 5
    features[5] = -1e6  # A masked row does not move the centre.
    run = jax.jit(jax.value_and_grad(loss))
    got = jax.tree.map(np.asarray, run(jnp.asarray(features), jnp.asarray(labels), where=where))
    with enable_x64(True):
        expected = jax.tree.map(
            np.asarray, run(jnp.asarray(features, np.float64), jnp.asarray(labels), where=where)
        )
    chex.assert_trees_all_close(
        jax.tree.map(np.float64, got),
        jax.tree.map(np.float64, expected),
        rtol=16 * FLOAT32,
        atol=4 * FLOAT32,
    )


def test_small_losses_are_not_rounded_to_zero():
    """A loss of e^-40 is not rounded to zero. A difference of two logarithms would be."""
    features = np.array([[0.0], [0.1], [6.5], [6.6]])
    labels = np.array([0, 0, 1, 1])
    got = nca(jnp.asarray(features, np.float32), jnp.asarray(labels))
    positive = np.exp(-0.01)
    per_sample = []
    for i in range(4):
        negative = sum(
            np.exp(-((features[i, 0] - features[j, 0]) ** 2))
            for j in range(4)
            if labels[j] != labels[i]
        )
        per_sample.append(np.log1p(negative / positive))
    # The logarithm of a tiny ratio has the absolute error of its exponent, 40 * eps(float32).
    np.testing.assert_allclose(got, np.mean(per_sample), rtol=16 * FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block_size", [*(pytest.param(size, marks=pytest.mark.long) for size in (1, 24)), 23, 100]
)
def test_blocks_of_any_size_change_nothing(block_size):
    rng = np.random.default_rng(71)
    features = jnp.float32(rng.normal(size=(24, 5)))
    labels = jnp.int32(rng.integers(0, 4, 24))
    expected = jax.jit(jax.value_and_grad(jaxloss.nca_loss))(features, labels)
    loss = jax.jit(jax.value_and_grad(partial(jaxloss.nca_loss, block_size=block_size)))
    chex.assert_trees_all_close(loss(features, labels), expected, rtol=4 * FLOAT32, atol=1e-7)


SIZE, ROWS, LABELS = 16384, ((16384, 512), np.float32), ((16384,), np.int32)


@pytest.mark.long
def test_blocks_bound_the_memory_of_the_gradient():
    loss = jax.value_and_grad(partial(jaxloss.nca_loss, block_size=256))
    _, memory = compiled(loss, ((SIZE, 64), np.float32), LABELS)
    assert memory < 128 * 2**20


@pytest.mark.parametrize(
    ("loss", "options", "second"),
    [
        (jaxloss.supervised_contrastive_loss, {"denominator": "negatives"}, LABELS),
        (jaxloss.triplet_loss, {"mining": "semihard"}, LABELS),
        (jaxloss.info_nce_loss, {}, ROWS),
        (jaxloss.retrieval_metrics, {}, LABELS),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                (jaxloss.supervised_contrastive_loss, {}, LABELS),
                (jaxloss.multi_similarity_loss, {"mining_margin": 0.1}, LABELS),
                (jaxloss.circle_loss, {}, LABELS),
                (jaxloss.triplet_loss, {"mining": "hard"}, LABELS),
                (jaxloss.triplet_loss, {"mining": "all"}, LABELS),
                (jaxloss.sigmoid_contrastive_loss, {}, ROWS),
            ]
        ),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_blocks_bound_the_memory(loss, options, second):
    """A matrix of all similarities would be 1 GiB."""
    _, memory = compiled(partial(loss, **options), ROWS, second)
    assert memory < 150e6


@pytest.mark.parametrize("loss", [jaxloss.nca_loss, jaxloss.prototypical_loss])
def test_second_derivative_at_duplicates(loss):
    """The clamp of the squared distances at 0 must not cut their curvature."""
    with enable_x64(True):
        rng = np.random.default_rng(72)
        features = rng.normal(size=(6, 3))
        features[1], features[4] = features[0], features[0]
        labels = jnp.array([0, 0, 1, 1, 1, 0])
        direction = jnp.asarray(rng.normal(size=features.shape))
        gradient = jax.jit(jax.grad(lambda x: loss(x, labels)))
        x, step = jnp.asarray(features), 1e-5
        _, got = jax.jvp(gradient, (x,), (direction,))
        expected = (gradient(x + step * direction) - gradient(x - step * direction)) / (2 * step)
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)


def test_derivatives_of_a_distance_that_is_rounded_below_zero():
    """The clamp is of the value alone. Otherwise, second derivatives of near rows are wrong."""
    arrays = jnp.array([[1.0 + 1e-6, 1.0]]), jnp.ones(1), jnp.ones(2)
    value, gradients = jax.value_and_grad(
        lambda *arrays: jnp.sum(negative_squared_distances(*arrays)), (0, 1, 2)
    )(*arrays)
    assert value == 0
    chex.assert_trees_all_equal(gradients, (jnp.array([[2.0, 2.0]]), -2 * arrays[1], -arrays[2]))


def test_ties_at_a_margin():
    """Of numbers without rounding: a pair at the margin is neither mined nor above 0."""
    anchor, own, others = jnp.eye(1, 2), jnp.array([[0.5, 0.0]]), jnp.array([[0.25, 0.0]])
    given = {"references": jnp.concatenate([own, others]), "reference_labels": jnp.array([0, 1])}
    loss = partial(
        jaxloss.multi_similarity_loss, anchor, jnp.array([0]), similarity="inner", **given
    )
    assert loss(mining_margin=0.25) == 0
    np.testing.assert_allclose(loss(mining_margin=0.2500001), loss(), rtol=FLOAT32)

    references, labels = jnp.array([[1.0], [2.0], [1.5], [5.5]]), jnp.array([0, 1, 1, 1])
    far = {"references": references, "reference_labels": labels, "normalize": False, "margin": 1.0}
    # The terms are 0, ½ and 0. Only those above 0 are in the mean over all.
    for mining in MINING:
        assert jaxloss.triplet_loss(jnp.zeros((1, 1)), labels[:1], mining=mining, **far) == 0.5


def test_labels_of_two_dtypes_do_not_wrap_around():
    """A label of references that does not fit into the dtype of `labels` is another class."""
    rng = np.random.default_rng(98)
    with enable_x64(True):
        features, references = (jnp.asarray(rng.normal(size=(3, 4))) for _ in range(2))
        labels, others = jnp.array([0, 1, 2], jnp.int32), jnp.array([2**32, 1, 7])
        losses = [
            jaxloss.nca_loss(features, labels, references=references, reference_labels=y)
            for y in (others, jnp.where(others == 2**32, 9, others))
        ]
    np.testing.assert_allclose(*losses, rtol=1e-12)


def test_nca_of_one_class_shows_a_nan_in_a_sample_that_counts():
    features, labels = jnp.ones((4, 3)), jnp.zeros(4, jnp.int32)
    assert jaxloss.nca_loss(features, labels) == 0
    assert jnp.isnan(jaxloss.nca_loss(features.at[1, 0].set(jnp.nan), labels))
