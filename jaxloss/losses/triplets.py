"""Triplet loss: a positive is closer to the anchor than a negative, by a margin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer

from jaxloss.core import checks
from jaxloss.core.batch import (
    AxisName,
    Reduction,
    checked_rows,
    reduce,
    vary_alike,
    zero_or_nan,
)
from jaxloss.core.checks import Number
from jaxloss.core.linear import distances_of_squares, rounding_of_squares, sizes_are_known
from jaxloss.core.logsumexp import softplus
from jaxloss.core.sharding import divided
from jaxloss.pairs.comparison import Comparison, compare_distances
from jaxloss.pairs.queue import Queue
from jaxloss.pairs.row_blocks import Pairs, over_row_blocks
from jaxloss.pairs.rows import Rows, anchors_and_references, center_of, widened
from jaxloss.pairs.statistics import ARGMAX_OF_SIMILARITIES, Pair, Statistic

Mining: TypeAlias = Literal["hard", "semihard", "all"]


@divided
def triplet_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    *,
    margin: Number = 0.2,
    mining: Mining = "hard",
    soft: bool = False,
    squared: bool = False,
    normalize: bool = True,
    references: Float[Array, "m d"] | Queue | None = None,
    reference_labels: Integer[Array, " m"] | None = None,
    reference_where: Bool[Array, " m"] | None = None,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Triplet loss, with the mining of positives p and negatives n for every anchor a.

    .. math:: \ell_a = \underset{(p, n)}{\mathrm{mean}} \, [d_{ap} - d_{an} + m]_+, \quad
       d_{aj} = \|x_a - x_j\|, \quad y_p = y_a, \quad y_n ≠ y_a

    The triplets of an anchor are

    - `"hard"`: its farthest positive with its nearest negative;
    - `"semihard"`: every positive with the nearest negative that is farther than it, or with the
      farthest negative if none is;
    - `"all"`: every positive with every negative, as far as the term is above 0.

    `"mean"` is the mean over the triplets of all anchors, and not over anchors: `Σ s_i·sum_i /
    Σ s_i·count_i`. `"sum"` is its numerator, and `"none"` gives s_i times each anchor's own mean.
    The memory does not grow with n·m: `"hard"` visits the pairs in tiles, and the others compare
    one block of anchors with all references at a time. With `axis_name`, those two gather all
    references on every device. With `soft`, `"all"` computes every triplet: n·m steps for each
    positive of an anchor.

    Args:
      features: `[n, d]`.
      labels: `[n]`, class indices without an upper limit.
      margin: m ≥ 0.
      mining: `"hard"`, `"semihard"` or `"all"`.
      soft: Whether `log(1 + e^z)` takes the place of `[z]_+`.
      squared: Whether d is the squared distance.
      normalize: Whether features are divided by their norms.
      references, reference_labels, reference_where: The keywords of pairwise losses in `jaxloss`.
      block_size: The keyword of pairwise losses in `jaxloss`; for `"semihard"` and `"all"` the
        number of anchors in a block.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample that
        has no positive or no negative, on any device, does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`. A distance that is all rounding error, below 0.0014
      between unit vectors in float32, is 0 and has no gradient. See *Distances* in `jaxloss`.

    Raises:
      ValueError: If `margin` is negative, `mining` is unknown, or `block_size` is not positive.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features = jnp.array([[0.0, 0.0], [3.0, 0.0], [0.0, 2.0]])
      >>> labels = jnp.array([0, 0, 1])
      >>> print(f"{jaxloss.triplet_loss(features, labels, normalize=False):.4f}")
      0.6000
      >>> print(f"{jaxloss.triplet_loss(features, labels, mining='all', normalize=False):.4f}")
      1.2000

    References:
      Schroff et al., FaceNet, CVPR 2015 (`"semihard"`, with `squared`).
      Hermans et al., In Defense of the Triplet Loss for Person Re-Identification, 2017 (`"hard"`
        and `"all"`; `soft` with a margin of 0).
    """
    checks.choice("mining", mining, ("hard", *_MININGS))
    checks.block_size(block_size)
    features, labels, valid = checked_rows("features", features, labels, where)
    rows = anchors_and_references(
        features, labels, valid, references, reference_labels, reference_where, axis_name=axis_name
    )
    anchors, compared = wide = widened(*rows, normalize=normalize)
    dtype = anchors.features.dtype
    rule = _Rule(
        jnp.asarray(checks.in_range("margin", margin, dtype, at_least=0), dtype),
        softplus if soft else jax.nn.relu,
        squared,
    )
    if mining == "hard":
        how: Any = {"block_size": block_size, "axis_name": axis_name}
        mined = compare_distances(*rows, wide, normalized=normalize, **how)
        sums, counts, defined = _hard(rule, *mined, anchors, compared)
    else:
        triplets = _all_soft if soft and mining == "all" else _MININGS[mining]
        sums, counts, defined = triplets(rule, anchors, compared, block_size, axis_name)
    values = sums / jnp.maximum(counts, 1)
    return reduce(values, valid & defined, sample_weights, reduction, axis_name, counts=counts)


