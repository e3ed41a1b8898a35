r"""One tile: the pairs of a block of anchors I and a block of references J.

**Forward.** The similarities of a tile are `S = X_I X_Jᵀ`, or follow from these products. They are
reduced along the rows for the statistics of block I. A tile below the diagonal of the anchors among
themselves serves block J, too, along its columns.

**Backward.** Let g_i be the cotangent of a statistic. `factors_of` turns it into `f = g / t` (or
`f = g`). The cotangents `f_i share_ij` of the values of a tile are pulled back through `v(s)` to
`D_ij = Σ_statistics f_i share_ij ∂v_ij/∂s_ij`. A tile that serves both of its sides has the same
values for both, so the cotangents `f_i share_ij + f_j share_ji` are pulled back at once. With
numbers c of the rows, its values differ: for one side `pair.anchor` is c_i and `pair.reference`
c_j, and for the other they are swapped. Each side is then pulled back by itself, to the
similarities and to the numbers. Then

- for `s = x_i · x_j`: `X_I` gets the gradient `D X_J`, and `X_J` gets `Dᵀ X_I`;
- for `s = −‖x_i − x_j‖²`, since `∂s/∂x_i = 2 (x_j − x_i)`: `X_I` gets `2 (D X_J − (D 1) X_I)`, and
  `X_J` gets `2 (Dᵀ X_I − (Dᵀ 1) X_J)`. The products and the row sums `D 1` are added up over tiles
  (`RowGradient`), and put together once, at the end (`feature_gradient`);
- for `s = −‖x_i − x_j‖`, D is first divided by `2 ‖x_i − x_j‖`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer

from jaxloss.core import linear
from jaxloss.core.backend import on_cpu
from jaxloss.core.products import Low, rounded, row_products, times, times_in_parts, wide_product
from jaxloss.pairs.rows import DISTANCES, How, Rows, Similarity
from jaxloss.pairs.statistics import (
    ByClass,
    Pair,
    Params,
    Parts,
    Statistic,
    has_gradient,
    reduction_of,
)

State: TypeAlias = tuple[Parts, ...]
"""Of each statistic the parts of anchors or of references, in arrays `[blocks, size]`."""


Shared: TypeAlias = tuple[Params, Float[Array, " d"] | None, Float[Array, "a b"] | None]
"""What all tiles read beside the rows: parameters, the center, and similarities at hand."""
Place: TypeAlias = Literal["diagonal", "lower", "rectangle"]
"""Where a tile is: on or below the diagonal of the anchors among themselves, or elsewhere."""


class Inputs(NamedTuple):
    """What the visits of all tiles begin with. The rows are in blocks."""

    params: Params
    center: Float[Array, " d"] | None
    anchors: Rows
    references: Rows | None


class Loaded(NamedTuple):
    """Rows in blocks, as all tiles need them."""

    rows: Rows
    norms: Float[Array, "k a"] | None
    """Squared norms of the rows relative to the center; inverse norms for cosines; None for
    products."""


class Found(NamedTuple):
    """What one tile, or the visits so far, have found."""

    of_anchors: Any
    """In blocks; of one tile, for its block of anchors."""
    of_params: Any
    of_references: Any
    """In blocks, of references that are not the anchors. On several devices, it travels with them.
    Of one tile below the diagonal, it is for the other block of anchors. None if there is none."""


class Tile(NamedTuple):
    """The pairs of a block of anchors and a block of references."""

    how: How
    params: Params
    """What the values of the pairs depend on."""
    anchors: Float[Array, "a d"]
    references: Float[Array, "b d"]
    norms: tuple[Float[Array, " a"], Float[Array, " b"]] | None
    """As in `Loaded`."""
    similarities: Float[Array, "a b"]
    guide: Float[Array, "a b"] | None
    """The similarities of the guides."""
    used: Bool[Array, "a b"]
    """Without invalid rows, and without an anchor and itself."""
    overlaps: Bool[Array, "a b"] | Float[Array, "a b"]
    positions: tuple[Int32[Array, " a"], Int32[Array, " b"]]
    numbers: tuple[Any, Any]
    """Of the anchors `[a]` and of the references `[b]`."""

    @property
    def positives(self) -> Bool[Array, "a b"]:
        """Which pairs are of one class."""
        return self.overlaps if self.overlaps.dtype == jnp.bool_ else self.overlaps > 0


# The similarities of a tile ----


def loaded(how: How, center: Float[Array, " d"] | None, rows: Rows, low: Low) -> Loaded:
    """Returns rows in blocks as all tiles need them.

    Low-precision ones are loaded here, once. Wide ones are loaded by each tile: a copy of all would
    take as much memory as they do.
    """
    if how.similarity == "inner" and not how.is_low:
        return Loaded(rows, None)
    features, norms = _load(how, center, rows), None
    if how.similarity == "cosine":
        norms = linear.inverse_norms_of_scaled(features)
    elif how.similarity in DISTANCES:
        norms = jnp.sum(features**2, axis=-1)
    if how.is_low:
        rows = rows._replace(features=features if low is None else features.astype(low))
    return Loaded(rows, norms)


def loaded_rows(how: How, inputs: Inputs) -> tuple[Loaded, Loaded | None]:
    """Returns anchors and references as all tiles need them."""
    _, center, anchors, references = inputs
    own = loaded(how, center, anchors, how.low[0])
    return own, references and loaded(how, center, references, how.low[1])


def tile_of(how: How, shared: Shared, anchors: Loaded, references: Loaded) -> Tile:
    """Returns the tile of a block of each. Similarities at hand are used."""
    params, center, similarities = shared
    (a, norms_a), (b, norms_b) = anchors, references
    used = a.valid[:, None] & b.valid[None, :] & (a.positions[:, None] != b.positions[None, :])
    own, other, guide = a.features, b.features, None
    if not how.is_low:
        own, other = _load(how, center, a), _load(how, center, b)
    norms = None if norms_a is None or norms_b is None else (norms_a, norms_b)
    if similarities is None:
        similarities = _similarities(how.similarity, own, other, norms)
    if how.guide_similarity is not None:
        guides: Any = lax.stop_gradient((a.guide, b.guide))
        squares: Any = [jnp.sum(rows**2, axis=1) for rows in guides]
        guide = _similarities(how.guide_similarity, guides[0], guides[1], squares)
    overlaps = _overlaps(a.labels, b.labels, similarities.dtype)
    positions, numbers = (a.positions, b.positions), (a.numbers, b.numbers)
    return Tile(
        how, params, own, other, norms, similarities, guide, used, overlaps, positions, numbers
    )


def _load(how: How, center: Float[Array, " d"] | None, rows: Rows) -> Float[Array, " *k a d"]:
    """Returns the features with zeros in the invalid rows, relative to the center."""
    features = rows.features.astype(how.dtype)
    if how.similarity == "inner" and not how.is_low:
        return features  # These have the zeros already.
    if center is not None:
        features = features - jnp.expand_dims(center.astype(how.dtype), range(features.ndim - 1))
    return jnp.where(rows.valid[..., None], features, 0)


def _similarities(
    similarity: Similarity, own: Float[Array, "a d"], other: Float[Array, "b d"], norms: Any
) -> Float[Array, "a b"]:
    """Returns the similarities of rows with `norms` as in `Loaded`."""
    products = row_products(own, other)
    if similarity == "inner":
        return products
    if similarity == "cosine":
        return products * norms[0][:, None] * norms[1][None, :]
    similarities = linear.negative_squared_distances(products, *norms)
    if similarity == "negative_distance":
        similarities = -linear.distances_of_squares(-similarities, norms[0][:, None])
    # XLA for CPUs would compute them again for each statistic.
    return lax.optimization_barrier(similarities) if on_cpu() else similarities


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


# Statistics ----


def nothing(how: How, statistics: tuple[Statistic, ...], rows: Rows) -> State:
    """Returns the statistics over no pair, of rows in blocks."""
    zeros = jnp.zeros_like(rows.valid, how.dtype)
    empty = [reduction_of(statistic).empty(zeros) for statistic in statistics]
    return tuple(Parts(part, part) for part in empty)


def reduced(statistics: tuple[Statistic, ...], tile: Tile, axis: int) -> State:
    """Reduces a tile along an axis: 1 for the statistics of the anchors, 0 for the references'."""

    def parts(statistic: Statistic) -> Parts:
        reduction = reduction_of(statistic)
        used = _used(statistic, tile, axis)
        value = _value(statistic, tile, axis, used)
        values = value(tile.similarities, tile.params, tile.numbers)
        if tile.how.ignores_equal:
            (negative,) = reduction.reduce(values, (used,), axis, tile.positions[axis])
            return Parts(reduction.empty(jnp.zeros_like(negative.peak)), negative)
        masks = used & tile.positives, used & ~tile.positives
        return Parts(*reduction.reduce(values, masks, axis, tile.positions[axis]))

    return tuple(map(parts, statistics))


