"""Every loss over four devices equals the same loss on one, in value and gradient."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import jaxloss
from jaxloss import sharded_loss
from jaxloss.testing import RULES
from jaxloss.testing.checked_loss import Result
from tests.jaxloss.harness import (
    QUICK,
    Batch,
    P,
    assert_close,
    checked,
    magnitude,
    make_batch,
    mesh,
    over,
    over_mesh,
    precision,
)
from tests.jaxloss.loss_table import (
    CASES,
    EVERY_LOSS,
    LOSSES,
    PLAIN,
    TYPICAL,
    VARIANTS,
    WITHOUT_LABELS,
    LossRow,
)
from tests.tolerances import FLOAT32, FLOAT64

DEVICES = 4


@pytest.fixture(autouse=True)
def four_devices():
    assert jax.device_count() == DEVICES


def once_per_loss() -> tuple[LossRow, ...]:
    """Each loss in tiles, where it exchanges all that it does without them, or as it is.

    Of the losses that compare no rows, those of a kind.
    """
    tiles = {row.function.__name__: row for row in CASES if row.has_tiles and not row.rare}
    rows = [row for row in EVERY_LOSS if row.kind == "features" or row in EXAMPLES]
    return tuple(tiles.get(row.function.__name__, row) for row in rows)


def uneven(rows: int) -> np.ndarray:
    """A mask with all rows of a device, one row, no row, and most rows."""
    where = np.zeros((DEVICES, rows), bool)
    where[0], where[1, -2], where[3, 1:] = True, True, True
    return where.reshape(-1)


def make_problem(row: LossRow) -> Batch:
    """The rows of all devices; of a loss in tiles, each device has several."""
    n = DEVICES * (6 if row.has_tiles else 3)
    batch = make_batch(row, seed=30, n=n, masked=False)
    batch = batch.with_arg(1, [1, n - 1] if row.has_tiles else [n - 1], -1)
    weights = np.random.default_rng(31).uniform(0.2, 2.0, n)
    return batch._replace(where=uneven(n // DEVICES), sample_weights=weights)


def reductions_of(row: LossRow) -> tuple[str, ...]:
    """Most losses reduce as all others do."""
    return row.reductions if row.one_of_a_kind or row.has_own_reduction else ("mean",)


def check(row: LossRow, got: Result, batch: Batch) -> None:
    """Against the results of one device."""
    expected = checked(row).evaluate(batch)
    assert magnitude(expected.gradients["mean"][checked(row).names[0]]) > 1e-3
    for reduction, value in got.values.items():
        assert_close(value, expected.values[reduction], FLOAT64)
    for reduction, gradients in got.gradients.items():
        assert_close(gradients, expected.gradients[reduction], FLOAT64)


# Ways to spread the batch: to the results of every device that has its own. ----


def by_shard_map(row: LossRow, batch: Batch, **options: Any) -> list[Result]:
    return checked(row).on_devices(batch, reductions=reductions_of(row), **options)


def around_a_ring(row: LossRow, batch: Batch) -> list[Result]:
    """Of two axes. References are not gathered, but passed on from device to device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxloss.pairs.visits.GATHERED_BYTES", 0)
        return by_shard_map(replace(row), batch, shape=(2, 2))  # Traced anew.


def by_pmap(row: LossRow, batch: Batch) -> list[Result]:
    loss = checked(row)
    run = partial(loss.on_a_device, axes="batch", reductions=reductions_of(row))
    per_device = [x.reshape(DEVICES, -1, *x.shape[1:]) for x in (batch.args[1], batch.where)]
    args: Any = (batch.args[0], per_device[0], *batch.args[2:])
    axes: Any = Batch(tuple(0 if k == 1 else None for k in range(len(args))), 0, None, {})
    spread = batch._replace(args=args, where=per_device[1])
    results = jax.pmap(run, "batch", in_axes=(axes,))(spread)
    values, gradients = jax.tree.map(np.asarray, results)
    if "none" in values and row.terms == "samples":
        values["none"] = np.stack([values["none"].reshape(-1)] * DEVICES)
    return [jax.tree.map(lambda x, k=k: x[k], Result(values, gradients)) for k in range(DEVICES)]


