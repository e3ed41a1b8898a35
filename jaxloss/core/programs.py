"""Calls outside of `jax.jit`, which compile once.

JAX compiles a loop anew for each call of a function outside of `jax.jit`, because the body is a new
function each time, and keeps the program. So a public function is compiled there as a whole, once
for its options, shapes and dtypes. Numbers, such as temperatures, are constants of the program; if
one changes, it becomes an argument. Inside of `jax.jit`, a function is called as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.tree_util import Partial

from jaxloss.core import checks

Function = TypeVar("Function", bound=Callable[..., Any])

_KEPT = 16
"""Of how many options, the latest, a function keeps its programs."""
_CONSTANTS = (bool, int, float, complex, str, np.generic, np.dtype)


@dataclasses.dataclass(frozen=True)
class Program:
    """A call without its arrays. Equal ones compute the same."""

    function: Any
    structure: Any
    """Of the arguments by name, with partial functions as pytrees."""
    which: tuple[int, ...]
    """The leaves of the arguments that are arrays."""
    keys: tuple[Any, ...]
    """Of the other leaves. Equal ones have equal keys."""
    others: tuple[Any, ...] = dataclasses.field(compare=False)

    def of_arrays(self, traced: tuple[int, ...] = ()) -> Callable[..., Any]:
        """Returns the function of the arrays, after those of the other leaves that are traced."""

        def call(*arrays: Any) -> Any:
            others = list(self.others)
            for place, number in zip(traced, arrays, strict=False):
                others[place] = number
            found, rest = dict(zip(self.which, arrays[len(traced) :], strict=True)), iter(others)
            number = self.structure.num_leaves
            leaves = [found[k] if k in found else next(rest) for k in range(number)]
            return self.function(**jax.tree.unflatten(self.structure, leaves))

        call.__name__ = getattr(self.function, "__name__", "call")  # In profiles.
        return call


class _Compiled:
    """A program with the numbers of its first call; those that change are its arguments."""

    def __init__(self, program: Program) -> None:
        self.first = program
        self.programs: dict[tuple[int, ...], Callable[..., Any]] = {}

    def __call__(self, others: tuple[Any, ...], arrays: list[Any]) -> Any:
        changed = []
        for place, (before, now) in enumerate(zip(self.first.others, others, strict=True)):
            if isinstance(before, checks.Known) and before != now:
                if not before.allows(now):
                    raise ValueError(f"{now} may be out of range")
                changed.append(place)
        places = tuple(changed)
        if places not in self.programs:
            self.programs[places] = jax.jit(self.first.of_arrays(places))
        return self.programs[places](*(float(others[place]) for place in places), *arrays)


def split(function: Any, arguments: Mapping[str, Any]) -> tuple[Program, list[Any]]:
    """Returns the program of a call, and the arrays among the leaves of its arguments."""
    leaves, structure = jax.tree.flatten(dict(arguments))
    which = tuple(k for k, leaf in enumerate(leaves) if is_array(leaf))
    others = tuple(leaf for leaf in leaves if not is_array(leaf))
    program = Program(function, structure, which, tuple(map(_key, others)), others)
    return program, [leaves[k] for k in which]


def _key(leaf: Any) -> Any:
    """Returns what tells a leaf from others. 1 is not True. A number that may change has no value.

    A function that is defined anew for each call, such as a lambda in the body of a loss, is what
    its code is, and what it reads. The program keeps the function, and so its code, of which there
    is only one at this place.
    """
    if isinstance(leaf, partial):
        keywords = tuple((name, _key(value)) for name, value in leaf.keywords.items())
        return partial, _key(leaf.func), *map(_key, leaf.args), keywords
    read = None if is_own(leaf) else _read(leaf)
    if read is None:
        return type(leaf), None if isinstance(leaf, checks.Known) else leaf
    return id(leaf.__code__), *map(_key, read)


def is_own(function: Any) -> bool:
    """Whether a function is one of the library. A decorator copies its module, not its globals."""
    module = getattr(function, "__globals__", {}).get("__name__", "")
    if module.startswith("jaxtyping."):  # Its import hook decorates all functions of a package.
        module = function.__module__
    return module.startswith("jaxloss.")


def _read(function: Any, seen: frozenset[Any] = frozenset()) -> tuple[Any, ...] | None:
    """Returns the constants and functions that a function reads besides its arguments.

    None if it may read something that changes, or is no plain function.
    """
    if not inspect.isfunction(function) or function in seen:
        return None
    codes = [function.__code__]
    for code in codes:
        codes += [inner for inner in code.co_consts if inspect.iscode(inner)]
    names = {name for code in codes for name in code.co_names}
    try:
        read = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # Not assigned yet.
        return None
    read += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    read += [function.__globals__[name] for name in sorted(names & function.__globals__.keys())]
    read = [x for x in read if not (inspect.ismodule(x) and x.__name__ in _PURE_MODULES)]
    for value in read:
        known = isinstance(value, _CONSTANTS) or is_own(value)
        if not known and _read(value, seen | {function}) is None:
            return None
    return tuple(read)


_PURE_MODULES = ("jax", "jax.numpy", "jax.nn", "jax.lax", "numpy", "math", "jaxloss")


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, of JAX or of NumPy."""
    return isinstance(leaf, (jax.Array, np.ndarray))


