"""Projections of features onto the classifier's subspace and onto what is left of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jaxloss import _checks
from jaxloss._linear import exact_product, widen


def _prepare(features, weights, stop_gradient: bool) -> tuple[Array, Array]:
    features = _checks.floating("features", features, "n d")
    weights, _ = _checks.classifier(features, weights)
    features, weights = widen(features, weights)
    return features, lax.stop_gradient(weights) if stop_gradient else weights


def _solve_gram(factors: Array, epsilon: float, right: Array) -> tuple[Array, Array]:
    """`(FᵀF + εI)⁻¹ R` for `F` [m, k] and `R` [k, n], and the ε that was used.

    Differentiated as the solution of a linear system, not through the factorisation.
    """
    gram = exact_product(factors.T, factors)
    # Typed as varying over devices wherever `right` is: the transposed solution needs it.
    gram = gram + jnp.zeros_like(right, shape=gram.shape)
    cholesky, used = _cholesky(lax.stop_gradient(gram), epsilon)
    solution = lax.custom_linear_solve(
        lambda x: exact_product(gram, x) + used * x,
        right,
        lambda _, b: jax.scipy.linalg.cho_solve((cholesky, True), b),
        symmetric=True,
    )
    return solution, used


def _cholesky(gram: Array, epsilon: float) -> tuple[Array, Array]:
    """The Cholesky factor of `G + εI`, and ε, raised where rounding has left that indefinite."""
    limits = jnp.finfo(gram.dtype)
    identity = jnp.eye(gram.shape[0], dtype=gram.dtype)
    rounding = 4 * limits.eps * jnp.max(jnp.sum(jnp.abs(gram), axis=1))
    asked = jnp.where(jnp.isnan(rounding), jnp.nan, lax.stop_gradient(epsilon))
    floor = jnp.maximum(jnp.maximum(asked, rounding), limits.tiny**0.5)

    def unsound(state):
        factor, used = state
        smallest_pivot = jnp.min(jnp.diagonal(factor)) ** 2
        sound = smallest_pivot > limits.eps * jnp.max(jnp.diagonal(gram))  # False for a NaN.
        return ~sound & (used < floor)

    def raised(_):
        return jnp.linalg.cholesky(gram + floor * identity), floor

    first = (jnp.linalg.cholesky(gram + asked * identity), asked)
    factor, used = lax.while_loop(unsound, raised, first)
    return factor, jnp.where(used > asked, used, epsilon)


def _split(features: Array, weights: Array, epsilon: float) -> tuple[Array, Array]:
    """The part of every feature within the classifier's subspace, and the complement."""
    dim, num_classes = weights.shape
    if num_classes <= dim:
        coordinates, _ = _solve_gram(weights, epsilon, exact_product(features, weights).T)
        within = exact_product(weights, coordinates).T
        return within, features - within
    # W(WᵀW+εI)⁻¹Wᵀ = I − ε(WWᵀ+εI)⁻¹ needs the smaller Gram matrix only.
    solution, used = _solve_gram(weights.T, epsilon, features.T)
    complement = used * solution.T
    return features - complement, complement


def project_classifier(
    features: Float[Array, "n d"],
    weights: Float[Array, "d C"],
    *,
    epsilon: float = 1e-4,
    stop_gradient: bool = True,
) -> Float[Array, "n d"]:
    r"""Projection of features onto the subspace that the classifier's weights span.

    .. math:: P x = W (W^\top W + εI)^{-1} W^\top x
       = U \operatorname{diag}\!\left(\frac{σ^2}{σ^2 + ε}\right) U^\top x,
       \quad W = U \operatorname{diag}(σ) V^\top

    One Cholesky factorisation of the smaller Gram matrix; no d×d matrix where d > C. Where W is
    rank-deficient and ε below the rounding of its Gram matrix (about 1e-7·‖WᵀW‖ in float32), ε is
    raised to that rounding.

    Args:
      features: `[n, d]`, any float dtype.
      weights: `[d, C]`, a column for each class.
      epsilon: ε ≥ 0, counts singular values below √ε as zero.
      stop_gradient: take the projection as a constant, so that gradients reach the features only.

    Returns:
      `[n, d]`, float32 or wider.

    Raises:
      TypeError: an argument does not hold floats.
      ValueError: the shapes do not fit, or ε is negative.

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, supplement eq. (vi).

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features, weights = jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[2.0], [0.0], [0.0]])
      >>> print(np.asarray(jaxloss.project_classifier(features, weights)).round(3))
      [[1. 0. 0.]]
    """
    epsilon = _checks.in_range("epsilon", epsilon, at_least=0)
    features, weights = _prepare(features, weights, stop_gradient)
    return _split(features, weights, epsilon)[0]


