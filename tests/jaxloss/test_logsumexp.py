"""Log-sum-exps of parts merge into that of the whole."""

from functools import partial, reduce
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from jaxloss.core import logsumexp
from tests.jaxloss.harness import QUICK, assert_close, enable_x64, widen
from tests.tolerances import FLOAT32


@jax.jit
def merged(values, mask):
    """The log-sum-exps, from four parts of the columns."""
    cuts = pairwise((0, 2, 3, 7, 11))
    parts = [logsumexp.part(values[:, a:b], mask[:, a:b], axis=1) for a, b in cuts]
    return logsumexp.result(reduce(logsumexp.merge, parts))


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
    got = merged(logsumexp.finite_from_below(values) if raised else values, mask)
    assert bool(np.isneginf(got[0])) is not raised


@pytest.mark.slow
def test_small_logits_need_no_peak():
    """Of cosines: rows that are equal or opposite; a number at the limit, and one beyond it."""
    rng = np.random.default_rng(71)
    x, z = rng.normal(size=(2, 12, 4)).astype(np.float32)
    x[3], x[4], z[:3], z[3:5] = x[1], -x[1], x[:3], -x[3:5]

    def run(x, number):
        def loss(x):
            return 1e-6 * jaxloss.info_nce_loss(x, z, temperature=1 / number, block_size=5)

        along = jax.jvp(jax.grad(loss), (x,), (jnp.cos(z),))[1]
        return jax.value_and_grad(loss)(x), along

    traced = jax.jit(run, compiler_options=QUICK)
    for number in (20.0, 64.0):
        known = jax.jit(lambda x, t=number: run(x, t), compiler_options=QUICK)(x)
        assert_close(widen(known), widen(traced(x, number)), number * FLOAT32)


def test_a_bound_has_all_parts_of_a_logit():
    """10 of the temperature alone is within the limit, and e^110 is infinite."""
    x: Any = np.eye(3, 2, dtype=np.float32)[[0, 0, 1]]
    loss = jaxloss.info_nce_loss(x, x, temperature=0.1, hardness=100.0, reduction="none")
    np.testing.assert_allclose(loss, [100, 100, np.log(1 + 2 * np.exp(-10))], rtol=FLOAT32)
    others: tuple[dict[str, Any], ...] = {"key_bias": 100 * x[:, 0]}, {"temperature": 0.01}
    for options in others:
        assert np.isfinite(jaxloss.info_nce_loss(x, x, **{"temperature": 0.1, **options}))


@pytest.mark.parametrize("number", [20, 20.0, 1e-9])
def test_a_known_number_is_in_its_limit(number):
    assert logsumexp.is_at_most(20, number)
    assert not logsumexp.is_at_most(20, 21.0)
    jax.jit(_is_not_known)(number)


def _is_not_known(traced):
    assert not logsumexp.is_at_most(20, traced)


def test_a_part_without_numbers_is_empty():
    part = logsumexp.part_relative_to(jnp.ones(2), jnp.ones((2, 3)), jnp.zeros((2, 3), bool), 1)
    assert np.isneginf(logsumexp.result(part)).all()


def test_logits_of_no_bound_have_a_peak():
    """Inner products, whatever the scale and the temperature, and cosines with a bias."""
    x, w = jnp.full((4, 2), 100.0), jnp.asarray([[1.0, 2.0, 0.0], [1.0, 1.0, 0.0]])
    labels, far = jnp.asarray([1, 0, 1, 1]), jnp.asarray([200.0, 0.0, -200.0])
    classifier = partial(jaxloss.classifier_loss, x, labels, w)
    np.testing.assert_allclose(classifier(reduction="none"), [0, 100, 0, 0], atol=1e-5)
    assert jnp.isfinite(classifier(far, similarity="cosine"))
    rows = jnp.asarray([[10.0, 0.0], [10.0, 0.0], [0.0, 10.0], [0.0, 10.0]])
    for denominator in ("all", "negatives"):
        loss = jaxloss.supervised_contrastive_loss(
            rows,
            jnp.asarray([0, 1, 0, 1]),
            temperature=1.0,
            similarity="inner",
            denominator=denominator,
        )
        np.testing.assert_allclose(loss, 100.0, rtol=0.02)
    np.testing.assert_allclose(
        jaxloss.info_nce_loss(rows[:2], rows[:2], temperature=1.0, similarity="inner"),
        np.log(2),
        rtol=1e-5,
    )
