"""Losses of global arrays: the rows of a batch are sharded over the axes of a mesh.

A loss with `axis_name` computes the value of the whole batch from the rows of a device. This module
calls it so under `jax.shard_map`: `divided`, the decorator of all public functions, where it gets
arrays that are sharded over Explicit axes, and `sharded_loss` on request, for any mesh. Which
dimension of an argument is spread follows from its name, which is the same in all losses:

- rows `[n, ...]` over the axes of the batch;
- references `[m, ...]` over the same axes, filled up with rows that are ignored;
- the classes of a classifier, `[d, C]` and `[C]`, over axes of their own, as `class_axis_name`;
- all other arrays are copied to every device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxloss._batch import AxisName

Result: TypeAlias = Literal["loss", "losses of classes", "rows", "replicated"]
"""What a function returns: with `"loss"`, rows for `reduction="none"`, and else a scalar."""
Function = TypeVar("Function", bound=Callable[..., Any])

_ROWS = frozenset({"features", "logits", "labels", "targets", "groups", "where", "sample_weights"})
_REFERENCES = {"references": 0, "reference_labels": -1, "reference_where": False}
"""Arguments `[m, ...]`, and what fills them up."""
_CLASSES = {"weights": 1, "bias": 0}
"""Arguments with a dimension of classes."""

_AXIS_NAMES = ("axis_name", "class_axis_name")

_reshard = getattr(jax, "reshard", None) or jax.sharding.reshard  # The latter before JAX 0.8.


def divided(result: Result = "loss") -> Callable[[Function], Function]:
    """Decorates a function of rows, so that devices divide the work on a mesh of Explicit axes.

    Signature, help and errors stay as they are. Without arrays that are sharded over Explicit axes,
    the function is called as it is.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def on_any_mesh(*args: Any, **kwargs: Any) -> Any:
            mesh = _explicit_mesh((args, kwargs))
            if mesh is None or any(kwargs.get(name) is not None for name in _AXIS_NAMES):
                return function(*args, **kwargs)
            try:
                given = signature.bind(*args, **kwargs).arguments
                axes, class_axes = _axes_of(given, "class_axis_name" in signature.parameters)
                plan = _Plan(mesh, axes, class_axes, _ROWS, reshards=True)
                return _call(function, given, plan, result)
            except (TypeError, ValueError):
                # The error of the function itself has the shapes of the whole batch.
                jax.eval_shape(*_abstract(function, args, kwargs))
                raise

        on_any_mesh._result = result  # pyright: ignore[reportAttributeAccessIssue]
        return on_any_mesh  # pyright: ignore[reportReturnType]

    return decorate


def sharded_loss(loss: Function, mesh: jax.sharding.Mesh, axis_name: AxisName) -> Function:
    """A loss of global arrays whose work is divided over a mesh, for axes of any type.

    On Explicit axes, which `jax.make_mesh` makes by default, every loss of `jaxloss` divides its
    work by itself. On Auto axes, `jax.jit` decides what a device computes, and gives every pair of
    a pairwise loss to every device. This function divides the work there: it calls the loss under
    `jax.shard_map`.

    Args:
      loss: A loss of `jaxloss`, a `functools.partial` of one, or any function with the same
        contract: rows first, labels second, and the common keywords.
      mesh: The devices.
      axis_name: The axis of the mesh, or a tuple of them, over which the batch is spread. Other
        axes hold copies, or the classes of `classifier_loss` with its `class_axis_name`.

    Returns:
      A function of the loss's own arguments, without `axis_name`. It takes and returns global
      arrays: the value is that of the whole batch, and so are its gradients. Call it in `jax.jit`.

    Raises:
      ValueError: When called: the number of rows is no multiple of the number of devices. Fill the
        batch up with rows of `where=False`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxloss
      >>> mesh = jax.make_mesh((jax.device_count(),), ("batch",))
      >>> loss = jax.jit(jaxloss.sharded_loss(jaxloss.nca_loss, mesh, "batch"))
      >>> features = jnp.tile(jnp.array([[0.0, 0.0], [1.0, 0.0]]), (jax.device_count(), 1))
      >>> print(loss(features, jnp.zeros(len(features), int)))
      0.0
    """
    unknown = set(_as_tuple(axis_name)) - set(mesh.axis_names)
    if unknown:
        raise ValueError(
            f"`axis_name` must be among the axes of the mesh, {mesh.axis_names}, got {axis_name!r}"
        )
    fixed, function = {}, loss
    while isinstance(function, functools.partial):
        if function.args:
            raise ValueError(f"`loss` must be a partial of keywords only, got {function}")
        fixed, function = {**function.keywords, **fixed}, function.func
    signature = inspect.signature(function)
    rows = _ROWS | {*list(signature.parameters)[:2]}
    size = _size(mesh, axis_name)

    @functools.wraps(loss if inspect.isroutine(loss) else function)
    def on_mesh(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **{**fixed, **kwargs}).arguments
        class_axes = given.pop("class_axis_name", None)
        first, scored = next(iter(given.items()))
        if (number := jnp.shape(scored)[:1]) and number[0] % size:
            raise ValueError(
                f"`{first}` has {number[0]} rows, which do not spread evenly over the {size} "
                f"devices of {axis_name!r}; fill them up with rows of where=False"
            )
        plan = _Plan(mesh, axis_name, class_axes, rows, reshards=False)
        return _call(function, given, plan, _result_of(function))

    return on_mesh  # pyright: ignore[reportReturnType]


