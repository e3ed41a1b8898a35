"""What a loss asks of the pairs of an anchor: a reduction of values, by class.

`_tiles` computes these statistics and their gradients, and says what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer

from jaxloss import _logsumexp
from jaxloss._logsumexp import Partial, finite_from_below, softplus

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
    """A reference at the position of the anchor is the anchor itself, and left out."""
    given: Any = None
    """A pytree of float arrays `[n]` that the values of an anchor's pairs depend on. They get
    gradients. References have none."""


class ByClass(NamedTuple):
    """A statistic of each anchor over the references of its own class and of other classes."""

    positive: Any
    negative: Any


class Reduction(NamedTuple):
    """How the values of the pairs of an anchor become one number.

    A part of the pairs is reduced to a peak and a total.
    """

    reduce: Callable[[Array, tuple[Array, ...], int], tuple[Partial, ...]]
    """`(values, masks, axis)` of a tile to the peaks and totals of each mask along an axis."""
    merge: Callable[[Partial, Partial], Partial]
    result: Callable[[Partial], Array]
    share: Callable[[Array, Array], Array]
    """`(values, peaks)` to the derivatives of the results, times the totals."""
    divides: bool
    """Whether derivatives are divided by the totals."""
    empty: float
    """The peak of no pair."""


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


def _reduce_logsumexp(values: Array, masks: tuple[Array, ...], axis: int) -> tuple[Partial, ...]:
    values = finite_from_below(values)
    if len(masks) == 1:
        return (_logsumexp.part(values, *masks, axis),)
    return _logsumexp.two_parts(values, masks, axis)  # pyright: ignore[reportArgumentType]


def _reduce_max(values: Array, masks: tuple[Array, ...], axis: int) -> tuple[Partial, ...]:
    values = finite_from_below(values)

    def reduce(mask: Array) -> Partial:
        peak = jnp.max(values, axis, where=mask, initial=-jnp.inf)
        ties = mask & (values == jnp.expand_dims(peak, axis))
        return Partial(peak, jnp.sum(ties, axis).astype(values.dtype))

    return tuple(map(reduce, masks))


def _merge_max(a: Partial, b: Partial) -> Partial:
    peak = jnp.maximum(a.peak, b.peak)
    ties = jnp.where(a.peak == peak, a.total, 0) + jnp.where(b.peak == peak, b.total, 0)
    return Partial(peak, ties)


def _reduce_sum(values: Array, masks: tuple[Array, ...], axis: int) -> tuple[Partial, ...]:
    def reduce(mask: Array) -> Partial:
        total = jnp.sum(jnp.where(mask, values, 0), axis=axis)
        return Partial(jnp.zeros_like(total), total)

    return tuple(map(reduce, masks))


def _reduce_softplus(values: Array, masks: tuple[Array, ...], axis: int) -> tuple[Partial, ...]:
    def reduce(mask: Array) -> Partial:
        total = jnp.sum(softplus(jnp.where(mask, values, -jnp.inf)), axis=axis)
        return Partial(jnp.zeros_like(total), total)

    return tuple(map(reduce, masks))


LOGSUMEXP = Reduction(
    _reduce_logsumexp,
    _logsumexp.merge,
    _logsumexp.result,
    lambda values, peaks: jnp.exp(values - peaks),
    divides=True,
    empty=-jnp.inf,
)
"""`log Σ e^v`; -inf for no pair."""
MAX = Reduction(
    _reduce_max,
    _merge_max,
    lambda state: state.peak,
    # This takes it that the gradient computes the same bits as the value did.
    lambda values, peaks: (values == peaks).astype(values.dtype),
    divides=True,
    empty=-jnp.inf,
)
"""The largest value; -inf for no pair. Equal largest values share the gradient."""
SUM = Reduction(
    _reduce_sum,
    lambda a, b: Partial(a.peak, a.total + b.total),
    lambda state: state.total,
    lambda values, peaks: jnp.ones_like(values),
    divides=False,
    empty=0.0,
)
"""`Σ v`; 0 for no pair."""

SOFTPLUS = Reduction(
    _reduce_softplus,
    SUM.merge,
    SUM.result,
    lambda values, peaks: lax.logistic(values),
    divides=False,
    empty=0.0,
)
"""`Σ log(1 + e^v)`; 0 for no pair."""


def over_temperature(
    similarities: Float[Array, "a b"], _overlaps: Array, temperature: Float[Array, ""]
) -> Float[Array, "a b"]:
    """A value: `s / T`."""
    return similarities / temperature