def merged(statistics: tuple[Statistic, ...], old: State, new: State) -> State:
    """Returns the statistics over the pairs of both."""
    return tuple(
        Parts(*map(reduction_of(statistic).merge, *parts))
        for statistic, *parts in zip(statistics, old, new, strict=True)
    )


def by_class(how: How, statistics: tuple[Statistic, ...], state: State) -> tuple[ByClass, ...]:
    """Returns the statistics over all pairs from their parts."""

    def found(statistic: Statistic, parts: Parts) -> ByClass:
        reduction = reduction_of(statistic)
        exists = tuple(reduction.exists(part).astype(how.dtype) for part in parts)
        return ByClass(reduction.result(parts.positive), reduction.result(parts.negative), exists)

    return tuple(map(found, statistics, state))


# What users write, of the pairs of a tile ----


def _pair(tile: Tile, axis: int, similarities: Array, numbers: tuple[Any, Any]) -> Pair:
    """Returns the pairs of a tile for statistics along an axis."""
    rows, columns = (
        jax.tree.map(partial(jnp.expand_dims, axis=1 - k), of) for k, of in enumerate(numbers)
    )
    # Below the diagonal of the anchors among themselves, the columns are anchors, too.
    is_turned = axis == 0 and not tile.how.both_ways
    anchor, reference = (columns, rows) if is_turned else (rows, columns)
    known = {
        "same": None if tile.how.ignores_equal else tile.overlaps,
        "anchor": anchor,
        "reference": reference,
        "of_row": columns if axis == 0 else rows,
        "guide": tile.guide,
    }
    return Pair(similarities, known)