def project_complement(
    features: Float[Array, "n d"],
    weights: Float[Array, "d C"],
    *,
    epsilon: float = 1e-4,
    stop_gradient: bool = True,
) -> Float[Array, "n d"]:
    r"""Projection of features onto the complement of the classifier's subspace.

    .. math:: (I - P) x = x - W (W^\top W + εI)^{-1} W^\top x

    Args:
      features: `[n, d]`, any float dtype.
      weights: `[d, C]`, a column for each class. With C ≥ d they usually span everything and
        nothing is left: see `project_spectral_complement`.
      epsilon: ε ≥ 0, as in `project_classifier`.
      stop_gradient: take the projection as a constant, so that gradients reach the features only
        and lie in the complement.

    Returns:
      `[n, d]`, float32 or wider.

    Raises:
      TypeError: an argument does not hold floats.
      ValueError: the shapes do not fit, or ε is negative.

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, supplement eq. (vi), (vii).

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features, weights = jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[2.0], [0.0], [0.0]])
      >>> print(np.asarray(jaxloss.project_complement(features, weights)).round(3))
      [[0. 2. 3.]]
    """
    epsilon = _checks.in_range("epsilon", epsilon, at_least=0)
    features, weights = _prepare(features, weights, stop_gradient)
    return _split(features, weights, epsilon)[1]


def _rank_tolerance(shape: tuple[int, ...], largest: Array) -> Array:
    return largest * max(shape) * jnp.finfo(largest.dtype).eps


@jax.custom_jvp
def _spectral_part(features: Array, weights: Array, power: Array) -> Array:
    """`x U diag(λ̃^p) Uᵀ`, the part that the spectral complement takes away."""
    basis, _, gains, _ = _spectrum(weights, power)
    return _weighted_projection(features, basis, gains)


def _weighted_projection(features: Array, basis: Array, gains: Array) -> Array:
    return exact_product(exact_product(features, basis) * gains[None, :], basis.T)


def _spectrum(weights: Array, power: Array | float) -> tuple[Array, Array, Array, Array]:
    """Left singular vectors, singular values (0 for a null one), `λ̃^p`, right vectors."""
    left, values, right = jnp.linalg.svd(weights, full_matrices=False)
    largest = values[0]
    null = values <= _rank_tolerance(weights.shape, largest)
    safe = jnp.where(null, 1, values)
    gains = jnp.where(null, 0, (safe / jnp.where(largest > 0, largest, 1)) ** power)
    return left, jnp.where(null, 0, values), gains, right


@_spectral_part.defjvp
def _spectral_part_jvp(primals, tangents):
    # F(W) = h(WWᵀ) with h(a) = (a/a_max)^{p/2} is differentiated as a function of a matrix
    # (Daleckii and Krein): its divided differences stay finite where singular values repeat,
    # and where the derivative of the singular vectors does not exist.
    features, weights, power = primals
    d_features, d_weights, d_power = tangents
    left, values, gains, right = _spectrum(weights, power)
    kept = gains > 0
    safe = jnp.where(kept, values, 1)

    def part(x):
        return _weighted_projection(x, left, gains)

    # With W + dW: Uᵀ d(WWᵀ) U = M Σ + Σ Mᵀ inside the span, N Σ from the span to its complement.
    inside = exact_product(exact_product(left.T, d_weights), right.T)
    outside = exact_product(d_weights, right.T) - exact_product(left, inside)
    d_gram = inside * values[None, :] + values[:, None] * inside.T

    larger, smaller = (
        jnp.maximum(safe[:, None], safe[None, :]),
        jnp.minimum(safe[:, None], safe[None, :]),
    )
    h_larger = jnp.where(safe[:, None] >= safe[None, :], gains[:, None], gains[None, :])
    log_ratio = jnp.log1p((smaller - larger) / larger) * 2
    distinct = log_ratio < 0
    log_ratio = jnp.where(distinct, log_ratio, -1)
    slope = jnp.where(distinct, jnp.expm1(power / 2 * log_ratio) / jnp.expm1(log_ratio), power / 2)
    quotient = slope * h_larger / larger**2
    # A null direction within the thin basis has h = 0 and a = 0, as the complement has.
    to_null = gains / safe**2
    both = kept[:, None] & kept[None, :]
    neither = ~kept[:, None] & ~kept[None, :]
    one = jnp.where(kept[:, None], to_null[:, None], to_null[None, :])
    quotient = jnp.where(both, quotient, jnp.where(neither, 0, one))

    # h depends on the largest eigenvalue, too; where it repeats, on the mean over its eigenspace.
    top = kept & (values >= values[0] * (1 - 10 * jnp.finfo(values.dtype).eps))
    d_largest = jnp.sum(jnp.where(top, jnp.diagonal(d_gram), 0)) / jnp.maximum(
        jnp.sum(top.astype(values.dtype)), 1
    )
    d_scale = -power / 2 * d_largest / jnp.where(values[0] > 0, values[0], 1) ** 2

    x_left = exact_product(features, left)
    cross = gains / safe  # (h / a) σ
    d_part = (
        exact_product(exact_product(x_left, quotient * d_gram), left.T)
        + exact_product(x_left * cross[None, :], outside.T)
        + exact_product(exact_product(features, outside) * cross[None, :], left.T)
        + d_scale * part(features)
    )
    log_relative = jnp.log(safe / jnp.where(values[0] > 0, values[0], 1))
    d_gains = jnp.where(kept, gains * log_relative, 0) * d_power
    d_part = d_part + _weighted_projection(features, left, d_gains)
    return part(features), part(d_features) + d_part


