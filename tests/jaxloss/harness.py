"""Evaluates a row of the loss table: every reduction with gradients, in one compiled function."""

import contextlib
import inspect
import os
from collections.abc import Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import chex
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxloss.testing.checked_loss import Batch
from tests.jaxloss.loss_table import FunctionRow, LossRow

QUICK: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""`compiler_options` of `jax.jit` that compile in two thirds of the time.

For tests of transformations, which compare their results with those of `evaluate`. None where the
code that users get is tested.
"""
if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "0":
    QUICK = None


# The former since JAX 0.8.
x64: Any = jax if hasattr(jax, "enable_x64") else jax.experimental  # pyright: ignore
enable_x64 = x64.enable_x64


@contextlib.contextmanager
def unchecked():
    """Turns off the run-time checks of annotations (see conftest.py)."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


@contextlib.contextmanager
def raises(error: type[Exception], match: str = ""):
    """`pytest.raises` for the library's own errors, of exactly this type, with the checks off.

    The message must match.
    """
    with unchecked(), pytest.raises(error, match=match or None) as caught:
        yield caught
    assert caught.type is error


def over(
    rows: Sequence[FunctionRow], often: Sequence[FunctionRow] | None = None
) -> pytest.MarkDecorator:
    """One test for each row. With `often`, `make test` runs these rows, and `make long` all."""
    rarely = [row for row in rows if often is not None and row not in often]
    return pytest.mark.parametrize(
        "row",
        [
            pytest.param(row, id=row.name, marks=pytest.mark.long if row in rarely else [])
            for row in rows
        ],
    )


def default(row: LossRow, name: str):
    return row.kwargs.get(name, inspect.signature(row.function).parameters[name].default)


def numbers_of(row: LossRow) -> dict[str, np.ndarray]:
    """The hyperparameters that may be traced: numbers, and margins of classes and of samples."""
    parameters = inspect.signature(row.function).parameters
    every = {name: default(row, name) for name in parameters}
    numbers = {
        name: np.asarray(value, np.float64)
        for name, value in every.items()
        if isinstance(value, float | jax.Array) and np.asarray(value).dtype.kind == "f"
    }
    if "sample_margin" in parameters and "sample_margins" not in row.name:  # Which has its own.
        numbers["sample_margin"] = np.linspace(-0.2, 0.3, 12)
    if np.all(numbers.get("angular_margin", 1) == 0):  # Where it ends.
        numbers["angular_margin"] = np.asarray(0.3)
    if row.kind == "classifier":  # For cosines only.
        numbers.pop("angular_margin", None)
    return numbers


