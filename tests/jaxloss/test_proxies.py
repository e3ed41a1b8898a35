"""Proxy anchor and proxy NCA by hand."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss.harness import assert_close, raises
from tests.tolerances import FLOAT32

N, DIM, CLASSES = 14, 6, 5


def arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Class 4 has no sample."""
    rng = np.random.default_rng(140)
    features = rng.normal(0.1, 1.0, (N, DIM)) * np.linspace(0.4, 1.2, DIM)
    proxies = rng.normal(0.05, 0.6, (DIM, CLASSES))
    labels = rng.integers(0, 4, N)
    return jnp.asarray(features), jnp.asarray(labels, jnp.int32), jnp.asarray(proxies)


@pytest.mark.parametrize("loss", [jaxloss.proxy_nca_loss, jaxloss.proxy_anchor_loss])
def test_rows_that_are_normalised_before(loss):
    """A zero proxy is at distance one of all unit vectors."""
    features, labels, proxies = arrays()
    proxies = proxies.at[:, 1].set(0)
    units = features / jnp.linalg.norm(features, axis=1, keepdims=True)
    norms = jnp.linalg.norm(proxies, axis=0, keepdims=True)
    expected = loss(units, labels, proxies / jnp.where(norms == 0, 1, norms), normalize=False)
    np.testing.assert_allclose(loss(features, labels, proxies), expected, rtol=4 * FLOAT32)
    assert abs(loss(features, labels, proxies, normalize=False) - expected) > 0.1


def test_weights_of_proxy_anchor_count_samples():
    """Weight 2 is the same sample twice, and weight 0 removes it, and its class."""
    features, labels, proxies = arrays()
    labels = jnp.where(labels == 3, 0, labels).at[0].set(3)  # The only sample of class 3.
    weights = jnp.ones(N).at[5].set(2.0).at[0].set(0.0)
    run = jax.jit(jax.value_and_grad(jaxloss.proxy_anchor_loss, 2))
    got = run(features, labels, proxies, sample_weights=weights)
    rows = np.array([*range(1, N), 5])
    expected = run(features[rows], labels[rows], proxies)
    assert_close(got, expected, FLOAT32)


@pytest.mark.slow
def test_a_small_loss_keeps_its_digits():
    """Of a softmax that is almost 1, and of a class whose samples are all at the margin."""
    arrays = jnp.asarray([[1.0, 0.0]]), jnp.asarray([0]), jnp.asarray([[1.0, -1.0], [0.0, 0.0]])
    np.testing.assert_allclose(jaxloss.proxy_nca_loss(*arrays), math.exp(-36), rtol=16 * FLOAT32)
    loss = jaxloss.proxy_anchor_loss(*arrays, scale=30.0)
    np.testing.assert_allclose(loss, 1.5 * math.exp(-27), rtol=16 * FLOAT32)


def test_wrong_arguments_are_named():
    features, labels, proxies = arrays()
    for loss in (jaxloss.proxy_anchor_loss, jaxloss.proxy_nca_loss):
        for shape in ((DIM,), (DIM + 1, CLASSES), (CLASSES, DIM), (DIM, 0)):
            with raises(ValueError, r"`proxies` must have shape \[d, C\]"):
                loss(features, labels, jnp.zeros(shape))
        with raises(TypeError, "`proxies` must have a float dtype"):
            loss(features, labels, jnp.zeros((DIM, CLASSES), jnp.int32))
    none: Any = {"reduction": "none"}
    with raises(ValueError, "`reduction` must be mean or sum for proxy_anchor_loss, got 'none'"):
        jaxloss.proxy_anchor_loss(features, labels, proxies, **none)
    with raises(ValueError, "`proxies` must have at least 2 columns with include_own=False"):
        jaxloss.proxy_nca_loss(features, labels, proxies[:, :1], include_own=False)
    one = jaxloss.proxy_nca_loss(features, 0 * labels, proxies[:, :1])
    assert one == 0
