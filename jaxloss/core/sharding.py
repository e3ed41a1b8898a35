"""Losses of global arrays: the rows of a batch are sharded over the axes of a mesh.

A loss with `axis_name` computes the value of the whole batch from the rows of a device. This module
calls it so under `jax.shard_map`: `divided`, the decorator of all public functions, where it gets
arrays that are sharded over Explicit axes, and `sharded_loss` on request, for any mesh. Which
dimension of an argument is spread follows from its jaxtyping annotation:

- rows `"n ..."` over the axes of the batch;
- references `"m ..."` over the same axes, filled up with rows of `reference_where=False`;
- keys `"m ..."` of a function with `key_where`: the first n like the rows, the others in equal
  shares, filled up with rows of `key_where=False`;
- classes `C` over axes of their own, if the function has `class_axis_name`;
- all other arrays are copied to every device.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args, get_type_hints, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from jaxloss.core import checks
from jaxloss.core.batch import AxisName
from jaxloss.core.programs import Program, compiled_once, is_array, is_recorded, split

Result: TypeAlias = Literal["loss", "losses of classes", "rows", "replicated"]
"""What a function returns: with `"loss"`, rows for `reduction="none"`, and else a scalar."""
Function = TypeVar("Function", bound=Callable[..., Any])

_AXIS_NAMES = ("axis_name", "class_axis_name")

_reshard = getattr(jax, "reshard", None) or jax.sharding.reshard  # The latter before JAX 0.8.


@overload
def divided(function: Function) -> Function: ...
@overload
def divided(*, result: Result = "loss") -> Callable[[Function], Function]: ...
def divided(function: Any = None, *, result: Result = "loss") -> Any:
    """Decorates a loss of your own, so that devices divide its work on a mesh of Explicit axes.

    Signature, help and errors stay as they are. Without arrays that are sharded over Explicit axes,
    the function is called as it is. With them, it is called on every device with the device's part
    of the rows, and with `axis_name`.

    Args:
      function: The loss. It takes `axis_name`. Which dimension of an argument is spread follows
        from its jaxtyping annotation: rows are `"n ..."`, references `"m ..."`. Keys are `"m ..."`
        in a function without `references`: the first n belong to the rows. If no annotation begins
        with n, rows are named as the first dimension of the first argument. An argument without
        such an annotation is spread as the one of its name in the losses of `jaxloss`, and else if
        it is one of the first two. All others are copied to every device.
      result: `"loss"` for a function with `reduction`, whose result is a scalar, or rows `[n]` for
        `"none"`; `"losses of classes"`, if these are `[C]`; `"rows"`, if results are always spread
        like the rows; else `"replicated"`.

    Returns:
      The function; without one, a decorator.

    Raises:
      TypeError: If a loss does not take `axis_name`.
      ValueError: If `result` is unknown. When called: if references or keys do not spread evenly
        over the devices, and the function takes no mask with which they are filled up.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> from jax import Array
      >>> from jaxtyping import Float, Integer
      >>> from jaxloss.pairs import SUM, Statistic, compare
      >>> @jaxloss.divided
      ... def contrastive_loss(features: Float[Array, "n d"], labels: Integer[Array, " n"], *,
      ...                      reduction="mean", axis_name=None):
      ...     pairs = compare(features, labels, similarity="negative_distance", axis_name=axis_name)
      ...     def near(pair, _):
      ...         s = pair.similarity
      ...         return jnp.where(pair.same, s**2, jnp.maximum(1 + s, 0) ** 2)
      ...     (sums,) = pairs.statistics((), Statistic(SUM, near))
      ...     values = sums.positive + sums.negative
      ...     return pairs.reduce(values, jnp.ones_like(labels, bool), reduction=reduction)
      >>> print(contrastive_loss(jnp.array([[0.0], [3.0], [3.5]]), jnp.array([0, 0, 1])))
      6.1666665
    """
    checks.choice("result", result, get_args(Result))
    return partial(_divided, result) if function is None else _divided(result, function)


def _divided(result: Result, function: Function) -> Function:
    signature, is_own = inspect.signature(function), _is_own(function)
    flags = [k for k, p in signature.parameters.items() if is_own and isinstance(p.default, bool)]
    if result == "loss" and not _takes("axis_name", function):
        raise TypeError(f"`{function.__name__}` must take `axis_name=None`, as all losses do")
    plain = function
    if is_own:
        _OWN.append(function)
        plain = compiled_once(function)

    @functools.wraps(function)
    def on_any_mesh(*args: Any, **kwargs: Any) -> Any:
        for name in flags:
            checks.flag(name, kwargs.get(name, False))
        mesh, is_sharded = _explicit_mesh((args, kwargs))
        if mesh is None or any(kwargs.get(name) is not None for name in _AXIS_NAMES):
            return plain(*args, **kwargs)
        if not is_sharded and isinstance(mesh, AbstractMesh):
            # Arrays that the function makes must be on the mesh, too.
            with jax.sharding.use_abstract_mesh(mesh):
                return plain(*args, **kwargs)
        with _errors_of(function, args, kwargs):
            given = signature.bind(*args, **kwargs).arguments
            return _call(function, given, _Spread(mesh, *_axes_of(function, given)), result)

    on_any_mesh._result = result  # pyright: ignore[reportAttributeAccessIssue]
    return on_any_mesh  # pyright: ignore[reportReturnType]


_OWN: list[Any] = []
"""The decorated functions of the library, which tell what arguments of their names are."""


def _is_own(function: Any) -> bool:
    return getattr(function, "__module__", "").startswith("jaxloss.")


def _takes(name: str, function: Any) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def sharded_loss(loss: Function, mesh: jax.sharding.Mesh, axis_name: AxisName) -> Function:
    """A loss of global arrays whose work is divided over a mesh, for axes of any type.

    On Explicit axes, which `jax.make_mesh` makes by default in newer versions of JAX, every loss of
    `jaxloss` divides its work by itself. On Auto axes, `jax.jit` decides what a device computes,
    and gives every pair of a pairwise loss to every device. This function divides the work there:
    it calls the loss under `jax.shard_map`.

    Args:
      loss: A loss of `jaxloss`, a `functools.partial` of one, or any function with the same
        contract: rows first, labels second, and the common keywords. Which arguments are spread
        follows from its annotations, as in `divided`.
      mesh: The devices.
      axis_name: The axis of the mesh, or a tuple of them, over which the batch is spread. Other
        axes hold copies, or the classes of `classifier_loss` with its `class_axis_name`.

    Returns:
      A function of the loss's own arguments, without `axis_name`. It takes and returns global
      arrays: the value is that of the whole batch, and so are its gradients. Call it in `jax.jit`.

    Raises:
      ValueError: When called: the number of rows is not a multiple of the number of devices. Add
        rows with `where=False`.

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
    while isinstance(function, partial):
        if function.args:
            raise ValueError(f"`loss` must be a partial of keywords only, got {function}")
        fixed, function = {**function.keywords, **fixed}, function.func
    signature = inspect.signature(function)
    result = getattr(function, "_result", None)
    size = _size(mesh, axis_name)

    @functools.wraps(loss if inspect.isroutine(loss) else function)
    def on_mesh(*args: Any, **kwargs: Any) -> Any:
        kwargs = {**fixed, **kwargs}
        spread = _Spread(mesh, axis_name, kwargs.pop("class_axis_name", None))
        with _errors_of(function, args, kwargs):
            given = signature.bind(*args, **kwargs).arguments
            first, scored = next(iter(given.items()))
            if (number := jnp.shape(scored)[:1]) and number[0] % size:
                raise ValueError(
                    f"`{first}` has {number[0]} rows, which do not spread evenly over the {size} "
                    f"devices of {axis_name!r}; fill them up with rows of where=False"
                )
            known = _arguments_of(function)[first]
            if isinstance(known, _Argument) and known.sizes(scored)[:1] != ["n"]:
                raise ValueError(
                    f"`{first}`, the first argument, must have rows as its first dimension, "
                    f'annotated as in Float[Array, "n d"], got {" or ".join(known.dims)!r}'
                )
            return _call(function, given, spread, result or "loss")

    return on_mesh  # pyright: ignore[reportReturnType]


