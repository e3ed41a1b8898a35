"""What a contrastive loss tells of a batch beside its value, from the same visit of the tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from jaxloss.core.batch import sum_over
from jaxloss.pairs.comparison import Comparison
from jaxloss.pairs.statistics import COUNT, PEAK, SUM, ByClass, Pair, Statistic, similarity_of
from jaxloss.pairs.towers import Towers


class ContrastiveMetrics(NamedTuple):
    """What a contrastive loss of `metrics=True` reports of the global batch, without a gradient.

    Rows that count weigh alike, whatever their `sample_weights`. Pairs that are left out are not
    candidates: with a `margin_of_false_negatives` of at most 0, the accuracy is 1.
    """

    accuracy: Float[Array, ""]
    """The share of rows for which a positive has the largest logit, without `hardness`. An equal
    negative is a miss."""
    positive: Float[Array, ""]
    """The mean similarity of rows and their positives."""
    negative: Float[Array, ""]
    """The mean similarity of rows and their negatives."""
    logsumexp: Float[Array, ""]
    """The mean over rows of the log-sum-exp of all logits, as the loss has them."""


class Watched(NamedTuple):
    """Of each row, over its positives and over its negatives."""

    largest: ByClass
    """The largest logit; -inf for no pair."""
    total: ByClass
    """The sum of the similarities."""
    number: ByClass
    """Of the pairs."""


def watched(
    logits: Callable[[Pair, Any], Float[Array, "a b"]], mask: Callable[..., Any] | None = None
) -> tuple[Statistic, Statistic, Statistic]:
    """Returns the statistics of `Watched`, for logits of statistics with this mask."""
    values = ((PEAK, logits), (SUM, similarity_of), (COUNT, similarity_of))
    largest, total, number = (
        Statistic(reduction, value, mask, is_smooth=True, has_gradient=False)
        for reduction, value in values
    )
    return largest, total, number


def num_others(pairs: Comparison | Towers) -> Float[Array, ""]:
    """Returns the number of valid references of an anchor, on all devices, without itself."""
    rows = pairs.anchors if pairs.references is None else pairs.references
    number = sum_over(jnp.sum(rows.valid, dtype=pairs.dtype), pairs.how.axis_name)
    return number - 1 if pairs.references is None else number


def contrastive_metrics(
    pairs: Comparison | Towers,
    found: Watched,
    log_sums: Float[Array, " n"],
    counts: Bool[Array, " n"],
) -> ContrastiveMetrics:
    """Returns the metrics over the rows of all devices that are valid and count."""
    counts = counts & pairs.anchors.valid

    def total(values: Float[Array, " n"]) -> Float[Array, ""]:
        own = jnp.sum(jnp.where(counts, lax.stop_gradient(values), 0))
        return sum_over(own, pairs.how.axis_name)

    def mean(values: Float[Array, " n"], number: Float[Array, " n"]) -> Float[Array, ""]:
        divisor = total(number)
        return total(values) / jnp.where(divisor == 0, 1, divisor)

    hits, one = found.largest.positive > found.largest.negative, jnp.ones_like(log_sums)
    return ContrastiveMetrics(
        mean(hits.astype(one.dtype), one),
        mean(found.total.positive, found.number.positive),
        mean(found.total.negative, found.number.negative),
        mean(log_sums, one),
    )
