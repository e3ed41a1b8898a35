"""VICReg, Barlow Twins, SIGReg: the contract for both views, limits, memory, and errors."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from jaxloss.testing import check_loss
from tests.jaxloss.harness import (
    QUICK,
    P,
    assert_close,
    compiled,
    enable_x64,
    finite,
    over_mesh,
    raises,
)
from tests.tolerances import FLOAT32

N, DIM = 16, 5
LOSSES = {
    "vicreg": jaxloss.vicreg_loss,
    "barlow_twins": partial(jaxloss.barlow_twins_loss, off_diagonal=0.05),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@cache
def problem():
    """Two views that share a part, in other units, with correlated dimensions."""
    rng = np.random.default_rng(150)
    mix = rng.normal(size=(DIM, DIM)) * 0.4 + np.diag(np.linspace(0.4, 1.2, DIM))
    shared = rng.normal(0.3, 1.0, (N, DIM))
    first, second = ((shared + 0.5 * rng.normal(size=(N, DIM))) @ mix for _ in range(2))
    return 0.7 * first, second * np.linspace(0.5, 1.0, DIM)


def arrays(dtype: Any = np.float32):
    return tuple(jnp.asarray(view, dtype) for view in problem())


@cache
def evaluator(loss):
    def value(views, where, sample_weights):
        return loss(*views, where=where, sample_weights=sample_weights)

    return jax.jit(jax.value_and_grad(value), compiler_options=QUICK)


def results(loss: Any, first: Any, second: Any, where: Any = None, weights: Any = None) -> Any:
    """The value, and the gradients for both views."""
    ones = jnp.ones(len(first))
    where = ones > 0 if where is None else jnp.asarray(where)
    weights = ones if weights is None else jnp.asarray(weights, ones.dtype)
    return jax.tree.map(np.asarray, evaluator(loss)((first, second), where, weights))


# Contract ----


@pytest.mark.long
@every_loss
def test_the_contract_is_kept(loss):
    """`test_devices` has the further ways to spread the views."""

    def make_views(rng, n):
        shared = rng.normal(size=(n, DIM))
        return shared, shared + rng.normal(size=(n, DIM))

    check_loss(loss, make_views)


# Limits ----


@every_loss
def test_far_from_the_origin(loss):
    """A mean of 1,000 spreads costs float32 three digits, and not six."""
    first, second = arrays()
    shifted = results(loss, first + 1024.0, second + 1024.0)
    assert_close(shifted, results(loss, first, second), 2**9 * FLOAT32)


def test_barlow_twins_ignores_the_scale_of_every_dimension():
    """Also where a square overflows or underflows."""
    first, second = arrays()
    scales = jnp.array([[1e19, 1e30, 1.0, 1e-19, 1e-30]])
    loss = LOSSES["barlow_twins"]
    scaled, (of_first, of_second) = results(loss, first * scales, second * scales[:, ::-1])
    expected, gradients = results(loss, first, second)
    got = scaled, (of_first * scales, of_second * scales[:, ::-1])
    assert_close(got, (expected, gradients), 4 * FLOAT32)


def test_a_huge_sample_of_weight_zero_is_not_there():
    first, second = arrays()
    keep = np.arange(N) != 3
    loss = LOSSES["barlow_twins"]
    for size, value in ((1, 1e25), (1e-10, 1e32)):  # By which the others' scale overflows.
        rows = first * size
        got = results(loss, rows.at[3, 1].set(value), second, weights=keep)
        assert_close(got, results(loss, rows, second, keep), FLOAT32)


@every_loss
def test_dimensions_that_only_a_sample_of_weight_zero_changes(loss):
    """Whatever their numbers are: the mean of some, rounded, would be theirs by chance."""
    first, second = arrays()
    first = first.at[1:, 1:].set(jnp.asarray([2.9, 0.1, 1.3, 0.7, 2.3, 1.9])[: DIM - 1])
    keep = np.arange(N) > 0
    weights = keep * np.linspace(0.3, 1.9, N)
    weighted = results(loss, first, second, weights=weights)
    assert_close(weighted, results(loss, first, second, keep, weights), FLOAT32)


@every_loss
def test_a_constant_dimension_where_no_row_of_a_device_counts(loss):
    """Rows that do not count do not shift those that do, by which rounding would give a spread."""
    first, second = arrays()
    where = np.arange(N) < N * 3 // 4
    first = jnp.where(jnp.arange(DIM) == 1, jnp.where(where[:, None], -2.9, 5.0), first)

    def of_device(views, where):
        return loss(*views, where=where, axis_name="batch")

    spread = over_mesh(of_device, P("batch"), P())
    run = jax.jit(jax.value_and_grad(spread), compiler_options=QUICK)
    got = run((first, second), jnp.asarray(where))
    assert_close(got, results(loss, first, second, where), 4 * FLOAT32)


@every_loss
def test_one_sample_and_constant_dimensions(loss):
    """Their correlations are 0, and covariances of one sample are not defined."""
    first, second = arrays()
    assert finite(results(loss, first.at[:, 1].set(0.1), second))
    value, grads = results(loss, first[:1], second[:1])
    assert finite(grads)
    one = DIM if loss is LOSSES["barlow_twins"] else 25 * np.mean((first[0] - second[0]) ** 2)
    np.testing.assert_allclose(value, one, rtol=4 * FLOAT32)


@pytest.mark.parametrize("weight", [1e-4, 1e-7, 1e-10])
@pytest.mark.parametrize("row", [0, 1])
@every_loss
def test_a_weight_far_above_all_others(loss, row, weight):
    """Deviations of that row are small. A covariance has the factor 1 / (1 − Σ s²), Σ s² near 1."""
    views = tuple(view[:4] for view in problem())
    weights = np.array([1.0, weight, weight / 3, 0.0])[[row, 1 - row, 2, 3]]

    def value(views, weights, axis_name=None):
        return loss(*views, sample_weights=weights, axis_name=axis_name)

    def run(value, dtype):
        given = jax.tree.map(lambda x: jnp.asarray(x, dtype), (views, weights))
        return jax.jit(jax.value_and_grad(value), compiler_options=QUICK)(*given)

    with enable_x64(True):
        expected = jax.tree.map(np.asarray, run(value, jnp.float64))
    spread = over_mesh(partial(value, axis_name="batch"), P("batch"), P(), (2,))
    for of_float32 in (value, spread):
        assert_close(run(of_float32, jnp.float32), expected, 2**6 * FLOAT32)


@every_loss
def test_weights_whose_shares_underflow_are_not_there(loss):
    first, second = arrays()
    weights = jnp.full(N, 1e-36).at[3].set(1e10)
    got = results(loss, first, second, weights=weights)
    assert_close(got, results(loss, first, second, weights=jnp.arange(N) == 3), FLOAT32)


def test_terms_of_vicreg():
    """Before their weights, and without a gradient; the loss is the same."""
    views, weights = arrays(), {"invariance": 3.0, "variance": 2.0, "covariance": 0.5}
    loss = partial(jaxloss.vicreg_loss, **weights)
    value, terms = loss(*views, metrics=True)
    np.testing.assert_allclose(value, loss(*views), rtol=FLOAT32)
    for name, number in terms._asdict().items():
        alone = jaxloss.vicreg_loss(*views, **{**dict.fromkeys(weights, 0.0), name: 1.0})
        np.testing.assert_allclose(number, alone, rtol=FLOAT32)
    gradient = jax.grad(lambda x: loss(x, views[1], metrics=True)[1].variance)(views[0])
    assert not np.any(gradient)


# SIGReg ----


def of_lejepa(features, directions):
    """The statistic as in the code of LeJEPA: an array of rows × directions × points."""
    t = jnp.linspace(0, 3, 17)
    phi = jnp.exp(-(t**2) / 2)
    quadrature = jnp.full(17, 3 / 8).at[jnp.array([0, -1])].set(3 / 16) * phi
    x_t = (features @ directions)[..., None] * t[None, None]
    gaps = (jnp.cos(x_t).mean(0) - phi[None]) ** 2 + jnp.sin(x_t).mean(0) ** 2
    return jnp.mean(gaps @ quadrature) * len(features)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_sigreg_equals_the_code_of_its_authors(make_key, monkeypatch):
    """With several blocks of directions, the last of which is not full, and chunks of rows."""
    monkeypatch.setattr("jaxloss.losses.sigreg._PROJECTIONS", 301 * 48)
    features = jnp.asarray(np.random.default_rng(5).normal(0.2, 1.5, (301, 9)), np.float32)
    key, number = make_key(4), 130
    directions = jax.random.normal(key, (9, number))
    directions /= jnp.linalg.norm(directions, axis=0, keepdims=True)
    run = jax.value_and_grad(partial(jaxloss.sigreg_loss, num_directions=number))
    got = jax.jit(run)(features, key)
    expected = jax.jit(jax.value_and_grad(of_lejepa))(features, directions)
    assert_close(got, expected, FLOAT32)


def test_sigreg_holds_no_array_of_rows_directions_and_points():
    run = jax.value_and_grad(jaxloss.sigreg_loss)
    bytes_of_temporaries = compiled(run, ((65_536, 512), np.float32), ((2,), np.uint32))[1]
    assert bytes_of_temporaries < 150e6


# Errors ----


@pytest.mark.parametrize("neighbors", [1, 2])
def test_koleo_of_equal_rows_has_no_gradient(neighbors):
    """However they are rounded: XLA may divide them in two loops."""
    rows = np.random.default_rng(0).normal(size=(4, 7))
    features = jnp.asarray(np.tile(rows, (4, 1)) * np.arange(1, 17)[:, None], jnp.float32)
    loss = partial(jaxloss.koleo_loss, neighbors=neighbors)
    on_four = over_mesh(partial(loss, axis_name="batch"), P("batch"), P())
    for function in (loss, on_four):
        value, gradient = jax.jit(jax.value_and_grad(function), compiler_options=QUICK)(features)
        assert_close(value, -np.log(1e-8), FLOAT32)
        assert not gradient.any()


def test_wrong_points_of_sigreg_are_named():
    features, key = arrays()[0], jax.random.key(0)
    for number in (1, 16):
        with raises(ValueError, f"`num_points` must be odd and at least 3, got {number}"):
            jaxloss.sigreg_loss(features, key, num_points=number)
    with raises(ValueError, r"`features` must have shape \[n, d\]"):
        jaxloss.sigreg_loss(features[0], key)


@every_loss
def test_wrong_arguments_are_named(loss):
    first, second = arrays()

    def refused(error, match, *views, **options):
        with raises(error, match):
            loss(*(views or (first, second)), **options)

    refused(ValueError, "`reduction` must be mean or sum for .*, got 'none'", reduction="none")
    refused(ValueError, "`reduction` must be one of", reduction="avg")
    refused(ValueError, r"`first` must have shape \[n, d\], got \(5,\)", first[0], second)
    for wrong in (second[:3], second[:, :3]):
        refused(ValueError, r"`second` must have the shape of `first`, \(16, 5\)", first, wrong)
    refused(TypeError, "`first` must have a float dtype", first.astype(int), second)
    refused(TypeError, "`second` must have a float dtype", first, second > 0)
    refused(ValueError, "`where` and `first` must have", where=jnp.ones(3, bool))
    refused(ValueError, r"`sample_weights` .* n = 16 .*, got \(3,\)", sample_weights=jnp.ones(3))
    of_vicreg = ("invariance", "variance", "covariance")
    for name in of_vicreg if loss is LOSSES["vicreg"] else ("off_diagonal",):
        refused(ValueError, f"`{name}` must be a scalar, finite and at least 0", **{name: -0.1})
    if loss is LOSSES["vicreg"]:
        refused(ValueError, "`epsilon` must be a scalar, finite and above 0", epsilon=0.0)