def _used(statistic: Statistic, tile: Tile, axis: int) -> Bool[Array, "a b"]:
    """Returns the pairs of a tile that count in a statistic."""
    used = tile.used & ~tile.positives if tile.how.ignores_equal else tile.used
    if statistic.mask is None:
        return used
    pair = _pair(tile, axis, tile.similarities, tile.numbers)
    found = _of_each_pair(statistic.mask(pair, tile.params), pair)
    if found.dtype != jnp.bool_:
        raise TypeError(f"`mask` of a statistic must return bool, got {found.dtype}")
    return used & found


def _value(
    statistic: Statistic, tile: Tile, axis: int, used: Bool[Array, "a b"]
) -> Callable[..., Float[Array, "a b"]]:
    """Returns the values of a statistic as a function of similarities, parameters and numbers."""

    def value(similarities: Array, params: Params, numbers: tuple[Any, Any]) -> Array:
        pair = _pair(tile, axis, similarities, numbers)
        if not statistic.is_smooth:
            pair = _of_pairs_that_count(pair, used)
        return _of_each_pair(statistic.value(pair, params), pair).astype(similarities.dtype)

    return value


def _of_each_pair(found: Any, pair: Pair) -> Array:
    """Returns what a value or a mask returned, which may be one number for all pairs."""
    shape = pair.similarity.shape
    is_number = isinstance(found, bool | int | float)
    if not is_number and getattr(found, "ndim", None) != len(shape):
        got = f"shape {found.shape}" if hasattr(found, "shape") else type(found).__name__
        raise ValueError(
            "`value` and `mask` of a statistic must work element by element, on similarities "
            f"of shape {shape}; got a result of {got}. A number for all pairs is "
            "jnp.full_like(pair.similarity, number)"
        )
    return jnp.broadcast_to(jnp.asarray(found), shape)


