"""Comparisons of rows, for pairwise losses: of a batch with itself or references, of two towers."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer, Real

from jaxloss.core import checks
from jaxloss.core.batch import (
    AxisName,
    Reduction,
    checked_rows_of_any_labels,
    first_position,
    gather,
    own_positions,
    reduce,
    zero_invalid,
)
from jaxloss.core.linear import (
    inverse_norms_of_scaled,
    l2_normalize,
    power_of_two_scaled,
    wide_dtype,
    widen,
)
from jaxloss.core.products import low_dtypes
from jaxloss.pairs.queue import Queue, reference_rows
from jaxloss.pairs.rows import (
    DISTANCES,
    Rows,
    Similarity,
    anchors_and_references,
    are_low,
    scaled,
    similarities_of_rows,
)
from jaxloss.pairs.statistics import ByClass, PairReduction, Params, Statistic
from jaxloss.pairs.visits import Sides, in_both_directions, statistics_of


class Comparison(NamedTuple):
    """Each sample of a batch with the others, or with references: see `compare`."""

    sides: Sides
    dtype: Any
    """Of values and statistics."""

    def statistics(self, params: Params, *statistics: Statistic) -> tuple[ByClass, ...]:
        """Returns statistics `[n]` over the pairs of each sample, all in one visit of the tiles.

        Args:
          params: A pytree of numbers or float arrays that values depend on, such as a temperature.
          *statistics: What to compute. Outside of `jax.jit`, a function that reads an array from
            where it is defined is compiled anew by each call: pass the array in `params`.

        Returns:
          For each statistic its number over the references of the sample's own class, and over
          those of other classes. They have gradients by the features, `params` and given numbers.
        """
        return statistics_of(self.sides, *_checked(params, self.dtype, statistics))

    def given(self, numbers: Any) -> Comparison:
        """Returns the same comparison, with numbers that the values of a sample's pairs depend on.

        Args:
          numbers: Floats `[n]`, or a pytree of them, such as statistics of another call. Values
            and masks of all statistics get them as a fourth argument. They replace earlier ones.
        """
        number = self.sides.anchors.valid.shape[0]
        for leaf in jax.tree.leaves(numbers):
            shape = checks.floating("numbers", leaf, "n").shape
            if shape[0] != number:
                raise ValueError(f"`numbers` must have shape [n] with n = {number}, got {shape}")
        anchors = self.sides.anchors._replace(given=numbers)
        return self._replace(sides=self.sides._replace(anchors=anchors))

    def reduce(
        self,
        values: Float[Array, " n"],
        counts: Bool[Array, " n"],
        sample_weights: Float[Array, " n"] | None = None,
        reduction: Reduction = "mean",
    ) -> Float[Array, ""] | Float[Array, " n"]:
        """Reduces the losses of the samples that are valid and count, as all losses do.

        Args:
          values: Losses `[n]`.
          counts: bool `[n]`, the samples for which the loss is defined.
          sample_weights, reduction: The common keywords of `jaxloss`.
        """
        return _reduced("features", self.sides, values, counts, sample_weights, reduction)


def compare(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"] | Real[Array, "n C"] | Bool[Array, "n C"],
    *,
    references: Float[Array, "m d"] | Queue | None = None,
    reference_labels: Integer[Array, " m"] | Real[Array, "m C"] | Bool[Array, "m C"] | None = None,
    reference_where: Bool[Array, " m"] | None = None,
    similarity: Similarity = "cosine",
    where: Bool[Array, " n"] | None = None,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
) -> Comparison:
    """Compares each sample with the others of the global batch, or with references.

    Nothing is computed before `Comparison.statistics`. Its memory does not grow with n·m. Take
    derivatives with `jax.grad`: `jax.jvp` raises a `TypeError`. A gradient has both modes.

    Args:
      features: `[n, d]`.
      labels: Class indices `[n]` without an upper limit, or multi-hot targets `[n, C]` of at least
        two classes.
      references, reference_labels, reference_where, block_size: The keywords of pairwise losses in
        `jaxloss`.
      similarity: Of a pair: `"cosine"`, `"inner"`, `"negative_squared_distance"` −‖x − y‖², or
        `"negative_distance"` −‖x − y‖, whose gradient is 0 at distance 0. In float32, distances
        below about 0.0014 times the norms of the centred rows are rounding error, and count as 0:
        see *Distances* in `jaxloss`.
      where, axis_name: Common keywords of `jaxloss`.

    Raises:
      ValueError: If `similarity` is unknown, or `block_size` is not positive.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxloss.pairs import LOGSUMEXP, Statistic, compare
      >>> def lifted_loss(features, labels, *, where=None, sample_weights=None, reduction="mean",
      ...                 axis_name=None):
      ...     pairs = compare(features, labels, where=where, axis_name=axis_name)
      ...     hard = Statistic(LOGSUMEXP, lambda s, same, scale: scale * jnp.where(same, -s, s))
      ...     (sums,) = pairs.statistics(8.0, hard)
      ...     counts = sums.has_positive & sums.has_negative
      ...     values = jax.nn.softplus(jnp.where(counts, sums.positive + sums.negative, 0))
      ...     return pairs.reduce(values, counts, sample_weights, reduction)
      >>> features = jnp.array([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0], [-1.0, 0.0]])
      >>> print(f"{lifted_loss(features, jnp.array([0, 0, 1, 1])):.4f}")
      2.0510
    """
    features, labels, valid = checked_rows_of_any_labels(features, labels, where)
    others = reference_rows(
        references, reference_labels, reference_where, features, labels, axis_name=axis_name
    )
    _check_how(similarity, block_size)
    dtype = wide_dtype(features, features if others is None else others[0])
    given, compared = (features, labels, valid, others, axis_name), similarity
    if similarity in DISTANCES:
        rows = anchors_and_references(*given)
    elif not are_low(features, others):
        rows = anchors_and_references(*given, normalize=similarity == "cosine", load=True)
        compared = "inner"
    else:
        rows = anchors_and_references(*given)
        rows = scaled(*rows) if similarity == "cosine" else rows
    return Comparison(Sides(*rows, compared, None, False, block_size, axis_name), dtype)


def _checked(
    params: Any, dtype: Any, statistics: tuple[Any, ...]
) -> tuple[Params, tuple[Statistic, ...]]:
    if isinstance(params, Statistic):
        raise TypeError(
            "`params` must be numbers or float arrays, got a Statistic; pass them before the "
            "statistics, or () if no value depends on any"
        )
    for statistic in statistics:
        if not isinstance(statistic, Statistic) or not isinstance(
            statistic.reduction, PairReduction
        ):
            raise TypeError(
                "`statistics` must be of `Statistic(reduction, value)` with LOGSUMEXP, MAX, SUM or "
                f"SOFTPLUS of `jaxloss.pairs`, got {statistic!r}"
            )
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params), statistics


def _reduced(
    name: str, sides: Sides, values: Any, counts: Any, sample_weights: Any, reduction: Any
) -> Any:
    mask = sides.anchors.valid
    values = checks.floating("values", values, "n")
    checks.same_rows("values", values, name, sides.anchors.features)
    counts = checks.row_mask(counts, name, sides.anchors.features, name="counts")
    mask = mask if counts is None else mask & counts
    return reduce(values, mask, sample_weights, reduction, sides.axis_name)


def _check_how(similarity: Any, block_size: Any) -> None:
    checks.choice("similarity", similarity, get_args(Similarity))
    checks.block_size(block_size)


class Towers(NamedTuple):
    """Each query with its own key, and with the other keys: see `compare_towers`."""

    sides: Sides
    own: Float[Array, " n"]
    """The similarity of each query and its own key."""
    similarity: Similarity

    @property
    def dtype(self) -> Any:
        """Of values and statistics."""
        return self.own.dtype

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
          *statistics: Of `value(similarities, params)`; with `key_bias`, of
            `value(similarities, params, key_bias)`.
          of_keys: Whether to return those over the other queries of each key, too.

        Returns:
          For each statistic an array `[n]`; with `of_keys`, these and as many arrays `[m]`.
        """
        if of_keys:
            both = in_both_directions(self.sides, *_checked(params, self.dtype, statistics))
            return tuple(tuple(found.negative for found in side) for side in both)
        found = statistics_of(self.sides, *_checked(params, self.dtype, statistics))
        return tuple(statistic.negative for statistic in found)

    def reduce(
        self,
        values: Float[Array, " n"],
        counts: Bool[Array, " n"] | None = None,
        sample_weights: Float[Array, " n"] | None = None,
        reduction: Reduction = "mean",
    ) -> Float[Array, ""] | Float[Array, " n"]:
        """Reduces the losses of the queries that are valid and count, as `Comparison.reduce`."""
        return _reduced("queries", self.sides, values, counts, sample_weights, reduction)


