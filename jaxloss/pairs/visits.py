r"""Pairs of anchors and references, visited tile by tile.

**What is computed.** A pair of anchor i and reference j has a similarity `s_ij`, and a value
`v_ij`, a function of `s_ij`, of whether the two are of one class, and of parameters such as a
temperature. A `Statistic` reduces the values of an anchor to two numbers: over the references of
its own class, and over those of the other classes. The anchor itself and invalid rows are left out.
A pairwise loss is a short formula on these numbers. With `v = s / T`, for example, NCA is
`softplus(negative − positive)`.

**Forward.** The rows are cut into blocks. Each tile of similarities of blocks I and J is computed,
reduced along its rows, merged into the parts of block I (`statistics`), and forgotten. Nothing is
kept but the parts, unless all pairs fit into one tile.

**Symmetry.** If the anchors are their own references, tile (J, I) is the transpose of tile (I, J).
Only tiles on the diagonal and below it are visited. One below is reduced along its rows for block
I, and along its columns for block J. With an axis of devices, the rows of the batch are explicit
references, and all tiles are visited.

**Both directions.** Two towers need the statistics of each reference over all anchors, too. They
come from the same tiles, reduced along their columns, and are merged into the parts of block J.

**Backward.** The tiles are visited a second time (`tiles`). Similarities are computed twice, with
two products in the second visit: 8n²d operations, or half of that with symmetry. If all pairs fit
into one tile, its similarities are kept for the second visit.

**Second derivatives.** All passes are plain JAX with loops of a fixed length, so JAX can
differentiate the backward pass. A `jax.custom_vjp` has no forward mode.

**Devices.** Each device has its own anchors. References of all devices are gathered up to
`GATHERED_BYTES`. Above that, or if they have statistics of their own, they go around a ring: a
device visits its anchors with the block at hand, and passes the block on. The statistics of a block
travel with it, and in the backward pass its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int32, Shaped

from jaxloss.core.backend import on_cpu
from jaxloss.core.batch import AxisName, axis_size, gather, own_positions, pass_on, vary_alike
from jaxloss.core.blocks import in_blocks, joined, tile_sizes
from jaxloss.core.linear import wide_dtype
from jaxloss.core.products import Low, low_dtypes
from jaxloss.core.programs import compiled_once
from jaxloss.pairs.rows import DISTANCES, Compared, Rows, Similarity, center_of, exact_center
from jaxloss.pairs.statistics import LARGEST, ByClass, Params, Statistic
from jaxloss.pairs.tiles import (
    Loaded,
    Plan,
    RowGradient,
    State,
    States,
    Tile,
    factors_of,
    feature_gradient,
    loaded,
    merged,
    no_gradient,
    nothing,
    pulled_back,
    reduced,
    results_of,
    tile_of,
    times_rows,
)

GATHERED_BYTES = 2**24
"""References of all devices are gathered up to this size; larger ones are passed around a ring."""

# What callers see ----


class Sides(NamedTuple):
    """Anchors and references, and how they are compared."""

    anchors: Rows
    """The rows of this device."""
    references: Rows | None
    """Those of this device. None: the anchors of all devices."""
    similarity: Compared
    low: tuple[Low, Low] | None = None
    """In which low dtype the anchors and the references are exact. None: those of their arrays."""
    of_towers: bool = False
    """Whether pairs of one label do not count, and values do not depend on the labels."""
    block_size: int | None = None
    """Rows of a tile. By default it depends on the shapes and the backend."""
    axis_name: AxisName | None = None
    """Mapped axis over which anchors and references are spread."""
    by_row: bool = False
    """Whether values depend on which row of a pair of towers a statistic is of."""
    guided_by: Similarity | None = None
    """The similarity of guides, if there are any."""


@partial(compiled_once, of_statistics=True)
def statistics_of(
    sides: Sides, params: Params, statistics: tuple[Statistic, ...]
) -> tuple[ByClass, ...]:
    """Returns statistics of each anchor over all references, with their gradients."""
    return _joined(sides, _statistics(*prepared(sides, params, statistics)))[0]


@partial(compiled_once, of_statistics=True)
def in_both_directions(
    sides: Sides, params: Params, statistics: tuple[Statistic, ...]
) -> tuple[tuple[ByClass, ...], tuple[ByClass, ...]]:
    """Returns `statistics_of` the anchors, and those of the references over all anchors.

    Each similarity is computed once for both.
    """
    return _joined(sides, _statistics(*prepared(sides, params, statistics, of_references=True)))


def largest_of(sides: Sides, value: Callable[..., Float[Array, "a b"]]) -> tuple[ByClass, ByClass]:
    """Returns the largest `value(pair, ())` of each anchor, without a gradient.

    Returns:
      The values, and the positions of the references that have them. Of equal values it is the
      first.
    """
    rows = lax.stop_gradient((sides.anchors, sides.references))
    sides = sides._replace(anchors=rows[0], references=rows[1])
    (found,) = statistics_of(sides, (), (Statistic(LARGEST, value, is_smooth=True),))
    return (
        ByClass(found.positive.peak, found.negative.peak, found.exists),
        ByClass(found.positive.total, found.negative.total, found.exists),
    )


def rows_at(
    positions: Int32[Array, " n"], features: Float[Array, "m d"], axis_name: AxisName | None
) -> Float[Array, "n d"]:
    """Returns the rows at these positions among those of all devices, which get gradients."""
    if not features.shape[0]:
        return jnp.zeros_like(features, shape=(positions.shape[0], features.shape[1]))
    if _is_gathered(features, axis_name):
        return jnp.take(gather(features, axis_name), positions, axis=0, mode="clip")

    def step(carry: tuple[Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array], None]:
        found, block, first = carry
        places = positions - first
        here = (places >= 0) & (places < features.shape[0])
        rows = jnp.take(block, places, axis=0, mode="clip")
        return (jnp.where(here[:, None], rows, found), *pass_on((block, first), axis_name)), None

    first = own_positions(features.shape[0], axis_name)[0]
    found = jnp.zeros_like(features, shape=(positions.shape[0], features.shape[1]))
    carry = vary_alike((found, features, first))
    return lax.scan(step, carry, length=axis_size(axis_name))[0][0]


def _is_gathered(features: Float[Array, "m d"], axis_name: AxisName | None) -> bool:
    """Returns whether these rows of all devices fit on each of them."""
    num_bytes = features.size * features.dtype.itemsize
    return axis_name is None or num_bytes * axis_size(axis_name) <= GATHERED_BYTES


def prepared(
    sides: Sides,
    params: Params,
    statistics: tuple[Statistic, ...],
    *,
    of_references: bool = False,
) -> tuple[Plan, Params, Float[Array, " d"] | None, Rows, Rows | None]:
    """Returns the plan, the parameters, the center, and the rows in blocks."""
    anchors, references, similarity, low, of_towers, block_size, axis_name, by_row, guided = sides
    # The other rows: an anchor that is not finite then reaches no other anchor.
    center, both = None, tuple(rows for rows in (anchors, references) if rows is not None)
    lows = low_dtypes(*(rows.features for rows in both)) if low is None else low[: len(both)]
    if similarity in DISTANCES:
        center = center_of(both[-1], axis_name)
        if any(lows):
            masked = (
                (rows.features, rows.valid, its) for rows, its in zip(both, lows, strict=True)
            )
            center = exact_center(center, tuple(masked), axis_name)
    ring = None
    if axis_name is not None:
        references = anchors if references is None else references
        if _is_gathered(references.features, axis_name) and not of_references:
            references = jax.tree.map(partial(gather, axis_name=axis_name), references)
        else:
            ring = axis_name
    counterpart = anchors if references is None else references
    dtype = wide_dtype(anchors.features, counterpart.features)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)
    anchors = _with_numbers(anchors, dtype)
    references = None if references is None else _with_numbers(references, dtype)
    params, anchors, references = vary_alike((params, anchors, references))
    shapes = anchors.labels.shape[0], counterpart.labels.shape[0]
    sizes = tile_sizes(*shapes, block_size, symmetric=references is None)
    by_row = by_row or (references is None and anchors.numbers is not None)
    anchors = _in_blocks(anchors, sizes[0])
    references = None if references is None else _in_blocks(references, sizes[1])
    low = (lows[0], lows[-1])
    plan = Plan(
        *(statistics, similarity, dtype, ring, of_references, low, of_towers),
        by_row=by_row,
        guided_by=guided,
    )
    return plan, params, center, anchors, references


def _with_numbers(rows: Rows, dtype: Any) -> Rows:
    """Returns rows whose numbers can be divided by: invalid ones have those of a valid row."""
    if not rows.valid.shape[0]:
        return rows
    some = jnp.argmax(rows.valid)

    def filled(numbers: Array) -> Array:
        if jnp.issubdtype(numbers.dtype, jnp.floating):
            numbers = numbers.astype(dtype)
        number = jnp.where(rows.valid[some], lax.stop_gradient(numbers)[some], 1)
        return jnp.where(rows.valid, numbers, number)

    return rows._replace(numbers=jax.tree.map(filled, rows.numbers))


def _in_blocks(rows: Rows, size: int) -> Rows:
    """Returns rows in blocks, padded with rows that are not valid, but have numbers of a row."""
    blocks = in_blocks(rows._replace(numbers=None), size)
    padding = (0, -rows.valid.shape[0] % size)

    def split(numbers: Shaped[Array, " n"]) -> Shaped[Array, "k a"]:
        return in_blocks(jnp.pad(numbers, padding, mode="edge") if len(numbers) else numbers, size)

    return blocks._replace(numbers=jax.tree.map(split, rows.numbers))


def _joined(sides: Sides, results: Any) -> Any:
    """Returns the statistics `[n]` of the anchors and of the references from those in blocks."""
    others = sides.anchors if sides.references is None else sides.references
    return tuple(
        joined(statistics, rows.labels.shape[0])
        for rows, statistics in zip((sides.anchors, others), results, strict=True)
    )


# All tiles ----

Index: TypeAlias = int | Int32[Array, ""]
Place: TypeAlias = Literal["diagonal", "lower", "rectangle"]
"""Where a tile is: on or below the diagonal of the anchors among themselves, or elsewhere."""


class Found(NamedTuple):
    """What visits have found so far."""

    of_anchors: Any
    """In blocks."""
    of_all: Any
    of_references: Any
    """In blocks. On several devices, it travels with the references."""


Visit: TypeAlias = Callable[[Any, Any, Found, Index, Index, Place], Found]
"""`(own, others, found, i, j, place)`, for the tile of block i of the anchors and block j."""


def each_tile(
    axis_name: AxisName | None, visit: Visit, found: Found, own: Any, others: Any
) -> Found:
    """Returns what is found after a visit of each tile, on all devices of a ring.

    Args:
      axis_name: The axis of the ring; None without a ring.
      visit: Of a tile.
      found: What is known before.
      own: What visits need of the anchors, in blocks.
      others: The same of the references. None: the anchors.
    """
    if axis_name is None or others is None:
        return _each_own_tile(visit, found, own, others)

    def step(carry: tuple[Found, Any], _: None) -> tuple[tuple[Found, Any], None]:
        found, block = carry
        found = _each_own_tile(visit, found, own, block)
        # What is found of a block is home after the last step.
        block, of_block = pass_on((block, found.of_references), axis_name)
        return (found._replace(of_references=of_block), block), None

    return lax.scan(step, (found, others), length=axis_size(axis_name))[0][0]


def _each_own_tile(visit: Visit, found: Found, own: Any, others: Any) -> Found:
    def visit_all(found: Found, own: Any, i: np.ndarray, j: np.ndarray, place: Place) -> Found:
        if len(i) <= 1:
            return visit(own, others, found, int(i[0]), int(j[0]), place) if len(i) else found

        def step(found: Found, indices: tuple[Array, Array]) -> tuple[Found, None]:
            return visit(own, others, found, *indices, place), None

        # Where XLA for CPUs knows that a tile is on the diagonal, it computes it number by number.
        indices = (jnp.asarray(i, jnp.int32), jnp.asarray(j, jnp.int32))
        if on_cpu():
            indices = lax.optimization_barrier(indices)
        return lax.scan(step, found, indices)[0]

    blocks = np.arange(_num_blocks(own))
    if others is None:
        found = visit_all(found, own, blocks, blocks, "diagonal")
        return visit_all(found, own, *np.tril_indices(len(blocks), -1), "lower")
    columns = np.arange(_num_blocks(others))

    def visit_row(found: Found, i: Index) -> tuple[Found, None]:
        # The block of the anchors is taken out and put back once.
        block, of_block = jax.tree.map(lambda x: x[None], at((own, found.of_anchors), i))
        inner = found._replace(of_anchors=of_block)
        inner = visit_all(inner, block, 0 * columns, columns, "rectangle")
        of_block = jax.tree.map(lambda x: x[0], inner.of_anchors)
        return inner._replace(of_anchors=_put(found.of_anchors, i, of_block)), None

    if len(blocks) == 1:
        return visit_all(found, own, 0 * columns, columns, "rectangle")
    return lax.scan(visit_row, found, jnp.asarray(blocks, jnp.int32))[0]


def _num_blocks(blocks: Any) -> int:
    return jax.tree.leaves(blocks)[0].shape[0]


def at(blocks: Any, i: Index) -> Any:
    """Returns block i."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), blocks)


