"""Classification losses and their logits."""

import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import raises
from tests.jaxloss.loss_table import CLASSES, features_and_weights, make_labels

N = 9


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(40)
    features, weights = features_and_weights(rng, N, np.float64)
    return features, weights, make_labels(rng, N), rng.normal(0, 0.3, CLASSES)


@pytest.mark.parametrize("margin", [-0.4, 0.0, 0.35])
@pytest.mark.parametrize("cosine", [False, True], ids=["eq7", "eq8"])
def test_margin_equations(problem, margin, cosine):
    """Eq. (7) with inner products, eq. (8) with cosines, term by term."""
    features, weights, labels, _ = problem
    scale, total = 3.0, 0.0
    for z, y in zip(features, labels, strict=True):

        def similarity(c, z=z):
            w = weights[:, c]
            return z @ w / math.sqrt((w @ w) * (z @ z)) if cosine else z @ w

        numerator = math.exp(scale * (similarity(y) - margin))
        others = sum(math.exp(scale * similarity(j)) for j in range(CLASSES) if j != y)
        total -= math.log(numerator / (numerator + others))
    function = jaxloss.cosine_logits if cosine else jaxloss.linear_logits
    with jax.enable_x64(True):
        logits = function(jnp.asarray(features), jnp.asarray(weights))
        loss = jaxloss.margin_softmax_loss(logits, jnp.asarray(labels), margin=margin, scale=scale)
        np.testing.assert_allclose(np.asarray(loss), total / N, rtol=1e-10)


def test_margin_zero_is_softmax_of_scaled_logits(problem):
    features, weights, labels, _ = problem
    with jax.enable_x64(True):
        logits, labels = jnp.asarray(features @ weights), jnp.asarray(labels)
        got = jaxloss.margin_softmax_loss(logits, labels, margin=0.0, scale=2.5)
        chex.assert_trees_all_close(got, jaxloss.softmax_loss(2.5 * logits, labels), rtol=1e-12)


def test_margin_moves_the_loss_the_right_way(problem):
    features, weights, labels, _ = problem
    logits = jnp.asarray(features @ weights, np.float32)
    losses = [
        float(jaxloss.margin_softmax_loss(logits, jnp.asarray(labels), margin=m, scale=4.0))
        for m in (-0.5, 0.0, 0.5)
    ]
    assert losses[0] < losses[1] < losses[2]


def test_margin_and_scale_are_required(problem):
    logits = jnp.zeros((3, 2))
    labels = jnp.zeros(3, int)
    incomplete: tuple[dict[str, Any], ...] = ({}, {"margin": 0.1}, {"scale": 2.0})
    for options in incomplete:
        with raises(TypeError):
            jaxloss.margin_softmax_loss(logits, labels, **options)
    with raises(TypeError):
        jaxloss.margin_softmax_loss(logits, labels, 0.1, 2.0)  # pyright: ignore


def test_smoothing_of_uniform_logits_is_the_log_of_the_class_count():
    loss = jaxloss.softmax_loss(jnp.zeros((2, 5)), jnp.array([0, 4]), label_smoothing=0.3)
    np.testing.assert_allclose(loss, math.log(5), rtol=1e-6)


def test_confident_logits_keep_their_small_loss():
    """Without log1p, log(1 + e^-30) is 0. The softmax loss may round to 0, its gradient may not."""
    logits = jnp.array([[30.0, 0.0]])
    gradient = jax.jit(jax.grad(lambda z: jaxloss.softmax_loss(z, jnp.array([0]))))(logits)
    np.testing.assert_allclose(gradient[0, 1], math.exp(-30), rtol=1e-5)
    loss = jaxloss.sigmoid_loss(logits[:, :1], jnp.array([0]))
    np.testing.assert_allclose(loss, math.exp(-30), rtol=1e-5)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.uint8, np.float32, jnp.bfloat16], ids=str)
def test_multi_hot_of_any_dtype(dtype):
    rng = np.random.default_rng(41)
    logits, targets = rng.normal(size=(6, 4)), rng.integers(0, 2, (6, 4))
    got = jaxloss.sigmoid_loss(jnp.asarray(logits, np.float32), jnp.asarray(targets, dtype))
    np.testing.assert_allclose(got, references.sigmoid_loss(logits, targets), rtol=1e-5)


def test_one_hot_targets_equal_integer_labels(problem):
    features, weights, labels, _ = problem
    with jax.enable_x64(True):
        logits = jnp.asarray(features @ weights)
        dense = jaxloss.sigmoid_loss(logits, jnp.asarray(np.eye(CLASSES)[labels]), reduction="none")
        sparse = jaxloss.sigmoid_loss(logits, jnp.asarray(labels), reduction="none")
        chex.assert_trees_all_close(dense, sparse, rtol=1e-12)