def compare_towers(
    queries: Float[Array, "n d"],
    keys: Float[Array, "m d"],
    *,
    ids: Integer[Array, " n"] | None = None,
    key_where: Bool[Array, " m"] | None = None,
    key_bias: Float[Array, " m"] | None = None,
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
      key_where: bool `[m]`. False marks padding among the keys. A query whose own key is padding
        does not count.
      key_bias: floats `[m]` that values depend on, such as −log q of a sampled key. They have
        gradients.
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
      >>> towers = compare_towers(images, texts, key_bias=jnp.array([0.0, 0.5]))
      >>> logits = Statistic(LOGSUMEXP, lambda s, scale, bias: scale * s + bias)
      >>> (others,) = towers.statistics(2.0, logits)
      >>> values = jax.nn.softplus(others - 2 * towers.own - jnp.array([0.0, 0.5]))
      >>> print(f"{towers.reduce(values):.4f}")
      0.2132
    """
    _check_how(similarity, block_size)
    queries = checks.floating("queries", queries, "n d")
    keys = checks.key_features(keys, queries)
    valid = _mask(checks.row_mask(where, "queries", queries), queries)
    key_valid = _mask(checks.row_mask(key_where, "keys", keys, name="key_where", shape="m"), keys)
    if key_bias is not None:
        key_bias = checks.floating("key_bias", key_bias, "m")
        checks.same_rows("key_bias", key_bias, "keys", keys)
    number, num_keys = queries.shape[0], keys.shape[0]
    positions = own_positions(number, axis_name)
    labels = positions
    if ids is not None:
        labels = checks.integers("ids", ids, "n")
        checks.same_rows("ids", labels, "queries", queries)
        if num_keys > number and jnp.issubdtype(labels.dtype, jnp.unsignedinteger):
            labels = _numbered(labels, axis_name)  # All their values may be ids, so none is free.
        labels = jnp.where(labels < 0, -2 - positions.astype(labels.dtype), labels)
    valid = valid & key_valid[:number]
    key_valid = jnp.concatenate([valid, key_valid[number:]])
    no_label = jnp.full(num_keys - number, -1).astype(labels.dtype)
    key_labels = jnp.concatenate([labels, no_label])

    low, compared = low_dtypes(queries, keys), similarity
    if similarity == "cosine" and any(low):  # Unit vectors would not be exact in a low dtype.
        queries, keys = widen(
            power_of_two_scaled(queries, valid), power_of_two_scaled(keys, key_valid)
        )
        own, other = zero_invalid(queries, valid), zero_invalid(keys[:number], valid)
        norms = inverse_norms_of_scaled(own) * inverse_norms_of_scaled(other)
        own = jnp.sum(own * other, axis=1) * norms
    else:
        load = l2_normalize if similarity == "cosine" else zero_invalid
        queries, keys = widen(queries, keys)
        loaded = load(queries, valid), load(keys, key_valid)
        own = similarities_of_rows(similarity, loaded[0], loaded[1][:number])
        if similarity in ("cosine", "inner") and not any(low):
            (queries, keys), compared = loaded, "inner"
    sides = Sides(
        Rows(queries, labels, valid, positions),
        # None of them is that of a query: no row of one tower is a row of the other.
        Rows(keys, key_labels, key_valid, ~own_positions(num_keys, axis_name), bias=key_bias),
        compared,
        (low[0], low[1]),
        True,
        block_size,
        axis_name,
    )
    return Towers(sides, own, similarity)


def _numbered(ids: Integer[Array, " n"], axis_name: AxisName | None) -> Int32[Array, " n"]:
    """Returns numbers from 0 on that are equal where the ids of all devices are."""
    everyone = gather(ids, axis_name)
    _, numbers = jnp.unique(everyone, size=max(len(everyone), 1), return_inverse=True)
    first = first_position(ids.shape[0], axis_name)
    return lax.dynamic_slice_in_dim(numbers.astype(jnp.int32), first, ids.shape[0])


def _mask(where: Bool[Array, " n"] | None, rows: Float[Array, "n d"]) -> Bool[Array, " n"]:
    return jnp.ones(rows.shape[0], bool) if where is None else where
