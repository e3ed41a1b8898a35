r"""One tile: the pairs of a block of anchors I and a block of references J.

**Forward.** The similarities of a tile are `S = X_I X_Jᵀ`, or follow from these products. They are
reduced along the rows for the statistics of block I. A tile below the diagonal of the anchors among
themselves serves block J, too, along its columns.

**Backward.** Let g_i be the cotangent of a statistic. `factors_of` turns it into `f = g / t` (or
`f = g`). The cotangents `f_i share_ij` of the values of a tile are pulled back through `v(s)` to
`D_ij = Σ_statistics f_i share_ij ∂v_ij/∂s_ij`. A tile that serves both of its sides has the same
values for both, so the cotangents `f_i share_ij + f_j share_ji` are pulled back at once. With
numbers of the rows, its values differ: `v(s_ij, o_ij, c_i, c_j)` for one side, and `v(s_ij, o_ij,
c_j, c_i)` for the other. Each side is then pulled back by itself, to the similarities and to the
numbers. Then

- for `s = x_i · x_j`: `X_I` gets the gradient `D X_J`, and `X_J` gets `Dᵀ X_I`;
- for `s = −‖x_i − x_j‖²`, since `∂s/∂x_i = 2 (x_j − x_i)`: `X_I` gets `2 (D X_J − (D 1) X_I)`, and
  `X_J` gets `2 (Dᵀ X_I − (Dᵀ 1) X_J)`. The products and the row sums `D 1` are added up over tiles
  (`RowGradient`), and put together once, at the end (`feature_gradient`);
- for `s = −‖x_i − x_j‖`, D is first divided by `2 ‖x_i − x_j‖`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer

from jaxloss.core.backend import on_cpu
from jaxloss.core.batch import AxisName
from jaxloss.core.linear import (
    distances_of_squares,
    inverse_norms_of_scaled,
    negative_squared_distances,
    tangential,
)
from jaxloss.core.logsumexp import Part
from jaxloss.core.products import Low, rounded, row_products, times, wide_product
from jaxloss.pairs.rows import DISTANCES, Compared, Rows, Similarity
from jaxloss.pairs.statistics import (
    ByClass,
    Pair,
    Params,
    Parts,
    Statistic,
    has_gradient,
    reduction_of,
)

_OF_UNITS = ("cosine", "negative_squared_distance_of_units")


class Plan(NamedTuple):
    """All that is known of a comparison before the first tile."""

    statistics: tuple[Statistic, ...]
    similarity: Compared
    dtype: Any
    """Of all computations."""
    axis_name: AxisName | None
    """The axis of the ring; None without a ring."""
    of_references: bool
    """Whether references have statistics, too."""
    low: tuple[Low, Low]
    """In which low dtype the anchors are multiplied, and the references; None for the wide one."""
    of_towers: bool
    """Whether pairs of one label do not count. Then values do not depend on the labels."""
    by_row: bool = False
    """Whether the values of a pair differ between the statistics of its two rows."""
    num_alike: int = 0
    """How many statistics, the first ones, have values that do not differ, even so."""
    guided_by: Similarity | None = None
    """The similarity of guides, if there are any."""

    @property
    def is_low(self) -> bool:
        """Whether any rows are multiplied in a low dtype."""
        return any(self.low)

    def with_gradient(self, found: Any) -> Any:
        """Returns what is found of each statistic without those that have no gradient."""
        pairs = zip(self.statistics, found, strict=True)
        return tuple(one for statistic, one in pairs if has_gradient(statistic))

    def of_gradient(self) -> Plan:
        """Returns the plan of the backward pass."""
        return self._replace(
            statistics=self.with_gradient(self.statistics),
            num_alike=sum(map(has_gradient, self.statistics[: self.num_alike])),
        )


State: TypeAlias = tuple[Parts, ...]
"""A `Part` of arrays `[blocks, size]` for each statistic and side."""
States: TypeAlias = tuple[State, State | None]
"""Of the anchors, and of the references if they have statistics."""


class Tile(NamedTuple):
    """The pairs of a block of anchors and a block of references."""

    anchors: Float[Array, "a d"]
    references: Float[Array, "b d"]
    similarities: Float[Array, "a b"]
    used: Bool[Array, "a b"]
    overlaps: Bool[Array, "a b"] | Float[Array, "a b"]
    positions: tuple[Int32[Array, " a"], Int32[Array, " b"]]
    numbers: tuple[Any, Any]
    """Of the anchors `[a]` and of the references `[b]`."""
    guide: Float[Array, "a b"] | None
    """The similarities of the guides."""
    norms: tuple[Float[Array, " a"], Float[Array, " b"]] | None
    """As in `Loaded`."""

    @property
    def positives(self) -> Bool[Array, "a b"]:
        """Which pairs are of one class."""
        return self.overlaps if self.overlaps.dtype == jnp.bool_ else self.overlaps > 0


class Loaded(NamedTuple):
    """The anchors or the references, in blocks."""

    rows: Rows
    norms: Float[Array, "k a"] | None
    """Squared norms of the rows relative to the center; inverse norms for cosines; None for
    products."""


# The similarities of a tile ----


def loaded(plan: Plan, center: Float[Array, " d"] | None, rows: Rows, low: Low) -> Loaded:
    """Returns rows in blocks as all tiles need them. Low-precision ones are loaded once."""
    if plan.similarity == "inner" and not plan.is_low:
        return Loaded(rows, None)
    features, norms = _load(plan, rows, center), None
    if plan.similarity in _OF_UNITS:
        norms = inverse_norms_of_scaled(features)
    elif plan.similarity != "inner":
        norms = jnp.sum(features**2, axis=-1)
    if plan.is_low:
        rows = rows._replace(features=features if low is None else features.astype(low))
    return Loaded(rows, norms)


def tile_of(
    plan: Plan,
    center: Float[Array, " d"] | None,
    anchors: Loaded,
    references: Loaded,
    similarities: Float[Array, "a b"] | None = None,
) -> Tile:
    """Returns the tile of a block of each. Similarities at hand are used."""
    (a, norms_a), (b, norms_b) = anchors, references
    used = a.valid[:, None] & b.valid[None, :] & (a.positions[:, None] != b.positions[None, :])
    own, other = a.features, b.features
    if not plan.is_low:
        own, other = _load(plan, a, center), _load(plan, b, center)
    norms = None if norms_a is None or norms_b is None else (norms_a, norms_b)
    if similarities is None:
        similarities = _similarities(plan, own, other, norms)
    overlaps = _overlaps(a.labels, b.labels, similarities.dtype)
    positions, numbers = (a.positions, b.positions), (a.numbers, b.numbers)
    guide = _similarities_of_guides(plan, a, b)
    return Tile(own, other, similarities, used, overlaps, positions, numbers, guide, norms)


def _load(plan: Plan, rows: Rows, center: Float[Array, " d"] | None) -> Float[Array, " *k a d"]:
    """Returns the features with zeros in the invalid rows, relative to the center.

    Wide ones of products have the zeros already.
    """
    features = rows.features.astype(plan.dtype)
    if plan.similarity == "inner" and not plan.is_low:
        return features
    if center is not None:
        features = features - jnp.expand_dims(center.astype(plan.dtype), range(features.ndim - 1))
    return jnp.where(rows.valid[..., None], features, 0)


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
    plan: Plan,
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
    if plan.similarity == "negative_distance":
        similarities = -distances_of_squares(-similarities, norms[0][:, None])
    # Computed once, and not again for each statistic.
    return lax.optimization_barrier(similarities) if on_cpu() else similarities


def _similarities_of_guides(plan: Plan, anchors: Rows, references: Rows) -> Array | None:
    """Returns those of loaded guides, which are relative to a center for distances."""
    if plan.guided_by is None:
        return None
    guides: Any = anchors.guide, references.guide
    own, other = (lax.stop_gradient(guide).astype(plan.dtype) for guide in guides)
    products = row_products(own, other)
    if plan.guided_by in ("cosine", "inner"):
        return products
    norms = jnp.sum(own**2, axis=1), jnp.sum(other**2, axis=1)
    similarities = negative_squared_distances(products, *norms)
    if plan.guided_by == "negative_distance":
        similarities = -distances_of_squares(-similarities, norms[0][:, None])
    return similarities


# Statistics ----


def nothing(plan: Plan, rows: Rows) -> State:
    """Returns the statistics over no pair, of rows in blocks."""
    zeros = jnp.zeros_like(rows.valid, plan.dtype)
    empty = [reduction_of(statistic).empty(zeros) for statistic in plan.statistics]
    return tuple(Parts(part, part) for part in empty)


def reduced(plan: Plan, params: Params, tile: Tile, axis: int) -> State:
    """Reduces a tile along an axis; the anchors are along the other one."""

    def reduce(k: int) -> Parts:
        reduction = reduction_of(plan.statistics[k])
        used = _used(plan, k, tile, axis, params)
        value = _values(plan, k, tile, axis, used=used)
        values = value(tile.similarities, params, tile.numbers)
        if plan.of_towers:
            (negative,) = reduction.reduce(values, (used,), axis, tile.positions[axis])
            return Parts(reduction.empty(jnp.zeros_like(negative.peak)), negative)
        masks = used & tile.positives, used & ~tile.positives
        return Parts(*reduction.reduce(values, masks, axis, tile.positions[axis]))

    return tuple(map(reduce, range(len(plan.statistics))))


def merged(plan: Plan, old: State, new: State) -> State:
    """Returns the statistics over the references of both."""
    return tuple(
        Parts(*map(reduction_of(statistic).merge, *parts))
        for statistic, *parts in zip(plan.statistics, old, new, strict=True)
    )


def results_of(plan: Plan, state: State) -> tuple[ByClass, ...]:
    """Returns the statistics from their parts."""

    def found(statistic: Statistic, parts: Parts) -> ByClass:
        reduction = reduction_of(statistic)
        exists = tuple(reduction.exists(part).astype(plan.dtype) for part in parts)
        return ByClass(reduction.result(parts.positive), reduction.result(parts.negative), exists)

    return tuple(map(found, plan.statistics, state))


def _pair(plan: Plan, tile: Tile, axis: int, similarities: Array, numbers: tuple[Any, Any]) -> Pair:
    """Returns what values of the statistics along an axis are computed from.

    If the anchors are their own references, those of the columns are the anchors along the axis 0.
    """
    rows, columns = (
        jax.tree.map(partial(jnp.expand_dims, axis=1 - k), of) for k, of in enumerate(numbers)
    )
    anchor, reference = (columns, rows) if axis == 0 and not plan.of_references else (rows, columns)
    own = anchor if axis == 1 or not plan.of_references else reference
    same = None if plan.of_towers else tile.overlaps
    known = {"same": same, "anchor": anchor, "reference": reference, "of_row": own}
    return Pair(similarities, known | {"guide": tile.guide})


def _values(
    plan: Plan,
    k: int,
    tile: Tile,
    axis: int,
    *,
    mask: Callable[..., Array] | None = None,
    used: Bool[Array, "a b"] | None = None,
) -> Callable[..., Array]:
    """Returns the values of statistic k as a function of `(similarities, params, numbers)`.

    Or, in place of the value, a mask. A value gets the pairs that are `used`.
    """
    is_value = mask is None
    function = plan.statistics[k].value if mask is None else mask

    def of(similarities: Array, params: Params, numbers: tuple[Any, Any]) -> Array:
        pair = _pair(plan, tile, axis, similarities, numbers)
        if used is not None and not plan.statistics[k].is_smooth:
            pair = _of_pairs_that_count(pair, used)
        found = function(pair, params)
        is_number = isinstance(found, bool | int | float)  # The same for all pairs.
        if not is_number and getattr(found, "ndim", None) != similarities.ndim:
            got = f"shape {found.shape}" if hasattr(found, "shape") else type(found).__name__
            raise ValueError(
                "`value` and `mask` of a statistic must work element by element, on similarities "
                f"of shape {similarities.shape}; got a result of {got}. A number for all pairs is "
                "jnp.full_like(pair.similarity, number)"
            )
        found = jnp.asarray(found)
        found = found.astype(similarities.dtype) if is_value else found
        return jnp.broadcast_to(found, similarities.shape)

    return of


def _used(plan: Plan, k: int, tile: Tile, axis: int, params: Params) -> Bool[Array, "a b"]:
    """Returns the pairs of a tile that count in statistic k."""
    used = tile.used & ~tile.positives if plan.of_towers else tile.used
    mask = plan.statistics[k].mask
    if mask is None:
        return used
    found = _values(plan, k, tile, axis, mask=mask)(tile.similarities, params, tile.numbers)
    if found.dtype != jnp.bool_:
        raise TypeError(f"`mask` of a statistic must return bool, got {found.dtype}")
    return used & found


def _of_pairs_that_count(pair: Pair, used: Bool[Array, "a b"]) -> Pair:
    """Returns the pairs with one that counts in place of those that do not.

    Such as an anchor's with itself, at which values are often infinite or have no derivative.
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


