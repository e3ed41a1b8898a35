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
    axis_size,
    checked_rows_of_any_labels,
    comparable,
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
from jaxloss.pairs.queue import Queue, reference_rows, share_of
from jaxloss.pairs.rows import (
    DISTANCES,
    Rows,
    Similarity,
    anchors_and_references,
    are_low,
    center_of,
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
          those of other classes. They have gradients by the features, `params` and numbers.
        """
        return statistics_of(self.sides, *_checked(params, self.dtype, statistics))

    def given(self, numbers: Any) -> Comparison:
        """Returns the same comparison, with other `numbers` of the samples.

        Args:
          numbers: As in `compare`, such as statistics of another call. They replace earlier ones.
        """
        anchors = self.sides.anchors
        anchors = anchors._replace(numbers=_checked_numbers("numbers", numbers, anchors.valid))
        return self._replace(sides=self.sides._replace(anchors=anchors))

    def reduce(
        self,
        values: Float[Array, " n"],
        counts: Bool[Array, " n"] | None = None,
        sample_weights: Float[Array, " n"] | None = None,
        reduction: Reduction = "mean",
    ) -> Float[Array, ""] | Float[Array, " n"]:
        """Reduces the losses of the samples that are valid and count, as all losses do.

        Args:
          values: Losses `[n]`.
          counts: bool `[n]`, the samples for which the loss is defined; by default all.
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
    numbers: Any = None,
    reference_numbers: Any = None,
    guide: Float[Array, "n e"] | None = None,
    reference_guide: Float[Array, "m e"] | None = None,
    guide_similarity: Similarity | None = None,
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
      numbers: A pytree of arrays `[n]` that values depend on, as `pair.anchor`; without references,
        those of the other row are `pair.reference`. Floats have gradients, integers have none.
      reference_numbers: The same of the references, `[m]`; of a `Queue`, the same on every device.
      guide, reference_guide: `[n, e]` and `[m, e]`, of which `pair.guide` is the similarity, such
        as features of a teacher. They have no gradient.
      guide_similarity: That of guides; by default `similarity`.
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
      ...     def logit(pair, scale):
      ...         return scale * jnp.where(pair.same, -pair.similarity, pair.similarity)
      ...     (sums,) = pairs.statistics(8.0, Statistic(LOGSUMEXP, logit))
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
    sides = Sides(*rows, compared, None, False, block_size, axis_name)
    anchors = rows[0]._replace(numbers=_checked_numbers("numbers", numbers, valid))
    if others is None:
        for name, value in (
            ("reference_numbers", reference_numbers),
            ("reference_guide", reference_guide),
        ):
            if value is not None:
                raise ValueError(f"`{name}` must come with `references`, which are missing")
        sides = sides._replace(anchors=anchors)
    else:
        if isinstance(references, Queue) and axis_name is not None:  # As its rows.
            reference_numbers, reference_guide = jax.tree.map(
                lambda leaf: share_of(checks.as_array("reference_numbers", leaf), axis_name, 0),
                (reference_numbers, reference_guide),
            )
        reference_numbers = _checked_numbers("reference_numbers", reference_numbers, others[2])
        compared_with: Any = rows[1]
        sides = sides._replace(
            anchors=anchors, references=compared_with._replace(numbers=reference_numbers)
        )
    guides = _checked_guides(guide, reference_guide, "reference_guide", sides)
    return Comparison(_guided(sides, guides, guide_similarity or similarity), dtype)


def _checked_numbers(name: str, numbers: Any, valid: Bool[Array, " n"]) -> Any:
    """Returns numbers of rows as arrays of JAX."""
    size = "n" if name == "numbers" else "m"

    def checked(leaf: Any) -> Array:
        array = checks.as_array(name, leaf)
        if not jnp.issubdtype(array.dtype, jnp.number) or jnp.iscomplexobj(array):
            raise TypeError(f"`{name}` must have a float or an integer dtype, got {array.dtype}")
        if array.shape != valid.shape:
            wanted = f"[{size}] with {size} = {valid.shape[0]}"
            raise ValueError(f"`{name}` must have shape {wanted}, got {array.shape}")
        return array

    return jax.tree.map(checked, numbers)


def _checked_guides(guide: Any, other: Any, name: str, sides: Sides) -> tuple[Array, Array] | None:
    """Returns the guides of anchors and of references."""
    names = ("queries", "keys") if name == "key_guide" else ("features", "references")
    if guide is None and other is None:
        return None
    if guide is None or (other is None) != (sides.references is None):
        missing = "guide" if guide is None else name
        raise ValueError(f"`{missing}` is missing beside `{name if guide is None else 'guide'}`")
    guide = checks.floating("guide", guide, "n e")
    checks.same_rows("guide", guide, names[0], sides.anchors.features)
    if sides.references is None:
        return guide, guide
    other = checks.floating(name, other, "m e")
    checks.same_rows(name, other, names[1], sides.references.features)
    checks.same_size(name, other, "m e", "e", guide.shape[1], f"`guide` {guide.shape}")
    return guide, other


def _guided(sides: Sides, guides: tuple[Array, Array] | None, similarity: Any) -> Sides:
    """Returns the sides with guides, which are loaded once."""
    checks.choice("guide_similarity", similarity, get_args(Similarity))
    if guides is None:
        return sides
    rows = sides.anchors, sides.references or sides.anchors
    own, other = lax.stop_gradient(widen(*guides))
    if similarity in DISTANCES:
        center = center_of(rows[1]._replace(features=other), sides.axis_name)[None, :]
        own, other = own - center, other - center
    load = l2_normalize if similarity == "cosine" else zero_invalid
    own, other = load(own, rows[0].valid), load(other, rows[1].valid)
    anchors, references = sides.anchors._replace(guide=own), sides.references
    references = None if references is None else references._replace(guide=other)
    return sides._replace(anchors=anchors, references=references, guided_by=similarity)


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
                "`statistics` must be of `Statistic(reduction, value)` with LOGSUMEXP, MAX, MIN, "
                f"SUM or COUNT of `jaxloss.pairs`, got {statistic!r}"
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
    own_guide: Float[Array, " n"] | None = None
    """The similarity of the guides of each query and its own key."""

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
          *statistics: What to compute. `pair.anchor` is the query's, and `pair.reference` the
            key's, in statistics of keys, too.
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
    _check_how(similarity, block_size)
    queries = checks.floating("queries", queries, "n d")
    keys = checks.key_features(keys, queries)
    valid = _mask(checks.row_mask(where, "queries", queries), queries)
    key_valid = _mask(checks.row_mask(key_where, "keys", keys, name="key_where", shape="m"), keys)
    numbers = _checked_numbers("numbers", numbers, valid)
    key_numbers = _checked_numbers("key_numbers", key_numbers, key_valid)
    number, num_keys = queries.shape[0], keys.shape[0]
    positions = own_positions(number, axis_name)
    labels = positions
    if ids is not None:
        labels = checks.integers("ids", ids, "n")
        checks.same_rows("ids", labels, "queries", queries)
    labels, key_labels = _labels(labels, key_ids, keys, ids is not None, axis_name)
    # The own key of a query is left out, and no other row of one tower is a row of the other.
    key_positions = ~own_positions(num_keys, axis_name)
    if key_ids is not None:
        devices = 1 if axis_name is None else axis_size(axis_name)
        further = own_positions(num_keys - number, axis_name) + number * devices
        key_positions = jnp.concatenate([positions, ~further])
    valid = valid & key_valid[:number]
    key_valid = jnp.concatenate([valid, key_valid[number:]])

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
        Rows(queries, labels, valid, positions, numbers),
        Rows(keys, key_labels, key_valid, key_positions, key_numbers),
        compared,
        (low[0], low[1]),
        True,
        block_size,
        axis_name,
    )
    guides = _checked_guides(guide, key_guide, "key_guide", sides)
    sides, own_guide = _guided(sides, guides, guide_similarity or similarity), None
    if sides.guided_by is not None:
        both: Any = sides.anchors.guide, sides.references.guide  # pyright: ignore
        own_guide = similarities_of_rows(sides.guided_by, both[0], both[1][:number])
        own_guide = own_guide.astype(own.dtype)
    return Towers(sides, own, similarity, own_guide)


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
        ids, key_ids = comparable(ids, key_ids)
    if (further or key_ids is not None) and jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        # All their values may be ids, so none is free.
        both = ids if key_ids is None else jnp.concatenate([ids, key_ids])
        both = _numbered(both, axis_name)
        ids, key_ids = both[: ids.shape[0]], None if key_ids is None else both[ids.shape[0] :]
    alone = ids
    if have_ids:
        positions = own_positions(ids.shape[0], axis_name).astype(ids.dtype)
        alone = jnp.where(is_alone, -2 - positions, ids)
    if key_ids is not None:
        return alone, jnp.where(key_is_alone, -1, key_ids)
    return alone, jnp.concatenate([alone, jnp.full(further, -1).astype(ids.dtype)])


def _numbered(ids: Integer[Array, " n"], axis_name: AxisName | None) -> Int32[Array, " n"]:
    """Returns numbers from 0 on that are equal where the ids of all devices are."""
    everyone = gather(ids, axis_name)
    _, numbers = jnp.unique(everyone, size=max(len(everyone), 1), return_inverse=True)
    first = first_position(ids.shape[0], axis_name)
    return lax.dynamic_slice_in_dim(numbers.astype(jnp.int32), first, ids.shape[0])


def _mask(where: Bool[Array, " n"] | None, rows: Float[Array, "n d"]) -> Bool[Array, " n"]:
    return jnp.ones(rows.shape[0], bool) if where is None else where
