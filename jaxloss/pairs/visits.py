r"""Pairs of anchors and references, visited tile by tile.

**What is computed.** A pair of anchor i and reference j has a similarity `s_ij`, and a value
`v_ij`, a function of `s_ij`, of whether the two are of one class, and of parameters such as a
temperature. A `Statistic` reduces the values of an anchor to two numbers: over the references of
its own class, and over those of the other classes. The anchor itself and invalid rows are left out.
A pairwise loss is a short formula on these numbers. With `v = s / T`, for example, NCA is
`softplus(negative − positive)`.

**Forward.** The rows are cut into blocks (`_cut`). Each tile of similarities of blocks I and J
is computed, reduced along its rows, merged into what is known of block I (`Visits`), and
forgotten. Nothing is kept but the parts, unless all pairs fit into one tile.

**Symmetry.** If the anchors are their own references, tile (J, I) is the transpose of tile (I, J).
Only tiles on the diagonal and below it are visited. One below is reduced along its rows for block
I, and along its columns for block J. With an axis of devices, the rows of the batch are explicit
references, and all tiles are visited.

**Both ways.** Two towers need the statistics of each reference over all anchors, too. They come
from the same tiles, reduced along their columns, and are merged into the parts of block J.

**Backward.** The tiles are visited a second time. Similarities are computed twice, with two
products in the second visit: 8n²d operations, or half of that with symmetry. If all pairs fit into
one tile, its similarities are kept for the second visit.

**Second derivatives.** All passes are plain JAX, with loops that it can differentiate: so it can
differentiate the backward pass. A `jax.custom_vjp` has no forward mode.

**Devices.** Each device has its own anchors. References of all devices are gathered up to
`GATHERED_BYTES`. Above that, or if they have statistics of their own, they go around a ring: a
device visits its anchors with the block at hand, and passes the block on. What is found of a block
travels with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int32, Shaped

from jaxloss.core.backend import on_cpu
from jaxloss.core.batch import AxisName, axis_size, gather, own_positions, pass_on, vary_alike
from jaxloss.core.blocks import in_blocks, joined
from jaxloss.core.linear import sizes_are_known
from jaxloss.core.programs import compiled_once
from jaxloss.pairs import tiles
from jaxloss.pairs.rows import How, Rows, as_compared, center_for
from jaxloss.pairs.statistics import ByClass, Params, Statistic

GATHERED_BYTES = 2**24
"""References of all devices are gathered up to this size; larger ones are passed around a ring."""


@partial(compiled_once, of_statistics=True)
def statistics_of(
    anchors: Rows,
    references: Rows | None,
    how: How,
    params: Params,
    statistics: tuple[Statistic, ...],
) -> tuple[tuple[ByClass, ...], tuple[ByClass, ...] | None]:
    """Returns statistics of each anchor over all references, with their gradients.

    And with `how.both_ways` those of each reference over all anchors, from the same similarities.
    References of None are the anchors of all devices.
    """
    others = anchors if references is None else references
    how, inputs = prepared(anchors, references, how, params)
    results: Any = _statistics(how, statistics, inputs)
    of_anchors, of_references = results
    return joined(of_anchors, anchors.valid.shape[0]), joined(of_references, others.valid.shape[0])


# Before the first tile ----


def prepared(
    anchors: Rows, references: Rows | None, how: How, params: Params
) -> tuple[How, tiles.Inputs]:
    """Returns how rows are compared on this device, and what."""
    center = center_for(anchors, references, how)
    how, references = _placed(anchors, references, how)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, how.dtype), params)
    params, anchors, references = vary_alike((params, anchors, references))
    return how, tiles.Inputs(params, center, *_cut(anchors, references, how))


def _placed(anchors: Rows, references: Rows | None, how: How) -> tuple[How, Rows | None]:
    """Returns the references that a device visits: all of them, or its block of a ring."""
    if how.axis_name is None:
        return how, references
    references = anchors if references is None else references
    # References that have statistics of their own belong to a device, where these are added up.
    if _is_gathered(references.features, how.axis_name) and not how.both_ways:
        return how, jax.tree.map(partial(gather, axis_name=how.axis_name), references)
    return how._replace(ring_axis=how.axis_name), references


def _is_gathered(features: Float[Array, "m d"], axis_name: AxisName | None) -> bool:
    """Returns whether these rows of all devices fit on each of them."""
    if axis_name is None:
        return True
    return fits(features.size * axis_size(axis_name), features.dtype)


def fits(size: int, dtype: jnp.dtype) -> bool:
    """Returns whether each device may have all of so many numbers."""
    return size * dtype.itemsize <= GATHERED_BYTES


def _cut(anchors: Rows, references: Rows | None, how: How) -> tuple[Rows, Rows | None]:
    """Returns the rows in blocks."""
    sizes = _tile_sizes(anchors, references, how.block_sizes)
    return _in_blocks(anchors, sizes[0]), references and _in_blocks(references, sizes[1])


def _in_blocks(rows: Rows, size: int) -> Rows:
    """Returns rows in blocks. Padding has the numbers of a row, as invalid rows do."""
    number = rows.valid.shape[0]

    def padded(numbers: Shaped[Array, " n"]) -> Shaped[Array, " m"]:
        if not sizes_are_known(number) or not number:  # One block, or no row.
            return numbers
        return jnp.pad(numbers, (0, -number % size), mode="edge")

    return in_blocks(rows._replace(numbers=jax.tree.map(padded, rows.numbers)), size)


def _tile_sizes(
    anchors: Rows, references: Rows | None, block_sizes: tuple[int | None, int | None]
) -> tuple[int, int]:
    """Returns the numbers of anchors and of references in a tile.

    A tile fits into the caches of a CPU. Accelerators need large ones to be busy. Where a size is a
    symbol of `jax.export`, there is one tile, because the number of blocks must be known.
    """
    numbers = anchors.labels.shape[0], (references or anchors).labels.shape[0]
    everything = max(numbers[0], 1), max(numbers[1], 1)
    if not sizes_are_known(*numbers):
        return everything
    # The more anchors a tile has, the less often their gradients are read and written.
    largest = (2**13, 2**11) if references else (2**12, 2**12)
    largest = (2**10, 2**10) if on_cpu() else largest
    if block_sizes == (None, None) and math.prod(numbers) <= math.prod(largest):
        return everything
    of_anchors, of_references = (
        _even_size(number, most) if size is None else min(size, number)
        for size, number, most in zip(block_sizes, everything, largest, strict=True)
    )
    return of_anchors, of_references


def _even_size(num_rows: int, largest: int) -> int:
    """Returns a block size of at most `largest` that leaves the fewest rows of padding.

    Of several, on a CPU the largest that is not a multiple of 512, and elsewhere the largest.
    """
    fewest = -(-num_rows // largest)
    sizes = [-(-num_rows // blocks) for blocks in range(fewest, 2 * fewest + 1)]
    # The elements of a column are a multiple of 2 kB apart, and compete for few places of a cache.
    slow = [on_cpu() and size % 512 == 0 for size in sizes]
    return min(zip(sizes, slow, strict=True), key=lambda it: (-num_rows % it[0], it[1], -it[0]))[0]


def rows_at(
    positions: Int32[Array, " n"], features: Float[Array, "m d"], axis_name: AxisName | None
) -> Float[Array, "n d"]:
    """Returns the rows at these positions among those of all devices, which get gradients.

    Rows of any array that is spread as the references: they are gathered, or go around a ring.
    """
    found = jnp.zeros_like(features, shape=(positions.shape[0], features.shape[1]))
    if not features.shape[0]:
        return found
    if _is_gathered(features, axis_name):
        return jnp.take(gather(features, axis_name), positions, axis=0, mode="clip")

    def step(carry: tuple[Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array], None]:
        found, block, first = carry
        places = positions - first
        here = (places >= 0) & (places < features.shape[0])
        rows = jnp.take(block, places, axis=0, mode="clip")
        return (jnp.where(here[:, None], rows, found), *pass_on((block, first), axis_name)), None

    first = own_positions(features.shape[0], axis_name)[0]
    return lax.scan(step, vary_alike((found, features, first)), length=axis_size(axis_name))[0][0]


# All tiles ----

Index: TypeAlias = int | Int32[Array, ""]
Side: TypeAlias = tuple[tiles.Loaded, Any]
"""Rows, and the factors of their statistics if there are any: in blocks, or one block."""


class Visits(NamedTuple):
    """What happens in a tile. The functions read no arrays but their arguments."""

    how: How
    of_tile: Callable[[Any, Side, Side, tiles.Place], tiles.Found]
    """`(shared, anchors, other, place)` to what is found in the tile of two blocks."""
    merge: Callable[[Any, Any], Any]
    """What is known of a block, and what a tile found for it, to what is known then."""

    def visit(
        self, place: tiles.Place, found: tiles.Found, index: tuple[Index, Index], arrays: Any
    ) -> tiles.Found:
        """Returns what is found after a visit of the tile of block i of the anchors and block j."""
        (i, j), (shared, anchors, references) = index, arrays
        others = anchors if references is None else references
        new = self.of_tile(shared, at(anchors, i), at(others, j), place)
        of_anchors, of_references = found.of_anchors, found.of_references
        of_anchors = _put(of_anchors, i, self.merge(at(of_anchors, i), new.of_anchors))
        if place == "lower":
            of_anchors = _put(of_anchors, j, self.merge(at(of_anchors, j), new.of_references))
        elif new.of_references is not None:
            block = self.merge(at(of_references, j), new.of_references)
            of_references = _put(of_references, j, block)
        return tiles.Found(of_anchors, tiles.add(found.of_params, new.of_params), of_references)

    def of_each_tile(
        self, found: tiles.Found, shared: Any, anchors: Side, references: Side | None
    ) -> tiles.Found:
        """Returns what is found in all tiles, on all devices of a ring.

        Args:
          found: What is known before.
          shared: Arrays that all tiles read.
          anchors, references: The anchors and the references, in blocks. None: the anchors.
        """
        axis = self.how.ring_axis
        if axis is None or references is None:
            return self._of_each_own_tile(found, shared, anchors, references)

        def step(carry: tuple[tiles.Found, Side], _: None) -> tuple[tuple[tiles.Found, Side], None]:
            found, block = carry
            found = self._of_each_own_tile(found, shared, anchors, block)
            # What is found of a block is home after the last step.
            block, of_block = pass_on((block, found.of_references), axis)
            return (found._replace(of_references=of_block), block), None

        return lax.scan(step, (found, references), length=axis_size(axis))[0][0]

    def _of_each_own_tile(
        self, found: tiles.Found, shared: Any, anchors: Side, references: Side | None
    ) -> tiles.Found:
        """Returns what is found in all tiles of the blocks on this device."""

        def visit_all(
            found: tiles.Found, anchors: Side, i: np.ndarray, j: np.ndarray, place: tiles.Place
        ) -> tiles.Found:
            visit, arrays = partial(self.visit, place), (shared, anchors, references)
            if len(i) <= 1:
                return visit(found, (int(i[0]), int(j[0])), arrays) if len(i) else found
            # XLA for CPUs computes a tile number by number, if it knows it to be on the diagonal.
            indices = (jnp.asarray(i, jnp.int32), jnp.asarray(j, jnp.int32))
            if on_cpu():
                indices = lax.optimization_barrier(indices)
            if references is not None and self.how.ends_early:
                filled = jnp.any(references[0].rows.valid, axis=1)
                numbers = jnp.arange(1, len(filled) + 1, dtype=jnp.int32)
                number = jnp.max(jnp.where(filled, numbers, 0))
                return _scan_of_first(visit, number, found, indices, arrays)
            return lax.scan(lambda found, at: (visit(found, at, arrays), None), found, indices)[0]

        blocks = np.arange(num_blocks(anchors[0]))
        if references is None:
            found = visit_all(found, anchors, blocks, blocks, "diagonal")
            return visit_all(found, anchors, *np.tril_indices(len(blocks), -1), "lower")
        columns = np.arange(num_blocks(references[0]))

        def visit_row(found: tiles.Found, i: Index) -> tuple[tiles.Found, None]:
            # The block of the anchors is taken out and put back once.
            block, of_block = jax.tree.map(lambda x: x[None], at((anchors, found.of_anchors), i))
            inner = found._replace(of_anchors=of_block)
            inner = visit_all(inner, block, 0 * columns, columns, "rectangle")
            of_block = jax.tree.map(lambda x: x[0], inner.of_anchors)
            return inner._replace(of_anchors=_put(found.of_anchors, i, of_block)), None

        if len(blocks) == 1:
            return visit_all(found, anchors, 0 * columns, columns, "rectangle")
        return lax.scan(visit_row, found, jnp.asarray(blocks, jnp.int32))[0]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _scan_of_first(
    step: Callable[..., Any], number: Array, carry: Any, xs: Any, arrays: Any
) -> Any:
    """Returns the carry after `step(carry, x, arrays)` for the first of the xs.

    Their number is known at run time only. Such a loop has no reverse mode.
    """
    return lax.fori_loop(0, number, lambda k, carry: step(carry, at(xs, k), arrays), carry)


@_scan_of_first.defjvp
def _scan_of_first_jvp(step: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """A loop over all xs has one, in which a step that is not needed does nothing.

    JAX takes this rule for second derivatives of a loss: they differentiate a pass over the tiles.
    """

    def scan(number: Array, carry: Any, xs: Any, arrays: Any) -> Any:
        def step_or_not(carry: Any, x: tuple[Array, Any]) -> tuple[Any, None]:
            k, x = x
            carry = lax.cond(k < number, lambda it: step(it, x, arrays), lambda it: it, carry)
            return carry, None

        places = jnp.arange(len(jax.tree.leaves(xs)[0]), dtype=jnp.int32)
        return lax.scan(step_or_not, carry, (places, xs))[0]

    return jax.jvp(scan, primals, tangents)


def num_blocks(side: tiles.Loaded) -> int:
    """Returns the number of blocks of rows."""
    return side.rows.valid.shape[0]


def at(blocks: Any, i: Index) -> Any:
    """Returns block i."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), blocks)


