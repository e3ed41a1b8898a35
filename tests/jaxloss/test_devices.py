"""Every loss over four devices equals the same loss on one, in value and gradient.

The features or logits are inputs times a kernel, so every loss has a replicated parameter. The
weights and the bias of a classifier are replicated parameters too.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import jaxloss
from jaxloss import sharded_loss
from tests.jaxloss.harness import QUICK, P, magnitude, mesh, over, precision
from tests.jaxloss.loss_table import CASES, LOSSES, ONE_OF_A_KIND, VARIANTS, LossRow

DEVICES = 4
ROWS = 6
INPUTS = 5


every_loss = over(LOSSES)
# Other losses and variants exchange the same numbers as one of these, or none. A loss in tiles
# exchanges all that it does without them.
EXCHANGES = (*ONE_OF_A_KIND, *(row for row in VARIANTS if row.kind == "features" and row.has_tiles))
# On an Explicit mesh, a loss is called as by `shard_map`, with its arguments spread by their names.
WITH_FURTHER_ARRAYS = tuple(
    row
    for row in VARIANTS
    if not row.has_tiles
    and (
        row.kind == "features"
        or not all(isinstance(value, bool | int | float | str) for value in row.kwargs.values())
    )
)
ON_EXPLICIT_MESH = (*LOSSES, *WITH_FURTHER_ARRAYS)


def others(rows, than):
    return tuple(row for row in rows if row not in than)


@pytest.fixture(autouse=True)
def four_devices():
    assert jax.device_count() == DEVICES


@pytest.fixture(autouse=True)
def checked_annotations():
    """Annotations are checked on one device only, in `test_contract`."""


def uneven() -> np.ndarray:
    """A mask with all rows of a device, one row, no row, and most rows."""
    where = np.zeros((DEVICES, ROWS), bool)
    where[0], where[1, 4], where[3, 1:] = True, True, True
    return where.reshape(-1)


def make_problem(row: LossRow, dtype: Any, masked: bool = True) -> tuple[Any, Any]:
    """Replicated parameters, and a batch of all devices' rows, as NumPy arrays."""
    rng = np.random.default_rng(30)
    n = DEVICES * ROWS
    scored, labels, *rest = row.make_inputs(rng, n, dtype)
    kernel = rng.normal(size=(INPUTS, scored.shape[1])) / np.sqrt(INPUTS)
    params = {"kernel": kernel.astype(dtype), "rest": tuple(rest)}
    batch = {"inputs": rng.normal(size=(n, INPUTS)).astype(dtype), "labels": labels}
    if masked:
        labels = labels.copy()
        labels[[2, 10, 20, 21]] = -1
        weights = rng.uniform(0.2, 2.0, n).astype(dtype)
        batch.update(labels=labels, where=uneven(), sample_weights=weights)
    return params, batch


def objective(row: LossRow, axis_name: Any, params: Any, batch: Any, reduction: str) -> Any:
    batch = dict(batch)
    scored = batch.pop("inputs") @ params["kernel"]
    labels = batch.pop("labels")
    return row.function(
        scored,
        labels,
        *params["rest"],
        reduction=reduction,
        axis_name=axis_name,
        **batch,
        **row.kwargs,
    )


def step(row: LossRow, axis_name: Any, params: Any, batch: Any) -> Any:
    """((mean, sum), gradients of both together), and the losses of this device's rows.

    Losses per class are the same on every device. They follow the sum.
    """

    def loss(params):
        mean = objective(row, axis_name, params, batch, "mean")
        total = objective(row, axis_name, params, batch, "sum")
        # One backward pass for both. A wrong factor in either changes the gradient.
        return mean + 0.3 * total, (mean, total)

    (_, values), grads = jax.value_and_grad(loss, has_aux=True)(params)
    if axis_name is not None:
        grads = jax.lax.pmean(grads, axis_name)
    if row.terms is None:
        return (values, grads), ()
    terms = objective(row, axis_name, params, batch, "none")
    if row.terms == "classes":
        return ((*values, terms), grads), ()
    return (values, grads), terms


@cache
def alone(row: LossRow) -> Any:
    return jax.jit(partial(step, row, None))


@cache
def single_device(row: LossRow, dtype: Any, masked: bool = True) -> Any:
    """The results in float64, rounded to the dtype.

    A batch without masks is one whose rows all count alike: one program serves every problem.
    """
    params, batch = make_problem(row, dtype, masked)
    if not masked:
        n = DEVICES * ROWS
        batch |= {"where": np.ones(n, bool), "sample_weights": np.ones(n, dtype)}

    def cast(x, to):
        return np.asarray(x, to) if np.issubdtype(x.dtype, np.floating) else np.asarray(x)

    with precision(np.float64):
        wide = jax.tree.map(partial(cast, to=np.float64), (params, batch))
        return jax.tree.map(partial(cast, to=dtype), alone(row)(*wide))


