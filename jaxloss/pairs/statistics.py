"""What a loss asks of the pairs of an anchor: a reduction of values, by class.

The pairs of a tile are reduced to a part, and two parts merge. The parts of the reductions here
have a peak p and a total t. Another may have more numbers: any named tuple of arrays with a `peak`
will do.

============  ==============  ================  =============================================
reduction     p               t                 merged
============  ==============  ================  =============================================
`LOGSUMEXP`   `max_j v`       `Σ_j e^(v − p)`   as in `logsumexp`
`MAX`         `max_j v`       its position      larger p; its t, or the smaller of both
`MIN`         `max_j −v`      its position      as `MAX`
`ARGMAX`      `max_j v`       its position      as `MAX`
`SUM`         0               `Σ_j v`           the sum of t
`COUNT`       0               `Σ_j 1`           the sum of t
============  ==============  ================  =============================================

Without a pair, p is -inf. Sums of small exponentials have p = 0, too.

The derivative of the result by a value is the share of the pair, divided by t for the first:

==============  ==================================================
`LOGSUMEXP`     `e^(v_ij − p_i) / t_i`
`MAX`, `MIN`    1 at the position of the largest or smallest, else 0
`SUM`           1
==============  ==================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from jaxloss.core import logsumexp
from jaxloss.core.logsumexp import Part, finite_from_below, is_at_most, or_zero, softplus

Params: TypeAlias = Any
"""A pytree of float arrays that a statistic depends on, such as a temperature."""


@dataclass(frozen=True, eq=False)
class Pair:
    """The pairs of a tile, as a value or a mask gets them: arrays that work element by element.

    What was not passed to the comparison is an error.
    """

    similarity: Float[Array, "a b"]
    """Of the two rows."""
    known: Mapping[str, Any]
    """What there is of the others, by name."""

    @property
    def same(self) -> Bool[Array, "a b"] | Float[Array, "a b"]:
        """Whether the two rows are of one class; of multi-hot targets, the Jaccard overlap.

        Of towers, it is an error.
        """
        return self._of("same", "keys have no class: pairs of equal `ids` are left out")

    @property
    def anchor(self) -> Any:
        """The numbers of the anchor, or of the query. Each broadcasts to `[a, b]`."""
        return self._of("anchor", "pass `numbers`")

    @property
    def reference(self) -> Any:
        """The numbers of the reference, or of the key. Each broadcasts to `[a, b]`."""
        return self._of(
            "reference", "pass `numbers`, of references `reference_numbers`, of keys `key_numbers`"
        )

    @property
    def guide(self) -> Float[Array, "a b"]:
        """The similarity of the guides of the two rows. It has no gradient."""
        return self._of("guide", "pass `guide`, with `reference_guide` or `key_guide`")

    @property
    def of_row(self) -> Any:
        """The numbers of the row whose statistic it is: in statistics of keys, those of the key."""
        return self._of("of_row", "pass `numbers`")

    def _of(self, name: str, hint: str) -> Any:
        found = self.known.get(name)
        if found is None:
            raise ValueError(f"`pair.{name}` is not known here: {hint}")
        return found


class ByClass(NamedTuple):
    """A statistic of each anchor over the references of its own class and of other classes."""

    positive: Any
    negative: Any
    exists: Any = None
    """Floats of both: 1 if the anchor has such a pair, else 0."""

    @property
    def has_positive(self) -> Bool[Array, " *n"]:
        """Whether the anchor has a pair of its own class that counts."""
        return self.exists[0] > 0

    @property
    def has_negative(self) -> Bool[Array, " *n"]:
        """Whether the anchor has a pair of two classes that counts."""
        return self.exists[1] > 0


class Parts(NamedTuple):
    """What tiles know of a statistic of each anchor, over both kinds of references."""

    positive: Any
    negative: Any


class PairReduction(NamedTuple):
    """How the values of the pairs of an anchor become one number."""

    reduce: Callable[[Array, tuple[Array, ...], int, Array], tuple[Any, ...]]
    """`(values, masks, axis, positions)` of a tile to the parts of each mask along an axis;
    `positions` are those of its rows."""
    merge: Callable[[Any, Any], Any]
    """Two parts to the part of all their pairs."""
    result: Callable[[Any], Any]
    """The part of all pairs to what the loss gets."""
    share: Callable[[Array, Array, Array, Array], Array]
    """`(values, used, marks, positions)` to the derivatives by the values, which divisors divide.
    Values that are not used may be of any size."""
    empty: Callable[[Array], Any]
    """Zeros to the part of no pair, whose peak is -inf."""
    mark: Callable[[Any], Array] | None = None
    """What the share of a pair depends on: the peak, or the position of the largest value."""
    divisor: Callable[[Any], Array] | None = None
    """What the shares are divided by."""
    has_gradient: bool = True
    exists: Callable[[Any], Array] = lambda part: part.peak != -jnp.inf
    """A part to whether it has a pair."""


def similarity_of(pair: Pair, _params: Params) -> Float[Array, "a b"]:
    """A value: the similarity."""
    return pair.similarity


class Statistic(NamedTuple):
    """A reduction of `value(pair, params)` over the pairs of each anchor. See `Pair`."""

    reduction: PairReduction
    """`LOGSUMEXP`, `MAX`, `MIN`, `ARGMAX`, `SUM` or `COUNT`."""
    value: Callable[[Pair, Params], Float[Array, "a b"]] = similarity_of
    """Of each pair that counts, element by element; by default the similarity. It may be infinite
    or have no derivative for the others."""
    mask: Callable[[Pair, Params], Bool[Array, "a b"]] | None = None
    """Which pairs count; by default all of them. It must leave out a pair whose derivative is
    NaN or infinite, even if the loss does not use what is found of its anchor: the gradient
    would be 0 · NaN or 0 · ∞, which is NaN."""
    bound: float | None = None
    """A number that is never below the absolute value. A small Python number saves a `LOGSUMEXP`
    its peaks; a wrong one overflows."""
    is_smooth: bool = False
    """Whether values of all pairs are finite and differentiable, those that do not count included:
    of an anchor with itself, and of padding. It saves the engine to replace their similarities."""
    has_gradient: bool = True
    """Whether the result has a gradient. One that only informs, such as an accuracy, costs less
    without: the gradient of a loss then leaves it out. `COUNT` and `ARGMAX` have none."""
    by_row: bool = False
    """Whether the value of a pair depends on which of its rows the statistic is of. Comparisons and
    the losses of the library set it."""


def has_gradient(statistic: Statistic) -> bool:
    """Returns whether a statistic is in the gradient of a loss."""
    return statistic.has_gradient and statistic.reduction.has_gradient


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
        peaks = [jnp.where(jnp.any(mask, axis=axis), 0, -jnp.inf) for mask in masks]
        return tuple(
            Part(peak.astype(total.dtype), total) for peak, total in zip(peaks, totals, strict=True)
        )

    return reduce


def _reduce_small(
    values: Array, masks: tuple[Array, ...], axis: int, _positions: Array
) -> tuple[Part, ...]:
    totals = [jnp.sum(jnp.where(mask, jnp.exp(values), 0), axis=axis) for mask in masks]
    return tuple(Part(jnp.zeros_like(total), total) for total in totals)


def _reduce_min(
    values: Array, masks: tuple[Array, ...], axis: int, positions: Array
) -> tuple[Part, ...]:
    return _reduce_max(-values, masks, axis, positions)


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
MIN = MAX._replace(reduce=_reduce_min, result=lambda part: -part.peak)
"""The smallest value; inf for no pair. Otherwise as `MAX`."""
ARGMAX = MAX._replace(result=lambda part: part.total, has_gradient=False)
"""The position of the reference with the largest value, among those of all devices.

