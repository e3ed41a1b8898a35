"""The queue of earlier rows, against a list and on meshes.

`tests/test_readme.py` runs docs/coming_from.md, which compares it with pytorch-metric-learning.
"""

from functools import partial
from typing import Any

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


def batches(number=5, n=N, dtype: Any = np.float32):
    """Features, labels of which some are ignored, and masks."""
    rng = np.random.default_rng(160)
    return (
        jnp.asarray(rng.normal(size=(number, n, DIM)), dtype),
        jnp.asarray(rng.integers(-1, 6, (number, n)), jnp.int32),
        jnp.asarray(rng.random((number, n)) > 0.3),
    )


def by_list(features, labels, where, size=SIZE):
    """The rows that a list of the pushed ones leaves in a ring, and the next place."""
    kept = [
        (row, label)
        for batch in zip(*map(np.asarray, (features, labels, where)), strict=True)
        for row, label, is_row in zip(*batch, strict=True)
        if is_row and label >= 0
    ]
    rows, ring = np.zeros((size, DIM)), np.full(size, -1)
    for k, (row, label) in enumerate(kept):
        rows[k % size], ring[k % size] = row, label
    return rows, ring, len(kept) % size


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
    assert jax.tree.map(lambda x: (x.shape, x.dtype), got) == jax.tree.map(
        lambda x: (x.shape, x.dtype), queue
    )
    counts = np.cumsum(np.asarray(where & (labels >= 0)).sum(axis=1))
    assert counts[-1] > SIZE
    np.testing.assert_array_equal(positions, [0, *counts[:-1] % SIZE])


@pytest.mark.slow
@pytest.mark.parametrize("start", [pytest.param(0, marks=pytest.mark.long), 3])
def test_of_more_rows_than_places_the_last_stay(start):
    features, labels, _ = batches(1, 20)
    arrays = [x[0] for x in (features, jnp.abs(labels))]
    queue = jaxloss.make_queue(SIZE, DIM)
    queue = jaxloss.push(queue, *(x[:start] for x in arrays))
    queue = jaxloss.push(queue, *(x[start:] for x in arrays))
    check(queue, by_list(features, jnp.abs(labels), jnp.ones((1, 20), bool)))


@pytest.mark.slow
def test_a_queue_that_is_restored_as_numpy_arrays():
    features, labels, where = (x[0] for x in batches(1))
    queue = push(jaxloss.make_queue(SIZE, DIM), features, labels, where=where)
    restored: Any = jax.tree.map(np.asarray, queue)
    with unchecked():
        got = push(restored, features, np.asarray(labels, np.uint32), where=where)
    jax.tree.map(np.testing.assert_array_equal, got, push(queue, features, labels, where=where))


@pytest.mark.slow
def test_nothing_is_pushed():
    features, labels, _ = batches(1)
    queue = jaxloss.push(jaxloss.make_queue(SIZE, DIM), features[0], jnp.abs(labels[0]))
    nan = jnp.full((N, DIM), jnp.nan)
    for rows, of_rows, where in (
        (nan, labels[0], jnp.zeros(N, bool)),
        (nan, jnp.full(N, -1), None),
        (nan[:0], labels[0, :0], None),
    ):
        check(jaxloss.push(queue, rows, of_rows, where=where), map(np.asarray, queue))


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
        pushed = jaxloss.push(queue, features[0], labels[0])
        return jaxloss.nca_loss(
            features[1], labels[1], references=pushed.features, reference_labels=pushed.labels
        )

    queue = jaxloss.make_queue(SIZE, DIM)
    queue = queue._replace(features=queue.features + 0.3, labels=queue.labels.at[-1].set(1))
    gradient, of_queue = jax.jit(jax.grad(loss, (0, 1), allow_int=True))(features, queue)
    assert not gradient[0].any()
    assert np.asarray(gradient[1]).any()
    assert not of_queue.features.any()


# Devices ----


def steps(queue, arrays, **names):
    """Pushes batches in a scan, and compares each with the queue before."""

    def step(queue, batch):
        features, labels, where = batch
        loss = jaxloss.nca_loss(
            features,
            labels,
            references=queue,
            where=where,
            **names,
        )
        return jaxloss.push(queue, features, labels, where=where, **names), loss

    return lax.scan(step, queue, arrays)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        pytest.param("shard_map", jnp.bfloat16, marks=pytest.mark.long),
        pytest.param("shard_map without check_vma", np.float32, marks=pytest.mark.long),
        pytest.param("pmap", np.float32, marks=pytest.mark.long),
        ("Explicit mesh", np.float32),
    ],
    ids=str,
)
def test_the_queue_is_the_same_on_every_device(way, dtype):
    """And the same as that of the global batch on one device."""
    queue = jaxloss.make_queue(SIZE, DIM, dtype)
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
        of_devices = jax.tree.map(
            lambda x: jnp.moveaxis(x.reshape(len(x), 4, 2, *x.shape[2:]), 1, 0), arrays
        )
        everyone = jax.pmap(run, "batch", in_axes=(None, 0))(queue, of_devices)
        for device in range(1, 4):
            jax.tree.map(lambda x, at=device: np.testing.assert_array_equal(x[0], x[at]), everyone)
        got, got_losses = jax.tree.map(lambda x: x[0], everyone)
    else:
        spread = over_mesh(run, (P(), P(None, "batch")), P(), check_vma=way == "shard_map")
        got, got_losses = jax.jit(spread)(queue, arrays)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    np.testing.assert_allclose(got_losses, losses, rtol=4 * FLOAT32, atol=FLOAT32)


