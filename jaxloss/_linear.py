"""Logits, norms and distances: the linear algebra that the losses share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxloss import _checks


def widen(*arrays: Array) -> tuple[Array, ...]:
    """The arrays in one dtype: float64 if any of them has it, else float32."""
    wide = jnp.float64 if any(array.dtype == jnp.float64 for array in arrays) else jnp.float32
    return tuple(array.astype(wide) for array in arrays)


def exact_product(a: Array, b: Array) -> Array:
    """`a @ b` in full precision, also where the accelerator rounds float32 factors by default."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


@jax.custom_jvp
def _gram(a: Array) -> Array:
    """`a aᵀ`, whose gradient takes one product instead of one for each factor."""
    return exact_product(a, a.T)


@_gram.defjvp
def _gram_jvp(primals, tangents):
    (a,), (d_a,) = primals, tangents
    half = exact_product(a, d_a.T)
    return _gram(a), half + half.T


def squared_distances(a: Array, b: Array | None = None) -> Array:
    """`‖a_i − b_j‖²` [n, m] of rows `a` [n, d] and `b` [m, d] (`a` by default), never negative."""
    norms_a = jnp.sum(a * a, axis=1)
    norms_b = norms_a if b is None else jnp.sum(b * b, axis=1)
    products = _gram(a) if b is None else exact_product(a, b.T)
    squared = norms_a[:, None] + norms_b[None, :] - 2 * products
    # Clamped in value only: a derivative that is cut at 0 is wrong from the second on.
    return squared + lax.stop_gradient(jnp.maximum(squared, 0) - squared)


def _scaled(x: Array, axis: int) -> tuple[Array, Array, Array]:
    """`x` divided by its largest magnitude along `axis`, `1/‖·‖` of that, and where `x` is zero.

    The norm of x / max|x| neither overflows nor underflows.
    """
    # A direction does not depend on the scale, which may be a constant in the gradient.
    scale = lax.stop_gradient(jnp.max(jnp.abs(x), axis=axis, keepdims=True))
    zero = scale < jnp.finfo(x.dtype).tiny  # False for a NaN, which is not hidden.
    x = x / jnp.where(zero, 1, scale)
    squared = jnp.sum(x * x, axis=axis, keepdims=True)
    return x, lax.rsqrt(jnp.where(zero, 1, squared)), zero


def l2_normalize(x: Array, axis: int = -1) -> Array:
    """Unit vectors along `axis`; a zero vector stays zero and gets a zero gradient."""
    x, inverse_norm, zero = _scaled(x, axis)
    return jnp.where(zero, 0, x * inverse_norm)


def cosine_gaps(a: Array, b: Array) -> Array:
    """`1 − cos(a_i, b_i)` [n] of rows [n, d]; 1 for a zero row.

    As `½‖â − b̂‖²`, which does not cancel where the cosine is close to 1.
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
      features: `[n, d]`, any float dtype.
      weights: `[d, C]`, a column for each class (the layout of a Flax `kernel`).
      bias: `[C]`, or None.

    Returns:
      Logits `[n, C]`, float32 or wider.

    Raises:
      TypeError: an argument does not hold floats.
      ValueError: the shapes do not fit.

    References:
      Liu et al., Negative Margin Matters, ECCV 2020, eq. (7), the inner product.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, weights = jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
      >>> print(jaxloss.linear_logits(features, weights, jnp.array([0.5, 0.0, 0.0])))
      [[1.5 2.  3. ]]
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
    r"""Cosines between features and the classes' weight vectors.

    .. math:: z_{ic} = \cos(w_c, x_i) = \frac{w_c^\top x_i}{\|w_c\| \, \|x_i\|}

    A zero vector has zero logits and a zero gradient.

    Args:
      features: `[n, d]`, any float dtype.
      weights: `[d, C]`, a column for each class.

    Returns:
      Cosines `[n, C]`, float32 or wider.

    Raises:
      TypeError: an argument does not hold floats.
      ValueError: the shapes do not fit.

    References:
      Liu et al., Negative Margin Matters, ECCV 2020, eq. (8).

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features, weights = jnp.array([[3.0, 4.0]]), jnp.array([[2.0, 0.0], [0.0, 5.0]])
      >>> print(np.asarray(jaxloss.cosine_logits(features, weights)).round(2))
      [[0.6 0.8]]
    """
    features = _checks.floating("features", features, "n d")
    weights, _ = _checks.classifier(features, weights)
    features, weights = widen(features, weights)
    return exact_product(l2_normalize(features), l2_normalize(weights, axis=0))
