"""A loss that is checked: its random inputs, and the functions of it that are compiled once.

For `jaxloss.testing`. All arrays outside of the compiled functions are NumPy arrays in float64.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
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
QUICK: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""`compiler_options` of `jax.jit` for CPUs: programs of a few runs compile faster.

None if JAX's own switch asks for the code that users get.
"""
if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "0":
    QUICK = None
FULL: Any = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""The same for programs as users compile them."""
_AXES = ("devices", "cores")


class Batch(NamedTuple):
    """The positional arguments of a loss, a mask and weights, in NumPy float64."""

    args: tuple[Any, ...]
    where: Any
    sample_weights: Any
    numbers: Mapping[str, Any] = {}
    """Hyperparameters that are traced."""

    @property
    def size(self) -> int:
        return len(self.args[0])

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
    """Values by reduction, and their gradients by reduction and by the name of what they are of."""

    values: dict[str, Any]
    gradients: dict[str, Any]


class Broken(Exception):
    """A rule is broken, for this batch."""

    def __init__(self, found: str, batch: Batch | None = None):
        super().__init__(found)
        self.found = found
        self.batch = batch


class CheckedLoss:
    """A loss with its inputs, and the functions of it that are compiled once."""

    common: Sequence[str] = ("where", "sample_weights", "reduction", "axis_name")

    def __init__(self, loss: Any, make_inputs: MakeInputs, reference: Any, dtype: Any = np.float64):
        self.loss, self.make_inputs, self.reference = loss, make_inputs, reference
        self.dtype = dtype
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
        self._evaluate = _jit(self.values_and_gradients, static_argnames="reductions")
        self._of_stack = _jit(
            jax.vmap(functools.partial(self.values_and_gradients, transform=jax.checkpoint))
        )
        # XLA of jaxlib 0.10.2 compiles that of `group_softmax_loss` wrongly with quick options.
        # XLA for CPUs compiles some wrongly without its optimisations, which a variable turns off.
        self._second = _jit(self._second_derivatives, FULL)
        self._spread: dict[Any, Any] = {}

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

    def shape_of(self, reduction: str, batch: Batch) -> Any:
        """What the loss returns, or the error that it raises."""
        try:
            with x64(True):
                return jax.eval_shape(functools.partial(self.call, reduction=reduction), batch)
        except Exception as error:
            return error

    @functools.cached_property
    def terms(self) -> Literal["rows", "classes", "other"] | None:
        """What the elements of `"none"` are. None if it is refused."""
        batch = self.batch(np.random.default_rng(0), ROWS)
        found = self.shape_of("none", batch)
        if isinstance(found, Exception):
            return None
        if found.shape == (ROWS,):
            return "rows"
        of_classes = self.kind == "targets" and found.shape == batch.args[1].shape[1:]
        return "classes" if of_classes else "other"

    @functools.cached_property
    def reductions(self) -> tuple[str, ...]:
        """Those that can be compared."""
        return REDUCTIONS if self.terms in ("rows", "classes") else REDUCTIONS[:2]

    def leaves_of(self, batch: Batch) -> dict[str, Any]:
        """All that is differentiated, by its name."""
        leaves = {self.names[k]: batch.args[k] for k in self.differentiable}
        if batch.sample_weights is not None:
            leaves["sample_weights"] = batch.sample_weights
        return {**leaves, **batch.numbers}

    def with_leaves(self, batch: Batch, leaves: Mapping[str, Any]) -> Batch:
        args = tuple(leaves.get(name, a) for name, a in zip(self.names, batch.args, strict=True))
        numbers = {name: leaves[name] for name in batch.numbers}
        return Batch(args, batch.where, leaves.get("sample_weights"), numbers)

    # Traced functions ----

    def call(self, batch: Batch, **options: Any) -> Any:
        args, where, sample_weights, numbers = batch
        return self.loss(*args, where=where, sample_weights=sample_weights, **numbers, **options)

    def values_and_gradients(
        self,
        batch: Batch,
        cotangent: Any = None,
        *,
        reductions: Sequence[str] = ("mean",),
        own: Callable[[Batch], Batch] = lambda batch: batch,
        transform: Callable[[Any], Any] = lambda loss: loss,
        **options: Any,
    ) -> Result:
        """Values, and gradients by all leaves; that of `"none"` needs a cotangent."""

        def loss(leaves, reduction):
            value = self.call(own(self.with_leaves(batch, leaves)), reduction=reduction, **options)
            if reduction != "none" or cotangent is None:
                return jnp.sum(value), value
            return jnp.sum(value * cotangent.astype(value.dtype)), value

        values, gradients, leaves = {}, {}, self.leaves_of(batch)
        for reduction in reductions:
            of_leaves = transform(functools.partial(loss, reduction=reduction))
            if reduction == "none" and cotangent is None:
                values[reduction] = of_leaves(leaves)[1]
            else:
                found = jax.grad(of_leaves, has_aux=True)(leaves)
                gradients[reduction], values[reduction] = found
        return Result(values, gradients)

    def on_a_device(self, batch: Batch, axes: Any, reductions: Sequence[str]) -> Result:
        """Of rows that are spread: labels and mask are those of a device.

        Rows and weights are a replicated parameter, of which a device takes its own. So the mean of
        the gradients over the devices is the gradient of the rows on one device.
        """

        def own_rows(rows):
            size = len(rows) // lax.axis_size(axes)
            return lax.dynamic_slice_in_dim(rows, lax.axis_index(axes) * size, size)

        def own(full):
            args = [own_rows(a) if k in self.row_positions else a for k, a in enumerate(full.args)]
            weights = jax.tree.map(own_rows, full.sample_weights)
            return full._replace(args=tuple(args), sample_weights=weights)

        values, gradients = self.values_and_gradients(
            batch, reductions=reductions, own=own, axis_name=axes
        )
        return Result(values, lax.pmean(gradients, axes))

    def _on_devices(self, shape: Sequence[int], check_vma: bool, reductions: Sequence[str]) -> Any:
        axes = _AXES[: len(shape)]

        def run(batch):
            results = self.on_a_device(batch, axes, reductions)
            return results if check_vma else jax.tree.map(lambda x: x[None], results)

        values = dict.fromkeys(reductions, P())
        if self.terms == "rows" and "none" in values:
            values["none"] = P(axes)
        labels = P() if self.kind == "views" else P(axes)
        args: Any = tuple(labels if k == 1 else P() for k in range(len(self.names)))
        batch: Any = Batch(args, P(axes), P(), P())  # pyright: ignore[reportArgumentType]
        devices = jax.devices()[: math.prod(shape)]
        kinds = (AxisType.Auto,) * len(axes)
        return _jit(
            jax.shard_map(
                run,
                mesh=jax.make_mesh(tuple(shape), axes, axis_types=kinds, devices=devices),
                in_specs=(batch,),
                out_specs=Result(values, P()) if check_vma else P(axes),  # pyright: ignore
                check_vma=check_vma,
            )
        )

    def _second_derivatives(self, batch: Batch, direction: Any) -> Any:
        """The Hessian of the mean times a direction, forward over reverse and reverse twice."""

        def gradient(leaves):
            return self.values_and_gradients(self.with_leaves(batch, leaves)).gradients["mean"]

        def slope(leaves):
            products = jax.tree.map(lambda g, d: jnp.sum(g * d), gradient(leaves), direction)
            return functools.reduce(jnp.add, products.values())

        leaves = self.leaves_of(batch)
        return jax.jvp(gradient, (leaves,), (direction,))[1], jax.grad(slope)(leaves)

    # Calls with NumPy arrays ----

    def evaluate(
        self,
        batch: Batch,
        reductions: Sequence[str] | None = None,
        cotangent: Any = None,
        dtype: Any = None,
    ) -> Result:
        """Values and gradients, by default of all reductions, and of the sum of the terms."""
        reductions = tuple(self.reductions if reductions is None else reductions)
        if "none" not in reductions:
            cotangent = None
        elif cotangent is None:
            cotangent = np.ones(batch.size if self.terms == "rows" else batch.args[1].shape[1])
        dtype = jnp.dtype(self.dtype if dtype is None else dtype)
        with x64(dtype == np.float64), _errors(batch):
            results = self._evaluate(self.cast(batch, dtype), cotangent, reductions=reductions)
            return jax.tree.map(np.asarray, results)

    def cast(self, batch: Batch, dtype: Any) -> Batch:
        """Rows and shared arrays in the dtype; weights and hyperparameters in float32 or wider."""
        args = (
            a.astype(dtype) if k in self.differentiable else a for k, a in enumerate(batch.args)
        )
        wide = np.float64 if dtype == np.float64 else np.float32
        weights, numbers = jax.tree.map(
            lambda x: np.asarray(x, wide), (batch.sample_weights, dict(batch.numbers))
        )
        return Batch(tuple(args), batch.where, weights, numbers)

    def rounded(self, batch: Batch, dtype: Any = None) -> Batch:
        """With numbers of the dtype."""
        dtype = jnp.dtype(self.dtype if dtype is None else dtype)
        return jax.tree.map(
            lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            self.cast(batch, dtype),
        )

    def of_stack(self, batches: Sequence[Batch]) -> Result:
        """The mean of several batches, by `jax.vmap`."""
        stack = jax.tree.map(lambda *arrays: np.stack(arrays), *batches)
        with x64(True), _errors(batches[0]):
            return jax.tree.map(np.asarray, self._of_stack(stack))

    def second_derivatives(self, batch: Batch, direction: Any) -> Any:
        with x64(True), _errors(batch):
            return jax.tree.map(np.asarray, self._second(batch, direction))

    @functools.cached_property
    def numbers(self) -> dict[str, Any]:
        """The hyperparameters: keyword-only arguments with a float default that can be traced.

        A loss may choose its formula by a Python number, or refuse an option.
        """
        batch, found = self.batch(np.random.default_rng(0), ROWS), {}
        for p in inspect.signature(self.loss).parameters.values():
            if p.kind is p.KEYWORD_ONLY and type(p.default) is float:
                number = {p.name: np.float64(p.default)}
                with x64(True), suppress(Exception):
                    jax.eval_shape(self.values_and_gradients, batch._replace(numbers=number))
                    found |= number
        return found

    def on_devices(
        self,
        batch: Batch,
        check_vma: bool = True,
        reductions: Sequence[str] | None = None,
        shape: Sequence[int] = (),
    ) -> list[Result]:
        """The results of every device; a single one with `check_vma`, where they are the same."""
        shape = tuple(shape) or (num_devices(),)
        key = shape, check_vma, tuple(self.reductions if reductions is None else reductions)
        if key not in self._spread:
            self._spread[key] = self._on_devices(*key)
        with x64(True), _errors(batch):
            results = jax.tree.map(np.asarray, self._spread[key](batch))
        if check_vma:
            return [results]
        size = math.prod(shape)
        if self.terms == "rows" and "none" in results.values:  # Each device has those of its rows.
            terms = results.values["none"].reshape(1, -1)
            results.values["none"] = np.broadcast_to(terms, (size, batch.size))
        return [jax.tree.map(lambda x, k=k: x[k], results) for k in range(size)]


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


def _jit(function: Callable[..., Any], how: Any = QUICK, **options: Any) -> Any:
    of_cpu = how if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=of_cpu, **options)


def num_devices() -> int:
    """The most devices over which the batches spread evenly."""
    return max(size for size in (1, 2, 3, 4) if size <= jax.device_count())


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
    for gradient in jax.tree.leaves(result.gradients):
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
