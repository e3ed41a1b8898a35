"""Losses of global arrays: the rows of a batch are sharded over the axes of a mesh.

A loss with `axis_name` computes the value of the whole batch from the rows of a device. This module
calls it so under `jax.shard_map`: `divided`, the decorator of all public functions, where it gets
arrays that are sharded over Explicit axes, and `sharded_loss` on request, for any mesh. Which
dimension of an argument is spread follows from its jaxtyping annotation (`dimensions.py`):

- rows `"n ..."` over the axes of the batch; those of any number of leading axes, `"*n ..."`, over
  axes for each of them;
- references `"m ..."` over the same axes, filled up with rows of `reference_where=False`;
- keys `"m ..."` of a function without `references`: the first n like the rows, the others in equal
  shares, filled up with rows of `key_where=False`;
- classes `C` over axes of their own, if the function has `class_axis_name`;
- all other arrays are copied to every device. One that has as many rows as the batch or the
  references, and no annotation, is an error that says what to write.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import Partial

from jaxloss.core import checks
from jaxloss.core.batch import AxisName
from jaxloss.core.dimensions import Call, Leaf, dims_of
from jaxloss.core.programs import Program, compiled_once, is_array, is_own, is_recorded, split

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
      function: The loss. It takes `axis_name`. Which arrays are spread follows from its jaxtyping
        annotations alone: rows of the batch are `"n ..."`, among them the first argument, and
        references or keys `"m ..."`. Keys are those of a function without `references`: the first n
        belong to the rows. Classes are `C`, if the function takes `class_axis_name`. Every other
        array is copied to every device, such as one without an annotation. So is one that goes
        through `**kwargs`: give it a parameter, if it has rows. A `Queue` needs no annotation. The
        names in annotations must exist at run time, not only for type checkers. Rows `"*n ..."` may
        have any number of leading axes, those of the first argument: the function gets and returns
        them as one.
      result: `"loss"` for a function with `reduction`, whose result is a scalar, or rows `[n]` for
        `"none"`; `"losses of classes"`, if these are `[C]`; `"rows"`, if results are always spread
        like the rows; else `"replicated"`.

    Returns:
      The function; without one, a decorator.

    Raises:
      TypeError: If a loss does not take `axis_name`.
      ValueError: If `result` is unknown. When called on a mesh: if the annotation of the first
        argument has no rows; if an array without an annotation has as many rows as the batch or the
        references, or is called `references` or `keys`; if references or keys do not spread evenly
        over the devices, and the function annotates no mask with which they are filled up.

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
    if function is None:
        return partial(divided, result=result)
    if result == "loss" and not Call(function, {}).takes("axis_name"):
        raise TypeError(f"`{function.__name__}` must take `axis_name=None`, as all losses do")
    of_library, parameters = is_own(function), inspect.signature(function).parameters.values()
    flags = [p.name for p in parameters if of_library and isinstance(p.default, bool)]
    flat = _of_flat_rows(function, result)
    plain = compiled_once(flat) if of_library else flat

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
        call = _bound(flat, args, kwargs)
        return _called(call, _spread_as(mesh, call), result)

    on_any_mesh._result = result  # pyright: ignore[reportAttributeAccessIssue]
    return on_any_mesh


def sharded_loss(loss: Function, mesh: jax.sharding.Mesh, axis_name: AxisName) -> Function:
    """A loss of global arrays whose work is divided over a mesh, for axes of any type.

    On Explicit axes, which `jax.make_mesh` makes by default in newer versions of JAX, every loss of
    `jaxloss` divides its work by itself. On Auto axes, `jax.jit` decides what a device computes,
    and gives every pair of a pairwise loss to every device. This function divides the work there:
    it calls the loss under `jax.shard_map`.

    Args:
      loss: A loss of `jaxloss`, a `functools.partial` of one, or a function of your own with
        `axis_name`. Which arguments are spread follows from its annotations, as in `divided`: at
        least the first is annotated as rows, such as `features: Float[Array, "n d"]`.
      mesh: The devices.
      axis_name: The axis of the mesh, or a tuple of them, over which the batch is spread. Other
        axes hold copies, or the classes of `classifier_loss` with its `class_axis_name`.

    Returns:
      A function of the loss's own arguments, without `axis_name`. It takes and returns global
      arrays: the value is that of the whole batch, and so are its gradients. Call it in `jax.jit`.

    Raises:
      ValueError: If `axis_name` is not an axis of the mesh. When called: the number of rows is not
        a multiple of the number of devices; add rows with `where=False`. `class_axis_name` is not
        an axis of the mesh, or its devices do not divide the classes. What `divided` raises.

    Example:
      >>> import jax, jax.numpy as jnp, jaxloss
      >>> mesh = jax.make_mesh((jax.device_count(),), ("batch",))
      >>> loss = jax.jit(jaxloss.sharded_loss(jaxloss.nca_loss, mesh, "batch"))
      >>> features = jnp.tile(jnp.array([[0.0, 0.0], [1.0, 0.0]]), (jax.device_count(), 1))
      >>> print(loss(features, jnp.zeros(len(features), int)))
      0.0
    """
    _check_axes("axis_name", axis_name, mesh)
    fixed = loss if isinstance(loss, partial) else partial(loss)
    function: Any = fixed.func

    @functools.wraps(function)
    def on_mesh(*args: Any, **kwargs: Any) -> Any:
        kwargs = {**fixed.keywords, **kwargs}
        class_axes = kwargs.pop("class_axis_name", None)
        _check_axes("class_axis_name", class_axes, mesh)
        spread = _Spread(mesh, axis_name, class_axes)
        call = _bound(function, (*fixed.args, *args), kwargs)
        return _called(call, spread, getattr(function, "_result", "loss"))

    return on_mesh  # pyright: ignore[reportReturnType]


def _check_axes(name: str, axes: AxisName | None, mesh: jax.sharding.Mesh) -> None:
    if set(_as_tuple(axes)) - set(mesh.axis_names):
        raise ValueError(
            f"`{name}` must be among the axes of the mesh, {mesh.axis_names}, got {axes!r}"
        )


def _of_flat_rows(function: Any, result: Result) -> Any:
    """Returns a function that takes and returns rows `"*n ..."` of any number of leading axes."""
    signature = inspect.signature(function)
    first = next(iter(signature.parameters))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        scored: Any = args[0] if args else kwargs.get(first)
        leading = Call(function, {first: scored}).leading()
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:  # Python's own error of the call names the function.
            bound = None
        if leading == 1 or leading < 0 or bound is None:
            return function(*args, **kwargs)
        arguments, shape = bound.arguments, scored.shape[:leading]
        number = math.prod(shape)
        for name, array, fits in Call(function, dict(arguments)).rows():
            if not fits or array.shape[:leading] != shape:
                hint = "" if leading else f"; for one sample, pass {first}[None], {name}[None]"
                raise ValueError(
                    f"`{name}` must have the leading axes {shape} of `{first}` {scored.shape}, "
                    f"got {array.shape}{hint}"
                )
            arguments[name] = array.reshape(number, *array.shape[leading:])
        try:
            found = function(**arguments)
        except (TypeError, ValueError) as error:
            error.add_note(f"The leading axes {shape} of `{first}` are flattened to {number} rows.")
            raise
        if not _is_of_rows(Call(function, arguments), result):
            return found
        # Results without an axis are metrics.
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]) if x.ndim else x, found)

    return call


def _bound(function: Any, args: Any, kwargs: Any) -> Call:
    """Returns a call without the names of axes."""
    signature = inspect.signature(function)
    signature.bind(*args, **kwargs)  # Raises the error of a wrong number of arguments.
    found = dict(zip(signature.parameters, args, strict=False)) | kwargs
    return Call(function, _as_pytree({k: x for k, x in found.items() if k not in _AXIS_NAMES}))


def _as_pytree(tree: Any) -> Any:
    """Returns a tree whose partial functions are pytrees of their arguments, too."""

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, partial):
            return leaf
        return Partial(leaf.func, *_as_pytree(leaf.args), **_as_pytree(leaf.keywords))

    return jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, partial))


def _explicit_mesh(arguments: Any) -> tuple[Any, bool]:
    """The mesh of the first array on Explicit axes, and whether it is sharded; None without one.

    Arrays that are sharded come first.
    """
    arrays = [x for x in jax.tree.leaves(_as_pytree(arguments)) if isinstance(x, jax.Array)]
    explicit = [x for x in arrays if AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types]
    if not explicit:
        return None, False
    array: Any = max(explicit, key=lambda x: any(jax.typeof(x).sharding.spec))
    kind = jax.typeof(array).sharding
    # Outside of `jax.jit`, `jax.shard_map` needs the devices.
    return kind.mesh if isinstance(array, Tracer) else array.sharding.mesh, any(kind.spec)


class _Spread(NamedTuple):
    """How the arguments of a function are spread over devices."""

    mesh: Any
    """A `Mesh`, or the `AbstractMesh` of traced arrays."""
    axes: AxisName | None
    """Those of the rows."""
    class_axes: AxisName | None
    """Those of the classes."""
    further: tuple[AxisName | None, ...] = ()
    """Those of the second leading axis of the rows, and of the next ones."""

    @property
    def size(self) -> int:
        """The number of devices that have different rows."""
        return math.prod(self.mesh.shape[axis] for axis in _as_tuple(self.axes))

    def spec(self, leaf: Leaf) -> P:
        """The dimensions of an array that are spread."""
        over: dict[Any, Any] = {"n": self.axes, "m": self.axes, "C": self.class_axes}
        over |= {f"n{k}": axes for k, axes in enumerate(self.further, 1)}
        return P(*(over.get(size) for size in leaf.sizes))

    def placed(self, leaf: Leaf, spec: P) -> jax.Array:
        """The array as `jax.shard_map` takes it: on Explicit axes, it must be sharded so."""
        array = checks.as_array(leaf.name, leaf.value)
        if AxisType.Explicit not in self.mesh.axis_types:
            return array
        # Only the former works outside of the context of a mesh, only the latter without devices.
        move = jax.device_put if isinstance(self.mesh, jax.sharding.Mesh) else _reshard
        return move(array, NamedSharding(self.mesh, spec))


def _spread_as(mesh: Any, call: Call) -> _Spread:
    """Returns how rows and classes are spread: as in the first array that is sharded so."""
    sizes = ("n", *(f"n{k}" for k in range(1, call.leading())))
    found: dict[str | None, tuple[Any, ...]] = dict.fromkeys((*sizes, "C"), ())
    for leaf in call.leaves():
        spec = jax.typeof(leaf.value).sharding.spec if isinstance(leaf.value, jax.Array) else ()
        for size, axes in zip(leaf.sizes, spec, strict=False):
            found[size] = found.get(size) or _as_tuple(axes)
    classes = found["C"] if "class_axis_name" in inspect.signature(call.function).parameters else ()
    taken, axes = set(classes), []
    for size in sizes:
        axes.append(tuple(axis for axis in found[size] if axis not in taken) or None)
        taken.update(found[size])
    return _Spread(mesh, axes[0], classes or None, tuple(axes[1:]))


def _as_tuple(axes: Any) -> tuple[Any, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def _called(call: Call, spread: _Spread, result: Result) -> Any:
    """Calls a function on every device. Errors have the shapes of the whole batch."""
    try:
        _check_classes(call, spread)
        prepared = _prepared(call, spread, _num_rows(call, spread, result))
        of_rows = tuple(axis for axes in (spread.axes, *spread.further) for axis in _as_tuple(axes))
        for name, axes in zip(_AXIS_NAMES, (of_rows or None, spread.class_axes), strict=True):
            if axes is not None and call.takes(name):
                prepared.arguments[name] = axes
        return _mapped(prepared, spread, _out_spec(call, spread, result))
    except (IndexError, TypeError, ValueError) as error:
        raise _error_of_whole_batch(call) or error from None


def _error_of_whole_batch(call: Call) -> Exception | None:
    """Returns the error of the function itself, if it has one."""
    leaves, structure = jax.tree.flatten(call.arguments)
    # Those of NumPy stay as they are, as some of them have no shape and type in JAX.
    which = [k for k, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def of_arrays(*arrays: Any) -> Any:
        found = dict(zip(which, arrays, strict=True))
        return call.function(**structure.unflatten(found.get(k, x) for k, x in enumerate(leaves)))

    try:
        shapes = (jax.ShapeDtypeStruct(leaves[k].shape, leaves[k].dtype) for k in which)
        jax.eval_shape(of_arrays, *shapes)
    except Exception as error:
        return error


def _num_rows(call: Call, spread: _Spread, result: Result) -> int | None:
    """Returns the number of rows of the batch, which must spread evenly; None without rows."""
    rows, first = call.lengths("n"), next(iter(inspect.signature(call.function).parameters))
    if first not in rows and call.leading() and result != "replicated":
        raise ValueError(
            f"`{first}`, the first argument, must be annotated as rows in the signature of the "
            f'loss, such as `{first}: Float[Array, "n d"]`'
        )
    for name, number in rows.items():
        if number % spread.size:
            raise ValueError(
                f"`{name}` has {number} rows, which do not spread evenly over the {spread.size} "
                f"devices of {spread.axes!r}; fill them up with rows of where=False"
            )
    return next(iter(rows.values()), None)


def _check_classes(call: Call, spread: _Spread) -> None:
    parts = math.prod(spread.mesh.shape[axis] for axis in _as_tuple(spread.class_axes))
    for leaf in call.leaves() if parts > 1 else ():
        number = dict(zip(leaf.sizes, np.shape(leaf.value), strict=False)).get("C", 0)
        if number % parts:
            raise ValueError(
                f"`{leaf.name}` has {number} classes, which do not spread evenly over the {parts} "
                f"devices of {spread.class_axes!r}; add classes with a bias of −∞, which change "
                "nothing without label smoothing"
            )


def _prepared(call: Call, spread: _Spread, num_rows: int | None) -> Call:
    """Returns a call, and those of partial functions in it, with arguments that spread evenly."""
    partials = {k: x for k, x in call.arguments.items() if isinstance(x, Partial)}
    own = Call(call.function, {k: x for k, x in call.arguments.items() if k not in partials})
    _check_annotations(own, num_rows)
    own = _filled(own, spread, num_rows or 0)
    for name, x in partials.items():
        keywords = _prepared(Call(x.func, x.keywords), spread, num_rows).arguments
        own.arguments[name] = Partial(x.func, *x.args, **keywords)
    return own


def _check_annotations(call: Call, num_rows: int | None) -> None:
    """Raises for an array without an annotation that may be one of rows or references.

    Every device would get all of it, and a part of the others: values would be wrong.
    """
    numbers = {num_rows, *call.lengths("m").values()}
    for name in call.arguments.keys() - dims_of(call.function).keys():
        shape = call.arguments[name].shape if is_array(call.arguments[name]) else ()
        if numbers.intersection(shape[:1]) or (shape and name in ("references", "keys")):
            raise ValueError(
                f"`{name}` {shape} has no annotation in the signature of the loss, so every device "
                f'would have all of it; write `{name}: Shaped[Array, "n ..."]` for rows of the '
                'batch, "m ..." for references or keys, and other names for an array to copy'
            )


def _filled(call: Call, spread: _Spread, num_rows: int) -> Call:
    """Returns a call whose references or keys spread evenly, with ignored rows at the end."""
    lengths = call.lengths("m")
    number, *others = {*lengths.values()} or {0}
    if others:
        raise ValueError(f"{', '.join(lengths)} must have the same number of rows")
    parameters, mask, own = inspect.signature(call.function).parameters, "key_where", num_rows
    if "references" in parameters or "keys" not in parameters:
        mask, own = "reference_where", 0
    missing = (own - number) % spread.size
    # Fewer keys than queries are an error of the function.
    if number <= own or spread.size == 1 or not (missing or own):
        return call
    arguments = call.arguments
    if missing and arguments.get(mask) is None:
        if mask not in dims_of(call.function):
            raise ValueError(
                f"`{next(iter(lengths))}` has {number} rows, which do not spread evenly over the "
                f'{spread.size} devices; let the loss take `{mask}: Bool[Array, " m"]`, or leave '
                "out the annotation of numbers of a Queue, which every device has"
            )
        arguments = arguments | {mask: jnp.ones(number, bool)}
    # A device gets the keys of its queries, and then a share of the rest.
    parts = np.split(np.arange(number + missing), [own])
    order = np.concatenate([part.reshape(spread.size, -1) for part in parts], axis=1).reshape(-1)

    def fill(leaf: Leaf) -> Any:
        if leaf.sizes[:1] != ["m"]:
            return leaf.value
        array = spread.placed(leaf, P())
        array = jnp.pad(array, ((0, missing),) + ((0, 0),) * (array.ndim - 1))
        return array[order] if own else array

    call = Call(call.function, arguments)
    return Call(call.function, jax.tree.structure(arguments).unflatten(map(fill, call.leaves())))


def _is_of_rows(call: Call, result: Result) -> bool:
    """Whether the result of a call has a value for each row."""
    reduction = inspect.signature(call.function).parameters.get("reduction")
    is_none = call.arguments.get("reduction", getattr(reduction, "default", None)) == "none"
    return result == "rows" or (result == "loss" and is_none)


def _out_spec(call: Call, spread: _Spread, result: Result) -> P | tuple[P, P]:
    spec = P(spread.axes, *spread.further) if _is_of_rows(call, result) else P()
    metrics = call.arguments.get("metrics")  # Beside the loss, the same on every device.
    return (spec, P()) if isinstance(metrics, bool | np.bool_) and metrics else spec


def _mapped(call: Call, spread: _Spread, out_spec: Any) -> Any:
    """Calls a function by `jax.shard_map`."""
    program, leaves = split(*call)[0], list(call.leaves())
    arrays = [leaves[k] for k in program.which]
    specs = tuple(map(spread.spec, arrays))
    how = (program, spread.mesh, specs, out_spec)
    # Where operations are recorded, a function among the options may hold traced arrays: not kept.
    try:
        on_devices = (_on_devices.__wrapped__ if is_recorded() else _on_devices)(*how)
    except TypeError:  # An argument that is not hashable.
        on_devices = _on_devices.__wrapped__(*how)
    return on_devices(*map(spread.placed, arrays, specs))


@functools.lru_cache(maxsize=128)
def _on_devices(program: Program, mesh: Any, specs: Any, out_spec: Any) -> Callable[..., Any]:
    run = jax.shard_map(program.of_arrays(), mesh=mesh, in_specs=specs, out_specs=out_spec)
    # Outside of `jax.jit`, it would compile every operation of every call by itself.
    return run if is_recorded() else jax.jit(run)
