r"""The log-sum-exp of a set of numbers, from parts of the set.

.. math:: \log \sum_v e^v = p + \log s, \quad p = \max v, \quad s = \sum_v e^{v - p}

Two parts merge into `p = max(p_1, p_2)` and `s = s_1 e^{p_1 - p} + s_2 e^{p_2 - p}`. No exponential
is above 1. Peaks have no gradient: the log-sum-exp does not depend on them. So where it is known
how far apart the numbers can be, another number near their maximum will do, or 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from jaxloss.core.batch import AxisName, max_over, sum_over
from jaxloss.core.checks import Number


class Part(NamedTuple):
    """A part of the numbers. Numbers of -inf count as none, unless `finite_from_below`."""

    peak: Float[Array, " *shape"]
    """The largest number, or one near it; -inf if there is none."""
    total: Float[Array, " *shape"]
    """The sum of the exponentials, relative to the peak."""


def part(values: Float[Array, "a b"], mask: Bool[Array, "a b"], axis: int) -> Part:
    """Returns the values in a mask as a part, along an axis."""
    values = jnp.where(mask, values, -jnp.inf)
    peak = lax.stop_gradient(jnp.max(values, axis, initial=-jnp.inf))
    return Part(peak, jnp.sum(jnp.exp(values - jnp.expand_dims(or_zero(peak), axis)), axis))


def is_at_most(limit: int, number: Number | None) -> bool:
    """Returns whether a hyperparameter is known to be in a limit, which a traced one is not."""
    return number is not None and not isinstance(number, jax.Array) and number <= limit


def is_on(number: Number) -> bool:
    """Returns whether a hyperparameter may differ from 0, as a traced one may."""
    return isinstance(number, jax.Array) or number != 0


def inverse_if_known(number: Number) -> float | None:
    """Returns `1 / number`, or None of a traced hyperparameter."""
    return None if isinstance(number, jax.Array) else 1 / number


def part_relative_to(
    peak: Float[Array, " k"], values: Float[Array, "a b"], mask: Bool[Array, "a b"], axis: int
) -> Part:
    """Returns `part` relative to a peak that is at hand, and not far from the largest number."""
    shares = jnp.exp(values - jnp.expand_dims(peak, axis))
    return Part(peak, jnp.sum(jnp.where(mask, shares, 0), axis))


def two_parts(
    values: Float[Array, "a b"], masks: tuple[Bool[Array, "a b"], Bool[Array, "a b"]], axis: int
) -> tuple[Part, Part]:
    """Returns `part` of each of two disjoint masks, with a single exponential of each value."""
    peaks = [jnp.max(jnp.where(mask, values, -jnp.inf), axis, initial=-jnp.inf) for mask in masks]
    peaks = lax.stop_gradient(peaks)
    shifts = (jnp.expand_dims(or_zero(peak), axis) for peak in peaks)
    relative = values - jnp.where(masks[0], *shifts)
    shares = jnp.exp(jnp.where(masks[0] | masks[1], relative, -jnp.inf))
    totals = [jnp.sum(jnp.where(mask, shares, 0), axis) for mask in masks]
    return Part(peaks[0], totals[0]), Part(peaks[1], totals[1])


def merge(a: Part, b: Part) -> Part:
    """Returns the part that holds both."""
    peak = jnp.maximum(a.peak, b.peak)
    return Part(peak, _relative_to(peak, a) + _relative_to(peak, b))


def result(whole: Part) -> Float[Array, " *shape"]:
    """Returns the log-sum-exp; -inf if there is no number."""
    return jnp.log(jnp.where(whole.peak == -jnp.inf, 1, whole.total)) + whole.peak


def logsumexp(
    values: Float[Array, "a b"],
    mask: Bool[Array, "a b"],
    *,
    axis: int,
    axis_name: AxisName | None = None,
) -> Float[Array, " k"]:
    """Returns `log Σ e^v` of the values in a mask, along an axis and over devices.

    It is -inf where there is no value. Devices exchange maxima and sums, never the values.
    """
    own = part(values, mask, axis)
    if axis_name is None:
        return result(own)
    peak = max_over(own.peak, axis_name)
    return result(Part(peak, sum_over(_relative_to(peak, own), axis_name)))


@jax.custom_jvp
def softplus(x: Float[Array, " *shape"]) -> Float[Array, " *shape"]:
    """Returns `log(1 + e^x)`. Its derivative does not read it, so that XLA need not store it."""
    # XLA for CPUs would write out an array of 0, which others share. Nothing else needs −0. In a
    # scan, JAX may differentiate this body: `jnp.maximum` and `jnp.abs` have a corner at 0.
    positive = x > 0
    return jnp.where(positive, x, -0.0) + jnp.log1p(jnp.exp(jnp.where(positive, -x, x)))


@softplus.defjvp
def _softplus_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return softplus(*primals), lax.logistic(*primals) * tangents[0]


def softplus_where(condition: Bool[Array, " n"], x: Float[Array, " n"]) -> Float[Array, " n"]:
    """Returns `log(1 + e^x)`, and 0 where the condition is False."""
    return jnp.where(condition, softplus(jnp.where(condition, x, 0)), 0)


def softplus_of_gap_where(
    condition: Bool[Array, " n"], a: Float[Array, " n"], b: Float[Array, " n"]
) -> Float[Array, " n"]:
    """Returns `log(1 + e^(a − b))`, and 0 where the condition is False: there, both may be -inf."""
    gaps = jnp.where(condition, a, 0) - jnp.where(condition, b, 0)
    return jnp.where(condition, softplus(gaps), 0)


def finite_from_below(values: Float[Array, " *shape"]) -> Float[Array, " *shape"]:
    """Returns the values with the lowest float in place of -inf, which marks an empty part."""
    return jnp.maximum(values, jnp.finfo(values.dtype).min)


def unless_left_out(number: Number, values: Float[Array, " *shape"]) -> Any:
    """Returns a hyperparameter that is multiplied by each of the values, or divides it.

    If it is traced, it has no derivative where the value is -inf, which adds nothing: 0 · ∞ is NaN.
    """
    if not isinstance(number, jax.Array):
        return number
    return jnp.where(values == -jnp.inf, lax.stop_gradient(number), number)


def or_zero(peak: Float[Array, " *shape"]) -> Float[Array, " *shape"]:
    """Returns the peak; 0 for an empty part, from which any number can be subtracted."""
    return jnp.where(peak == -jnp.inf, 0, peak)


def _relative_to(peak: Float[Array, " *shape"], of: Part) -> Float[Array, " *shape"]:
    return of.total * jnp.exp(of.peak - or_zero(peak))