def check(got: Any, expected: Any, dtype: Any) -> None:
    """The tolerance is relative to the largest number of each array."""
    tolerance = 1e-9 if dtype == np.float64 else 1e-6
    assert magnitude(expected[0][1]["kernel"]) > 1e-3
    got, expected = jax.tree.map(np.asarray, (got, expected))
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, magnitude(b)))

    jax.tree.map(close, got, expected)


def per_device(batch: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)


def merged(own: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1), own)


# Ways to spread the batch: parameters and batch to the results of every device that has its own,
# and the losses of all rows. ----


@cache
def pmapped(row: LossRow) -> Any:
    return jax.pmap(partial(step, row, "batch"), axis_name="batch", in_axes=(None, 0))


def of_devices(results: Any) -> list[Any]:
    return [jax.tree.map(lambda x, at=at: x[at], results) for at in range(DEVICES)]


def by_pmap(row: LossRow, params: Any, batch: Any) -> tuple[list[Any], Any]:
    results, own = pmapped(row)(params, per_device(batch))
    return of_devices(results), merged(own)


def by_shard_map(
    row: LossRow, params: Any, batch: Any, *, shape: Any = (4,), check_vma: bool = True
) -> tuple[list[Any], Any]:
    axes = ("host", "chip")[-len(shape) :]
    specs = (P(), P(axes))

    def run(params, batch):
        results, own = step(row, axes, params, batch)
        return results if check_vma else jax.tree.map(lambda x: x[None], results), own

    sharded = jax.shard_map(
        run,
        mesh=mesh(shape, axes),
        in_specs=specs,
        # Without the checks, the results of every device must be compared.
        out_specs=specs if check_vma else P(axes),
        check_vma=check_vma,
    )
    results, own = jax.jit(sharded, compiler_options=QUICK)(params, batch)
    return [results] if check_vma else of_devices(results), own


def by_jit(
    row: LossRow, params: Any, batch: Any, *, kind: AxisType, shape: Any = (4,)
) -> tuple[list[Any], Any]:
    """Sharded global arrays, without an axis name."""
    params, batch = placed(params, batch, mesh(shape, ("host", "chip")[-len(shape) :], kind))
    run = jax.jit(partial(step, row, None), compiler_options=QUICK)
    results, own = run(params, batch)
    if kind == AxisType.Explicit:
        check_shardings(results, own, batch)
    return [results], own


def placed(params: Any, batch: Any, devices: Any) -> tuple[Any, Any]:
    params = jax.device_put(params, NamedSharding(devices, P()))
    return params, jax.device_put(batch, NamedSharding(devices, P(devices.axis_names)))


def check_shardings(results: Any, own: Any, batch: Any) -> None:
    of_rows = batch["labels"].sharding.spec[0]
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(results))
    assert all(leaf.sharding.spec[0] == of_rows for leaf in jax.tree.leaves(own))


def by_sharded_loss(row: LossRow, params: Any, batch: Any) -> tuple[list[Any], Any]:
    divided = sharded_loss(row.function, mesh(), "batch")
    row = replace(row, function=lambda *args, axis_name, **more: divided(*args, **more))
    batch = jax.device_put(batch, NamedSharding(mesh(), P("batch")))
    results, own = jax.jit(partial(step, row, None), compiler_options=QUICK)(params, batch)
    return [results], own


on_explicit_mesh = partial(by_jit, kind=AxisType.Explicit)
WAYS = {
    "pmap": (by_pmap, LOSSES),
    "shard_map": (by_shard_map, EXCHANGES),
    "shard_map without check_vma": (partial(by_shard_map, check_vma=False), ONE_OF_A_KIND),
    "shard_map over two axes": (partial(by_shard_map, shape=(2, 2)), ONE_OF_A_KIND),
    "Auto mesh": (partial(by_jit, kind=AxisType.Auto), ONE_OF_A_KIND),
    "Explicit mesh": (on_explicit_mesh, ON_EXPLICIT_MESH),
    "Explicit mesh of two axes": (partial(on_explicit_mesh, shape=(2, 2)), ONE_OF_A_KIND),
    "sharded_loss": (by_sharded_loss, ONE_OF_A_KIND),
}
"""Each way, and the losses that it is tested with: those that exchange different numbers, or one of
each kind where the way is the same for all."""
QUICK_WAYS = ("Explicit mesh",)