class _Plan(NamedTuple):
    """How the arguments of a function are spread over devices."""

    mesh: Any
    """A `Mesh`, or the `AbstractMesh` of traced arrays."""
    axes: AxisName | None
    """Those of the rows."""
    class_axes: AxisName | None
    """Those of the classes."""
    rows: frozenset[str]
    """Arguments `[n, ...]`."""
    reshards: bool
    """Whether arrays are moved first, which `jax.shard_map` requires on Explicit axes."""

    def spec(self, name: str) -> P:
        """The dimensions of an argument that are spread."""
        if name in self.rows or name in _REFERENCES:
            return P(self.axes)
        if name in _CLASSES and self.class_axes is not None:
            return P(*[None] * _CLASSES[name], self.class_axes)
        return P()

    def placed(self, name: str, array: Any) -> Any:
        """The array as `jax.shard_map` takes it; references are filled up."""
        array, spec = jnp.asarray(array), self.spec(name)
        missing = -array.shape[0] % _size(self.mesh, self.axes) if name in _REFERENCES else 0
        if missing:
            if self.reshards:
                array = _reshard(array, NamedSharding(self.mesh, P()))
            widths = ((0, missing),) + ((0, 0),) * (array.ndim - 1)
            array = jnp.pad(array, widths, constant_values=_REFERENCES[name])
        return _reshard(array, NamedSharding(self.mesh, spec)) if self.reshards else array


def _call(function: Any, given: Mapping[str, Any], plan: _Plan, result: Result) -> Any:
    """Calls a function by `jax.shard_map`, with its arguments by name."""
    arrays: list[Any] = []
    specs: list[P] = []

    def take(name: str, value: Any) -> Callable[[tuple[Any, ...]], Any]:
        """Takes the arrays out of an argument; returns what puts those of a device in."""
        if isinstance(value, functools.partial):
            parts = {key: take(key, part) for key, part in value.keywords.items()}
            return lambda own: functools.partial(
                value.func, *value.args, **{key: part(own) for key, part in parts.items()}
            )
        leaves, structure = jax.tree.flatten(value)
        first = len(arrays)
        taken = [leaf for leaf in leaves if _is_array(leaf)]
        arrays.extend(plan.placed(name, leaf) for leaf in taken)
        specs.extend(plan.spec(name) for _ in taken)

        def put(own: tuple[Any, ...]) -> Any:
            rest = iter(own[first : first + len(taken)])
            return jax.tree.unflatten(
                structure, [next(rest) if _is_array(leaf) else leaf for leaf in leaves]
            )

        return put

    names = dict(zip(_AXIS_NAMES, (plan.axes, plan.class_axes), strict=True))
    parameters = inspect.signature(function).parameters
    names = {name: axes for name, axes in names.items() if axes is not None and name in parameters}
    arguments = {n: take(n, value) for n, value in given.items() if n not in _AXIS_NAMES}

    def on_device(*own: Any) -> Any:
        return function(**{name: put(own) for name, put in arguments.items()}, **names)

    of_rows = result == "rows" or (result == "loss" and given.get("reduction") == "none")
    return jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=tuple(specs),
        out_specs=P(plan.axes) if of_rows else P(),
    )(*arrays)


def _explicit_mesh(arguments: Any) -> Any:
    """The mesh of the first array that is sharded over Explicit axes; None without one."""
    for leaf in _arrays(arguments):
        if isinstance(leaf, jax.Array) and any(_spec(leaf)):
            # Outside of `jax.jit`, `jax.shard_map` needs the devices.
            traced = isinstance(leaf, Tracer)
            return (jax.typeof(leaf) if traced else leaf).sharding.mesh  # pyright: ignore
    return None


def _axes_of(
    given: Mapping[str, Any], takes_class_axis: bool
) -> tuple[AxisName | None, AxisName | None]:
    """The axes over which rows and classes are spread."""
    rows, classes = (), ()
    for name, value in given.items():
        if not isinstance(value, jax.Array):
            continue
        spec = _spec(value)
        if name in _ROWS and not rows:
            rows = _as_tuple(spec[0])
        elif takes_class_axis and name in _CLASSES and not classes:
            classes = _as_tuple(spec[_CLASSES[name]])
    rows = tuple(axis for axis in rows if axis not in classes)
    return rows or None, classes or None


def _spec(array: jax.Array) -> tuple[Any, ...]:
    """The Explicit axes of every dimension."""
    return tuple(jax.typeof(array).sharding.spec)


def _as_tuple(axes: Any) -> tuple[Any, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def _size(mesh: Any, axes: AxisName | None) -> int:
    """The number of devices along the axes."""
    size = 1
    for axis in _as_tuple(axes):
        size *= mesh.shape[axis]
    return size


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


def _arrays(arguments: Any) -> Iterator[Any]:
    """All arrays in a tree, and in the keywords of its partial functions."""
    for leaf in jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, functools.partial)):
        if isinstance(leaf, functools.partial):
            yield from _arrays(leaf.keywords)
        elif _is_array(leaf):
            yield leaf


def _result_of(function: Any) -> Result:
    return getattr(function, "_result", "loss")


def _abstract(function: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """A function of arrays, and their shapes and types without a sharding."""
    leaves, structure = jax.tree.flatten((args, kwargs))

    def call(arrays: dict[int, Any]) -> Any:
        args, kwargs = jax.tree.unflatten(
            structure, [arrays.get(number, leaf) for number, leaf in enumerate(leaves)]
        )
        return function(*args, **kwargs)

    return call, {
        number: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for number, leaf in enumerate(leaves)
        if _is_array(leaf)
    }
