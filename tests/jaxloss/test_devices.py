"""Every loss over four devices equals the same loss on one, in value and gradient.

The features or logits are inputs times a kernel, so every loss has a replicated parameter. The
weights and the bias of a classifier are replicated parameters too.
"""

from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jaxloss
from tests.jaxloss.harness import QUICK, P, magnitude, mesh, precision
from tests.jaxloss.loss_table import CASES, LOSSES, ONE_OF_A_KIND, LossRow

DEVICES = 4
ROWS = 6
INPUTS = 5


def over(rows):
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


every_loss, one_of_a_kind = over(LOSSES), over(ONE_OF_A_KIND)
# Other variants exchange the same numbers as the plain loss, or none.
every_exchange = over(tuple(row for row in CASES if row in LOSSES or row.kind == "features"))


@pytest.fixture(autouse=True)
def four_devices():
    assert jax.device_count() == DEVICES


def make_problem(row: LossRow, dtype: Any, masked: bool = True) -> tuple[Any, Any]:
    """Replicated parameters, and a batch of all devices' rows, as NumPy arrays."""
    rng = np.random.default_rng(30)
    n = DEVICES * ROWS
    scored, labels, *rest = row.make_inputs(rng, n, dtype)
    kernel = rng.normal(size=(INPUTS, scored.shape[1])) / np.sqrt(INPUTS)
    params = {"kernel": kernel.astype(dtype), "rest": tuple(rest)}
    batch = {"inputs": rng.normal(size=(n, INPUTS)).astype(dtype), "labels": labels}
    if masked:
        # As uneven as possible: all rows of a device, one row, no row, most rows.
        where = np.zeros((DEVICES, ROWS), bool)
        where[0], where[1, 4], where[3, 1:] = True, True, True
        labels = labels.copy()
        labels[[2, 10, 20, 21]] = -1
        weights = rng.uniform(0.2, 2.0, n).astype(dtype)
        batch.update(labels=labels, where=where.reshape(-1), sample_weights=weights)
        assert len(set(where.sum(axis=1))) == DEVICES
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
def single_device(row: LossRow, dtype: Any, masked: bool = True) -> Any:
    with precision(dtype):
        params, batch = make_problem(row, dtype, masked)
        results = jax.jit(partial(step, row, None))(params, batch)
        return jax.tree.map(np.asarray, results)


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


@cache
def pmapped(row: LossRow) -> Any:
    return jax.pmap(partial(step, row, "batch"), axis_name="batch", in_axes=(None, 0))


def check_pmap(row: LossRow, dtype: Any) -> None:
    with precision(dtype):
        params, batch = make_problem(row, dtype)
        results, own = jax.tree.map(np.asarray, pmapped(row)(params, per_device(batch)))
    for device in range(DEVICES):
        on_device = jax.tree.map(lambda x, device=device: x[device], results)
        check((on_device, merged(own)), single_device(row, dtype), dtype)


@every_loss
def test_pmap(row):
    check_pmap(row, np.float64)


@pytest.mark.slow
@over(tuple(row for row in CASES if row.name in ("nca_in_tiles", "prototypical", "direct_sum")))
def test_pmap_in_float32(row):
    check_pmap(row, np.float32)


def sharded_step(
    row: LossRow, axes: Any, devices: Any, params: Any, batch: Any, check_vma: bool = True
) -> Any:
    """`step` by `shard_map`, as NumPy. Without its checks, the results of every device."""
    specs = (P(), P(axes))

    def run(params, batch):
        results, own = step(row, axes, params, batch)
        return results if check_vma else jax.tree.map(lambda x: x[None], results), own

    sharded = jax.shard_map(
        run,
        mesh=devices,
        in_specs=specs,
        out_specs=specs if check_vma else P(axes),
        check_vma=check_vma,
    )
    return jax.tree.map(np.asarray, jax.jit(sharded, compiler_options=QUICK)(params, batch))


