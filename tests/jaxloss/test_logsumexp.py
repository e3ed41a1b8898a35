"""Log-sum-exps of parts merge into that of the whole."""

from functools import reduce
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxloss import _logsumexp
from tests.jaxloss.harness import enable_x64


@jax.jit
def merged(values, mask):
    """The log-sum-exps, from four parts of the columns."""
    cuts = pairwise((0, 2, 3, 7, 11))
    parts = [_logsumexp.part(values[:, a:b], mask[:, a:b], axis=1) for a, b in cuts]
    return _logsumexp.result(reduce(_logsumexp.merge, parts))


@pytest.mark.slow
def test_parts_merge_into_the_whole():
    """Also in a row without values in the mask, and in one without values in the first parts."""
    rng = np.random.default_rng(70)
    values, mask = rng.normal(0, 400, (5, 11)), rng.random((5, 11)) < 0.6
    mask[1], mask[2, :7], mask[2, 8] = False, False, True
    with enable_x64(True):
        values, mask = jnp.asarray(values), jnp.asarray(mask)
        got, pull_back = jax.vjp(lambda v: merged(v, mask), values)
        (gradient,) = pull_back(jnp.where(mask.any(axis=1), 1.0, 0.0))
        expected = jax.nn.logsumexp(values, axis=1, where=mask)
        shares = jnp.where(mask, jnp.exp(values - expected[:, None]), 0)
        assert expected[1] == -jnp.inf
    np.testing.assert_allclose(got, expected, rtol=1e-14)
    np.testing.assert_allclose(gradient, shares, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("raised", [False, True])
def test_minus_infinity_counts_as_no_value_unless_it_is_raised(raised):
    values, mask = jnp.full((1, 11), -jnp.inf), jnp.ones((1, 11), bool)
    got = merged(_logsumexp.finite_from_below(values) if raised else values, mask)
    assert bool(np.isneginf(got[0])) is not raised
