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
from jaxloss.core.batch import AxisName, checked_rows, sum_over
from jaxloss.core.products import float32_precision
from jaxloss.core.sharding import divided
from jaxloss.pairs.queue import reference_rows
from jaxloss.pairs.row_blocks import Pairs, over_row_blocks
from jaxloss.pairs.rows import Compared, anchors_and_references, centered


class RetrievalMetrics(NamedTuple):
    """Means over the samples that have another of their class among the references."""

    recall: Float[Array, " k"]
    """One of the k nearest is of the class of the sample, for every k."""
    r_precision: Float[Array, ""]
    """The share of the class among the R nearest, for a class with R references."""
    map_at_r: Float[Array, ""]
    """The mean average precision at R."""


_SIMILARITIES: dict[str, Compared] = {
    "cosine": "inner",
    "euclidean": "negative_squared_distance",
}


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
    number of references of its class. Of references whose computed distances are equal, such as
    copies, the first in the array is the nearest. Cosines that are equal in exact arithmetic only,
    such as those of r and 3·r, are ordered by their rounding errors. Samples are compared in
    blocks, so that the memory does not grow with n·m.

    Args:
      features: `[n, d]`.
      labels: `[n]`, class indices without an upper limit.
      ks: The values of k, at least 1.
      distance: `"cosine"` or `"euclidean"`.
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
    checks.choice("distance", distance, tuple(_SIMILARITIES))
    checks.block_size(block_size)
    features, labels, valid = checked_rows("features", features, labels, where)
    given = reference_rows(
        references, reference_labels, reference_where, features, axis_name=axis_name
    )
    anchors, compared = anchors_and_references(
        features, labels, valid, given, axis_name, normalize=distance == "cosine", load=True
    )
    if distance == "euclidean":
        anchors, compared = centered(anchors, compared, axis_name)

    defined, values = over_row_blocks(
        partial(_of_block, ks=tuple(ks)),
        anchors,
        compared,
        similarity=_SIMILARITIES[distance],
        block_size=block_size,
        axis_name=axis_name,
    )
    counted = (valid & defined).astype(anchors.features.dtype)
    number = jnp.maximum(sum_over(jnp.sum(counted), axis_name), 1)

    def mean(values: Float[Array, " n *k"]) -> Float[Array, " *k"]:
        total = jnp.tensordot(counted, values, axes=1, precision=float32_precision())
        return sum_over(total, axis_name) / number

    return jax.tree.map(mean, values)


def _of_block(pairs: Pairs, ks: tuple[int, ...]) -> tuple[Bool[Array, " a"], RetrievalMetrics]:
    """Returns which anchors have a positive, and the metrics of each anchor."""
    used = pairs.positives | pairs.negatives
    distances = jnp.where(used, -pairs.similarities, jnp.inf)
    # The sort is stable: the first of equal ones stays the first.
    _, hits = lax.sort((distances, pairs.positives.astype(distances.dtype)), num_keys=1)
    found = jnp.cumsum(hits, axis=1)
    size = jnp.sum(pairs.positives, axis=1, dtype=distances.dtype)[:, None]
    ranks = jnp.arange(1, hits.shape[1] + 1, dtype=distances.dtype)[None, :]
    relevant = ranks <= size
    precision = found / ranks
    some = jnp.maximum(size[:, 0], 1)
    values = RetrievalMetrics(
        jnp.stack([jnp.any((ranks <= k) & (hits > 0), axis=1) for k in ks], axis=1).astype(
            hits.dtype
        ),
        jnp.sum(jnp.where(relevant, hits, 0), axis=1) / some,
        jnp.sum(jnp.where(relevant, precision * hits, 0), axis=1) / some,
    )
    unknown = jnp.any(used & jnp.isnan(pairs.similarities), axis=1)
    return size[:, 0] > 0, jax.tree.map(
        lambda x: jnp.where(jnp.expand_dims(unknown, range(1, x.ndim)), jnp.nan, x), values
    )
