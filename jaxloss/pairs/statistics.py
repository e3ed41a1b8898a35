"""What a loss asks of the pairs of an anchor: a reduction of values, by class.

The pairs of a tile are reduced to a part, and two parts merge. The parts of the reductions here
have a peak p and a total t. Another may have more numbers: any named tuple of arrays with a `peak`
will do.

============  ===========  ================  ==================================================
reduction     p            t                 merged
============  ===========  ================  ==================================================
`LOGSUMEXP`   `max_j v`    `Σ_j e^(v − p)`   as in `logsumexp`; `p = 0` for values of small bound
`MAX`         `max_j v`    its position      larger p; its t, or the smaller of both
`SUM`         0            `Σ_j v`           the sum of t
`SOFTPLUS`    0            `Σ log(1 + e^v)`  the sum of t
============  ===========  ================  ==================================================

The derivative of the result by a value is the share of the pair, divided by t for the first:

============  ==========================================
`LOGSUMEXP`   `e^(v_ij − p_i) / t_i`
`MAX`         1 at the position of the largest, and else 0
`SUM`         1
`SOFTPLUS`    `1 / (1 + e^(−v_ij))`
============  ==========================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from jaxloss.core import logsumexp
from jaxloss.core.logsumexp import Part, finite_from_below, is_at_most, or_zero, softplus

Params: TypeAlias = Any
"""A pytree of float arrays that a statistic depends on, such as a temperature."""


class ByClass(NamedTuple):
    """A statistic of each anchor over the references of its own class and of other classes."""

    positive: Any
    negative: Any

    @property
    def has_positive(self) -> Bool[Array, " *n"]:
        """Whether the anchor has a pair of its own class that counts; always true of sums."""
        return self.positive != -jnp.inf

    @property
    def has_negative(self) -> Bool[Array, " *n"]:
        """Whether the anchor has a pair of two classes that counts; always true of sums."""
        return self.negative != -jnp.inf


class PairReduction(NamedTuple):
    """How the values of the pairs of an anchor become one number."""

    reduce: Callable[[Array, tuple[Array, ...], int, Array], tuple[Any, ...]]
    """`(values, masks, axis, positions)` of a tile to the parts of each mask along an axis;
    `positions` are those of its rows."""
    merge: Callable[[Any, Any], Any]
    """Two parts to the part of all their pairs."""
    result: Callable[[Any], Any]
    """Of all pairs: what the loss gets."""
    share: Callable[[Array, Array, Array, Array], Array]
    """`(values, used, marks, positions)` to the derivatives by the values, which divisors divide.
    Values that are not used may be of any size."""
    empty: Callable[[Array], Any]
    """Zeros to the part of no pair."""
    mark: Callable[[Any], Array] | None = None
    """What the share of a pair depends on: the peak, or the position of the largest value."""
    divisor: Callable[[Any], Array] | None = None
    """What the shares are divided by."""


class Statistic(NamedTuple):
    """A reduction of `value(similarities, same, params)` over the pairs of each anchor.

    The value is computed element by element. `same` tells whether a pair is of one class: a bool
    for class indices, and for multi-hot targets the Jaccard overlap of the two sets of classes, a
    float that is 0 for none. Numbers that are given for each anchor are a fourth argument.
    """

    reduction: PairReduction
    """`LOGSUMEXP`, `MAX`, `SUM` or `SOFTPLUS`."""
    value: Callable[..., Float[Array, "a b"]]
    """Of each pair that counts. It may be infinite or have no derivative for the others."""
    mask: Callable[..., Bool[Array, "a b"]] | None = None
    """Which pairs count, a function of the same arguments; by default all of them. It must leave
    out a pair whose derivative is NaN or infinite, even if the loss does not use what is found of
    its anchor: the gradient would be 0 · NaN or 0 · ∞, which is NaN."""
    bound: float | None = None
    """A number that is never below the absolute value. A small Python number saves a `LOGSUMEXP`
    its peaks; a wrong one overflows."""
    is_smooth: bool = False
    """Whether values of all pairs are finite and differentiable, those that do not count included:
    of an anchor with itself, and of padding. It saves the engine to replace their similarities."""
    has_gradient: bool = True
    """Whether the result has a gradient. One that only informs, such as an accuracy, costs less
    without: the gradient of a loss then leaves it out."""


def reduction_of(statistic: Statistic) -> PairReduction:
    """Returns the reduction, without peaks if the values are known to be small."""
    is_small = statistic.reduction is LOGSUMEXP and is_at_most(20, statistic.bound)
    return _LOGSUMEXP_OF_SMALL if is_small else statistic.reduction


# Reductions ----


def _reduce_logsumexp(
    values: Array, masks: tuple[Array, ...], axis: int, _positions: Array
) -> tuple[Part, ...]:
    values = finite_from_below(values)
    if len(masks) == 1:
        return (logsumexp.part(values, *masks, axis),)
    return logsumexp.two_parts(values, masks, axis)  # pyright: ignore[reportArgumentType]


def _places(positions: Int32[Array, " a"]) -> Int32[Array, " a"]:
    """Returns positions from 0 on, of anchors and of references."""
    return jnp.where(positions < 0, ~positions, positions)


def _reduce_max(
    values: Array, masks: tuple[Array, ...], axis: int, positions: Array
) -> tuple[Part, ...]:
    values, places = finite_from_below(values), _places(positions)

    def reduce(mask: Array) -> Part:
        used = jnp.where(mask, values, -jnp.inf)
        peak = jnp.max(used, axis)
        # XLA may compute values twice, and round them otherwise: none may then equal the peak.
        place = places[jnp.argmax(used, axis)]
        return Part(peak, jnp.where(peak == -jnp.inf, _NOWHERE, place))

    return tuple(map(reduce, masks))


def _reduce_max_of_exact(
    values: Array, masks: tuple[Array, ...], axis: int, positions: Array
) -> tuple[Part, ...]:
    values = finite_from_below(values)
    positions = jnp.expand_dims(_places(positions), 1 - axis)

    def reduce(mask: Array) -> Part:
        peak = jnp.max(values, axis, where=mask, initial=-jnp.inf)
        largest = mask & ((values == jnp.expand_dims(peak, axis)) | jnp.isnan(values))
        return Part(peak, jnp.min(jnp.where(largest, positions, _NOWHERE), axis))

    return tuple(map(reduce, masks))


def _reduce_peak(
    values: Array, masks: tuple[Array, ...], axis: int, _positions: Array
) -> tuple[Part, ...]:
    values = finite_from_below(values)  # In the words of `logsumexp.part`, so that XLA merges them.
    peaks = [jnp.max(jnp.where(mask, values, -jnp.inf), axis, initial=-jnp.inf) for mask in masks]
    return tuple(Part(peak, jnp.zeros_like(peak)) for peak in peaks)


def _merge_max(a: Part, b: Part) -> Part:
    peak = jnp.maximum(a.peak, b.peak)
    first, second = (
        jnp.where((part.peak == peak) | jnp.isnan(part.peak), part.total, _NOWHERE)
        for part in (a, b)
    )
    return Part(peak, jnp.minimum(first, second))


_NOWHERE = np.iinfo(np.int32).max


def _sum_of(function: Callable[[Array, Array], Array]) -> Any:
    """Returns how `Σ function(value, mask)` is reduced."""

    def reduce(
        values: Array, masks: tuple[Array, ...], axis: int, _positions: Array
    ) -> tuple[Part, ...]:
        totals = [jnp.sum(function(values, mask), axis=axis) for mask in masks]
        return tuple(Part(jnp.zeros_like(total), total) for total in totals)

    return reduce


LOGSUMEXP = PairReduction(
    _reduce_logsumexp,
    logsumexp.merge,
    logsumexp.result,
    lambda values, used, peaks, _: jnp.exp(jnp.where(used, values, peaks) - peaks),
    empty=lambda zeros: Part(zeros - jnp.inf, zeros),
    mark=lambda part: or_zero(part.peak),
    divisor=lambda part: part.total,
)
"""`log Σ e^v`; -inf for no pair. A value of -inf counts as the lowest number of the dtype."""
MAX = PairReduction(
    _reduce_max,
    _merge_max,
    lambda part: part.peak,
    lambda values, _, marks, positions: (marks == _places(positions)).astype(values.dtype),
    empty=lambda zeros: Part(zeros - jnp.inf, zeros.astype(jnp.int32) + _NOWHERE),
    mark=lambda part: part.total,
)
"""The largest value; -inf for no pair. A value of -inf counts as in `LOGSUMEXP`.