def by_jit(
    row: LossRow, batch: Batch, *, kind: AxisType, shape: Any = (4,), function: Any = None
) -> list[Result]:
    """Sharded global arrays, without an axis name."""
    loss = checked(row if function is None else replace(row, function=function))
    batch = placed(batch, mesh(shape, ("host", "chip")[-len(shape) :], kind))
    run = partial(loss.values_and_gradients, reductions=reductions_of(row))
    results = jax.jit(run, compiler_options=QUICK)(batch)
    if kind == AxisType.Explicit:
        check_shardings(row, results, batch)
    return [jax.tree.map(np.asarray, results)]


def by_sharded_loss(row: LossRow, batch: Batch) -> list[Result]:
    divided = sharded_loss(row.function, mesh(names=("chip",)), "chip")
    return by_jit(row, batch, kind=AxisType.Auto, function=divided)


def placed(batch: Batch, devices: Any) -> Batch:
    """Rows are spread, and other arrays copied."""
    rows, copies = (NamedSharding(devices, P(*axes)) for axes in ((devices.axis_names,), ()))
    args, where, weights, _ = batch
    put = [jax.device_put(x, rows if k < 2 else copies) for k, x in enumerate(args)]
    return Batch(tuple(put), *jax.device_put((where, weights), rows))


def check_shardings(row: LossRow, results: Result, batch: Batch) -> None:
    """Gradients are spread like their arguments, losses of rows like the rows, others copied."""

    def spec(array):
        return (*array.sharding.spec, *(None,) * (array.ndim - len(array.sharding.spec)))

    for reduction, value in results.values.items():
        if reduction == "none" and row.terms == "samples":
            assert value.sharding.spec[0] == batch.args[0].sharding.spec[0]
        else:
            assert value.sharding.is_fully_replicated
    for gradients in results.gradients.values():
        assert {k: spec(x) for k, x in gradients.items()} == {
            k: spec(x) for k, x in checked(row).leaves_of(batch).items()
        }


on_explicit_mesh = partial(by_jit, kind=AxisType.Explicit)
NCA = (PLAIN["nca"],)
EXAMPLES = tuple(row for row in LOSSES if row.one_of_a_kind or row.has_own_reduction)
FURTHER = tuple(row for row in VARIANTS if row.one_of_a_kind and not row.has_tiles)
"""With further arrays, which are spread by their names."""
IN_A_RING = tuple(row for row in CASES if row.kind == "features" and row.has_tiles)
OFTEN_IN_A_RING = ("nca_references_in_tiles", "triplet_references_in_tiles")
WAYS = {
    "pmap": (by_pmap, TYPICAL, NCA),
    "shard_map over two axes": (partial(by_shard_map, shape=(2, 2)), TYPICAL, NCA),
    "Auto mesh": (partial(by_jit, kind=AxisType.Auto), TYPICAL, NCA),
    "Explicit mesh": (on_explicit_mesh, CASES, (*EXAMPLES, *WITHOUT_LABELS, *FURTHER)),
    "Explicit mesh of two axes": (partial(on_explicit_mesh, shape=(2, 2)), TYPICAL, NCA),
    "sharded_loss": (by_sharded_loss, TYPICAL, NCA),
    "ring": (around_a_ring, IN_A_RING, [x for x in IN_A_RING if x.name in OFTEN_IN_A_RING]),
}
"""Each way, the losses that it is tested with, and those that `make test` runs; `make long` runs
the others. The rules of `check_loss` have `jax.shard_map`.
"""


def ways_and_rows() -> Iterator[Any]:
    for name, (way, rows, often) in WAYS.items():
        for row in rows:
            marks = [] if name == "Explicit mesh" and row in LOSSES else [pytest.mark.slow]
            marks += [] if row in often else [pytest.mark.long]
            yield pytest.param(way, row, id=f"{name}-{row.name}", marks=marks)


@pytest.mark.parametrize(("way", "row"), ways_and_rows())
def test_value_and_gradients(way, row):
    batch = make_problem(row)
    with precision(np.float64):
        for result in way(row, batch):
            check(row, result, batch)


OFTEN = {
    "check_vma": once_per_loss(),
    "devices": TYPICAL,
    # By a rule for pairs, and by log-sum-exps over the devices.
    "device_gradients": (PLAIN["nca"], PLAIN["two_way"]),
}
"""The losses of each rule that `make test` runs."""


def rules_and_rows() -> Iterator[Any]:
    for rule in RULES:
        for row in CASES if rule.part == "devices" else ():
            often = row in OFTEN[rule.name]
            marks = pytest.mark.slow if often else pytest.mark.long
            yield pytest.param(rule, row, id=f"{rule.name}-{row.name}", marks=marks)


