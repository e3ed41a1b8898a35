r"""Pairs of anchors and references, visited tile by tile.

**What is computed.** A pair of anchor i and reference j has a similarity `s_ij`, either `x_i · x_j`
or `−‖x_i − x_j‖²`, and a value `v_ij`, a function of `s_ij`, of whether the two are of one class,
and of parameters such as a temperature. A `Statistic` reduces the values of an anchor to two
numbers: over the references of its own class, and over those of the other classes. The reduction is
a log-sum-exp, a maximum or a sum. The anchor itself and invalid rows are left out. A pairwise loss
is a short formula on these numbers. With `v = s / T`, for example, NCA is
`softplus(negative − positive)`.

**Overlaps.** Whether two samples are of one class is a bool `o_ij` for class indices. For multi-hot
targets it is the Jaccard overlap of the sets of classes, and a pair of any overlap is of one class.
Values depend on `o_ij`, so they can have it as a weight.

**Given numbers.** Values can also depend on numbers `c_i` that are given for each anchor, such as
statistics of an earlier call: `v_ij = v(s_ij, o_ij, c_i)`. A statistic can also have a mask of
pairs that depends on them. With the log-sum-exp c of the negatives, for example, the sum of
`softplus(c_i − s_ij / T)` contrasts each positive with the negatives.

**Forward.** A part of the references is reduced to a peak p and a total t, and two parts merge:

============  ===========  ================  =====================================
reduction     p            t                 merged
============  ===========  ================  =====================================
`LOGSUMEXP`   `max_j v`    `Σ_j e^(v − p)`   as in `_logsumexp`; `p = 0` for small v
`MAX`         `max_j v`    its position      larger p; its t, or the smaller of both
`SUM`         0            `Σ_j v`           the sum of t
`SOFTPLUS`    0            `Σ log(1 + e^v)`  the sum of t
============  ===========  ================  =====================================

So the rows are cut into blocks. Each tile of similarities, `S = X_I X_Jᵀ` of blocks I and J, is
computed, reduced along its rows, merged into the p and t of block I, and forgotten. Nothing is kept
but p and t.

**Symmetry.** If the anchors are their own references, tile (J, I) is the transpose of tile (I, J).
Only tiles on the diagonal and below it are visited. One below is reduced along its rows for block
I, and along its columns for block J.

**Both directions.** Two towers need the statistics of each reference over all anchors, too. They
come from the same tiles, reduced along their columns, and are merged into the p and t of block J.

**Backward.** Let g_i be the cotangent of a statistic. The derivative of the statistic by `v_ij` is
a share of the pair, divided by t for the first reduction:

============  ==========================
`LOGSUMEXP`   `e^(v_ij − p_i) / t_i`
`SUM`         1
`SOFTPLUS`    `1 / (1 + e^(−v_ij))`
============  ==========================

`_factors` turns g into `f = g / t` (or `f = g`), before the tiles are visited a second time. For a
tile, the cotangents `f_i share_ij` of the values are pulled back through `v(s)` to
`D_ij = Σ_statistics f_i share_ij ∂v_ij/∂s_ij`. A tile that serves both of its sides has the same
values for both, so the cotangents `f_i share_ij + f_j share_ji` are pulled back at once. With given
numbers, its values differ: `v(s_ij, o_ij, c_i)` for one side, and `v(s_ij, o_ij, c_j)` for the
other. Each side is then pulled back by itself, to the similarities and to the given numbers. Then

- for `s = x_i · x_j`: `X_I` gets the gradient `D X_J`, and `X_J` gets `Dᵀ X_I`;
- for `s = −‖x_i − x_j‖²`, since `∂s/∂x_i = 2 (x_j − x_i)`: `X_I` gets `2 (D X_J − (D 1) X_I)`, and
  `X_J` gets `2 (Dᵀ X_I − (Dᵀ 1) X_J)`. The products and the row sums `D 1` are added up over tiles
  (`_RowGradient`), and put together once, at the end (`_feature_gradient`).

Similarities are computed twice, with two products in the second visit: 8n²d operations, or half of
that with symmetry. If all pairs fit into one tile, its similarities are kept for the second visit.

**Known cotangents.** If a loss is a weighted sum `Σ_i w_i u_i` of sums `u_i`, the cotangents
`g_i = w_i` of its statistic are known before the backward pass. `weighted_sum` then visits a tile
once, for the value and for the gradient: 6n²d operations. Its backward pass multiplies by a number.

**Two stages.** The given numbers can be a function `c = b(results)` of the results of a first
stage, and the second stage can be sums, `u_i = Σ_j v(s_ij, o_ij, c_i)`. By two calls, the backward
pass visits the tiles twice, because the first stage waits for the cotangents of c. But those are
the cotangent of u_i times the slope `Σ_j ∂v_ij/∂c_i`, which is another sum of the second stage.
With the slopes from the forward pass, one visit serves both stages: with symmetry, 5n²d operations
in place of 8n²d.

**Second derivatives.** All passes are plain JAX with loops of a fixed length, so JAX can
differentiate the backward pass. A `jax.custom_vjp` has no forward mode.

**Largest values** have no gradient here. Who needs one takes the rows at their positions, with
`rows_at`, and computes the value from them: n·d operations.

**Devices.** Each device has its own anchors. References of all devices are gathered up to
`GATHERED_BYTES`. Above that, or if they have statistics, they go around a ring: a device visits its
anchors with the block at hand, and passes the block on. The statistics of a block travel with it,
and in the backward pass its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer, Shaped

from jaxloss import _checks
from jaxloss._backend import on_cpu
from jaxloss._batch import (
    AxisName,
    axis_size,
    comparable,
    gather,
    own_positions,
    pass_on,
    sum_over,
    vary_alike,
    zero_invalid,
)
from jaxloss._linear import (
    inverse_norms_of_scaled,
    l2_normalize,
    negative_squared_distances,
    power_of_two_scaled,
    sizes_are_known,
    tangential,
    wide_dtype,
    widen,
)
from jaxloss._logsumexp import Partial, or_zero
from jaxloss._products import (
    Low,
    low_dtypes,
    nearest,
    rounded,
    row_products,
    times,
    wide_product,
)
from jaxloss._statistics import MAX, ByClass, Params, Rows, Statistic

Similarity: TypeAlias = Literal[
    "product", "cosine", "negative_squared_distance", "negative_squared_distance_of_units"
]
"""Cosines, and distances of unit vectors, are those of low-precision rows of which no square over-
or underflows. Of others, unit vectors have them as products and distances. Distances of unit
vectors have no gradient here."""
_OF_UNITS = ("cosine", "negative_squared_distance_of_units")
GATHERED_BYTES = 2**24
"""References of all devices are gathered up to this size; larger ones are passed around a ring."""

# All tiles ----


class _Plan(NamedTuple):
    statistics: tuple[Statistic, ...]
    similarity: Similarity
    dtype: Any
    """Of all computations."""
    axis_name: AxisName | None
    """The axis of the ring; None without a ring."""
    of_references: bool
    """Whether references have statistics, too."""
    low: tuple[Low, Low]
    """In which low dtype the anchors are multiplied, and the references; None for the wide one."""

    @property
    def is_low(self) -> bool:
        return any(self.low)


def pair_statistics(
    statistics: tuple[Statistic, ...],
    params: Params,
    anchors: Rows,
    references: Rows | None = None,
    *,
    similarity: Similarity,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    low: tuple[Low, Low] | None = None,
) -> tuple[ByClass, ...]:
    """Returns statistics of each anchor over all references, with their gradients.

    Args:
      statistics: What to compute.
      params: Arrays that the statistics depend on; they get gradients.
      anchors: The rows of this device.
      references: The references of this device. None: the anchors of all devices.
      similarity: Of a pair: the inner product, or the negative squared distance.
      block_size: Rows of a tile. By default it depends on the shapes and the backend.
      axis_name: Mapped axis over which anchors and references are spread.
      low: In which low dtype the anchors and the references are exact. By default, those of their
        arrays.

    Returns:
      For each statistic `[n]` for the own class, and `[n]` for the other classes.
    """
    options = (similarity, block_size, axis_name, low)
    return _directions(statistics, params, anchors, references, *options)[0]


def largest(
    value: Callable[..., Float[Array, "a b"]],
    anchors: Rows,
    references: Rows | None = None,
    *,
    similarity: Similarity,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
) -> ByClass:
    """Returns the largest `value(similarities, overlaps, ())` of each anchor, without a gradient.

    Returns:
      For the own class and for the other classes a `Largest`. Of equal values it is the first.
    """
    anchors, references = lax.stop_gradient((anchors, references))
    options = (similarity, block_size, axis_name, None)
    return _directions((Statistic(MAX, value),), (), anchors, references, *options)[0][0]


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


def statistics_in_both_directions(
    statistics: tuple[Statistic, ...],
    params: Params,
    anchors: Rows,
    references: Rows,
    *,
    similarity: Similarity,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    low: tuple[Low, Low] | None = None,
) -> tuple[tuple[ByClass, ...], tuple[ByClass, ...]]:
    """Returns `pair_statistics` of the anchors, and those of the references over all anchors.

    Each similarity is computed once for both. The anchors have no given numbers.
    """
    options = (similarity, block_size, axis_name, low)
    return _directions(statistics, params, anchors, references, *options, of_references=True)


def weighted_sum(
    statistic: Statistic,
    params: Params,
    weights: Float[Array, " n"],
    anchors: Rows,
    references: Rows,
    *,
    similarity: Similarity,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    low: tuple[Low, Low] | None = None,
) -> Float[Array, ""]:
    """Returns `Σ_i w_i u_i` over the anchors i of this device, for a sum `u_i` over negatives.

    Its gradient visits each tile once, together with the value: 6nmd operations in place of 8nmd,
    and one way around a ring. The anchors have no given numbers.
    """
    options = (similarity, block_size, axis_name, low)
    return _directions((statistic,), params, anchors, references, *options, weights=weights)


def statistics_in_two_stages(
    first: tuple[Statistic, ...],
    between: Callable[[tuple[ByClass, ...]], Array],
    second: tuple[Statistic, ...],
    params: Params,
    anchors: Rows,
    references: Rows | None = None,
    *,
    similarity: Similarity,
    block_size: int | None = None,
    axis_name: AxisName | None = None,
    low: tuple[Low, Low] | None = None,
) -> tuple[tuple[ByClass, ...], tuple[ByClass, ...]]:
    """Returns `first`, and statistics of `SUM` whose given number of an anchor is `between(first)`.

    The gradient visits each tile once for both: 5n²d operations with symmetry, where two calls of
    `pair_statistics` take 8n²d. The function `between` works element by element. The anchors have
    no given numbers of their own.
    """
    options = (similarity, block_size, axis_name, low)
    return _directions(first, params, anchors, references, *options, then=(between, second))


def _directions(
    statistics: tuple[Statistic, ...],
    params: Params,
    anchors: Rows,
    references: Rows | None,
    similarity: Similarity,
    block_size: int | None,
    axis_name: AxisName | None,
    low: tuple[Low, Low] | None,
    *,
    of_references: bool = False,
    weights: Float[Array, " n"] | None = None,
    then: tuple[Callable[..., Array], tuple[Statistic, ...]] | None = None,
) -> Any:
    """Returns the statistics of the anchors, and of the references or None.

    With weights, it returns the weighted sum of the only statistic. With `then`, it returns those
    of the anchors in two stages.
    """
    if block_size is not None:
        _checks.positive_count("block_size", block_size)
    # The other rows: an anchor that is not finite then reaches no other anchor.
    center, sides = None, tuple(rows for rows in (anchors, references) if rows is not None)
    lows = low_dtypes(*(rows.features for rows in sides)) if low is None else low[: len(sides)]
    if similarity == "negative_squared_distance":
        center = center_of(sides[-1], axis_name)
        if any(lows):
            masked = (
                (rows.features, rows.valid, its) for rows, its in zip(sides, lows, strict=True)
            )
            center = exact_center(center, tuple(masked), axis_name)
    ring = None
    if axis_name is not None:
        references = anchors._replace(given=None) if references is None else references
        if _is_gathered(references.features, axis_name) and not of_references:
            references = jax.tree.map(partial(gather, axis_name=axis_name), references)
        else:
            ring = axis_name
    counterpart = anchors if references is None else references
    dtype = wide_dtype(anchors.features, counterpart.features)
    params, given = jax.tree.map(lambda leaf: leaf.astype(dtype), (params, anchors.given))
    anchors = anchors._replace(given=given)
    params, anchors, references, weights = vary_alike((params, anchors, references, weights))
    shapes = anchors.labels.shape[0], counterpart.labels.shape[0]
    sizes = _block_sizes(*shapes, block_size, symmetric=references is None)
    anchors = _blocks(anchors, sizes[0])
    references = None if references is None else _blocks(references, sizes[1])
    plan = _Plan(statistics, similarity, dtype, ring, of_references, (lows[0], lows[-1]))
    if weights is not None:
        blocks = _blocks_of(weights.astype(dtype), sizes[0])
        return _weighted_sum(plan, params, center, anchors, references, blocks)
    if then is not None:
        results: Any = _two_stages(plan, *then, params, center, anchors, references)
        shapes = shapes[:1] * 2
    else:
        results = _statistics(plan, params, center, anchors, references)

    def joined(number: int, statistics: Any) -> Any:
        return jax.tree.map(lambda blocks: blocks.reshape(-1)[:number], statistics)

    return tuple(map(joined, shapes, results))


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


def by_products(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"] | Integer[Array, "n C"],
    valid: Bool[Array, " n"],
    references: tuple[Array, Array, Array] | None,
    axis_name: AxisName | None,
    *,
    normalize: bool,
) -> tuple[Rows, Rows | None, Similarity, Any]:
    """Returns anchors and references, by what they are compared, and the dtype of all else."""
    given = (features, labels, valid, references, axis_name)
    dtype = wide_dtype(features, features if references is None else references[0])
    if not are_low(features, references):
        return *anchors_and_references(*given, normalize=normalize, load=True), "product", dtype
    rows = anchors_and_references(*given)
    return (*scaled(*rows), "cosine", dtype) if normalize else (*rows, "product", dtype)


def scaled(anchors: Rows, references: Rows | None) -> tuple[Rows, Rows | None]:
    """Returns low-precision rows whose unit vectors are compared."""

    def of(rows: Rows) -> Rows:
        return rows._replace(features=power_of_two_scaled(rows.features, rows.valid))

    return of(anchors), None if references is None else of(references)


def are_low(features: Float[Array, "n d"], references: tuple[Array, Array, Array] | None) -> bool:
    """Returns whether such rows, and what `reference_rows` returned, are multiplied as they are."""
    return any(low_dtypes(features, features if references is None else references[0]))


def _block_sizes(
    num_anchors: int, num_references: int, block_size: int | None, *, symmetric: bool
) -> tuple[int, int]:
    """Returns the numbers of anchors and of references in a tile."""
    if not sizes_are_known(num_anchors, num_references):  # The number of tiles must be known.
        return max(num_anchors, 1), max(num_references, 1)
    if block_size is not None:
        return min(block_size, max(num_anchors, 1)), min(block_size, max(num_references, 1))
    # Small tiles stay in the caches of a CPU. Accelerators need large ones to be busy; the more
    # anchors one has, the less often their gradients are read and written.
    largest = (2**10, 2**10) if on_cpu() else (2**12, 2**12) if symmetric else (2**13, 2**11)
    if num_anchors * num_references <= math.prod(largest):
        return max(num_anchors, 1), max(num_references, 1)
    return _even_size(num_anchors, largest[0]), _even_size(num_references, largest[1])


def _even_size(num_rows: int, largest: int) -> int:
    """Returns a block size of at most `largest` that leaves the fewest rows of padding.

    Of several, on a CPU the largest that is no multiple of 512, and elsewhere the largest.
    """
    fewest = -(-num_rows // largest)
    sizes = [-(-num_rows // blocks) for blocks in range(fewest, 2 * fewest + 1)]
    # The elements of a column are a multiple of 2 kB apart, and compete for few places of a cache.
    slow = [on_cpu() and size % 512 == 0 for size in sizes]
    return min(zip(sizes, slow, strict=True), key=lambda it: (-num_rows % it[0], it[1], -it[0]))[0]


def _blocks(rows: Rows, size: int) -> Rows:
    """Returns every array `[n, ...]` as `[ceil(n / size), size, ...]`, padded with zeros."""
    return jax.tree.map(partial(_blocks_of, size=size), rows)


def _blocks_of(array: Shaped[Array, " n *shape"], size: int) -> Shaped[Array, "k a *shape"]:
    missing = -array.shape[0] % size if array.shape[0] else size
    if missing:
        array = jnp.pad(array, ((0, missing),) + ((0, 0),) * (array.ndim - 1))
    return array.reshape(-1, size, *array.shape[1:])


def center_of(rows: Rows, axis_name: AxisName | None) -> Float[Array, " d"]:
    """Returns the mean of the valid rows. Distances relative to it are rounded less."""
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
    """Returns the rows relative to the mean of the references: distances are rounded less."""
    center = center_of(references or anchors, axis_name)[None, :]
    if references is not None:
        references = references._replace(features=references.features - center)
    return anchors._replace(features=anchors.features - center), references


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(
    plan: _Plan, params: Params, center: Array | None, anchors: Rows, references: Rows | None
) -> tuple[tuple[ByClass, ...], tuple[ByClass, ...] | None]:
    """Returns statistics `[blocks, size]` of anchors and of references, which are in blocks."""
    return _forward(plan, params, center, anchors, references)[0]


def _forward(
    plan: _Plan,
    params: Params,
    center: Array | None,
    anchors: Rows,
    references: Rows | None,
    kept: Float[Array, "a b"] | None = None,
) -> tuple[Any, Any]:
    """Returns the statistics, and what the backward pass needs.

    The similarities of an only tile are used if they are known.
    """
    own, others = sides = _sides(plan, center, anchors, references)

    def visit(
        block: _Side | None, own: _Side, states: _States, i: Index, j: Index, part: Part
    ) -> _States:
        tile = _tile(plan, center, own, block, i, j, kept)
        rows, columns = states
        rows = _merge_at(plan, rows, i, _reduce(plan, params, tile, axis=1))
        if part == "lower":
            rows = _merge_at(plan, rows, j, _reduce(plan, params, tile, axis=0))
        elif columns is not None:
            columns = _merge_at(plan, columns, j, _reduce(plan, params, tile, axis=0))
        return rows, columns

    states = (_nothing(plan, anchors), None)
    if plan.of_references and references is not None:
        states = (states[0], _nothing(plan, references))
    if plan.axis_name is not None and others is not None:

        def step(carry: tuple[_States, _Side], _: None) -> tuple[tuple[_States, _Side], None]:
            states, block = carry
            rows, columns = _each_tile(partial(visit, block), states, own, block)
            block, columns = pass_on((block, columns), plan.axis_name)
            return ((rows, columns), block), None

        (states, _), _ = lax.scan(step, (states, others), length=axis_size(plan.axis_name))
    else:
        alone = all(side is None or side.rows.labels.shape[0] == 1 for side in (own, others))
        if alone and kept is None:
            kept = _tile(plan, center, own, others, 0, 0).similarities
        states = _each_tile(partial(visit, others), states, own, others)

    def results(state: _State | None) -> Any:
        if state is None:
            return None
        return tuple(
            ByClass(*map(statistic.reduction.result, parts))
            for statistic, parts in zip(plan.statistics, state, strict=True)
        )

    residuals = (params, center, anchors, references, sides, states, kept)
    return tuple(map(results, states)), residuals


def _backward(plan: _Plan, residuals: Any, cotangents: Any) -> Any:
    params, center, anchors, references, sides, states, kept = residuals
    factors, of_references = map(partial(_factors, plan), states, cotangents)
    own, others = sides

    def visit(
        block: _Side | None,
        of_block: _State | None,
        own: tuple[_Side, _State],
        gradients: _Gradients,
        i: Index,
        j: Index,
        part: Part,
    ) -> _Gradients:
        side, factors = own
        tile = _tile(plan, center, side, block, i, j, kept)
        both = (factors, of_block)
        return _add_gradients(plan, params, tile, both, gradients, i, j, part)

    own = (own, factors)
    gradients = _no_gradients(plan, params, anchors, references)
    if plan.axis_name is not None and others is not None:

        def step(carry: Any, _: None) -> tuple[Any, None]:
            gradients, block, of_block = carry
            of_anchors, rest = _each_tile(partial(visit, block, of_block), gradients, own, block)
            # The gradient of a block travels with it, and is home after the last step.
            travelling = (rest.references, block, of_block)
            gradient, block, of_block = pass_on(travelling, plan.axis_name)
            return ((of_anchors, rest._replace(references=gradient)), block, of_block), None

        carry = (gradients, others, of_references)
        (gradients, *_), _ = lax.scan(step, carry, length=axis_size(plan.axis_name))
    else:
        gradients = _each_tile(partial(visit, others, of_references), gradients, own, others)
    d_rows = _row_gradients(plan, center, gradients, anchors, references, sides)
    return (gradients[1].params, None, *d_rows)


_statistics.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_sum(
    plan: _Plan,
    params: Params,
    center: Array | None,
    anchors: Rows,
    references: Rows,
    weights: Float[Array, "k a"],
) -> Float[Array, ""]:
    results: Any = _statistics(plan, params, center, anchors, references)
    ((sums,), _) = results
    return jnp.sum(weights * sums.negative)


def _weighted_forward(
    plan: _Plan,
    params: Params,
    center: Array | None,
    anchors: Rows,
    references: Rows,
    weights: Float[Array, "k a"],
) -> tuple[Float[Array, ""], Any]:
    """Returns the sum, and its gradients."""
    factors = (ByClass(*(Partial(jnp.zeros_like(weights), weights),) * 2),)
    side, others = _sides(plan, center, anchors, references)
    own: Any = (side, factors)

    def visit(
        block: _Side, own: tuple[_Side, _State], carry: Any, i: Index, j: Index, part: Part
    ) -> Any:
        (side, factors), ((state, of_anchors), rest) = own, carry
        tile = _tile(plan, center, side, block, i, j)
        state = _merge_at(plan, state, i, _reduce(plan, params, tile, axis=1))
        gradients, both = (of_anchors, rest), (factors, None)
        of_anchors, rest = _add_gradients(plan, params, tile, both, gradients, i, j, part)
        return (state, of_anchors), rest

    of_anchors, rest = _no_gradients(plan, params, anchors, references)
    carry = ((_nothing(plan, anchors), of_anchors), rest)
    if plan.axis_name is not None:

        def step(carry: Any, _: None) -> tuple[Any, None]:
            block, *found = carry
            of_anchors, rest = _each_tile(partial(visit, block), tuple(found), own, block)
            block, home = pass_on((block, rest.references), plan.axis_name)
            return (block, of_anchors, rest._replace(references=home)), None

        (_, *carry), _ = lax.scan(step, (others, *carry), length=axis_size(plan.axis_name))
    else:
        carry = _each_tile(partial(visit, others), carry, own, others)  # pyright: ignore
    (((state,), of_anchors), rest) = carry
    sums = state.negative.total
    gradients = (of_anchors, rest)
    d_rows = _row_gradients(plan, center, gradients, anchors, references, (side, others))
    return jnp.sum(weights * sums), (rest.params, None, *d_rows, sums)


def _weighted_backward(plan: _Plan, gradients: Any, cotangent: Float[Array, ""]) -> Any:
    return jax.tree.map(lambda gradient: (cotangent * gradient).astype(gradient.dtype), gradients)


_weighted_sum.defvjp(_weighted_forward, _weighted_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _two_stages(
    plan: _Plan,
    between: Callable[[tuple[ByClass, ...]], Array],
    second: tuple[Statistic, ...],
    params: Params,
    center: Array | None,
    anchors: Rows,
    references: Rows | None,
) -> tuple[tuple[ByClass, ...], tuple[ByClass, ...]]:
    (results, _), (*_, kept) = _forward(plan, params, center, anchors, references)
    anchors = anchors._replace(given=between(results))
    plan = plan._replace(statistics=second)
    (later, _), _ = _forward(plan, params, center, anchors, references, kept)
    return results, later


def _two_stages_forward(
    plan: _Plan,
    between: Callable[[tuple[ByClass, ...]], Array],
    second: tuple[Statistic, ...],
    params: Params,
    center: Array | None,
    anchors: Rows,
    references: Rows | None,
) -> tuple[Any, Any]:
    (results, _), (*_, (state, _), kept) = _forward(plan, params, center, anchors, references)
    anchors = anchors._replace(given=between(results))
    plan = plan._replace(statistics=(*second, *map(_slope, second)))
    (later, _), (*_, sides, (later_state, _), _) = _forward(
        plan, params, center, anchors, references, kept
    )
    later, slopes = later[: len(second)], later[len(second) :]
    states = ((*state, *later_state[: len(second)]), None)
    residuals = (params, center, anchors, references, sides, states, kept, results, slopes)
    return (results, later), residuals


def _two_stages_backward(
    plan: _Plan,
    between: Callable[[tuple[ByClass, ...]], Array],
    second: tuple[Statistic, ...],
    residuals: Any,
    cotangents: Any,
) -> Any:
    *residuals, results, slopes = residuals
    of_first, of_second = cotangents
    products = jax.tree.map(jnp.multiply, of_second, slopes)
    (through_given,) = jax.vjp(between, results)[1](sum(jax.tree.leaves(products)))
    cotangents = (*jax.tree.map(jnp.add, of_first, through_given), *of_second)
    first = (statistic._replace(takes_given=False) for statistic in plan.statistics)
    plan = plan._replace(statistics=(*first, *second))
    d_params, _, d_anchors, d_references = _backward(plan, residuals, (cotangents, None))
    return d_params, None, d_anchors._replace(given=None), d_references


_two_stages.defvjp(_two_stages_forward, _two_stages_backward)


def _slope(statistic: Statistic) -> Statistic:
    """Returns the sum of the derivatives by the given numbers."""

    def value(similarities: Array, overlaps: Array, params: Any, given: Array) -> Array:
        of_given = partial(statistic.value, similarities, overlaps, params)
        return jax.jvp(of_given, (given,), (jnp.ones_like(given),))[1]

    return statistic._replace(value=value)


# One tile ----

Index: TypeAlias = int | Int32[Array, ""]
Part: TypeAlias = Literal["diagonal", "lower", "rectangle"]
"""Where a tile is: on or below the diagonal of the anchors among themselves, or elsewhere."""
_State: TypeAlias = tuple[ByClass, ...]
"""A `Partial` of arrays `[blocks, size]` for each statistic and side."""
_States: TypeAlias = tuple[_State, _State | None]
"""Of the anchors, and of the references if they have statistics."""


class _Tile(NamedTuple):
    anchors: Float[Array, "a d"]
    references: Float[Array, "b d"]
    similarities: Float[Array, "a b"]
    used: Bool[Array, "a b"]
    overlaps: Bool[Array, "a b"] | Float[Array, "a b"]
    positions: tuple[Int32[Array, " a"], Int32[Array, " b"]]
    given: tuple[Any, Any]
    """Of the references and of the anchors: the numbers of the rows that do not change along an
    axis are at its place."""
    norms: tuple[Float[Array, " a"], Float[Array, " b"]] | None
    """As in `_Side`."""

    @property
    def positives(self) -> Bool[Array, "a b"]:
        return self.overlaps if self.overlaps.dtype == jnp.bool_ else self.overlaps > 0


class _Side(NamedTuple):
    """The anchors or the references, in blocks."""

    rows: Rows
    norms: Float[Array, "k a"] | None
    """Squared norms of the rows relative to the center; inverse norms for cosines; None for
    products."""


class _RowGradient(NamedTuple):
    """`Σ_b D_ab x_b`, and `Σ_b D_ab`, for the derivatives D by the similarities."""

    products: Float[Array, "k a d"]
    sums: Float[Array, "k a"] | None
    """None for products."""


class _OfAnchors(NamedTuple):
    """Gradients of the anchors, in blocks."""

    rows: _RowGradient
    given: Any


class _OfOthers(NamedTuple):
    """Gradients of all else."""

    params: Params
    references: _RowGradient | None


_Gradients: TypeAlias = tuple[_OfAnchors, _OfOthers]


def _each_tile(
    visit: Callable[[Any, Any, Index, Index, Part], Any], carry: Any, own: Any, others: _Side | None
) -> Any:
    """Returns the carry after a visit of each tile, `visit(own, carry, i, j, part)`.

    Args:
      carry: What is found about the anchors, in blocks, and all else.
      own: What is known of the anchors, in blocks.
      others: The references. None: the anchors.
    """

    def visit_all(carry: Any, own: Any, i: np.ndarray, j: np.ndarray, part: Part) -> Any:
        if len(i) <= 1:
            return visit(own, carry, int(i[0]), int(j[0]), part) if len(i) else carry

        def step(carry: Any, indices: tuple[Array, Array]) -> tuple[Any, None]:
            return visit(own, carry, *indices, part), None

        # Where XLA for CPUs knows that a tile is on the diagonal, it computes it number by number.
        indices = (jnp.asarray(i, jnp.int32), jnp.asarray(j, jnp.int32))
        if on_cpu():
            indices = lax.optimization_barrier(indices)
        return lax.scan(step, carry, indices)[0]

    blocks = np.arange(jax.tree.leaves(own)[0].shape[0])
    if others is None:
        carry = visit_all(carry, own, blocks, blocks, "diagonal")
        return visit_all(carry, own, *np.tril_indices(len(blocks), -1), "lower")
    columns = np.arange(others.rows.labels.shape[0])

    def visit_row(carry: Any, i: Index) -> tuple[Any, None]:
        # The block of the anchors is taken out and put back once.
        of_anchors, rest = carry
        block, found = jax.tree.map(lambda x: x[None], _at((own, of_anchors), i))
        found, rest = visit_all((found, rest), block, 0 * columns, columns, "rectangle")
        return (_put(of_anchors, i, jax.tree.map(lambda x: x[0], found)), rest), None

    if len(blocks) == 1:
        return visit_all(carry, own, 0 * columns, columns, "rectangle")
    return lax.scan(visit_row, carry, jnp.asarray(blocks, jnp.int32))[0]


def _at(blocks: Any, i: Index) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), blocks)


def _put(blocks: Any, i: Index, block: Any) -> Any:
    return jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, i, 0), blocks, block)


def _add_at(blocks: Any, i: Index, block: Any) -> Any:
    return _put(blocks, i, jax.tree.map(jnp.add, _at(blocks, i), block))


def _side(plan: _Plan, center: Float[Array, " d"] | None, rows: Rows, low: Low) -> _Side:
    """Returns rows in blocks as all tiles need them. Low-precision ones are loaded once."""
    if plan.similarity == "product" and not plan.is_low:
        return _Side(rows, None)
    features, norms = _load(plan, rows, center), None
    if plan.similarity in _OF_UNITS:
        norms = inverse_norms_of_scaled(features)
    elif plan.similarity != "product":
        norms = jnp.sum(features**2, axis=-1)
    if plan.is_low:
        rows = rows._replace(features=features if low is None else features.astype(low))
    return _Side(rows, norms)


def _sides(
    plan: _Plan, center: Float[Array, " d"] | None, anchors: Rows, references: Rows | None
) -> tuple[_Side, _Side | None]:
    own = _side(plan, center, anchors, plan.low[0])
    return own, None if references is None else _side(plan, center, references, plan.low[1])


def _no_gradient(plan: _Plan, blocks: Rows) -> _RowGradient:
    sums = None
    if plan.similarity == "negative_squared_distance":
        sums = jnp.zeros_like(blocks.valid, plan.dtype)
    return _RowGradient(jnp.zeros_like(blocks.features, plan.dtype), sums)


def _no_gradients(
    plan: _Plan, params: Params, anchors: Rows, references: Rows | None
) -> _Gradients:
    zeros = jax.tree.map(jnp.zeros_like, (params, anchors.given))
    return (
        _OfAnchors(_no_gradient(plan, anchors), zeros[1]),
        _OfOthers(zeros[0], None if references is None else _no_gradient(plan, references)),
    )


def _tile(
    plan: _Plan,
    center: Float[Array, " d"] | None,
    anchors: _Side,
    references: _Side | None,
    i: Index,
    j: Index,
    similarities: Float[Array, "a b"] | None = None,
) -> _Tile:
    """Returns the tile of anchors i and references j. Similarities at hand are used."""
    (a, norms_a), (b, norms_b) = _at(anchors, i), _at(references or anchors, j)
    used = a.valid[:, None] & b.valid[None, :] & (a.positions[:, None] != b.positions[None, :])
    own, other = a.features, b.features
    if not plan.is_low:
        own, other = _load(plan, a, center), _load(plan, b, center)
    norms = None if norms_a is None or norms_b is None else (norms_a, norms_b)
    if similarities is None:
        similarities = _similarities(plan, own, other, norms)
    overlaps = _overlaps(a.labels, b.labels, similarities.dtype)
    positions = a.positions, b.positions
    return _Tile(own, other, similarities, used, overlaps, positions, (b.given, a.given), norms)


def _overlaps(
    own: Integer[Array, " a"] | Integer[Array, "a C"],
    other: Integer[Array, " b"] | Integer[Array, "b C"],
    dtype: Any,
) -> Bool[Array, "a b"] | Float[Array, "a b"]:
    """Returns whether rows are of one class, or the Jaccard overlaps of their sets of classes.

    A class that is unknown for one of two rows is in neither set.
    """
    if own.ndim == 1:
        return own[:, None] == other[None, :]
    exact = dtype if on_cpu() or dtype == jnp.float64 else jnp.bfloat16  # 0 and 1 are.
    (own_in, own_known), (other_in, other_known) = (
        ((targets > 0).astype(exact), (targets >= 0).astype(exact)) for targets in (own, other)
    )
    both = row_products(own_in, other_in)
    sizes = row_products(own_in, other_known) + row_products(own_known, other_in)
    return both / jnp.maximum(sizes - both, 1)


def _similarities(
    plan: _Plan,
    own: Float[Array, "a d"],
    other: Float[Array, "b d"],
    norms: tuple[Float[Array, " a"], Float[Array, " b"]] | None,
) -> Float[Array, "a b"]:
    products = row_products(own, other)
    if norms is None:
        return products
    if plan.similarity in _OF_UNITS:
        cosines = products * norms[0][:, None] * norms[1][None, :]
        if plan.similarity == "cosine":
            return cosines
        squares = ((norm != 0).astype(cosines.dtype) for norm in norms)  # 0 for a zero vector.
        return negative_squared_distances(cosines, *squares)
    similarities = negative_squared_distances(products, *norms)
    # Computed once, and not again for each statistic.
    return lax.optimization_barrier(similarities) if on_cpu() else similarities


def _load(plan: _Plan, rows: Rows, center: Float[Array, " d"] | None) -> Float[Array, " *k a d"]:
    """Returns the features with zeros in the invalid rows, relative to the center.

    Wide ones of products have the zeros already.
    """
    features = rows.features.astype(plan.dtype)
    if plan.similarity == "product" and not plan.is_low:
        return features
    if center is not None:
        features = features - jnp.expand_dims(center.astype(plan.dtype), range(features.ndim - 1))
    return jnp.where(rows.valid[..., None], features, 0)


def _nothing(plan: _Plan, rows: Rows) -> _State:
    """Returns the statistics over no pair."""
    zeros = jnp.zeros_like(rows.valid, plan.dtype)
    empty = [statistic.reduction.empty(zeros) for statistic in plan.statistics]
    return tuple(ByClass(part, part) for part in empty)


def _reduce(plan: _Plan, params: Params, tile: _Tile, axis: int) -> _State:
    """Reduces a tile along an axis; the anchors are along the other one."""
    positions, given = tile.positions[axis], tile.given[axis]

    def reduce(statistic: Statistic) -> ByClass:
        values = statistic.value(
            *_arguments(statistic, tile, axis, tile.similarities, params, given)
        )
        used = _used(statistic, tile, axis, params)
        if statistic.negatives_only:
            (negative,) = statistic.reduction.reduce(values, (used,), axis, positions)
            return ByClass(statistic.reduction.empty(jnp.zeros_like(negative.total)), negative)
        masks = used & tile.positives, used & ~tile.positives
        return ByClass(*statistic.reduction.reduce(values, masks, axis, positions))

    return tuple(map(reduce, plan.statistics))


def _arguments(
    statistic: Statistic,
    tile: _Tile,
    axis: int,
    similarities: Float[Array, "a b"],
    params: Params,
    given: Any,
) -> tuple[Any, ...]:
    """Returns what the values of a tile depend on."""
    if given is None or not statistic.takes_given:
        return similarities, tile.overlaps, params
    along = jax.tree.map(partial(jnp.expand_dims, axis=axis), given)
    return similarities, tile.overlaps, params, along


def _used(statistic: Statistic, tile: _Tile, axis: int, params: Params) -> Bool[Array, "a b"]:
    """Returns the pairs of a tile that count in a statistic."""
    used = tile.used & ~tile.positives if statistic.negatives_only else tile.used
    if statistic.mask is None:
        return used
    given = tile.given[axis]
    return used & statistic.mask(
        *_arguments(statistic, tile, axis, tile.similarities, params, given)
    )


def _merge_at(plan: _Plan, state: _State, i: Index, parts: _State) -> _State:
    """Merges the statistics over further references into those of block i."""
    merged = tuple(
        ByClass(*map(statistic.reduction.merge, old, new))
        for statistic, old, new in zip(plan.statistics, _at(state, i), parts, strict=True)
    )
    return _put(state, i, merged)


def _factors(plan: _Plan, state: _State | None, cotangents: Any) -> Any:
    """Returns the peaks, and by what the share of a pair in its statistic is multiplied."""
    if state is None:
        return None

    def factor(statistic: Statistic, part: Partial, cotangent: Array) -> Partial:
        peak = or_zero(part.peak)
        if statistic.reduction.divides:
            cotangent = cotangent / jnp.where(part.total == 0, 1, part.total)
        return Partial(peak, cotangent)

    return tuple(
        ByClass(*map(partial(factor, statistic), parts, cotangent))
        for statistic, parts, cotangent in zip(plan.statistics, state, cotangents, strict=True)
    )


def _add_gradients(
    plan: _Plan,
    params: Params,
    tile: _Tile,
    factors: _States,
    gradients: _Gradients,
    i: Index,
    j: Index,
    part: Part,
) -> _Gradients:
    """Adds the gradients through the similarities of a tile."""
    (of_anchors, of_references), (own, others) = factors, gradients
    sides = [(_at(of_anchors, i), 1)]
    if part == "rectangle" and of_references is not None:
        sides.append((_at(of_references, j), 0))
    elif part != "rectangle":
        sides.append((_at(of_anchors, j), 0))
    d_tile, d_params, d_given = _tile_gradient(plan, params, tile, sides)
    if part == "diagonal":  # Each pair was seen from both sides.
        d_params = jax.tree.map(lambda gradient: gradient / 2, d_params)
    d_params = jax.tree.map(jnp.add, others.params, d_params)
    given = _add_at(own.given, i, d_given[0])
    if part == "lower":
        given = _add_at(given, j, d_given[1])

    if plan.similarity == "cosine":  # By the products.
        d_tile = d_tile * tile.norms[0][:, None] * tile.norms[1][None, :]  # pyright: ignore
    # The sums are those of what is multiplied: a large mean of the rows then cancels.
    d_tile = rounded(d_tile, plan.low[0] or plan.low[1])

    def add(blocks: _RowGradient, k: Index, rows: Array, axis: int) -> _RowGradient:
        with_sums = blocks.sums is not None
        return _add_at(blocks, k, _tile_times_rows(d_tile, rows, axis, with_sums, plan.is_low))

    d_anchors = add(own.rows, i, tile.references, 1)
    d_references = others.references
    if part == "lower":
        d_anchors = add(d_anchors, j, tile.anchors, 0)
    elif part == "rectangle" and d_references is not None:
        d_references = add(d_references, j, tile.anchors, 0)
    return _OfAnchors(d_anchors, given), _OfOthers(d_params, d_references)


def _tile_times_rows(
    d_tile: Float[Array, "a b"],
    rows: Float[Array, "_ d"],
    axis: int,
    with_sums: bool,
    is_low: bool,
) -> _RowGradient:
    """Returns `D X` for the axis 1, and `Dᵀ X` for the axis 0, with the sums of D along it."""
    if with_sums and is_low:
        # A matrix unit adds up, too, by columns of ones. GPUs like a multiple of eight of them.
        rows = jnp.concatenate([rows, jnp.ones_like(rows, shape=(rows.shape[0], 8))], axis=1)
        products = times(d_tile if axis == 1 else d_tile.T, rows)
        return _RowGradient(products[:, :-8], products[:, -1])
    sums = jnp.sum(d_tile, axis=axis) if with_sums else None
    products = times(d_tile, rows) if axis == 1 else _product_of_transpose(d_tile, rows)
    return _RowGradient(products, sums)


def _product_of_transpose(a: Float[Array, "a b"], rows: Float[Array, "a d"]) -> Float[Array, "b d"]:
    """Returns `a.T @ rows`."""
    if not on_cpu() or rows.shape[1] >= 256:
        return times(a.T, rows)
    # For short rows, XLA for CPUs is faster where neither factor is a transpose.
    product = lax.optimization_barrier(wide_product(lax.optimization_barrier(rows.T), a))
    return lax.optimization_barrier(product.T)


def _tile_gradient(
    plan: _Plan, params: Params, tile: _Tile, sides: list[tuple[_State, int]]
) -> tuple[Float[Array, "a b"], Params, list[Any]]:
    """Returns the gradients of a tile's similarities, of the parameters, and of given numbers.

    Args:
      sides: The factors of the anchors, and the axis along which the anchor does not change.

    Returns:
      The last gradients are those of each side.
    """
    total, d_params = jnp.zeros_like(tile.similarities), jax.tree.map(jnp.zeros_like, params)
    d_given = [jax.tree.map(jnp.zeros_like, tile.given[axis]) for _, axis in sides]
    for k, statistic in enumerate(plan.statistics):
        alike = tile.given[1] is None or not statistic.takes_given
        for at, group in enumerate([sides] if alike else [[side] for side in sides]):
            axis = group[0][1]

            def value(*leaves: Any, of: Statistic = statistic, axis: int = axis) -> Array:
                return of.value(*_arguments(of, tile, axis, *leaves))

            values, back = jax.vjp(value, tile.similarities, params, tile.given[axis])
            shares = [
                _shares(statistic, tile, params, values, factors[k], axis)
                for factors, axis in group
            ]
            d_values, *d_others = back(sum(shares[1:], shares[0]))
            total = total + d_values
            d_params, d_given[at] = jax.tree.map(jnp.add, (d_params, d_given[at]), tuple(d_others))
    return total, d_params, d_given


def _shares(
    statistic: Statistic, tile: _Tile, params: Params, values: Array, factors: ByClass, axis: int
) -> Float[Array, "a b"]:
    """Returns the gradients of a tile's values."""

    def select(positive: Array, negative: Array) -> Array:
        expand = partial(jnp.expand_dims, axis=axis)
        if statistic.negatives_only:
            return expand(negative)
        return jnp.where(tile.positives, expand(positive), expand(negative))

    used = _used(statistic, tile, axis, params)
    peaks: Any = 0  # The same for both sides of a tile: XLA then computes one share.
    if statistic.reduction.has_peaks:
        peaks = select(factors.positive.peak, factors.negative.peak)
    factor = select(factors.positive.total, factors.negative.total)
    share = statistic.reduction.share(jnp.where(used, values, peaks), peaks)
    return jnp.where(used, factor * share, 0)


