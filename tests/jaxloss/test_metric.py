"""Properties of the metric losses that the contract does not cover."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss.harness import P, compiled, enable_x64, over_mesh
from tests.jaxloss.loss_table import make_features, make_labels
from tests.tolerances import FLOAT32

nca: Any = jax.jit(jaxloss.nca_loss, static_argnames=("temperature", "reduction"))
proto: Any = jax.jit(
    jaxloss.prototypical_loss, static_argnames=("temperature", "num_classes", "reduction")
)
MINING = ("hard", "semihard", "all")


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


def gradient_of_options(loss, queries, keys, labels):
    """Of arrays of this device."""

    def total(queries, keys, bias, own_keys):
        options = {"equal_ids": "positive", "hardness": 0.5, "margin_of_false_negatives": 0.1}
        arrays = {"key_bias": bias, "own_keys": own_keys, "ids": labels, "axis_name": "batch"}
        value, metrics = loss(queries, keys, **arrays, **options, metrics=True)
        return value + metrics.logsumexp

    own_keys = jnp.stack([keys, queries], axis=1)
    return jax.grad(total, argnums=(0, 1, 2, 3))(queries, keys, keys[:, 0], own_keys)


ROWS, LABELS = ((16384, 512), np.float32), ((16384,), np.int32)
SOME, OF_SOME = ((4096, 16), np.float32), ((4096,), np.int32)
FEW = [((8192, 16), np.float32), ((8192, 16), np.float32), ((8192,), np.int32)]
NARROW = ((16384, 32), np.float32)
long = partial(pytest.param, marks=pytest.mark.long)
slow = partial(pytest.param, marks=pytest.mark.slow)
supcon, triplets, gradient = (
    jaxloss.supervised_contrastive_loss,
    jaxloss.triplet_loss,
    partial(jax.grad, argnums=0),
)


@pytest.mark.parametrize(
    ("function", "arrays", "limit"),
    [
        # A matrix of all similarities would be 1 GiB.
        (partial(supcon, denominator="negatives"), (ROWS, LABELS), 150e6),
        (partial(triplets, mining="semihard"), (ROWS, LABELS), 150e6),
        (jaxloss.info_nce_loss, (ROWS, ROWS), 150e6),
        (jaxloss.retrieval_metrics, (ROWS, LABELS), 150e6),
        long(supcon, (ROWS, LABELS), 150e6),
        long(partial(jaxloss.multi_similarity_loss, mining_margin=0.1), (ROWS, LABELS), 150e6),
        long(jaxloss.circle_loss, (ROWS, LABELS), 150e6),
        long(triplets, (ROWS, LABELS), 150e6),
        long(partial(triplets, mining="all"), (ROWS, LABELS), 150e6),
        long(jaxloss.sigmoid_contrastive_loss, (ROWS, ROWS), 150e6),
        # Of gradients: 1 GiB, and 625 MiB of logits of 10,000 classes; 64 MiB of fewer rows.
        long(gradient(partial(jaxloss.nca_loss, block_size=256)), (NARROW, LABELS), 64 * 2**20),
        (gradient(jaxloss.prototypical_loss), (NARROW, LABELS), 64 * 2**20),
        (
            gradient(partial(jaxloss.prototypical_loss, num_classes=10_000, block_size=64)),
            (NARROW, LABELS),
            64 * 2**20,
        ),
        # With means of all classes, not of those that the rows can have, 64 MiB.
        (gradient(partial(jaxloss.prototypical_loss, num_classes=2**20)), (SOME, OF_SOME), 2**24),
        slow(gradient(partial(triplets, block_size=16, mining="semihard")), (SOME, OF_SOME), 2**24),
        slow(
            gradient(partial(triplets, block_size=16, mining="all", soft=True)),
            (SOME, OF_SOME),
            2**24,
        ),
    ],
)
def test_blocks_bound_the_memory(function, arrays, limit):
    assert compiled(function, *arrays)[1] < limit


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [jaxloss.sigmoid_contrastive_loss, long(jaxloss.info_nce_loss)],
)
def test_a_ring_bounds_the_memory_of_options(loss, monkeypatch):
    """An array of all logits of a device would be 64 MiB."""
    monkeypatch.setattr("jaxloss.pairs.visits.GATHERED_BYTES", 0)
    run = over_mesh(partial(gradient_of_options, loss), P("batch"), P("batch"))
    assert compiled(run, *FEW)[1] < 48 * 2**20


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
