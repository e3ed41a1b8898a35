"""Metric losses on pairs: every sample is compared with the others, or with references."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Integer

from jaxloss import _checks
from jaxloss._batch import (
    AxisName,
    Reduction,
    checked_rows,
    reduce,
    reference_rows,
)
from jaxloss._checks import Number
from jaxloss._sharding import divided
from jaxloss._tiles import LOGSUMEXP, Statistic, anchors_and_references, pair_statistics


@divided()
def nca_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    *,
    temperature: Number = 1.0,
    references: Float[Array, "m d"] | None = None,
    reference_labels: Integer[Array, " m"] | None = None,
    reference_where: Bool[Array, " m"] | None = None,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Neighbourhood component analysis (NCA).

    .. math:: \ell_i = -\log \sum_{j≠i,\, y_j = y_i} e^{-\|x_i - x_j\|^2 / T}
       + \log \sum_{j≠i} e^{-\|x_i - x_j\|^2 / T}

    The memory of the value and its gradient does not grow with n². There is no forward mode:
    `jax.jvp` of the loss raises a `TypeError`. `jax.jvp` and `jax.grad` of its gradient work.

    Args:
      features: `[n, d]`. Squared distances grow with d. A temperature of d / 8 to d, or features
        divided by √d, keeps the exponentials in a useful range.
      labels: `[n]`, class indices without an upper limit.
      temperature: T > 0.
      references, reference_labels, reference_where, block_size: The keywords of pairwise losses in
        `jaxloss`.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        without another sample or a reference of its class, on any device, does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `temperature` or `block_size` is not positive.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
      >>> losses = jaxloss.nca_loss(features, jnp.array([0, 0, 1]), reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.0486 0.0181 0.    ]

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024 (NCA).
      Goldberger et al., Neighbourhood Components Analysis, NeurIPS 2004.
    """
    temperature = _checks.in_range("temperature", temperature, above=0)
    features, labels, valid = checked_rows("features", features, labels, where)
    given = reference_rows(references, reference_labels, reference_where, features)
    anchors, compared = anchors_and_references(features, labels, valid, given, axis_name)
    (sums,) = pair_statistics(
        (Statistic(LOGSUMEXP, _over_temperature),),
        jnp.asarray(temperature),
        anchors,
        compared,
        similarity="negative_squared_distance",
        block_size=block_size,
        axis_name=axis_name,
    )
    has_positive, has_negative = sums.positive != -jnp.inf, sums.negative != -jnp.inf
    # −log(p / (p + q)) = softplus(log q − log p) does not cancel for a small loss.
    values = _softplus_where(has_positive & has_negative, sums.negative - sums.positive)
    return reduce(values, valid & has_positive, sample_weights, reduction, axis_name)


def _over_temperature(
    similarities: Float[Array, "a b"], _positives: Bool[Array, "a b"], temperature: Float[Array, ""]
) -> Float[Array, "a b"]:
    return similarities / temperature


def _softplus_where(condition: Bool[Array, " n"], x: Float[Array, " n"]) -> Float[Array, " n"]:
    """Returns `log(1 + e^x)`, and 0 where the condition is False."""
    return jnp.where(condition, jax.nn.softplus(jnp.where(condition, x, 0)), 0)
