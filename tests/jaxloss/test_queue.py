"""The queue of earlier rows, against a list and on meshes.

`tests/test_readme.py` runs docs/coming_from.md, which compares it with pytorch-metric-learning.
"""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding

import jaxloss
from tests.jaxloss.harness import P, enable_x64, mesh, over_mesh, raises, unchecked
from tests.tolerances import FLOAT32

SIZE, DIM, N = 7, 3, 4
pytestmark = pytest.mark.usefixtures("checked_annotations")
push: Any = jaxloss.push  # The tests compile functions that are looked up later.


def batches(number=5, n=N):
    """Features, labels of which some are ignored, and masks."""
    rng = np.random.default_rng(160)
    return (
        jnp.asarray(rng.normal(size=(number, n, DIM)), jnp.float32),
        jnp.asarray(rng.integers(-1, 6, (number, n)), jnp.int32),
        jnp.asarray(rng.random((number, n)) > 0.3),
    )


def by_list(features, labels, where):
    """The rows that a list of the pushed ones leaves in a ring, and the next place."""
    kept = np.asarray(where & (labels >= 0))
    rows, ring = np.zeros((SIZE, DIM)), np.full(SIZE, -1)
    pushed = zip(np.asarray(features)[kept], np.asarray(labels)[kept], strict=True)
    for k, (row, label) in enumerate(pushed):
        rows[k % SIZE], ring[k % SIZE] = row, label
    return rows, ring, kept.sum() % SIZE


def check(queue, expected):
    for got, wanted in zip(queue, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float64), wanted)


def test_a_scan_equals_a_list():
    queue = jaxloss.make_queue(SIZE, DIM)
    _, labels, where = arrays = batches()

    def step(queue, batch):
        features, labels, where = batch
        return jaxloss.push(queue, features, labels, where=where), queue.position

    got, positions = jax.jit(lambda queue, arrays: lax.scan(step, queue, arrays))(queue, arrays)
    check(got, by_list(*arrays))
    assert isinstance(got, jaxloss.Queue)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, queue)
    counts = np.cumsum(np.asarray(where & (labels >= 0)).sum(axis=1))
    assert counts[-1] > SIZE
    np.testing.assert_array_equal(positions, [0, *counts[:-1] % SIZE])


@pytest.mark.slow
def test_more_rows_than_places_and_none():
    """Of more rows, the last stay. The queue may be one that is restored as NumPy arrays."""
    features, labels, _ = batches(1, 20)
    every, start = (features[0], jnp.abs(labels[0])), 3
    queue: Any = push(jaxloss.make_queue(SIZE, DIM), *(x[:start] for x in every))
    expected = by_list(features, jnp.abs(labels), jnp.ones((1, 20), bool))
    rows, of_rows = (x[start:] for x in every)
    check(push(queue, rows, of_rows), expected)
    with unchecked():
        restored = jax.tree.map(np.asarray, queue)
        check(push(restored, rows, np.asarray(of_rows, np.uint32)), expected)
    nan = jnp.full((N, DIM), jnp.nan)
    for rows, of_rows, where in (
        (nan, labels[0, :N], jnp.zeros(N, bool)),
        (nan, jnp.full(N, -1), None),
        (nan[:0], labels[0, :0], None),
    ):
        check(push(queue, rows, of_rows, where=where), map(np.asarray, queue))


def test_rows_that_are_not_finite_are_not_pushed():
    """Such as 1e5, which float16 does not have: they would stay for the next batches."""
    features, labels, where = batches()
    for value, dtype in ((np.nan, np.float32), (-np.inf, np.float32), (1e5, np.float16)):
        queue = jaxloss.make_queue(SIZE, DIM, dtype)
        poisoned = features[0].at[2, 1].set(value)
        got = push(queue, poisoned, labels[0], where=where[0])
        left = push(queue, features[0], labels[0], where=where[0] & (np.arange(N) != 2))
        check(got, [np.asarray(leaf, np.float64) for leaf in left])
        assert left.position == np.sum(where[0] & (labels[0] >= 0)) - 1


def test_dtypes():
    queue = jaxloss.make_queue(SIZE, DIM, jnp.bfloat16)
    features, labels, _ = batches(1)
    for dtype in (np.uint8, np.int8, np.int32):
        pushed = jaxloss.push(queue, features[0], jnp.abs(labels[0]).astype(dtype))
        assert (pushed.features.dtype, pushed.labels.dtype) == (jnp.bfloat16, np.int32)
        np.testing.assert_array_equal(pushed.features[:N], features[0].astype(jnp.bfloat16))
        np.testing.assert_array_equal(pushed.labels[:N], jnp.abs(labels[0]))
    with enable_x64(True):
        large = jnp.asarray([2**40 + k for k in range(N)])
        pushed = jaxloss.push(jaxloss.make_queue(SIZE, DIM), features[0], large)
        np.testing.assert_array_equal(pushed.labels[:N], large)


def test_no_gradient_flows_through_the_queue():
    features, labels, _ = batches(2)
    labels = jnp.abs(labels) % 2

    def loss(features, queue):
        rows, of_rows, _ = jaxloss.push(queue, features[0], labels[0])
        given: Any = {"references": rows, "reference_labels": of_rows}
        return jaxloss.nca_loss(features[1], labels[1], **given)

    queue = jaxloss.make_queue(SIZE, DIM)
    queue = queue._replace(features=queue.features + 0.3, labels=queue.labels.at[-1].set(1))
    gradient, of_queue = jax.jit(jax.grad(loss, (0, 1), allow_int=True))(features, queue)
    assert not gradient[0].any()
    assert np.asarray(gradient[1]).any()
    assert not of_queue.features.any()


