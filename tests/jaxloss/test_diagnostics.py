"""Discriminability against loops over pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import precision
from tests.tolerances import FLOAT32, FLOAT64

HALF = (jnp.bfloat16, jnp.float16)
pytestmark = pytest.mark.usefixtures("checked_annotations")
run = jax.jit(jaxloss.discriminability)


def make(seed=60, n=15, dim=4):
    rng = np.random.default_rng(seed)
    features = rng.normal(0.5, 1.0, (n, dim)) * rng.uniform(0.1, 5.0, (n, 1))
    return features, rng.integers(-1, 4, n).astype(np.int32), rng.random(n) < 0.8


@pytest.mark.parametrize("dtype", [np.float32, np.float64, *HALF], ids=lambda t: t.__name__)
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "plain"])
def test_equals_loops_over_pairs(dtype, masked):
    """Half precision is computed in float32."""
    features, labels, where = make()
    rounded, given = features.astype(dtype), {"where": where} if masked else {}
    intra, inter = references.discriminability(np.float64(rounded), labels, **given)
    with precision(dtype):
        got = run(jnp.asarray(rounded), labels, **given)
        wide = np.float64 if dtype == np.float64 else np.float32
        assert all(x.dtype == wide and x.shape == () for x in got)
        got = np.asarray(got)
    tolerance = FLOAT64 if dtype == np.float64 else 4 * FLOAT32
    np.testing.assert_allclose(got, np.array([intra, inter, inter / intra]), rtol=tolerance)


def test_nan_is_hidden_in_rows_that_do_not_count_only():
    features, labels, where = make(63)
    features = features.astype(np.float32)
    expected = run(features, labels, where=where)
    features[~where | (labels < 0)] = np.nan
    labels = np.where(where, labels, 10**6)
    np.testing.assert_allclose(run(features, labels, where=where), expected, rtol=FLOAT32)
    features, labels, _ = make(64)
    labels[3], features[3, 0] = 1, np.nan
    got = run(np.float32(features), labels)
    assert np.isnan(got.inter)
    assert np.isnan(got.ratio)


RANDOM, PAIRS = np.random.default_rng(65).normal(size=(4, 3)), [0, 0, 1, 1]
EDGES = {
    "no same-class pair": (RANDOM, [0, 1, 2, 3], True),
    "no other-class pair": (RANDOM, [1, 1, 1, 1], True),
    "all masked": (RANDOM, PAIRS, False),
    "one sample": (RANDOM, [-1, -1, -1, 2], True),
    "empty batch": (RANDOM[:0], [], True),
    "zero": (np.zeros((4, 2)), PAIRS, True),
    "same": (np.ones((4, 2)), PAIRS, True),
    "collapsed": (np.array([[1, 0], [2, 0], [0, 3], [0, 1]]), PAIRS, True),
    "opposite": (np.array([[1, 0], [-1, 0], [1, 0], [-1, 0]]), PAIRS, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("dtype", [np.float32, *HALF], ids=lambda t: t.__name__)
def test_edge_cases_are_finite_and_right(name, dtype):
    """Without pairs, the values are zero."""
    features, labels, where = EDGES[name]
    rounded, labels = features.astype(dtype), np.array(labels, np.int32)
    given = {"where": np.full(len(labels), where)}
    intra, inter = references.discriminability(np.float64(rounded), labels, **given)
    got = run(jnp.asarray(rounded), labels, **given)
    assert all(np.isfinite(x) and x >= 0 for x in got)
    # The tolerances cover a sum of squared rounding errors.
    np.testing.assert_allclose(got.intra, intra, rtol=4 * FLOAT32, atol=1e-12)
    np.testing.assert_allclose(got.inter, inter, rtol=4 * FLOAT32, atol=1e-7)
    if inter == 0 or name == "no same-class pair":
        np.testing.assert_allclose(got.ratio, 0, atol=FLOAT32)
    if name == "collapsed":
        assert got.ratio > 1e5
