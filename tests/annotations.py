"""Checks of annotations by beartype, each made once."""

import inspect
from collections.abc import Callable
from typing import Any

from beartype import beartype

_made: dict[Any, Callable[..., Any]] = {}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function without effects, which jaxtyping makes to check a signature.

    A function inside of another is defined at every call of that, and to make its check takes
    longer than to use it.
    """
    key = (function.__module__, function.__qualname__, inspect.signature(function))
    try:
        hash(key)
    except TypeError:  # A default is an array, for example.
        return beartype(function)
    if key not in _made:
        _made[key] = beartype(function)
    return _made[key]