def _put(blocks: Any, i: Index, block: Any) -> Any:
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, i, 0), blocks, block)


def merged_at(plan: Plan, state: State, i: Index, parts: State) -> State:
    """Merges the statistics over further references into those of block i."""
    return _put(state, i, merged(plan, at(state, i), parts))


def _added_at(blocks: RowGradient, i: Index, block: RowGradient) -> RowGradient:
    return _put(blocks, i, jax.tree.map(jnp.add, at(blocks, i), block))


# The two passes ----


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(
    plan: Plan, params: Params, center: Array | None, anchors: Rows, references: Rows | None
) -> tuple[tuple[ByClass, ...], tuple[ByClass, ...] | None]:
    """Returns statistics `[blocks, size]` of anchors and of references, which are in blocks."""
    return forward(plan, params, center, anchors, references)[0]


class Residuals(NamedTuple):
    """What the backward pass needs."""

    params: Params
    center: Float[Array, " d"] | None
    rows: tuple[Rows, Rows | None]
    sides: tuple[Loaded, Loaded | None]
    states: States
    kept: Float[Array, "a b"] | None
    """The similarities of an only tile."""


def both_loaded(
    plan: Plan, center: Float[Array, " d"] | None, anchors: Rows, references: Rows | None
) -> tuple[Loaded, Loaded | None]:
    """Returns rows in blocks as all tiles need them."""
    own = loaded(plan, center, anchors, plan.low[0])
    return own, None if references is None else loaded(plan, center, references, plan.low[1])