class RowGradient(NamedTuple):
    """`Σ_b D_ab x_b`, and `Σ_b D_ab`, for the derivatives D by the similarities."""

    products: Float[Array, "k a d"]
    sums: Float[Array, "k a"] | None
    """None for products."""
    numbers: Any
    """Of the numbers of the rows; None in place of integers."""


def no_gradient(plan: Plan, rows: Rows) -> RowGradient:
    """Returns the zero gradient of rows in blocks."""
    sums = jnp.zeros_like(rows.valid, plan.dtype) if plan.similarity in DISTANCES else None
    numbers = jax.tree.map(jnp.zeros_like, floats_of(rows.numbers))
    return RowGradient(jnp.zeros_like(rows.features, plan.dtype), sums, numbers)


def floats_of(numbers: Any) -> Any:
    """Returns the numbers that have gradients, and None in place of integers."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, numbers)


def _with_integers(floats: Any, numbers: Any) -> Any:
    """Returns `floats_of` numbers with the integers that these have."""

    def known(own: Array | None, number: Any) -> Any:
        return number if own is None else own

    return jax.tree.map(known, floats, numbers, is_leaf=lambda leaf: leaf is None)


def factors_of(plan: Plan, state: State | None, cotangents: Any) -> Any:
    """Returns the marks, and by what the share of a pair in its statistic is multiplied."""
    if state is None:
        return None

    def factor(statistic: Statistic, part: Part, cotangent: Array) -> Part:
        reduction = reduction_of(statistic)
        mark = part.peak if reduction.mark is None else reduction.mark(part)
        if reduction.divisor is not None:
            divisor = reduction.divisor(part)
            cotangent = cotangent / jnp.where(divisor == 0, 1, divisor)
        return Part(mark, cotangent)

    return tuple(
        Parts(*map(partial(factor, statistic), parts, cotangent[:2]))
        for statistic, parts, cotangent in zip(plan.statistics, state, cotangents, strict=True)
    )


def pulled_back(
    plan: Plan, params: Params, tile: Tile, sides: list[tuple[State, int]]
) -> tuple[Float[Array, "a b"], Params, tuple[Any, Any]]:
    """Returns the gradients of what is multiplied, of the parameters, and of the numbers.

    Args:
      sides: The factors of the anchors, and the axis along which the anchor does not change.
    """
    total, floats = jnp.zeros_like(tile.similarities), floats_of(tile.numbers)
    d_others = jax.tree.map(jnp.zeros_like, (params, floats))
    for k in range(len(plan.statistics)):
        alike = not plan.by_row or k < plan.num_alike
        for group in [sides] if alike else [[side] for side in sides]:
            axis = group[0][1]
            used = _used(plan, k, tile, axis, params)
            value = _values(plan, k, tile, axis, used=used)
            values, back = jax.vjp(
                lambda s, p, floats, value=value: value(s, p, _with_integers(floats, tile.numbers)),
                *(tile.similarities, params, floats),
            )
            shares = [_shares(plan, k, tile, used, values, of[k], along) for of, along in group]
            found = back(sum(shares[1:], shares[0]))
            if not plan.statistics[k].is_smooth:  # Without a pair that counts, 0 may be a pole.
                some = jnp.any(used)
                found = jax.tree.map(lambda d, some=some: jnp.where(some, d, 0), found)
            d_values, *others = found
            total = total + d_values
            d_others = jax.tree.map(jnp.add, d_others, tuple(others))
    if plan.similarity == "cosine":  # By the products.
        total = total * tile.norms[0][:, None] * tile.norms[1][None, :]  # pyright: ignore
    elif plan.similarity == "negative_distance":  # By the squares.
        zero = tile.similarities == 0
        total = jnp.where(zero, 0, total / jnp.where(zero, 1, -2 * tile.similarities))
    # The sums are those of what is multiplied: a large mean of the rows then cancels.
    return rounded(total, plan.low[0] or plan.low[1]), *d_others


def _shares(
    plan: Plan,
    k: int,
    tile: Tile,
    used: Bool[Array, "a b"],
    values: Array,
    factors: Parts,
    axis: int,
) -> Float[Array, "a b"]:
    """Returns the gradients of a tile's values, of which some are used."""

    def select(positive: Array, negative: Array) -> Array:
        expand = partial(jnp.expand_dims, axis=axis)
        if plan.of_towers:
            return expand(negative)
        return jnp.where(tile.positives, expand(positive), expand(negative))

    reduction = reduction_of(plan.statistics[k])
    marks: Any = 0  # The same for both sides of a tile: XLA then computes one share.
    if reduction.mark is not None:
        marks = select(factors.positive.peak, factors.negative.peak)
    factor = select(factors.positive.total, factors.negative.total)
    positions = jnp.expand_dims(tile.positions[axis], 1 - axis)
    return jnp.where(used, factor * reduction.share(values, used, marks, positions), 0)