@contextmanager
def _errors_of(function: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Raises the error of the function itself, which has the shapes of the whole batch."""
    try:
        yield
    except (IndexError, TypeError, ValueError):
        leaves, structure = jax.tree.flatten((args, kwargs))
        # Those of NumPy stay as they are, as some of them have no shape and type in JAX.
        shapes = {
            k: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for k, leaf in enumerate(leaves)
            if isinstance(leaf, jax.Array)
        }

        def call(arrays: dict[int, Any]) -> Any:
            given = [arrays.get(k, leaf) for k, leaf in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(structure, given)
            return function(*args, **kwargs)

        try:
            jax.eval_shape(call, shapes)
        except Exception as error:
            raise error from None
        raise


@dataclasses.dataclass(frozen=True)
class _Argument:
    """What is known of an array: a leaf of the tree of arguments."""

    name: str
    dims: tuple[str, ...]
    """Its dimensions by annotation, such as `"n d"`, or those of several ranks."""

    def sizes(self, array: Any) -> list[str]:
        """The names of the dimensions."""
        number = np.ndim(array)
        for dims in self.dims:
            names = dims.split()
            if len(names) == number or any(name.startswith(("*", "...")) for name in names):
                return names[:number]
        return self.dims[0].split()[:number] if self.dims else []


@functools.lru_cache(maxsize=256)
def _arguments_of(function: Any) -> dict[str, Any]:
    """Of each parameter an `_Argument`, or a dict of them for the fields of a named tuple.

    It has the dimensions of the annotation, or of the argument of this name in the losses of the
    library. Without both, the first two arguments have rows.
    """
    annotated = _annotated_arguments(function)
    if _is_own(function):
        return annotated
    parameters = [name for name in inspect.signature(function).parameters if name != "self"]
    places = {name: _Argument(name, ("n",)) for name in parameters[:2]}
    return {**places, **_arguments_of_the_library(), **annotated}


@functools.lru_cache(maxsize=1)
def _arguments_of_the_library() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for function in _OWN:
        for name, argument in _annotated_arguments(function).items():
            before = found.setdefault(name, argument)
            if isinstance(before, _Argument) and isinstance(argument, _Argument):
                dims = tuple(dict.fromkeys(before.dims + argument.dims))
                found[name] = _Argument(name, dims)
    return found


def _annotated_arguments(function: Any) -> dict[str, Any]:
    """Returns the arguments whose annotations have dimensions, with rows that are called n."""
    parameters = inspect.signature(function).parameters.values()
    annotations = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}
    hints = {name: _evaluated(hint, function) for name, hint in annotations.items()}
    rows, first = "n", next(iter(hints.values()), None)
    begin = {dims.split()[0] for hint in hints.values() for dims in _dims(hint) if dims.split()}
    if "n" not in begin and _dims(first) and not _is_own(function):
        rows = (_dims(first)[0].split() or ["n"])[0]
    found = {name: _annotated(name, hint, rows) for name, hint in hints.items()}
    return {name: it for name, it in found.items() if isinstance(it, dict) or it.dims}


def _evaluated(hint: Any, function: Any) -> Any:
    """Returns an annotation that may be a string; None if only type checkers know its names."""
    if not isinstance(hint, str):
        return hint
    plain = inspect.unwrap(function)
    plain = plain if hasattr(plain, "__globals__") else type(plain).__call__
    try:
        return eval(hint, getattr(inspect.unwrap(plain), "__globals__", {}))
    except Exception:
        return None


def _dims(hint: Any) -> tuple[str, ...]:
    """Returns the dimensions of the arrays in an annotation."""
    if hasattr(hint, "dim_str"):
        return (hint.dim_str,)
    return tuple(dims for kind in get_args(hint) for dims in _dims(kind))


def _annotated(name: str, hint: Any, rows: str) -> Any:
    found = [dims.split() for dims in _dims(hint)]
    dims = tuple(" ".join(["n", *names[1:]] if names[:1] == [rows] else names) for names in found)
    for kind in get_args(hint) if dims else ():  # A tuple that takes the place of an array.
        if isinstance(kind, type) and hasattr(kind, "_fields"):
            fields = get_type_hints(kind)
            return {key: _annotated(name, value, rows) for key, value in fields.items()} | {
                "": dims
            }
    return _Argument(name, dims)


def _named(function: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an `_Argument` for each leaf of the arguments of a function."""
    known = _arguments_of(function)

    def of_leaves(argument: _Argument, value: Any) -> Any:
        return jax.tree.map(lambda _: argument, value)

    def of(name: str, value: Any) -> Any:
        if isinstance(value, Partial):
            return Partial(value.func, *value.args, **_named(value.func, value.keywords))
        argument = known.get(name, _Argument(name, ()))
        if not isinstance(argument, dict):
            return of_leaves(argument, value)
        if not hasattr(value, "_fields"):
            return of_leaves(_Argument(name, argument[""]), value)
        fields = (argument.get(field, _Argument(name, ())) for field in value._fields)
        return type(value)(*map(of_leaves, fields, value))

    return {name: of(name, value) for name, value in arguments.items()}


class _Spread(NamedTuple):
    """How the arguments of a function are spread over devices."""

    mesh: Any
    """A `Mesh`, or the `AbstractMesh` of traced arrays."""
    axes: AxisName | None
    """Those of the rows."""
    class_axes: AxisName | None
    """Those of the classes."""

    def spec(self, argument: _Argument, array: Any) -> P:
        """The dimensions of an argument that are spread."""
        over = {"n": self.axes, "m": self.axes, "C": self.class_axes}
        sizes = argument.sizes(array)
        # Only the first dimension is one of rows; there are many names for the others.
        found = [over.get(name) if not k or name == "C" else None for k, name in enumerate(sizes)]
        while found and found[-1] is None:
            found.pop()
        return P(*found)

    def placed(self, name: str, array: Any, spec: P) -> Array:
        """The array as `jax.shard_map` takes it: on Explicit axes, it must be sharded so."""
        array = checks.as_array(name, array)
        if AxisType.Explicit not in self.mesh.axis_types:
            return array
        sharding = NamedSharding(self.mesh, spec)
        # Only the former works outside of the context of a mesh, only the latter without devices.
        move = jax.device_put if isinstance(self.mesh, jax.sharding.Mesh) else _reshard
        return move(array, sharding)


def _call(function: Any, given: Mapping[str, Any], spread: _Spread, result: Result) -> Any:
    """Calls a function by `jax.shard_map`, with its arguments by name."""
    named: dict[str, Any] = {k: value for k, value in given.items() if k not in _AXIS_NAMES}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    default = getattr(inspect.signature(function).parameters.get("reduction"), "default", None)
    reduction = named.get("reduction", default)
    of_rows = result == "rows" or (result == "loss" and reduction == "none")
    out_spec: Any = P(spread.axes) if of_rows else P()
    metrics = named.get("metrics")
    if (
        isinstance(metrics, bool | np.bool_) and metrics
    ):  # Beside the loss, the same on every device.
        out_spec = (out_spec, P())
    arguments = _prepared(function, named, spread)
    for name, axes in zip(_AXIS_NAMES, (spread.axes, spread.class_axes), strict=True):
        if axes is not None and _takes(name, function):
            arguments[name] = axes
    program, arrays = split(function, arguments)
    of = jax.tree.leaves(_named(function, arguments))
    placed, specs = [], []
    for k, array in zip(program.which, arrays, strict=True):
        specs.append(spread.spec(of[k], array))
        placed.append(spread.placed(of[k].name, array, specs[-1]))
    how = (program, spread.mesh, tuple(specs), out_spec)
    if is_recorded():
        return _mapped(*how)(*placed)
    try:
        compiled = _compiled(*how)
    except TypeError:  # An argument that is not hashable.
        compiled = jax.jit(_mapped(*how))
    return compiled(*placed)


def _mapped(program: Program, mesh: Any, specs: tuple[P, ...], out_spec: Any) -> Callable[..., Any]:
    """Returns what all devices compute."""
    return jax.shard_map(program.of_arrays(), mesh=mesh, in_specs=specs, out_specs=out_spec)


@functools.lru_cache(maxsize=128)
def _compiled(*how: Any) -> Callable[..., Any]:
    """Without `jax.jit`, `jax.shard_map` would compile every operation of every call by itself."""
    return jax.jit(_mapped(*how))


def _prepared(function: Any, arguments: Mapping[str, Any], spread: _Spread) -> dict[str, Any]:
    """Returns the arguments of a function or of a partial one as a pytree.

    References and keys that do not spread evenly are filled up with rows that are ignored.
    """

    def prepare(value: Any) -> Any:
        if not isinstance(value, partial):
            return value
        return Partial(value.func, *value.args, **_prepared(value.func, value.keywords, spread))

    found = {name: prepare(value) for name, value in arguments.items()}
    named = _named(function, found)
    counts: dict[str, dict[str, int]] = {"n": {}, "m": {}}
    for name, value in found.items():
        if isinstance(value, Partial):
            continue
        for argument, leaf in zip(*map(jax.tree.leaves, (named[name], value)), strict=True):
            first = argument.sizes(leaf)[:1]
            if first and first[0] in counts:
                counts[first[0]].setdefault(name, np.shape(leaf)[0])
    of_references, size = counts["m"], _size(spread.mesh, spread.axes)
    if not of_references:
        return found
    number, *others = of_references.values()
    if any(other != number for other in others):
        raise ValueError(f"{', '.join(of_references)} must have the same number of rows")
    mask, num_rows = "reference_where", 0
    if not _takes("references", function) or "keys" in found:
        mask, num_rows = "key_where", next(iter(counts["n"].values()))
        if number <= num_rows or num_rows % size or size == 1:
            return found
    missing = (num_rows - number) % size
    if not missing and not num_rows:
        return found
    order = slice(None)
    if num_rows:  # A device gets the keys of its queries, and then a share of the rest.
        places = np.arange(number + missing)
        parts = (part.reshape(size, -1) for part in (places[:num_rows], places[num_rows:]))
        order = np.concatenate(list(parts), axis=1).reshape(-1)
    if missing and found.get(mask) is None:
        if not _takes(mask, function):
            raise ValueError(
                f"`{next(iter(of_references))}` has {number} rows, which do not spread evenly over "
                f"the {size} devices; let the function take `{mask}`, with which they are filled up"
            )
        found[mask], of_references[mask] = jnp.ones(number, bool), number

    def fill(argument: _Argument, array: Any) -> Any:
        if argument.sizes(array)[:1] != ["m"]:
            return array
        array = spread.placed(argument.name, array, P())
        return jnp.pad(array, ((0, missing),) + ((0, 0),) * (array.ndim - 1))[order]

    named = _named(function, {name: found[name] for name in of_references})
    return found | {name: jax.tree.map(fill, named[name], found[name]) for name in of_references}


def _explicit_mesh(arguments: Any) -> tuple[Any, bool]:
    """The mesh of the first array on Explicit axes, and whether it is sharded; None without one.

    Arrays that are sharded come first.
    """
    found = None
    for leaf in _arrays(arguments):
        if isinstance(leaf, jax.Array):
            # Outside of `jax.jit`, `jax.shard_map` needs the devices.
            kind: Any = jax.typeof(leaf).sharding
            mesh = kind.mesh if isinstance(leaf, Tracer) else getattr(leaf.sharding, "mesh", None)
            if any(kind.spec):
                return mesh, True
            if AxisType.Explicit in kind.mesh.axis_types:
                found = found or mesh
    return found, False


def _axes_of(function: Any, given: Mapping[str, Any]) -> tuple[AxisName | None, AxisName | None]:
    """The axes over which rows and classes are spread."""
    takes_class_axis = "class_axis_name" in inspect.signature(function).parameters
    found: dict[str, tuple[Any, ...]] = {"n": (), "C": ()}
    for name, argument in _named(function, given).items():
        array = given[name]
        if isinstance(array, jax.Array) and isinstance(argument, _Argument):
            spec = jax.typeof(array).sharding.spec
            for k, (size, axes) in enumerate(zip(argument.sizes(array), spec, strict=False)):
                if (size == "n" and not k) or (size == "C" and takes_class_axis):
                    found[size] = found[size] or _as_tuple(axes)
    rows = tuple(axis for axis in found["n"] if axis not in found["C"])
    return rows or None, found["C"] or None


def _as_tuple(axes: Any) -> tuple[Any, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def _size(mesh: Any, axes: AxisName | None) -> int:
    """The number of devices along the axes."""
    return math.prod(mesh.shape[axis] for axis in _as_tuple(axes))


def _arrays(arguments: Any) -> Iterator[Any]:
    """All arrays in a tree, and in the keywords of its partial functions."""
    for leaf in jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, partial)):
        if isinstance(leaf, partial):
            yield from _arrays(leaf.keywords)
        elif is_array(leaf):
            yield leaf
