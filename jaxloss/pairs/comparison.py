"""Comparisons of a batch with itself or with references, for pairwise losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer, Real, Shaped

from jaxloss.core import batch, checks
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.linear import l2_normalize, power_of_two_scaled, wide_dtype
from jaxloss.core.products import low_dtypes, switch
from jaxloss.pairs.queue import Queue, share_of
from jaxloss.pairs.rows import (
    DISTANCES,
    How,
    Rows,
    Similarity,
    anchors_and_references,
    center_of,
    widened,
)
from jaxloss.pairs.statistics import ByClass, Pair, PairReduction, Params, Statistic, similarity_of
from jaxloss.pairs.visits import rows_at, statistics_of


class Comparison(NamedTuple):
    """Each sample of a batch with the others, or with references: see `compare`."""

    anchors: Rows
    references: Rows | None
    """None: the anchors."""
    how: How

    @property
    def dtype(self) -> Any:
        """Of values and statistics."""
        return self.how.dtype

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
        params, statistics = checked_statistics(params, statistics, self.dtype)
        if self.references is None and self.anchors.numbers is not None:
            statistics = tuple(statistic._replace(by_row=True) for statistic in statistics)
        return statistics_of(*self, params, statistics)[0]

    def given(self, numbers: Any) -> Comparison:
        """Returns the same comparison, with other `numbers` of the samples.

        Args:
          numbers: As in `compare`, such as statistics of another call. They replace earlier ones.
        """
        numbers = checked_numbers("numbers", numbers, self.anchors.valid)
        return self._replace(anchors=self.anchors.with_numbers(numbers, self.dtype))

    def rows_at(
        self, positions: Int32[Array, " n"], rows: Float[Array, "m d"]
    ) -> Float[Array, "n d"]:
        """Returns the rows that `ARGMAX` found, with gradients.

        Args:
          positions: What a statistic of `ARGMAX` returned.
          rows: Arrays of the references, such as their features; without references, of the
            samples. With `axis_name`, those of this device. A `Queue` has its rows on every device:
            index them.
        """
        return rows_at(positions, rows, self.how.axis_name)

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
        return reduced_losses("features", self, values, counts, sample_weights, reduction)


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
      reference_numbers: The same of the references, `[m]`; of a `Queue`, the same on every device,
        so that in a loss that is `divided` they have no annotation.
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
    features, labels, valid = batch.checked_rows_of_any_labels(features, labels, where)
    own, other = anchors_and_references(
        features, labels, valid, references, reference_labels, reference_where, axis_name=axis_name
    )
    check_options(similarity, block_size)
    compared_with = features if other is None else other.features
    how = How(
        similarity,
        wide_dtype(features, compared_with),
        low_dtypes(features, compared_with),
        block_sizes=(block_size, block_size),
        ends_early=isinstance(references, Queue),
        axis_name=axis_name,
    )
    own, other, how = loaded_for_products(own, other, how)
    for name, value in (("numbers", reference_numbers), ("guide", reference_guide)):
        if other is None and value is not None:
            raise ValueError(f"`reference_{name}` must come with `references`, which are missing")
    own = own.with_numbers(checked_numbers("numbers", numbers, own.valid), how.dtype)
    if isinstance(references, Queue) and axis_name is not None:  # Devices take shares, as of rows.
        whole = jnp.asarray(references.labels)
        reference_numbers = checked_numbers("reference_numbers", reference_numbers, whole)
        if reference_guide is not None:
            reference_guide = checks.floating("reference_guide", reference_guide, "m e")
            checks.same_rows("reference_guide", reference_guide, "references", whole)
        reference_numbers, reference_guide = jax.tree.map(
            lambda leaf: share_of(leaf, axis_name, 0), (reference_numbers, reference_guide)
        )
    if other is not None:
        numbers = checked_numbers("reference_numbers", reference_numbers, other.valid)
        other = other.with_numbers(numbers, how.dtype)
    by = guide_similarity or similarity
    guides = guide, reference_guide
    return Comparison(*with_guides((own, other, how), guides, by, "reference_guide"))


def compare_distances(
    anchors: Rows,
    references: Rows | None,
    wide: tuple[Rows, Rows | None],
    *,
    normalized: bool,
    block_size: int | None,
    axis_name: AxisName | None,
) -> tuple[Comparison, Callable[[Pair, Params], Float[Array, "a b"]]]:
    """Returns a comparison, and a value that falls with the distance of two rows, for `ARGMAX`.

    Args:
      anchors, references: The rows as they are.
      wide: The rows `widened`.
      normalized: Whether these are unit vectors. Those of low-precision rows are not exact in their
        dtype, so that the rows themselves are compared, by their cosines.
      block_size, axis_name: Those of the loss.
    """
    both = [rows.features for rows in (anchors, references) if rows is not None]
    flags: list[Any] = [None, None]
    is_low = any(low_dtypes(*both))
    if not is_low:
        both = [rows.features for rows in wide if rows is not None]
    elif normalized:
        flags = [jnp.any(array != 0, axis=1).astype(jnp.int32) for array in both]
    of_references: dict[str, Any] = {}
    if references is not None:
        of_references = {
            "references": both[1],
            "reference_labels": references.labels,
            "reference_where": references.valid,
            "reference_numbers": flags[1],
        }
    pairs = compare(
        both[0],
        anchors.labels,
        numbers=flags[0],
        similarity="cosine" if is_low and normalized else "negative_squared_distance",
        where=anchors.valid,
        block_size=block_size,
        axis_name=axis_name,
        **of_references,
    )
    return pairs, _cosine_of_equal_distance if is_low and normalized else similarity_of


def _cosine_of_equal_distance(pair: Pair, _params: Params) -> Float[Array, "a b"]:
    """A value: the cosine. A zero vector is as far from unit vectors as one of cosine 1/2."""
    return jnp.where(pair.reference == 0, 0.5, pair.similarity)


# What comparisons of a batch and of two towers share ----


def check_options(similarity: Any, block_size: Any) -> None:
    """Checks options of a comparison."""
    checks.choice("similarity", similarity, get_args(Similarity))
    checks.block_size(block_size)


def loaded_for_products(
    anchors: Rows, references: Rows | None, how: How
) -> tuple[Rows, Rows | None, How]:
    """Returns rows of which cosines and inner products are computed, as tiles need them."""
    how = how._replace(switch=switch())
    if how.similarity in ("cosine", "inner") and not how.is_low:
        both = widened(anchors, references, normalize=how.similarity == "cosine")
        return *both, how._replace(similarity="inner")
    if how.similarity != "cosine":
        return anchors, references, how

    def scaled(rows: Rows) -> Rows:  # Unit vectors would not be exact in a low dtype.
        return rows._replace(features=power_of_two_scaled(rows.features, rows.valid))

    return scaled(anchors), references and scaled(references), how


def checked_numbers(name: str, numbers: Any, valid: Shaped[Array, " n"]) -> Any:
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


def with_guides(
    compared: tuple[Rows, Rows | None, How], guides: tuple[Any, Any], similarity: Any, name: str
) -> tuple[Rows, Rows | None, How]:
    """Checks guides, and returns the rows with them. They are loaded once."""
    (anchors, references, how), (guide, other_guide) = compared, guides
    checks.choice("guide_similarity", similarity, get_args(Similarity))
    if guide is None and other_guide is None:
        return compared
    if guide is None or (other_guide is None) != (references is None):
        given = {"guide": guide, name: other_guide}
        missing, present = sorted(given, key=lambda name: given[name] is not None)
        raise ValueError(f"`{missing}` is missing beside `{present}`")
    names = ("queries", "keys") if name == "key_guide" else ("features", "references")
    guide = checks.floating("guide", guide, "n e")
    checks.same_rows("guide", guide, names[0], anchors.features)
    both = [(anchors, guide)]
    if references is not None:
        other = checks.floating(name, other_guide, "m e")
        checks.same_rows(name, other, names[1], references.features)
        checks.same_size(name, other, "m e", "e", guide.shape[1], f"`guide` {guide.shape}")
        both.append((references, other))
    loaded = lax.stop_gradient([guide.astype(how.dtype) for _, guide in both])
    if similarity in DISTANCES:
        center = center_of(both[-1][0]._replace(features=loaded[-1]), how.axis_name)
        loaded = [guide - center[None, :] for guide in loaded]
    load = l2_normalize if similarity == "cosine" else batch.zero_invalid
    own, *rest = (
        rows._replace(guide=load(guide, rows.valid))
        for (rows, _), guide in zip(both, loaded, strict=True)
    )
    similarity = "inner" if similarity == "cosine" else similarity
    return own, rest[0] if rest else None, how._replace(guide_similarity=similarity)


def checked_statistics(
    params: Any, statistics: tuple[Any, ...], dtype: Any
) -> tuple[Params, tuple[Statistic, ...]]:
    """Checks what users pass to `statistics`.

    Parameters become arrays: as constants of a program, others would compile another one.
    """
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
                f"ARGMAX, SUM or COUNT of `jaxloss.pairs`, got {statistic!r}"
            )
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params), statistics


def reduced_losses(
    name: str, pairs: Any, values: Any, counts: Any, sample_weights: Any, reduction: Any
) -> Any:
    """Reduces the losses of the anchors that are valid and count."""
    rows, mask = pairs.anchors.features, pairs.anchors.valid
    values = checks.floating("values", values, "n")
    checks.same_rows("values", values, name, rows)
    counts = checks.row_mask(counts, name, rows, name="counts")
    mask = mask if counts is None else mask & counts
    return batch.reduce(values, mask, sample_weights, reduction, pairs.how.axis_name)