def _row_gradients(
    plan: _Plan,
    center: Float[Array, " d"] | None,
    gradients: _Gradients,
    anchors: Rows,
    references: Rows | None,
    sides: tuple[_Side, _Side | None],
) -> tuple[Any, Any]:
    """Returns the gradients of anchors and of references."""
    of_anchors, rest = gradients

    def of_rows(
        gradient: _RowGradient | None, rows: Rows | None, side: _Side | None, given: Any = None
    ) -> Any:
        if gradient is None or rows is None or side is None:
            return None
        loaded = side.rows.features if plan.is_low else _load(plan, rows, center)
        d_features = _feature_gradient(plan, gradient, loaded.astype(plan.dtype), side)
        d_features = d_features.astype(rows.features.dtype)
        return Rows(d_features, None, None, None, given)  # pyright: ignore

    return (
        of_rows(of_anchors.rows, anchors, sides[0], of_anchors.given),
        of_rows(rest.references, references, sides[1]),
    )


def _feature_gradient(
    plan: _Plan, gradient: _RowGradient, loaded: Float[Array, "k a d"], side: _Side
) -> Float[Array, "k a d"]:
    if gradient.sums is not None:
        return 2 * (gradient.products - gradient.sums[..., None] * loaded)
    if side.norms is not None:
        return tangential(gradient.products, loaded, side.norms[..., None])
    return gradient.products