def ways_and_rows() -> Iterator[Any]:
    for name, (way, rows) in WAYS.items():
        for row in rows:
            quick = name in QUICK_WAYS and row in LOSSES
            marks = () if quick else pytest.mark.slow
            yield pytest.param(way, row, id=f"{name}-{row.name}", marks=marks)


@pytest.mark.parametrize(("way", "row"), ways_and_rows())
def test_value_and_gradients(way, row):
    with precision(np.float64):
        results, own = way(row, *make_problem(row, np.float64))
    for result in results:
        check((result, own), single_device(row, np.float64), np.float64)


@pytest.mark.slow
@over(tuple(row for row in CASES if row.name in ("nca_in_tiles", "prototypical", "direct_sum")))
def test_pmap_in_float32(row):
    with precision(np.float32):
        results, own = by_pmap(row, *make_problem(row, np.float32))
    for result in results:
        check((result, own), single_device(row, np.float32), np.float32)


@pytest.mark.slow
@over(ONE_OF_A_KIND)
def test_without_masks(row):
    """Without masks and weights, `check_vma` sees constants in their place."""
    with precision(np.float64):
        (result,), own = by_shard_map(row, *make_problem(row, np.float64, masked=False))
    check((result, own), single_device(row, np.float64, masked=False), np.float64)


@pytest.mark.slow
@over(others(LOSSES, EXCHANGES))
@pytest.mark.parametrize("masked", [False, True])
def test_check_vma_accepts(row, masked):
    specs, run = (P(), P("chip")), partial(step, row, "chip")
    spread = jax.shard_map(run, mesh=mesh((4,), ("chip",)), in_specs=specs, out_specs=specs)
    with precision(np.float64):
        jax.eval_shape(spread, *make_problem(row, np.float64, masked))


@pytest.mark.slow
@over(others(VARIANTS, ON_EXPLICIT_MESH))
def test_explicit_mesh_accepts(row):
    devices = mesh(kind=AxisType.Explicit)
    with precision(np.float64):
        params, batch = placed(*make_problem(row, np.float64), devices)
        results, own = jax.eval_shape(partial(step, row, None), params, batch)
    check_shardings(results, own, batch)


@pytest.mark.slow
@every_loss
def test_nothing_counts_anywhere(row):
    with precision(np.float64):
        params, batch = make_problem(row, np.float64)
        batch["where"] = np.zeros_like(batch["where"])
        for leaf in jax.tree.leaves(pmapped(row)(params, per_device(batch))):
            assert not np.asarray(leaf).any()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pmap", "check_vma", "without check_vma"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_statistics_of_classes(way, dtype):
    """All devices get exactly the same numbers."""
    rng = np.random.default_rng(31)
    n, classes = DEVICES * ROWS, 4
    means, features = rng.normal(size=(5, classes)), rng.normal(0.4, 1.0, (n, 5))
    labels = rng.integers(-1, classes - 1, n).astype(np.int32)  # The last class is absent.

    def run(means, features, labels, where, axis_name: Any = "batch"):
        common: Any = {"where": where, "axis_name": axis_name}
        return (
            jaxloss.update_class_means(means, features, labels, **common),
            jaxloss.class_balanced_lengths(labels, classes, **common),
            jnp.stack(jaxloss.discriminability(features, labels, **common)),
        )

    with precision(dtype):
        given, *rows = map(
            jnp.asarray, (means.astype(dtype), features.astype(dtype), labels, uneven())
        )
        expected = jax.jit(partial(run, axis_name=None))(given, *rows)
        if way == "pmap":
            results = jax.pmap(run, "batch", in_axes=(None, 0, 0, 0))(given, *per_device(rows))
        else:
            spread = jax.shard_map(
                lambda *args: jax.tree.map(lambda x: x[None], run(*args)),
                mesh=mesh(),
                in_specs=(P(), *[P("batch")] * 3),
                out_specs=P("batch"),
                check_vma=way == "check_vma",
            )
            results = jax.jit(spread)(given, *rows)
        results, expected = jax.tree.map(np.asarray, (results, expected))
    assert np.abs(expected[0] - means).max() > 0.1
    assert np.all(expected[2] > 0)
    tolerance = 1e-12 if dtype == np.float64 else 1e-6
    for own, whole in zip(results, expected, strict=True):
        np.testing.assert_allclose(own[0], whole, rtol=0, atol=tolerance)
        np.testing.assert_array_equal(own, np.stack([own[0]] * DEVICES))
