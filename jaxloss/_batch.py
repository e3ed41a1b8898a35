"""What counts, how it is weighted and reduced, and how a batch is spread over devices.

Everything that communicates between devices stands here. The rule that makes gradients right
under `jax.pmap` and `jax.shard_map`, with and without `check_vma`: the value is reduced over the
axis inside the differentiated function, and the caller takes `lax.pmean` of the gradients.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
from jax import Array, lax

from jaxloss import _checks

AxisName: TypeAlias = Hashable | tuple[Hashable, ...]
Reduction: TypeAlias = Literal["mean", "sum", "none"]


def counting_rows(labels: Array, where: Array | None) -> Array:
    """The samples [n] that are neither padding nor ignored."""
    counts = labels >= 0
    return counts if where is None else counts & where


def clean_rows(rows: Array, counts: Array) -> Array:
    """`rows` [n, k] with zeros where a sample does not count, so that nothing leaks from there."""
    return jnp.where(counts[:, None], rows, 0)


def poison(labels: Array, counts: Array, num_classes: int, values: Array) -> Array:
    """`values` [n], NaN (as is their gradient) where the label of a counting sample is no class."""
    return values * jnp.where(counts & (labels >= num_classes), jnp.nan, 1).astype(values.dtype)


def reduce(
    values: Array,
    counts: Array,
    *,
    sample_weights: Any,
    reduction: str,
    axis_name: AxisName | None,
) -> Array:
    """The one reduction of all losses: `Σ s_i ℓ_i / Σ s_i` over the samples that count.

    Args:
      values: losses [n].
      counts: bool [n], the samples that count.
      sample_weights: floats [n] or None.
      reduction: `"mean"`, `"sum"` or `"none"`.
      axis_name: mapped axes over which the batch is spread.

    Returns:
      A scalar, or for `"none"` the weighted values [n].
    """
    _checks.reduction(reduction)
    weights = counts.astype(values.dtype)
    if sample_weights is not None:
        sample_weights = _checks.floating("sample_weights", sample_weights, "n")
        _checks.same_rows("sample_weights", sample_weights, "labels", counts)
        weights = jnp.where(counts, sample_weights.astype(values.dtype), 0)
    weighted = weights * jnp.where(counts, values, 0)
    if reduction == "none":
        return weighted
    total = sum_over(jnp.sum(weighted), axis_name)
    if reduction == "sum":
        return total
    weight = sum_over(jnp.sum(weights), axis_name)
    return total / jnp.where(weight == 0, 1, weight)  # Nothing counts: 0 / 1.


def sum_over(value: Array, axis_name: AxisName | None) -> Array:
    """The sum of `value` over devices."""
    return value if axis_name is None else lax.psum(value, axis_name)


def mean_over(value: Array, axis_name: AxisName | None) -> Array:
    """The mean of `value` over devices: the same number, where all devices have it already."""
    return value if axis_name is None else lax.pmean(value, axis_name)


def logsumexp_over(
    logits: Array, mask: Array, *, axis: int, axis_name: AxisName | None = None
) -> Array:
    """`log Σ e^z` along `axis` and over devices, of the entries in `mask`; 0 where there is none.

    Only maxima and sums travel, never the logits.
    """
    peak = jnp.max(logits, axis=axis, where=mask, initial=-jnp.inf, keepdims=True)
    peak = _max_over(lax.stop_gradient(peak), axis_name)
    peak = jnp.where(any_over(mask, axis=axis, axis_name=axis_name, keepdims=True), peak, 0)
    shifted = jnp.where(mask, logits - peak, 0)
    total = jnp.sum(jnp.where(mask, jnp.exp(shifted), 0), axis=axis)
    total = sum_over(total, axis_name)
    return jnp.log(jnp.where(total == 0, 1, total)) + jnp.squeeze(peak, axis)


def any_over(
    mask: Array, *, axis: int, axis_name: AxisName | None = None, keepdims: bool = False
) -> Array:
    """Whether the mask is True anywhere along `axis` and over devices."""
    some = jnp.any(mask, axis=axis, keepdims=keepdims)
    return some if axis_name is None else lax.psum(some.astype(jnp.int32), axis_name) > 0


def _max_over(value: Array, axis_name: AxisName | None) -> Array:
    return value if axis_name is None else lax.pmax(value, axis_name)


def gather(rows: Array, axis_name: AxisName | None) -> Array:
    """The rows of all devices, one device after the other; gradients reach every device's rows."""
    return rows if axis_name is None else lax.all_gather(rows, axis_name, tiled=True)


def own_positions(num_rows: int, axis_name: AxisName | None) -> Array:
    """Where this device's rows stand among the gathered ones, int [num_rows]."""
    positions = jnp.arange(num_rows, dtype=jnp.int32)
    return positions if axis_name is None else positions + lax.axis_index(axis_name) * num_rows