def make_batch(row: LossRow, seed: int = 0, n: int = 12, masked: bool = True) -> Batch:
    """Random inputs; with `masked`, some rows are masked, some ignored, and the weights differ."""
    rng = np.random.default_rng(seed)
    args = row.make_inputs(rng, n, np.float64)
    batch = Batch(args, np.ones(n, bool), np.ones(n))
    if not masked:
        return batch
    batch = batch.with_mask(rng.choice(n, max(1, n // 5), replace=False))
    batch = batch.with_arg(1, rng.choice(n, max(1, n // 6), replace=False), -1)
    return batch._replace(sample_weights=rng.uniform(0.2, 2.0, n))


def cotangent_of(row: LossRow, batch: Batch) -> np.ndarray:
    """A cotangent of the unreduced losses."""
    number = batch.args[0].shape[1] if row.terms == "classes" else batch.size
    return np.random.default_rng(number).normal(size=number)


def precision(dtype: Any) -> contextlib.AbstractContextManager:
    """The context in which arrays of this dtype exist."""
    return enable_x64(True) if jnp.dtype(dtype) == np.float64 else contextlib.nullcontext()


def cast(args: Sequence[np.ndarray], differentiable: Sequence[int], dtype: Any) -> tuple:
    """The arguments as JAX arrays: floats in `dtype`, integers in int64 beside float64."""
    integer = np.int64 if jnp.dtype(dtype) == np.float64 else np.int32
    # `jnp.asarray` compiles a program for each shape.
    return tuple(
        jax.device_put(np.asarray(a).astype(dtype if k in differentiable else integer))
        for k, a in enumerate(args)
    )


def rounded(args: Sequence[np.ndarray], differentiable: Sequence[int], dtype: Any) -> tuple:
    """The arguments rounded to `dtype`, in float64."""
    return tuple(
        a.astype(jnp.dtype(dtype)).astype(np.float64) if k in differentiable else a
        for k, a in enumerate(args)
    )


def merge(args: tuple, differentiable: Sequence[int], values: Sequence) -> tuple:
    merged = list(args)
    for k, value in zip(differentiable, values, strict=True):
        merged[k] = value
    return tuple(merged)


@cache
def evaluator(row: LossRow, reductions: tuple[str, ...]):
    """The jitted `(args, where, sample_weights, cotangent)` to the results of `evaluate`."""

    def run(args, where, sample_weights, cotangent):
        def loss(leaves, reduction):
            *values, weights = leaves
            return row.function(
                *merge(args, row.differentiable, values),
                where=where,
                sample_weights=weights,
                reduction=reduction,
                **row.kwargs,
            )

        leaves = (*(args[k] for k in row.differentiable), sample_weights)
        results = {}
        for reduction in reductions:
            value, pull_back = jax.vjp(partial(loss, reduction=reduction), leaves)
            seed = cotangent if reduction == "none" else jnp.ones_like(value)
            results[reduction], (results[f"{reduction}_grad"],) = value, pull_back(seed)
        return results

    return jax.jit(run)


def evaluate(
    row: LossRow,
    batch: Batch,
    dtype: Any = np.float64,
    reductions: tuple[str, ...] = (),
    cotangent: np.ndarray | None = None,
) -> dict[str, Any]:
    """Values and gradients (of the differentiable arguments, then of the sample weights) as NumPy.

    The keys are the reductions, and these with "_grad"; "none_grad" is for the cotangent. By
    default, they are all of the row in float64 or if they are its own, and else the mean. Values
    and gradients of weights are float32 or wider, those of an argument have its dtype.
    """
    if not reductions:
        every = jnp.dtype(dtype) == np.float64 or row.has_own_reduction
        reductions = row.reductions if every else ("mean",)
    wide = np.float64 if jnp.dtype(dtype) == np.float64 else np.float32
    cotangent = cotangent_of(row, batch) if cotangent is None else cotangent
    with precision(dtype):
        results = evaluator(row, reductions)(
            cast(batch.args, row.differentiable, dtype),
            *jax.device_put(
                (
                    batch.where,
                    batch.sample_weights.astype(wide),
                    cotangent.astype(wide),
                )
            ),
        )
        results = jax.tree.map(np.asarray, results)
    for reduction in reductions:
        assert results[reduction].dtype == wide
        *grads, of_weights = results[f"{reduction}_grad"]
        assert of_weights.dtype == wide
        assert all(gradient.dtype == jnp.dtype(dtype) for gradient in grads)
    return results


def reference_values(row: LossRow, batch: Batch) -> dict[str, Any]:
    return {
        reduction: row.reference(
            *batch.args, where=batch.where, sample_weights=batch.sample_weights, reduction=reduction
        )
        for reduction in row.reductions
    }


def torch_values(
    row: LossRow, batch: Batch, reductions: tuple[str, ...] = ()
) -> dict[str, Any] | None:
    """The results of `evaluate`, computed by PyTorch; None if it is not installed."""
    if not find_spec("torch"):
        return None
    from tests.jaxloss import torch_references

    return torch_references.evaluate(
        row.torch_reference,
        batch.args,
        row.differentiable,
        reductions=reductions or row.reductions,
        where=batch.where,
        sample_weights=batch.sample_weights,
        cotangent=cotangent_of(row, batch),
    )


def widen(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float64), tree)


def check_against_references(
    row: LossRow,
    batch: Batch,
    dtype: Any,
    values: tuple[float, float],
    by_array: float,
    smooth: bool = True,
) -> None:
    """With relative and absolute tolerances of the values.

    What PyTorch computes may differ by a part of the largest number of each array, because rounding
    errors of a gradient come from terms that are larger than their sum.
    """
    got, expected = widen(evaluate(row, batch, dtype)), reference_values(row, batch)
    reductions = tuple(name for name in row.reductions if name in got)
    for reduction in reductions:
        np.testing.assert_allclose(got[reduction], expected[reduction], *values)
    by_torch = torch_values(row, batch, reductions)
    if by_torch is None and smooth and jnp.dtype(dtype) == np.float64:
        check_slope(row, batch, got["mean_grad"])
    if by_torch is not None:
        chex.assert_trees_all_equal_shapes(got, by_torch)
        assert_close(got, by_torch, by_array)


def check_slope(row: LossRow, batch: Batch, gradients: Any) -> None:
    """Where there is no PyTorch: the slope of the mean along a direction, by the slow reference."""
    rng, step = np.random.default_rng(40), 1e-6
    directions = {k: rng.normal(size=batch.args[k].shape) for k in row.differentiable}
    directions = {k: 0 * d if k in row.constant else d for k, d in directions.items()}

    def value(sign: int) -> Any:
        args = [*batch.args]
        for k, direction in directions.items():
            args[k] = args[k] + sign * step * direction
        masks = {"where": batch.where, "sample_weights": batch.sample_weights}
        return row.reference(*args, **masks, reduction="mean")

    pairs = zip(row.differentiable, gradients, strict=False)
    slope = sum(float(np.sum(gradient * directions[k])) for k, gradient in pairs)
    expected = (value(1) - value(-1)) / (2 * step)
    np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-6)


def magnitude(tree: Any) -> float:
    return max(float(np.max(np.abs(x), initial=0.0)) for x in jax.tree.leaves(tree))


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    """The tolerance is relative to the largest number of each array."""
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * magnitude(theirs))


def finite(tree: Any) -> bool:
    return all(bool(np.all(np.isfinite(np.asarray(x, np.float64)))) for x in jax.tree.leaves(tree))


P = PartitionSpec


def mesh(
    shape: tuple[int, ...] = (4,),
    names: tuple[str, ...] = ("batch",),
    kind: AxisType = AxisType.Auto,
) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def over_mesh(
    function: Any,
    in_specs: Any,
    out_specs: Any,
    shape: tuple[int, ...] = (4,),
    names: tuple[str, ...] = ("batch",),
    check_vma: bool = True,
) -> Any:
    """`jax.shard_map` over a mesh of this shape."""
    specs: Any = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}
    return jax.shard_map(function, mesh=mesh(shape, names), **specs)


def equations(function, *args):
    """All equations of the jaxpr of a function, and of its inner jaxprs."""

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            yield equation
            for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(value, "jaxpr", value)  # Some are closed.
                if hasattr(inner, "eqns"):
                    yield from visit(inner)

    return list(visit(jax.make_jaxpr(function)(*args).jaxpr))


def array_shapes(function, *args):
    """The shapes of all arrays in the jaxpr of a function."""
    return {tuple(v.aval.shape) for e in equations(function, *args) for v in e.outvars}


def compiled(function, *specs: tuple[tuple[int, ...], Any]) -> tuple[str, int]:
    """The program for arguments of these shapes and dtypes, and the bytes of its temporaries."""
    shapes = [jax.ShapeDtypeStruct(*spec) for spec in specs]
    program = jax.jit(function).lower(*shapes).compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert text is not None
    assert memory is not None
    return text, memory.temp_size_in_bytes