It is for `Comparison.rows_at`; without a pair, it is none of these. Of equal values, it is the
first. Of towers, it is the row of the keys, or of the queries. It has no gradient.
"""
ARGMAX_OF_SIMILARITIES = ARGMAX._replace(reduce=_reduce_max_of_exact)
"""The same, of similarities or their negatives.

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
    lambda a, b: Part(jnp.maximum(a.peak, b.peak), a.total + b.total),
    lambda part: part.total,
    lambda values, *_: jnp.ones_like(values),
    empty=lambda zeros: Part(zeros - jnp.inf, zeros),
)
"""`Σ v`; 0 for no pair."""
SOFTPLUS = SUM._replace(
    reduce=_sum_of(lambda values, mask: softplus(jnp.where(mask, values, -jnp.inf))),
    share=lambda values, used, *_: lax.logistic(jnp.where(used, values, 0)),
)
"""`Σ log(1 + e^v)`: as `SUM` of a softplus, for which XLA for CPUs needs 1.5 times as long."""
COUNT = SUM._replace(
    reduce=_sum_of(lambda values, mask: mask.astype(values.dtype)), has_gradient=False
)
"""The number of pairs, as a float. It has no gradient."""
_LOGSUMEXP_OF_SMALL = SUM._replace(
    reduce=_reduce_small,
    merge=lambda a, b: Part(a.peak, a.total + b.total),
    result=lambda part: jnp.log(part.total),
    empty=lambda zeros: Part(zeros, zeros),
    exists=lambda part: part.total != 0,  # Also of a NaN.
    share=lambda values, used, *_: jnp.exp(jnp.where(used, values, 0)),
    divisor=lambda part: part.total,
)
"""`LOGSUMEXP` of values between -20 and 20, without peaks.

A sum of a billion exponentials is between 2e-9 and 5e17: its inverse square, which a second
derivative has, is in the range of float32, too. A pair has one exponential for both of its sides.
"""


def over_temperature(pair: Pair, temperature: Float[Array, ""]) -> Float[Array, "a b"]:
    """A value: `s / T`."""
    return pair.similarity / temperature
