"""Losses of pairs in tiles and over devices, in what neither the contract nor `test_pairs` has."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from jaxloss.core import products
from tests.jaxloss.harness import QUICK, P, cast, compiled, enable_x64, make_batch, over, over_mesh
from tests.jaxloss.loss_table import CASES, make_features
from tests.tolerances import FLOAT32

DEVICES = 4
RING = "jaxloss.pairs.visits.GATHERED_BYTES"
"""References of more bytes are not gathered, but passed around the devices."""


@pytest.mark.slow
@over(
    [
        row
        for row in CASES
        if row.name
        in (
            *("supervised_contrastive_negatives_in_tiles", "sigmoid_contrastive_in_tiles"),
            *("supervised_contrastive_multi_hot_negatives_in_tiles", "info_nce_in_tiles"),
            *("nca_references_in_tiles", "multi_similarity_mined_in_tiles"),
        )
    ]
)
def test_second_derivatives_in_tiles(row):
    """Of 260 dimensions, whose gradients of references are other products on a CPU."""
    batch = make_batch(row, seed=80)
    features = 0.2 * make_features(np.random.default_rng(80), 12, np.float64, dim=260)
    direction = np.random.default_rng(81).normal(size=features.shape)
    _, labels = batch.args[:2]

    @partial(jax.jit, compiler_options=QUICK)
    def products_of_hessian(x, v):
        gradient = jax.grad(lambda x: row.function(x, labels, where=batch.where, **row.kwargs))
        return (
            gradient(x),
            jax.jvp(gradient, (x,), (v,))[1],
            jax.grad(lambda x: jnp.vdot(gradient(x), v))(x),
        )

    with enable_x64(True):
        labels = cast((labels,), (), np.float64)[0]
        x, v = jnp.asarray(features), jnp.asarray(direction)
        _, *got = products_of_hessian(x, v)
        after, before = (products_of_hessian(x + step * v, v)[0] for step in (1e-5, -1e-5))
    expected = (after - before) / 2e-5
    assert np.abs(expected).max() > 1e-4
    for product in got:
        np.testing.assert_allclose(product, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("block_size", [None, 2, 3])
def test_the_first_of_equal_values_has_the_gradient(block_size):
    """Of a row, 1, 2 and 3 are equally far, and 4 and 6, of other classes. Row 5 is padding."""
    features = jnp.array([[0.0], [1.0], [-1.0], [1.0], [3.0], [jnp.nan], [-3.0]])
    options: Any = {"where": jnp.arange(7) != 5, "block_size": block_size, "reduction": "sum"}
    loss = partial(jaxloss.triplet_loss, margin=99.0, squared=True, normalize=False, **options)
    gradient = jax.jit(jax.grad(loss))(features, jnp.array([0, 0, 0, 0, 1, 0, 2]))
    expected, x = np.zeros(7), np.nan_to_num(features[:, 0])
    for anchor, farthest, nearest in ((0, 1, 4), (1, 2, 4), (2, 1, 6), (3, 2, 4)):
        expected[anchor] += 2 * (x[nearest] - x[farthest])
        expected[farthest] += 2 * (x[farthest] - x[anchor])
        expected[nearest] -= 2 * (x[nearest] - x[anchor])
    np.testing.assert_allclose(gradient[:, 0], expected, atol=FLOAT32)


def test_products_may_depend_on_the_order_of_their_factors(monkeypatch):
    """Some compilers add up `x · y` and `y · x` differently, by which a largest value is missed."""

    def product(a, b):
        found = plain(a, b)
        above = jnp.triu(jnp.ones(found.shape, bool))
        return jnp.where(above, found * (1 + 2 * jnp.finfo(found.dtype).eps), found)

    def gradient(block_size):
        loss = partial(jaxloss.triplet_loss, labels=jnp.arange(12) % 3, block_size=block_size)
        return jax.jit(jax.grad(lambda x: loss(x)))(features)

    plain = products.wide_product
    features = jnp.asarray(np.random.default_rng(7).normal(size=(12, 5)), jnp.float32)
    for block_size in (None, 5):
        expected = gradient(block_size)
        with monkeypatch.context() as patch:
            patch.setattr(products, "wide_product", product)
            chex.assert_trees_all_close(gradient(block_size), expected, atol=8 * FLOAT32)


# Devices ----


triplets = partial(jaxloss.triplet_loss, normalize=False, soft=True)


@pytest.mark.parametrize("num_bytes", [0, 2**30])
@pytest.mark.parametrize("block_size", [None, 2])
def test_nan_is_the_hardest_on_any_device(num_bytes, block_size, monkeypatch):
    """Of references: anchors of its class have it as farthest positive, others as negative."""
    monkeypatch.setattr(RING, num_bytes)
    rng = np.random.default_rng(84)
    x, r = (jnp.asarray(rng.normal(size=(n, 2)), jnp.float32) for n in (8, 12))
    rows = x, jnp.arange(8) % 4, r.at[7].set(jnp.nan), jnp.where(jnp.arange(12) == 7, 1, 9)

    def losses(x, y, r, of_references):
        given = {"references": r, "reference_labels": of_references, "axis_name": "b"}
        return triplets(x, y, **given, block_size=block_size, reduction="none")

    got = jax.jit(over_mesh(losses, P("b"), P("b"), names=("b",)))(*rows)
    assert np.isnan(got).tolist() == (rows[1] == 1).tolist()


def test_ring_holds_no_row_of_other_devices_but_one_block(monkeypatch):
    """No array of the whole batch, which is too large, in the program of a device."""
    rows, dim = 6, 11
    monkeypatch.setattr(RING, 4 * DEVICES * rows * dim - 1)
    gradient = jax.grad(partial(jaxloss.nca_loss, axis_name="batch"))
    step = over_mesh(lambda x, y: gradient(x, y), P("batch"), P("batch"))
    n = DEVICES * rows
    text, _ = compiled(step, ((n, dim), np.float32), ((n,), np.int32))
    assert "collective-permute" in text
    assert "all-gather" not in text
    assert f"{DEVICES * rows},{dim}]" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [jaxloss.nca_loss, pytest.param(jaxloss.prototypical_loss, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("axis_name", [pytest.param(None, marks=pytest.mark.long), "b"])
def test_references_that_every_device_has(loss, axis_name):
    """A support set that is not spread over the devices, beside a batch that is."""
    rng = np.random.default_rng(41)
    labels, of_references = jnp.arange(8) % 3, jnp.arange(5) % 3
    copies = 1 if axis_name is None else DEVICES  # With the axis, every device adds its copy.

    def losses(features, labels, references, of_references, axis_name=None):
        given = {"references": references, "reference_labels": of_references, "block_size": 2}
        return loss(features, labels, **given, axis_name=axis_name, reduction="none")

    specs = (P("b"), P("b"), P(), P()), P("b")
    spread = over_mesh(partial(losses, axis_name=axis_name), *specs, names=("b",))

    def total(x, r):
        return jnp.sum(jnp.cos(spread(x, labels, r, of_references)))

    def expected_total(x, r):
        copied = jnp.tile(r, (copies, 1)), jnp.tile(of_references, copies)
        return jnp.sum(jnp.cos(losses(x, labels, *copied)))

    with enable_x64(True):
        arrays = [jnp.asarray(rng.normal(size=(n, 3))) for n in (8, 5)]
        got, expected = (
            jax.jit(jax.value_and_grad(function, (0, 1)), compiler_options=QUICK)(*arrays)
            for function in (total, expected_total)
        )
    chex.assert_trees_all_close(got, expected, rtol=1e-12)


# References ----


@pytest.mark.parametrize(
    "loss",
    [
        jaxloss.prototypical_loss,
        partial(jaxloss.prototypical_loss, num_classes=3),
        *(partial(jaxloss.triplet_loss, mining=m) for m in ("hard", "semihard", "all")),
    ],
    ids=["prototypical", "num_classes", "hard", "semihard", "all"],
)
def test_no_references_at_all(loss):
    """No sample counts, as for a queue that is still empty."""
    features = jnp.asarray(np.random.default_rng(9).normal(size=(8, 3)), jnp.float32)
    nothing = {"references": features[:0], "reference_labels": jnp.zeros(0, int)}
    value, gradient = jax.jit(jax.value_and_grad(loss))(features, jnp.arange(8) % 3, **nothing)
    assert value == 0
    assert not gradient.any()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [jaxloss.nca_loss, jaxloss.prototypical_loss])
def test_an_anchor_that_is_not_finite_reaches_no_other(loss):
    features = jnp.ones((4, 3)).at[2].set(jnp.nan)
    references, labels = jnp.arange(6.0).reshape(2, 3), jnp.array([0, 1])
    run = jax.jit(partial(loss, reduction="none"))
    anchors = features, jnp.array([0, 1, 1, 0])
    losses = run(*anchors, references=references, reference_labels=labels)
    assert np.isnan(losses).tolist() == [False, False, True, False]