def test_unknown_targets_contribute_nothing():
    """Also with NaN logits. A row with unknown targets only does not count in the mean."""
    rng = np.random.default_rng(42)
    logits = rng.normal(size=(3, 4))
    targets = np.array([[1, -1, 0, 0], [-1, -1, -1, -1], [0, 1, -1, 1]])
    expected = references.sigmoid_loss(logits, targets)
    logits[targets < 0] = np.nan
    loss, gradient = jax.value_and_grad(jaxloss.sigmoid_loss)(
        jnp.asarray(logits, np.float32), jnp.asarray(targets)
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert not np.asarray(gradient)[targets < 0].any()
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("shape", [(5, 3), (4, 4), (5, 1)], ids=str)
def test_multi_hot_of_wrong_shape(shape):
    with raises(ValueError, match="labels"):
        jaxloss.sigmoid_loss(jnp.zeros((5, 4)), jnp.zeros(shape, int))


def test_cosine_of_zero_vectors(problem):
    """Zero logits and zero gradients, for both sides."""
    features, weights, _, _ = problem
    features, weights = features.copy(), weights.copy()
    features[2], weights[:, 1] = 0, 0
    rng = np.random.default_rng(43)
    cotangent = rng.normal(size=(N, CLASSES))

    @jax.jit
    def run(features, weights):
        logits, pull_back = jax.vjp(jaxloss.cosine_logits, features, weights)
        return logits, *pull_back(jnp.asarray(cotangent, logits.dtype))

    for dtype in (np.float32, jnp.bfloat16, jnp.float16):
        logits, d_features, d_weights = run(
            jnp.asarray(features, dtype), jnp.asarray(weights, dtype)
        )
        assert not np.asarray(logits)[2].any()
        assert not np.asarray(logits)[:, 1].any()
        assert not np.asarray(d_features)[2].any()
        assert not np.asarray(d_weights)[:, 1].any()
        for leaf in (logits, d_features, d_weights):
            assert np.isfinite(np.asarray(leaf, np.float32)).all()
        assert np.asarray(d_features)[0].any()


def test_cosine_does_not_hide_nan(problem):
    """A vector with a NaN gives NaN, unlike the zero vector."""
    features, weights, _, _ = problem
    features, weights = features.astype(np.float32), weights.astype(np.float32)
    features[2, 1] = np.nan
    logits = np.asarray(jaxloss.cosine_logits(jnp.asarray(features), jnp.asarray(weights)))
    assert np.isnan(logits[2]).all()
    assert np.isfinite(np.delete(logits, 2, axis=0)).all()
    logits = np.asarray(jaxloss.cosine_logits(jnp.ones((3, 7)), jnp.asarray(features.T)))
    assert np.isnan(logits[:, 2]).all()


def test_cosine_is_scale_free():
    """Also for vectors whose squares overflow or underflow in float32."""
    rng = np.random.default_rng(44)
    features, weights = (rng.normal(size=s).astype(np.float32) for s in ((3, 5), (5, 4)))
    expected = references.cosine_logits(features, weights)
    for scale in (1e-25, 1e-3, 1e25):
        got = jaxloss.cosine_logits(jnp.asarray(features * np.float32(scale)), jnp.asarray(weights))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_cosine_gradient_is_orthogonal_to_the_vector(problem):
    features, weights, _, _ = problem
    with jax.enable_x64(True):
        gradient = jax.grad(lambda x: jnp.sum(jaxloss.cosine_logits(x, jnp.asarray(weights)) ** 3))(
            jnp.asarray(features)
        )
    np.testing.assert_allclose(np.sum(features * np.asarray(gradient), axis=1), 0, atol=1e-12)


@pytest.mark.parametrize("function", [jaxloss.linear_logits, jaxloss.cosine_logits])
def test_logit_errors(function):
    good = jnp.zeros((5, 3)), jnp.zeros((3, 4))
    with raises(ValueError, match="features"):
        function(jnp.zeros(3), good[1])
    with raises(ValueError, match="weights"):
        function(good[0], jnp.zeros((4, 3)))
    with raises(ValueError, match="weights"):
        function(good[0], jnp.zeros(3))
    with raises(TypeError, match="features"):
        function(jnp.zeros((5, 3), int), good[1])
    with raises(TypeError, match="weights"):
        function(good[0], jnp.zeros((3, 4), int))


def test_bias_errors():
    good = jnp.zeros((5, 3)), jnp.zeros((3, 4))
    for shape in [(), (1,), (5,), (1, 4)]:
        with raises(ValueError, match="bias"):
            jaxloss.linear_logits(*good, jnp.zeros(shape))
    with raises(TypeError, match="bias"):
        jaxloss.linear_logits(*good, jnp.zeros(4, int))
