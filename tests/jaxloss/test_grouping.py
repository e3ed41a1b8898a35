"""Group softmax: its bounds and gradients, and groups that equal those of a stable sort."""

import itertools
import re
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from jaxloss.losses.grouping import Bound
from tests.jaxloss import references
from tests.jaxloss.harness import (
    compiled,
    evaluate,
    finite,
    make_batch,
    precision,
    reference_values,
    torch_values,
)
from tests.jaxloss.loss_table import (
    CLASSES,
    DIM,
    LOSSES,
    classifier_inputs,
    loss_row,
    make_features,
    make_weights,
)

BOUNDS: tuple[Bound, ...] = ("tight", "loose")
every_bound = pytest.mark.parametrize("bound", BOUNDS)


@cache
def losses(num_groups, bound: Bound = "loose"):
    """Jitted: a loss for every sample."""
    return jax.jit(
        partial(jaxloss.group_softmax_loss, num_groups=num_groups, bound=bound, reduction="none")
    )


discriminative = jax.jit(jaxloss.discriminative_groups, static_argnums=3)


def problem(seed=110, n=12, dim=DIM):
    return classifier_inputs(np.random.default_rng(seed), n, np.float64, dim)


# Groups equal those of a stable sort ----


def nasty_scores(dim, dtype):
    """Rows of scores that are hard to rank."""
    rng = np.random.default_rng(111)
    limits = jnp.finfo(dtype)
    one = np.asarray(1, dtype)
    spread = rng.choice([-1.0, 1.0], dim) * 10.0 ** rng.uniform(-30, 30, dim)
    rows = {
        "normal": rng.normal(size=dim),
        "all positive": rng.uniform(1, 2, dim),
        "all negative": -rng.uniform(1, 2, dim),
        "scales": spread,
        "tiny": spread * 1e-5,
        "few values": rng.integers(-1, 2, dim),
        "two values": rng.integers(0, 2, dim) * 1e30,
        "equal": np.full(dim, -0.7),
        "zeros": np.zeros(dim),
        "signed zeros": rng.choice([-0.0, 0.0], dim),
        "negative zeros first": np.where(np.arange(dim) % 2, -0.0, 0.0),
        "zeros among others": rng.choice([-0.0, 0.0, -1.0, 1.0], dim),
        "infinities": rng.choice([-np.inf, np.inf, 0.0, 1.0], dim),
        "one NaN": np.where(np.arange(dim) == dim // 2, np.nan, rng.normal(size=dim)),
        "some NaN": rng.choice([np.nan, -np.nan, np.inf, -np.inf, 1.0, -1.0], dim),
        "all NaN": np.full(dim, np.nan),
        "ascending": np.arange(dim),
        "descending": -np.arange(dim),
        "next to one": one + np.asarray(limits.eps, dtype) * rng.integers(0, 3, dim).astype(dtype),
        "limits": rng.choice(
            [float(x) for x in (limits.max, limits.min, limits.tiny, -limits.tiny, 0.0)], dim
        ),
    }
    return np.stack([np.asarray(row).astype(dtype) for row in rows.values()])


def groups_of_scores(scores, num_groups):
    """With a W of ones and zeros, the score of a feature is the feature itself."""
    with precision(scores.dtype):
        weights = jnp.zeros((scores.shape[1], 2), scores.dtype).at[:, 0].set(1)
        labels = jnp.zeros(len(scores), np.int32)
        return np.asarray(discriminative(jnp.asarray(scores), labels, weights, num_groups))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "num_groups", "dtype"),
    [
        # Each shape in one dtype; `make long` has the rest.
        pytest.param(*sizes, dtype, marks=[] if first % 3 == second else pytest.mark.long)
        for first, sizes in enumerate([(1, 1), (2, 2), (7, 1), (7, 3), (7, 7), (16, 4), (33, 5)])
        for second, dtype in enumerate([np.float32, np.float64, jnp.bfloat16])
    ],
)
def test_groups_equal_those_of_a_stable_sort(dim, num_groups, dtype):
    scores = nasty_scores(dim, dtype)
    with np.errstate(invalid="ignore"):
        expected = references.ranked_groups(scores.astype(np.float64), num_groups)
    np.testing.assert_array_equal(groups_of_scores(scores, num_groups), expected)


