"""Checks of arguments. They run at trace time and look at shapes and dtypes only.

NumPy integers of 64 bits are the exception: JAX cuts them to 32 bits, so that their values must be
small enough. Arguments typed `Any` come from the user and are not checked yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import ge, gt, le, lt
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Integer, Shaped

Number: TypeAlias = int | float | Float[Array, ""]
"""A hyperparameter: a Python number, or a scalar array that may be traced."""

AnyArray: TypeAlias = Shaped[Array, " ..."]

REDUCTIONS = ("mean", "sum", "none")

_NUMBERED = ("labels", "reference_labels", "ids", "queue.labels")
"""Arguments `[n]` or `[m]` of which it only matters which numbers are equal."""
_MASKS = {
    "where": ("features", "logits", "queries", "first", "second", "sample_weights"),
    "reference_where": ("references",),
    "key_where": ("keys", "key_bias"),
    "own_key_where": ("own_keys",),
}
"""Masks, and the arrays of which they leave out rows."""
_NUMBER_THEM = "number those of all data with np.unique(..., return_inverse=True)[1]"


def floating(name: str, value: Any, shape: str) -> Float[Array, " ..."]:
    """Returns `value` as a float array whose rank is the number of letters in `shape`."""
    return _of_kind(name, value, shape, jnp.floating, "a float dtype")


def integers(name: str, value: Any, shape: str) -> Integer[Array, " ..."]:
    """Returns `value` as an integer array of at least 32 bits, with the rank of `shape`."""
    array = _of_kind(name, value, shape, jnp.integer, "an integer dtype")
    return array.astype(jnp.int32) if array.dtype.itemsize < 4 else array


def _of_kind(name: str, value: Any, shape: str, kind: Any, text: str) -> AnyArray:
    """Returns `value` as an array of a kind of dtype. An empty `shape` stands for any."""
    array = as_array(name, value, keep_integers=kind is jnp.integer)
    if not jnp.issubdtype(array.dtype, kind):
        raise TypeError(f"`{name}` must have {text}, got {value.dtype}")
    if shape:
        _check_rank(name, array, shape)
    return array


def matching(
    name: str, value: Any, shape: str, features: Float[Array, "n d"], hint: str = ""
) -> Float[Array, " ..."]:
    """Returns `value` as a float array whose d is that of the features."""
    array = floating(name, value, shape)
    same_size(name, array, shape, "d", features.shape[1], f"`features` {features.shape}", hint)
    return array


def same_size(
    name: str, array: AnyArray, shape: str, axis: str, size: int, source: str, hint: str = ""
) -> None:
    """Raises unless an axis, one of the letters of `shape`, has its size in `source`."""
    if array.shape[shape.split().index(axis)] != size:
        raise ValueError(
            f"`{name}` must have shape {_brackets(shape)} with {axis} = {size} to match {source}, "
            f"got {array.shape}{hint}"
        )


def same_rows(name: str, array: AnyArray, other_name: str, other: AnyArray) -> None:
    """Raises unless both arrays have the same number of rows."""
    if array.shape[0] != other.shape[0]:
        raise ValueError(
            f"`{name}` and `{other_name}` must have the same number of rows, "
            f"got shapes {array.shape} and {other.shape}"
        )


def same_shape(
    name: str, array: AnyArray, other_name: str, other: AnyArray, hint: str = ""
) -> None:
    """Raises unless both arrays have the same shape."""
    if array.shape != other.shape:
        raise ValueError(
            f"`{name}` must have the shape of `{other_name}`, {other.shape}, "
            f"got {array.shape}{hint}"
        )


def class_labels(
    labels: Any,
    scored_name: str,
    scored: AnyArray,
    hint: str = "",
    *,
    name: str = "labels",
    shape: str = "n",
) -> Integer[Array, " n"]:
    """Returns the class indices of the rows of `scored`, at least 32 bits wide."""
    array = as_array(name, labels)
    if array.ndim == 2 and array.shape[0] == scored.shape[0]:
        not_multi_hot(name, array, shape=shape, hint=hint)
    array = integers(name, array, shape)
    same_rows(name, array, scored_name, scored)
    return array


def not_multi_hot(name: str, labels: Any, *, shape: str = "n", hint: str = "") -> Any:
    """Returns labels that are not checked yet, and raises if they have two axes."""
    if rank(labels) == 2:
        if labels.shape[1] > 1:
            raise ValueError(
                f"`{name}` must have shape {_brackets(shape)}, got {tuple(labels.shape)}; "
                f"class indices of one-hot {name} are {name}.argmax(1){hint}"
            )
        _check_rank(name, labels, shape)
    return labels


def same_labels(labels: Integer[Array, " n"], given: Any, dtype: Any) -> Integer[Array, " n"]:
    """Returns the labels in the dtype of those of a queue, and raises if it does not have them.

    Args:
      labels: The checked labels.
      given: The same, not checked. Where they are traced, their values are not known.
      dtype: That of the queue.
    """
    if not np.can_cast(labels.dtype, dtype):
        if isinstance(given, Tracer):
            raise TypeError(
                f"`labels` must have a dtype that fits into that of `queue.labels`, {dtype}, got "
                f"{labels.dtype}; if their values fit, pass labels.astype(jnp.{dtype})"
            )
        _check_values("labels", np.asarray(given), dtype)
    return labels.astype(dtype)


def is_soft(labels: Any) -> bool:
    """Returns whether labels are floats `[n, C]`, which no class indices are."""
    is_array = isinstance(labels, jax.Array | np.ndarray) and labels.ndim == 2
    return is_array and jnp.issubdtype(labels.dtype, jnp.floating)


def class_sets(
    labels: Any, scored_name: str, scored: AnyArray, *, name: str = "labels", shape: str = "n C"
) -> Integer[Array, "n C"]:
    """Returns the multi-hot targets of the rows of `scored` as 1, 0, and -1 for unknown."""
    array = as_array(name, labels)
    _check_rank(name, array, shape)
    not_complex(name, array)
    same_rows(name, array, scored_name, scored)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.int8)
    return (array > 0).astype(jnp.int8) - (array < 0).astype(jnp.int8)


def not_complex(name: str, array: AnyArray) -> None:
    """Raises unless an array has real numbers."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"`{name}` must be bool, integers or floats, got dtype {array.dtype}")


