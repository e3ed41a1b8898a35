"""Blocks of rows and of classes: how large they are, and how arrays are cut into them.

A block fits into the caches of a CPU. Accelerators need large ones to be busy. Where a size is a
symbol of `jax.export`, there is one block of all, because the number of blocks must be known.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Shaped

from jaxloss.core.backend import on_cpu
from jaxloss.core.linear import sizes_are_known


def tile_sizes(
    num_anchors: int, num_references: int, block_size: int | None, *, symmetric: bool
) -> tuple[int, int]:
    """Returns the numbers of anchors and of references in a tile."""
    everything = max(num_anchors, 1), max(num_references, 1)
    if not sizes_are_known(num_anchors, num_references):
        return everything
    if block_size is not None:
        return min(block_size, everything[0]), min(block_size, everything[1])
    # The more anchors a tile has, the less often their gradients are read and written.
    largest = (2**10, 2**10) if on_cpu() else (2**12, 2**12) if symmetric else (2**13, 2**11)
    if num_anchors * num_references <= math.prod(largest):
        return everything
    return _even_size(num_anchors, largest[0]), _even_size(num_references, largest[1])


def _even_size(num_rows: int, largest: int) -> int:
    """Returns a block size of at most `largest` that leaves the fewest rows of padding.

    Of several, on a CPU the largest that is not a multiple of 512, and elsewhere the largest.
    """
    fewest = -(-num_rows // largest)
    sizes = [-(-num_rows // blocks) for blocks in range(fewest, 2 * fewest + 1)]
    # The elements of a column are a multiple of 2 kB apart, and compete for few places of a cache.
    slow = [on_cpu() and size % 512 == 0 for size in sizes]
    return min(zip(sizes, slow, strict=True), key=lambda it: (-num_rows % it[0], it[1], -it[0]))[0]


def rows_of_all_pairs(num_rows: int, num_references: int, block_size: int | None) -> int:
    """Returns the number of rows that are compared with all references at once."""
    if not sizes_are_known(num_rows, num_references):
        return num_rows
    most = (2**18 if on_cpu() else 2**24) // max(num_references, 1)
    return max(min(most if block_size is None else block_size, num_rows), 1)


def classes_of_means(num_classes: int, block_size: int | None, *, known: bool) -> int:
    """Returns the number of classes whose means are computed at once.

    Unless the classes are known, their number is that of the rows, and most often far too large.
    """
    num_classes = max(num_classes, 1)
    if not sizes_are_known(num_classes):
        return num_classes
    default = 512 if known else 64  # A batch of fewer classes takes as long.
    return min(default if block_size is None else block_size, num_classes)


def in_blocks(arrays: Any, size: int) -> Any:
    """Returns every array `[n, ...]` as `[ceil(n / size), size, ...]`, padded with zeros."""

    def blocks_of(array: Shaped[Array, " n *shape"]) -> Shaped[Array, "k a *shape"]:
        missing = -array.shape[0] % size if array.shape[0] else size
        if missing:
            array = jnp.pad(array, ((0, missing),) + ((0, 0),) * (array.ndim - 1))
        return array.reshape(-1, size, *array.shape[1:])

    return jax.tree.map(blocks_of, arrays)


def joined(blocks: Any, number: int) -> Any:
    """Returns the first rows of every array `[blocks, size, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:number], blocks)
