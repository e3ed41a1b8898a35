"""Static checks of arguments: they run at trace time, on shapes and dtypes alone."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

REDUCTIONS = ("mean", "sum", "none")


def _as_array(name: str, value: Any) -> Array:
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            f"`{name}` must be a JAX or NumPy array, got {type(value).__name__}; "
            "convert it with jnp.asarray"
        )
    return jnp.asarray(value)


def floating(name: str, value: Any, shape: str) -> Array:
    """`value` as an array of floats whose rank is the number of words in `shape`."""
    array = _as_array(name, value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"`{name}` must hold floats, got dtype {array.dtype}")
    _rank(name, array, shape)
    return array


def _rank(name: str, array: Array, shape: str) -> None:
    axes = shape.split()
    if array.ndim != len(axes):
        raise ValueError(f"`{name}` must have shape [{', '.join(axes)}], got {array.shape}")
    # An empty batch is a batch of nothing; features and classes there must be.
    if any(size == 0 and axis != "n" for size, axis in zip(array.shape, axes, strict=True)):
        raise ValueError(
            f"`{name}` must have shape [{', '.join(axes)}] and only n may be 0, got {array.shape}"
        )


def integers(name: str, value: Any, shape: str) -> Array:
    """`value` as integers, at least 32 bits wide, of the rank of `shape`."""
    array = _as_array(name, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`{name}` must hold integers, got dtype {array.dtype}")
    _rank(name, array, shape)
    return array.astype(jnp.int32) if array.dtype.itemsize < 4 else array


def columns(name: str, value: Any, shape: str, dim: int, source: str) -> Array:
    """`value` as floats, a column of length `dim` (as in `source`) for each class or prototype."""
    array = floating(name, value, shape)
    if array.shape[0] != dim:
        raise ValueError(
            f"`{name}` must have shape [{', '.join(shape.split())}] with d = {dim} as in "
            f"{source}, got {array.shape}"
        )
    return array


def same_rows(name: str, array: Array, other_name: str, other: Array) -> None:
    """Raises unless both arrays have as many rows."""
    if array.shape[0] != other.shape[0]:
        raise ValueError(
            f"`{name}` has {array.shape[0]} rows (shape {array.shape}) where `{other_name}` has "
            f"{other.shape[0]} (shape {other.shape}); they must describe the same samples"
        )


def class_labels(labels: Any, scored_name: str, scored: Array) -> Array:
    """Integer labels [n], one for every row of `scored`, at least 32 bits wide."""
    array = _as_array("labels", labels)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`labels` must hold integer class indices, got dtype {array.dtype}")
    _rank("labels", array, "n")
    same_rows("labels", array, scored_name, scored)
    return array.astype(jnp.int32) if array.dtype.itemsize < 4 else array


def class_targets(name: str, targets: Any, scored_name: str, scored: Array) -> Array:
    """Multi-hot targets [n, C] of the shape of `scored`, in its dtype."""
    array = _as_array(name, targets)
    if array.shape != scored.shape:
        raise ValueError(
            f"multi-hot `{name}` must have the shape of `{scored_name}`, {scored.shape}, "
            f"got {array.shape}"
        )
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"multi-hot `{name}` must be bool, integers or floats, got {array.dtype}")
    return array.astype(scored.dtype)


def row_mask(where: Any, scored_name: str, scored: Array) -> Array | None:
    """`where` as bool [n], or None."""
    if where is None:
        return None
    array = _as_array("where", where)
    if array.dtype != jnp.bool_:
        raise TypeError(f"`where` must be bool, got dtype {array.dtype}")
    _rank("where", array, "n")
    same_rows("where", array, scored_name, scored)
    return array


def classifier(features: Array, weights: Any, bias: Any = None) -> tuple[Array, Array | None]:
    """The classifier's weights [d, C] and bias [C] that fit `features` [n, d]."""
    weights = floating("weights", weights, "d C")
    if weights.shape[0] != features.shape[1]:
        raise ValueError(
            f"`weights` must have shape [d, C] with d = {features.shape[1]} as in `features` "
            f"{features.shape}, got {weights.shape}; a Flax `kernel` has this layout, "
            "a PyTorch `weight` is its transpose"
        )
    if bias is not None:
        bias = floating("bias", bias, "C")
        if bias.shape[0] != weights.shape[1]:
            raise ValueError(
                f"`bias` must have one number for each of the {weights.shape[1]} classes of "
                f"`weights` {weights.shape}, got shape {bias.shape}"
            )
    return weights, bias


def feature_groups(groups: Any, features: Array) -> Array:
    """The group of every one of the `features` [n, d], at least 32 bits wide."""
    array = _as_array("groups", groups)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`groups` must hold integers, 0 to G−1, got dtype {array.dtype}")
    if array.shape != features.shape:
        raise ValueError(
            f"`groups` must have the shape of `features`, {features.shape}, got {array.shape}; "
            "broadcast groups that all samples share with jnp.broadcast_to"
        )
    return array.astype(jnp.int32) if array.dtype.itemsize < 4 else array


def group_count(num_groups: Any, dim: Any) -> None:
    """Raises unless d features can be split into that many groups."""
    positive_count("num_groups", num_groups)
    positive_count("dim", dim)
    if num_groups > dim:
        raise ValueError(
            f"`num_groups` must be at most the number of features, {dim}, got {num_groups}"
        )


def choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises unless `value` is one of the choices."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}")


def reduction(value: str) -> None:
    """Raises unless `value` names a reduction."""
    choice("reduction", value, REDUCTIONS)


def in_range(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
) -> Any:
    """The hyperparameter `value`, checked: a Python float, which widens no array it meets.

    A traced value cannot be checked and is handed back as it is.
    """
    if isinstance(value, Tracer) and value.ndim == 0:
        return value
    wanted = ["finite"]
    wanted += [] if above is None else [f"above {above}"]
    wanted += [] if at_least is None else [f"at least {at_least}"]
    wanted += [] if below is None else [f"below {below}"]
    text = f"`{name}` must be a number, {' and '.join(wanted)}, got {value!r}"
    if isinstance(value, str | bytes | Tracer) or np.ndim(value) != 0:
        raise TypeError(text)
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(text) from error
    if (
        not math.isfinite(number)
        or (above is not None and number <= above)
        or (at_least is not None and number < at_least)
        or (below is not None and number >= below)
    ):
        raise ValueError(text)
    return number


def positive_count(name: str, value: Any) -> None:
    """Raises unless `value` is an integer of at least one."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be a Python integer, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}")
