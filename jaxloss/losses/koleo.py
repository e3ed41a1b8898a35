"""A spread of the features: each keeps away from its nearest neighbour."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from jaxloss.core import batch, checks
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.checks import Number
from jaxloss.core.sharding import divided
from jaxloss.pairs.comparison import compare, compare_distances
from jaxloss.pairs.rows import Rows, anchors_and_references, widened
from jaxloss.pairs.statistics import ARGMAX_OF_SIMILARITIES, Pair, Statistic


@divided
def koleo_loss(
    features: Float[Array, "n d"],
    *,
    neighbors: int = 1,
    epsilon: Number = 1e-8,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""KoLeo: features are spread evenly on the sphere. It is an addend to other losses.

    .. math:: \ell_i = -\log\big(\min_{j≠i} \|\hat x_i - \hat x_j\| + ε\big), \quad
       \hat x = x / \|x\|

    With several `neighbors`, :math:`\ell_i` is the mean over the nearest of them. The minimum is
    over the global batch. The gradient reaches both samples of a pair. Those closer than 5e-7 in
    float32, which is rounding, count as equal, without a gradient; and of neighbours closer than
    about 3e-4, another may be taken for the nearest. The memory does not grow with n², and there is
    a forward mode.

    Args:
      features: `[n, d]`. A zero vector stays zero, and has no gradient.
      neighbors: How many of the nearest other samples count, at least 1: all of them if there are
        fewer. Each more costs a visit of all pairs.
      epsilon: ε > 0, which bounds the loss of equal features.
      block_size: The keyword of pairwise losses in `jaxloss`.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        without another one does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `neighbors`, `epsilon` or `block_size` is not positive.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features = jnp.array([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0]])
      >>> print(f"{jaxloss.koleo_loss(features):.4f}")
      0.3426

    References:
      Sablayrolles et al., Spreading Vectors for Similarity Search, ICLR 2019, eq. (3).
      Oquab et al., DINOv2: Learning Robust Visual Features without Supervision, 2023.
    """
    checks.positive_count("neighbors", neighbors)
    checks.block_size(block_size)
    features = checks.floating("features", features, "n d")
    mask = checks.row_mask(where, "features", features)
    valid = jnp.ones(features.shape[0], bool) if mask is None else mask
    labels = jnp.zeros_like(valid, jnp.int32)
    rows = anchors_and_references(features, labels, valid, axis_name=axis_name)
    wide = widened(*rows, normalize=True)
    units = wide[0].features
    pairs, closeness = compare_distances(
        *rows, wide, normalized=True, block_size=block_size, axis_name=axis_name
    )
    closest = Statistic(ARGMAX_OF_SIMILARITIES, closeness, is_smooth=True)
    (nearest,) = pairs.statistics((), closest)
    epsilon = checks.in_range("epsilon", epsilon, units.dtype, above=0)
    epsilon = jnp.asarray(epsilon, units.dtype)

    def loss_of(positions: Int32[Array, " n"], exists: Bool[Array, " n"]) -> Float[Array, " n"]:
        # From the rows themselves: a product would round the distance of near ones.
        steps = jnp.where(exists[:, None], units - pairs.rows_at(positions, units), 0)
        squares = jnp.sum(steps**2, axis=1)
        # XLA may divide equal rows in two loops, which round differently. False for NaN.
        zero = squares <= (4 * jnp.finfo(units.dtype).eps) ** 2
        distances = jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, squares)))
        return -jnp.log(distances + epsilon)

    defined = valid & nearest.has_positive
    if neighbors == 1:
        values = loss_of(nearest.positive, defined)
    else:
        further = _further(neighbors - 1, wide[0], nearest.positive, block_size, axis_name)
        every = zip((nearest.positive, defined), further, strict=True)
        positions, exist = (jnp.concatenate([one[None], more]) for one, more in every)
        values = lax.map(lambda found: jax.checkpoint(loss_of)(*found), (positions, exist))
        number = jnp.maximum(jnp.sum(exist, axis=0), 1)
        values = jnp.sum(jnp.where(exist, values, 0), axis=0) / number.astype(units.dtype)
    return pairs.reduce(values, defined, sample_weights, reduction)


def _further(
    number: int,
    units: Rows,
    nearest: Int32[Array, " n"],
    block_size: int | None,
    axis_name: AxisName | None,
) -> tuple[Int32[Array, "k n"], Bool[Array, "k n"]]:
    """Returns the positions of the next neighbours, and whether they exist, one visit for each."""
    features = lax.stop_gradient(units.features)
    next_one = Statistic(ARGMAX_OF_SIMILARITIES, mask=_is_new, is_smooth=True)

    def find(found: tuple[Array, ...], _: None) -> tuple[Any, Any]:
        pairs = compare(
            features,
            units.labels,
            numbers=(units.positions, found),
            similarity="negative_squared_distance",
            where=units.valid,
            block_size=block_size,
            axis_name=axis_name,
        )
        (one,) = pairs.statistics((), next_one)
        return (*found[1:], one.positive), (one.positive, one.has_positive & units.valid)

    none = batch.vary_alike((jnp.full_like(nearest, -1), nearest))[0]
    return lax.scan(find, (*(none,) * (number - 1), nearest), length=number)[1]


def _is_new(pair: Pair, _params: Any) -> Bool[Array, "a b"]:
    position, found = pair.reference[0], pair.anchor[1]
    return functools.reduce(jnp.logical_and, [position != one for one in found])
