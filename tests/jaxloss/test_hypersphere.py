"""Class means, balanced lengths, and the gradients of the prototype losses.

The properties that all losses share are in `test_contract.py` and `test_devices.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import enable_x64, precision
from tests.tolerances import FLOAT32

CLASSES = 5
HALF = (jnp.bfloat16, jnp.float16)
losses = pytest.mark.parametrize(
    "loss", [jaxloss.prototype_loss, jaxloss.dot_regression_loss], ids=["prototype", "dot"]
)
update = jax.jit(jaxloss.update_class_means)
lengths_of = jax.jit(jaxloss.class_balanced_lengths, static_argnums=1)


def make_batch(seed, n=24, dim=6):
    """Class 4 is absent, class 3 is only in rows that do not count."""
    rng = np.random.default_rng(seed)
    features = rng.normal(0.3, 1.0, (n, dim)) * rng.uniform(0.1, 5.0, (n, 1))
    labels = rng.choice([-1, 0, 1, 2], n, p=[0.2, 0.4, 0.25, 0.15]).astype(np.int32)
    where = rng.random(n) < 0.7
    labels[np.flatnonzero(~where)[:3]] = 3
    return features, labels, where


def make_means(seed, dim=6):
    """Of any length, because only updated means are normalised."""
    means = np.random.default_rng(seed).normal(size=(dim, CLASSES))
    means[:, 1] = 0
    return means


# Class means ----


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_class_means_equal_a_loop(dtype, decay):
    means, (features, labels, where) = make_means(40), make_batch(41)
    expected = references.class_means(means, features, labels, decay=decay, where=where)
    assert np.abs(expected - means).max() > 0.1
    with precision(dtype):
        x, y, w = jnp.asarray(features, dtype), jnp.asarray(labels), jnp.asarray(where)
        got = np.asarray(update(jnp.asarray(means, dtype), x, y, decay=decay, where=w))
    assert got.dtype == dtype
    np.testing.assert_allclose(got, expected, atol=1e-12 if dtype == np.float64 else FLOAT32)
    np.testing.assert_array_equal(got[:, 3:], means[:, 3:].astype(dtype))
    nothing = update(means, features, labels, where=np.zeros(24, bool))
    np.testing.assert_array_equal(nothing, means.astype(nothing.dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF, ids=["bfloat16", "float16"])
def test_half_precision_features_update_float32_means(dtype):
    """The dtype does not change, so the state can be a loop carry."""
    means, (features, labels, _) = make_means(49).astype(np.float32), make_batch(50)
    narrow = jnp.asarray(features, dtype)
    got = update(means, narrow, labels)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, update(means, narrow.astype(np.float32), labels), rtol=FLOAT32)
    assert update(jnp.asarray(means, dtype), features.astype(np.float32), labels).dtype == dtype


def test_degenerate_class_means_stay_finite():
    old = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]], np.float32)
    zero = update(old, np.zeros((3, 2), np.float32), np.arange(3))
    np.testing.assert_allclose(zero, old, atol=FLOAT32)
    # Samples that cancel, and a class mean that reverses its direction, without any rounding.
    opposite = np.array([[1.0, 2.0], [-1.0, -2.0], [0.0, -1.0]], np.float32)
    got = update(old, opposite, np.array([0, 0, 2]), decay=0.5)
    np.testing.assert_allclose(got, [[1, 0, 0], [0, 0, 0]], atol=FLOAT32)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_does_not_count_or_is_not_finite_does_not_reach_the_means(value):
    """One step with an overflow would make a class's mean NaN for the rest of the training."""
    means, (features, labels, where) = make_means(43), make_batch(44)
    row = np.flatnonzero(where & (labels >= 0))[0]
    others = where & (np.arange(len(where)) != row)
    expected = update(means, features, labels, where=others)
    for label in (CLASSES, 10**6):
        got = update(means, features, np.where(others, labels, label))
        np.testing.assert_array_equal(got, expected)
    features[row, 1], features[~where | (labels < 0)] = value, np.nan
    labels = np.where(where, labels, 10**6)
    np.testing.assert_array_equal(update(means, features, labels, where=where), expected)


def test_a_sum_that_overflows_leaves_the_mean_of_its_class():
    means, (features, labels, _) = make_means(47), make_batch(48)
    labels[:2], features[:2] = 0, 3e38
    got = np.asarray(update(means.astype(np.float32), features.astype(np.float32), labels))
    np.testing.assert_array_equal(got[:, 0], means[:, 0].astype(np.float32))
    assert np.isfinite(got).all()


# Lengths ----


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8])
def test_lengths_equal_a_loop(dtype):
    _, labels, where = make_batch(53)
    labels = np.abs(labels) if dtype == np.uint8 else labels
    for mask in (where, None, np.zeros(24, bool)):
        got = lengths_of(labels.astype(dtype), CLASSES, where=mask)
        assert got.dtype == np.float32
        expected = references.class_balanced_lengths(labels, CLASSES, where=mask)
        np.testing.assert_allclose(got, expected, rtol=FLOAT32)


