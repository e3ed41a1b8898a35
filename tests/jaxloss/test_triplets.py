"""The triplet loss: large classes, rows of NaN, and its memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss.harness import (
    QUICK,
    check_against_references,
    enable_x64,
    make_batch,
    over,
)
from tests.jaxloss.loss_table import CASES, make_features, make_labels
from tests.tolerances import FLOAT32

IN_BLOCKS = [
    row for row in CASES if row.name in ("triplet_all_in_blocks", "triplet_semihard_in_blocks")
]

every_mining = pytest.mark.parametrize("mining", ["hard", "semihard", "all"])


def make_rows(seed, n=14):
    rng = np.random.default_rng(seed)
    return jnp.asarray(make_features(rng, n, np.float32)), jnp.asarray(make_labels(rng, n))


@over(IN_BLOCKS, often=IN_BLOCKS[:1])
def test_a_class_of_more_samples_than_are_compared_at_a_time(row):
    """With duplicates within a class and between classes; one sample is left over."""
    batch = make_batch(row, seed=7, n=45, masked=False)
    features, labels = batch.args[0].copy(), np.int32(np.arange(45) >= 33)
    features[[7, 1]] = features[[6, 40]]
    batch = batch._replace(args=(features, labels))
    # Where rows are equal, a distance has no slope.
    check_against_references(row, batch, np.float64, (1e-10, 1e-10), 1e-10)


def test_a_negative_that_is_farther_by_rounding_is_not_farther():
    """At the distance of the positive, in another direction. The next one is beyond the margin."""
    rng = np.random.default_rng(9)
    x, steps = (jnp.asarray(rng.normal(size=(16, 1, 64)), jnp.float32) for _ in range(2))
    references = jnp.concatenate([x + steps, x + steps[..., ::-1], x - 2 * steps], axis=1)

    def loss(x, references):
        return jaxloss.triplet_loss(
            x,
            jnp.array([0]),
            references=references,
            reference_labels=jnp.array([0, 1, 1]),
            mining="semihard",
            normalize=False,
        )

    np.testing.assert_array_equal(jax.jit(jax.vmap(loss))(x, references), 0)


@every_mining
def test_rows_of_zeros_have_no_gradient(mining):
    """Their distances are 0, and so is the rounding of these."""
    loss = partial(jaxloss.triplet_loss, labels=make_rows(8)[1], mining=mining, normalize=False)
    value, gradient = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(jnp.zeros((14, 3)))
    np.testing.assert_allclose(value, 0.2, rtol=FLOAT32)
    assert not np.any(gradient)


@every_mining
def test_nan_in_a_row_without_positives_shows(mining):
    """The row is a negative of every anchor, and the farthest one of some."""
    features, labels = make_rows(8)
    features, labels = features.at[5].set(jnp.nan), labels.at[5].set(99)
    loss = jax.jit(partial(jaxloss.triplet_loss, mining=mining))
    assert np.isnan(loss(features, labels))


def test_nan_reaches_no_other_row_where_no_sample_counts():
    """In a batch of one class, whose anchors have no negative."""
    features, labels = make_rows(8)
    features = features.at[-1].set(jnp.nan)
    value, gradient = jax.jit(jax.value_and_grad(jaxloss.triplet_loss))(features, 0 * labels)
    assert value == 0
    np.testing.assert_array_equal(gradient[:-1], 0)


@pytest.mark.slow
@every_mining
def test_features_far_from_zero(mining):
    """An offset of all rows takes digits of theirs, and no more of the distances."""
    features, labels = make_rows(5)
    far = features + 1e4
    loss: Any = partial(jaxloss.triplet_loss, mining=mining, normalize=False)
    with enable_x64(True):
        expected = loss(np.asarray(far, np.float64), np.asarray(labels))
    np.testing.assert_allclose(loss(far, labels), expected, rtol=16 * FLOAT32)
