"""Properties of the multi-label losses that the contract does not cover."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import (
    assert_close,
    compiled,
    enable_x64,
    equations,
    finite,
    magnitude,
    mesh,
    numbers_of,
    over,
    widen,
)
from tests.jaxloss.loss_table import CASES, LOSSES, logits_and_targets
from tests.tolerances import FLOAT32

every_loss = over([row for row in CASES if row.multi_hot and not row.kwargs])
sample_wise: Any = jax.jit(jaxloss.sample_wise_loss, static_argnames="reduction")
class_wise: Any = jax.jit(jaxloss.class_wise_loss, static_argnames="reduction")
robust_gradient: Any = jax.jit(jax.value_and_grad(jaxloss.robust_multilabel_loss))
warp_gradient: Any = jax.jit(jax.value_and_grad(jaxloss.warp_loss))
TEMPERATURES = "positive_temperature", "negative_temperature"


def of_columns(logits, targets, **options):
    return class_wise(logits.T, targets.T, **options)


every_set = pytest.mark.parametrize("loss", [sample_wise, of_columns], ids=["sample", "class"])


def problem(seed):
    return logits_and_targets(np.random.default_rng(seed), 9, np.float64)


def in_float64(function, *args, **options):
    """The result of `function` for arrays in float64, as NumPy."""
    with enable_x64(True):
        result = function(*map(jnp.asarray, args), **options)
        return jax.tree.map(np.asarray, result)


def close(got, expected, tolerance=1e-12):
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * magnitude(expected))


# Empty sets, unknown targets ----


@every_set
def test_without_negatives_the_loss_is_zero_and_counts(loss):
    """Sets: both, only positives, only negatives, nothing known."""
    logits = np.random.default_rng(72).normal(size=(4, 3))
    targets = np.array([[1, 0, 0], [1, 1, -1], [0, -1, 0], [-1, -1, -1]])
    terms = in_float64(loss, logits, targets, reduction="none")
    assert terms[0] > 0
    assert np.all(terms[1:] == 0)
    assert not np.signbit(terms).any()
    value, gradient = in_float64(jax.jit(jax.value_and_grad(loss)), logits, targets)
    close(value, terms[0] / 2)
    assert np.all(gradient[0] != 0)
    assert np.all(gradient[1:] == 0)


@pytest.mark.slow
@every_loss
def test_an_unknown_target_is_a_class_that_is_not_there(row):
    logits, targets = problem(73)
    grad = jax.jit(jax.value_and_grad(row.function))
    expected = in_float64(grad, logits, targets)
    assert not expected[1][targets < 0].any()
    for value in (np.nan, np.inf, 1e30):
        replaced = np.where(targets < 0, value, logits)
        got = in_float64(grad, replaced, np.where(targets < 0, -7, targets))
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    targets[:, 1] = -1
    got, gradient = in_float64(grad, logits, targets)
    without = (np.delete(array, 1, axis=1) for array in (logits, targets))
    expected, its_gradient = in_float64(grad, *without)
    close(got, expected)
    close(np.delete(gradient, 1, axis=1), its_gradient)


@pytest.mark.slow
@every_loss
def test_a_single_class(row):
    rng = np.random.default_rng(74)
    logits = rng.normal(size=(5, 1))
    grad = jax.jit(jax.value_and_grad(row.function))
    for targets in (rng.integers(-1, 2, (5, 1)), np.ones((5, 1), int)):
        got, gradient = in_float64(grad, logits, targets)
        close(got, row.reference(logits, targets))
        assert np.isfinite(gradient).all()


@pytest.mark.slow
@every_loss
def test_nan_target_is_not_hidden(row):
    logits, targets = (array.astype(np.float32) for array in problem(75))
    targets[[2, 3], [1, 3]] = [np.nan, -1]
    grad = jax.jit(jax.value_and_grad(row.function))
    value, gradient = grad(logits, targets)
    assert np.isnan(value)
    assert np.isnan(gradient).any()
    assert finite(grad(logits, targets, where=jnp.arange(9) != 2))


# Hyperparameters ----


@every_set
def test_gradients_by_the_temperatures_of_empty_sets(loss):
    """Where log Σ must not give −∞ · 0. `test_contract` has those of other sets."""
    logits, targets = problem(78)
    targets[0], targets[1], targets[:, 0], targets[2] = 1, 0, 1, -1

    def run(temperatures):
        options = dict(zip(TEMPERATURES, temperatures, strict=True))
        return loss(jnp.asarray(logits), jnp.asarray(targets), **options)

    values = np.array([1.7, 0.6])
    got = in_float64(jax.jit(jax.grad(run)), values)
    moved = [in_float64(run, values + sign * e) for e in 1e-6 * np.eye(2) for sign in (1, -1)]
    close(got, -np.diff(moved)[::2] / 2e-6, 1e-7)


@every_set
@pytest.mark.parametrize("size", [1.0, 1e10, 1e15, 1e19, 1e36])
def test_gradients_by_the_temperatures_of_large_logits(loss, size):
    """They are entropies, here of one positive and of two equal negatives: 0 and log 2."""
    logits = jnp.array([[40.0, 40.0, -40.0, -80.0]], jnp.float32) * np.float32(size)
    value = partial(loss, logits, jnp.array([[0, 0, 1, 1]]))
    got = jax.grad(lambda numbers: value(**numbers))(dict.fromkeys(TEMPERATURES, 1.0))
    for name, entropy in zip(TEMPERATURES, (0, np.log(2)), strict=True):
        np.testing.assert_allclose(got[name], entropy, rtol=FLOAT32, atol=FLOAT32)


@every_set
def test_a_set_of_infinite_logits_that_are_right_is_not_empty(loss):
    """Positives of ∞ alone, beside negatives and without, and negatives of −∞."""
    logits = jnp.array([[np.inf, np.inf], [np.inf, 0.0], [0.0, -np.inf]])
    targets = jnp.array([[1, 1], [1, 0], [1, 0]])
    terms = partial(loss, targets=targets, reduction="none")
    np.testing.assert_array_equal(terms(logits), 0)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(terms(x))))
    np.testing.assert_array_equal(gradient(logits), 0)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (sample_wise, TEMPERATURES),
        (of_columns, TEMPERATURES),
        (jaxloss.multilabel_softmax_loss, ()),
    ],
)
def test_a_nan_of_a_sample_without_positives_reaches_no_gradient(loss, options):
    def mean(logits, temperature):
        return loss(logits, targets, **dict.fromkeys(options, temperature))

    logits = jnp.array([[0.3, 0.2, 0.1], [1.0, 2.0, 0.0], [0.5, -1.0, 0.4]])
    targets = jnp.array([[0, 0, 0], [1, 0, 0], [0, 1, 1]])
    gradient = jax.jit(jax.value_and_grad(mean, (0, 1)))
    expected = gradient(logits, 2.0)
    assert not expected[1][0][0].any()
    chex.assert_trees_all_equal(gradient(logits.at[0, 1].set(jnp.nan), 2.0), expected)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [jaxloss.multilabel_softmax_loss, sample_wise])
@pytest.mark.parametrize("size", [-3e38, np.finfo(np.float32).min, 3e38])
def test_logits_at_the_lowest_float(loss, size):
    """With which people mask logits: a loss does not change if all of them are moved."""
    logits, targets = jnp.full((1, 5), size, jnp.float32), jnp.array([[1, 0, 0, 0, -1]])
    run = jax.jit(jax.value_and_grad(loss))
    assert_close(widen(run(logits, targets)), widen(run(0 * logits, targets)), FLOAT32)


@pytest.mark.slow
@over([row for row in LOSSES if row.kind == "targets"], often=[])
def test_no_infinity_is_meant(row):
    """Op by op, under `jax.debug_infs`, in batches with a row or a class of a single kind."""
    logits, targets = (jnp.asarray(array, jnp.float32) for array in problem(70))
    cases = [(logits, targets.at[2].set(v).at[:, 1].set(v), row.kwargs) for v in (0, 1, -1)]
    if "negative_temperature" in numbers_of(row):  # A compiled division would not look again.
        low = {"negative_temperature": 0.5, "positive_temperature": 0.1}
        cases.append((logits[:-1], targets[:-1], low))
    for z, y, options in cases:
        with jax.debug_infs(True):
            jax.grad(partial(row.function, targets=y, **options))(z)


# The baselines ----


def test_multilabel_softmax_normalises_the_targets():
    """At the minimum, the softmax equals the normalised targets."""
    logits, targets = problem(70)[0], np.tile([0.5, 0.0, 1.5, -1.0], (9, 1))
    expected = references.multilabel_softmax_loss(logits, targets, reduction="none")
    softmax = jaxloss.multilabel_softmax_loss
    close(in_float64(softmax, logits, targets, reduction="none"), expected)
    right = np.log([[1.0, 1e-30, 3.0, 7.0]])
    gradient = in_float64(jax.jit(jax.grad(softmax)), right, targets[:1])
    np.testing.assert_allclose(gradient, 0, atol=1e-15)


@partial(jax.jit, static_argnames="stop")
def asymmetric_derivatives(logits, targets, focus, clip, *, stop):
    """The terms, the gradient of their sum by all floats, and the curvature if C is 1."""

    def terms(z, focus, clip):
        options = {"positive_focus": focus, "negative_focus": focus, "clip": clip}
        loss: Any = partial(jaxloss.asymmetric_loss, reduction="none", stop_focus_gradient=stop)
        return loss(z, targets, **options)

    def gradient(z):
        return jax.grad(lambda *numbers: jnp.sum(terms(*numbers)), (0, 1, 2))(z, focus, clip)

    slopes, (curvature, *_) = jax.jvp(gradient, (logits,), (jnp.ones_like(logits),))
    return terms(logits, focus, clip), *slopes, curvature


@pytest.mark.parametrize("clip", [0.0, 0.05, 0.9])
@pytest.mark.parametrize("focus", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_asymmetric_is_finite_and_right_for_any_logit(clip, focus, dtype):
    """Also at the clip, where q is 0. Near it, its rounding error is large, and that of a root."""
    sizes = np.array([1e4, 1e3, 110, 95, 89, 80.5, 80, 50, 17, 5, 1, 0.1])
    kink = np.log(clip / (1 - clip)) if clip else 0.0
    near = kink + np.array([0, 1e-7, -1e-7, 1e-5, -1e-5, 1e-3])
    x = np.concatenate([-sizes, sizes, near]).astype(dtype)[:, None]
    wide, beside = x.astype(np.float64), (np.abs(x[:, 0] - kink) < 1e-2) & (clip > 0)
    p, not_p = np.exp(-np.logaddexp(0, -wide)), np.exp(-np.logaddexp(0, wide))
    # Of constant weights: the weight times the slope of a cross-entropy.
    share = not_p / (not_p + clip) if clip else 1
    constant = {1: -(not_p ** (1 + focus)), 0: np.maximum(p - clip, 0) ** focus * p * share}
    tolerance = 1e-11 if dtype == np.float64 else 4 * FLOAT32
    options = {"positive_focus": focus, "negative_focus": focus, "clip": clip}
    for kind, stop in ((1, False), (0, False), (1, True), (0, True)):
        targets = np.full(x.shape, kind)
        with enable_x64(dtype == np.float64):
            numbers = jnp.asarray(focus, dtype), jnp.asarray(clip, dtype)
            arrays = jnp.asarray(x), jnp.asarray(targets), *numbers
            results = asymmetric_derivatives(*arrays, stop=stop)
            got, slope, *_ = results = jax.tree.map(np.asarray, results)
        assert all(result.dtype == dtype for result in results)
        assert finite(results)
        expected = references.asymmetric_loss(x, targets, reduction="none", **options)
        np.testing.assert_allclose(got[~beside], expected[~beside], rtol=tolerance, atol=1e-37)
        coarse = 1e-2 if focus < 1 else 1e-6
        np.testing.assert_allclose(got[beside], expected[beside], rtol=1e-3, atol=coarse)
        if stop:
            right = constant[kind] * ((p > clip) | (kind == 1))
            rtol = 1e-11 if dtype == np.float64 else 16 * FLOAT32  # Of a power of e^x.
            np.testing.assert_allclose(slope[~beside], right[~beside], rtol=rtol, atol=1e-37)


@pytest.mark.parametrize(
    "loss",
    [
        jaxloss.warp_loss,
        jaxloss.robust_multilabel_loss,
        jaxloss.two_way_loss,
        jaxloss.sigmoid_loss,
        *(
            partial(jaxloss.asymmetric_loss, **options, stop_focus_gradient=stop)
            for options in ({"positive_focus": 1.0}, {"positive_focus": 0.5, "clip": 0.0})
            for stop in (False, True)
        ),
    ],
)
def test_infinite_logits_of_right_classes_are_as_large_ones(loss):
    run = jax.jit(jax.value_and_grad(loss))

    def at(size):
        logits = jnp.array([[size, -size, 0.3, -0.2], [size, 0.1, 0.3, -0.2]])
        return run(logits, jnp.array([[1, 0, 0, 1], [1, 0, 0, 0]]))

    jax.tree.map(lambda a, b: close(np.asarray(a), np.asarray(b), FLOAT32), at(np.inf), at(1e4))


def test_warp_does_not_cancel_far_from_zero():
    """Logits that are exact in float32 at 16384 and at 0, and a positive that ranks first."""
    x = np.round(np.random.default_rng(79).normal(size=(4, 30)) * 64) / 64
    x[:, 0] = 30.0
    t = np.tile(np.arange(30) % 5 == 0, (4, 1))
    got = warp_gradient(jnp.asarray(x + 16384, jnp.float32), t)
    expected = warp_gradient(jnp.asarray(x, jnp.float32), t)
    jax.tree.map(lambda a, b: close(np.asarray(a), np.asarray(b), FLOAT32), got, expected)
    close(expected[0], references.warp_loss(x, t.astype(int)), FLOAT32)


@pytest.mark.parametrize(
    ("run", "logits", "targets", "value", "gradient"),
    [
        (warp_gradient, [1.0, 0.0, 0.5], [1, 0, 0], 0.5, [-1, 0, 1]),
        # The gaps are 1 and 3, rank 0; and −0.5 and 1.5, rank 1.
        (robust_gradient, [1.5, 0.0, 0.5, -1.5], [1, 1, 0, 0], 1.5 + 5 * 2.5, [0, -6, 6, 0]),
    ],
    ids=["warp", "robust"],
)
def test_a_gap_at_the_margin_adds_nothing(run, logits, targets, value, gradient):
    """Beside a violated one. It has no gradient either, as for relu at 0."""
    got, slopes = in_float64(run, np.array([logits]), np.array([targets]))
    np.testing.assert_array_equal(got, value)
    np.testing.assert_array_equal(slopes, [gradient])


@pytest.mark.parametrize("gradient", [warp_gradient, robust_gradient], ids=["warp", "robust"])
def test_ranked_losses_form_no_pairs(gradient):
    """All pairs of these classes take 32 MB in float32, or 8 MB as bool."""
    n, classes = 32, 500
    _, memory = compiled(gradient, ((n, classes), np.float32), ((n, classes), np.bool_))
    assert memory < 30 * 4 * n * classes


@pytest.mark.slow
@every_loss
def test_curvature_is_finite_with_empty_sets_and_large_logits(row):
    targets = np.array([[1, 1, -1], [0, 0, 0], [1, 0, 0], [-1, -1, -1], [0, 1, 1]], np.int32)
    logits = np.random.default_rng(81).normal(size=(5, 3)).astype(np.float32)

    @jax.jit
    def curvature(z, t):
        gradient = jax.grad(lambda x: row.function(x, t))
        return jax.jvp(gradient, (z,), (jnp.cos(z),))

    for scale in (0.0, 1.0, 1e4):
        for t in (targets, 0 * targets, 0 * targets + 1, targets * [[1, 0, 1]]):
            assert finite(curvature(jnp.asarray(scale * logits), jnp.asarray(t, np.int32)))


# Devices ----


def class_wise_on_devices(*arrays, **options):
    return jaxloss.sharded_loss(jaxloss.class_wise_loss, mesh(), "batch")(*arrays, **options)


def test_class_wise_over_devices():
    """Classes without samples, positives or negatives on some or all devices.

    The logits differ by 1e4 between devices, so every log-sum-exp must use the global maximum.
    """
    rng = np.random.default_rng(82)
    n, classes = 12, 6
    logits = rng.normal(size=(n, classes)) + 1e4 * (np.arange(n) // 3 == 1)[:, None]
    targets = rng.integers(-1, 2, (n, classes))
    targets[:, 1] = 0  # Never a positive.
    targets[:, 2] = np.where(targets[:, 2] == 0, -1, targets[:, 2])  # Never a negative.
    targets[:, 3] = -1
    targets[10, 3], targets[0, 3] = 1, 0  # One pair, on two devices.
    where = (np.arange(n) != 5) & (np.arange(n) // 3 != 2)

    def derivatives(loss):
        run = jax.jit(jax.value_and_grad(partial(loss, where=jnp.asarray(where))))
        return in_float64(run, logits, targets)

    value, gradient = derivatives(class_wise_on_devices)
    close(value, references.class_wise_loss(logits, targets, where=where))
    close(gradient, derivatives(jaxloss.class_wise_loss)[1])
    none: Any = {"where": where, "reduction": "none"}
    terms = in_float64(class_wise_on_devices, logits, targets, **none)
    close(terms, references.class_wise_loss(logits, targets, **none))
    assert terms[1] == terms[2] == 0 < terms[3]


@pytest.mark.slow
def test_class_wise_sends_a_number_a_class():
    names = ("psum", "pmax", "pmin", "all_", "ppermute", "reduce_scatter")
    arrays = jnp.zeros((16, 6)), jnp.zeros((16, 6), int)
    found = [
        (equation.primitive.name, max(v.aval.size for v in equation.invars))
        for equation in equations(jax.grad(class_wise_on_devices), *arrays)
        if equation.primitive.name.startswith(names)
    ]
    assert {"psum", "pmax"} <= {name[:4] for name, _ in found}
    assert not any("gather" in name for name, _ in found)
    assert max(size for _, size in found) <= 6