# Errors ----


@pytest.mark.slow
def test_wrong_arguments_are_named():
    make: Any = jaxloss.make_queue
    for name, args in (("size", (0, 2)), ("dim", (2, 0))):
        with raises(ValueError, f"`{name}` must be at least 1, got 0"):
            make(*args)
    with raises(TypeError, "`size` must be a Python integer, got float"):
        make(2.0, 2)
    with raises(TypeError, "`dtype` must be a float dtype, got int32"):
        make(2, 2, np.int32)
    queue = make(SIZE, DIM)
    features, labels, where = (x[0] for x in batches(1))
    with raises(ValueError, r"`features` must have shape \[n, d\] with d = 3 to match .*\(4, 2\)"):
        jaxloss.push(queue, features[:, :2], labels)
    with raises(TypeError, "`queue` must be a `jaxloss.Queue`, got dict"):
        jaxloss.push(queue._asdict(), features, labels)  # pyright: ignore
    with raises(TypeError, "`labels` must have an integer dtype"):
        jaxloss.push(queue, features, labels.astype(jnp.float32))
    with raises(ValueError, "`labels` and `features` must have the same number of rows"):
        jaxloss.push(queue, features, labels[:2])
    with raises(TypeError, "`where` must have dtype bool"):
        jaxloss.push(queue, features, labels, where=labels)
    wide = labels.astype(jnp.uint32)
    with raises(TypeError, r"fits into .* `queue.labels`, int32, got uint32.*astype\(jnp.int32\)"):
        jax.jit(jaxloss.push)(queue, features, wide)
    with raises(OverflowError, "`labels` must have integers that fit into int32"):
        push(queue, features, np.asarray(wide) + np.uint32(2**31))
    restored = queue._replace(labels=np.full(SIZE, 2**32))
    with raises(OverflowError, "`queue.labels` must have integers that fit into int32"):
        push(restored, features, labels)
    for broken, match in (
        (queue._replace(features=queue.features.astype(int)), "`queue.features` .* float dtype"),
        (queue._replace(labels=queue.labels.astype(float)), "`queue.labels` .* integer dtype"),
    ):
        with raises(TypeError, match):
            jaxloss.push(broken, features, labels)
    with raises(ValueError, "`queue.labels` and `queue.features` must have the same number"):
        jaxloss.push(queue._replace(labels=queue.labels[1:]), features, labels)
    with raises(ValueError, "`where` and `features` must have the same number of rows"):
        jaxloss.push(queue, features, labels, where=where[:2])


@pytest.mark.parametrize(
    "way", [pytest.param("shard_map", marks=pytest.mark.long), "pmap", "Explicit mesh"]
)
def test_every_row_of_a_queue_counts_once_on_devices(way):
    """A loss that would change if a reference counted once for each device."""
    features, labels, _ = (x[0] for x in batches(n=8))
    labels, where = jnp.abs(labels), jnp.arange(SIZE) != 1
    queue = jaxloss.push(jaxloss.make_queue(SIZE, DIM), features + 0.5, labels)
    assert SIZE % 4

    def loss(features, labels, queue, where, **names):
        return jaxloss.supervised_contrastive_loss(
            features,
            labels,
            references=queue,
            reference_where=where,
            denominator="negatives",
            **names,
        )

    expected = jax.jit(jax.value_and_grad(loss))(features, labels, queue, where)
    run = jax.value_and_grad(partial(loss, axis_name="batch"))
    if way == "Explicit mesh":
        devices = mesh(kind=AxisType.Explicit)
        everywhere = jax.device_put((queue, where), NamedSharding(devices, P()))
        rows = jax.device_put((features, labels), NamedSharding(devices, P("batch")))
        got = jax.jit(jax.value_and_grad(loss))(*rows, *everywhere)
    elif way == "pmap":
        parts = features.reshape(4, 2, DIM), labels.reshape(4, 2)
        values, gradients = jax.pmap(run, "batch", in_axes=(0, 0, None, None))(*parts, queue, where)
        # A device's gradient is that of the mean over devices times their number.
        got = values[0], gradients.reshape(8, DIM) / 4
    else:
        spread = over_mesh(
            partial(loss, axis_name="batch"), (P("batch"), P("batch"), P(), P()), P()
        )
        got = jax.jit(jax.value_and_grad(spread))(features, labels, queue, where)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=8 * FLOAT32, atol=2 * FLOAT32)
