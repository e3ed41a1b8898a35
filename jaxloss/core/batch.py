"""Which samples are valid, how losses are reduced, and how a batch is split over devices.

All communication between devices is in this module. Gradients are correct under `jax.pmap` and
`jax.shard_map`, with and without `check_vma`, because of two rules. The loss reduces its value over
the axis inside the differentiated function. The caller takes `lax.pmean` of the gradients.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int32, Integer, Real, Shaped

from jaxloss.core import checks
from jaxloss.core.backend import indices

AxisName: TypeAlias = Hashable | tuple[Hashable, ...]
Reduction: TypeAlias = Literal["mean", "sum", "none"]


def labelled_rows(
    features: Any, labels: Any, where: Any
) -> tuple[Float[Array, "n d"], Integer[Array, " n"], Bool[Array, " n"]]:
    """Checks the samples of a loss on features.

    Returns:
      The features with zeros in the invalid rows, the labels, and the mask of the valid samples.
    """
    features, labels, valid = checked_rows("features", features, labels, where)
    return zero_invalid(features, valid), labels, valid


def checked_rows(
    name: Literal["features", "logits"], rows: Any, labels: Any, where: Any, *, soft: bool = False
) -> tuple[Float[Array, "n k"], Any, Bool[Array, " n"]]:
    """Checks the samples of a loss that does not use its invalid rows.

    Returns:
      The rows as they are, the labels, and the mask of the valid samples. With `soft`, labels may
      be targets of floats, which stay as they are.
    """
    rows = checks.floating(name, rows, "n C" if name == "logits" else "n d")
    if soft and checks.is_soft(labels):
        targets = checks.floating("labels", labels, "n C")
        checks.same_rows("labels", targets, name, rows)
        mask = checks.row_mask(where, name, rows)
        return rows, targets, jnp.ones(targets.shape[:1], bool) if mask is None else mask
    labels = checks.class_labels(labels, name, rows, "; targets [n, C] are floats" if soft else "")
    return rows, labels, valid_rows(labels, checks.row_mask(where, name, rows))


def checked_rows_of_any_labels(
    features: Any, labels: Any, where: Any
) -> tuple[Float[Array, "n d"], Integer[Array, " n"] | Integer[Array, "n C"], Bool[Array, " n"]]:
    """Checks the samples of a loss that takes class indices or multi-hot targets.

    Returns:
      As `checked_rows`. Multi-hot targets are 1, 0, and -1 for unknown.
    """
    if checks.rank(labels) != 2:
        return checked_rows("features", features, labels, where)
    features = checks.floating("features", features, "n d")
    given = labels
    labels = checks.class_sets(labels, "features", features)
    if labels.shape[1] < 2:
        raise ValueError(
            "`labels` must be class indices [n], or multi-hot targets [n, C] of at least two "
            f"classes, got {labels.shape}; the indices of a column are labels[:, 0]"
        )
    valid = valid_rows(labels, checks.row_mask(where, "features", features))
    return nan_where_no_target(features, given, valid), labels, valid


def comparable(
    labels: Integer[Array, "n ..."], reference_labels: Integer[Array, "m ..."]
) -> tuple[Integer[Array, "n ..."], Integer[Array, "m ..."]]:
    """Returns both labels in a dtype that has all valid ones of both."""
    wide = max(labels.dtype, reference_labels.dtype, key=lambda dtype: (dtype.itemsize, dtype.kind))
    return labels.astype(wide), reference_labels.astype(wide)


def valid_rows(
    labels: Integer[Array, " n"] | Integer[Array, "n C"], where: Bool[Array, " n"] | None
) -> Bool[Array, " n"]:
    """Returns the samples that are neither padding nor ignored."""
    valid = labels >= 0 if labels.ndim == 1 else jnp.any(labels >= 0, axis=1)
    return valid if where is None else valid & where


def zero_invalid(rows: Float[Array, "n k"], valid: Bool[Array, " n"]) -> Float[Array, "n k"]:
    """Returns `rows` with zeros in the invalid ones, so that a NaN there has no effect."""
    return jnp.where(valid[:, None], rows, 0)


def nan_where_no_target(
    rows: Float[Array, "n d"], targets: Any, valid: Bool[Array, " n"]
) -> Float[Array, "n d"]:
    """Returns the rows with NaN, also in the gradient, where a target of a valid one is NaN.

    Class indices, which are integers, have none.
    """
    targets = jnp.asarray(targets)
    if not jnp.issubdtype(targets.dtype, jnp.inexact):
        return rows
    unknown = jnp.any(jnp.isnan(targets), axis=1)
    return rows * (1 + nan_where(valid & unknown, rows.dtype))[:, None]


def nan_where_no_class(
    values: Float[Array, " n"],
    labels: Integer[Array, " n"],
    valid: Bool[Array, " n"],
    num_classes: int,
) -> Float[Array, " n"]:
    """Returns `values` with NaN, also in the gradient, where a valid label is C or more."""
    return values * (1 + nan_where(valid & (labels >= num_classes), values.dtype))


def mass_of(targets: Float[Array, "n C"]) -> Float[Array, " n"]:
    """Returns the sums of the rows; infinity where a target is below 0."""
    return jnp.sum(jnp.where(targets < 0, jnp.inf, targets), axis=1)


def nan_where(condition: Bool[Array, " *shape"], dtype: DTypeLike) -> Float[Array, " *shape"]:
    """Returns NaN where the condition is True, and else 0.

    A constant NaN would stop `jax.debug_nans`, although it is not used.
    """
    return zero_or_nan(jnp.where(condition, jnp.inf, 0).astype(dtype))


def zero_or_nan(numbers: Float[Array, " *shape"]) -> Float[Array, " *shape"]:
    """Returns 0, and NaN where a number is not finite, so that a mask does not hide it."""
    return numbers - numbers


def reduce(
    values: Float[Array, " n"],
    mask: Bool[Array, " n"],
    sample_weights: Any,
    reduction: Any,
    axis_name: AxisName | None,
    *,
    counts: Float[Array, " n"] | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    """Reduces the losses of the samples in `mask`, in the same way for all losses.

    Args:
      values: Losses `[n]`.
      mask: bool `[n]`, the samples that count.
      sample_weights, reduction, axis_name: The common keywords of `jaxloss`, not checked yet.
      counts: `[n]`, of how many terms a loss is the mean. Sum and mean are then those of the terms.

    Returns:
      A scalar, or the weighted losses `[n]` for `"none"`.
    """
    checks.reduction(reduction)
    weights = _weights(mask, sample_weights, values.dtype)
    if counts is not None and reduction != "none":
        weights = weights * counts
    weighted = weights * jnp.where(mask, values, 0)
    if reduction == "none":
        return weighted
    total = sum_over(jnp.sum(weighted), axis_name)
    if reduction == "sum":
        return total
    return total / _total_weight(weights, axis_name)


def shares(
    mask: Bool[Array, " n"],
    sample_weights: Any,
    reduction: Any,
    axis_name: AxisName | None,
    dtype: DTypeLike,
) -> Float[Array, " n"]:
    """Returns w: for "mean" and "sum", `reduce` is `Σ_i w_i values_i` over all devices."""
    checks.reduction(reduction)
    weights = _weights(mask, sample_weights, dtype)
    return weights if reduction == "sum" else weights / _total_weight(weights, axis_name)


def _weights(mask: Bool[Array, " n"], sample_weights: Any, dtype: DTypeLike) -> Float[Array, " n"]:
    if sample_weights is None:
        return mask.astype(dtype)
    return jnp.where(mask, weights_of_samples(sample_weights, mask.shape[0], dtype), 0)


def weights_of_samples(sample_weights: Any, samples: int, dtype: DTypeLike) -> Float[Array, " n"]:
    """Returns `sample_weights`, checked, with NaN in place of negative ones."""
    weights = checks.floating("sample_weights", sample_weights, "n")
    checks.same_size("sample_weights", weights, "n", "n", samples, "the samples")
    return weights.astype(dtype) + nan_where(weights < 0, dtype)


def _total_weight(weights: Float[Array, " n"], axis_name: AxisName | None) -> Float[Array, ""]:
    """Returns the sum over devices; 1 if it is 0."""
    total = sum_over(jnp.sum(weights), axis_name)
    return jnp.where(total == 0, 1, total)


def sum_over(value: Real[Array, " *shape"], axis_name: AxisName | None) -> Real[Array, " *shape"]:
    """Returns the sum over devices."""
    return value if axis_name is None else lax.psum(value, axis_name)


def mean_over(
    value: Float[Array, " *shape"], axis_name: AxisName | None
) -> Float[Array, " *shape"]:
    """Returns the mean over devices. Equal values stay the same."""
    return value if axis_name is None else lax.pmean(value, axis_name)


def max_over(value: Real[Array, " *shape"], axis_name: AxisName | None) -> Real[Array, " *shape"]:
    """Returns the maximum over devices. It has no gradient."""
    value = lax.stop_gradient(value)
    return value if axis_name is None else lax.pmax(value, axis_name)


def gather(
    rows: Shaped[Array, " n *shape"], axis_name: AxisName | None
) -> Shaped[Array, " m *shape"]:
    """Returns the rows of all devices in the order of the axis. Gradients reach all of them."""
    return rows if axis_name is None else lax.all_gather(rows, axis_name, tiled=True)


def gather_copies(
    rows: Real[Array, " n *shape"], axis_name: AxisName | None
) -> Real[Array, " m *shape"]:
    """Returns the rows of all devices, marked as the same on every device. It has no gradient.

    Under `check_vma=True`, the result of `gather` counts as one that may differ.
    """
    if axis_name is None:
        return lax.stop_gradient(rows)
    num_rows = rows.shape[0]
    everyone = jnp.zeros_like(rows, shape=(num_rows * axis_size(axis_name), *rows.shape[1:]))
    own = lax.stop_gradient(rows)
    first = first_position(num_rows, axis_name)
    return lax.psum(lax.dynamic_update_slice_in_dim(everyone, own, first, 0), axis_name)


def is_own_class(labels: Integer[Array, " n"], num_classes: int) -> Bool[Array, "n C"]:
    """Returns which of the classes is that of a sample."""
    return labels[:, None] == indices(num_classes, labels.dtype)[None, :]


def of_own_class(
    per_class: Float[Array, " C"],
    labels: Integer[Array, " n"],
    class_axis_name: AxisName | None = None,
) -> Float[Array, " n"]:
    """Returns the number of each sample's class; 0 if there is no such class.

    Args:
      per_class: The numbers of this device's classes.
      labels: Indices among all classes.
      class_axis_name: The axis over which the classes are split.
    """
    num_classes = per_class.shape[0]
    own = labels - jnp.asarray(first_position(num_classes, class_axis_name), labels.dtype)
    is_here = (own >= 0) & (own < num_classes)
    values = jnp.where(is_here, per_class[jnp.clip(own, 0, num_classes - 1)], 0)
    return sum_over(values, class_axis_name)


def axis_size(axis_name: AxisName) -> int:
    """Returns the number of devices."""
    return lax.axis_size(axis_name)


def pass_on(rows: Any, axis_name: AxisName) -> Any:
    """Returns the arrays of the device before, in a ring. After as many calls they are back."""
    size = axis_size(axis_name)
    ring = [(device, (device + 1) % size) for device in range(size)]
    return jax.tree.map(lambda array: lax.ppermute(array, axis_name, ring), rows)


def own_positions(num_rows: int, axis_name: AxisName | None) -> Int32[Array, " n"]:
    """Returns the positions of this device's rows among the gathered ones."""
    return indices(num_rows) + first_position(num_rows, axis_name)


def first_position(num_own: int, axis_name: AxisName | None) -> Int32[Array, ""] | int:
    """Returns the position of this device's first of `num_own` rows or classes among all."""
    return 0 if axis_name is None else lax.axis_index(axis_name) * num_own


def axis_names(axis_name: AxisName | None) -> frozenset[Hashable]:
    """Returns the names of the mapped axes."""
    if axis_name is None:
        return frozenset()
    return frozenset(axis_name if isinstance(axis_name, tuple) else (axis_name,))


def vary_alike(arrays: Any) -> Any:
    """Returns the arrays, each marked as varying over every axis that any of them varies over.

    A custom gradient needs this under `check_vma=True`: it gives a cotangent that varies over all
    of these axes for each array. The mark adds the cotangents up where the array does not vary.
    """
    axes = frozenset().union(*(_varying(array) for array in jax.tree.leaves(arrays)))
    vary = partial(lax.pcast, to="varying") if hasattr(lax, "pcast") else lax.pvary  # pyright: ignore
    return jax.tree.map(lambda array: vary(array, tuple(axes - _varying(array))), arrays)


def _varying(array: Array) -> frozenset[Hashable]:
    kind: Any = jax.typeof(array)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