def forward(
    plan: Plan,
    params: Params,
    center: Array | None,
    anchors: Rows,
    references: Rows | None,
    kept: Float[Array, "a b"] | None = None,
) -> tuple[tuple[tuple[ByClass, ...], tuple[ByClass, ...] | None], Residuals]:
    """Returns the statistics, and what the backward pass needs.

    The similarities of an only tile are used if they are known.
    """
    own, others = sides = both_loaded(plan, center, anchors, references)
    alone = all(side is None or _num_blocks(side) == 1 for side in sides)
    if alone and kept is None and (plan.axis_name is None or others is None):
        kept = tile_of(plan, center, at(own, 0), at(others or own, 0)).similarities

    def visit(
        own: Loaded, others: Loaded | None, found: Found, i: Index, j: Index, place: Place
    ) -> Found:
        tile = tile_of(plan, center, at(own, i), at(others or own, j), kept)
        rows, _, columns = found
        rows = merged_at(plan, rows, i, reduced(plan, params, tile, axis=1))
        if place == "lower":
            rows = merged_at(plan, rows, j, reduced(plan, params, tile, axis=0))
        elif columns is not None:
            columns = merged_at(plan, columns, j, reduced(plan, params, tile, axis=0))
        return Found(rows, (), columns)

    columns = nothing(plan, references) if plan.of_references and references is not None else None
    found = Found(nothing(plan, anchors), (), columns)
    found = each_tile(plan.axis_name, visit, found, own, others)
    states = found.of_anchors, found.of_references
    results = tuple(None if state is None else results_of(plan, state) for state in states)
    rows = anchors, references
    return results, Residuals(params, center, rows, sides, states, kept)  # pyright: ignore


