"""Losses of global arrays: the rows of a batch are sharded over the axes of a mesh.

A loss with `axis_name` computes the value of the whole batch from the rows of a device. This module
calls it so under `jax.shard_map`: `divided`, the decorator of all public functions, where it gets
arrays that are sharded over Explicit axes, and `sharded_loss` on request, for any mesh. Which
dimension of an argument is spread follows from its name, which is the same in all losses:

- rows `[n, ...]` over the axes of the batch;
- keys `[m, ...]`: the first n like the rows, the others in equal shares;
- references `[m, ...]` over the same axes, filled up with rows that are ignored;
- the classes of a classifier, `[d, C]`, `[d, C, K]` and `[C]`, over axes of their own, as
  `class_axis_name`;
- all other arrays are copied to every device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey, Partial

from jaxloss.core import checks
from jaxloss.core.batch import AxisName

Result: TypeAlias = Literal["loss", "losses of classes", "rows", "replicated"]
"""What a function returns: with `"loss"`, rows for `reduction="none"`, and else a scalar."""
Function = TypeVar("Function", bound=Callable[..., Any])

_ROWS = frozenset(
    {
        "features",
        "first",
        "second",
        "logits",
        "labels",
        "targets",
        "groups",
        "where",
        "sample_weights",
        "sample_margin",
        "sample_angular_margin",
        "queries",
        "keys",
        "key_where",
        "ids",
    }
)
_REFERENCES = ("references", "reference_labels", "reference_where")
"""Arguments `[m, ...]`."""
_KEYS = ("keys", "key_where")
"""Arguments `[m, ...]` whose first n rows belong to the rows of the batch."""
_CLASSES = {"weights": 1, "bias": 0, "margin": 0, "angular_margin": 0}
"""Arguments with a dimension of classes, unless they are numbers."""

_AXIS_NAMES = ("axis_name", "class_axis_name")

_reshard = getattr(jax, "reshard", None) or jax.sharding.reshard  # The latter before JAX 0.8.


def divided(result: Result = "loss") -> Callable[[Function], Function]:
    """Decorates a function of rows, so that devices divide the work on a mesh of Explicit axes.

    Signature, help and errors stay as they are. Without arrays that are sharded over Explicit axes,
    the function is called as it is.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        flags = [k for k, value in signature.parameters.items() if isinstance(value.default, bool)]

        @functools.wraps(function)
        def on_any_mesh(*args: Any, **kwargs: Any) -> Any:
            for name in flags:
                checks.flag(name, kwargs.get(name, False))
            mesh, is_sharded = _explicit_mesh((args, kwargs))
            if mesh is None or any(kwargs.get(name) is not None for name in _AXIS_NAMES):
                return function(*args, **kwargs)
            if not is_sharded and isinstance(mesh, AbstractMesh):
                # Arrays that the function makes must be on the mesh, too.
                with jax.sharding.use_abstract_mesh(mesh):
                    return function(*args, **kwargs)
            with _errors_of(function, args, kwargs):
                given = signature.bind(*args, **kwargs).arguments
                axes, class_axes = _axes_of(given, "class_axis_name" in signature.parameters)
                return _call(function, given, _Plan(mesh, axes, class_axes), result)

        on_any_mesh._result = result  # pyright: ignore[reportAttributeAccessIssue]
        return on_any_mesh  # pyright: ignore[reportReturnType]

    return decorate