def times_rows(
    plan: Plan, d_tile: Float[Array, "a b"], rows: Float[Array, "_ d"], axis: int, numbers: Any
) -> RowGradient:
    """Returns `D X` for the axis 1, and `Dᵀ X` for the axis 0, with the sums of D along it."""
    with_sums = plan.similarity in DISTANCES
    if with_sums and plan.is_low:
        # A matrix unit adds up, too, by columns of ones. GPUs like a multiple of eight of them.
        rows = jnp.concatenate([rows, jnp.ones_like(rows, shape=(rows.shape[0], 8))], axis=1)
        products = times(d_tile if axis == 1 else d_tile.T, rows)
        return RowGradient(products[:, :-8], products[:, -1], numbers)
    sums = jnp.sum(d_tile, axis=axis) if with_sums else None
    products = times(d_tile, rows) if axis == 1 else _product_of_transpose(d_tile, rows)
    return RowGradient(products, sums, numbers)


def _product_of_transpose(a: Float[Array, "a b"], rows: Float[Array, "a d"]) -> Float[Array, "b d"]:
    """Returns `a.T @ rows`."""
    if not on_cpu() or rows.shape[1] >= 256:
        return times(a.T, rows)
    # For short rows, XLA for CPUs is faster where neither factor is a transpose.
    product = lax.optimization_barrier(wide_product(lax.optimization_barrier(rows.T), a))
    return lax.optimization_barrier(product.T)


def feature_gradient(
    plan: Plan, center: Float[Array, " d"] | None, gradient: RowGradient, rows: Rows, side: Loaded
) -> Rows:
    """Returns the gradient of rows in blocks, in their dtype."""
    x = side.rows.features if plan.is_low else _load(plan, rows, center)
    x, d_features = x.astype(plan.dtype), gradient.products
    if gradient.sums is not None:
        d_features = 2 * (d_features - gradient.sums[..., None] * x)
    elif side.norms is not None:
        d_features = tangential(d_features, x, side.norms[..., None])
    d_features = d_features.astype(rows.features.dtype)
    return Rows(d_features, None, None, None, gradient.numbers)  # pyright: ignore
