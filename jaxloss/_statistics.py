"""What a loss asks of the pairs of an anchor: a reduction of values, by class.

`_tiles` computes these statistics and their gradients, and says what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer

from jaxloss import _logsumexp
from jaxloss._checks import Number
from jaxloss._logsumexp import Partial, finite_from_below, is_at_most, softplus

Params: TypeAlias = Any
"""A pytree of float arrays that a statistic depends on, such as a temperature."""


class Rows(NamedTuple):
    """Samples: anchors or references."""

    features: Float[Array, "n d"]
    """For inner products in a wide dtype, with zeros in the invalid rows."""
    labels: Integer[Array, " n"] | Integer[Array, "n C"]
    """Class indices, or multi-hot targets of 1, of 0, and of -1 for an unknown class."""
    valid: Bool[Array, " n"]
    positions: Int32[Array, " n"]
    """From 0 on, over all devices. Those of references that are no anchors are -1, -2, and so on: a
    reference at the position of the anchor is the anchor itself, and left out."""
    given: Any = None
    """A pytree of float arrays `[n]` that the values of an anchor's pairs depend on. They get
    gradients. References have none."""


class ByClass(NamedTuple):
    """A statistic of each anchor over the references of its own class and of other classes."""

    positive: Any
    negative: Any


class Largest(NamedTuple):
    """The largest value of each anchor, and the reference that has it."""

    value: Float[Array, " n"]
    """-inf for no pair."""
    position: Int32[Array, " n"]


class Reduction(NamedTuple):
    """How the values of the pairs of an anchor become one number.

    A part of the pairs is reduced to a peak and a total.
    """

    reduce: Callable[[Array, tuple[Array, ...], int, Array], tuple[Partial, ...]]
    """`(values, masks, axis, positions)` of a tile to the peaks and totals of each mask along an
    axis; `positions` are those of its rows."""
    merge: Callable[[Partial, Partial], Partial]
    result: Callable[[Partial], Any]
    """An array, or the `Largest`."""
    share: Callable[[Array, Array], Array]
    """`(values, peaks)` to the derivatives of the results, times the totals."""
    has_peaks: bool
    """Whether `share` depends on the peaks."""
    divides: bool
    """Whether derivatives are divided by the totals."""
    empty: Callable[[Array], Partial]
    """Zeros to the peaks and totals of no pair."""


class Statistic(NamedTuple):
    """What a loss asks for: a reduction of `value(similarities, overlaps, params)`.

    Overlaps are bools for class indices, and floats for multi-hot targets. If the anchors have
    given numbers, and the statistic takes them, they are the last argument, as a pytree of arrays
    `[a, 1]` or `[1, b]`.
    """

    reduction: Reduction
    value: Callable[..., Float[Array, "a b"]]
    mask: Callable[..., Bool[Array, "a b"]] | None = None
    """Of the same arguments: the pairs that count. None: all of them."""
    negatives_only: bool = False
    """Whether pairs of one class do not count. Their statistic is then that of no pair."""
    takes_given: bool = True
    """Whether given numbers are an argument, if there are any."""


# Reductions ----


def _reduce_logsumexp(
    values: Array, masks: tuple[Array, ...], axis: int, _positions: Array
) -> tuple[Partial, ...]:
    values = finite_from_below(values)
    if len(masks) == 1:
        return (_logsumexp.part(values, *masks, axis),)
    return _logsumexp.two_parts(values, masks, axis)  # pyright: ignore[reportArgumentType]


def _reduce_max(
    values: Array, masks: tuple[Array, ...], axis: int, positions: Array
) -> tuple[Partial, ...]:
    values = finite_from_below(values)
    # From 0 on, in both kinds of rows.
    positions = jnp.expand_dims(jnp.where(positions < 0, ~positions, positions), 1 - axis)

    def reduce(mask: Array) -> Partial:
        peak = jnp.max(values, axis, where=mask, initial=-jnp.inf)
        largest = mask & ((values == jnp.expand_dims(peak, axis)) | jnp.isnan(values))
        return Partial(peak, jnp.min(jnp.where(largest, positions, _NOWHERE), axis))

    return tuple(map(reduce, masks))


def _merge_max(a: Partial, b: Partial) -> Partial:
    peak = jnp.maximum(a.peak, b.peak)
    first, second = (
        jnp.where((part.peak == peak) | jnp.isnan(part.peak), part.total, _NOWHERE)
        for part in (a, b)
    )
    return Partial(peak, jnp.minimum(first, second))


_NOWHERE = np.iinfo(np.int32).max


def _reduce_sum(
    values: Array, masks: tuple[Array, ...], axis: int, _positions: Array
) -> tuple[Partial, ...]:
    def reduce(mask: Array) -> Partial:
        total = jnp.sum(jnp.where(mask, values, 0), axis=axis)
        return Partial(jnp.zeros_like(total), total)

    return tuple(map(reduce, masks))


def _reduce_softplus(
    values: Array, masks: tuple[Array, ...], axis: int, _positions: Array
) -> tuple[Partial, ...]:
    def reduce(mask: Array) -> Partial:
        total = jnp.sum(softplus(jnp.where(mask, values, -jnp.inf)), axis=axis)
        return Partial(jnp.zeros_like(total), total)

    return tuple(map(reduce, masks))


def _reduce_exponentials(
    values: Array, masks: tuple[Array, ...], axis: int, _positions: Array
) -> tuple[Partial, ...]:
    return _reduce_sum(jnp.exp(values), masks, axis, _positions)


LOGSUMEXP = Reduction(
    _reduce_logsumexp,
    _logsumexp.merge,
    _logsumexp.result,
    lambda values, peaks: jnp.exp(values - peaks),
    has_peaks=True,
    divides=True,
    empty=lambda zeros: Partial(zeros - jnp.inf, zeros),
)
"""`log Σ e^v`; -inf for no pair."""
MAX = Reduction(
    _reduce_max,
    _merge_max,
    lambda state: Largest(*state),
    lambda values, peaks: jnp.zeros_like(values),
    has_peaks=False,
    divides=False,
    empty=lambda zeros: Partial(zeros - jnp.inf, zeros.astype(jnp.int32) + _NOWHERE),
)
"""The first of the largest values, without a gradient."""
SUM = Reduction(
    _reduce_sum,
    lambda a, b: Partial(a.peak, a.total + b.total),
    lambda state: state.total,
    lambda values, peaks: jnp.ones_like(values),
    has_peaks=False,
    divides=False,
    empty=lambda zeros: Partial(zeros, zeros),
)
"""`Σ v`; 0 for no pair."""

SOFTPLUS = Reduction(
    _reduce_softplus,
    SUM.merge,
    SUM.result,
    lambda values, peaks: lax.logistic(values),
    has_peaks=False,
    divides=False,
    empty=SUM.empty,
)
"""`Σ log(1 + e^v)`; 0 for no pair."""

LOGSUMEXP_OF_SMALL = Reduction(
    _reduce_exponentials,
    SUM.merge,
    lambda state: jnp.log(state.total),
    lambda values, peaks: jnp.exp(values),
    has_peaks=False,
    divides=True,
    empty=SUM.empty,
)
"""`LOGSUMEXP` of values between -20 and 20, without peaks.

A sum of a billion exponentials is between 2e-9 and 5e17: its inverse square, which a second
derivative has, is in the range of float32, too. A pair has one exponential for both of its sides.
"""


def logsumexp_of_cosines(temperature: Number, normalize: bool) -> Reduction:
    """Returns the log-sum-exp for cosines, or inner products, that are divided by a temperature."""
    return LOGSUMEXP_OF_SMALL if normalize and is_at_most(20, 1 / temperature) else LOGSUMEXP


def over_temperature(
    similarities: Float[Array, "a b"], _overlaps: Array, temperature: Float[Array, ""]
) -> Float[Array, "a b"]:
    """A value: `s / T`."""
    return similarities / temperature