# Gradients of the losses ----


def make_problem(seed, n=9, dim=6):
    rng = np.random.default_rng(seed)
    features = rng.normal(0.2, 1.0, (n, dim)) * rng.uniform(0.2, 4.0, (n, 1))
    prototypes = rng.normal(size=(dim, 7))
    prototypes /= np.linalg.norm(prototypes, axis=0)
    assignment = rng.permutation(7)[:CLASSES]
    return features, rng.integers(0, CLASSES, n), prototypes, assignment


def in_both_dtypes(loss, features, labels, prototypes):
    """Values and gradients of these numbers of float32, in float32 and in float64."""
    run = jax.jit(jax.value_and_grad(partial(loss, reduction="sum")))
    arrays = [np.float32(features), labels, np.float32(prototypes)]
    single = run(*map(jnp.asarray, arrays))
    with enable_x64(True):
        wide = jnp.asarray(arrays[0], jnp.float64), labels, jnp.asarray(arrays[2], jnp.float64)
        return single, jax.tree.map(np.asarray, run(*wide))


@losses
def test_an_aligned_feature_is_at_rest(loss):
    """Features along their prototypes (neural collapse) have loss 0 and a zero gradient."""
    _, labels, prototypes, assignment = make_problem(58)
    features = prototypes[:, assignment[labels]].T * np.linspace(0.1, 30, 9)[:, None]
    with enable_x64(True):
        run = jax.jit(jax.value_and_grad(partial(loss, reduction="sum")))
        arrays = map(jnp.asarray, (features, labels, prototypes))
        value, gradient = run(*arrays, assignment=jnp.asarray(assignment, jnp.int8))
    np.testing.assert_allclose(value, 0, atol=1e-10)
    np.testing.assert_allclose(gradient, 0, atol=1e-12)


@pytest.mark.slow
@losses
@pytest.mark.parametrize("scale", [1e-30, 1e-5, 1e5, 1e15])
def test_extreme_norms(loss, scale):
    """The squares of these numbers underflow or overflow in float32."""
    features, labels, prototypes, _ = make_problem(59)
    got, expected = in_both_dtypes(loss, scale * features, labels, prototypes)
    np.testing.assert_allclose(got[0], expected[0], rtol=4 * FLOAT32)
    np.testing.assert_allclose(got[1], expected[1], rtol=16 * FLOAT32)


# Assignments and lengths that do not fit ----


@pytest.mark.slow
@losses
@pytest.mark.parametrize("column", [-1, -8, 7, 10**6])
def test_an_assignment_out_of_range_is_nan_for_its_class_only(loss, column):
    features, labels, prototypes, assignment = make_problem(62)
    labels[:3], assignment = [1, 1, 2], assignment.astype(np.int32)
    assignment[1] = column
    args = [jnp.asarray(a) for a in (np.float32(features), labels, prototypes)]
    run = jax.jit(partial(loss, reduction="none"))
    values = run(*args, assignment=jnp.asarray(assignment))
    np.testing.assert_array_equal(np.isnan(values), labels == 1)
    where = jnp.asarray(labels != 1)
    assert np.isfinite(run(*args, assignment=jnp.asarray(assignment), where=where)).all()


# All of it together ----


@losses
def test_small_gaps_keep_their_digits(loss):
    """Near cos = 1, the optimum of both losses, 1 − cos cancels in float32."""
    rng = np.random.default_rng(81)
    prototypes = rng.normal(size=(64, 8)).astype(np.float32)
    labels = jnp.asarray(rng.integers(0, 8, 32))
    features = prototypes.T[labels] + 1e-3 * rng.normal(size=(32, 64))
    got, expected = in_both_dtypes(loss, features, labels, prototypes)
    np.testing.assert_allclose(got[0], expected[0], rtol=16 * FLOAT32)
    # The gaps are a thousandth of the features, whose roundings they keep.
    tolerance = 2**8 * FLOAT32 * np.abs(expected[1]).max()
    np.testing.assert_allclose(got[1], expected[1], atol=tolerance)


@losses
def test_padding_and_unused_prototypes_do_not_leak_into_second_derivatives(loss):
    """The ignored row has no effect on the prototype of class 0."""
    features, labels = jnp.eye(4, 3).at[3].set(jnp.nan), jnp.array([1, 2, 1, -1])
    leaves = features, (2 * jnp.eye(3, 3) - 0.5).at[:, 0].set(jnp.nan)

    def product(leaves):
        gradients = jax.grad(lambda leaves: loss(leaves[0], labels, leaves[1]))(leaves)
        return sum(jnp.sum(gradient**2) for gradient in gradients)

    for gradient in jax.jit(jax.grad(product))(leaves):
        assert np.isfinite(gradient).all()