def is_recorded() -> bool:
    """Whether operations are recorded, as in `jax.jit`, and not run: even those on constants are.

    Transformations outside of `jax.jit`, such as `jax.grad`, run them.
    """
    return isinstance(lax.full((), 0.0), Tracer)


def compiled_once(function: Function, *, of_statistics: bool = False) -> Function:
    """Returns a function of the library that is compiled where operations are not recorded.

    Where it cannot be, the function is called as it is. So its errors are its own, of the arguments
    as they are given.

    Args:
      function: Its arguments are arrays, constants and functions.
      of_statistics: Whether its arguments hold functions of others, as those of pairs do. Scalar
        arrays are then no hyperparameters, whose range is checked.
    """
    signature = inspect.signature(function)
    compiled = functools.lru_cache(maxsize=_KEPT)(_Compiled)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_recorded():
            try:
                arguments = signature.bind(*args, **kwargs).arguments
                program, arrays = split(function, _checked(arguments, of_statistics))
                return compiled(program)(program.others, arrays)
            except Exception:
                pass
        return function(*args, **kwargs)

    return call  # pyright: ignore[reportReturnType]


def _checked(arguments: Mapping[str, Any], of_statistics: bool) -> dict[str, Any]:
    """Returns the arguments as arrays, constants, and pytrees of them.

    Raises an exception for what must not be compiled: arguments of which a traced one hides an
    error, and functions of others, which may read something that changes. Those of statistics are
    looked at.
    """

    def function(value: Any) -> Any:
        plain = value.func if isinstance(value, partial) else value
        if not is_own(plain) and (not of_statistics or _read(plain) is None):
            raise TypeError(f"{value} may read something that changes")
        return value

    def checked(name: str, value: Any) -> Any:
        if isinstance(value, partial):
            args = (checked(name, arg) for arg in value.args)
            keywords = _checked(value.keywords, of_statistics)
            return Partial(function(value.func), *args, **keywords)
        if not of_statistics and is_array(value) and _is_known_number(value):
            value = np.asarray(value)[()]
        return jax.tree.map(partial(leaf, name), value)

    def leaf(name: str, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return checks.as_array(name, value)
        if not isinstance(value, (jax.Array, *_CONSTANTS)):
            return function(value)
        return checks.Known(float(value)) if isinstance(value, float | np.floating) else value

    return {name: checked(name, value) for name, value in arguments.items()}


def _is_known_number(array: Array | np.ndarray) -> bool:
    """Whether an array is a hyperparameter of which the value is known."""
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return is_float and not array.ndim and not isinstance(array, Tracer)
