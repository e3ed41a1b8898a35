"""Logits, norms and distances: the linear algebra that the losses share."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from jaxloss import _checks


def widen(*arrays: Float[Array, " ..."]) -> tuple[Float[Array, " ..."], ...]:
    """Returns the arrays in one dtype: float64 if any of them is float64, otherwise float32."""
    wide = wide_dtype(*arrays)
    return tuple(array.astype(wide) for array in arrays)


def wide_dtype(*arrays: Float[Array, " ..."]) -> DTypeLike:
    """Returns the dtype in which functions of these arrays are computed."""
    return jnp.float64 if any(array.dtype == jnp.float64 for array in arrays) else jnp.float32


def exact_product(a: Float[Array, " *n k"], b: Float[Array, "k m"]) -> Float[Array, " *n m"]:
    """Returns `a @ b` in full precision. Accelerators round float32 factors by default."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _scaled(
    x: Float[Array, "a b"], axis: int
) -> tuple[Float[Array, "a b"], Float[Array, "c d"], Bool[Array, "c d"]]:
    """Returns `x / max|x|` along `axis`, the inverse of its norm, and where `x` is zero.

    The norm of `x / max|x|` neither overflows nor underflows.
    """
    # A direction does not depend on the scale, so the scale needs no gradient.
    scale = lax.stop_gradient(jnp.max(jnp.abs(x), axis=axis, keepdims=True))
    zero = scale < jnp.finfo(x.dtype).tiny  # False for NaN, so that NaN stays visible.
    x = x / jnp.where(zero, 1, scale)
    squared = jnp.sum(x * x, axis=axis, keepdims=True)
    return x, lax.rsqrt(jnp.where(zero, 1, squared)), zero


def l2_normalize(x: Float[Array, "a b"], axis: int = -1) -> Float[Array, "a b"]:
    """Returns unit vectors along `axis`. A zero vector stays zero and has a zero gradient."""
    x, inverse_norm, zero = _scaled(x, axis)
    return jnp.where(zero, 0, x * inverse_norm)


def cosine_gaps(a: Float[Array, "n d"], b: Float[Array, "n d"]) -> Float[Array, " n"]:
    """Returns `1 − cos(a_i, b_i)`, which is 1 for a zero row.

    It is computed as `½‖â − b̂‖²`, which does not cancel for cosines close to 1.
    """
    a, inverse_a, zero_a = _scaled(a, 1)
    b, inverse_b, zero_b = _scaled(b, 1)
    gaps = jnp.sum((a * inverse_a - b * inverse_b) ** 2, axis=1, keepdims=True) / 2
    return jnp.where(zero_a | zero_b, 1, gaps)[:, 0]


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
    features = _checks.floating("features", features, "n d")
    weights, bias = _checks.classifier(features, weights, bias)
    if bias is None:
        features, weights = widen(features, weights)
        return exact_product(features, weights)
    features, weights, bias = widen(features, weights, bias)
    return exact_product(features, weights) + bias[None, :]


def cosine_logits(
    features: Float[Array, "n d"], weights: Float[Array, "d C"]
) -> Float[Array, "n C"]:
    r"""Cosines between features and the weight vectors of the classes.

    .. math:: z_{ic} = \cos(w_c, x_i) = \frac{w_c^\top x_i}{\|w_c\| \, \|x_i\|}

    A zero vector has zero logits and a zero gradient.

    Args:
      features: `[n, d]`.
      weights: `[d, C]`, one column per class.

    Returns:
      Cosines `[n, C]`.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features, weights = jnp.array([[3.0, 4.0]]), jnp.array([[2.0, 0.0], [0.0, 5.0]])
      >>> print(np.asarray(jaxloss.cosine_logits(features, weights)).round(2))
      [[0.6 0.8]]

    References:
      Liu et al., Negative Margin Matters, ECCV 2020, eq. (8).
    """
    features = _checks.floating("features", features, "n d")
    weights, _ = _checks.classifier(features, weights)
    features, weights = widen(features, weights)
    return exact_product(l2_normalize(features), l2_normalize(weights, axis=0))