def backward(plan: Plan, residuals: Residuals, cotangents: Any) -> Any:
    """Returns the gradients of the arguments of `_statistics` after the plan."""
    params, center, rows, (own, others), states, kept = residuals
    states, cotangents = (
        tuple(None if side is None else plan.with_gradient(side) for side in both)
        for both in (states, cotangents)
    )
    plan = plan.of_gradient()
    factors, of_references = map(partial(factors_of, plan), states, cotangents)

    def visit(
        own: tuple[Loaded, State],
        others: tuple[Loaded, State | None] | None,
        found: Found,
        i: Index,
        j: Index,
        place: Place,
    ) -> Found:
        tile = tile_of(plan, center, at(own[0], i), at((others or own)[0], j), kept)
        both = own[1], None if others is None else others[1]
        return add_gradients(plan, params, tile, both, found, i, j, place)

    found = Found(*no_gradients(plan, params, *rows))
    references = None if others is None else (others, of_references)
    found = each_tile(plan.axis_name, visit, found, (own, factors), references)
    return gradients_of(plan, center, found, rows, (own, others))


_statistics.defvjp(forward, backward)


def no_gradients(
    plan: Plan, params: Params, anchors: Rows, references: Rows | None
) -> tuple[RowGradient, Params, RowGradient | None]:
    """Returns the zero gradients of anchors, parameters and references."""
    of_references = None if references is None else no_gradient(plan, references)
    return no_gradient(plan, anchors), jax.tree.map(jnp.zeros_like, params), of_references