Of equal values, the first has the gradient. Which are equal after rounding may depend on the tiles.
"""
LARGEST = MAX._replace(reduce=_reduce_max_of_exact, result=lambda part: part)
"""`MAX` with its position as the total, without a gradient, of similarities or their negatives.

These are never rounded; XLA for CPUs finds them three times as fast as the place of a maximum.
"""
PEAK = MAX._replace(
    reduce=_reduce_peak,
    merge=lambda a, b: Part(jnp.maximum(a.peak, b.peak), a.total),
    empty=lambda zeros: Part(zeros - jnp.inf, zeros),
)
"""`MAX` without its position, and without a gradient. `LOGSUMEXP` has it for nothing."""
SUM = PairReduction(
    _sum_of(lambda values, mask: jnp.where(mask, values, 0)),
    lambda a, b: Part(a.peak, a.total + b.total),
    lambda part: part.total,
    lambda values, *_: jnp.ones_like(values),
    empty=lambda zeros: Part(zeros, zeros),
)
"""`Σ v`; 0 for no pair."""
SOFTPLUS = SUM._replace(
    reduce=_sum_of(lambda values, mask: softplus(jnp.where(mask, values, -jnp.inf))),
    share=lambda values, used, *_: lax.logistic(jnp.where(used, values, 0)),
)
"""`Σ log(1 + e^v)`; 0 for no pair."""
_LOGSUMEXP_OF_SMALL = SUM._replace(
    reduce=_sum_of(lambda values, mask: jnp.where(mask, jnp.exp(values), 0)),
    result=lambda part: jnp.log(part.total),
    share=lambda values, used, *_: jnp.exp(jnp.where(used, values, 0)),
    divisor=lambda part: part.total,
)
"""`LOGSUMEXP` of values between -20 and 20, without peaks.

A sum of a billion exponentials is between 2e-9 and 5e17: its inverse square, which a second
derivative has, is in the range of float32, too. A pair has one exponential for both of its sides.
"""


def over_temperature(
    similarities: Float[Array, "a b"], _same: Array, temperature: Float[Array, ""]
) -> Float[Array, "a b"]:
    """A value: `s / T`."""
    return similarities / temperature