def sharded_loss(loss: Function, mesh: jax.sharding.Mesh, axis_name: AxisName) -> Function:
    """A loss of global arrays whose work is divided over a mesh, for axes of any type.

    On Explicit axes, which `jax.make_mesh` makes by default in newer versions of JAX, every loss of
    `jaxloss` divides its work by itself. On Auto axes, `jax.jit` decides what a device computes,
    and gives every pair of a pairwise loss to every device. This function divides the work there:
    it calls the loss under `jax.shard_map`.

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
    result = getattr(function, "_result", None)
    # Of a loss of one's own, only the places of its arguments are known.
    rows = _ROWS if result else _ROWS | {*list(signature.parameters)[:2]}
    size = _size(mesh, axis_name)

    @functools.wraps(loss if inspect.isroutine(loss) else function)
    def on_mesh(*args: Any, **kwargs: Any) -> Any:
        kwargs = {**fixed, **kwargs}
        plan = _Plan(mesh, axis_name, kwargs.pop("class_axis_name", None), rows)
        with _errors_of(function, args, kwargs):
            given = signature.bind(*args, **kwargs).arguments
            first, scored = next(iter(given.items()))
            if (number := jnp.shape(scored)[:1]) and number[0] % size:
                raise ValueError(
                    f"`{first}` has {number[0]} rows, which do not spread evenly over the {size} "
                    f"devices of {axis_name!r}; fill them up with rows of where=False"
                )
            return _call(function, given, plan, result or "loss")

    return on_mesh  # pyright: ignore[reportReturnType]


@contextmanager
def _errors_of(function: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """Raises the error of the function itself, which has the shapes of the whole batch."""
    try:
        yield
    except (IndexError, TypeError, ValueError):
        try:
            jax.eval_shape(*_abstract(function, args, kwargs))
        except Exception as error:
            raise error from None
        raise


class _Plan(NamedTuple):
    """How the arguments of a function are spread over devices."""

    mesh: Any
    """A `Mesh`, or the `AbstractMesh` of traced arrays."""
    axes: AxisName | None
    """Those of the rows."""
    class_axes: AxisName | None
    """Those of the classes."""
    rows: frozenset[str] = _ROWS
    """Arguments `[n, ...]`."""

    def spec(self, name: str, array: Any) -> P:
        """The dimensions of an argument that are spread."""
        if name in self.rows or name in _REFERENCES:
            return P(self.axes)
        if name in _CLASSES and self.class_axes is not None and np.ndim(array):
            return P(*[None] * _CLASSES[name], self.class_axes)
        return P()

    def placed(self, name: str, array: Any, spec: P) -> Array:
        """The array as `jax.shard_map` takes it: on Explicit axes, it must be sharded so."""
        array = checks.as_array(name, array)
        if AxisType.Explicit not in self.mesh.axis_types:
            return array
        sharding = NamedSharding(self.mesh, spec)
        # Only the former works outside of the context of a mesh, only the latter without devices.
        move = jax.device_put if isinstance(self.mesh, jax.sharding.Mesh) else _reshard
        return move(array, sharding)


def _call(function: Any, given: Mapping[str, Any], plan: _Plan, result: Result) -> Any:
    """Calls a function by `jax.shard_map`, with its arguments by name."""
    accepted = set(inspect.signature(function).parameters)
    named: dict[str, Any] = {k: value for k, value in given.items() if k not in _AXIS_NAMES}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
            accepted |= {"axis_name"}
    of_rows = result == "rows" or (result == "loss" and named.get("reduction") == "none")
    names = dict(zip(_AXIS_NAMES, (plan.axes, plan.class_axes), strict=True))
    names = {name: axes for name, axes in names.items() if axes is not None and name in accepted}
    paths, structure = jax.tree_util.tree_flatten_with_path(_prepared(named, plan))
    leaves = [leaf for _, leaf in paths]
    # The name of an array is that of the innermost argument, as the keyword of a partial function.
    of = [[key.key for key in path if isinstance(key, DictKey)][-1] for path, _ in paths]
    specs = [plan.spec(name, leaf) for name, leaf in zip(of, leaves, strict=True)]
    which = [k for k, leaf in enumerate(leaves) if _is_array(leaf)]
    arrays = [plan.placed(of[k], leaves[k], specs[k]) for k in which]
    others = tuple((k, type(x), x) for k, x in enumerate(leaves) if k not in which)
    program = _Program(
        function,
        tuple(names.items()),
        structure,
        tuple(which),
        others,
        plan.mesh,
        tuple(specs[k] for k in which),
        P(plan.axes) if of_rows else P(),
    )
    if any(isinstance(array, Tracer) for array in arrays):
        return program.mapped()(*arrays)
    try:
        compiled = _compiled(program)
    except TypeError:  # An argument that is not hashable.
        compiled = jax.jit(program.mapped())
    return compiled(*arrays)


class _Program(NamedTuple):
    """What a device computes: all of a call but its arrays."""

    function: Any
    names: tuple[tuple[str, AxisName], ...]
    structure: Any
    """Of the arguments, with partial functions as pytrees."""
    which: tuple[int, ...]
    """The leaves of the arguments that are arrays."""
    others: tuple[tuple[int, type, Any], ...]
    """The other leaves: their places, types and values."""
    mesh: Any
    specs: tuple[P, ...]
    out_spec: P

    def mapped(self) -> Callable[..., Any]:
        def on_device(*own: Any) -> Any:
            found = dict(zip(self.which, own, strict=True)) | {k: x for k, _, x in self.others}
            arguments = jax.tree.unflatten(self.structure, [found[k] for k in sorted(found)])
            return self.function(**arguments, **dict(self.names))

        return jax.shard_map(
            on_device, mesh=self.mesh, in_specs=self.specs, out_specs=self.out_spec
        )


@functools.lru_cache(maxsize=128)
def _compiled(program: _Program) -> Callable[..., Any]:
    """Without `jax.jit`, `jax.shard_map` would compile every operation of every call by itself."""
    return jax.jit(program.mapped())


def _prepared(arguments: Mapping[str, Any], plan: _Plan) -> dict[str, Any]:
    """Returns the arguments of a function or of a partial one as a pytree.

    References that do not spread evenly are filled up with rows that are ignored.
    """

    def prepare(value: Any) -> Any:
        if not isinstance(value, functools.partial):
            return value
        return Partial(value.func, *value.args, **_prepared(value.keywords, plan))

    found = {name: prepare(value) for name, value in arguments.items()}
    if found.get("queries") is not None and found.get("keys") is not None:
        found |= _in_shares(found, plan)
    given = {name: found[name] for name in _REFERENCES if found.get(name) is not None}
    lengths = {jnp.shape(value)[:1] for value in given.values()}
    number = next(iter(lengths), (0,))
    if len(lengths) > 1 or len(number) != 1:
        raise ValueError(f"{', '.join(given)} must have the same number of rows")
    missing = -number[0] % _size(plan.mesh, plan.axes)
    if "references" not in given or not missing:
        return found
    given.setdefault("reference_where", jnp.ones(number, bool))

    def fill(name: str, array: Any) -> Array:
        array = plan.placed(name, array, P())
        return jnp.pad(array, ((0, missing),) + ((0, 0),) * (array.ndim - 1))

    return found | {name: fill(name, value) for name, value in given.items()}


def _in_shares(found: Mapping[str, Any], plan: _Plan) -> dict[str, Any]:
    """Returns the keys so that a device gets those of its queries, and then a share of the rest.

    Shares are filled up with keys that are ignored.
    """
    given = {name: found[name] for name in _KEYS if found.get(name) is not None}
    number, num_keys = (jnp.shape(found[name])[0] for name in ("queries", "keys"))
    size = _size(plan.mesh, plan.axes)
    if num_keys <= number or number % size or size == 1:
        return given
    missing = (number - num_keys) % size
    if missing:
        given.setdefault("key_where", jnp.ones(num_keys, bool))
    rows = np.arange(num_keys + missing)
    parts = (rows[:number], rows[number:])
    order = np.concatenate([part.reshape(size, -1) for part in parts], axis=1).reshape(-1)

    def arrange(name: str, array: Any) -> Array:
        array = plan.placed(name, array, P())
        return jnp.pad(array, ((0, missing),) + ((0, 0),) * (array.ndim - 1))[order]

    return {name: arrange(name, value) for name, value in given.items()}


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


def _axes_of(
    given: Mapping[str, Any], takes_class_axis: bool
) -> tuple[AxisName | None, AxisName | None]:
    """The axes over which rows and classes are spread."""
    rows, classes = (), ()
    for name, value in given.items():
        if not isinstance(value, jax.Array):
            continue
        spec = (*_spec(value), None, None)
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


def _abstract(function: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """A function of arrays, and their shapes and types without a sharding.

    Those of NumPy stay as they are, as some of them have no shape and type in JAX.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))

    def call(arrays: dict[int, Any]) -> Any:
        args, kwargs = jax.tree.unflatten(
            structure, [arrays.get(number, leaf) for number, leaf in enumerate(leaves)]
        )
        return function(*args, **kwargs)

    return call, {
        number: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for number, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array)
    }
