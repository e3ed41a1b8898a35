"""Log-sum-exps of parts merge into that of the whole."""

from functools import reduce
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxloss import _logsumexp
from jaxloss._logsumexp import finite_from_below
from tests.jaxloss.harness import enable_x64

CUTS = (0, 2, 3, 7, 11)


def problem():
    """Rows of which one has no value in the mask, and one no value in the first parts."""
    rng = np.random.default_rng(70)
    values, mask = rng.normal(0, 400, (5, 11)), rng.random((5, 11)) < 0.6
    mask[1], mask[2, :7] = False, False
    mask[2, 8] = True
    return jnp.asarray(values), jnp.asarray(mask)


def merged(values, mask):
    """The log-sum-exps, from four parts of the columns."""
    parts = [_logsumexp.part(values[:, a:b], mask[:, a:b], axis=1) for a, b in pairwise(CUTS)]
    return _logsumexp.result(reduce(_logsumexp.merge, parts))


def test_parts_merge_into_the_whole():
    with enable_x64(True):
        values, mask = problem()
        expected = jax.nn.logsumexp(values, axis=1, where=mask)
        assert expected[1] == -np.inf
        np.testing.assert_allclose(merged(values, mask), expected, rtol=1e-14)
        got = _logsumexp.logsumexp(values.T, mask.T, axis=0)
        np.testing.assert_allclose(got, expected, rtol=1e-14)
        both = _logsumexp.two_parts(values, (mask, ~mask), axis=1)
        for part, members in zip(both, (mask, ~mask), strict=True):
            expected = jax.nn.logsumexp(values, axis=1, where=members)
            np.testing.assert_allclose(_logsumexp.result(part), expected, rtol=1e-14)


def test_gradient_is_the_softmax_in_the_mask():
    with enable_x64(True):
        values, mask = problem()
        got = jax.grad(lambda v: jnp.sum(jnp.where(mask.any(1), merged(v, mask), 0)))(values)
        expected = jax.nn.softmax(jnp.where(mask, values, -jnp.inf), axis=1)
        np.testing.assert_allclose(got, jnp.where(mask, expected, 0), rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("raised", [False, True])
def test_minus_infinity_counts_as_no_value_unless_it_is_raised(raised):
    values, mask = jnp.full((1, 3), -jnp.inf), jnp.ones((1, 3), bool)
    got = merged(finite_from_below(values) if raised else values, mask)
    assert bool(np.isneginf(got[0])) is not raised