class _Rule(NamedTuple):
    """What becomes of a pair and of a triplet."""

    margin: Float[Array, ""]
    hinge: Callable[[Array], Array]
    squared: bool


class _Triplets(NamedTuple):
    """The triplets of each anchor."""

    sums: Float[Array, " n"]
    counts: Float[Array, " n"]
    defined: Bool[Array, " n"]
    """Whether the anchor has a positive and a negative."""


class _Lengths(NamedTuple):
    """Of the pairs of a block."""

    distances: Float[Array, "a m"]
    squares: Float[Array, "a m"]
    """The squared distances."""
    rounding: Float[Array, "a m"]
    """Of the squares."""


_Mining: TypeAlias = Callable[[_Rule, Rows, Rows | None, int | None, AxisName | None], _Triplets]
"""`(rule, anchors, references, block_size, axis_name)` to the triplets."""


def _distances(
    squares: Float[Array, " *shape"], norms: Float[Array, " *#shape"], squared: bool
) -> Float[Array, " *shape"]:
    return squares if squared else distances_of_squares(squares, norms)


# Minings ----


def _hard(
    rule: _Rule,
    pairs: Comparison,
    closeness: Callable[[Pair, Any], Array],
    anchors: Rows,
    references: Rows | None,
) -> _Triplets:
    """Tiles tell which are the farthest positive and the nearest negative of an anchor.

    `closeness` is a value of `pairs` that falls with the distance of the rows.
    """

    def value(pair: Pair, params: Any) -> Float[Array, "a b"]:
        close = closeness(pair, params)
        return jnp.where(pair.same, -close, close)

    (hardest,) = pairs.statistics((), Statistic(ARGMAX_OF_SIMILARITIES, value, is_smooth=True))
    defined = hardest.has_positive & hardest.has_negative
    others, axis_name = references or anchors, pairs.how.axis_name
    # The tiles have their own center: rows relative to it would be a copy more.
    center = center_of(others, axis_name)
    norms = jnp.sum((anchors.features - center[None, :]) ** 2, axis=1)

    def distance(positions: Int32[Array, " n"]) -> Float[Array, " n"]:
        rows = pairs.rows_at(positions, others.features)
        steps = jnp.where(defined[:, None], anchors.features - rows, 0)
        return _distances(jnp.sum(steps**2, axis=1), norms, rule.squared)

    far, near = lax.map(jax.checkpoint(distance), jnp.stack(hardest[:2]))
    # With a NaN in any row, tiles cannot tell which are farthest: it stays visible.
    gaps = far - near + jnp.sum(zero_or_nan(center))
    return _Triplets(rule.hinge(gaps + rule.margin), jnp.ones_like(gaps), defined)