def row_mask(
    where: Any, scored_name: str, scored: AnyArray, *, name: str = "where", shape: str = "n"
) -> Bool[Array, " n"] | None:
    """Returns `where` as a bool array, or None."""
    if where is None:
        return None
    array = _of_kind(name, where, shape, jnp.bool_, "dtype bool")
    same_rows(name, array, scored_name, scored)
    return array


def mask_of(name: str, where: Any, shape: str, sizes: tuple[int, ...]) -> Bool[Array, "n k"]:
    """Returns a mask of several dimensions as a bool array of these sizes."""
    array = _of_kind(name, where, "", jnp.bool_, "dtype bool")
    if array.shape != sizes:
        shape = _brackets(shape)
        raise ValueError(f"`{name}` must have shape {shape} = {sizes}, got {array.shape}")
    return array


def classifier(
    features: Float[Array, "n d"], weights: Any, bias: Any = None, *, sub_centres: bool = False
) -> tuple[Float[Array, "d C *K"], Float[Array, " C"] | None]:
    """Returns the weights and the bias of a classifier of `features`.

    With `sub_centres`, a class may have several weight vectors, of shape `[d, C, K]`.
    """
    shape = "d C K" if sub_centres and rank(weights) == 3 else "d C"
    hint = "; a Flax `kernel` has this layout, a PyTorch `weight` is its transpose"
    weights = matching("weights", weights, shape, features, hint)
    if bias is not None:
        bias = floating("bias", bias, "C")
        same_size("bias", bias, "C", "C", weights.shape[1], f"`weights` {weights.shape}")
    return weights, bias


def positive_count(name: str, value: Any) -> None:
    """Raises unless `value` is an integer of at least 1."""
    static(name, value, "a Python integer")
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be a Python integer, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}")


