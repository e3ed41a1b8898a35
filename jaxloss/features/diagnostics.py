"""Measures of a feature space."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Integer

from jaxloss.core.batch import AxisName, gather, labelled_rows, mean_over
from jaxloss.core.linear import l2_normalize, widen
from jaxloss.core.sharding import divided


class Discriminability(NamedTuple):
    """Scatter of normalised features within classes and between classes, and its ratio."""

    intra: Float[Array, ""]
    inter: Float[Array, ""]
    ratio: Float[Array, ""]


@divided(result="replicated")
def discriminability(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    *,
    where: Bool[Array, " n"] | None = None,
    axis_name: AxisName | None = None,
) -> Discriminability:
    r"""Scatter of normalised features within classes and between classes, and its ratio.

    .. math:: D_{intra} = \tfrac12 \underset{y_i = y_j,\, i≠j}{\mathrm{mean}} \|z_i - z_j\|^2, \quad
       D_{inter} = \tfrac12 \underset{y_i ≠ y_j}{\mathrm{mean}} \|z_i - z_j\|^2, \quad
       φ = D_{inter} / D_{intra}, \quad z = x / \|x\|

    It is computed from the deviations from class means, without an n×n array.

    Args:
      features: `[n, d]`.
      labels: `[n]`, class indices without an upper limit.
      where, axis_name: The common keywords of `jaxloss`.

    Returns:
      `intra`, `inter` and `ratio`, scalars. A mean over no pairs is 0. The ratio divides by at
      least the machine epsilon, so it stays finite if every class is a single point.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features = jnp.array([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [3.0, 4.0]])
      >>> print(f"{jaxloss.discriminability(features, jnp.array([0, 0, 1, 1])).inter:.2f}")
      0.70

    References:
      Liu et al., Negative Margin Matters, ECCV 2020, eq. (9) to (11).
    """
    features, labels, valid = labelled_rows(features, labels, where)
    (features,) = widen(features)
    units = gather(l2_normalize(features), axis_name)
    labels, valid = gather(labels, axis_name), gather(valid, axis_name)

    weight = valid.astype(units.dtype)
    number = jnp.sum(weight)
    num_rows = units.shape[0]
    # Classes are numbered in their order. `jnp.unique` takes no symbolic size of `jax.export`.
    order = jnp.argsort(labels)
    ordered = labels[order]
    starts = (ordered != jnp.roll(ordered, 1)).at[:1].set(False)
    group = jnp.zeros_like(order).at[order].set(jnp.cumsum(starts, dtype=order.dtype))
    sizes = jax.ops.segment_sum(weight, group, num_rows)
    sums = jax.ops.segment_sum(units, group, num_rows)
    means = sums / jnp.maximum(sizes, 1)[:, None]
    center = jnp.sum(units, axis=0) / jnp.maximum(number, 1)
    own_mean, own_size = means[group], sizes[group]
    others = weight * (number - own_size)

    # Over ordered pairs, ½ Σ_ij ‖z_i − z_j‖² = n Σ_i ‖z_i − mean‖². Of pairs of two classes, it is
    # the difference of two such sums, which cancels where a class has nearly all rows: not so here.
    spread = jnp.sum((units - own_mean) ** 2, axis=1)
    within = jnp.sum(weight * own_size * spread)
    between = jnp.sum(others * spread)
    between += number * jnp.sum(weight * jnp.sum((own_mean - center[None, :]) ** 2, axis=1))
    same_pairs, other_pairs = jnp.sum(sizes * (sizes - 1)), jnp.sum(others)
    intra = within / jnp.maximum(same_pairs, 1)
    inter = between / jnp.maximum(other_pairs, 1)
    ratio = jnp.where(same_pairs > 0, inter / jnp.maximum(intra, jnp.finfo(intra.dtype).eps), 0)
    return Discriminability(*(mean_over(value, axis_name) for value in (intra, inter, ratio)))