def add_gradients(
    plan: Plan,
    params: Params,
    tile: Tile,
    factors: States,
    found: Found,
    i: Index,
    j: Index,
    place: Place,
) -> Found:
    """Adds the gradients through the similarities of a tile."""
    of_anchors, of_references = factors
    sides = [(at(of_anchors, i), 1)]
    if place == "rectangle" and of_references is not None:
        sides.append((at(of_references, j), 0))
    elif place != "rectangle":
        sides.append((at(of_anchors, j), 0))
    d_tile, d_params, d_numbers = pulled_back(plan, params, tile, sides)
    if place == "diagonal":  # Each pair was seen from both sides.
        both = jax.tree.map(jnp.add, *d_numbers)
        d_params, both = jax.tree.map(lambda gradient: gradient / 2, (d_params, both))
        d_numbers = both, both
    d_params = jax.tree.map(jnp.add, found.of_all, d_params)

    def add(blocks: RowGradient, k: Index, rows: Array, axis: int, numbers: Any) -> RowGradient:
        return _added_at(blocks, k, times_rows(plan, d_tile, rows, axis, numbers))

    d_anchors = add(found.of_anchors, i, tile.references, 1, d_numbers[0])
    d_references = found.of_references
    if place == "lower":
        d_anchors = add(d_anchors, j, tile.anchors, 0, d_numbers[1])
    elif place == "rectangle" and d_references is not None:
        d_references = add(d_references, j, tile.anchors, 0, d_numbers[1])
    return Found(d_anchors, d_params, d_references)


def gradients_of(
    plan: Plan,
    center: Float[Array, " d"] | None,
    found: Found,
    rows: tuple[Rows, Rows | None],
    sides: tuple[Loaded, Loaded | None],
) -> tuple[Params, None, Rows, Rows | None]:
    """Returns the gradients of parameters, center, anchors and references."""
    gradients = (found.of_anchors, found.of_references)
    d_anchors, d_references = (
        None if side is None or own is None else feature_gradient(plan, center, gradient, own, side)
        for gradient, own, side in zip(gradients, rows, sides, strict=True)
    )
    return found.of_all, None, d_anchors, d_references  # pyright: ignore
