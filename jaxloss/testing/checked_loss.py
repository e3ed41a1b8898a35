"""A loss that is checked: its random inputs, and the functions of it that are compiled once.

For `jaxloss.testing`. All arrays outside of the compiled functions are NumPy arrays in float64.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

MakeInputs: TypeAlias = Callable[[np.random.Generator, int], Sequence[Any]]

ROWS = 12
"""The size of the batches: it spreads evenly over 2, 3 and 4 devices."""
REDUCTIONS = ("mean", "sum", "none")
_AXIS = "devices"


class Batch(NamedTuple):
    """The positional arguments of a loss, a mask and weights, in NumPy float64."""

    args: tuple[np.ndarray, ...]
    where: np.ndarray
    sample_weights: np.ndarray

    @property
    def size(self) -> int:
        return len(self.where)

    def with_arg(self, position: int, rows: Any, value: Any) -> Batch:
        """Replaces rows of an argument, or all of it with `slice(None)`."""
        changed = self.args[position].copy()
        changed[rows] = value
        return self._replace(args=(*self.args[:position], changed, *self.args[position + 1 :]))

    def with_args(self, positions: Sequence[int], rows: Any, value: Any) -> Batch:
        batch = self
        for position in positions:
            batch = batch.with_arg(position, rows, value)
        return batch

    def with_mask(self, rows: Any) -> Batch:
        where = self.where.copy()
        where[rows] = False
        return self._replace(where=where)


class Result(NamedTuple):
    values: dict[str, np.ndarray]
    """By reduction."""
    gradients: tuple[np.ndarray, ...]
    """Of all float arguments."""


class Broken(Exception):
    """A rule is broken for this batch."""

    def __init__(self, found: str, batch: Batch):
        super().__init__(found)
        self.found = found
        self.batch = batch


class CheckedLoss:
    """A loss with its inputs, and the functions of it that are compiled once."""

    reductions: tuple[str, ...] = REDUCTIONS
    """Those that it does not refuse."""
    terms: Literal["rows", "classes", "other"] | None = None
    """What the elements of `"none"` are. None if it is refused."""

    def __init__(self, loss: Any, make_inputs: MakeInputs, reference: Any):
        self.loss, self.make_inputs, self.reference = loss, make_inputs, reference
        function = loss
        while isinstance(function, functools.partial):
            function = function.func
        self.name = getattr(function, "__name__", type(function).__name__)
        example = self.batch(np.random.default_rng(0), ROWS).args
        floats = [jnp.issubdtype(a.dtype, jnp.floating) for a in example]
        self.differentiable = tuple(k for k, is_float in enumerate(floats) if is_float)
        second = example[1]
        self.kind = "views" if floats[1] else "targets" if second.ndim > 1 else "labels"
        self.can_ignore = np.issubdtype(second.dtype, np.signedinteger)
        self.row_positions = (0, 1) if self.kind == "views" else (0,)
        """The positions of the arguments with rows of floats."""
        names = [
            p.name
            for p in inspect.signature(loss).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self.names = [names[k] if k < len(names) else f"argument {k}" for k in range(len(example))]
        self._number_gradients = _jit(self._gradients_of_numbers)
        self._evaluate = _jit(self._values_and_gradients)
        self._mean = _jit(self._mean_and_gradients)
        self._mean_of_stack = _jit(
            jax.vmap(functools.partial(self._mean_and_gradients, saved=True))
        )
        self._second = _jit(self._second_derivatives)
        self._spread: dict[bool, Any] = {}

    def batch(self, rng: np.random.Generator, n: int) -> Batch:
        """Random rows, all of which count, with weights of 1."""
        args = [_plain(n, a) for a in self.make_inputs(rng, n)]
        if len(args) < 2 or any(a.shape[:1] != (n,) for a in args[:2]):
            raise ValueError(
                f"`make_inputs(rng, {n})` must return the scored rows and the labels of {n} rows, "
                f"and then further arrays; got shapes {[a.shape for a in args]}"
            )
        if not jnp.issubdtype(args[0].dtype, jnp.floating):
            raise ValueError(f"`make_inputs` must return rows of floats, got {args[0].dtype}")
        wide = [
            a.astype(np.float64) if jnp.issubdtype(a.dtype, jnp.floating) else _narrow(n, a)
            for a in args
        ]
        return Batch(tuple(wide), np.ones(n, bool), np.ones(n))

    def merge(self, args: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        merged = list(args)
        for position, value in zip(self.differentiable, values, strict=True):
            merged[position] = value
        return merged

    def values_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(args[k] for k in self.differentiable)

    # Traced functions ----

    def _values_and_gradients(
        self,
        args: Any,
        where: Any,
        sample_weights: Any,
        factors: Any,
        axis_name: Any = None,
        own_rows: Callable[[Any], Any] = lambda rows: rows,
    ) -> Any:
        """Every reduction, and the gradient of their sum with the given factors.

        The factors are arrays, so that one program has the gradient of every reduction.
        """
        common = {"where": where, "sample_weights": sample_weights}
        common |= {} if axis_name is None else {"axis_name": axis_name}

        def total(values):
            merged = self.merge(args, values)
            for k in self.row_positions:
                merged[k] = own_rows(merged[k])
            results = {
                reduction: self.loss(*merged, reduction=reduction, **common)
                for reduction in self.reductions
            }
            terms = [
                jnp.sum(factors[reduction] * results[reduction].astype(np.float64))
                for reduction in self.reductions
                if reduction in factors
            ]
            return functools.reduce(jnp.add, terms), results

        (_, results), gradients = jax.value_and_grad(total, has_aux=True)(self.values_of(args))
        return results, gradients

    def _mean_and_gradients(self, args: Any, common: Any, saved: bool = False) -> Any:
        def mean(values):
            return self.loss(*self.merge(args, values), **common)

        return jax.value_and_grad(jax.checkpoint(mean) if saved else mean)(self.values_of(args))

    def _second_derivatives(self, args: Any, where: Any, direction: Any) -> Any:
        """The Hessian of the mean times a direction, forward over reverse and reverse twice."""

        def gradient(values):
            return jax.grad(lambda v: self.loss(*self.merge(args, v), where=where))(values)

        def slope(values):
            products = [jnp.sum(g * d) for g, d in zip(gradient(values), direction, strict=True)]
            return functools.reduce(jnp.add, products)

        values = self.values_of(args)
        return jax.jvp(gradient, (values,), (direction,))[1], jax.grad(slope)(values)

    def _gradients_of_numbers(
        self, numbers: Any, args: Any, where: Any, sample_weights: Any, **axis: Any
    ) -> Any:
        """The gradient of the mean by the hyperparameters."""

        def mean(numbers):
            return self.loss(*args, where=where, sample_weights=sample_weights, **axis, **numbers)

        return jax.grad(mean)(numbers)

    def _on_devices(self, mesh: Any, check_vma: bool) -> Any:
        """`_values_and_gradients` of rows that are spread, with the results of every device.

        All rows are a replicated parameter, of which a device takes its own. So the mean of the
        gradients over the devices is the gradient of the rows on one device.
        """

        def run(args, where, sample_weights, factors):
            def own_rows(rows):
                first = lax.axis_index(_AXIS) * len(where)
                return lax.dynamic_slice_in_dim(rows, first, len(where))

            results, gradients = self._values_and_gradients(
                args, where, sample_weights, factors, _AXIS, own_rows
            )
            gradients = lax.pmean(gradients, _AXIS)
            outputs = (results, gradients)
            return outputs if check_vma else jax.tree.map(lambda x: x[None], outputs)

        labels = P() if self.kind == "views" else P(_AXIS)
        arguments = [labels if k == 1 else P() for k in range(len(self.names))]
        outputs: Any = (dict.fromkeys(self.reductions, P()), P())
        if self.terms == "rows":
            outputs[0]["none"] = P(_AXIS)
        return _jit(
            jax.shard_map(
                run,
                mesh=mesh,
                in_specs=(tuple(arguments), P(_AXIS), P(_AXIS), P()),
                out_specs=outputs if check_vma else P(_AXIS),
                check_vma=check_vma,
            )
        )

    @functools.cached_property
    def _numbers_on_devices(self) -> Any:
        def run(*arguments):
            return lax.pmean(self._gradients_of_numbers(*arguments, axis_name=_AXIS), _AXIS)

        rows = {1, *self.row_positions}
        args = tuple(P(_AXIS) if k in rows else P() for k in range(len(self.names)))
        specs = (P(), args, P(_AXIS), P(_AXIS))
        # They are the same on all devices, and `check_vma` is a rule of its own.
        return _jit(
            jax.shard_map(run, mesh=_mesh(), in_specs=specs, out_specs=P(), check_vma=False)
        )

    # Calls with NumPy arrays ----

    def evaluate(self, batch: Batch, **factors: Any) -> Result:
        """Values, and the gradient of the mean, or of the reductions with these factors."""
        with x64(True), _errors(batch):
            results = self._evaluate(*batch, self.factors(batch, factors or {"mean": 1.0}))
            return Result(*jax.tree.map(np.asarray, results))

    def factors(self, batch: Batch, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        shapes = {"rows": (batch.size,), "classes": batch.args[1].shape[1:]}
        shape = shapes.get(self.terms or "", ())
        return {
            reduction: np.broadcast_to(
                np.asarray(given.get(reduction, 0.0), np.float64),
                shape if reduction == "none" else (),
            )
            for reduction in self.reductions
        }

    def mean(self, batch: Batch, args: Any, dtype: Any = np.float64, **common: Any) -> Any:
        """The mean and its gradient, of arguments in another dtype or with fewer rows."""
        cast = [a.astype(dtype) if k in self.differentiable else a for k, a in enumerate(args)]
        with x64(dtype == np.float64), _errors(batch):
            return jax.tree.map(np.asarray, self._mean(tuple(cast), common))

    def mean_of_stack(self, batches: Sequence[Batch]) -> Any:
        args = tuple(np.stack(a) for a in zip(*(b.args for b in batches), strict=True))
        common = {"where": np.stack([b.where for b in batches])}
        with x64(True), _errors(batches[0]):
            return jax.tree.map(np.asarray, self._mean_of_stack(args, common))

    def second_derivatives(self, batch: Batch, direction: Any) -> Any:
        with x64(True), _errors(batch):
            return jax.tree.map(np.asarray, self._second(batch.args, batch.where, tuple(direction)))

    @functools.cached_property
    def numbers(self) -> dict[str, np.float64]:
        """The hyperparameters: keyword-only arguments with a float default that can be traced.

        A loss may choose its formula by a Python number, or refuse an option.
        """
        batch, found = self.batch(np.random.default_rng(0), ROWS), {}
        for p in inspect.signature(self.loss).parameters.values():
            if p.kind is p.KEYWORD_ONLY and type(p.default) is float:
                number = {p.name: np.float64(p.default)}
                with x64(True), suppress(Exception):
                    jax.eval_shape(self._gradients_of_numbers, number, *batch)
                    found |= number
        return found

    def number_gradients(self, batch: Batch, devices: bool = False) -> dict[str, np.ndarray]:
        """The gradient of the mean by the hyperparameters, all at once."""
        if not self.numbers:
            return {}
        run = self._numbers_on_devices if devices else self._number_gradients
        with x64(True), _errors(batch):
            return jax.tree.map(np.asarray, run(self.numbers, *batch))

    def on_devices(self, batch: Batch, check_vma: bool, **factors: Any) -> list[Result]:
        """The results of every device; a single one with `check_vma`, where they are the same."""
        size = num_devices()
        if check_vma not in self._spread:
            self._spread[check_vma] = self._on_devices(_mesh(), check_vma)
        weights = {reduction: np.float64(factor) for reduction, factor in factors.items()}
        with x64(True), _errors(batch):
            results = self._spread[check_vma](*batch, weights)
            values, gradients = jax.tree.map(np.asarray, results)
        if check_vma:
            return [Result(values, gradients)]
        if self.terms == "rows":  # Each device has those of its rows.
            values["none"] = np.broadcast_to(values["none"].reshape(1, -1), (size, batch.size))
        every = [jax.tree.map(lambda x, k=k: x[k], (values, gradients)) for k in range(size)]
        return [Result(*result) for result in every]


# The former since JAX 0.8.
_jax: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
x64 = _jax.enable_x64


def _plain(n: int, array: Any) -> np.ndarray:
    if isinstance(array, np.ma.MaskedArray):
        raise ValueError(f"`make_inputs(rng, {n})` must return plain arrays, got a masked one")
    array = np.asarray(array)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (np.bool_, jnp.number)):
        raise ValueError(f"`make_inputs(rng, {n})` must return numbers, got {array.dtype}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _narrow(n: int, array: np.ndarray) -> np.ndarray:
    """Integers in at most 32 bits, as most of the rules do not need x64."""
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8:
        return array
    narrow = array.astype(f"{array.dtype.kind}4")
    if np.any(narrow != array):
        raise ValueError(
            f"`make_inputs(rng, {n})` must return integers that fit into {narrow.dtype}, got "
            f"{array.min()} to {array.max()}"
        )
    return narrow


def _jit(function: Callable[..., Any]) -> Any:
    # On a CPU, the programs are run a few times, and compile in two thirds of the time.
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=quick if jax.default_backend() == "cpu" else None)


def num_devices() -> int:
    """The most devices over which the batches spread evenly."""
    return max(size for size in (1, 2, 3, 4) if size <= jax.device_count())


def _mesh() -> Any:
    size = num_devices()
    return jax.make_mesh(
        (size,), (_AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:size]
    )


@contextmanager
def _errors(batch: Batch) -> Iterator[None]:
    """Turns an error of the loss into a broken rule."""
    try:
        yield
    except Exception as error:
        raise Broken(f"the loss raised {first_line(error)}", batch) from error


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def close(
    what: str, got: Any, expected: Any, batch: Batch, rtol: float = 1e-10, atol: float = 1e-12
) -> None:
    """Raises if a tree of arrays is not what it must be."""
    import chex

    try:
        chex.assert_trees_all_close(got, expected, rtol=rtol, atol=atol)
    except AssertionError as error:
        for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            if a.shape != b.shape or not np.allclose(a, b, rtol, atol, equal_nan=True):
                found = f"{what} is {text(a)}; expected {text(b)}"
                raise Broken(found, batch) from error
        raise Broken(str(error), batch) from error


def check_finite(what: str, result: Result, batch: Batch) -> None:
    for reduction, value in result.values.items():
        if not np.all(np.isfinite(value)):
            raise Broken(f'{what} the "{reduction}" is {text(value)}', batch)
    for gradient in result.gradients:
        if not np.all(np.isfinite(gradient)):
            raise Broken(f"{what} the value is finite, but the gradient is {text(gradient)}", batch)


def magnitude(tree: Any) -> float:
    return max((float(np.max(np.abs(x), initial=0.0)) for x in jax.tree.leaves(tree)), default=0.0)


def text(array: Any, indent: str = "") -> str:
    return np.array2string(
        np.asarray(array),
        precision=5,
        suppress_small=True,
        threshold=200,
        max_line_width=96,
        separator=", ",
        prefix=indent,
    )
