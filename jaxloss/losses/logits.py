"""Logits of features and a classifier: inner products and cosines."""

from __future__ import annotations

from typing import TypeAlias

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxloss.core import checks, linear
from jaxloss.core.logsumexp import finite_from_below, logsumexp
from jaxloss.core.products import Low, low_dtypes, product
from jaxloss.core.sharding import divided


@divided(result="rows")
def linear_logits(
    features: Float[Array, "n d"],
    weights: Float[Array, "d C"],
    bias: Float[Array, " C"] | None = None,
) -> Float[Array, "n C"]:
    r"""Logits of a linear classifier.

    .. math:: z_{ic} = w_c^\top x_i + b_c

    Args:
      features: `[n, d]`.
      weights: `[d, C]`, one column per class (the layout of a Flax `kernel`).
      bias: `[C]`, or None.

    Returns:
      Logits `[n, C]`.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, weights = jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
      >>> print(jaxloss.linear_logits(features, weights, jnp.array([0.5, 0.0, 0.0])))
      [[1.5 2.  3. ]]

    References:
      Liu et al., Negative Margin Matters, ECCV 2020, eq. (7), the inner product.
    """
    features = checks.floating("features", features, "n d")
    weights, bias = checks.classifier(features, weights, bias)
    return logits_of(*widened_classifier(features, weights, bias))


Classifier: TypeAlias = tuple[Array, Array, Array | None, tuple[Low, Low]]


def widened_classifier(
    features: Float[Array, "n d"], weights: Float[Array, "d C"], bias: Float[Array, " C"] | None
) -> Classifier:
    """Returns the arrays in one dtype, and in which low dtype features and weights are exact."""
    arrays = (features, weights) if bias is None else (features, weights, bias)
    features, weights, *rest = linear.widen(*arrays)
    return features, weights, rest[0] if rest else None, low_dtypes(*arrays)[:2]


def logits_of(
    features: Float[Array, "n d"],
    weights: Float[Array, "d C"],
    bias: Float[Array, " C"] | None,
    low: tuple[Low, Low],
) -> Float[Array, "n C"]:
    """Returns the logits of arrays that `widened_classifier` has returned."""
    logits = linear.product_with_columns(features, weights, low)
    return logits if bias is None else logits + bias[None, :]


def gaps_to_own(logits: Float[Array, "n C"], is_own: Bool[Array, "n C"]) -> Float[Array, " n"]:
    """Returns the log-sum-exp over the other classes, minus the logit of the own one.

    Its softplus is the cross-entropy, −log(e^a / (e^a + e^b)) = softplus(b − a), which does not
    cancel for a small loss.
    """
    own = jnp.sum(jnp.where(is_own, logits, 0), axis=1)
    return finite_from_below(logsumexp(logits, ~is_own, axis=1)) - own


def flat_columns(weights: Float[Array, "d C *K"]) -> Float[Array, "d _"]:
    """Returns the weight vectors as columns, with the sub-centres of a class side by side."""
    return weights.reshape(weights.shape[0], -1)


def largest_of_class(
    products: Float[Array, "n _"], weights: Float[Array, "d C *K"]
) -> Float[Array, "n C"]:
    """Returns the largest product of each class from those with `flat_columns(weights)`."""
    if weights.ndim == 2:
        return products
    return jnp.max(products.reshape(products.shape[0], *weights.shape[1:]), axis=2)


@divided(result="rows")
def cosine_logits(
    features: Float[Array, "n d"], weights: Float[Array, "d C *K"]
) -> Float[Array, "n C"]:
    r"""Cosines between features and the weight vectors of the classes.

    .. math:: z_{ic} = \cos(w_c, x_i) = \frac{w_c^\top x_i}{\|w_c\| \, \|x_i\|}

    A zero vector has zero logits and a zero gradient.

    Args:
      features: `[n, d]`.
      weights: `[d, C]`, one column per class; or `[d, C, K]` for K sub-centres per class, of which
        the largest cosine counts. Equal cosines share the gradient.

    Returns:
      Cosines `[n, C]`.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features, weights = jnp.array([[3.0, 4.0]]), jnp.array([[2.0, 0.0], [0.0, 5.0]])
      >>> print(np.asarray(jaxloss.cosine_logits(features, weights)).round(2))
      [[0.6 0.8]]

    References:
      Liu et al., Negative Margin Matters, ECCV 2020, eq. (8).
      Deng et al., Sub-center ArcFace, ECCV 2020 (sub-centres).
    """
    features = checks.floating("features", features, "n d")
    weights, _ = checks.classifier(features, weights, sub_centres=True)
    low = low_dtypes(features, weights)
    features, weights = linear.widen(features, weights)
    return largest_of_class(cosines(features, flat_columns(weights), low), weights)


def cosines(
    rows: Float[Array, "n d"],
    columns: Float[Array, "d C"],
    low: tuple[Low, Low] = (None, None),
    valid: Bool[Array, " n"] | None = None,
) -> Float[Array, "n C"]:
    """Returns the cosines of rows and columns. They are 0 for rows that are not valid."""
    if low == (None, None):
        units = linear.l2_normalize(columns, axis=0)
        return linear.product_with_columns(linear.l2_normalize(rows, valid), units)
    # The norms come in after the product: a unit vector is not exact in a low dtype.
    rows = rows if valid is None else jnp.where(valid[:, None], rows, 0)
    rows, columns = (
        rows * linear.power_of_two_scale(rows),
        columns * linear.power_of_two_scale(columns, axis=0),
    )
    of_rows = linear.inverse_norms_of_scaled(rows)
    of_columns = linear.inverse_norms_of_scaled(columns, axis=0)
    return product(rows, columns, low) * of_rows[:, None] * of_columns[None, :]
