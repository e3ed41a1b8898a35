"""What tests of several files share: rows of the loss table as checked losses, and programs."""

import contextlib
import inspect
from collections.abc import Sequence
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any

import chex
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxloss.testing.checked_loss import QUICK, Batch, CheckedLoss, magnitude, x64
from tests.jaxloss.loss_table import FunctionRow, LossRow, sample_margins, soft

__all__ = ["QUICK", "Batch", "enable_x64", "magnitude"]

enable_x64 = x64


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


# A row as a checked loss ----


def checked(row: LossRow, dtype: Any = np.float64) -> CheckedLoss:
    """Its programs are compiled once for all tests of a process.

    All reductions of the row are compared in float64 or if they are its own, and else the mean.
    """
    return _checked(row, jnp.dtype(dtype))


@cache
def _checked(row: LossRow, dtype: Any) -> CheckedLoss:
    @wraps(row.function)
    def function(*args, **options):
        return row.function(*args, **{**row.kwargs, **options})

    def make_inputs(rng, n):
        return row.make_inputs(rng, n, np.float64)

    # In PyTorch, it has the gradients of a loss with a stop-gradient.
    reference = row.torch_reference if row.constant else None
    loss = CheckedLoss(function, make_inputs, reference, dtype)
    every = dtype == np.float64 or row.has_own_reduction
    loss.reductions = row.reductions if every else ("mean",)
    return loss


def default(row: LossRow, name: str):
    return row.kwargs.get(name, inspect.signature(row.function).parameters[name].default)


def numbers_of(row: LossRow) -> dict[str, np.ndarray]:
    """The hyperparameters that may be traced: numbers, and margins of classes and of samples."""
    every = {name: default(row, name) for name in inspect.signature(row.function).parameters}
    numbers = {
        name: np.asarray(value, np.float64)
        for name, value in every.items()
        if isinstance(value, float | jax.Array) and np.asarray(value).dtype.kind == "f"
    }
    if "sample_margin" in every and row.adapt is not sample_margins:  # Which has its own.
        numbers["sample_margin"] = np.linspace(-0.2, 0.3, 12)
    if np.all(numbers.get("angular_margin", 1) == 0):  # Where it ends.
        numbers["angular_margin"] = np.asarray(0.3)
    if row.kind == "classifier":  # For cosines only.
        numbers.pop("angular_margin", None)
    if row.adapt is soft:  # Targets have no class whose logit a margin lowers.
        numbers = {name: x for name, x in numbers.items() if "margin" not in name}
    return numbers


def make_batch(row: LossRow, seed: int = 0, n: int = 12, masked: bool = True) -> Batch:
    """Random inputs; with `masked`, some rows are masked, some ignored, and the weights differ."""
    rng = np.random.default_rng(seed)
    batch = Batch(row.make_inputs(rng, n, np.float64), np.ones(n, bool), np.ones(n))
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
    new = dict(zip(differentiable, values, strict=True))
    return tuple(new.get(k, a) for k, a in enumerate(args))


def evaluate(
    row: LossRow,
    batch: Batch,
    dtype: Any = np.float64,
    reductions: tuple[str, ...] = (),
    cotangent: np.ndarray | None = None,
) -> dict[str, Any]:
    """Values and gradients (of the differentiable arguments, then of the sample weights) as NumPy.

    The keys are the reductions, and these with "_grad"; "none_grad" is for the cotangent. Values
    and gradients of weights are float32 or wider, those of an argument have its dtype.
    """
    loss = checked(row, dtype)
    cotangent = cotangent_of(row, batch) if cotangent is None else cotangent
    values, gradients = loss.evaluate(batch, reductions or None, cotangent)
    names = [*(loss.names[k] for k in loss.differentiable), "sample_weights"]
    wide = np.float64 if loss.dtype == np.float64 else np.float32
    results: dict[str, Any] = dict(values)
    for reduction, found in gradients.items():
        results[f"{reduction}_grad"] = tuple(found[name] for name in names)
        assert values[reduction].dtype == found["sample_weights"].dtype == wide
    return results


def reference_values(row: LossRow, batch: Batch, reductions: Sequence[str] = ()) -> dict[str, Any]:
    masks = {"where": batch.where, "sample_weights": batch.sample_weights}
    return {
        reduction: row.reference(*batch.args, **masks, reduction=reduction, **batch.numbers)
        for reduction in reductions or row.reductions
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
    if by_torch is not None:
        chex.assert_trees_all_equal_shapes(got, by_torch)
        assert_close(got, by_torch, by_array)


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    """The tolerance is relative to the largest number of each array."""
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * magnitude(theirs))


def finite(tree: Any) -> bool:
    return all(bool(np.all(np.isfinite(np.asarray(x, np.float64)))) for x in jax.tree.leaves(tree))


# Meshes and programs ----


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