def project_spectral_complement(
    features: Float[Array, "n d"],
    weights: Float[Array, "d C"],
    *,
    power: float = 0.3,
    stop_gradient: bool = True,
) -> Float[Array, "n d"]:
    r"""Soft projection onto the directions that the classifier uses little.

    .. math:: \tilde W \operatorname{diag}(1 - \tilde λ^p) \tilde W^\top x,
       \quad W = \tilde W \operatorname{diag}(λ) V^\top, \quad \tilde λ = λ / \max λ

    λ holds the singular values, padded with zeros to length d. It leaves something also where
    C ≥ d; p = 0 gives the exact orthogonal complement. Null directions (below the rank tolerance
    max(d, C)·eps·max λ) keep all their weight.

    Args:
      features: `[n, d]`, any float dtype.
      weights: `[d, C]`, a column for each class.
      power: p ≥ 0.
      stop_gradient: take the projection as a constant, so that gradients reach the features only.
        With False the first derivative is right for repeated singular values, too; the second
        needs distinct ones.

    Returns:
      `[n, d]`, float32 or wider.

    Raises:
      TypeError: an argument does not hold floats.
      ValueError: the shapes do not fit, or p is negative.

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, Sec. 3.4, supplement
      eq. (viii) to (xi).

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, weights = jnp.array([[1.0, 1.0, 1.0]]), jnp.diag(jnp.array([4.0, 1.0, 0.0]))
      >>> print(jaxloss.project_spectral_complement(features, weights, power=0.5))
      [[0.  0.5 1. ]]
    """
    power = _checks.in_range("power", power, at_least=0)
    features, weights = _prepare(features, weights, stop_gradient)
    if stop_gradient:
        basis, _, gains, _ = _spectrum(weights, power)
        return features - _weighted_projection(features, basis, gains)
    return features - _spectral_part(features, weights, jnp.asarray(power, weights.dtype))


def spectral_overlap(weights: Float[Array, "d C"], power: float) -> Float[Array, ""]:
    r"""How much the spectral complement still overlaps with the classifier.

    .. math:: \|W^\top \tilde W \operatorname{diag}(1 - \tilde λ^p) \tilde W^\top\|_2
       = λ_{\max} \max_j \tilde λ_j (1 - \tilde λ_j^p)

    Args:
      weights: `[d, C]`, a column for each class.
      power: p ≥ 0.

    Returns:
      A scalar, float32 or wider.

    Raises:
      TypeError: `weights` does not hold floats.
      ValueError: `weights` is no matrix, or p is negative.

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, supplement eq. (viii), (ix).

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> print(jaxloss.spectral_overlap(jnp.diag(jnp.array([4.0, 1.0])), 0.5))
      0.5
    """
    power = _checks.in_range("power", power, at_least=0)
    weights = _checks.floating("weights", weights, "d C")
    (weights,) = widen(weights)
    values = jnp.linalg.svd(weights, compute_uv=False)
    used = values > _rank_tolerance(weights.shape, values[0])
    relative = jnp.where(used, values, 1) / jnp.where(values[0] > 0, values[0], 1)
    return jnp.max(jnp.where(used, values * (1 - relative**power), 0))