def _of_pairs_that_count(pair: Pair, used: Bool[Array, "a b"]) -> Pair:
    """Returns the pairs with one that counts in place of those that do not.

    Such as an anchor's with itself, at which values are often infinite or have no derivative: the
    gradient would be 0 · ∞.
    """
    if not used.size:
        return pair
    similarities = lax.stop_gradient(pair.similarity)
    finite = used & jnp.isfinite(similarities)
    row, column = jnp.divmod(jnp.argmax(jnp.where(finite, similarities, -jnp.inf)), used.shape[1])
    some = jnp.where(finite[row, column], similarities[row, column], 0)

    def of(part: Array) -> Array:
        of_row, of_column = part.shape[0] > 1, part.shape[1] > 1
        one = lax.stop_gradient(part)[row if of_row else 0, column if of_column else 0]
        return jnp.where(used, part, one)

    return Pair(jnp.where(used, pair.similarity, some), jax.tree.map(of, dict(pair.known)))


# Gradients ----


def with_gradient(statistics: tuple[Statistic, ...], found: Any) -> Any:
    """Returns what is found of each statistic without those that have no gradient."""
    both = zip(statistics, found, strict=True)
    return tuple(one for statistic, one in both if has_gradient(statistic))


class RowGradient(NamedTuple):
    """`Σ_b D_ab x_b`, and `Σ_b D_ab`, for the derivatives D by the similarities."""

    products: Float[Array, "k a d"]
    sums: Float[Array, "k a"] | None
    """For distances, else None."""
    numbers: Any
    """Of the numbers of the rows; None in place of integers."""


class Factor(NamedTuple):
    """By what the share of a pair in a statistic of its row is multiplied."""

    mark: Array
    """What the share depends on, as `PairReduction.mark` has it."""
    factor: Array
    """The cotangent of the statistic, divided by `PairReduction.divisor`."""


def no_gradient(how: How, rows: Rows) -> RowGradient:
    """Returns the zero gradient of rows in blocks."""
    sums = jnp.zeros_like(rows.valid, how.dtype) if how.similarity in DISTANCES else None
    numbers = jax.tree.map(jnp.zeros_like, _floats_of(rows.numbers))
    return RowGradient(jnp.zeros_like(rows.features, how.dtype), sums, numbers)


