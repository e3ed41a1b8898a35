"""A spread of the features: each keeps away from its nearest neighbour."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from jaxloss.core import checks
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.checks import Number
from jaxloss.core.sharding import divided
from jaxloss.pairs.comparison import compare_distances
from jaxloss.pairs.rows import anchors_and_references, widened
from jaxloss.pairs.statistics import ARGMAX_OF_SIMILARITIES, Statistic


@divided
def koleo_loss(
    features: Float[Array, "n d"],
    *,
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

    The minimum is over the global batch. The gradient reaches both samples of a pair, and is 0
    between equal ones. In float32, the nearest of neighbours that are closer than about 3e-4 may be
    taken for another of them. The memory does not grow with n², and there is a forward mode.

    Args:
      features: `[n, d]`. A zero vector stays zero, and has no gradient.
      epsilon: ε > 0, which bounds the loss of equal features.
      block_size: The keyword of pairwise losses in `jaxloss`.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        without another one does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `epsilon` or `block_size` is not positive.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features = jnp.array([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0]])
      >>> print(f"{jaxloss.koleo_loss(features):.4f}")
      0.3426

    References:
      Sablayrolles et al., Spreading Vectors for Similarity Search, ICLR 2019, eq. (3).
      Oquab et al., DINOv2: Learning Robust Visual Features without Supervision, 2023.
    """
    checks.block_size(block_size)
    features = checks.floating("features", features, "n d")
    mask = checks.row_mask(where, "features", features)
    valid = jnp.ones(features.shape[0], bool) if mask is None else mask
    labels = jnp.zeros_like(valid, jnp.int32)
    rows = anchors_and_references(features, labels, valid, axis_name=axis_name)
    wide = widened(*rows, normalize=True)
    # Computed once, so that equal rows are equal: XLA would divide them in two loops.
    units = lax.optimization_barrier(wide[0].features)
    pairs, closeness = compare_distances(
        *rows, wide, normalized=True, block_size=block_size, axis_name=axis_name
    )
    closest = Statistic(ARGMAX_OF_SIMILARITIES, closeness, is_smooth=True)
    (nearest,) = pairs.statistics((), closest)
    # From the rows themselves: a product would round the distance of near ones.
    steps = units - pairs.rows_at(nearest.positive, units)
    defined = valid & nearest.has_positive
    squares = jnp.sum(jnp.where(defined[:, None], steps, 0) ** 2, axis=1)
    zero = squares == 0  # False for NaN, so that NaN stays visible.
    distances = jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, squares)))
    epsilon = checks.in_range("epsilon", epsilon, distances.dtype, above=0)
    values = -jnp.log(distances + jnp.asarray(epsilon, distances.dtype))
    return pairs.reduce(values, defined, sample_weights, reduction)
