"""Discriminability against loops over pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import precision

HALF = (jnp.bfloat16, jnp.float16)
run = jax.jit(jaxloss.discriminability)


def make(seed=60, n=15, dim=4):
    rng = np.random.default_rng(seed)
    features = rng.normal(0.5, 1.0, (n, dim)) * rng.uniform(0.1, 5.0, (n, 1))
    return features, rng.integers(-1, 4, n).astype(np.int32), rng.random(n) < 0.8


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "plain"])
def test_equals_loops_over_pairs(dtype, masked):
    features, labels, where = make()
    given = {"where": where} if masked else {}
    intra, inter = references.discriminability(features, labels, **given)
    with precision(dtype):
        got = run(jnp.asarray(features, dtype), labels, **given)
        assert all(x.dtype == dtype and x.shape == () for x in got)
        got = np.asarray(got)
    tolerance = 1e-10 if dtype == np.float64 else 1e-5
    np.testing.assert_allclose(got, (intra, inter, inter / intra), rtol=tolerance)


@pytest.mark.parametrize("dtype", HALF, ids=["bfloat16", "float16"])
def test_half_precision(dtype):
    features, labels, where = make(62)
    narrow = jnp.asarray(features, dtype)
    got = run(narrow, jnp.asarray(labels), where=jnp.asarray(where))
    wide = run(narrow.astype(np.float32), jnp.asarray(labels), where=jnp.asarray(where))
    assert all(x.dtype == np.float32 for x in got)
    np.testing.assert_allclose(got, wide, rtol=1e-6)


def test_nan_is_hidden_in_rows_that_do_not_count_only():
    features, labels, where = make(63)
    features = features.astype(np.float32)
    expected = run(features, labels, where=where)
    features[~where | (labels < 0)] = np.nan
    labels = np.where(where, labels, 10**6)
    np.testing.assert_allclose(run(features, labels, where=where), expected, rtol=1e-6)
    features, labels, _ = make(64)
    labels[3], features[3, 0] = 1, np.nan
    got = run(np.float32(features), labels)
    assert np.isnan(got.inter)
    assert np.isnan(got.ratio)


@pytest.mark.parametrize(
    ("labels", "where"),
    [
        ([0, 1, 2, 3], True),
        ([1, 1, 1, 1], True),
        ([0, 0, 1, 1], False),
        ([-1, -1, -1, 2], True),
        ([], True),
    ],
    ids=["no same-class pair", "no other-class pair", "all masked", "one sample", "empty batch"],
)
def test_no_pairs_give_zero(labels, where):
    rng = np.random.default_rng(65)
    features, labels = rng.normal(size=(len(labels), 3)), np.array(labels, np.int32)
    where = np.full(len(labels), where)
    intra, inter = references.discriminability(features, labels, where=where)
    got = run(jnp.asarray(features, np.float32), jnp.asarray(labels), where=jnp.asarray(where))
    # The tolerance covers a sum of squared rounding errors.
    np.testing.assert_allclose(got.intra, intra, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(got.inter, inter, rtol=1e-5, atol=1e-7)
    assert np.isfinite(got.ratio)
    if inter == 0:
        np.testing.assert_allclose(got.ratio, 0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, *HALF], ids=["float32", "bfloat16", "float16"])
def test_degenerate_features_stay_finite(dtype):
    labels = jnp.array([0, 0, 1, 1])
    rows = {
        "zero": np.zeros((4, 2)),
        "same": np.ones((4, 2)),
        "collapsed": np.array([[1, 0], [2, 0], [0, 3], [0, 1]]),
        "opposite": np.array([[1, 0], [-1, 0], [1, 0], [-1, 0]]),
    }
    for name, features in rows.items():
        got = run(jnp.asarray(features, dtype), labels)
        assert all(np.isfinite(x) for x in got), name
        assert all(x >= 0 for x in got), name
        np.testing.assert_allclose(
            got[:2], references.discriminability(features, np.asarray(labels)), atol=1e-6
        )
    assert run(jnp.asarray(rows["collapsed"], dtype), labels).ratio > 1e5
