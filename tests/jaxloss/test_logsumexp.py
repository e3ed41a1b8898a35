"""Which logits have a peak in a log-sum-exp, and which are known to be small."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss.harness import QUICK, assert_close, widen
from tests.tolerances import FLOAT32


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