def block_size(value: Any) -> None:
    """Raises unless `value` is None, or an integer of at least 1."""
    if value is not None:
        positive_count("block_size", value)


def static(name: str, value: Any, kind: str) -> None:
    """Raises if `value` is traced, but must be known when a function is traced."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"`{name}` must be {kind}, got a traced array; set it with functools.partial before "
            f'jax.jit, or with jax.jit(..., static_argnames="{name}")'
        )


def flag(name: str, value: Any) -> None:
    """Raises unless `value` is a bool. A string such as "False" would be true."""
    static(name, value, "a Python bool")
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"`{name}` must be a Python bool, got {value!r}")


def choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises unless `value` is one of the choices."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}")


def reduction(value: Any) -> None:
    """Raises unless `value` names a reduction."""
    choice("reduction", value, REDUCTIONS)


def no_terms(loss: str, value: Any) -> None:
    """Raises unless `value` names a reduction to a scalar."""
    reduction(value)
    if value == "none":
        raise ValueError(
            f"`reduction` must be mean or sum for {loss}, got 'none': it is not a sum over samples"
        )


class Known(float):
    """A hyperparameter whose value is known, and the limits in which it was found to be."""

    limits: set[tuple[tuple[str, int | float], ...]]

    def __new__(cls, number: float) -> Known:
        """Without limits yet."""
        known = super().__new__(cls, number)
        known.limits = set()
        return known

    def allows(self, number: float) -> bool:
        """Whether another number is in the same limits; False if they are not known."""
        return bool(self.limits) and all(_is_within(number, dict(own)) for own in self.limits)


_LIMITS = {"above": gt, "at_least": ge, "below": lt, "at_most": le}


def _is_within(number: float, limits: Mapping[str, int | float]) -> bool:
    return math.isfinite(number) and all(_LIMITS[it](number, limits[it]) for it in limits)


def in_range(
    name: str, value: Any, dtype: DTypeLike, *, hint: str = "", **limits: int | float
) -> Number:
    """Returns the checked hyperparameter as a Python float, which promotes no array.

    The limits are `above`, `at_least`, `below` and `at_most`. A traced scalar cannot be checked. It
    is returned in `dtype`, that of the computation.
    """
    if isinstance(value, Tracer) and value.ndim == 0:
        return value.astype(dtype)
    conditions = [f" and {kind.replace('_', ' ')} {limit}" for kind, limit in limits.items()]
    text = f"`{name}` must be a scalar, finite{''.join(conditions)}, got {value!r}{hint}"
    if isinstance(value, str | bytes | list | tuple | Tracer) or np.ndim(value) != 0:
        raise TypeError(text + _hint_of_param(name, value))
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(text) from error
    except (TypeError, ValueError) as error:
        raise TypeError(text + _hint_of_param(name, value)) from error
    if not _is_within(number, limits):
        raise ValueError(text)
    if isinstance(value, Known):
        value.limits.add(tuple(limits.items()))
    return number


def as_array(name: str, value: Any, *, keep_integers: bool = True) -> AnyArray:
    """Returns a JAX or NumPy array as a JAX array, of the same integers if they are meant."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        hint = _hint_of_other(name, value)
        raise TypeError(f"`{name}` must be a JAX or NumPy array, got {type(value).__name__}{hint}")
    if isinstance(value, Tracer):
        return jnp.asarray(value)
    if isinstance(value, np.ma.MaskedArray):
        hint = _hint_of_masked(name, value)
        raise TypeError(f"`{name}` must be a plain array, got a masked one; {hint}")
    try:
        array = jnp.asarray(value)
    except TypeError as error:
        text = f"`{name}` must have a dtype that JAX has, got {value.dtype}"
        raise TypeError(text + _hint_of_dtype(name, value)) from error
    if keep_integers and jnp.issubdtype(array.dtype, jnp.integer):
        narrow = jax.dtypes.canonicalize_dtype(array.dtype)
        if narrow != value.dtype:
            _check_values(name, np.asarray(value), narrow)
    return array