def _in_blocks(of_block: Callable[[_Rule, Pairs, _Lengths], tuple[Array, Array]]) -> _Mining:
    """Returns a mining from a function that returns the sums and counts of a block of anchors."""

    def triplets(
        rule: _Rule,
        anchors: Rows,
        references: Rows | None,
        block_size: int | None,
        axis_name: AxisName | None,
    ) -> _Triplets:
        def on_pairs(pairs: Pairs) -> _Triplets:
            squares, norms = -pairs.similarities, jnp.sum(pairs.anchors**2, axis=1)[:, None]
            lengths = _Lengths(
                _distances(squares, norms, rule.squared),
                squares,
                lax.stop_gradient(rounding_of_squares(squares, norms)),
            )
            defined = jnp.any(pairs.positives, axis=1) & jnp.any(pairs.negatives, axis=1)
            if not pairs.positives.shape[1]:
                zeros = jnp.zeros_like(norms[:, 0])
                return _Triplets(zeros, zeros, defined)
            sums, counts = of_block(rule, pairs, lengths)
            return _Triplets(
                jnp.where(defined, sums, 0),
                jnp.where(defined, counts, 0).astype(sums.dtype),
                defined,
            )

        return over_row_blocks(
            on_pairs,
            anchors,
            references,
            similarity="negative_squared_distance",
            block_size=block_size,
            axis_name=axis_name,
        )

    return triplets


def _over_positives(
    step: Callable[[Array, Integer[Array, "a s"]], Array], start: Array, pairs: Pairs
) -> Array:
    """Returns `start` after `step(state, places)` for some positives of every anchor at a time.

    As many times as the largest class needs. The place of a positive that an anchor does not have
    is m. Without derivatives: the loop has as many steps as the labels say.
    """
    number = pairs.positives.shape[1]

    def chunk(state: tuple[Array, Array]) -> tuple[Array, Array]:
        done, values = state
        slots = pairs.first[:, None] + done + jnp.arange(_AT_ONCE, dtype=jnp.int32)[None, :]
        places = pairs.by_class[jnp.minimum(slots, number - 1)]
        exists = (slots < pairs.past[:, None]) & jnp.take_along_axis(pairs.positives, places, 1)
        return done + _AT_ONCE, step(values, jnp.where(exists, places, number))

    most = jnp.max(pairs.past - pairs.first, initial=0)
    _, values = lax.while_loop(lambda state: state[0] < most, chunk, (0 * most, start))
    return values


_AT_ONCE = 16
"""How many positives of an anchor are compared with its references at a time."""


def _parts(rows: Array, fill: Number) -> list[Array]:
    """Returns 16 parts of the columns, `[a, 1, m / 16]`.

    XLA for CPUs vectorises a sum over arrays, and not one along a row. A symbolic number of columns
    is one part.
    """
    if not sizes_are_known(rows.shape[1]):
        return [rows[:, None, :]]
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % 16)), constant_values=fill)
    return [part[:, None, :] for part in jnp.split(rows, 16, axis=1)]


def _at(
    values: Float[Array, "a m"], places: Integer[Array, "a s"], *, otherwise: float
) -> Float[Array, "a s 1"]:
    """Returns the values at places, and another number at the place m."""
    return jnp.take_along_axis(values, places, 1, mode="fill", fill_value=otherwise)[..., None]


@_in_blocks
def _semihard(
    rule: _Rule, pairs: Pairs, lengths: _Lengths
) -> tuple[Float[Array, " a"], Float[Array, " a"]]:
    """The negative of a positive is the nearest one beyond it: a search without derivatives."""
    squares = lax.stop_gradient(lengths.squares)
    # Equal up to rounding is not farther.
    limits = squares + lengths.rounding
    number = squares.shape[1]
    columns = jnp.arange(number, dtype=jnp.int32)
    negatives = _parts(jnp.where(pairs.negatives, squares, -jnp.inf), -jnp.inf)
    indices = _parts(columns[None, :], number)
    anchor = jnp.arange(squares.shape[0])[:, None]

    def choose(chosen: Integer[Array, "a m"], places: Integer[Array, "a s"]) -> Array:
        limit = _at(limits, places, otherwise=jnp.inf)  # Nothing is above it.
        nearest, at = jnp.inf, number
        for negative, index in zip(negatives, indices, strict=True):
            nearer = (negative > limit) & (negative < nearest)
            nearest, at = jnp.where(nearer, negative, nearest), jnp.where(nearer, index, at)
        first = nearest == jnp.min(nearest, axis=2, keepdims=True)
        at = jnp.where(first, at, number)
        return chosen.at[anchor, places].set(jnp.min(at, axis=2), mode="drop")

    # The first NaN, if there is one: it stays visible.
    farthest = jnp.where(pairs.negatives, squares, -jnp.inf)
    farthest = jnp.argmax(farthest, axis=1, keepdims=True).astype(jnp.int32)
    chosen = _over_positives(choose, jnp.full_like(squares, number, dtype=jnp.int32), pairs)
    chosen = jnp.where(chosen < number, chosen, farthest)
    gaps = lengths.distances - jnp.take_along_axis(lengths.distances, chosen, axis=1)
    terms = jnp.where(pairs.positives, rule.hinge(gaps + rule.margin), 0)
    return jnp.sum(terms, axis=1), jnp.sum(pairs.positives, axis=1, dtype=terms.dtype)


