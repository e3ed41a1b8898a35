"""Which dimension of an argument is one of rows, references or classes: what annotations say.

Only the jaxtyping annotations of the function itself count, and, of a named tuple such as a
`Queue`, those of its fields. The name of a parameter and its place say nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from jax.tree_util import Partial


class Leaf(NamedTuple):
    """A leaf of the arguments of a function."""

    name: str
    """Of the parameter."""
    value: Any
    sizes: list[str | None]
    """Of each dimension of an array: `"n"` of rows, `"m"` of references, `"C"` of classes, or None.

    Rows and references are the first dimension. So the second one of a mask `[n, m]` is None. Of
    rows of several leading axes, the further ones are `"n1"`, `"n2"`, and so on.
    """


class Call(NamedTuple):
    """A function and its arguments by name, with partial functions as pytrees."""

    function: Any
    arguments: dict[str, Any]

    def takes(self, name: str) -> bool:
        """Whether the function has a parameter of this name, or passes on all that it gets."""
        parameters = inspect.signature(self.function).parameters
        return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def leaves(self) -> Iterator[Leaf]:
        """The leaves of the arguments, as `jax.tree.leaves` orders them.

        Those of a `Partial` are known by the annotations of its own function.
        """
        known, leading = dims_of(self.function), self.leading()
        for name, value in sorted(self.arguments.items()):
            if isinstance(value, Partial):
                yield from (Leaf(name, x, []) for x in jax.tree.leaves(value.args))
                yield from Call(value.func, value.keywords).leaves()
                continue
            fields = dims_of(type(value)) if hasattr(value, "_fields") else {}
            for path, leaf in jax.tree.leaves_with_path(value):
                dims = fields.get(path[0].name, ()) if fields else known.get(name, ())
                yield Leaf(name, leaf, _sizes(dims, np.ndim(leaf), leading))

    def leading(self) -> int:
        """The number of leading axes of the rows: 1, if these are not annotated as `"*n ..."`."""
        first = next(iter(inspect.signature(self.function).parameters))
        names = dims_of(self.function).get(first, ("",))[0].split()
        rank = getattr(self.arguments.get(first), "ndim", None)
        return 1 if names[:1] != ["*n"] or rank is None else rank - len(names) + 1

    def rows(self) -> Iterator[tuple[str, Any, bool]]:
        """The arrays that are annotated as `"*n ..."`, by name, and whether they have such a rank.

        Without a leading axis, `[C]` does not fit `"*n"` or `"*n C"`: it may be meant as `[n]`.
        """
        known, leading = dims_of(self.function), self.leading()
        for name, value in self.arguments.items():
            ranks = [len(x.split()) - 1 for x in known.get(name, ()) if x.split()[:1] == ["*n"]]
            if ranks and isinstance(value, jax.Array | np.ndarray | np.generic):
                yield name, value, value.ndim - leading in (ranks if leading else ranks[:1])

    def lengths(self, size: str) -> dict[str, int]:
        """The numbers of rows of the arguments whose first dimension has this name."""
        of_rows = (leaf for leaf in self.leaves() if leaf.sizes[:1] == [size])
        return {leaf.name: np.shape(leaf.value)[0] for leaf in of_rows}


def _sizes(dims: tuple[str, ...], rank: int, leading: int = 1) -> list[str | None]:
    rows = ["n", *(f"n{k}" for k in range(1, leading))][: max(leading, 0)]
    found = [
        [x for name in names.split() for x in (rows if name == "*n" else [name])] for names in dims
    ]
    fitting = [names for names in found if len(names) == rank or any(x[0] in "*." for x in names)]
    names = [*fitting, *found, []][0][:rank]  # Without one that fits, the function has an error.
    spread = {"C", *rows[1:]}
    return [x if x in spread or (x in ("n", "m") and not k) else None for k, x in enumerate(names)]


@functools.lru_cache(maxsize=256)
def dims_of(owner: Any) -> dict[str, tuple[str, ...]]:
    """Returns the dimensions of the parameters of a function, or of the fields of a named tuple.

    They are those of its annotation, such as `"n d"`, or of several ranks. Parameters without any
    are left out.
    """
    parameters = inspect.signature(owner).parameters.values()
    found = {p.name: _dims(_evaluated(p.annotation, owner)) for p in parameters}
    return {name: dims for name, dims in found.items() if dims}


def _evaluated(hint: Any, owner: Any) -> Any:
    """Returns an annotation that may be a string; None if only type checkers know its names."""
    hint = getattr(hint, "__forward_arg__", hint)  # Named tuples wrap strings.
    if not isinstance(hint, str):
        return hint
    names = getattr(inspect.unwrap(owner), "__globals__", None)
    try:
        return eval(hint, names or vars(sys.modules[owner.__module__]))
    except Exception:
        return None


def _dims(hint: Any) -> tuple[str, ...]:
    """Returns the dimensions of the arrays in an annotation."""
    if hasattr(hint, "dim_str"):
        return (hint.dim_str,)
    return tuple(dims for kind in get_args(hint) for dims in _dims(kind))
