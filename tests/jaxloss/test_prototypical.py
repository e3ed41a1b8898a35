"""Properties of the prototypical loss that the contract does not cover."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import references
from tests.jaxloss.harness import QUICK, P, enable_x64, equations, over_mesh
from tests.jaxloss.loss_table import make_features, make_labels, towers
from tests.tolerances import FLOAT32

loss: Any = jaxloss.prototypical_loss
proto: Any = jax.jit(loss, static_argnames=("num_classes", "block_size", "reduction"))


def few_shot(rng, n=9, m=7, dim=5) -> tuple[Any, dict[str, Any]]:
    """Queries with their labels, and a support set of other classes."""
    queries, support = rng.normal(size=(n, dim)), rng.normal(0.3, 1.2, (m, dim))
    labels, of_support = rng.integers(0, 4, n), np.resize([2, 0, 3, 2, 5, 0, 2], m)
    return (queries, labels), {"references": support, "reference_labels": of_support}


def of_references(anchors, given, **options):
    return proto(*map(jnp.asarray, anchors), **jax.tree.map(jnp.asarray, given), **options)


# Classes ----


@pytest.mark.slow
def test_with_and_without_num_classes():
    """The candidates are the classes of the batch either way, for any class indices."""
    rng = np.random.default_rng(52)
    features = make_features(rng, 14, np.float64)
    labels = rng.choice(np.array([-1, 2, 5, 6, 40], np.int32), 14)
    where = rng.random(14) < 0.8
    every = [{}, {"num_classes": 100}, {"block_size": 2}, {"num_classes": 41, "block_size": 7}]
    with enable_x64(True):
        x, y, w = map(jnp.asarray, (features, labels, where))

        def results(options, labels=y):
            run = jax.value_and_grad(lambda x: loss(x, labels, where=w, temperature=1.7, **options))
            return jax.tree.map(np.asarray, jax.jit(run)(x))

        whole, *others = map(results, every)
        # Padding looks like no class, not even the first or the largest one of the dtype.
        for block_size, dtype in ((1, np.uint8), (2, np.uint32), (64, np.int32)):
            kinds = np.array([0, 7, np.iinfo(dtype).max - 1, np.iinfo(dtype).max], dtype)
            index = make_labels(rng, 14)
            got = results({"block_size": block_size}, jnp.asarray(kinds[index]))
            expected = results({"num_classes": 4}, jnp.asarray(index))
            chex.assert_trees_all_close(got, expected, rtol=1e-10, atol=1e-13)
    reference = references.prototypical_loss(features, labels, where=where, temperature=1.7)
    np.testing.assert_allclose(whole[0], reference, rtol=1e-10)
    for other in others:
        chex.assert_trees_all_close(other, whole, rtol=1e-10, atol=1e-13)


def test_as_many_tiles_as_the_batch_has_classes():
    """One compiled function, for batches of one class up to a class per pair of samples."""
    rng = np.random.default_rng(56)
    features = make_features(rng, 24, np.float64)
    with enable_x64(True):
        run: Any = jax.jit(partial(loss, block_size=4))
        for count in (1, 3, 4, 5, 8, 12, 24):
            labels = rng.permutation(np.arange(24) % count)
            got = run(jnp.asarray(features), jnp.asarray(labels))
            np.testing.assert_allclose(
                got, references.prototypical_loss(features, labels), rtol=1e-10
            )
    assert run._cache_size() == 1


# References ----


def test_references_of_another_dtype():
    (queries, labels), given = few_shot(np.random.default_rng(63))
    anchors = queries.astype(np.float32), labels.astype(np.int32)
    narrow = given["references"].astype(jnp.bfloat16)
    with enable_x64(True):
        expected = of_references(anchors, given | {"references": narrow.astype(np.float32)})
        for dtype in (np.uint8, np.int64, np.uint32):
            of_narrow = {
                "references": narrow,
                "reference_labels": given["reference_labels"].astype(dtype),
            }
            got = of_references(anchors, of_narrow)
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, expected, rtol=FLOAT32)


def test_label_of_a_reference_out_of_range_is_nan():
    anchors, given = few_shot(np.random.default_rng(64))
    run = partial(of_references, anchors, reduction="none")
    assert np.isfinite(run(given, num_classes=6)).all()
    assert np.isnan(run(given, num_classes=5)[anchors[1] == 0]).all()
    # A masked one is in range.
    masked = given | {"reference_where": given["reference_labels"] < 5}
    assert np.isfinite(run(masked, num_classes=5)).all()


@pytest.mark.parametrize("num_classes", [4, 100])  # Fewer than rows, and more.
def test_label_of_a_sample_out_of_range_is_nan_for_it_alone(num_classes):
    """It is no candidate for the others either."""
    features = make_features(np.random.default_rng(65), 12, np.float64)
    labels = np.where(
        np.arange(12) % 4 == 1, num_classes, make_labels(np.random.default_rng(1), 12)
    )
    kept = labels < num_classes
    with enable_x64(True):
        arrays = jnp.asarray(features), jnp.asarray(labels)
        got = np.asarray(loss(*arrays, num_classes=num_classes, reduction="none"))
    expected = references.prototypical_loss(features[kept], labels[kept], reduction="none")
    assert np.isnan(got[~kept]).all()
    np.testing.assert_allclose(got[kept], expected, rtol=1e-10, atol=1e-13)


# Derivatives ----

# `test_check_loss` has a single tile.
LONG = [pytest.mark.long]
TILED = [
    pytest.param(loss, {"block_size": 1}, id="tiles", marks=LONG),
    pytest.param(loss, {"num_classes": 4, "block_size": 3}, id="num_classes"),
    pytest.param(towers(loss), {"block_size": 1}, id="references", marks=LONG),
]


@pytest.mark.slow
@pytest.mark.parametrize(("function", "options"), TILED)
def test_vmap_over_batches_of_different_numbers_of_classes(function, options):
    rng = np.random.default_rng(67)
    features = jnp.asarray(rng.normal(size=(4, 8, 3)), np.float32)
    labels = jnp.asarray([np.arange(8) % count for count in (1, 2, 4, 3)])

    def run(x, y):
        return jax.value_and_grad(jax.checkpoint(partial(function, **options)))(x, y)

    got = jax.jit(jax.vmap(run), compiler_options=QUICK)(features, labels)
    expected = [jax.jit(run)(x, y) for x, y in zip(features, labels, strict=True)]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *expected)
    chex.assert_trees_all_close(got, expected, rtol=4 * FLOAT32, atol=FLOAT32)


def test_there_is_no_forward_mode():
    x = jnp.ones((3, 2))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda x: jax.jvp(lambda x: loss(x, jnp.array([0, 0, 1])), (x,), (x,)))(x)


# Devices ----


@pytest.mark.parametrize("options", [{}, {"num_classes": 5}], ids=str)
def test_means_too_large_for_one_device(options, monkeypatch):
    """Each device has those of some classes. Five are not a multiple of the devices."""
    monkeypatch.setattr("jaxloss.pairs.visits.GATHERED_BYTES", 0)
    features = make_features(np.random.default_rng(70), 12, np.float64)
    labels = np.array([4, 1, 4, 0, 3, 3, 1, 2, 0, 4, -1, 2])
    with enable_x64(True):
        arrays = jnp.asarray(features), jnp.asarray(labels)
        expected = jax.jit(jax.value_and_grad(partial(loss, reduction="sum")))(*arrays)
        run = jax.value_and_grad(partial(loss, reduction="sum", axis_name="batch", **options))
        got = jax.jit(over_mesh(run, P("batch"), (P(), P("batch"))))(*arrays)
        chex.assert_trees_all_close(got, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("options", [{}, {"num_classes": 4}], ids=str)
def test_features_are_not_gathered(options):
    """Devices exchange labels, and sums over the classes of a tile."""
    gradient = jax.value_and_grad(partial(loss, axis_name="batch", **options))
    run = over_mesh(gradient, P("batch"), (P(), P("batch")))
    gathered = {
        equation.invars[0].aval.ndim
        for equation in equations(run, jnp.ones((8, 3)), jnp.zeros(8, int))
        if "all_gather" in equation.primitive.name
    }
    assert gathered == (set() if options else {1})