def rank(value: Any) -> int:
    """Returns the rank of an array; 0 of all else, which `as_array` refuses."""
    return getattr(value, "ndim", 0)


def _check_values(name: str, value: np.ndarray, dtype: Any) -> None:
    """Raises if integers lose upper bits in a dtype, as in JAX's own where x64 is not enabled."""
    if not value.size:
        return
    limits, smallest, largest = np.iinfo(dtype), int(value.min()), int(value.max())
    if limits.min <= smallest and largest <= limits.max:
        return
    hint = ""
    if name in _NUMBERED and not (value.ndim == 2 and value.shape[1] > 1):
        hint = f"{_NUMBER_THEM}{', but keep negative ones' if smallest < 0 else ''}, or "
    raise OverflowError(
        f"`{name}` must have integers that fit into {dtype}, got {smallest} to {largest}; {hint}"
        'enable 64 bits with jax.config.update("jax_enable_x64", True)'
    )


def _hint_of_dtype(name: str, value: Any) -> str:
    """What to do about an array of NumPy that JAX does not take."""
    kind = value.dtype.kind
    if kind in "iufc" and not value.dtype.isnative:
        return f'; convert it with {name}.astype({name}.dtype.newbyteorder("="))'
    if kind == "f":
        return f"; convert it with {name}.astype(np.float64)"
    if kind in "SUOmM" and name in _NUMBERED:
        return f"; {_NUMBER_THEM}"
    return ""


def _hint_of_masked(name: str, value: np.ma.MaskedArray) -> str:
    if name in _MASKS:
        return f"convert it with {name}.filled(False)"
    if name in (*_NUMBERED, "targets"):  # A negative number leaves out a row or a target.
        signed = value.dtype.kind in "if"
        return f"convert it with {name}{'' if signed else '.astype(np.int32)'}.filled(-1)"
    for mask, rows in _MASKS.items():
        if name in rows:
            return f"fill it with {name}.filled(0), and leave its masked rows out with {mask}=False"
    return f"fill it with {name}.filled(...)"


def _hint_of_other(name: str, value: Any) -> str:
    """What to do about a value that is not an array."""
    if isinstance(value, tuple) and hasattr(value, "features"):
        if name == "keys":
            return (
                "; its rows come after the keys of the batch, as in keys=jnp.concatenate([keys, "
                "queue.features]), key_where=jnp.concatenate([jnp.ones(len(keys), bool), "
                "queue.labels >= 0])"
            )
        return "; a Queue goes into references=, without reference_labels"
    if hasattr(value, "detach"):
        widened = ".float()" if "bfloat16" in str(getattr(value, "dtype", "")) else ""
        return f"; convert it with {name}.detach(){widened}.cpu().numpy()"
    if hint := _hint_of_param(name, value):
        return hint
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
        return "; convert it with jnp.asarray"
    if isinstance(value, list | tuple) or hasattr(value, "__array__"):
        return "; convert it with np.asarray"
    return ""


def _hint_of_param(name: str, value: Any) -> str:
    """What to do about an `nnx.Param`."""
    is_param = hasattr(value, "__jax_array__") and not isinstance(value, jax.Array)
    return f"; pass the array of an nnx.Param as {name}[...]" if is_param else ""


def _check_rank(name: str, array: AnyArray, shape: str) -> None:
    axes = shape.split()
    if array.ndim != len(axes):
        is_column = array.ndim == 2 and array.shape[1] == 1 and len(axes) == 1
        hint = f"; the numbers of a column are {name}[:, 0]" if is_column else ""
        raise ValueError(f"`{name}` must have shape {_brackets(shape)}, got {array.shape}{hint}")
    empty = [axis for axis, size in zip(axes, array.shape, strict=True) if size == 0]
    if fixed := [axis for axis in empty if axis not in ("n", "m")]:
        raise ValueError(
            f"`{name}` must have shape {_brackets(shape)} with {fixed[0]} at least 1, "
            f"got {array.shape}"
        )


def _brackets(shape: str) -> str:
    return f"[{', '.join(shape.split())}]"
