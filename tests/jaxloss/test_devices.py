"""Every loss over four devices equals the same loss on one, in value and gradient."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import jaxloss
from jaxloss import sharded_loss
from tests.jaxloss.harness import (
    QUICK,
    Batch,
    P,
    assert_close,
    cast,
    evaluate,
    magnitude,
    make_batch,
    merge,
    mesh,
    numbers_of,
    over,
    over_mesh,
    precision,
)
from tests.jaxloss.loss_table import (
    LOSSES,
    ONE_OF_A_KIND,
    TILES_OF_A_KIND,
    VARIANTS,
    LossRow,
)
from tests.tolerances import FLOAT32, FLOAT64

DEVICES = 4

# Other losses and variants exchange the same numbers as one of these, or none. A loss in tiles
# exchanges all that it does without them.
EXCHANGES = (
    *ONE_OF_A_KIND,
    *(
        row
        for row in VARIANTS
        if row.name
        in (
            *("nca_in_tiles", "nca_references_in_tiles", "prototypical_in_tiles"),
            *("supervised_contrastive_multi_hot_negatives_in_tiles", "info_nce_in_tiles"),
            *("multi_similarity_mined_in_tiles", "sigmoid_contrastive_in_tiles"),
            *("triplet_in_tiles", "triplet_references_in_tiles", "triplet_all_in_blocks"),
        )
    ),
)
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
# These reduce in ways of their own, or as all others do.
EVERY_REDUCTION = {*(row.name for row in ONE_OF_A_KIND), "triplet", "two_way", "proxy_anchor"}


def others(rows, than):
    return tuple(row for row in rows if row not in than)


@pytest.fixture(autouse=True)
def four_devices():
    assert jax.device_count() == DEVICES


def uneven(rows: int) -> np.ndarray:
    """A mask with all rows of a device, one row, no row, and most rows."""
    where = np.zeros((DEVICES, rows), bool)
    where[0], where[1, -2], where[3, 1:] = True, True, True
    return where.reshape(-1)


@cache
def make_problem(row: LossRow, masked: bool = True) -> Batch:
    """The rows of all devices; of a loss in tiles, each device has several."""
    n = DEVICES * (6 if row.has_tiles else 3)
    batch = make_batch(row, seed=30, n=n, masked=False)
    if not masked:
        return batch
    weights = np.random.default_rng(31).uniform(0.2, 2.0, n)
    batch = batch.with_arg(1, [1, n - 1] if row.has_tiles else [n - 1], -1)
    return batch._replace(where=uneven(n // DEVICES), sample_weights=weights)


def reductions_of(row: LossRow) -> tuple[str, ...]:
    return row.reductions if row.name in EVERY_REDUCTION else ("mean",)


def step(
    row: LossRow,
    axis_name: Any,
    shared: Any,
    batch: Any,
    own: Any = lambda rows: rows,
) -> Any:
    """((mean, sum), gradients of both together), and the losses of this device's rows.

    Losses per class are the same on every device. They follow the sum.

    Args:
      row: A row of the loss table.
      axis_name: The axis of the devices.
      shared: The differentiated arguments and the weights of the samples. Their gradients are
        averaged over the devices.
      batch: Labels and a mask of the rows of this device.
      own: Takes the rows of this device.
    """

    def loss(shared, reduction):
        scored, *rest, weights = shared
        args = merge((None, batch["labels"], *rest), row.differentiable, (own(scored), *rest))
        masks = (
            {"where": batch["where"], "sample_weights": own(weights)} if "where" in batch else {}
        )
        return row.function(*args, reduction=reduction, axis_name=axis_name, **masks, **row.kwargs)

    def total(shared):
        values = [loss(shared, name) for name in ("mean", "sum") if name in reductions_of(row)]
        # One backward pass for both. A wrong factor in either changes the gradient.
        return sum(f * value for f, value in zip((1.0, 0.3), values, strict=False)), values

    gradients, values = jax.grad(total, has_aux=True)(shared)
    if axis_name is not None:
        gradients = jax.lax.pmean(gradients, axis_name)
    if "none" not in reductions_of(row):
        return (values, gradients), ()
    terms = loss(shared, "none")
    if row.terms == "classes":
        return ([*values, terms], gradients), ()
    return (values, gradients), terms


def arguments(row: LossRow, batch: Batch, dtype: Any, masked: bool = True) -> tuple[Any, Any]:
    """The arguments of `step`."""
    args = cast(batch.args, row.differentiable, dtype)
    shared = (*(args[k] for k in row.differentiable), jnp.asarray(batch.sample_weights, dtype))
    rows = {"labels": args[1]}
    return shared, rows | ({"where": jnp.asarray(batch.where)} if masked else {})


def check(
    row: LossRow, got: Any, batch: Batch, dtype: Any = np.float64, masked: bool = True
) -> None:
    """Against the results of one device in float64."""
    expected = evaluate(row, batch, np.float64)
    gradients = expected["mean_grad"]
    assert magnitude(gradients[0]) > 1e-3
    if "sum" in reductions_of(row):
        gradients = jax.tree.map(lambda a, b: a + 0.3 * b, gradients, expected["sum_grad"])
    values = [expected[name] for name in ("mean", "sum") if name in reductions_of(row)]
    terms = expected["none"] if "none" in reductions_of(row) else ()
    if row.terms == "classes" and "none" in reductions_of(row):
        values, terms = [*values, terms], ()
    for leaf in jax.tree.leaves(got):
        assert leaf.dtype == dtype
    (own_values, own_gradients), own_terms = got
    tolerance = FLOAT64 if dtype == np.float64 else FLOAT32
    assert_close((own_values, own_terms), (values, terms), tolerance)
    if not masked:  # No weights were given.
        gradients, own_gradients = gradients[:-1], own_gradients[:-1]
    assert_close(own_gradients, gradients, tolerance)


# Ways to spread the batch: to the results of every device that has its own, and the losses of all
# rows. ----


def rows_of_this_device(axes: Any) -> Any:
    def own(rows):
        size = len(rows) // DEVICES
        return jax.lax.dynamic_slice_in_dim(rows, jax.lax.axis_index(axes) * size, size)

    return own


@cache
def pmapped(row: LossRow) -> Any:
    run = partial(step, row, "batch", own=rows_of_this_device("batch"))
    return jax.pmap(run, axis_name="batch", in_axes=(None, 0))


def per_device(batch: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)


def of_devices(results: Any, own: Any) -> Iterator[Any]:
    own = jax.tree.map(lambda x: x.reshape(-1), own)
    for at in range(DEVICES):
        yield jax.tree.map(lambda x, at=at: x[at], results), own


def by_pmap(row: LossRow, shared: Any, batch: Any) -> Iterator[Any]:
    return of_devices(*pmapped(row)(shared, per_device(batch)))


def by_shard_map(
    row: LossRow, shared: Any, batch: Any, *, shape: Any = (4,), check_vma: bool = True
) -> Iterator[Any]:
    axes = ("host", "chip")[-len(shape) :]
    specs = (P(), P(axes))

    def run(shared, batch):
        results, own = step(row, axes, shared, batch, rows_of_this_device(axes))
        return results if check_vma else jax.tree.map(lambda x: x[None], results), own

    # Without the checks, the results of every device must be compared.
    sharded = over_mesh(run, specs, specs if check_vma else P(axes), shape, axes, check_vma)
    results = jax.jit(sharded, compiler_options=QUICK)(shared, batch)
    return iter([results]) if check_vma else of_devices(*results)


def by_jit(
    row: LossRow, shared: Any, batch: Any, *, kind: AxisType, shape: Any = (4,)
) -> Iterator[Any]:
    """Sharded global arrays, without an axis name."""
    shared, batch = placed(shared, batch, mesh(shape, ("host", "chip")[-len(shape) :], kind))
    results = jax.jit(partial(step, row, None), compiler_options=QUICK)(shared, batch)
    if kind == AxisType.Explicit:
        check_shardings(results, shared)
    yield results


def placed(shared: Any, batch: Any, devices: Any) -> tuple[Any, Any]:
    """Rows are spread, and other arrays copied."""
    rows, copies = (NamedSharding(devices, P(*axes)) for axes in ((devices.axis_names,), ()))
    scored, *rest, weights = shared
    return (
        (
            jax.device_put(scored, rows),
            *jax.device_put(rest, copies),
            jax.device_put(weights, rows),
        ),
        jax.device_put(batch, rows),
    )


def check_shardings(results: Any, shared: Any) -> None:
    """Gradients are spread like their arguments, and losses of rows like the rows."""

    def spec(array):
        return (*array.sharding.spec, *(None,) * (array.ndim - len(array.sharding.spec)))

    (values, gradients), terms = results
    for leaf in jax.tree.leaves(values):
        assert leaf.sharding.is_fully_replicated
    assert [*map(spec, gradients)] == [*map(spec, shared)]
    for leaf in jax.tree.leaves(terms):
        assert leaf.sharding.spec[0] == shared[0].sharding.spec[0]


def by_sharded_loss(row: LossRow, shared: Any, batch: Any) -> Iterator[Any]:
    divided = sharded_loss(row.function, mesh(), "batch")
    row_of_mesh = replace(row, function=lambda *args, axis_name, **more: divided(*args, **more))
    shared, batch = placed(shared, batch, mesh())
    yield jax.jit(partial(step, row_of_mesh, None), compiler_options=QUICK)(shared, batch)


on_explicit_mesh = partial(by_jit, kind=AxisType.Explicit)
OTHER_ARGUMENTS = tuple(
    row for row in LOSSES if row.name in ("proxy_anchor", "two_way", "triplet", "class_wise")
)
WITHOUT_LABELS = tuple(row for row in VARIANTS if row.name.endswith(("of_one_batch", "koleo")))
SOME = tuple(row for row in ONE_OF_A_KIND if row.name == "nca")
IN_PMAP = tuple(row for row in ONE_OF_A_KIND if row.name in ("softmax", "nca", "class_wise"))
TILES = tuple(
    row
    for row in EXCHANGES
    if row.name in ("nca_in_tiles", "info_nce_in_tiles", "triplet_all_in_blocks")
)
FURTHER = tuple(
    row
    for row in WITH_FURTHER_ARRAYS
    if row.name in ("nca_references", "spectral_sum_of_a_basis", "margin_softmax_sample_margins")
)
A_FEW = tuple(row for row in ONE_OF_A_KIND if row.name in ("nca", "prototype", "class_wise"))
WITH_PROTOTYPES = tuple(row for row in LOSSES if row.name in ("prototypical", "prototype"))
WAYS = {
    "pmap": (by_pmap, ONE_OF_A_KIND, IN_PMAP),
    "shard_map": (by_shard_map, EXCHANGES, ONE_OF_A_KIND + TILES),
    "shard_map without check_vma": (partial(by_shard_map, check_vma=False), A_FEW, SOME),
    "shard_map over two axes": (partial(by_shard_map, shape=(2, 2)), A_FEW, SOME),
    "Auto mesh": (partial(by_jit, kind=AxisType.Auto), A_FEW, SOME),
    "Explicit mesh": (
        on_explicit_mesh,
        (*LOSSES, *FURTHER, *WITHOUT_LABELS),
        (*SOME, *OTHER_ARGUMENTS, *FURTHER, *WITH_PROTOTYPES, *WITHOUT_LABELS),
    ),
    "Explicit mesh of two axes": (partial(on_explicit_mesh, shape=(2, 2)), A_FEW, SOME),
    "sharded_loss": (by_sharded_loss, A_FEW, SOME),
}
"""Each way, the losses that it is tested with, and those that `make test` runs; `make long` runs
the others. They exchange different numbers, or are one of each kind where the way is the same for
all.
"""
QUICK_WAYS = ("Explicit mesh",)


def ways_and_rows() -> Iterator[Any]:
    for name, (way, rows, often) in WAYS.items():
        for row in rows:
            marks = [] if name in QUICK_WAYS and row in LOSSES else [pytest.mark.slow]
            marks += [] if row in often else [pytest.mark.long]
            yield pytest.param(way, row, id=f"{name}-{row.name}", marks=marks)


@pytest.mark.parametrize(("way", "row"), ways_and_rows())
def test_value_and_gradients(way, row):
    batch = make_problem(row)
    with precision(np.float64):
        for result in way(row, *arguments(row, batch, np.float64)):
            check(row, jax.tree.map(np.asarray, result), batch)


@pytest.mark.slow
@over(
    tuple(row for row in LOSSES + TILES_OF_A_KIND + WITHOUT_LABELS if numbers_of(row))[::2],
    often=tuple(row for row in LOSSES if row.name in ("margin_softmax", "two_way")),
)
def test_gradients_of_hyperparameters(row):
    batch, numbers = make_problem(row), numbers_of(row)
    numbers.pop("sample_margin", None)  # No parameter of all devices.

    def gradients(numbers, shared, batch, axis_name, own):
        scored, *rest, weights = shared
        args = merge((None, batch["labels"], *rest), row.differentiable, (own(scored), *rest))
        masks = {"where": batch["where"], "sample_weights": own(weights)}

        def mean(numbers):
            return row.function(*args, axis_name=axis_name, **masks, **{**row.kwargs, **numbers})

        got = jax.grad(mean)(numbers)
        return got if axis_name is None else jax.lax.pmean(got, axis_name)

    def on_devices(numbers, shared, batch):
        return gradients(numbers, shared, batch, "chip", rows_of_this_device("chip"))

    spread = over_mesh(on_devices, (P(), P(), P("chip")), P(), names=("chip",))
    with precision(np.float64):
        arrays = arguments(row, batch, np.float64)
        alone = partial(gradients, axis_name=None, own=lambda rows: rows)
        expected, got = (
            jax.tree.map(np.asarray, jax.jit(run, compiler_options=QUICK)(numbers, *arrays))
            for run in (alone, spread)
        )
    for name in numbers:
        np.testing.assert_allclose(
            got[name], expected[name], rtol=FLOAT64, atol=FLOAT64, err_msg=name
        )


@pytest.mark.long
@over(tuple(row for row in EXCHANGES if row.name in ("nca_in_tiles", "prototypical", "direct_sum")))
def test_pmap_in_float32(row):
    batch = make_problem(row)
    args = tuple(
        a.astype(np.float32).astype(np.float64) if k in row.differentiable else a
        for k, a in enumerate(batch.args)
    )
    batch = batch._replace(args=args, sample_weights=np.float32(batch.sample_weights))
    for result in by_pmap(row, *arguments(row, batch, np.float32)):
        check(row, jax.tree.map(np.asarray, result), batch, np.float32)


@pytest.mark.slow
@over(SOME)
def test_without_masks(row):
    """Without masks and weights, `check_vma` sees constants in their place."""
    batch = make_problem(row, masked=False)
    with precision(np.float64):
        (result,) = by_shard_map(row, *arguments(row, batch, np.float64, masked=False))
        check(row, jax.tree.map(np.asarray, result), batch, masked=False)


@pytest.mark.slow
@over(others(LOSSES, SOME), often=others(ONE_OF_A_KIND, SOME))
@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.long)])
def test_check_vma_accepts(row, masked):
    specs = P(), P("chip")
    run = partial(step, row, "chip", own=rows_of_this_device("chip"))
    spread = over_mesh(run, specs, specs, names=("chip",))
    with precision(np.float64):
        batch = make_problem(row, masked=masked)
        jax.eval_shape(spread, *arguments(row, batch, np.float64, masked=masked))


@pytest.mark.long
@over(others(VARIANTS, FURTHER + WITHOUT_LABELS))
def test_explicit_mesh_accepts(row):
    devices = mesh(kind=AxisType.Explicit)
    with precision(np.float64):
        shared, batch = placed(*arguments(row, make_problem(row), np.float64), devices)
        results = jax.eval_shape(partial(step, row, None), shared, batch)
    check_shardings(results, shared)


@pytest.mark.slow
@over(ONE_OF_A_KIND + WITHOUT_LABELS, often=ONE_OF_A_KIND)
def test_nothing_counts_anywhere(row):
    """With no row, and with rows that all have the weight 0."""
    batch = make_problem(row)
    no_row = batch._replace(where=np.zeros_like(batch.where))
    no_weight = batch._replace(sample_weights=np.zeros_like(batch.sample_weights))
    with precision(np.float64):
        for nothing in (no_row, no_weight):
            shared, rows = arguments(row, nothing, np.float64)
            results = jax.tree.map(np.asarray, pmapped(row)(shared, per_device(rows)))
            (values, gradients), terms = results
            assert magnitude((values, terms)) == 0
            assert magnitude(gradients if nothing is no_row else gradients[:-1]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("pmap", np.float32),
        ("check_vma", np.float64),
        pytest.param("pmap", np.float64, marks=pytest.mark.long),
        pytest.param("check_vma", np.float32, marks=pytest.mark.long),
        pytest.param("without check_vma", np.float32, marks=pytest.mark.long),
        pytest.param("without check_vma", np.float64, marks=pytest.mark.long),
    ],
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
            results = jax.pmap(run, "batch", in_axes=(None, 0, 0, 0))(given, *per_device(rows))
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
