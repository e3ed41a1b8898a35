"""What is compared, and how: the two records of the engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer

from jaxloss.core import batch, checks
from jaxloss.core.batch import AxisName
from jaxloss.core.linear import l2_normalize, wide_dtype, widen
from jaxloss.core.products import Low, nearest
from jaxloss.pairs.queue import Queue, checked_queue, share_of

Function = TypeVar("Function", bound=Callable[..., Any])
Similarity: TypeAlias = Literal["inner", "cosine", "negative_squared_distance", "negative_distance"]
"""Of a pair: `x·y`, `x̂·ŷ`, `−‖x − y‖²`, `−‖x − y‖`."""
DISTANCES = ("negative_squared_distance", "negative_distance")
"""Of these: rows are compared relative to a center, and gradients need row sums."""


class Rows(NamedTuple):
    """Samples: anchors or references."""

    features: Float[Array, "n d"]
    """For inner products in a wide dtype, with zeros in the invalid rows."""
    labels: Integer[Array, " n"] | Integer[Array, "n C"]
    """Class indices, or multi-hot targets of 1, of 0, and of -1 for an unknown class."""
    valid: Bool[Array, " n"]
    positions: Int32[Array, " n"]
    """From 0 on, over all devices. Those of references that are no anchors are -1, -2, and so on: a
    reference at the position of the anchor is the anchor itself, and left out."""
    numbers: Any = None
    """A pytree of arrays `[n]` that the values of pairs depend on."""
    guide: Float[Array, "n e"] | None = None
    """In the dtype of the values: unit vectors for cosines, relative to a center for distances."""

    def with_numbers(self, numbers: Any, dtype: Any) -> Rows:
        """Returns the rows with other numbers, of which the floats have this dtype.

        Invalid rows have those of a valid one, or 1: where values divide by them, 0 is a pole.
        """

        def filled(array: Array) -> Array:
            if jnp.issubdtype(array.dtype, jnp.floating):
                array = array.astype(dtype)
            if not array.shape[0]:
                return array
            some = jnp.argmax(self.valid)
            number = jnp.where(self.valid[some], lax.stop_gradient(array)[some], 1)
            return jnp.where(self.valid, array, number)

        return self._replace(numbers=jax.tree.map(filled, numbers))


class How(NamedTuple):
    """How rows are compared: all that is known before the first number."""

    similarity: Similarity
    """As tiles compute it. Cosines of wide rows are inner products of unit vectors."""
    dtype: Any
    """Of similarities, values and statistics."""
    low: tuple[Low, Low]
    """In which low dtype the anchors are multiplied, and the references; None for the wide one.
    Cosines are those of low-precision rows of which no square over- or underflows."""
    guide_similarity: Similarity | None = None
    """As tiles compute it of guides; None without guides."""
    ignores_equal: bool = False
    """Whether pairs of one label do not count: labels are then ids, and all pairs are negatives."""
    both_ways: bool = False
    """Whether references have statistics, too."""
    block_sizes: tuple[int | None, int | None] = (None, None)
    """Anchors and references of a tile. By default they depend on the shapes and the backend."""
    ends_early: bool = False
    """Whether the last blocks of references may have no valid one, and are then not visited."""
    axis_name: AxisName | None = None
    """Mapped axis over which anchors and references are spread."""
    ring_axis: AxisName | None = None
    """The same, if references travel around a ring of devices; None if a device has all of them."""
    switch: Any = None
    """JAX's own switch of precision where the rows were compared."""

    @property
    def is_low(self) -> bool:
        """Whether any rows are multiplied in a low dtype."""
        return any(self.low)


def as_compared(run: Function) -> Function:
    """Returns a pass over tiles, with JAX's switch as it was where the rows were compared.

    JAX traces a backward pass later, which may be outside of the user's `with`.
    """

    @functools.wraps(run)
    def call(how: How, *args: Any) -> Any:
        with jax.default_matmul_precision(how.switch):
            return run(how, *args)

    return call  # pyright: ignore[reportReturnType]