def test_groups_of_bfloat16_are_those_of_the_same_numbers_in_float32():
    rng = np.random.default_rng(115)
    arrays = [make_features(rng, 20, np.float32), make_weights(rng, np.float32)]
    features, weights = (jnp.asarray(a, jnp.bfloat16) for a in arrays)
    labels = jnp.asarray(rng.integers(0, CLASSES, 20), np.int32)
    wide = (features.astype(np.float32), labels, weights.astype(np.float32))
    expected = discriminative(*wide, 3)
    assert expected.dtype == np.int32
    mapped = jax.vmap(lambda x, y: jaxloss.discriminative_groups(x[None], y[None], wide[2], 3)[0])
    for got in (
        discriminative(features, labels, weights, 3),
        discriminative(wide[0], labels, weights, 3),
        jaxloss.discriminative_groups(*wide, 3),
        jax.jit(mapped)(wide[0], labels),
    ):
        chex.assert_trees_all_equal(got, expected)


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint32], ids=lambda t: t.__name__)
def test_labels_that_are_no_class_get_equal_groups(dtype):
    rng = np.random.default_rng(116)
    features, weights = make_features(rng, 3, np.float32), make_weights(rng, np.float32)
    labels = jnp.asarray(np.array([CLASSES, 100, 0 if dtype == np.uint32 else -1], dtype))
    groups = discriminative(jnp.asarray(features), labels, jnp.asarray(weights), 3)
    for row in np.asarray(groups):
        np.testing.assert_array_equal(np.bincount(row), [3, 2, 2])


# The other groupings ----


@pytest.mark.parametrize(("dim", "num_groups"), [(1, 1), (6, 3), (7, 3), (8, 3), (5, 5)])
def test_contiguous_groups(dim, num_groups):
    groups = jaxloss.contiguous_groups(3, dim, num_groups)
    assert groups.shape == (3, dim)
    assert groups.dtype == np.int32
    for row in np.asarray(groups):
        for g, part in enumerate(np.array_split(np.arange(dim), num_groups)):
            np.testing.assert_array_equal(np.flatnonzero(row == g), part)


def test_random_groups_are_equal_parts_in_any_order():
    """The frequencies match those of random permutations, within 5 standard deviations."""
    n, dim, sizes = 20000, 7, np.array([3, 2, 2])
    draw = jax.jit(partial(jaxloss.random_groups, num_samples=n, dim=dim, num_groups=3))
    groups = np.asarray(draw(jax.random.key(3)))
    assert groups.dtype == np.int32
    members = groups[:, :, None] == np.arange(3)
    np.testing.assert_array_equal(members.sum(axis=1), np.tile(sizes, (n, 1)))
    deviations = 5 * 0.5 / np.sqrt(n)
    shares = np.tile(sizes / dim, (dim, 1))
    np.testing.assert_allclose(members.mean(axis=0), shares, atol=deviations)
    together = np.sum(sizes * (sizes - 1)) / (dim * (dim - 1))
    for j, k in itertools.combinations(range(dim), 2):
        assert abs(np.mean(groups[:, j] == groups[:, k]) - together) < deviations
    # Neighbouring samples are drawn independently.
    assert abs(np.mean(groups[1:] == groups[:-1]) - np.sum((sizes / dim) ** 2)) < 0.01
    np.testing.assert_array_equal(groups, np.asarray(draw(jax.random.PRNGKey(3))))
    assert np.any(groups != np.asarray(draw(jax.random.key(4))))


# Groups that are given ----


@jax.jit
@jax.grad
def feature_gradients(x, y, w, b, groups):
    return jaxloss.group_softmax_loss(x, y, w, b, num_groups=3, groups=groups, reduction="sum")