@pytest.mark.parametrize(("rule", "row"), rules_and_rows())
def test_rule(rule, row):
    """In tiles, each device has several."""
    loss, rng = checked(row), np.random.default_rng(30)
    rule.check(loss, loss.batch(rng, DEVICES * (6 if row.has_tiles else 3)), rng)


@pytest.mark.slow
@over(EVERY_LOSS, often=NCA)
def test_without_masks(row):
    """Without masks and weights, `check_vma` sees constants in their place."""
    batch = make_problem(row)._replace(where=None, sample_weights=None)
    for result in by_shard_map(row, batch):
        check(row, result, batch)


@pytest.mark.slow
@over(EVERY_LOSS, often=TYPICAL)
def test_nothing_counts_anywhere(row):
    """With no row, and with rows that all have the weight 0."""
    batch = make_problem(row)
    zeros = np.zeros_like(batch.sample_weights)
    for nothing in (batch.with_mask(slice(None)), batch._replace(sample_weights=zeros)):
        for values, gradients in checked(row).on_devices(nothing, check_vma=False):
            assert magnitude(values) == 0
            of_weights = [of.pop("sample_weights") for of in gradients.values()]
            assert magnitude(gradients) == 0
            assert nothing.sample_weights is zeros or magnitude(of_weights) == 0


HALF_SPREAD: Any = {
    "soft triplets": partial(jaxloss.triplet_loss, mining="all", soft=True),
    "WARP": jaxloss.warp_loss,
    "RML": jaxloss.robust_multilabel_loss,
}


@pytest.mark.parametrize("name", HALF_SPREAD)
def test_rows_that_all_devices_have(name):
    """Under `check_vma`, labels that all devices have, of rows that differ and of rows that do not.

    The gradient of a row that all devices have is the sum over the devices.
    """
    loss, rng = HALF_SPREAD[name], np.random.default_rng(33)
    rows = jnp.asarray(rng.normal(size=(DEVICES * 3, 4)), jnp.float32)
    labels = jnp.arange(3) % 2 if name == "soft triplets" else jnp.arange(12).reshape(3, 4) % 2
    run = jax.value_and_grad(lambda x, y: loss(x, y, axis_name="batch"))
    whole = jax.jit(jax.value_and_grad(loss))
    everywhere = jnp.concatenate([labels] * DEVICES)
    spread = jax.jit(over_mesh(run, (P("batch"), P()), (P(), P("batch"))))
    close = partial(chex.assert_trees_all_close, rtol=4 * FLOAT32, atol=FLOAT32)
    close(spread(rows, labels), whole(rows, everywhere))
    value, gradient = whole(jnp.concatenate([rows[:3]] * DEVICES), everywhere)
    gradient = gradient.reshape(DEVICES, 3, 4).sum(axis=0)
    close(jax.jit(over_mesh(run, P(), P()))(rows[:3], labels), (value, gradient))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "way", ["pmap", "check_vma", pytest.param("without check_vma", marks=pytest.mark.long)]
)
def test_statistics_of_classes(way, dtype):
    """All devices get exactly the same numbers."""
    rng = np.random.default_rng(31)
    n, classes = DEVICES * 6, 4
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
            jnp.asarray, (means.astype(dtype), features.astype(dtype), labels, uneven(6))
        )
        expected = jax.jit(partial(run, axis_name=None))(given, *rows)
        if way == "pmap":
            spread = (x.reshape(DEVICES, -1, *x.shape[1:]) for x in rows)
            results = jax.pmap(run, "batch", in_axes=(None, 0, 0, 0))(given, *spread)
        else:

            def apart(*args):
                return jax.tree.map(lambda x: x[None], run(*args))

            specs = (P(), *[P("batch")] * 3), P("batch")
            spread = over_mesh(apart, *specs, check_vma=way == "check_vma")
            results = jax.jit(spread)(given, *rows)
        results, expected = jax.tree.map(np.asarray, (results, expected))
    assert np.abs(expected[0] - means).max() > 0.1
    assert np.all(expected[2] > 0)
    tolerance = 1e-12 if dtype == np.float64 else FLOAT32
    for own, whole in zip(results, expected, strict=True):
        np.testing.assert_allclose(own[0], whole, rtol=0, atol=tolerance)
        np.testing.assert_array_equal(own, np.stack([own[0]] * DEVICES))