def _floats_of(numbers: Any) -> Any:
    """Returns the numbers that have gradients, and None in place of integers."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, numbers)


def _with_integers(floats: Any, numbers: Any) -> Any:
    """Returns `_floats_of` numbers with the integers that these have."""

    def known(own: Array | None, number: Any) -> Any:
        return number if own is None else own

    return jax.tree.map(known, floats, numbers, is_leaf=lambda leaf: leaf is None)


def factors_of(
    statistics: tuple[Statistic, ...], state: State, cotangents: tuple[ByClass, ...]
) -> tuple[Parts, ...]:
    """Returns the factors of the rows in blocks, for both kinds of pairs."""

    def factor(statistic: Statistic, part: Any, cotangent: Array) -> Factor:
        reduction = reduction_of(statistic)
        mark = part.peak if reduction.mark is None else reduction.mark(part)
        if reduction.divisor is not None:
            divisor = reduction.divisor(part)
            cotangent = cotangent / jnp.where(divisor == 0, 1, divisor)
        return Factor(mark, cotangent)

    return tuple(
        Parts(*map(partial(factor, statistic), parts, cotangent[:2]))
        for statistic, parts, cotangent in zip(statistics, state, cotangents, strict=True)
    )


def pulled_back(
    statistics: tuple[Statistic, ...], tile: Tile, factors: list[tuple[int, tuple[Parts, ...]]]
) -> tuple[Float[Array, "a b"], Params, tuple[Any, Any]]:
    """Returns the gradients of what is multiplied, of the parameters, and of the numbers.

    Args:
      factors: Those of the rows of a side, after the axis along which their statistics are.
    """
    total, floats = jnp.zeros_like(tile.similarities), _floats_of(tile.numbers)
    d_others = jax.tree.map(jnp.zeros_like, (tile.params, floats))
    for k, statistic in enumerate(statistics):
        # Values and masks without numbers are the same for both rows of a pair, and towers always
        # have the query as the anchor: the shares of both sides are then pulled back at once.
        groups = [[side] for side in factors] if statistic.by_row else [factors]
        for group in groups:
            axis = group[0][0]
            used = _used(statistic, tile, axis)
            of_one = [(along, of[k]) for along, of in group]
            run = partial(_through_values, statistic, tile, floats, used, of_one)
            if statistic.is_smooth:
                found = run()
            else:  # Without a pair that counts, 0 may be a pole, also of a second derivative.
                zeros = jax.tree.map(jnp.zeros_like, (tile.similarities, tile.params, floats))
                found = lax.cond(jnp.any(used), run, lambda zeros=zeros: zeros)
            d_values, *others = found
            total = total + d_values
            d_others = jax.tree.map(jnp.add, d_others, tuple(others))
    if tile.how.similarity == "cosine":  # By the products.
        total = total * tile.norms[0][:, None] * tile.norms[1][None, :]  # pyright: ignore
    elif tile.how.similarity == "negative_distance":  # By the squares.
        zero = tile.similarities == 0
        total = jnp.where(zero, 0, total / jnp.where(zero, 1, -2 * tile.similarities))
    # The sums are those of what is multiplied: a large mean of the rows then cancels.
    return rounded(total, tile.how.low[0] or tile.how.low[1]), *d_others


def _through_values(
    statistic: Statistic, tile: Tile, floats: Any, used: Array, factors: list[tuple[int, Parts]]
) -> tuple[Float[Array, "a b"], Params, tuple[Any, Any]]:
    """Returns the gradients through the values of one statistic, of sides that have the same."""
    value = _value(statistic, tile, factors[0][0], used)
    values, back = jax.vjp(
        lambda s, p, floats: value(s, p, _with_integers(floats, tile.numbers)),
        *(tile.similarities, tile.params, floats),
    )
    shares = [_shares(statistic, tile, used, values, of, axis) for axis, of in factors]
    return back(sum(shares[1:], shares[0]))


def _shares(
    statistic: Statistic, tile: Tile, used: Array, values: Array, factors: Parts, axis: int
) -> Float[Array, "a b"]:
    """Returns the cotangents of the values of a tile, of which some are used."""

    def of_kind(positive: Array, negative: Array) -> Array:
        expand = partial(jnp.expand_dims, axis=axis)
        if tile.how.ignores_equal:
            return expand(negative)
        return jnp.where(tile.positives, expand(positive), expand(negative))

    reduction = reduction_of(statistic)
    marks: Any = 0  # The same for both sides of a tile: XLA then computes one share.
    if reduction.mark is not None:
        marks = of_kind(factors.positive.mark, factors.negative.mark)
    factor = of_kind(factors.positive.factor, factors.negative.factor)
    positions = jnp.expand_dims(tile.positions[axis], 1 - axis)
    return jnp.where(used, factor * reduction.share(values, used, marks, positions), 0)


def times_rows(
    how: How, d_tile: Float[Array, "a b"], rows: Float[Array, "_ d"], axis: int, numbers: Any
) -> RowGradient:
    """Returns `D X` for the axis 1, and `Dᵀ X` for the axis 0, with the sums of D along it."""
    with_sums = how.similarity in DISTANCES
    if with_sums and how.is_low:
        # A matrix unit adds up, too, by columns of ones. GPUs like a multiple of eight of them.
        rows = jnp.concatenate([rows, jnp.ones_like(rows, shape=(rows.shape[0], 8))], axis=1)
        products = _times(how, d_tile if axis == 1 else d_tile.T, rows)
        return RowGradient(products[:, :-8], products[:, -1], numbers)
    sums = jnp.sum(d_tile, axis=axis) if with_sums else None
    if axis == 1 or not on_cpu() or rows.shape[1] >= 256:
        return RowGradient(_times(how, d_tile if axis == 1 else d_tile.T, rows), sums, numbers)
    # For short rows, XLA for CPUs is faster where neither factor is a transpose.
    product = lax.optimization_barrier(wide_product(lax.optimization_barrier(rows.T), d_tile))
    return RowGradient(lax.optimization_barrier(product.T), sums, numbers)


def _times(how: How, d_tile: Float[Array, "a b"], rows: Float[Array, "b d"]) -> Array:
    """Returns `D X`. With low-precision rows on the other side, D is rounded, and X may be."""
    is_mixed = how.is_low and rows.dtype == how.dtype
    return times_in_parts(d_tile, rows) if is_mixed else times(d_tile, rows)


def feature_gradient(
    how: How, center: Float[Array, " d"] | None, gradient: RowGradient, rows: Rows, side: Loaded
) -> Rows:
    """Returns the gradient of rows in blocks, in their dtype."""
    x = side.rows.features if how.is_low else _load(how, center, rows)
    x, d_features = x.astype(how.dtype), gradient.products
    if gradient.sums is not None:
        d_features = 2 * (d_features - gradient.sums[..., None] * x)
    elif side.norms is not None:
        d_features = linear.tangential(d_features, x, side.norms[..., None])
    d_features = d_features.astype(rows.features.dtype)
    return Rows(d_features, None, None, None, gradient.numbers)  # pyright: ignore


def no_gradients(how: How, inputs: Inputs) -> Found:
    """Returns zero gradients of all inputs."""
    params, _, anchors, references = inputs
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Found(no_gradient(how, anchors), zeros, references and no_gradient(how, references))


def gradients_of_tile(
    statistics: tuple[Statistic, ...], tile: Tile, factors: tuple[Any, Any], place: Place
) -> Found:
    """Returns the gradients through the similarities of a tile, from the factors of its sides."""
    of_sides = [(axis, of) for axis, of in zip((1, 0), factors, strict=True) if of is not None]
    d_tile, d_params, d_numbers = pulled_back(statistics, tile, of_sides)
    if place == "diagonal":  # Each pair was seen from both sides.
        both = add(*d_numbers)
        d_params, both = jax.tree.map(lambda gradient: gradient / 2, (d_params, both))
        return Found(times_rows(tile.how, d_tile, tile.references, 1, both), d_params, None)
    of_anchors = times_rows(tile.how, d_tile, tile.references, 1, d_numbers[0])
    return Found(of_anchors, d_params, times_rows(tile.how, d_tile, tile.anchors, 0, d_numbers[1]))


def gradients(
    how: How, inputs: Inputs, found: Found, loaded: tuple[Loaded, Loaded | None]
) -> Inputs:
    """Returns the gradient of the inputs from the sums over all tiles."""
    _, center, anchors, references = inputs
    d_references = None
    if references is not None and loaded[1] is not None:
        d_references = feature_gradient(how, center, found.of_references, references, loaded[1])
    d_anchors = feature_gradient(how, center, found.of_anchors, anchors, loaded[0])
    return Inputs(found.of_params, None, d_anchors, d_references)


def add(old: Any, new: Any) -> Any:
    """Returns the sum of gradients."""
    return jax.tree.map(jnp.add, old, new)
