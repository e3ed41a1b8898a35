"""Checks that a loss of your own keeps the contract of `jaxloss`.

`jaxloss` does not import this module: write `from jaxloss.testing import check_loss`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

__all__ = ["ContractError", "check_loss"]

MakeInputs: TypeAlias = Callable[[np.random.Generator, int], Sequence[Any]]

_ROWS = 12
"""The size of the batches: it spreads evenly over 2, 3 and 4 devices."""
_SMALL = (1, 2, 3, 4, 6, 8)
"""The sizes that are tried for a smaller input that breaks the same rule."""
_SEEDS = (0, 1)
_AXIS = "devices"
_REDUCTIONS = ("mean", "sum", "none")
_LARGE = 1e4
_HUGE_LABEL = 10**6


class ContractError(AssertionError):
    """A loss breaks a rule of the contract.

    Attributes:
      rule: The name of the rule, such as `"masks"`.
      inputs: The smallest input found that breaks it: the arguments of the loss by their names.
    """

    def __init__(self, message: str, rule: str, inputs: Mapping[str, np.ndarray]):
        super().__init__(message)
        self.rule = rule
        self.inputs = dict(inputs)


def check_loss(
    loss: Callable[..., Any],
    make_inputs: MakeInputs,
    *,
    reference: Callable[..., Any] | None = None,
    devices: bool = True,
    dtypes: bool = True,
) -> None:
    """Checks that a loss keeps the contract of `jaxloss`, and raises an error if it does not.

    The contract is in the help of `jaxloss`: `where`, `sample_weights`, `reduction`, `axis_name`,
    labels, dtypes. The check runs the loss on random and on extreme batches of 12 rows. The rules,
    in their order:

    ======================== =======================================================================
    `keywords`               The loss takes the common keywords.
    `jit`                    It works under `jax.jit`; a mean and a sum are scalars. It may refuse
                             `reduction="none"` by a `ValueError` that names the argument.
    `float64`                float64 stays float64.
    `finite`                 Value and gradient are finite for random rows;
    `duplicates`             if rows are equal or opposite;
    `zeros`                  if rows, or the further arrays, are zero;
    `large_values`           if the scored rows have elements of ±1e4;
    `one_class`              if all rows have one class;
    `no_positives`           if no row has another row of its class, or a positive target.
    `nothing_counts`         They are 0 if no row counts, and if there are no rows.
    `masks`                  A row of `where=False` is as if it were not there,
    `padding_leaks`          even if it is NaN or infinite, or has a NaN weight or any label.
    `ignored_labels`         A negative label, or a row of unknown targets, is as `where=False`.
    `none`                   `"none"` gives a loss for every row, 0 where a row does not count.
    `sums`                   These sum to `"sum"`, in value and gradient.
    `weights`                The mean is `Σ s_i ℓ_i / Σ s_i` over the rows that count.
    `hidden_nan`             NaN in a row that counts makes value and gradient NaN.
    `gradient`               The gradient equals finite differences.
    `reference`              Value and gradient equal those of the reference.
    `second_derivatives`     `jax.grad` and `jax.jvp` of the gradient equal finite differences.
    `vmap`                   `jax.vmap` and `jax.checkpoint` change nothing.
    `half_precision`         Lower precision gives float32, as exact as in float32.
    `devices`                With `axis_name`, every device has the value of the global batch,
    `device_gradients`       and the `pmean` of the gradients is that of one device,
    `check_vma`              under `jax.shard_map` without and with `check_vma`.
    ======================== =======================================================================

    Args:
      loss: The function. Arguments with a default may be set by `functools.partial`.
      make_inputs: `make_inputs(rng, n)` returns the positional arguments of the loss for n ≥ 1 rows
        as NumPy arrays, drawn from the `numpy.random.Generator`: the scored rows `[n, ...]`; labels
        `[n]` or targets `[n, C]`, integers or bool; further arrays such as class weights. Floats
        are differentiated. A second array of floats `[n, ...]` is a second view of the rows. Give
        the scored rows elements of about 1, and several rows to most of the classes.
      reference: A function of the same positional arguments that returns the mean loss. It gets
        NumPy arrays in float64. If it cannot use them, or returns a PyTorch tensor, it gets PyTorch
        tensors in float64, and its gradients are compared, too. These then replace finite
        differences. A loss with `jax.lax.stop_gradient` needs that.
      devices: Whether to check `axis_name`. It needs at least two devices; with a single one, a
        warning says that these rules are left out. On a CPU, call
        `jax.config.update("jax_num_cpu_devices", 4)` before JAX is used.
      dtypes: Whether to check float32, bfloat16 and float16. The other rules use float64.

    Returns:
      None.

    Raises:
      ContractError: An `AssertionError`: the first broken rule, what to do, and the smallest input
        found that breaks it.
      ImportError: If chex is not installed, which compares the results.
      ValueError: If `make_inputs` does not return such arrays.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> from jaxloss.testing import check_loss
      >>> def make_inputs(rng, n):
      ...     return rng.normal(size=(n, 3)), rng.integers(0, 3, n)
      >>> check_loss(jaxloss.softmax_loss, make_inputs, devices=False)
      >>> def own_loss(logits, labels, *, where=None, sample_weights=None, reduction="mean"):
      ...     if where is not None:
      ...         logits = logits * where[:, None]
      ...     return jaxloss.softmax_loss(
      ...         logits, labels, sample_weights=sample_weights, reduction=reduction
      ...     )
      >>> check_loss(own_loss, make_inputs, devices=False)
      Traceback (most recent call last):
      jaxloss.testing.ContractError: `own_loss` breaks the rule "nothing_counts"...
    """
    try:
        import chex  # noqa: F401  # The library itself does not need it.
    except ImportError as error:
        raise ImportError(
            "`check_loss` compares results with chex: pip install chex", name="chex"
        ) from error
    subject = _Subject(loss, make_inputs, reference)
    left_out = set()
    if not devices:
        left_out |= {"devices"}
    elif jax.device_count() == 1:
        left_out |= {"devices"}
        warnings.warn(
            "`check_loss` found one device and leaves out the rules of several; give "
            "`devices=False` if that is right, or on a CPU call "
            '`jax.config.update("jax_num_cpu_devices", 4)` before JAX is used',
            stacklevel=2,
        )
    if not dtypes:
        left_out |= {"dtypes"}
    _check_keywords(subject, devices)
    for rule in _RULES:
        if rule.part in left_out:
            continue
        for seed in _SEEDS:
            broken = _first_fault(rule, subject, _ROWS, seed)
            if broken is not None:
                raise _error(rule, subject, _smaller(rule, subject) or broken)


def _check_keywords(subject: _Subject, devices: bool) -> None:
    parameters = inspect.signature(subject.loss).parameters
    common = ("where", "sample_weights", "reduction", *(("axis_name",) if devices else ()))
    missing = [name for name in common if name not in parameters]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if missing and not takes_any:
        names = ", ".join(f"`{name}`" for name in missing)
        raise ContractError(
            f'`{subject.name}` breaks the rule "keywords": it must take the common keywords of '
            f"`jaxloss`.\nFound: it does not take {names}.\nWhat to do: add keyword-only "
            "arguments with the defaults where=None, sample_weights=None, "
            'reduction="mean", axis_name=None; `devices=False` needs no `axis_name`.',
            "keywords",
            {},
        )


class _Batch(NamedTuple):
    """The positional arguments of a loss, a mask and weights, in NumPy float64."""

    args: tuple[np.ndarray, ...]
    where: np.ndarray
    sample_weights: np.ndarray

    @property
    def size(self) -> int:
        return len(self.where)

    def with_arg(self, position: int, rows: Any, value: Any) -> _Batch:
        """Replaces rows of an argument, or all of it with `slice(None)`."""
        changed = self.args[position].copy()
        changed[rows] = value
        return self._replace(
            args=(*self.args[:position], changed, *self.args[position + 1 :]),
        )

    def with_mask(self, rows: Any) -> _Batch:
        where = self.where.copy()
        where[rows] = False
        return self._replace(where=where)


class _Result(NamedTuple):
    values: dict[str, np.ndarray]
    """By reduction."""
    gradients: tuple[np.ndarray, ...]
    """Of all float arguments."""


class _Broken(Exception):
    """A rule is broken for this batch."""

    def __init__(self, found: str, batch: _Batch):
        super().__init__(found)
        self.found = found
        self.batch = batch


class _Subject:
    """A loss with its inputs, and the functions of it that are compiled once."""

    reductions: tuple[str, ...] = _REDUCTIONS
    """Those that it does not refuse."""
    terms: Literal["rows", "classes"] | None = None
    """What the elements of `"none"` are."""

    def __init__(self, loss: Any, make_inputs: MakeInputs, reference: Any):
        self.loss, self.make_inputs, self.reference = loss, make_inputs, reference
        function = loss
        while isinstance(function, functools.partial):
            function = function.func
        self.name = getattr(function, "__name__", type(function).__name__)
        example = self.batch(np.random.default_rng(0), _ROWS).args
        floats = [jnp.issubdtype(a.dtype, jnp.floating) for a in example]
        self.differentiable = tuple(k for k, is_float in enumerate(floats) if is_float)
        second = example[1]
        kind: Literal["labels", "targets", "views"] = "labels"
        if floats[1]:
            kind = "views"
        elif second.ndim > 1:
            kind = "targets"
        self.kind = kind
        self.can_ignore = kind != "views" and np.issubdtype(second.dtype, np.signedinteger)
        self.row_positions = (0, 1) if kind == "views" else (0,)
        """The positions of the arguments with rows of floats."""
        parameters = list(inspect.signature(loss).parameters.values())
        names = [
            p.name
            for p in parameters
            if p.kind
            in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        ]
        self.names = [names[k] if k < len(names) else f"argument {k}" for k in range(len(example))]
        self._evaluate = _jit(self._values_and_gradients)
        self._mean = _jit(self._mean_and_gradients)
        self._mean_of_stack = _jit(
            jax.vmap(functools.partial(self._mean_and_gradients, saved=True))
        )
        self._second = _jit(self._second_derivatives)
        self._spread: dict[bool, Any] = {}

    def batch(self, rng: np.random.Generator, n: int) -> _Batch:
        """Random rows, all of which count, with weights of 1."""
        args = [np.asarray(a) for a in self.make_inputs(rng, n)]
        if len(args) < 2 or any(a.shape[:1] != (n,) for a in args[:2]):
            raise ValueError(
                f"`make_inputs(rng, {n})` must return the scored rows and the labels of {n} rows, "
                f"and then further arrays; got shapes {[a.shape for a in args]}"
            )
        if not jnp.issubdtype(args[0].dtype, jnp.floating):
            raise ValueError(f"`make_inputs` must return rows of floats, got {args[0].dtype}")
        wide = [
            a.astype(np.float64)
            if jnp.issubdtype(a.dtype, jnp.floating)
            else a.astype(np.int32)
            if a.dtype == np.int64
            else a
            for a in args
        ]
        return _Batch(tuple(wide), np.ones(n, bool), np.ones(n))

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
        axis = {} if axis_name is None else {"axis_name": axis_name}

        def total(values):
            merged = self.merge(args, values)
            for k in self.row_positions:
                merged[k] = own_rows(merged[k])
            results = {
                reduction: self.loss(
                    *merged,
                    where=where,
                    sample_weights=sample_weights,
                    reduction=reduction,
                    **axis,
                )
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

        def spec(reduction):
            return P(_AXIS) if reduction == "none" and self.terms == "rows" else P()

        labels = P() if self.kind == "views" else P(_AXIS)
        arguments = [labels if k == 1 else P() for k in range(len(self.names))]
        outputs: Any = ({reduction: spec(reduction) for reduction in self.reductions}, P())
        return _jit(
            jax.shard_map(
                run,
                mesh=mesh,
                in_specs=(tuple(arguments), P(_AXIS), P(_AXIS), P()),
                out_specs=outputs if check_vma else P(_AXIS),
                check_vma=check_vma,
            )
        )

    # Calls with NumPy arrays ----

    def evaluate(self, batch: _Batch, **factors: Any) -> _Result:
        """Values, and the gradient of the mean, or of the reductions with these factors."""
        with _x64(True), _errors(batch):
            results = self._evaluate(*batch, self.factors(batch, factors or {"mean": 1.0}))
            return _Result(*jax.tree.map(np.asarray, results))

    def factors(self, batch: _Batch, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        shape = {
            "rows": (batch.size,),
            "classes": batch.args[1].shape[1:],
            None: (),
        }[self.terms]
        return {
            reduction: np.broadcast_to(
                np.asarray(given.get(reduction, 0.0), np.float64),
                shape if reduction == "none" else (),
            )
            for reduction in self.reductions
        }

    def mean(self, batch: _Batch, args: Any, dtype: Any = np.float64, **common: Any) -> Any:
        """The mean and its gradient, of arguments in another dtype or with fewer rows."""
        cast = [a.astype(dtype) if k in self.differentiable else a for k, a in enumerate(args)]
        with _x64(dtype == np.float64), _errors(batch):
            return jax.tree.map(np.asarray, self._mean(tuple(cast), common))

    def mean_of_stack(self, batches: Sequence[_Batch]) -> Any:
        args = tuple(np.stack(a) for a in zip(*(b.args for b in batches), strict=True))
        common = {"where": np.stack([b.where for b in batches])}
        with _x64(True), _errors(batches[0]):
            return jax.tree.map(np.asarray, self._mean_of_stack(args, common))

    def second_derivatives(self, batch: _Batch, direction: Any) -> Any:
        with _x64(True), _errors(batch):
            return jax.tree.map(np.asarray, self._second(batch.args, batch.where, tuple(direction)))

    def on_devices(self, batch: _Batch, check_vma: bool, **factors: Any) -> list[_Result]:
        """The results of every device; a single one with `check_vma`, where they are the same."""
        size = _num_devices()
        if check_vma not in self._spread:
            mesh = jax.make_mesh(
                (size,), (_AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:size]
            )
            self._spread[check_vma] = self._on_devices(mesh, check_vma)
        weights = {reduction: np.float64(factor) for reduction, factor in factors.items()}
        with _x64(True), _errors(batch):
            results = self._spread[check_vma](*batch, weights)
            values, gradients = jax.tree.map(np.asarray, results)
        if check_vma:
            return [_Result(values, gradients)]
        if self.terms == "rows":  # Each device has those of its rows.
            values["none"] = np.broadcast_to(values["none"].reshape(1, -1), (size, batch.size))
        every = [jax.tree.map(lambda x, k=k: x[k], (values, gradients)) for k in range(size)]
        return [_Result(*result) for result in every]


# The former since JAX 0.8.
_jax: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
_x64 = _jax.enable_x64


def _jit(function: Callable[..., Any]) -> Any:
    # On a CPU, the programs are run a few times, and compile in two thirds of the time.
    quick = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    return jax.jit(function, compiler_options=quick if jax.default_backend() == "cpu" else None)


def _num_devices() -> int:
    """The most devices over which the batches spread evenly."""
    return max(size for size in (1, 2, 3, 4) if size <= jax.device_count())


@contextmanager
def _errors(batch: _Batch) -> Iterator[None]:
    """Turns an error of the loss into a broken rule."""
    try:
        yield
    except Exception as error:
        raise _Broken(f"the loss raised {_first_line(error)}", batch) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _close(
    what: str,
    got: Any,
    expected: Any,
    batch: _Batch,
    rtol: float = 1e-10,
    atol: float = 1e-12,
) -> None:
    """Raises if a tree of arrays is not what it must be."""
    import chex

    try:
        chex.assert_trees_all_close(got, expected, rtol=rtol, atol=atol)
    except AssertionError as error:
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        for a, b in pairs:
            if a.shape != b.shape or not np.allclose(a, b, rtol, atol, equal_nan=True):
                found = f"{what} is {_text(a)}, and must be {_text(b)}"
                raise _Broken(found, batch) from error
        raise _Broken(str(error), batch) from error


def _finite(what: str, result: _Result, batch: _Batch) -> None:
    for reduction, value in result.values.items():
        if not np.all(np.isfinite(value)):
            raise _Broken(f'{what} the "{reduction}" is {_text(value)}', batch)
    for gradient in result.gradients:
        if not np.all(np.isfinite(gradient)):
            raise _Broken(
                f"{what} the value is finite, but the gradient is {_text(gradient)}", batch
            )


def _magnitude(tree: Any) -> float:
    return max((float(np.max(np.abs(x), initial=0.0)) for x in jax.tree.leaves(tree)), default=0.0)


def _text(array: Any, indent: str = "") -> str:
    return np.array2string(
        np.asarray(array),
        precision=5,
        suppress_small=True,
        threshold=200,
        max_line_width=96,
        separator=", ",
        prefix=indent,
    )


# Batches ----


def _random_mask(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> _Batch:
    """Some masked rows and ignored labels, and weights that differ."""
    n = batch.size
    batch = batch.with_mask(rng.choice(n, n // 5, replace=False))
    if subject.can_ignore:
        batch = batch.with_arg(1, rng.choice(n, n // 6, replace=False), -1)
    return batch._replace(sample_weights=rng.uniform(0.2, 2.0, n))


def _with_positives(subject: _Subject, batch: _Batch) -> _Batch:
    """A row that is alone in its class joins the largest class."""
    if subject.kind != "labels":
        return batch
    labels, counts = np.unique(batch.args[1], return_counts=True)
    alone = np.isin(batch.args[1], labels[counts == 1])
    return batch.with_arg(1, alone, labels[np.argmax(counts)])


def _some_rows(batch: _Batch, rng: np.random.Generator) -> np.ndarray:
    """A quarter of the rows, and at least one."""
    return rng.choice(batch.size, max(1, batch.size // 4), replace=False)


def _ignored(subject: _Subject, labels: np.ndarray) -> np.ndarray:
    """The rows that are ignored."""
    if subject.kind == "views":
        return np.zeros(len(labels), bool)
    return np.all(labels.reshape(len(labels), -1) < 0, axis=1)


# Rules: each must hold for a batch of any size ----


def _under_jit(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    """Also finds out which reductions there are."""
    shapes = {}
    for reduction in _REDUCTIONS:
        call = functools.partial(
            subject.loss,
            where=batch.where,
            sample_weights=batch.sample_weights,
            reduction=reduction,
        )

        def traced(args, where, sample_weights, reduction=reduction):
            return subject.loss(
                *args, where=where, sample_weights=sample_weights, reduction=reduction
            )

        with _x64(True):
            try:
                shapes[reduction] = jax.eval_shape(traced, *batch)
            except Exception as error:
                named = "reduction" in str(error) or "none" in str(error)
                if reduction == "none" and isinstance(error, ValueError) and named:
                    continue
                found = f'with reduction="{reduction}" the loss raised {_first_line(error)}'
                try:
                    call(*map(jnp.asarray, batch.args))
                    found += " (only when it is traced)"
                except Exception:  # The same one, without `jax.jit`.
                    pass
                raise _Broken(found, batch) from error
    for reduction, got in shapes.items():
        if not hasattr(got, "dtype") or not jnp.issubdtype(got.dtype, jnp.floating):
            raise _Broken(f'the "{reduction}" is no array of floats, but {got}', batch)
        if reduction != "none" and got.shape != ():
            raise _Broken(f'the "{reduction}" has the shape {got.shape}, and must have ()', batch)
    subject.reductions = tuple(shapes)
    if "none" not in shapes:
        return
    allowed = [(batch.size,)]
    if subject.kind == "targets":
        allowed.append(batch.args[1].shape[1:])
    if shapes["none"].shape not in allowed:
        raise _Broken(
            f'"none" has the shape {shapes["none"].shape}, and must have one loss for each row, '
            f"({batch.size},)",
            batch,
        )
    subject.terms = "rows" if shapes["none"].shape == (batch.size,) else "classes"


def _stays_float64(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    result = subject.evaluate(batch)
    for reduction, value in result.values.items():
        if value.dtype != np.float64:
            raise _Broken(f'for float64 inputs the "{reduction}" has dtype {value.dtype}', batch)
    # Sums of random numbers of float64 are not all numbers of float32.
    values = np.concatenate([np.ravel(value) for value in result.values.values()])
    values = values[np.isfinite(values) & (values != np.round(values))]
    if batch.size == _ROWS and len(values) and np.all(values == values.astype(np.float32)):
        raise _Broken("for float64 inputs all values are numbers of float32", batch)


def _random_is_finite(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    batch = _with_positives(subject, batch)
    _finite("for random rows", subject.evaluate(batch), batch)


def _duplicates(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    batch = _with_positives(subject, batch)
    row, n = batch.args[0][0], batch.size
    signs = np.where(np.arange(n) % 3 == 1, -1.0, 1.0).reshape(-1, *[1] * row.ndim)
    for what, rows, value in (
        ("some rows are equal", slice(None, None, 2), row),
        ("all rows are equal", slice(None), row),
        ("all rows are equal or opposite", slice(None), signs * row),
    ):
        changed = batch
        for k in subject.row_positions:
            changed = changed.with_arg(k, rows, value)
        _finite(f"if {what}", subject.evaluate(changed), changed)


def _zeros(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    batch = _with_positives(subject, batch)
    rows = subject.row_positions
    others = [k for k in subject.differentiable if k not in rows]

    def zero(positions, which=slice(None), changed=batch):
        for k in positions:
            changed = changed.with_arg(k, which, 0.0)
        return changed

    cases = {
        "some rows are zero": zero(rows, slice(None, None, 2)),
        "all rows are zero": zero(rows),
    }
    cases |= {f"`{subject.names[k]}` is zero": zero([k]) for k in others}
    for what, changed in (cases | {"all arrays are zero": zero([*rows, *others])}).items():
        _finite(f"if {what}", subject.evaluate(changed), changed)


def _large_values(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    batch = _with_positives(subject, batch)
    shape, n = batch.args[0].shape, batch.size
    width = int(np.prod(shape[1:]))
    signs = np.where(np.arange(n) % 3 == 0, -1.0, 1.0)[:, None]
    for rows in (
        signs * np.eye(width)[np.arange(n) % width],
        signs * np.ones((n, width)),
        rng.choice([-1.0, 1.0], (n, width)),
    ):
        changed = batch
        for k in subject.row_positions:
            changed = changed.with_arg(k, slice(None), _LARGE * rows.reshape(shape))
        _finite(f"for elements of ±{_LARGE:g}", subject.evaluate(changed), changed)


def _one_class(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    if subject.kind != "views":
        targets = subject.kind == "targets"
        changed = batch.with_arg(1, slice(None), 1 if targets else batch.args[1][0])
        what = "if all targets are positive" if targets else "if all rows have one class"
        _finite(what, subject.evaluate(changed), changed)


def _no_positives(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    alone = batch.with_mask(slice(1, None))
    _finite("if only the first row counts", subject.evaluate(alone), alone)
    if subject.kind == "labels":
        first = np.unique(batch.args[1], return_index=True)[1]
        changed = batch.with_mask(np.setdiff1d(np.arange(batch.size), first))
        _finite("if each class has one row", subject.evaluate(changed), changed)
    elif subject.kind == "targets":
        changed = batch.with_arg(1, slice(None), 0)
        _finite("without a positive target", subject.evaluate(changed), changed)


def _nothing_counts(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    _all_zero(subject, "with where=False everywhere", batch.with_mask(slice(None)))
    args = tuple(a[:0] if k < 2 else a for k, a in enumerate(batch.args))
    none = _Batch(args, batch.where[:0], batch.sample_weights[:0])
    value, gradients = subject.mean(none, none.args)
    _close("without rows, the mean", value, np.zeros_like(value), none, 0.0, 0.0)
    expected = jax.tree.map(np.zeros_like, gradients)
    _close("without rows, the gradient", gradients, expected, none, 0.0, 0.0)


def _all_zero(subject: _Subject, what: str, batch: _Batch) -> None:
    result = subject.evaluate(batch, mean=1.0, sum=1.0)
    for reduction in ("mean", "sum"):
        value = result.values[reduction]
        _close(f'{what} the "{reduction}"', value, np.zeros_like(value), batch, 0.0, 0.0)
    expected = jax.tree.map(np.zeros_like, result.gradients)
    _close(f"{what} the gradient", result.gradients, expected, batch, 0.0, 0.0)


def _masks(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    masked = batch.with_mask(_some_rows(batch, rng))
    keep = masked.where
    if not keep.any():
        return
    got = subject.evaluate(masked)
    removed = tuple(a[keep] if k < 2 else a for k, a in enumerate(batch.args))
    value, gradients = subject.mean(masked, removed)
    what = "the mean, which is another one without the masked rows,"
    _close(what, got.values["mean"], value, masked, 1e-12)
    for k, full, expected in zip(subject.differentiable, got.gradients, gradients, strict=True):
        of_rows, name = k in subject.row_positions, f"the gradient of `{subject.names[k]}`"
        _close(name, full[keep] if of_rows else full, expected, masked)
        if of_rows:
            masked_rows = full[~keep]
            _close(f"{name} in masked rows", masked_rows, np.zeros_like(masked_rows), masked)


def _padding_leaks(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    rows = _some_rows(batch, rng)
    masked = batch.with_mask(rows)._replace(sample_weights=rng.uniform(0.2, 2.0, batch.size))
    expected = subject.evaluate(masked, mean=1.0, sum=0.3)
    _no_leak(subject, "a masked row", masked, rows, expected)
    weights = masked.sample_weights.copy()
    weights[rows] = np.nan
    cases = [("NaN as the weight of a masked row", masked._replace(sample_weights=weights))]
    if subject.kind == "labels":
        large = masked.with_arg(1, rows, min(_HUGE_LABEL, np.iinfo(batch.args[1].dtype).max))
        cases.append(("a large label of a masked row", large))
    for what, changed in cases:
        _same(subject, what, changed, expected)


def _no_leak(subject: _Subject, where: str, batch: _Batch, rows: Any, expected: _Result) -> None:
    for poison in (np.nan, np.inf, -np.inf):
        changed = batch
        for k in subject.row_positions:
            changed = changed.with_arg(k, rows, poison)
        _same(subject, f"{poison} in {where}", changed, expected)


def _same(subject: _Subject, what: str, batch: _Batch, expected: _Result) -> None:
    got = subject.evaluate(batch, mean=1.0, sum=0.3)
    for reduction in ("mean", "sum"):
        a, b = got.values[reduction], expected.values[reduction]
        _close(f'with {what} the "{reduction}"', a, b, batch)
    for k, a, b in zip(subject.differentiable, got.gradients, expected.gradients, strict=True):
        _close(f"with {what} the gradient of `{subject.names[k]}`", a, b, batch)


def _ignored_labels(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    if not subject.can_ignore:
        return
    rows = _some_rows(batch, rng)
    expected = subject.evaluate(batch.with_mask(rows), mean=1.0, sum=0.3)
    _all_zero(subject, "with negative labels only", batch.with_arg(1, slice(None), -1))
    for label in (-1, -2):
        changed = batch.with_arg(1, rows, label)
        _same(subject, f"the label {label}", changed, expected)
        _no_leak(subject, f"a row with the label {label}", changed, rows, expected)


def _zeros_of_none(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    if subject.terms != "rows":
        return
    masked = _random_mask(subject, batch, rng).with_mask(_some_rows(batch, rng))
    out = ~masked.where | _ignored(subject, masked.args[1])
    poisoned = masked._replace(sample_weights=np.where(out, np.nan, masked.sample_weights))
    for k in subject.row_positions:
        poisoned = poisoned.with_arg(k, out, np.nan)
    for changed in (masked, poisoned):
        terms = subject.evaluate(changed).values["none"][out]
        what = '"none" of rows that do not count'
        _close(what, terms, np.zeros_like(terms), changed, 0.0, 0.0)


def _sums(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    if subject.terms is None:
        return
    masked = _random_mask(subject, batch, rng)
    of_sum, of_terms = subject.evaluate(masked, sum=1.0), subject.evaluate(masked, none=1.0)
    total, terms = of_sum.values["sum"], of_sum.values["none"]
    _close('the "sum"', total, terms.sum(), masked)
    _close('the gradient of the "sum"', of_sum.gradients, of_terms.gradients, masked)


def _weights(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    if subject.terms != "rows":
        return

    def losses_of(weighted):
        return subject.evaluate(weighted._replace(sample_weights=np.ones(batch.size))).values[
            "none"
        ]

    weighted = _random_mask(subject, batch, rng)
    weights, losses = weighted.sample_weights, losses_of(weighted)
    if subject.kind == "labels":
        # Of a sum of two losses, one may be undefined for a row that is alone in its class, and the
        # means have different denominators.
        labels = np.where(weighted.where, weighted.args[1], -1)
        alone = np.array([np.sum(labels == label) == 1 for label in labels])
        weighted = weighted.with_mask(alone & (losses != 0))
        losses = losses_of(weighted)
    result = subject.evaluate(weighted)
    _close('"none"', result.values["none"], weights * losses, weighted)
    _close('the "sum"', result.values["sum"], np.sum(weights * losses), weighted)
    # A row whose loss is 0 counts if its weight changes the mean.
    counts = losses != 0
    for row in np.flatnonzero(~counts & weighted.where & (result.values["mean"] != 0)):
        heavier = weights.copy()
        heavier[row] *= 2
        changed = subject.evaluate(weighted._replace(sample_weights=heavier)).values["mean"]
        counts[row] = not np.isclose(changed, result.values["mean"], 1e-9, 0)
    if counts.any():
        expected = np.sum(weights * losses) / np.sum(weights[counts])
        _close("the mean", result.values["mean"], expected, weighted)
    light = weighted._replace(sample_weights=1e-3 * weights)
    got = subject.evaluate(light)
    _close("the mean of small weights", got.values["mean"], result.values["mean"], light)
    _close("the gradient of small weights", got.gradients, result.gradients, light)


def _hidden_nan(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    """Where the gradient is largest, a row counts, and its element matters."""
    gradient = subject.evaluate(batch).gradients[0]
    if not gradient.any():
        return
    place = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
    changed = batch.with_arg(0, place, np.nan)
    for reduction in ("mean", "sum"):
        result = subject.evaluate(changed, **{reduction: 1.0})
        if not np.isnan(result.values[reduction]):
            found = f'with NaN at {_place(place)} the "{reduction}" is {result.values[reduction]}'
            raise _Broken(found, changed)
        if not np.isnan(result.gradients[0]).any():
            raise _Broken(f'the gradient of the "{reduction}" is finite', changed)
    terms = result.values.get("none", np.array(np.nan))
    if not np.isnan(terms).any():
        raise _Broken(f'with NaN at {_place(place)} "none" is {_text(terms)}', changed)


def _place(index: Any) -> str:
    return f"[{', '.join(str(int(k)) for k in index)}]"


def _gradient(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    if _torch_reference(subject, batch) is not None:
        return  # Its gradients are compared.
    masked = _random_mask(subject, batch, rng)
    for k in subject.differentiable:
        _slopes(subject, masked, rng, k)


def _slopes(subject: _Subject, batch: _Batch, rng: np.random.Generator, k: int) -> None:
    """Raises unless the gradient of argument k equals central differences along directions."""
    for reduction in subject.reductions:
        factor = 1.0
        if reduction == "none":
            factor = rng.normal(size=subject.factors(batch, {})["none"].shape)
        result = subject.evaluate(batch, **{reduction: factor})
        gradient = result.gradients[subject.differentiable.index(k)]
        for _ in range(2):
            direction, step, values = rng.normal(size=gradient.shape), 1e-6, []
            for sign in (1, -1):
                moved = batch.with_arg(k, ..., batch.args[k] + sign * step * direction)
                values.append(np.sum(factor * subject.evaluate(moved).values[reduction]))
            expected = (values[0] - values[1]) / (2 * step)
            what = f'the slope of the "{reduction}" along a direction of `{subject.names[k]}`'
            # Rounding of the values gives about 1e-10 of them.
            atol = 1e-6 * max(1.0, *map(abs, values))
            _close(what, np.sum(gradient * direction), expected, batch, 1e-5, atol)


def _reference(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    if subject.reference is None:
        return
    result = subject.evaluate(batch)
    by_torch = _torch_reference(subject, batch)
    if by_torch is None:
        value = np.asarray(subject.reference(*batch.args), np.float64)
        _close("the mean", result.values["mean"], value, batch, 1e-6, 1e-8)
        return
    value, gradients = by_torch
    _close("the mean", result.values["mean"], value, batch, 1e-6, 1e-8)
    pairs = zip(subject.differentiable, result.gradients, gradients, strict=True)
    for k, got, expected in pairs:
        _close(f"the gradient of `{subject.names[k]}`", got, expected, batch, 1e-6, 1e-8)


def _torch_reference(subject: _Subject, batch: _Batch) -> tuple[Any, Any] | None:
    """Value and gradients of a reference in PyTorch; None for one in NumPy.

    It has imported PyTorch, at the latest when it is called.
    """
    if subject.reference is None:
        return None
    error = None
    try:
        value = subject.reference(*batch.args)
    except Exception as caught:
        value, error = None, caught
    torch: Any = sys.modules.get("torch")
    if error is None and (torch is None or not isinstance(value, torch.Tensor)):
        return None
    if torch is None:
        raise error or AssertionError
    tensors = [
        torch.tensor(a) if a.dtype != np.int32 else torch.tensor(a).long() for a in batch.args
    ]
    leaves = [tensors[k].requires_grad_() for k in subject.differentiable]
    value = subject.reference(*tensors)
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    arrays = [
        np.zeros(leaf.shape) if gradient is None else gradient.numpy()
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]
    return value.detach().numpy(), tuple(arrays)


def _second_derivatives(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    masked = _random_mask(subject, batch, rng)._replace(sample_weights=np.ones(batch.size))
    smooth = subject.differentiable
    if _torch_reference(subject, batch) is not None:
        smooth = _smooth(subject, masked, rng)
    values = subject.values_of(masked.args)
    # Along an argument of a stop-gradient, finite differences are other numbers.
    direction = [
        rng.normal(size=value.shape) * (k in smooth)
        for k, value in zip(subject.differentiable, values, strict=True)
    ]
    forward, backward = subject.second_derivatives(masked, direction)
    step, moved = 1e-5, []
    for sign in (1, -1):
        shifted = [v + sign * step * d for v, d in zip(values, direction, strict=True)]
        args = tuple(subject.merge(masked.args, shifted))
        moved.append(subject.evaluate(masked._replace(args=args)).gradients)
    expected = jax.tree.map(lambda a, b: (a - b) / (2 * step), *moved)
    # The error of central differences with this step is about 1e-9.
    atol = 1e-8 * max(1.0, _magnitude(expected))
    of = zip(subject.differentiable, forward, backward, expected, strict=True)
    for k, by_jvp, by_grad, product in of:
        what = f"the Hessian times a direction, at `{subject.names[k]}` and by"
        _close(f"{what} `jax.jvp`,", by_jvp, product, masked, 1e-6, atol)
        if k in smooth:
            _close(f"{what} `jax.grad`,", by_grad, product, masked, 1e-6, atol)


def _smooth(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> tuple[int, ...]:
    """The arguments whose gradient equals finite differences, as there is no stop-gradient."""

    def equal(k):
        try:
            _slopes(subject, batch, rng, k)
        except _Broken:
            return False
        return True

    return tuple(filter(equal, subject.differentiable))


def _vmap(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    others = [batch, subject.batch(rng, batch.size), subject.batch(rng, batch.size)]
    batches = [
        _random_mask(subject, other, rng)._replace(sample_weights=np.ones(batch.size))
        for other in others
    ]
    values, gradients = subject.mean_of_stack(batches)
    for k, one in enumerate(batches):
        expected = subject.evaluate(one)
        _close("the mean", values[k], expected.values["mean"], one)
        _close("the gradient", tuple(g[k] for g in gradients), expected.gradients, one)


def _half_precision(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    batch = _random_mask(subject, batch, rng)
    for dtype in (np.float32, jnp.bfloat16, np.float16):
        name = jnp.dtype(dtype).name
        args = tuple(
            a.astype(dtype).astype(np.float64) if k in subject.differentiable else a
            for k, a in enumerate(batch.args)
        )
        weights = batch.sample_weights.astype(np.float32)
        rounded = batch._replace(args=args, sample_weights=weights.astype(np.float64))
        value, gradients = subject.mean(
            rounded, args, dtype, where=batch.where, sample_weights=weights
        )
        if value.dtype != np.float32:
            raise _Broken(f"for {name} inputs the mean has dtype {value.dtype}", rounded)
        expected = subject.evaluate(rounded)
        wide = value.astype(np.float64)
        _close(f"for {name} inputs the mean", wide, expected.values["mean"], rounded, 2e-5, 1e-5)
        # A gradient is rounded to the dtype of its array, once on each of a few paths.
        eps = max(4 * float(jnp.finfo(dtype).eps), 1e-4)
        for k, got, full in zip(subject.differentiable, gradients, expected.gradients, strict=True):
            what = f"for {name} inputs the gradient of `{subject.names[k]}`"
            _close(
                what, got.astype(np.float64), full, rounded, 0.0, eps * max(_magnitude(full), 1e-2)
            )


def _uneven(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> _Batch:
    """All rows of the first device count, one of the next, none, and all but one."""
    size = _num_devices()
    where = np.zeros((size, batch.size // size), bool)
    where[0], where[1, -1:] = True, True
    where[3:, 1:] = True
    batch = batch._replace(
        where=where.reshape(-1), sample_weights=rng.uniform(0.2, 2.0, batch.size)
    )
    return batch.with_arg(1, [-1], -1) if subject.can_ignore else batch


def _device_values(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    batch = _uneven(subject, batch, rng)
    expected = subject.evaluate(batch, mean=1.0, sum=0.3).values
    for device, result in enumerate(subject.on_devices(batch, False, mean=1.0, sum=0.3)):
        for reduction, value in result.values.items():
            what = f'on device {device} of {_num_devices()} the "{reduction}"'
            _close(what, value, expected[reduction], batch)


def _device_gradients(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    batch = _uneven(subject, batch, rng)
    for reduction in ("mean", "sum"):
        expected = subject.evaluate(batch, **{reduction: 1.0}).gradients
        factors = {"mean": 0.0, "sum": 0.0, reduction: 1.0}
        got = subject.on_devices(batch, False, **factors)[0].gradients
        for k, a, b in zip(subject.differentiable, got, expected, strict=True):
            _close(f'the gradient of the "{reduction}" for `{subject.names[k]}`', a, b, batch)


def _check_vma(subject: _Subject, batch: _Batch, rng: np.random.Generator) -> None:
    batch = _uneven(subject, batch, rng)
    expected = subject.evaluate(batch, mean=1.0, sum=0.3)
    (got,) = subject.on_devices(batch, True, mean=1.0, sum=0.3)
    for reduction, value in got.values.items():
        _close(f'the "{reduction}"', value, expected.values[reduction], batch)
    _close("the gradient", got.gradients, expected.gradients, batch)


class _Rule(NamedTuple):
    name: str
    statement: str
    advice: str
    check: Callable[[_Subject, _Batch, np.random.Generator], None]
    part: Literal["", "devices", "dtypes"] = ""


_RULES = (
    _Rule(
        "jit",
        "it must work under `jax.jit` and return arrays of floats",
        "correct the error; use `jnp.where` instead of `if` on the values of arrays",
        _under_jit,
    ),
    _Rule(
        "float64",
        "float64 inputs must be computed in float64",
        "widen only float16 and bfloat16, for example by "
        "`x.astype(jnp.promote_types(x.dtype, jnp.float32))`",
        _stays_float64,
    ),
    _Rule(
        "finite",
        "value and gradient must be finite for random rows",
        "find the operation with `jax.config.update('jax_debug_nans', True)`; a root is not "
        "differentiable at 0, as in the distance of a row from itself",
        _random_is_finite,
    ),
    _Rule(
        "duplicates",
        "value and gradient must be finite if rows are equal or opposite",
        "guard a root or a division at a distance of zero by a `jnp.where` inside and another one "
        "outside: the gradient of a single one is NaN",
        _duplicates,
    ),
    _Rule(
        "zeros",
        "value and gradient must be finite if rows or other arrays are zero",
        "guard a norm of zero by a `jnp.where` inside of the root and another one outside",
        _zeros,
    ),
    _Rule(
        "large_values",
        f"value and gradient must be finite for elements of ±{_LARGE:g}",
        "shift a log-sum-exp by its maximum, as `jax.nn.logsumexp` does, and write "
        "log(1 + exp(x)) as `jax.nn.softplus(x)`",
        _large_values,
    ),
    _Rule(
        "one_class",
        "value and gradient must be finite if all rows have one class",
        "guard what is empty without a negative: put a constant in its place by `jnp.where`, "
        "before the logarithm or the division and not only after",
        _one_class,
    ),
    _Rule(
        "no_positives",
        "value and gradient must be finite if a row has no other row of its class",
        "let such a row not count: put a constant in place of its inputs by `jnp.where`, before "
        "the logarithm or the division and not only after",
        _no_positives,
    ),
    _Rule(
        "nothing_counts",
        "value and gradient must be 0 if no row counts",
        "divide by `jnp.where(total == 0, 1, total)`",
        _nothing_counts,
    ),
    _Rule(
        "masks",
        "a row of where=False must be as if it were not there",
        "leave masked rows out of every sum, mean, maximum and set of references",
        _masks,
    ),
    _Rule(
        "padding_leaks",
        "what is in a row of where=False must have no effect, even if it is NaN",
        "replace masked rows before you compute, by `jnp.where(where[:, None], rows, 0)`; "
        "0 times NaN is NaN",
        _padding_leaks,
    ),
    _Rule(
        "ignored_labels",
        "a row of a negative label must be as a row of where=False",
        "start with `where = where & (labels >= 0)`: as an index, -1 is the last class",
        _ignored_labels,
    ),
    _Rule(
        "none",
        'reduction="none" must give 0 for a row that does not count',
        "return `jnp.where(counts, sample_weights * losses, 0)`",
        _zeros_of_none,
    ),
    _Rule(
        "sums",
        'the losses of reduction="none" must sum to that of "sum", in value and gradient',
        "compute all reductions from the same losses",
        _sums,
    ),
    _Rule(
        "weights",
        'with the weights s, "none" must be s_i ℓ_i, and the mean Σ s_i ℓ_i / Σ s_i over the rows '
        "that count",
        "divide by the sum of the weights, without a lower limit such as `jnp.maximum(total, 1)`",
        _weights,
    ),
    _Rule(
        "hidden_nan",
        "NaN in a row that counts must give NaN",
        "leave out `jnp.nan_to_num`, and write comparisons so that NaN does not become a 0",
        _hidden_nan,
    ),
    _Rule(
        "gradient",
        "the gradient must equal finite differences",
        "correct the custom gradient; if the loss has a `jax.lax.stop_gradient` on purpose, give a "
        "`reference` in PyTorch, whose gradients are compared instead",
        _gradient,
    ),
    _Rule(
        "reference",
        "the mean and its gradient must equal those of the reference",
        "compare the formulas, signs and constants of the two",
        _reference,
    ),
    _Rule(
        "second_derivatives",
        "`jax.grad` and `jax.jvp` of the gradient must equal finite differences of it",
        "write the backward pass of a custom gradient in functions that JAX can differentiate, "
        "of arrays that are its residuals",
        _second_derivatives,
    ),
    _Rule(
        "vmap",
        "`jax.vmap` and `jax.checkpoint` must not change value and gradient",
        "use operations that `jax.vmap` can batch, and no side effects",
        _vmap,
    ),
    _Rule(
        "half_precision",
        "float32, bfloat16 and float16 inputs must give float32, computed in float32",
        "start with `x.astype(jnp.promote_types(x.dtype, jnp.float32))`",
        _half_precision,
        "dtypes",
    ),
    _Rule(
        "devices",
        "with `axis_name`, every device must return the value of the global batch",
        "add numerators and denominators up by `jax.lax.psum` before you divide, and compare with "
        "the rows of all devices; the place of an own row among them depends on "
        "`jax.lax.axis_index`",
        _device_values,
        "devices",
    ),
    _Rule(
        "device_gradients",
        "the mean of the gradients over the devices must equal the gradient on one device",
        "reduce inside of the loss, by `jax.lax.psum`, and let gradients flow through "
        "`jax.lax.all_gather`",
        _device_gradients,
        "devices",
    ),
    _Rule(
        "check_vma",
        "under `jax.shard_map` with check_vma=True, value and gradient must be the same",
        "reduce by `jax.lax.psum`, after which JAX knows that all devices have the same value",
        _check_vma,
        "devices",
    ),
)


def _first_fault(rule: _Rule, subject: _Subject, n: int, seed: int) -> _Broken | None:
    rng = np.random.default_rng(seed)
    try:
        rule.check(subject, subject.batch(rng, n), rng)
    except _Broken as broken:
        return broken
    return None


def _smaller(rule: _Rule, subject: _Subject) -> _Broken | None:
    """The smallest batch found that breaks the rule, below the usual size."""
    step = _num_devices() if rule.part == "devices" else 1
    for n in (n for n in _SMALL if n % step == 0):
        for seed in (*_SEEDS, 2):
            try:
                broken = _first_fault(rule, subject, n, seed)
            except Exception:  # `make_inputs` or the reference may not take so few rows.
                break
            if broken is not None:
                return broken
    return None


def _error(rule: _Rule, subject: _Subject, broken: _Broken) -> ContractError:
    batch = broken.batch
    inputs = dict(zip(subject.names, batch.args, strict=True))
    if not batch.where.all():
        inputs["where"] = batch.where
    if np.any(batch.sample_weights != 1):
        inputs["sample_weights"] = batch.sample_weights
    lines = [f"  {name} = {_text(value, f'  {name} = ')}" for name, value in inputs.items()]
    error = ContractError(
        f'`{subject.name}` breaks the rule "{rule.name}": {rule.statement}.\n'
        f"Found: {broken.found}.\n"
        f"What to do: {rule.advice}.\n"
        f"Smallest input found, {batch.size} rows:\n" + "\n".join(lines),
        rule.name,
        inputs,
    )
    error.__cause__ = broken.__cause__
    return error