@every_bound
def test_given_groups_equal_references(bound):
    """Unequal groups, of which some are empty. Those of rows that do not count have no effect."""
    torch = pytest.importorskip("torch")
    (plain,) = (row for row in LOSSES if row.name == "group_softmax")
    batch = make_batch(plain, seed=124)
    counts = batch.where & (batch.args[1] >= 0)
    groups = np.random.default_rng(125).integers(0, 4, (12, DIM))
    row = loss_row(
        "group_softmax",
        "classifier",
        kwargs={"num_groups": 4, "bound": bound},
        own={"groups": np.where(counts[:, None], groups, -7).astype(np.int32)},
        numpy={"groups": groups},
        torch={"groups": torch.tensor(groups)},
    )
    got = evaluate(row, batch, np.float64)
    expected = reference_values(row, batch)
    chex.assert_trees_all_close({key: got[key] for key in expected}, expected, rtol=1e-10)
    chex.assert_trees_all_close(got, torch_values(row, batch), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stray", [-1, 3, 100])
@pytest.mark.parametrize("dtype", [np.int32, np.int8], ids=lambda t: t.__name__)
def test_a_feature_in_no_group_is_not_dropped_silently(stray, dtype):
    args = [jnp.asarray(a, np.float32 if k != 1 else np.int32) for k, a in enumerate(problem(126))]
    groups = np.array(jaxloss.contiguous_groups(12, DIM, 3)).astype(dtype)
    expected = np.asarray(losses(3)(*args, groups=jnp.asarray(groups)))
    groups[4, 2] = stray
    got = np.asarray(losses(3)(*args, groups=jnp.asarray(groups)))
    assert np.isnan(got[4])
    others = np.arange(12) != 4
    np.testing.assert_array_equal(got[others], expected[others])
    grads = np.asarray(feature_gradients(*args, jnp.asarray(groups)))
    np.testing.assert_array_equal(np.isnan(grads).any(axis=1), ~others)


# Numerics, memory ----


def test_a_nan_stays_in_its_sample_and_its_group():
    args = [jnp.asarray(a, np.float32 if k != 1 else np.int32) for k, a in enumerate(problem(127))]
    expected = np.asarray(losses(3)(*args))
    broken = args[0].at[4, 2].set(jnp.nan)
    groups = np.asarray(discriminative(broken, *args[1:3], 3))
    np.testing.assert_array_equal(np.bincount(groups[4]), [3, 2, 2])
    assert groups[4, 2] == 2
    got = np.asarray(losses(3)(broken, *args[1:]))
    np.testing.assert_array_equal(np.isnan(got), np.arange(12) == 4)
    others = ~np.isnan(got)
    np.testing.assert_array_equal(got[others], expected[others])
    grads = np.asarray(feature_gradients(broken, *args[1:], None))
    np.testing.assert_array_equal(np.isnan(grads[4]), groups[4] == 2)
    assert finite(grads[others])


def test_neither_a_sort_nor_all_ingredient_logits():
    n, dim, classes, num_groups = 256, 2048, 1000, 4
    specs = [
        (shape, np.int32 if shape == (n,) else np.float32)
        for shape in [(n, dim), (n,), (dim, classes), (classes,)]
    ]
    loss = partial(jaxloss.group_softmax_loss, num_groups=num_groups)
    draw = partial(jaxloss.random_groups, num_samples=8, dim=64, num_groups=4)
    text, memory = compiled(jax.grad(loss, argnums=(0, 2, 3)), *specs)
    for program in (text, compiled(lambda: draw(jax.random.key(0)))[0]):
        assert not re.search(r"\bsort\b|topk", program, re.IGNORECASE)
    # The masked features and their gradient, n·G·d each, and the logits and theirs, n·G·C.
    assert memory < 1.2 * 4 * 2 * n * num_groups * (dim + classes)


@every_bound
def test_one_class_has_exactly_no_loss(bound):
    features, weights = 40 * jnp.cos(jnp.arange(32.0)).reshape(2, 16), 10 * jnp.ones((16, 1))
    loss = partial(jaxloss.group_softmax_loss, num_groups=3, bound=bound)
    assert loss(features, jnp.zeros(2, int), weights) == 0