def _put(blocks: Any, i: Index, block: Any) -> Any:
    update = partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
    return jax.tree.map(lambda x, new: update(x, new), blocks, block)


# The two passes ----


class Residuals(NamedTuple):
    """What the backward pass needs."""

    inputs: tiles.Inputs
    loaded: tuple[tiles.Loaded, tiles.Loaded | None]
    states: tuple[tiles.State, tiles.State | None]
    kept: Float[Array, "a b"] | None
    """The similarities of an only tile."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _statistics(
    how: How, statistics: tuple[Statistic, ...], inputs: tiles.Inputs
) -> tuple[tuple[ByClass, ...], tuple[ByClass, ...] | None]:
    """Returns statistics `[blocks, size]` of anchors and of references."""
    return forward(how, statistics, inputs)[0]


@as_compared
def forward(
    how: How,
    statistics: tuple[Statistic, ...],
    inputs: tiles.Inputs,
    kept: Float[Array, "a b"] | None = None,
) -> tuple[tuple[tuple[ByClass, ...], tuple[ByClass, ...] | None], Residuals]:
    """Returns the statistics, and what the backward pass needs.

    The similarities of an only tile are used if they are known, and kept if not.
    """
    params, center, anchors, references = inputs
    own, others = tiles.loaded_rows(how, inputs)
    is_alone = num_blocks(own) == 1 and (others is None or num_blocks(others) == 1)
    if is_alone and kept is None and how.ring_axis is None:
        other = own if others is None else others
        kept = tiles.tile_of(how, (params, center, None), at(own, 0), at(other, 0)).similarities

    def of_tile(shared: Any, own: Side, other: Side, place: tiles.Place) -> tiles.Found:
        tile = tiles.tile_of(how, shared, own[0], other[0])
        of_anchors = tiles.reduced(statistics, tile, axis=1)
        of_references = None
        if place == "lower" or how.both_ways:
            of_references = tiles.reduced(statistics, tile, axis=0)
        return tiles.Found(of_anchors, (), of_references)

    columns = tiles.nothing(how, statistics, references) if references and how.both_ways else None
    found = tiles.Found(tiles.nothing(how, statistics, anchors), (), columns)
    visits, shared = Visits(how, of_tile, partial(tiles.merged, statistics)), (params, center, kept)
    found = visits.of_each_tile(found, shared, (own, None), others and (others, None))
    states = found.of_anchors, found.of_references
    results: Any = tuple(state and tiles.by_class(how, statistics, state) for state in states)
    return results, Residuals(inputs, (own, others), states, kept)


@as_compared
def backward(
    how: How, statistics: tuple[Statistic, ...], residuals: Residuals, cotangents: Any
) -> tuple[tiles.Inputs]:
    """Returns the gradient of the inputs."""
    inputs, (own, others), states, kept = residuals

    def factors(state: Any, cotangents: Any) -> Any:
        graded = (tiles.with_gradient(statistics, it) for it in (statistics, state, cotangents))
        return None if state is None else tiles.factors_of(*graded)

    of_anchors, of_references = map(factors, states, cotangents)
    graded = tiles.with_gradient(statistics, statistics)

    def of_tile(shared: Any, own: Side, other: Side, place: tiles.Place) -> tiles.Found:
        tile = tiles.tile_of(how, shared, own[0], other[0])
        return tiles.gradients_of_tile(graded, tile, (own[1], other[1]), place)

    shared = inputs.params, inputs.center, kept
    sides = (own, of_anchors), others and (others, of_references)
    visits = Visits(how, of_tile, tiles.add)
    found = visits.of_each_tile(tiles.no_gradients(how, inputs), shared, *sides)
    return (tiles.gradients(how, inputs, found, (own, others)),)


_statistics.defvjp(forward, backward)