@_in_blocks
def _all(
    rule: _Rule, pairs: Pairs, lengths: _Lengths
) -> tuple[Float[Array, " a"], Float[Array, " a"]]:
    """The terms above 0 are linear: `k (d + m) - Σ d_n`, over the k negatives below d + m.

    So the weight of a positive is its k, and that of a negative how many positives are above it.
    """
    used = pairs.positives | pairs.negatives
    size = jnp.sum(used, axis=1, dtype=lengths.distances.dtype)
    middle = jnp.sum(jnp.where(used, lengths.distances, 0), axis=1) / jnp.maximum(size, 1)
    # Only differences count, and smaller numbers are rounded less.
    distances = lengths.distances - lax.stop_gradient(middle)[:, None]
    fixed = lax.stop_gradient(distances)
    limits = fixed + lax.stop_gradient(rule.margin)
    negatives = jnp.where(pairs.negatives, fixed, jnp.inf)
    parts = _parts(negatives, jnp.inf)
    anchor = jnp.arange(fixed.shape[0])[:, None]

    def weigh(weights: Integer[Array, "a m"], places: Integer[Array, "a s"]) -> Array:
        limit = _at(limits, places, otherwise=-jnp.inf)  # Nothing is below it.
        below = jnp.sum(sum((part < limit).astype(jnp.int32) for part in parts), axis=2)
        above = jnp.sum(negatives[:, :, None] < limit[:, None, :, 0], axis=2, dtype=jnp.int32)
        return (weights - above).at[anchor, places].set(below.astype(jnp.int32), mode="drop")

    weights = _over_positives(weigh, jnp.zeros_like(limits, dtype=jnp.int32), pairs)
    weights = weights.astype(fixed.dtype)
    counts = jnp.sum(jnp.where(pairs.positives, weights, 0), axis=1)
    return jnp.sum(weights * distances, axis=1) + counts * rule.margin, counts


@_in_blocks
def _all_soft(
    rule: _Rule, pairs: Pairs, lengths: _Lengths
) -> tuple[Float[Array, " a"], Float[Array, " a"]]:
    """No order helps here: each term differs. Positives come first, and end the work."""
    pairs, distances = vary_alike((pairs, lengths.distances))
    order, ranked = lax.sort(
        (jnp.where(pairs.positives, 0, 1).astype(jnp.int32), distances), num_keys=1
    )

    def add(sums: Float[Array, " a"], own: tuple[Array, Array]) -> Float[Array, " a"]:
        positive, distance = own[0] == 0, own[1]
        terms = rule.hinge(distance[:, None] - distances + rule.margin)
        terms = jnp.sum(jnp.where(pairs.negatives, terms, 0), axis=1)
        return sums + jnp.where(positive, terms, 0)

    @jax.checkpoint
    def step(sums: Float[Array, " a"], own: tuple[Array, Array]) -> tuple[Array, None]:
        return lax.cond(jnp.any(own[0] == 0), add, lambda sums, _: sums, sums, own), None

    sums, _ = lax.scan(step, jnp.zeros_like(pairs.anchors[:, 0]), (order.T, ranked.T))
    sizes = [jnp.sum(mask, axis=1, dtype=sums.dtype) for mask in (pairs.positives, pairs.negatives)]
    return sums, sizes[0] * sizes[1]


_MININGS: dict[str, _Mining] = {"semihard": _semihard, "all": _all}
