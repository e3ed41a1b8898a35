"""Prototypes on the sphere: closed form, separation, and assignment against SciPy's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import P, enable_x64, over_mesh, precision
from tests.tolerances import FLOAT32

HALF = (jnp.bfloat16, jnp.float16)
pytestmark = pytest.mark.usefixtures("checked_annotations")
assign = jax.jit(jaxloss.assign_prototypes)
separation = jax.jit(jaxloss.prototype_separation)


def norms(prototypes):
    return np.linalg.norm(np.asarray(prototypes, np.float64), axis=0)


def cosines(prototypes):
    """The cosines of all pairs of different prototypes."""
    columns = np.asarray(prototypes, np.float64)
    return references.cosine_logits(columns.T, columns)[~np.eye(columns.shape[1], dtype=bool)]


def sphere(rng, dim, num):
    points = rng.normal(size=(dim, num))
    return points / norms(points)


def check_units(prototypes, dim, number):
    assert (prototypes.shape, prototypes.dtype) == ((dim, number), np.float32)
    np.testing.assert_allclose(norms(prototypes), 1, atol=FLOAT32)


# The simplex ----


@pytest.mark.parametrize(
    ("number", "dim"),
    [(1, 1), (1, 4), (2, 1), (2, 7), (4, 3), (5, 9), (10, 9), (101, 100), (300, 512)],
)
def test_simplex_has_equal_cosines(number, dim):
    prototypes = jax.jit(jaxloss.simplex_prototypes, static_argnums=(0, 1))(number, dim)
    check_units(prototypes, dim, number)
    if number > 1:  # Equal cosines of −1/(M−1) imply a zero sum.
        np.testing.assert_allclose(cosines(prototypes), -1 / (number - 1), atol=FLOAT32)
        np.testing.assert_allclose(np.asarray(prototypes).sum(axis=1), 0, atol=4 * FLOAT32)


# Uniform prototypes ----

# Below the cosines of the published prototypes.
APART = [(100, 16, 0.215), (100, 32, 0.085), (200, 50, 0.085)]
# One point, two points, simplices, cross-polytopes (in part and whole), and the icosahedron.
OPTIMA = [(1, 1, -1.0), (1, 5, -1.0), (2, 1, -1.0), (5, 1, 1.0), (3, 2, -0.5)]
OPTIMA += [(10, 16, -1 / 9), (18, 16, 0.005), (32, 16, 0.0), (12, 3, 5**-0.5)]


@pytest.mark.parametrize(
    ("seed", "number", "dim", "largest"),
    [
        pytest.param(0, *APART[0], marks=pytest.mark.slow),
        *(pytest.param(0, *case, marks=pytest.mark.long) for case in APART[1:]),
        *(pytest.param(1, *case, marks=pytest.mark.long) for case in APART),
        *((3, num, dim, optimum + 1e-4) for num, dim, optimum in OPTIMA),
    ],
)
def test_uniform_prototypes_lie_apart(seed, number, dim, largest):
    prototypes = jaxloss.uniform_prototypes(jax.random.key(seed), number, dim)
    check_units(prototypes, dim, number)
    assert cosines(prototypes).max(initial=-1) < largest


def test_rising_temperature_separates_the_closest_pair():
    run = partial(jaxloss.uniform_prototypes, jax.random.key(6), 60, 12)
    rising, fixed = run(), run(final_temperature=2.0)
    assert cosines(rising).max() < cosines(fixed).max() - 0.03

    def uniformity(prototypes):
        return np.log(np.mean(np.exp(-2 * (2 - 2 * cosines(prototypes)))))

    # The fixed temperature minimises its own objective. A random start is far from both.
    assert uniformity(fixed) < uniformity(rising)
    assert uniformity(rising) < uniformity(sphere(np.random.default_rng(7), 12, 60)) - 0.05


def test_temperatures_and_descent(monkeypatch):
    """Of each step, from the first to the last, down the gradient of the uniformity."""
    from jaxloss.features import prototypes

    seen, descent = [], jax.jit(prototypes._uniformity_gradient)

    def recorded(points, temperature):
        jax.debug.callback(lambda t: seen.append(float(t)), temperature)
        return jnp.zeros_like(points)

    monkeypatch.setattr(prototypes, "_uniformity_gradient", recorded)
    options = {"num_steps": 3, "temperature": 2.0, "final_temperature": 50.0}
    jaxloss.uniform_prototypes(jax.random.key(9), 3, 2, **options).block_until_ready()
    jax.effects_barrier()
    np.testing.assert_allclose(sorted(seen), [2, 10, 50], rtol=4 * FLOAT32)
    points = jnp.asarray(sphere(np.random.default_rng(8), 4, 7), np.float32)
    upper = np.triu_indices(7, 1)

    def objective(points):
        units = points / jnp.linalg.norm(points, axis=0, keepdims=True)
        squared = jnp.sum((units[:, upper[0]] - units[:, upper[1]]) ** 2, axis=0)
        return 7 / 2 * jnp.log(jnp.mean(jnp.exp(-3.0 * squared)))

    got, expected = descent(points, jnp.asarray(3.0)), jax.jit(jax.grad(objective))(points)
    np.testing.assert_allclose(got, expected, rtol=16 * FLOAT32, atol=4 * FLOAT32)


@pytest.mark.slow
def test_uniform_prototypes_of_any_key_under_vmap_and_x64():
    make = partial(jaxloss.uniform_prototypes, num_prototypes=6, dim=3, num_steps=50)
    np.testing.assert_array_equal(make(jax.random.key(9)), make(jax.random.PRNGKey(9)))
    keys = jax.random.split(jax.random.key(11), 2)
    got = jax.vmap(make)(keys)
    assert np.abs(got[0] - got[1]).max() > 0.1
    for key, prototypes in zip(keys, got, strict=True):
        np.testing.assert_allclose(prototypes, make(key), atol=16 * FLOAT32)
    with enable_x64(True):
        assert make(jax.random.key(12)).dtype == np.float32


# Separation ----


@pytest.mark.parametrize("dtype", [np.float32, *HALF, np.float64])
def test_separation_equals_a_loop(dtype):
    """A zero prototype has cosines of 0, and a NaN is not hidden."""
    rng = np.random.default_rng(13)
    prototypes = (rng.normal(size=(4, 6)) * rng.uniform(0.0, 9, 6)).astype(dtype)
    prototypes[:, 2] = 0
    with precision(dtype):
        got = separation(jnp.asarray(prototypes))
        wide = np.float64 if dtype == np.float64 else np.float32
        assert all(x.dtype == wide and x.shape == () for x in got)
        got = jax.tree.map(np.asarray, got)
        assert np.isnan(separation(jnp.asarray(prototypes).at[0, 1].set(np.nan)).largest_cosine)
    columns = prototypes.astype(np.float64)
    table = references.cosine_logits(columns.T, columns)
    nearest = np.max(table, axis=1, where=~np.eye(6, dtype=bool), initial=-1)
    np.testing.assert_allclose(got.largest_cosine, nearest.max(), rtol=4 * FLOAT32)
    np.testing.assert_allclose(got.mean_largest_cosine, nearest.mean(), rtol=4 * FLOAT32)


# Assignment ----


def check_optimal(class_means, prototypes, got, tolerance=FLOAT32):
    """Checks that the assignment is one-to-one and has the sum of cosines of SciPy's."""
    got, places = np.asarray(got), np.arange(class_means.shape[1])
    assert (got.dtype, got.shape, len(set(got.tolist()))) == (np.int32, places.shape, len(got))
    table = references.cosine_logits(class_means.T, prototypes)
    _, best = linear_sum_assignment(table, maximize=True)
    sums, atol = (table[places, at].sum() for at in (got, best)), tolerance * len(got)
    np.testing.assert_allclose(*sums, rtol=0, atol=atol)
    return got, best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_classes", "num_prototypes", "dim"),
    [
        *((1, 5, 3), (7, 7, 4), (40, 41, 3)),
        *(
            pytest.param(*sizes, marks=pytest.mark.long)
            for sizes in [(1, 1, 3), (2, 2, 1), (7, 12, 4), (40, 40, 8), (60, 90, 2)]
        ),
    ],
)
def test_assignment_equals_scipys(num_classes, num_prototypes, dim):
    """For means and prototypes of any length."""
    rng = np.random.default_rng(14)
    for _ in range(5):
        means, prototypes = (rng.normal(size=(dim, n)) for n in (num_classes, num_prototypes))
        with enable_x64(True):
            got = assign(jnp.asarray(means), jnp.asarray(prototypes))
            got, best = check_optimal(means, prototypes, got, 1e-12)
        # Without ties, the optimum is unique.
        if dim > 1:
            np.testing.assert_array_equal(got, best)
        for dtype in (np.float32, *HALF):
            rows, columns = means.astype(dtype), prototypes.astype(dtype)
            check_optimal(np.float64(rows), np.float64(columns), assign(rows, columns))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_ends_and_counts_as_orthogonal(poison):
    rng = np.random.default_rng(18)
    means, prototypes = sphere(rng, 4, 9), sphere(rng, 4, 9)
    spoiled = means.copy()
    spoiled[1, [2, 5]], means[:, [2, 5]] = poison, 0
    check_optimal(means, prototypes, assign(spoiled, prototypes))
    got = assign(np.full((4, 9), poison), np.full((4, 9), poison))
    np.testing.assert_array_equal(got, np.arange(9))


