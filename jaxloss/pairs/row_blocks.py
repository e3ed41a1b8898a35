"""Anchors in blocks, each compared with all references at once.

For what needs all references of an anchor at once, such as their order: tiles do not have it. The
largest arrays are `[rows of a block, m]`. A gradient computes them again, so neither value nor
gradient keeps n·m. Over devices, the references are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Integer

from jaxloss.core.batch import AxisName, gather
from jaxloss.core.blocks import in_blocks, joined, rows_of_all_pairs
from jaxloss.core.linear import negative_squared_distances, sizes_are_known
from jaxloss.core.products import float32_precision
from jaxloss.pairs.rows import Compared, Rows

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
    similarity: Compared,
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
    others = jax.tree.map(partial(gather, axis_name=axis_name), references or anchors)
    number, num_references = anchors.labels.shape[0], others.labels.shape[0]
    size = rows_of_all_pairs(number, num_references, block_size)

    # Invalid references come last, so that padding does not lengthen a class.
    labels = others.labels
    last = jnp.asarray(jnp.iinfo(labels.dtype).max, labels.dtype)  # Not in int32, if unsigned.
    classes = jnp.where(others.valid, labels, last)
    by_class = jnp.argsort(classes).astype(jnp.int32)
    classes = classes[by_class]

    def results(block: Rows) -> Results:
        if sizes_are_known(num_references):
            first, past = (
                jnp.searchsorted(classes, block.labels, side=side).astype(jnp.int32)
                for side in ("left", "right")
            )
        else:  # `jnp.searchsorted` takes no symbols.
            ordered, own = classes[None, :], block.labels[:, None]
            first, past = (
                jnp.sum(before, axis=1, dtype=jnp.int32)
                for before in (ordered < own, ordered <= own)
            )
        positives, negatives, similarities = _pairs(block, others, similarity)
        return of_block(
            Pairs(block.features, similarities, positives, negatives, by_class, first, past)
        )

    if number <= size:
        return results(anchors)

    blocks = lax.map(jax.checkpoint(results), in_blocks(anchors, size))
    return joined(blocks, number)


def _pairs(
    anchors: Rows, references: Rows, similarity: Compared
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