def test_blocks_after_one_without_a_valid_row_are_compared():
    """A queue ends after its last valid row. Its first places may be masked."""
    features, _, _ = batches(2)
    rows, of_rows = jnp.concatenate(features), jnp.arange(2 * N) % 2
    queue: Any = push(jaxloss.make_queue(2 * N, DIM), rows, of_rows)
    for keep in ([0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0, 1, 1]):
        given: Any = {"reference_where": jnp.asarray(keep, bool), "block_size": 2}

        def loss(x, references, given=given, **options):
            return jaxloss.nca_loss(
                x, of_rows[:N], references=references, reduction="sum", **given, **options
            )

        got = jax.jit(jax.value_and_grad(loss))(rows[:N] + 1, queue)
        plain = jax.value_and_grad(partial(loss, reference_labels=of_rows))(rows[:N] + 1, rows)
        assert plain[0] > 0
        chex.assert_trees_all_close(got, plain, rtol=4 * FLOAT32, atol=FLOAT32)


# Devices ----


def steps(queue, arrays, **names):
    """Pushes batches in a scan, and compares each with the queue before."""

    def step(queue, batch):
        features, labels, where = batch
        loss = jaxloss.nca_loss(features, labels, references=queue, where=where, **names)
        return jaxloss.push(queue, features, labels, where=where, **names), loss

    return lax.scan(step, queue, arrays)


WAYS = "shard_map", "shard_map without check_vma", "pmap"


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["Explicit mesh", *(pytest.param(way, marks=pytest.mark.long) for way in WAYS)]
)
def test_the_queue_is_the_same_on_every_device(way):
    """And the same as that of the global batch on one device."""
    queue = jaxloss.make_queue(SIZE, DIM, jnp.bfloat16 if way == "shard_map" else jnp.float32)
    arrays = batches(n=8)
    expected, losses = jax.jit(steps)(queue, arrays)
    run = partial(steps, axis_name="batch")
    if way == "Explicit mesh":
        devices = mesh(kind=AxisType.Explicit)
        placed = jax.device_put(queue, NamedSharding(devices, P()))
        rows = jax.device_put(arrays, NamedSharding(devices, P(None, "batch")))
        got, got_losses = jax.jit(steps)(placed, rows)
        assert all(x.sharding.is_fully_replicated for x in got)
        for k in range(len(arrays[0])):  # Outside of jit, too.
            batch = jax.device_put([x[k] for x in arrays], NamedSharding(devices, P("batch")))
            placed = push(placed, *batch[:2], where=batch[2])
        jax.tree.map(np.testing.assert_array_equal, placed, expected)
    elif way == "pmap":
        of_devices = [x.reshape(len(x), 4, 2, *x.shape[2:]) for x in arrays]
        everyone = jax.pmap(run, "batch", in_axes=(None, 1))(queue, of_devices)
        got, got_losses = jax.tree.map(lambda x: x[0], everyone)
        jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.asarray(x)[[0] * 4]), everyone)
    else:
        spread = over_mesh(run, (P(), P(None, "batch")), P(), check_vma=way == "shard_map")
        got, got_losses = jax.jit(spread)(queue, arrays)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    np.testing.assert_allclose(got_losses, losses, rtol=4 * FLOAT32, atol=FLOAT32)


# Errors ----


@pytest.mark.slow
def test_wrong_arguments_are_named():
    make: Any = jaxloss.make_queue
    queue = make(SIZE, DIM)
    features, labels, where = (x[0] for x in batches(1))
    wide = labels.astype(jnp.uint32)

    def refused(error, match, *arguments, function=push, **options):
        with raises(error, match):
            function(*arguments, **options)

    def broken(match, error: Any = TypeError, **arrays):
        refused(error, match, queue._replace(**arrays), features, labels)

    for name, sizes in (("size", (0, 2)), ("dim", (2, 0))):
        refused(ValueError, f"`{name}` must be at least 1, got 0", *sizes, function=make)
    refused(TypeError, "`size` must be a Python integer, got float", 2.0, 2, function=make)
    refused(TypeError, "`dtype` must be a float dtype, got int32", 2, 2, np.int32, function=make)
    refused(ValueError, r"`features` .* d = 3 to match .*\(4, 2\)", queue, features[:, :2], labels)
    refused(TypeError, "`queue` must be a `jaxloss.Queue`, got dict", {}, features, labels)
    refused(TypeError, "`labels` must have an integer dtype", queue, features, features[:, 0])
    refused(ValueError, "`labels` and `features` must have", queue, features, labels[:2])
    for mask, error in ((labels, TypeError), (where[:2], ValueError)):
        refused(error, "`where`", queue, features, labels, where=mask)
    too_wide = r"fits into .* `queue.labels`, int32, got uint32.*astype\(jnp.int32\)"
    refused(TypeError, too_wide, queue, features, wide, function=jax.jit(push))
    large = np.asarray(wide) + np.uint32(2**31)
    refused(OverflowError, "`labels` must have integers that fit into", queue, features, large)
    broken("`queue.labels` must have int.* fit", OverflowError, labels=np.full(SIZE, 2**32))
    broken("`queue.features` .* float dtype", features=queue.features.astype(int))
    broken("`queue.labels` .* integer dtype", labels=queue.labels.astype(float))
    broken("`queue.labels` and `queue.features` must", ValueError, labels=queue.labels[1:])