def anchors_and_references(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"] | Integer[Array, "n C"],
    valid: Bool[Array, " n"],
    references: Any = None,
    reference_labels: Any = None,
    reference_where: Any = None,
    *,
    axis_name: AxisName | None,
) -> tuple[Rows, Rows | None]:
    """Checks the references of a pairwise loss, and returns the rows of this device as they are.

    Args:
      features, labels, valid: As they are checked.
      references, reference_labels, reference_where: Not checked yet. References are rows like the
        features, or a `Queue`, which is the same on every device and of which each takes a share.
      axis_name: That of the loss.
    """
    anchors = Rows(features, labels, valid, batch.own_positions(labels.shape[0], axis_name))
    if isinstance(references, Queue):
        if reference_labels is not None:
            raise ValueError(
                "`reference_labels` must be None where `references` is a Queue, which has its own"
            )
        if labels.ndim == 2:
            raise ValueError(
                "`references` is a Queue, which holds class indices, and `labels` are targets "
                f"{labels.shape}; pass arrays as `references` and `reference_labels`"
            )
        queue = checked_queue(references)
        references, reference_labels = lax.stop_gradient(queue.features), queue.labels
        if axis_name is not None:
            is_whole = checks.rank(reference_where) and len(reference_where) == len(references)
            references = share_of(references, axis_name, 0)
            reference_labels = share_of(reference_labels, axis_name, -1)
            if is_whole:  # On a mesh of Explicit axes, a mask is in shares already.
                reference_where = share_of(jnp.asarray(reference_where), axis_name, False)
    given = {
        "references": references,
        "reference_labels": reference_labels,
        "reference_where": reference_where,
    }
    present = [name for name, value in given.items() if value is not None]
    if not present:
        return anchors, None
    if references is None or reference_labels is None:
        for name in present:
            checks.as_array(name, given[name])
        raise ValueError(
            "`references` and `reference_labels` must be given together, "
            f"got only {' and '.join(f'`{name}`' for name in present)}"
        )
    rows = checks.matching("references", references, "m d", features)
    if labels.ndim == 2:
        others = checks.class_sets(
            reference_labels, "references", rows, name="reference_labels", shape="m C"
        )
        if others.shape[1] != labels.shape[1]:
            raise ValueError(
                f"`reference_labels` must have shape [m, C] with C = {labels.shape[1]} to match "
                f"`labels` {labels.shape}, got {others.shape}"
            )
    else:
        others = checks.class_labels(
            reference_labels, "references", rows, name="reference_labels", shape="m"
        )
    where = checks.row_mask(reference_where, "references", rows, name="reference_where", shape="m")
    others_valid = batch.valid_rows(others, where)
    rows = batch.nan_where_no_target(rows, reference_labels, others_valid)
    labels, others = batch.comparable(labels, others)
    positions = ~batch.own_positions(rows.shape[0], axis_name)
    return anchors._replace(labels=labels), Rows(rows, others, others_valid, positions)


def widened(anchors: Rows, references: Rows | None, *, normalize: bool) -> tuple[Rows, Rows | None]:
    """Returns the rows in one wide dtype, with zeros in the invalid ones; or unit vectors."""
    dtype = wide_dtype(anchors.features, (references or anchors).features)
    load = l2_normalize if normalize else batch.zero_invalid

    def wide(rows: Rows) -> Rows:
        return rows._replace(features=load(rows.features.astype(dtype), rows.valid))

    return wide(anchors), references and wide(references)


# Centers: distances relative to one are rounded less ----


def center_for(anchors: Rows, references: Rows | None, how: How) -> Float[Array, " d"] | None:
    """Returns the mean of the references, for distances; with low-precision rows, where exact.

    It is that of the references, so that an anchor that is not finite reaches no other anchor.
    """
    if how.similarity not in DISTANCES:
        return None
    both = [rows for rows in (anchors, references) if rows is not None]
    center = center_of(both[-1], how.axis_name)
    if not how.is_low:
        return center
    with_low = [(rows.features, rows.valid, low) for rows, low in zip(both, how.low, strict=False)]
    return exact_center(center, with_low, how.axis_name)


def center_of(rows: Rows, axis_name: AxisName | None) -> Float[Array, " d"]:
    """Returns the mean of the valid rows."""
    (features,) = widen(rows.features)
    total = batch.sum_over(jnp.sum(jnp.where(rows.valid[:, None], features, 0), axis=0), axis_name)
    number = batch.sum_over(jnp.sum(rows.valid), axis_name)
    return lax.stop_gradient(total / jnp.maximum(number, 1).astype(total.dtype))


def exact_center(
    center: Float[Array, " d"], rows: list[tuple[Array, Array, Low]], axis_name: AxisName | None
) -> Float[Array, " d"]:
    """Returns the center where all low-precision rows minus it stay exact, and 0 elsewhere.

    Args:
      center: Of float32 numbers.
      rows: Features, their mask, and the low dtype in which they are exact or None.
      axis_name: The axis over which the rows are split.
    """
    center = nearest(center, next(low for *_, low in rows if low is not None))
    inexact = jnp.zeros(center.shape, jnp.int32)
    for features, valid, low in rows:
        if low is not None:
            features = lax.stop_gradient(features).astype(center.dtype)
            moved = features - center[None, :]
            exact = (nearest(moved, low) == moved) & (moved + center[None, :] == features)
            inexact += jnp.sum(~exact & valid[:, None], axis=0, dtype=jnp.int32)
    return jnp.where(batch.sum_over(inexact, axis_name) == 0, center, 0)
