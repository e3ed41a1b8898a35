"""Classification losses and their logits."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from jaxloss.losses.hypersphere import row_norms
from tests.jaxloss.harness import QUICK, finite
from tests.jaxloss.loss_table import CLASSES, features_and_weights
from tests.tolerances import FLOAT32, rounded_to

N = 9


def test_a_count_is_a_target_of_one():
    logits = jnp.array([[0.5, -1.0, 2.0]])
    losses = [jaxloss.sigmoid_loss(logits, jnp.array([[n, 0, -1]])) for n in (1, 3)]
    np.testing.assert_allclose(*losses, rtol=FLOAT32)


@pytest.mark.parametrize("loss", [jaxloss.softmax_loss, jaxloss.sigmoid_loss])
def test_labels_of_eight_bits_among_many_classes(loss):
    """The numbers of the classes do not fit into the dtype of the labels."""
    logits, labels = jnp.cos(jnp.arange(600.0).reshape(2, 300)), jnp.array([0, 200])
    expected = loss(logits, labels)
    np.testing.assert_allclose(loss(logits, labels.astype(jnp.uint8)), expected, rtol=FLOAT32)


def test_gradient_of_targets_at_logits_of_zero():
    """As of a classifier that starts at zero."""
    targets = jnp.array([[1.0, 0.0, 0.25]])
    gradient = jax.grad(lambda z: jaxloss.sigmoid_loss(z, targets))(jnp.zeros((1, 3)))
    np.testing.assert_allclose(gradient, 0.5 - targets, rtol=FLOAT32)


def test_a_class_that_is_left_out_beside_a_traced_smoothing_of_zero():
    logits, labels = jnp.array([[0.5, -jnp.inf, 2.0]]), jnp.array([0])
    run = jax.jit(
        jax.value_and_grad(lambda z, e: jaxloss.softmax_loss(z, labels, label_smoothing=e))
    )
    value, gradient = run(logits, 0.0)
    np.testing.assert_allclose(value, jaxloss.softmax_loss(logits, labels), rtol=FLOAT32)
    assert finite(gradient)


def test_leading_axes():
    """As of one axis; "none" has them, and the samples of a class-wise loss are all of them."""
    rng = np.random.default_rng(41)
    logits, features = (rng.normal(size=(2, 3, k)).astype(np.float32) for k in (CLASSES, 5))
    labels, masks = rng.integers(-1, CLASSES, (2, 3)), {"where": rng.random((2, 3)) < 0.8}
    masks |= {"sample_weights": rng.random((2, 3), np.float32)}
    soft, targets = rng.dirichlet(np.ones(CLASSES), (2, 3)), rng.integers(-1, 2, (2, 3, CLASSES))
    weights = jnp.asarray(rng.normal(size=(5, CLASSES)))
    of_classes = partial(jaxloss.classifier_loss, weights=weights, metrics=True)
    cases: Any = (
        (jaxloss.softmax_loss, logits, labels),
        (jaxloss.softmax_loss, logits, soft),
        (jaxloss.sigmoid_loss, logits, targets),
        (jaxloss.class_wise_loss, logits, targets),
        (of_classes, features, labels),
        (of_classes, features, soft),
    )
    for loss, *arrays in cases:
        flat = [x.reshape(6, *x.shape[2:]) for x in arrays]
        for reduction in ("mean", "none"):
            got = loss(*arrays, **masks, reduction=reduction)
            flat_masks = {name: x.reshape(6) for name, x in masks.items()}
            expected = loss(*flat, **flat_masks, reduction=reduction)
            for ours, plain in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
                shape = (2, 3) if plain.shape == (6,) else plain.shape
                np.testing.assert_array_equal(ours, plain.reshape(shape))
    one = jaxloss.softmax_loss(logits[0, 1], jnp.int32(2), reduction="none")
    np.testing.assert_allclose(one, -jax.nn.log_softmax(logits[0, 1])[2], rtol=4 * FLOAT32)


def test_targets_that_are_negative_or_zero():
    """NaN in their row alone; where nothing is asked of a class, it may be left out."""
    logits = jnp.array([[0.5, -jnp.inf, 2.0], [0.5, 1.0, 2.0], [0.5, 1.0, 2.0]])
    targets = jnp.array([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0], [1.5, -0.5, 0.0]])
    runs: Any = (
        partial(jaxloss.softmax_loss, reduction="none"),
        lambda z, t: jaxloss.classifier_loss(
            jnp.eye(3), t, jnp.where(jnp.isinf(z), 0, z), block_size=3, reduction="none"
        ),
        lambda z, t: jaxloss.classifier_loss(
            jnp.zeros((3, 2)), t, jnp.ones((2, 3)), z[0], block_size=2, reduction="none"
        ),
    )
    for run in runs:
        np.testing.assert_array_equal(jnp.sign(run(logits, targets)), [1, 0, jnp.nan])
        pull_back = jax.vjp(run, logits, targets.at[2].set(targets[0]))[1]
        assert finite(pull_back(jnp.ones(3)))


@pytest.mark.parametrize("rows", [4, 512])
def test_targets_of_low_precision(rows):
    """In blocks of rows, too, their gradient has their dtype, as what computed them needs."""
    pull_back = jax.grad(lambda s, z: jaxloss.softmax_loss(z, jax.nn.softmax(s)))
    scores, logits = (jax.ShapeDtypeStruct((rows, 512), t) for t in (jnp.bfloat16, jnp.float32))
    assert jax.eval_shape(pull_back, scores, logits).dtype == jnp.bfloat16


def test_confident_logits_keep_their_small_loss():
    """Without log1p, log(1 + e^-30) is 0. The softmax loss may round to 0, its gradient may not."""
    logits = jnp.array([[30.0, 0.0]])
    gradient = jax.jit(jax.grad(lambda z: jaxloss.softmax_loss(z, jnp.array([0]))))(logits)
    np.testing.assert_allclose(gradient[0, 1], math.exp(-30), rtol=4 * FLOAT32)
    loss = jaxloss.sigmoid_loss(logits[:, :1], jnp.array([0]))
    np.testing.assert_allclose(loss, math.exp(-30), rtol=4 * FLOAT32)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_cosine_of_zero_vectors_and_nan(dtype):
    """Zero logits and zero gradients, for both sides; a vector with a NaN gives NaN."""
    features, weights = features_and_weights(np.random.default_rng(40), N, np.float64)
    features[2], weights[:, 1] = 0, 0
    cotangent = np.random.default_rng(43).normal(size=(N, CLASSES))

    @partial(jax.jit, compiler_options=QUICK)
    def run(*arrays):
        logits, pull_back = jax.vjp(jaxloss.cosine_logits, *arrays)
        return logits, *pull_back(jnp.asarray(cotangent, logits.dtype))

    x, w = (jnp.asarray(array, dtype) for array in (features, weights))
    logits, d_features, d_weights = run(x, w)
    for zeros in (logits[2], logits[:, 1], d_features[2], d_weights[:, 1]):
        assert not zeros.any()
    assert finite((logits, d_features, d_weights))
    assert d_features[0].any()
    for rows, columns in ((x.at[2, 1].set(jnp.nan), w), (x, w.at[1, 2].set(jnp.nan))):
        of_rows, of_columns = (np.isnan(np.asarray(a, np.float32)) for a in (rows, columns))
        expected = np.logical_or.outer(of_rows.any(axis=1), of_columns.any(axis=0))
        np.testing.assert_array_equal(np.isnan(run(rows, columns)[0]), expected)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_cosine_at_the_ends_of_a_dtype(dtype):
    """The largest numbers have a direction; the smallest normal number counts as zero."""
    limits, shape = jnp.finfo(dtype), jnp.array([[1.0, -0.5, 0.25, 0.0]])
    for scale, size in ((limits.max, 1.0), (4 * limits.tiny, 1.0), (limits.tiny, 0.0)):
        got = jaxloss.cosine_logits(shape.astype(dtype) * jnp.asarray(scale, dtype), shape.T)
        np.testing.assert_allclose(got, [[size]], rtol=max(FLOAT32, 2 * rounded_to(dtype)))


def test_squares_of_which_some_are_not_normal_numbers():
    """XLA takes them for 0: of many dimensions, their sum is a number without many of its parts."""
    rows = np.random.default_rng(44).normal(size=(3, 512))
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    rows, small = (jnp.asarray(x, jnp.float32) for x in (rows, 1e-19 * rows))
    for a, b in ((small, rows), (rows, small), (small, small)):
        np.testing.assert_allclose(jaxloss.cosine_logits(a, b.T), units @ units.T, atol=FLOAT32)
    norms = row_norms(small, jnp.ones(3, bool))
    np.testing.assert_allclose(norms, 1e-19 * np.linalg.norm(rows, axis=1), rtol=FLOAT32)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_soft_targets_in_blocks_of_rows_are_as_those_of_all_rows(reduction):
    """Where logits and targets do not fit a CPU's cache; `reduction="none"` has no blocks."""
    rng, size = np.random.default_rng(45), (256, 1024)
    logits, targets = rng.normal(size=size), rng.dirichlet(np.ones(1024), 256)
    logits[0, :3] = -np.inf
    targets[0, :3] = 0
    logits[1] = np.nan
    where = np.arange(256) != 1
    options = {"label_smoothing": 0.1, "logsumexp_penalty": 0.2, "where": where}
    weights = rng.uniform(1, 2, 256)

    def in_blocks(logits, targets, weights):
        loss = partial(jaxloss.softmax_loss, sample_weights=weights, reduction=reduction, **options)
        return loss(logits, targets)

    def of_rows(logits, targets, weights):
        values = jaxloss.softmax_loss(logits, targets, reduction="none", **options)
        weights = jnp.where(where, weights, 0)
        return jnp.sum(weights * jnp.where(where, values, 0)) / (
            jnp.sum(weights) if reduction == "mean" else 1
        )

    with jax.enable_x64(True):
        given = [jnp.asarray(x) for x in (logits, targets, weights)]
        assert "scan" in str(jax.make_jaxpr(in_blocks)(*given))
        for number in range(3):
            got, expected = (jax.grad(f, number)(*given) for f in (in_blocks, of_rows))
            np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-13)
        got, expected = (f(*given) for f in (in_blocks, of_rows))
        np.testing.assert_allclose(got, expected, rtol=1e-12)
