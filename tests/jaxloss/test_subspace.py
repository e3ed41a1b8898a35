"""Projections onto the classifier's subspace and its complement, and other public functions."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import (
    P,
    assert_close,
    compiled,
    enable_x64,
    magnitude,
    over,
    over_mesh,
    precision,
    widen,
)
from tests.jaxloss.loss_table import FUNCTIONS, FunctionRow
from tests.tolerances import FLOAT32, FLOAT64, rounded_to

OFTEN = {row.name for row in FUNCTIONS[:5]} | {
    *("project_complement_options_3", "project_spectral_complement_stopped_7"),
    *("project_spectral_complement_options_3", "cosine_logits_sub_centres"),
}
"""`make long` has the other combinations of options, shapes and dtypes."""


def marked(row: FunctionRow, dtype: Any = np.float64, often: Any = FUNCTIONS[:5]) -> Any:
    marks = [] if dtype == np.float64 or row in often else pytest.mark.long
    return pytest.param(row, dtype, id=f"{row.name}-{np.dtype(dtype)}", marks=marks)


@partial(jax.jit, static_argnums=(0, 1))
def value_and_pull_back(function, options, args, cotangent):
    value, pull_back = jax.vjp(partial(function, **dict(options)), *args)
    return value, pull_back(cotangent.astype(value.dtype))


def evaluate(function, args, cotangent, dtype: Any = np.float64, **options):
    with precision(dtype):
        cast = tuple(jnp.asarray(a, dtype) for a in args)
        given = tuple(options.items()), cast, jnp.asarray(cotangent)
        return jax.tree.map(np.asarray, value_and_pull_back(function, *given))


def matrix(rng, singular, shape):
    """A matrix with these singular values and random singular vectors."""
    left = np.linalg.qr(rng.normal(size=(shape[0], shape[0])))[0]
    right = np.linalg.qr(rng.normal(size=(shape[1], shape[1])))[0]
    count = len(singular)
    return left[:, :count] @ np.diag(singular) @ right[:, :count].T


# Every function of the table ----


@pytest.mark.parametrize(
    ("row", "dtype"), [marked(row, t) for row in FUNCTIONS for t in (np.float64, np.float32)]
)
@pytest.mark.usefixtures("checked_annotations")
def test_values_and_gradients_equal_references(row, dtype):
    rng = np.random.default_rng(70)
    args = [a.astype(dtype).astype(np.float64) for a in row.make_inputs(rng, 6, np.float64)]
    value = row.reference(*args)
    cotangent = rng.normal(size=value.shape)
    got = evaluate(row.function, args, cotangent, dtype, **row.kwargs)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(got))
    # A Gram matrix squares the smallest singular value of W, which is about 0.2.
    tolerance = (16 if "project" in row.name else 4) * FLOAT32 if dtype == np.float32 else FLOAT64
    assert_close(got[0], value, tolerance)
    torch = pytest.importorskip("torch")
    leaves = [torch.tensor(a, requires_grad=True) for a in args]
    pairs = row.torch_reference(*leaves), leaves, torch.tensor(cotangent)
    expected = torch.autograd.grad(*pairs, allow_unused=True, materialize_grads=True)
    assert_close(got[1], [gradient.numpy() for gradient in expected], tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        *(marked(row, jnp.bfloat16) for row in FUNCTIONS),
        *(marked(row, np.float16, ()) for row in FUNCTIONS[:5]),
    ],
)
def test_half_precision_is_computed_in_float32(row, dtype):
    rng = np.random.default_rng(71)
    args = [np.asarray(a, np.float32).astype(dtype) for a in row.make_inputs(rng, 6, np.float32)]
    cotangent = rng.normal(size=row.reference(*map(np.float64, args)).shape).astype(np.float32)
    value, grads = evaluate(row.function, args, cotangent, dtype, **row.kwargs)
    wide_value, wide_grads = evaluate(row.function, args, cotangent, np.float32, **row.kwargs)
    assert value.dtype == np.float32
    assert all(gradient.dtype == dtype for gradient in grads)
    assert_close(value, wide_value, FLOAT32)
    assert_close(widen(grads), wide_grads, rounded_to(dtype))


@pytest.mark.slow
@over(FUNCTIONS, often=[row for row in FUNCTIONS if row.name in OFTEN])
def test_vmap_and_forward_over_reverse(row):
    """Second derivatives along W too, where the projection depends on it."""
    rng = np.random.default_rng(72)
    batches = [row.make_inputs(rng, 4, np.float64) for _ in range(2)]
    function = partial(row.function, **row.kwargs)
    with enable_x64(True):
        stacked = [jnp.asarray(np.stack(a)) for a in zip(*batches, strict=True)]
        got = np.asarray(jax.jit(jax.vmap(function))(*stacked))
        for k, args in enumerate(batches):
            np.testing.assert_allclose(got[k], row.reference(*args), rtol=1e-9, atol=1e-10)

        x, moves = batches[0], "stopped" not in row.name
        v = tuple(rng.normal(size=a.shape) * (k == 0 or moves) for k, a in enumerate(x))
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(function(*x)))))
        curved = jax.jit(lambda x, v: jax.jvp(gradient, (x,), (v,))[1])(x, v)
        after, before = (
            gradient(tuple(a + h * d for a, d in zip(x, v, strict=True))) for h in (1e-5, -1e-5)
        )
        expected = jax.tree.map(lambda a, b: (a - b) / 2e-5, after, before)
    assert_close(curved, expected, 1e-6)
    assert magnitude(curved[0]) > 1e-3


# The formulas ----

# The order of the products depends on the number of samples.
SHAPES = {
    "d > C": ((7, 4), (2.0, 1.1, 0.6, 0.2)),
    "d < C": ((4, 7), (2.0, 1.1, 0.6, 0.2)),
    "d = C": ((5, 5), (2.0, 1.1, 0.9, 0.6, 0.2)),
    "rank deficient, d > C": ((7, 4), (2.0, 1.1)),
    "rank deficient, d < C": ((4, 7), (2.0, 1.1)),
    "rank one": ((5, 5), (1.7,)),
    "one class": ((5, 1), (1.7,)),
    "one dimension": ((1, 5), (1.7,)),
    "many samples, d > C": ((7, 4), (2.0, 1.1, 0.6, 0.2)),
    "many samples, d < C": ((4, 7), (2.0, 1.1, 0.6, 0.2)),
}
EPSILONS = (0.0, 1e-4, 0.05, 3.0)
POWERS = (0.0, 0.1, 0.3, 1.0, 2.0)


@jax.jit
def everything(features, weights):
    """All functions of a classifier with all their options, compiled once per shape."""
    results, arrays = {}, (features, weights)
    for epsilon in EPSILONS:
        results["classifier", epsilon] = jaxloss.project_classifier(*arrays, epsilon=epsilon)
        results["complement", epsilon] = jaxloss.project_complement(*arrays, epsilon=epsilon)
    project, overlap = jaxloss.project_spectral_complement, jaxloss.spectral_overlap
    for name, basis in (("", None), (" of a basis", jaxloss.spectral_basis(weights))):
        for power in POWERS:
            results[f"spectral{name}", power] = project(*arrays, power=power, basis=basis)
            results[f"overlap{name}", power] = overlap(weights, power, basis=basis)
    return results


def case_inputs(case):
    rng = np.random.default_rng(74)
    shape, singular = SHAPES[case]
    n = 40 if "many" in case else 3
    return rng.normal(size=(n, shape[0])), matrix(rng, singular, shape), np.array(singular)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        # A shape in one of the dtypes; `make long` has every second one.
        pytest.param(case, dtype, marks=[] if number % 2 else pytest.mark.long)
        for number, case in enumerate(SHAPES)
        for dtype in [(np.float64, np.float32)[number // 2 % 2]]
    ],
)
def test_projections_filter_the_singular_values(case, dtype):
    """In float32, null directions are not mistaken for small ones, as a Gram matrix would do."""
    features, weights, singular = case_inputs(case)
    left = np.linalg.svd(weights)[0][:, : len(singular)]
    with precision(dtype):
        got = everything(jnp.asarray(features, dtype), jnp.asarray(weights, dtype))
        got = jax.tree.map(np.asarray, got)

    def filtered(gains):
        return features @ left * gains @ left.T

    def close(key, expected):
        of_epsilon = key[0] in ("classifier", "complement")
        tolerance = (1e-10 if of_epsilon else 1e-11) if dtype == np.float64 else 4 * FLOAT32
        if dtype == np.float32 and of_epsilon:
            # Rounding of WᵀW, relative to epsilon: about 4e-7 * 4 / 1e-4 where W is rank deficient.
            tolerance = max(tolerance, FLOAT32 / max(key[1], 1e-4))
        np.testing.assert_allclose(got[key], expected, rtol=0, atol=tolerance, err_msg=str(key))

    for epsilon in EPSILONS:
        if epsilon == 0 and len(singular) < min(weights.shape):
            assert np.isfinite(got["complement", 0.0]).all()  # Although WᵀW is singular.
            continue
        within = filtered(singular**2 / (singular**2 + epsilon))
        close(("classifier", epsilon), within)
        close(("complement", epsilon), features - within)
    for power in POWERS:
        relative = singular / singular.max()
        for name in ("", " of a basis"):
            close((f"spectral{name}", power), features - filtered(relative**power))
            close((f"overlap{name}", power), references.spectral_overlap(weights, power))
        if dtype == np.float64:
            own = got["spectral", power]
            np.testing.assert_allclose(got["spectral of a basis", power], own, atol=1e-12)


# Gradients through the projection ----


RNG = np.random.default_rng(86)
PLAIN, EQUAL, SOME = RNG.normal(size=(40, 12)), (1.0,) * 11, np.isin(np.arange(12), range(3, 8))
FEW = matrix(RNG, (5.0, 4.0, 3.0), PLAIN.shape)
# Classifiers as they occur in training, and those that rounding hurts most.
HARD = {
    "at the start": PLAIN / np.sqrt(3 * 40),
    "few directions": FEW,
    "few directions and noise": FEW + 1e-3 * PLAIN,
    "small columns": PLAIN * np.where(SOME, 1e-4, 1),
    "zero columns": PLAIN * ~SOME,
    "repeated columns": PLAIN[:, np.arange(12) % 6],
    "repeated singular values": matrix(RNG, (3.0, *EQUAL), PLAIN.shape),
    "nearly repeated": matrix(RNG, (3.0, 1.0 + 1e-9, *EQUAL[:-1]), PLAIN.shape),
    "orthonormal": matrix(RNG, (1.0, *EQUAL), PLAIN.shape),
    "d = C + 1": RNG.normal(size=(13, 12)),
    "d < C": RNG.normal(size=(10, 30)),
    "d < C, repeated": matrix(RNG, (3.0, *EQUAL[:8], 0.5), (10, 30)),
    "orthogonal rows": matrix(RNG, (2.0,) * 10, (10, 30)),
    "large": 30 * PLAIN,
}
# Relative to the largest gradient. Where singular values are 0 or small, 1/ε or the slope of the
# power multiplies the rounding of W: a change of W by one unit in the last place of float32 moves
# the exact gradient as much.
HARD_TOLERANCES = {
    ("project_complement", "few directions"): 2**15 * FLOAT32,
    ("project_complement", "repeated columns"): 2**15 * FLOAT32,
    ("project_spectral_complement", "small columns"): 2**10 * FLOAT32,
    ("project_complement", "few directions and noise"): 2**7 * FLOAT32,
    ("project_spectral_complement", "few directions and noise"): 2**9 * FLOAT32,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("dtype", [pytest.param(np.float64, marks=pytest.mark.long), np.float32])
@pytest.mark.parametrize(
    ("project", "options"),
    [
        (jaxloss.project_complement, {"epsilon": 1e-4}),
        (jaxloss.project_spectral_complement, {"power": 0.3}),
        pytest.param(jaxloss.project_spectral_complement, {"power": 0.0}, marks=pytest.mark.long),
    ],
    ids=["complement", "spectral", "power 0"],
)
def test_gradient_of_hard_classifiers(project, options, name, dtype):
    """Stopped and as written, against derivatives of the filter on the eigenvalues of WWᵀ."""
    weights = HARD[name].astype(dtype).astype(np.float64)
    given = np.random.default_rng(87).normal(size=(2, 6, len(weights)))
    features, cotangent = given.astype(dtype).astype(np.float64)
    if name.startswith("ortho"):
        # The largest singular value has a kink where all are equal. It has no effect for a
        # cotangent that is orthogonal to the scale of the projection.
        within = features @ weights @ np.linalg.pinv(weights)
        cotangent -= np.sum(cotangent * within) / np.sum(within**2) * within
    run = partial(evaluate, project, (features, weights), cotangent, dtype, **options)
    expected = references.complement_gradients(features, weights, cotangent, dtype=dtype, **options)
    tolerance = 1e-9 if dtype == np.float64 else 32 * FLOAT32
    results = [run(), *([run(stop_gradient=True)] if "power" in options else [])]
    assert not any(grads[1].any() for _, grads in results[1:])
    for value, (of_features, _) in results:
        size = magnitude(features), magnitude(cotangent)
        np.testing.assert_allclose(value, expected[0], rtol=0, atol=tolerance * size[0])
        np.testing.assert_allclose(of_features, expected[1], rtol=0, atol=tolerance * size[1])
    if dtype == np.float32:
        tolerance = HARD_TOLERANCES.get((project.__name__, name), tolerance)
    atol = tolerance * max(magnitude(expected[2]), 1)
    np.testing.assert_allclose(results[0][1][1], expected[2], rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 4), (20, 12), (12, 20)])
def test_epsilon_zero_of_rank_deficient_classifiers_stays_a_projection(shape):
    """In float32, where rounding makes the null directions; the gradient of x cannot grow.

    Of many at once: the minimum of thousands of numbers need not be NaN where one of them is.
    """
    rng, number = np.random.default_rng(88), 2000
    rank = min(shape) - 1
    weights = rng.normal(size=(number, shape[0], rank)) @ rng.normal(size=(number, rank, shape[1]))
    features, cotangents = (rng.normal(size=(number, 3, shape[0])) for _ in range(2))

    @jax.jit
    @jax.vmap
    def run(x, w, c):
        value, pull_back = jax.vjp(partial(jaxloss.project_complement, epsilon=0.0), x, w)
        return value, pull_back(c)

    value, (gradient, of_weights) = run(*map(jnp.float32, (features, weights, cotangents)))
    for whole, part in ((features, value), (cotangents, gradient)):
        ratios = np.linalg.norm(part, axis=(1, 2)) / np.linalg.norm(whole, axis=(1, 2))
        assert ratios.max() < 1.001
    assert np.isfinite(of_weights).all()
    exact = features - features @ weights @ np.linalg.pinv(weights, rcond=1e-9)
    # Null directions are known to about eps / √ε relative to W.
    assert np.median(np.abs(value - exact)) < 1e-4


@pytest.mark.parametrize("scale", [1e-30, 1e20])
def test_the_spectral_gradient_does_not_depend_on_the_scale(scale):
    rng = np.random.default_rng(90)
    weights = jnp.asarray(rng.normal(size=(8, 5)), jnp.float32)
    project = partial(jaxloss.project_spectral_complement, jnp.ones((2, 8)))
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(project(w)))))
    scaled = np.float64(gradient(weights * np.float32(scale))) * scale
    np.testing.assert_allclose(scaled, gradient(weights), rtol=32 * FLOAT32, atol=4 * FLOAT32)


def test_gradient_where_the_largest_singular_value_repeats():
    """All are equal up to rounding: it is the mean over the directions."""
    rng, dim, power = np.random.default_rng(94), 6, 0.3
    features, cotangent = rng.normal(size=(2, 5, dim)).astype(np.float32)
    weights = np.linalg.qr(rng.normal(size=(dim, dim)))[0].astype(np.float32)
    project, arrays = jaxloss.project_spectral_complement, (features, weights)
    _, (_, got) = evaluate(project, arrays, cotangent, np.float32, power=power)
    both = features.T @ cotangent + cotangent.T @ features
    expected = power / 2 * (np.trace(both) / dim * weights - both @ weights)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_spectral_overlap():
    """Its gradient, and those of zeros and of half precision."""
    rng, overlap = np.random.default_rng(87), jax.jit(partial(jaxloss.spectral_overlap, power=0.3))
    with enable_x64(True):
        weights, direction = (jnp.asarray(rng.normal(size=(6, 4))) for _ in range(2))
        got = jnp.vdot(jax.grad(overlap)(weights), direction)
        above, below = (overlap(weights + h * direction) for h in (1e-5, -1e-5))
        np.testing.assert_allclose(got, (above - below) / 2e-5, rtol=1e-8)
    assert overlap(jnp.zeros((4, 3))) == 0
    low = jnp.asarray(rng.normal(size=(6, 4)), jnp.bfloat16)
    assert overlap(low).dtype == np.float32
    expected = references.spectral_overlap(np.float64(low), 0.3)
    np.testing.assert_allclose(overlap(low), expected, rtol=4 * FLOAT32)


# A basis that the caller keeps ----


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_spectral_basis_is_the_decomposition(case, dtype):
    _, weights, singular = case_inputs(case)
    with precision(dtype):
        basis = jax.jit(jaxloss.spectral_basis)(jnp.asarray(weights, dtype))
        vectors, values = map(np.asarray, basis)
    assert vectors.dtype == values.dtype == dtype
    rank, number = min(weights.shape), len(singular)
    assert vectors.shape == (weights.shape[0], rank)
    tolerance = 1e-12 if dtype == np.float64 else FLOAT32
    np.testing.assert_allclose(values[:number], singular, rtol=10 * tolerance)
    assert not values[number:].any()
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(rank), atol=tolerance)
    used = vectors[:, :number]
    np.testing.assert_allclose(used @ used.T @ weights, weights, atol=10 * tolerance)


def test_a_basis_of_null_directions_half_precision_and_nan():
    """Singular values of 0 are rounding errors, of more units in the last place than one."""
    rng, make = np.random.default_rng(95), jax.jit(jaxloss.spectral_basis)
    values = make(jnp.float32(rng.normal(size=(64, 8)) @ rng.normal(size=(8, 400)))).values
    assert values[:8].all()
    assert not values[8:].any()
    weights = jnp.asarray(rng.normal(size=(6, 4)), jnp.bfloat16)
    basis, features = make(weights), jnp.ones((2, 6), jnp.bfloat16)
    projected = jax.jit(jaxloss.project_spectral_complement)(features, weights, basis=basis)
    assert all(leaf.dtype == np.float32 for leaf in (*basis, projected))
    assert np.isnan(make(weights.at[0, 0].set(jnp.nan)).values).all()


def test_no_gradient_flows_through_a_basis():
    """Neither to the weights that it is used for, nor to those that it is made of."""
    rng = np.random.default_rng(91)
    shapes = [(5, 7), (7, 4), (7, 4)]
    x, weights, older = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    basis = jaxloss.spectral_basis(older)
    project = partial(jaxloss.project_spectral_complement, x, power=0.4)
    overlap = partial(jaxloss.spectral_overlap, power=0.4)
    slopes = [
        jax.grad(lambda w, basis: jnp.sum(project(w, basis=basis)), (0, 1))(weights, basis),
        jax.grad(partial(overlap, basis=basis))(weights),
        jax.grad(lambda w: jnp.sum(jaxloss.spectral_basis(w).vectors))(weights),
    ]
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(slopes))
    expected = references.spectral_overlap(older, 0.4)
    np.testing.assert_allclose(overlap(weights, basis=basis), expected, rtol=4 * FLOAT32)


# Memory ----


def test_no_square_projector():
    """With d = 2048 and C = 1000, W takes 8 MiB, its Gram matrix 4 MiB, a d×d projector 16 MiB."""
    dim, classes, n = 2048, 1000, 512
    project = jaxloss.project_complement
    specs = ((n, dim), np.float32), ((dim, classes), np.float32)
    for function in (project, jax.value_and_grad(lambda x, w: jnp.sum(project(x, w) ** 2))):
        text, memory = compiled(function, *specs)
        assert not re.search(r"\[(\d+,)*2048,2048", text)
        # W L⁻ᵀ, two Gram matrices and their factors; the gradient of W is not among the results.
        assert memory < 32 * 2**20


@pytest.mark.parametrize("shape", [(512, 500), (512, 100), (90, 110)])
def test_large_weights_keep_their_epsilon(shape):
    """ε is increased only if it is below the rounding error of the Gram matrix."""
    rng = np.random.default_rng(61)
    weights, features = rng.normal(0, 3, shape), rng.normal(size=(8, shape[0]))
    expected = references.project_complement(features, weights, epsilon=1e-4)
    got = jax.jit(jaxloss.project_complement)(jnp.float32(features), jnp.float32(weights))
    # The condition of the Gram matrix, about 1e4 in the first, amplifies float32's rounding.
    np.testing.assert_allclose(got, expected, atol=2**7 * FLOAT32)


def test_weights_of_each_device():
    """Classifiers that differ between devices, as in an ensemble."""
    rng = np.random.default_rng(62)
    features = rng.normal(size=(4, 3, 20)).astype(np.float32)
    weights = rng.normal(size=(4, 20, 5)).astype(np.float32)
    weights[1], weights[2, :, 0] = 0, weights[2, :, 1]
    project, rows = jax.vmap(jaxloss.project_complement), P("batch")
    expected = jax.jit(project)(features, weights)
    for check in (True, False):
        spread = over_mesh(project, rows, rows, check_vma=check)
        np.testing.assert_allclose(jax.jit(spread)(features, weights), expected, atol=4 * FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["stop_gradient", "basis", ""])
def test_derivative_by_the_power(options):
    with enable_x64(True):
        arrays = [jnp.asarray(x) for x in case_inputs("rank deficient, d < C")[:2]]
        given: Any = {"stop_gradient": options == "stop_gradient"}
        given |= {"basis": jaxloss.spectral_basis(arrays[1])} if options == "basis" else {}
        project = partial(jaxloss.project_spectral_complement, *arrays, **given)
        objective = jax.jit(lambda power: jnp.sum(jnp.sin(project(power=power))))
        expected = (objective(0.3 + 1e-6) - objective(0.3 - 1e-6)) / 2e-6
        np.testing.assert_allclose(jax.grad(objective)(0.3), expected, rtol=1e-7)
