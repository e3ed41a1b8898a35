"""How well the nearest references of a sample are of its class."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Integer

from jaxloss.core import checks
from jaxloss.core.batch import AxisName, checked_rows, nan_where, sum_over
from jaxloss.core.products import float32_precision
from jaxloss.core.sharding import divided
from jaxloss.pairs.row_blocks import Pairs, over_row_blocks
from jaxloss.pairs.rows import Similarity, anchors_and_references, widened


class RetrievalMetrics(NamedTuple):
    """Means over the samples that have another of their class among the references."""

    recall: Float[Array, " k"]
    """One of the k nearest is of the class of the sample, for every k."""
    r_precision: Float[Array, ""]
    """The share of the class among the R nearest, for a class with R references."""
    map_at_r: Float[Array, ""]
    """The mean average precision at R."""


@divided(result="replicated")
def retrieval_metrics(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    distance: Literal["cosine", "euclidean"] = "cosine",
    references: Float[Array, "m d"] | None = None,
    reference_labels: Integer[Array, " m"] | None = None,
    reference_where: Bool[Array, " m"] | None = None,
    where: Bool[Array, " n"] | None = None,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
) -> RetrievalMetrics:
    r"""Recall at k, R-precision and mean average precision at R of the nearest references.

    .. math:: \mathrm{recall}_k = \mathrm{mean}_i \max_{j ≤ k} h_{ij}, \quad
       P_{ij} = \tfrac1j \sum_{l ≤ j} h_{il}, \quad
       \mathrm{R\text{-}precision} = \mathrm{mean}_i\, P_{i R_i}, \quad
       \mathrm{MAP@R} = \mathrm{mean}_i\, \tfrac{1}{R_i} \sum_{j ≤ R_i} P_{ij} h_{ij}

    h_ij is 1 if the j-th nearest reference of sample i is of its class, and 0 otherwise. R_i is the
    number of references of its class. Of references at equal distances, such as copies, any may be
    the nearest: the result is the mean over all their orders, and does not depend on the order of
    the rows. If a network gives all images the same features, recall at 1 is the share of the class
    among the references. Distances that are equal in exact arithmetic only, such as the cosines of
    r and 3·r, are ordered by their rounding errors. Samples are compared in blocks, so that the
    memory does not grow with n·m.

    Args:
      features: `[n, d]`.
      labels: `[n]`, class indices without an upper limit.
      ks: The values of k, at least 1.
      distance: `"cosine"` or `"euclidean"`. Distances far below those between groups of references
        are rounding errors: see *Distances* in `jaxloss`.
      references, reference_labels, reference_where: The keywords of pairwise losses in `jaxloss`,
        such as a gallery.
      where, axis_name: The common keywords of `jaxloss`. `axis_name` gathers the references, of
        which every device has its share.
      block_size: How many samples are compared at a time. By default it depends on the shapes and
        the backend.

    Returns:
      `recall` `[len(ks)]`, `r_precision` and `map_at_r`, scalars. A sample without a
      reference of its class does not count. If no sample counts, all are 0.

    Raises:
      ValueError: If `ks` is empty, one of them is below 1, `distance` is unknown, or `block_size`
        is not positive.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features = jnp.array([[1.0, 0.0], [1.0, 0.2], [1.0, 0.1], [0.0, 1.0]])
      >>> metrics = jaxloss.retrieval_metrics(features, jnp.array([0, 0, 1, 1]), ks=(1, 2))
      >>> print(metrics.recall, metrics.map_at_r)
      [0.   0.75] 0.0

    References:
      Musgrave et al., A Metric Learning Reality Check, ECCV 2020, section 3.2.
    """
    checks.static("ks", ks, "a sequence of Python integers")
    if (not isinstance(ks, Sequence) and checks.rank(ks) != 1) or not len(ks):
        raise ValueError(f"`ks` must be a sequence of at least one integer, got {ks!r}")
    for k in ks:
        checks.positive_count("ks", k)
    checks.choice("distance", distance, ("cosine", "euclidean"))
    checks.block_size(block_size)
    features, labels, valid = checked_rows("features", features, labels, where)
    rows = anchors_and_references(
        features, labels, valid, references, reference_labels, reference_where, axis_name=axis_name
    )
    anchors, compared = widened(*rows, normalize=distance == "cosine")
    similarity: Similarity = "inner" if distance == "cosine" else "negative_squared_distance"
    defined, values = over_row_blocks(
        partial(_of_block, ks=tuple(ks)),
        anchors,
        compared,
        similarity=similarity,
        block_size=block_size,
        axis_name=axis_name,
    )
    counted = (valid & defined).astype(anchors.features.dtype)
    number = jnp.maximum(sum_over(jnp.sum(counted), axis_name), 1)

    def mean(values: Float[Array, " n *k"]) -> Float[Array, " *k"]:
        if values.ndim == 2:  # One by one: XLA for CPUs adds up columns in a less exact way.
            return jnp.stack([mean(column) for column in values.T])
        total = jnp.dot(counted, values, precision=float32_precision())
        return sum_over(total, axis_name) / number

    return jax.tree.map(mean, values)


def _of_block(pairs: Pairs, ks: tuple[int, ...]) -> tuple[Bool[Array, " a"], RetrievalMetrics]:
    """Returns which anchors have a positive, and the metrics of each anchor."""
    used = pairs.positives | pairs.negatives
    farthest = jnp.finfo(pairs.similarities.dtype).max  # Below that of what is not used.
    distances = jnp.where(used, jnp.minimum(-pairs.similarities, farthest), jnp.inf)
    distances, hits = lax.sort((distances, pairs.positives.astype(distances.dtype)), num_keys=1)
    size = jnp.sum(pairs.positives, axis=1, dtype=distances.dtype)[:, None]
    ranks = jnp.arange(1, hits.shape[1] + 1, dtype=distances.dtype)[None, :]
    number, tied_hits, before, found = _tied(distances, hits, ranks)
    # Over all orders: how often a rank is a hit, and the mean precision at it where it is one.
    hit = tied_hits / number
    precision = (1 + found + before * (tied_hits - 1) / jnp.maximum(number - 1, 1)) / ranks
    # How often a rank is no hit, if those of its tie before it are none.
    left = number - before
    missed = jnp.maximum(left - tied_hits, 0) / left
    relevant = ranks <= size
    some = jnp.maximum(size[:, 0], 1)
    recalls = [1 - jnp.prod(jnp.where(ranks <= k, missed, 1), axis=1) for k in ks]
    values = RetrievalMetrics(
        jnp.stack(recalls, axis=1),
        jnp.sum(jnp.where(relevant, hit, 0), axis=1) / some,
        jnp.sum(jnp.where(relevant, precision * hit, 0), axis=1) / some,
    )
    unknown = jnp.any(used & jnp.isnan(pairs.similarities), axis=1)
    return size[:, 0] > 0, jax.tree.map(
        lambda x: x + nan_where(jnp.expand_dims(unknown, range(1, x.ndim)), x.dtype), values
    )


def _tied(
    distances: Float[Array, "a m"], hits: Float[Array, "a m"], ranks: Float[Array, "1 m"]
) -> tuple[Float[Array, "a m"], ...]:
    """Returns what is tied with a rank, from sorted distances and their hits.

    Returns:
      Of each rank: how many ranks are at its distance, how many of them are hits, how many of them
      come before it, and how many hits are nearer.
    """
    nearer = distances[:, :-1] < distances[:, 1:]
    edge = jnp.ones_like(distances[:, :1], dtype=bool)
    begins = jnp.concatenate([edge, nearer], axis=1)
    ends = jnp.concatenate([nearer, edge], axis=1)
    total = jnp.cumsum(hits, axis=1)

    def from_begin(values: Float[Array, "_ m"]) -> Float[Array, "a m"]:
        return lax.cummax(jnp.where(begins, values, 0), axis=1)

    def from_end(values: Float[Array, "_ m"]) -> Float[Array, "a m"]:
        return lax.cummin(jnp.where(ends, values, jnp.inf), axis=1, reverse=True)

    first, found = from_begin(ranks), from_begin(total - hits)
    return from_end(ranks) - first + 1, from_end(total) - found, ranks - first, found
