"""Rows that are compared, as the tiles take them: loaded, scaled or relative to a center."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer

from jaxloss.core.batch import AxisName, comparable, own_positions, sum_over, zero_invalid
from jaxloss.core.linear import distances_of_squares, l2_normalize, power_of_two_scaled, widen
from jaxloss.core.products import Low, low_dtypes, nearest

Similarity: TypeAlias = Literal["inner", "cosine", "negative_squared_distance", "negative_distance"]
"""Of a pair: `x·y`, `x̂·ŷ`, `−‖x − y‖²`, `−‖x − y‖`."""
DISTANCES = ("negative_squared_distance", "negative_distance")
"""Of these: rows are compared relative to a center, and gradients need row sums."""
Compared: TypeAlias = Similarity | Literal["negative_squared_distance_of_units"]
"""What the tiles compute. Cosines, and distances of unit vectors, are those of low-precision rows
of which no square over- or underflows. Of others, unit vectors have them as inner products and
distances. Distances of unit vectors have no gradient here."""


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
    """Loaded as `similarities_of_rows` takes them, relative to a center for distances."""


def similarities_of_rows(
    similarity: Similarity, a: Float[Array, "*k d"], b: Float[Array, "*m d"]
) -> Float[Array, " *m"]:
    """Returns the similarities of rows one by one; for cosines, those of unit vectors."""
    if similarity in ("cosine", "inner"):
        return jnp.sum(a * b, axis=-1)
    squares = jnp.sum((a - b) ** 2, axis=-1)
    if similarity == "negative_squared_distance":
        return -squares
    return -distances_of_squares(squares, jnp.zeros_like(squares))


def anchors_and_references(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"] | Integer[Array, "n C"],
    valid: Bool[Array, " n"],
    references: tuple[Array, Array, Array] | None,
    axis_name: AxisName | None,
    *,
    normalize: bool = False,
    load: bool = False,
) -> tuple[Rows, Rows | None]:
    """Returns the anchors of this device, and what `reference_rows` returned as rows.

    With `normalize`, their features are unit vectors. With `load`, they are in a wide dtype, with
    zeros in the invalid rows; by default they are as given, and each tile loads its own.
    """
    positions = own_positions(labels.shape[0], axis_name)
    sides = [Rows(features, labels, valid, positions)]
    if references is not None:
        others, other_labels, other_valid = references
        labels, other_labels = comparable(labels, other_labels)
        elsewhere = ~own_positions(others.shape[0], axis_name)
        sides = [
            Rows(features, labels, valid, positions),
            Rows(others, other_labels, other_valid, elsewhere),
        ]
    if normalize or load:
        wide = widen(*(rows.features for rows in sides))
        loaded = l2_normalize if normalize else zero_invalid
        sides = [
            rows._replace(features=loaded(x, rows.valid))
            for rows, x in zip(sides, wide, strict=True)
        ]
    return sides[0], None if references is None else sides[1]


def are_low(features: Float[Array, "n d"], references: tuple[Array, Array, Array] | None) -> bool:
    """Returns whether such rows, and what `reference_rows` returned, are multiplied as they are."""
    return any(low_dtypes(features, features if references is None else references[0]))


def scaled(anchors: Rows, references: Rows | None) -> tuple[Rows, Rows | None]:
    """Returns low-precision rows whose unit vectors are compared."""

    def of(rows: Rows) -> Rows:
        return rows._replace(features=power_of_two_scaled(rows.features, rows.valid))

    return of(anchors), None if references is None else of(references)


# Centers: distances relative to one are rounded less ----


def center_of(rows: Rows, axis_name: AxisName | None) -> Float[Array, " d"]:
    """Returns the mean of the valid rows."""
    (features,) = widen(rows.features)
    total = sum_over(jnp.sum(jnp.where(rows.valid[:, None], features, 0), axis=0), axis_name)
    number = sum_over(jnp.sum(rows.valid), axis_name)
    return lax.stop_gradient(total / jnp.maximum(number, 1).astype(total.dtype))


def exact_center(
    center: Float[Array, " d"],
    sides: tuple[tuple[Array, Array, Low], ...],
    axis_name: AxisName | None,
) -> Float[Array, " d"]:
    """Returns the center where all low-precision rows minus it stay exact, and 0 elsewhere.

    Args:
      center: Of float32 numbers.
      sides: Rows, their mask, and the low dtype in which they are exact or None.
      axis_name: The axis over which the rows are split.
    """
    center = nearest(center, next(low for *_, low in sides if low is not None))
    inexact = jnp.zeros(center.shape, jnp.int32)
    for rows, valid, low in sides:
        if low is not None:
            rows = lax.stop_gradient(rows).astype(center.dtype)
            moved = rows - center[None, :]
            exact = (nearest(moved, low) == moved) & (moved + center[None, :] == rows)
            inexact += jnp.sum(~exact & valid[:, None], axis=0, dtype=jnp.int32)
    return jnp.where(sum_over(inexact, axis_name) == 0, center, 0)


def centered(
    anchors: Rows, references: Rows | None, axis_name: AxisName | None
) -> tuple[Rows, Rows | None]:
    """Returns the rows relative to a center of the references.

    The center is near most of them, even if a few are far away: a mean of them would take the
    digits of all others. It is rounded to a part of their spread, so that it does not depend on the
    order of the rows, and rows of whole numbers stay exact: equal distances are then equal numbers.
    """
    rows = lax.stop_gradient(references or anchors)
    center = center_of(rows, axis_name)
    number = sum_over(jnp.sum(rows.valid, dtype=center.dtype), axis_name)
    spread = jnp.zeros_like(number)
    for _ in range(2):  # Means of weights that fall with the squared distance.
        squares = jnp.sum((rows.features - center[None, :]) ** 2, axis=1)
        squares = jnp.where(rows.valid, squares, 0)
        floor = 1e-6 * sum_over(jnp.sum(squares), axis_name) / jnp.maximum(number, 1)
        weights = jnp.where(rows.valid & (floor > 0), floor, 0)
        weights = weights / jnp.where(weights > 0, squares + floor, 1)
        total = sum_over(jnp.sum(weights), axis_name)
        moved = sum_over(jnp.sum(weights[:, None] * rows.features, axis=0), axis_name)
        total_or_1 = jnp.where(total > 0, total, 1)
        center = jnp.where(total > 0, moved / total_or_1, center)
        spread = sum_over(jnp.sum(weights * squares), axis_name) / (total_or_1 * center.shape[0])
    _, exponent = jnp.frexp(jnp.sqrt(jnp.where((spread > 0) & (spread < jnp.inf), spread, 1)))
    grid = jnp.ldexp(jnp.ones_like(spread), exponent - 4)
    center = (jnp.round(center / grid) * grid)[None, :]
    if references is not None:
        references = references._replace(features=references.features - center)
    return anchors._replace(features=anchors.features - center), references
