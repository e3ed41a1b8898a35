"""Losses of cosines: properties that the contract does not cover."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import enable_x64
from tests.jaxloss.loss_table import features_and_targets, make_features


def test_supcon_of_negatives_does_not_hide_nan_without_negatives():
    features = jnp.asarray(make_features(np.random.default_rng(97), 4, np.float32))
    labels = jnp.zeros(4, jnp.int32)
    loss = partial(jaxloss.supervised_contrastive_loss, denominator="negatives")
    both = jax.jit(jax.value_and_grad(loss))
    value, gradient = both(features.at[3].set(features[1]), labels)
    assert value == 0
    assert not np.any(gradient)
    value, gradient = both(features.at[2, 1].set(jnp.nan), labels)
    assert np.isnan(value)
    assert np.isnan(gradient[2]).any()


def test_supcon_multi_hot_references():
    rng = np.random.default_rng(93)
    (features, targets), (others, of_others) = (
        features_and_targets(rng, n, np.float64) for n in (9, 7)
    )
    targets[4], of_others[2] = -1, -1
    given = {"references": others, "reference_labels": of_others}
    loss = partial(jaxloss.supervised_contrastive_loss, reduction="none", block_size=4)
    with enable_x64(True):
        got = np.asarray(jax.jit(loss)(features, targets, **given))
    expected = references.supervised_contrastive_loss(features, targets, reduction="none", **given)
    assert np.count_nonzero(expected) > 4
    np.testing.assert_allclose(got, expected, rtol=1e-11)


@pytest.mark.parametrize("of_references", [False, True])
def test_supcon_does_not_hide_a_target_that_is_nan(of_references):
    """But one of a row that does not count is not looked at."""
    rows = jnp.asarray(make_features(np.random.default_rng(98), 6, np.float32))
    targets = jnp.asarray(np.eye(3)[[0, 1, 0, 1, 2, 2]], jnp.float32).at[4, 0].set(jnp.nan)

    def loss(rows, where):
        if of_references:
            given = {"references": rows, "reference_labels": targets, "reference_where": where}
            whole = jnp.where(jnp.isnan(targets), 0, targets)
            return jaxloss.supervised_contrastive_loss(rows[:3], whole[:3], **given)
        return jaxloss.supervised_contrastive_loss(rows, targets, where=where)

    both = jax.jit(jax.value_and_grad(loss))
    value, gradient = both(rows, jnp.ones(6, bool))
    assert np.isnan(value)
    assert np.isnan(gradient[4]).all()
    value, gradient = both(rows, jnp.arange(6) != 4)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