@pytest.mark.slow
@every_exchange
def test_shard_map(row):
    with precision(np.float64):
        params, batch = make_problem(row, np.float64)
        got = sharded_step(row, "batch", mesh(), params, batch)
    check(got, single_device(row, np.float64), np.float64)


@pytest.mark.slow
@every_loss
def test_without_masks(row):
    """Without masks and weights, `check_vma` sees constants in their place."""
    with precision(np.float64):
        params, batch = make_problem(row, np.float64, masked=False)
        specs = (P(), P("batch"))
        run = partial(step, row, "batch")
        jax.eval_shape(
            jax.shard_map(run, mesh=mesh(), in_specs=specs, out_specs=specs), params, batch
        )
        if row not in ONE_OF_A_KIND:
            return
        got = sharded_step(row, "batch", mesh(), params, batch)
    check(got, single_device(row, np.float64, masked=False), np.float64)


# The rooms below the formulas, alike for all losses ----


@pytest.mark.slow
@one_of_a_kind
def test_shard_map_without_check_vma(row):
    """Without this check, the results of every device must be compared."""
    with precision(np.float64):
        params, batch = make_problem(row, np.float64)
        results, own = sharded_step(row, "batch", mesh(), params, batch, check_vma=False)
    for device in range(DEVICES):
        on_device = jax.tree.map(lambda x, device=device: x[device], results)
        check((on_device, own), single_device(row, np.float64), np.float64)


@pytest.mark.slow
@one_of_a_kind
def test_jit_over_sharded_arrays(row):
    """The single-device loss of a global array needs no axis name."""
    with precision(np.float64):
        params, batch = make_problem(row, np.float64)
        params = jax.device_put(params, NamedSharding(mesh(), P()))
        batch = jax.device_put(batch, NamedSharding(mesh(), P("batch")))
        run = jax.jit(partial(step, row, None), compiler_options=QUICK)
        got = jax.tree.map(np.asarray, run(params, batch))
    check(got, single_device(row, np.float64), np.float64)


@pytest.mark.slow
@one_of_a_kind
def test_two_axis_names(row):
    axes = ("host", "chip")
    with precision(np.float64):
        params, batch = make_problem(row, np.float64)
        got = sharded_step(row, axes, mesh((2, 2), axes), params, batch)
    check(got, single_device(row, np.float64), np.float64)


@every_loss
def test_nothing_counts_anywhere(row):
    with precision(np.float64):
        params, batch = make_problem(row, np.float64)
        batch["where"] = np.zeros_like(batch["where"])
        for leaf in jax.tree.leaves(pmapped(row)(params, per_device(batch))):
            assert not np.asarray(leaf).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_discriminability(dtype):
    rng = np.random.default_rng(31)
    n = DEVICES * ROWS
    features = rng.normal(0.4, 1.0, (n, 5)).astype(dtype)
    labels = rng.integers(-1, 3, n)
    where = np.arange(n) % 7 < np.arange(n) // ROWS + 1

    def run(x, y, w, axis_name: Any = "batch"):
        return jnp.stack(jaxloss.discriminability(x, y, where=w, axis_name=axis_name))[None]

    with precision(dtype):
        arrays = (jnp.asarray(features), jnp.asarray(labels, np.int32), jnp.asarray(where))
        expected = np.asarray(jax.jit(partial(run, axis_name=None))(*arrays))
        checked, rows = dtype == np.float64, P("batch")
        spread = jax.shard_map(run, mesh=mesh(), in_specs=rows, out_specs=rows, check_vma=checked)
        results = [jax.pmap(run, "batch")(*per_device(arrays))[:, 0], jax.jit(spread)(*arrays)]
    assert np.all(expected > 0)
    for result in results:
        tolerance = 1e-9 if dtype == np.float64 else 2e-6
        np.testing.assert_allclose(result, np.tile(expected, (DEVICES, 1)), rtol=tolerance)
