"""Anchors in blocks, each compared with all references at once.

For what needs all references of an anchor at once, such as their order: tiles do not have it. The
largest arrays are `[rows of a block, m]`. A gradient computes them again, so neither value nor
gradient keeps n·m. Over devices, the references are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer

from jaxloss.core.backend import on_cpu
from jaxloss.core.batch import AxisName, gather, sum_over
from jaxloss.core.blocks import in_blocks, joined
from jaxloss.core.linear import negative_squared_distances, sizes_are_known
from jaxloss.core.products import float32_precision
from jaxloss.pairs.rows import Rows, Similarity, center_of

Results = TypeVar("Results")


class Pairs(NamedTuple):
    """The pairs of a block of anchors with all references."""

    anchors: Float[Array, "a d"]
    similarities: Float[Array, "a m"]
    positives: Bool[Array, "a m"]
    """References of the same class, without the anchor itself."""
    negatives: Bool[Array, "a m"]
    by_class: Integer[Array, " m"]
    """The references in the order of their classes."""
    first: Integer[Array, " a"]
    """Where the class of the anchor begins in this order."""
    past: Integer[Array, " a"]
    """One past its last place."""


def over_row_blocks(
    of_block: Callable[[Pairs], Results],
    anchors: Rows,
    references: Rows | None,
    *,
    similarity: Similarity,
    block_size: int | None,
    axis_name: AxisName | None,
) -> Results:
    """Returns the arrays `[n, ...]` of `of_block`, which gets the pairs of a block of anchors.

    Args:
      of_block: Results of each anchor, `[a, ...]`, from its pairs alone.
      anchors: The rows of this device, with finite numbers in the invalid ones.
      references: The references of this device. None: the anchors of all devices.
      similarity: Of a pair: the inner product, or the negative squared distance.
      block_size: Anchors of a block. By default it depends on the shapes and the backend.
      axis_name: Mapped axis over which anchors and references are spread. References are gathered.
    """
    if similarity == "negative_squared_distance":
        anchors, references = _centered(anchors, references, axis_name)
    others = jax.tree.map(partial(gather, axis_name=axis_name), references or anchors)
    number, num_references = anchors.labels.shape[0], others.labels.shape[0]
    size = number
    if sizes_are_known(number, num_references):
        most = (2**18 if on_cpu() else 2**24) // max(num_references, 1)
        size = max(min(most if block_size is None else block_size, number), 1)

    # Invalid references come last, so that padding does not lengthen a class.
    labels = others.labels
    last = jnp.asarray(jnp.iinfo(labels.dtype).max, labels.dtype)  # Not in int32, if unsigned.
    classes = jnp.where(others.valid, labels, last)
    by_class = jnp.argsort(classes).astype(jnp.int32)
    classes = classes[by_class]

    def results(block: Rows) -> Results:
        first = places_in_order(classes, block.labels, "left")
        past = places_in_order(classes, block.labels, "right")
        positives, negatives, similarities = _pairs(block, others, similarity)
        return of_block(
            Pairs(block.features, similarities, positives, negatives, by_class, first, past)
        )

    if number <= size:
        return results(anchors)

    blocks = lax.map(jax.checkpoint(results), in_blocks(anchors, size))
    return joined(blocks, number)


def places_in_order(
    ordered: Integer[Array, " m"], labels: Integer[Array, " n"], side: Literal["left", "right"]
) -> Int32[Array, " n"]:
    """Returns before how many, or after how many of the ordered labels each label has its place."""
    if sizes_are_known(ordered.shape[0]):
        return jnp.searchsorted(ordered, labels, side=side).astype(jnp.int32)
    ordered, own = ordered[None, :], labels[:, None]  # `jnp.searchsorted` takes no symbols.
    before = ordered < own if side == "left" else ordered <= own
    return jnp.sum(before, axis=1, dtype=jnp.int32)


def _pairs(
    anchors: Rows, references: Rows, similarity: Similarity
) -> tuple[Bool[Array, "a m"], Bool[Array, "a m"], Float[Array, "a m"]]:
    """Returns the positives, the negatives and the similarities."""
    used = anchors.valid[:, None] & references.valid[None, :]
    used = used & (anchors.positions[:, None] != references.positions[None, :])
    positives = anchors.labels[:, None] == references.labels[None, :]
    # Not a product with a transpose, which XLA for CPUs would keep beside the references.
    similarities = jnp.einsum(
        "ad,md->am", anchors.features, references.features, precision=float32_precision()
    )
    if similarity == "negative_squared_distance":
        own, other = (jnp.sum(rows.features**2, axis=1) for rows in (anchors, references))
        similarities = negative_squared_distances(similarities, own, other)
    return used & positives, used & ~positives, similarities


def _centered(
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
