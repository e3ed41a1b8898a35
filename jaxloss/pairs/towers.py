"""Comparisons of two towers: each query with its own key, and with the other keys."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer

from jaxloss.core import batch, checks, linear
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.products import low_dtypes
from jaxloss.pairs import comparison
from jaxloss.pairs.rows import How, Rows, Similarity
from jaxloss.pairs.statistics import Params, Statistic
from jaxloss.pairs.visits import statistics_of


class Towers(NamedTuple):
    """Each query with its own key, and with the other keys: see `compare_towers`."""

    anchors: Rows
    """The queries."""
    references: Rows
    """The keys."""
    how: How
    own: Float[Array, " n"]
    """The similarity of each query and its own key."""
    similarity: Similarity
    own_guide: Float[Array, " n"] | None = None
    """The similarity of the guides of each query and its own key."""

    @property
    def dtype(self) -> Any:
        """Of values and statistics."""
        return self.how.dtype

    @overload
    def statistics(
        self, params: Params, *statistics: Statistic, of_keys: Literal[False] = False
    ) -> tuple[Float[Array, " n"], ...]: ...
    @overload
    def statistics(
        self, params: Params, *statistics: Statistic, of_keys: Literal[True]
    ) -> tuple[tuple[Float[Array, " n"], ...], tuple[Float[Array, " m"], ...]]: ...
    def statistics(self, params: Params, *statistics: Statistic, of_keys: bool = False) -> Any:
        """Returns statistics over the other keys of each query, all in one visit of the tiles.

        Args:
          params: A pytree of numbers or float arrays that values depend on.
          *statistics: What to compute. `pair.anchor` is the query's, and `pair.reference` the
            key's, in statistics of keys, too.
          of_keys: Whether to return those over the other queries of each key, too.

        Returns:
          For each statistic an array `[n]`; with `of_keys`, these and as many arrays `[m]`.
        """
        params, statistics = comparison.checked_statistics(params, statistics, self.dtype)
        how = self.how._replace(both_ways=of_keys)
        both = statistics_of(self.anchors, self.references, how, params, statistics)
        sides = [tuple(found.negative for found in side) for side in both if side is not None]
        return tuple(sides) if of_keys else sides[0]

    def reduce(
        self,
        values: Float[Array, " n"],
        counts: Bool[Array, " n"] | None = None,
        sample_weights: Float[Array, " n"] | None = None,
        reduction: Reduction = "mean",
    ) -> Float[Array, ""] | Float[Array, " n"]:
        """Reduces the losses of the queries that are valid and count, as `Comparison.reduce`."""
        return comparison.reduced_losses("queries", self, values, counts, sample_weights, reduction)


def compare_towers(
    queries: Float[Array, "n d"],
    keys: Float[Array, "m d"],
    *,
    ids: Integer[Array, " n"] | None = None,
    key_ids: Integer[Array, " m"] | None = None,
    key_where: Bool[Array, " m"] | None = None,
    numbers: Any = None,
    key_numbers: Any = None,
    guide: Float[Array, "n e"] | None = None,
    key_guide: Float[Array, "m e"] | None = None,
    guide_similarity: Similarity | None = None,
    similarity: Similarity = "cosine",
    where: Bool[Array, " n"] | None = None,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
) -> Towers:
    """Compares each query with its own key and with the other keys of the global batch.

    Memory and forward mode are as in `compare`.

    Args:
      queries: `[n, d]`.
      keys: `[m, d]` with m ≥ n. Row i is the key of query i, and the rows beyond n are further
        keys, as in `info_nce_loss`.
      ids: integers `[n]`. Pairs of different rows with equal ids are left out. A negative id equals
        no other.
      key_ids: integers `[m]`, those of the keys. By default the first n keys have `ids`, and the
        others equal none.
      key_where: bool `[m]`. False marks padding among the keys. A query whose own key is padding
        does not count.
      numbers, key_numbers: Pytrees of arrays `[n]` and `[m]` that values depend on, such as −log q
        of a sampled key. Floats have gradients.
      guide, key_guide, guide_similarity: As in `compare`.
      similarity: As in `compare`.
      where, block_size, axis_name: Keywords of `jaxloss`. A row of `where=False` is neither query
        nor key.

    Raises:
      ValueError: If `similarity` is unknown, `block_size` is not positive, or there are fewer keys
        than queries.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxloss.pairs import LOGSUMEXP, Statistic, compare_towers
      >>> images, texts = jnp.array([[1.0, 0.0], [0.0, 1.0]]), jnp.array([[2.0, 1.0], [0.0, 3.0]])
      >>> towers = compare_towers(images, texts, key_numbers=jnp.array([0.0, 0.5]))
      >>> def logit(pair, scale):
      ...     return scale * pair.similarity + pair.reference
      >>> logits = Statistic(LOGSUMEXP, logit)
      >>> (others,) = towers.statistics(2.0, logits)
      >>> values = jax.nn.softplus(others - 2 * towers.own - jnp.array([0.0, 0.5]))
      >>> print(f"{towers.reduce(values):.4f}")
      0.2132
    """
    comparison.check_options(similarity, block_size)
    queries = checks.floating("queries", queries, "n d")
    keys = checks.floating("keys", keys, "m d")
    (number, dim), num_keys = queries.shape, keys.shape[0]
    if keys.shape[1] != dim or num_keys < number:
        raise ValueError(
            f"`keys` must have shape [m, d] with m at least {number} and d = {dim} to match "
            f"`queries` {queries.shape}, got {keys.shape}"
        )
    valid = _mask(checks.row_mask(where, "queries", queries), queries)
    key_valid = _mask(checks.row_mask(key_where, "keys", keys, name="key_where", shape="m"), keys)
    numbers = comparison.checked_numbers("numbers", numbers, valid)
    key_numbers = comparison.checked_numbers("key_numbers", key_numbers, key_valid)
    positions = batch.own_positions(number, axis_name)
    labels = positions
    if ids is not None:
        labels = checks.integers("ids", ids, "n")
        checks.same_rows("ids", labels, "queries", queries)
    labels, key_labels = _labels(labels, key_ids, keys, ids is not None, axis_name)
    # Keys are numbered as queries are, and the further ones after those of all devices.
    devices = 1 if axis_name is None else batch.axis_size(axis_name)
    further = batch.own_positions(num_keys - number, axis_name) + number * devices
    # The own key of a query is left out, and no other row of one tower is a row of the other.
    key_positions = ~jnp.concatenate([positions, further])
    if key_ids is not None:
        key_positions = jnp.concatenate([positions, ~further])
    valid = valid & key_valid[:number]
    key_valid = jnp.concatenate([valid, key_valid[number:]])

    how = How(
        similarity,
        linear.wide_dtype(queries, keys),
        low_dtypes(queries, keys),
        ignores_equal=True,
        block_sizes=(block_size, block_size),
        axis_name=axis_name,
    )
    rows = Rows(queries, labels, valid, positions).with_numbers(numbers, how.dtype)
    of_keys = Rows(keys, key_labels, key_valid, key_positions).with_numbers(key_numbers, how.dtype)
    rows, of_keys, how = comparison.loaded_for_products(rows, of_keys, how)
    assert of_keys is not None
    # The gradients of a row, by its own key and by the others, are added before they are rounded.
    queries, keys = linear.widen(rows.features, of_keys.features)
    rows, of_keys = rows._replace(features=queries), of_keys._replace(features=keys)
    own, other = queries, keys[:number]
    if how.similarity != "inner" or how.is_low:
        own, other = batch.zero_invalid(own, valid), batch.zero_invalid(other, valid)
    similarities = similarities_of_rows(similarity, own, other)
    if how.similarity == "cosine":
        similarities *= linear.inverse_norms_of_scaled(own) * linear.inverse_norms_of_scaled(other)
    by: Similarity = guide_similarity or similarity
    compared, guides = (rows, of_keys, how), (guide, key_guide)
    rows, of_keys, how = comparison.with_guides(compared, guides, by, "key_guide")
    own_guide = None
    if guide is not None:
        own_guide = similarities_of_rows(by, rows.guide, of_keys.guide[:number])  # pyright: ignore
    return Towers(rows, of_keys, how, similarities, similarity, own_guide)  # pyright: ignore


def similarities_of_rows(
    similarity: Similarity, a: Float[Array, "*k d"], b: Float[Array, "*m d"]
) -> Float[Array, " *m"]:
    """Returns the similarities of rows one by one; for cosines, those of unit vectors."""
    if similarity in ("cosine", "inner"):
        return jnp.sum(a * b, axis=-1)
    squares = jnp.sum((a - b) ** 2, axis=-1)
    if similarity == "negative_squared_distance":
        return -squares
    return -linear.distances_of_squares(squares, jnp.zeros_like(squares))


def _labels(
    ids: Integer[Array, " n"],
    key_ids: Any,
    keys: Float[Array, "m d"],
    have_ids: bool,
    axis_name: AxisName | None,
) -> tuple[Integer[Array, " n"], Integer[Array, " m"]]:
    """Returns ids of queries and of keys. Negative and absent ones equal no other."""
    further, is_alone = keys.shape[0] - ids.shape[0], ids < 0
    key_is_alone: Any = None
    if key_ids is not None:
        if not have_ids:
            raise ValueError("`ids` is missing beside `key_ids`")
        key_ids = checks.integers("key_ids", key_ids, "m")
        checks.same_rows("key_ids", key_ids, "keys", keys)
        key_is_alone = key_ids < 0  # A wider dtype may be unsigned.
        ids, key_ids = batch.comparable(ids, key_ids)
    if (further or key_ids is not None) and jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        # All their values may be ids, so none is free.
        both = ids if key_ids is None else jnp.concatenate([ids, key_ids])
        both = _numbered(both, axis_name)
        ids, key_ids = both[: ids.shape[0]], None if key_ids is None else both[ids.shape[0] :]
    alone = ids
    if have_ids:
        positions = batch.own_positions(ids.shape[0], axis_name).astype(ids.dtype)
        alone = jnp.where(is_alone, -2 - positions, ids)
    if key_ids is not None:
        return alone, jnp.where(key_is_alone, -1, key_ids)
    return alone, jnp.concatenate([alone, jnp.full(further, -1).astype(ids.dtype)])


def _numbered(ids: Integer[Array, " n"], axis_name: AxisName | None) -> Int32[Array, " n"]:
    """Returns numbers from 0 on that are equal where the ids of all devices are."""
    everyone = batch.gather(ids, axis_name)
    _, numbers = jnp.unique(everyone, size=max(len(everyone), 1), return_inverse=True)
    first = batch.first_position(ids.shape[0], axis_name)
    return lax.dynamic_slice_in_dim(numbers.astype(jnp.int32), first, ids.shape[0])


def _mask(where: Bool[Array, " n"] | None, rows: Float[Array, "n d"]) -> Bool[Array, " n"]:
    return jnp.ones(rows.shape[0], bool) if where is None else where