def test_assignment_under_vmap():
    rng = np.random.default_rng(20)
    prototypes, zeros = sphere(rng, 4, 12).astype(np.float32), np.zeros((4, 12))
    means = [sphere(rng, 4, 12), prototypes[:, ::-1], zeros, zeros + 1, sphere(rng, 4, 12)]
    means = np.asarray(means, np.float32)
    got = jax.jit(jax.vmap(jaxloss.assign_prototypes, in_axes=(0, None)))(means, prototypes)
    for own, assignment in zip(means, got, strict=True):
        check_optimal(own, prototypes, assignment)
    np.testing.assert_array_equal(got[1], np.arange(12)[::-1])


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [pytest.param(True, marks=pytest.mark.long), False])
def test_assignment_on_devices(check_vma):
    """With equal means, and where JAX does not check what varies, with different ones."""
    rng = np.random.default_rng(22)
    prototypes = sphere(rng, 4, 8).astype(np.float32)
    means = np.asarray([sphere(rng, 4, 7) for _ in range(4)], np.float32)

    def run(own, prototypes):
        shared = jaxloss.assign_prototypes(jax.lax.pmean(own[0], "batch"), prototypes)
        different = shared if check_vma else jaxloss.assign_prototypes(own[0], prototypes)
        return different[None], shared[None]

    run = over_mesh(run, (P("batch"), P()), P("batch"), check_vma=check_vma)
    got, shared = jax.jit(run)(means, prototypes)
    for own, assignment, same in zip(means, got, shared, strict=True):
        check_optimal(means.mean(axis=0) if check_vma else own, prototypes, assignment)
        check_optimal(means.mean(axis=0), prototypes, same)
