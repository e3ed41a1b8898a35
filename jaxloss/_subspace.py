"""Projections of features onto the classifier's subspace and onto its complement."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from jaxloss import _checks
from jaxloss._checks import Number
from jaxloss._linear import exact_product, widen


def project_classifier(
    features: Float[Array, "n d"],
    weights: Float[Array, "d C"],
    *,
    epsilon: Number = 1e-4,
    stop_gradient: bool = True,
) -> Float[Array, "n d"]:
    r"""Projection of features onto the subspace spanned by the classifier's weights.

    .. math:: P x = W (W^\top W + εI)^{-1} W^\top x
       = U \operatorname{diag}\!\left(\frac{σ^2}{σ^2 + ε}\right) U^\top x,
       \quad W = U \operatorname{diag}(σ) V^\top

    It takes one Cholesky factorisation of the smaller Gram matrix, and no d×d matrix if d > C. If W
    is rank-deficient and ε is below the rounding error of the Gram matrix, about 1e-7·‖WᵀW‖ in
    float32, ε is increased to that error.

    Args:
      features: `[n, d]`.
      weights: `[d, C]`, one column per class.
      epsilon: ε ≥ 0. Singular values below about √ε are treated as zero.
      stop_gradient: Treat the projection as a constant, so that only features get a gradient.

    Returns:
      Projected features `[n, d]`.

    Raises:
      ValueError: If `epsilon` is negative.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features, weights = jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[2.0], [0.0], [0.0]])
      >>> print(np.asarray(jaxloss.project_classifier(features, weights)).round(3))
      [[1. 0. 0.]]

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, supplement eq. (vi).
    """
    epsilon = _checks.in_range("epsilon", epsilon, at_least=0)
    features, weights = _checked(features, weights, stop_gradient)
    return _split(features, weights, epsilon)[0]


def project_complement(
    features: Float[Array, "n d"],
    weights: Float[Array, "d C"],
    *,
    epsilon: Number = 1e-4,
    stop_gradient: bool = True,
) -> Float[Array, "n d"]:
    r"""Projection of features onto the complement of the classifier's subspace.

    .. math:: (I - P) x = x - W (W^\top W + εI)^{-1} W^\top x

    Args:
      features: `[n, d]`.
      weights: `[d, C]`, one column per class. With C ≥ d, the complement is usually empty; use
        `project_spectral_complement` instead.
      epsilon: ε ≥ 0, as in `project_classifier`.
      stop_gradient: Treat the projection as a constant, so that only features get a gradient, and
        this gradient lies in the complement.

    Returns:
      Projected features `[n, d]`.

    Raises:
      ValueError: If `epsilon` is negative.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features, weights = jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[2.0], [0.0], [0.0]])
      >>> print(np.asarray(jaxloss.project_complement(features, weights)).round(3))
      [[0. 2. 3.]]

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, supplement eq. (vi), (vii).
    """
    epsilon = _checks.in_range("epsilon", epsilon, at_least=0)
    features, weights = _checked(features, weights, stop_gradient)
    return _split(features, weights, epsilon)[1]


def _checked(
    features: Any, weights: Any, stop_gradient: bool
) -> tuple[Float[Array, "n d"], Float[Array, "d C"]]:
    """Checks the arguments, and widens them to one dtype."""
    features = _checks.floating("features", features, "n d")
    weights, _ = _checks.classifier(features, weights)
    features, weights = widen(features, weights)
    return features, lax.stop_gradient(weights) if stop_gradient else weights


def _split(
    features: Float[Array, "n d"], weights: Float[Array, "d C"], epsilon: Number
) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    """Returns the parts of the features inside the classifier's subspace and outside it."""
    dim, num_classes = weights.shape
    if num_classes <= dim:
        coordinates, _ = _solve_gram(weights, epsilon, exact_product(features, weights).T)
        inside = exact_product(weights, coordinates).T
        return inside, features - inside
    # W(WᵀW+εI)⁻¹Wᵀ = I − ε(WWᵀ+εI)⁻¹ needs the smaller Gram matrix only.
    solution, used_epsilon = _solve_gram(weights.T, epsilon, features.T)
    outside = used_epsilon * solution.T
    return features - outside, outside


def _solve_gram(
    factors: Float[Array, "m k"], epsilon: Number, right: Float[Array, "k n"]
) -> tuple[Float[Array, "k n"], Number]:
    """Returns `(FᵀF + εI)⁻¹ R` and the ε in use.

    The gradient is that of a linear system. It does not differentiate the factorisation.
    """
    gram = exact_product(factors.T, factors)
    # Zeros like `right` make the Gram matrix vary over the same devices, as the transposed solve
    # requires.
    gram = gram + jnp.zeros_like(right, shape=gram.shape)
    cholesky, used_epsilon = _cholesky(lax.stop_gradient(gram), epsilon)
    solution = lax.custom_linear_solve(
        lambda x: exact_product(gram, x) + used_epsilon * x,
        right,
        lambda _, b: jax.scipy.linalg.cho_solve((cholesky, True), b),
        symmetric=True,
    )
    return solution, used_epsilon


def _cholesky(
    gram: Float[Array, "k k"], epsilon: Number
) -> tuple[Float[Array, "k k"], Float[Array, ""]]:
    """Returns the Cholesky factor of `G + εI` and ε, increased where rounding requires it."""
    limits = jnp.finfo(gram.dtype)
    identity = jnp.eye(gram.shape[0], dtype=gram.dtype)
    rounding = 4 * limits.eps * jnp.max(jnp.sum(jnp.abs(gram), axis=1))
    requested = jnp.where(jnp.isnan(rounding), jnp.nan, lax.stop_gradient(epsilon))
    floor = jnp.maximum(jnp.maximum(requested, rounding), limits.tiny**0.5)

    def indefinite(state: tuple[Float[Array, "k k"], Float[Array, ""]]) -> Bool[Array, ""]:
        factor, used = state
        smallest_pivot = jnp.min(jnp.diagonal(factor)) ** 2
        definite = smallest_pivot > limits.eps * jnp.max(jnp.diagonal(gram))  # False for NaN.
        return ~definite & (used < floor)

    def increase(
        _: tuple[Float[Array, "k k"], Float[Array, ""]],
    ) -> tuple[Float[Array, "k k"], Float[Array, ""]]:
        return jnp.linalg.cholesky(gram + floor * identity), floor

    first = (jnp.linalg.cholesky(gram + requested * identity), requested)
    factor, used = lax.while_loop(indefinite, increase, first)
    return factor, jnp.where(used > requested, used, epsilon)


def project_spectral_complement(
    features: Float[Array, "n d"],
    weights: Float[Array, "d C"],
    *,
    power: Number = 0.3,
    stop_gradient: bool = True,
) -> Float[Array, "n d"]:
    r"""Soft projection of features onto the directions that the classifier uses least.

    .. math:: \tilde W \operatorname{diag}(1 - \tilde λ^p) \tilde W^\top x,
       \quad W = \tilde W \operatorname{diag}(λ) V^\top, \quad \tilde λ = λ / \max λ

    λ holds the singular values, padded with zeros to length d. The projection is not zero for C ≥ d
    either. Directions below the rank tolerance, max(d, C)·eps·max λ, keep their full weight. p = 0
    gives the exact orthogonal complement.

    Args:
      features: `[n, d]`.
      weights: `[d, C]`, one column per class.
      power: p ≥ 0.
      stop_gradient: Treat the projection as a constant, so that only features get a gradient. If
        False, the first derivative is exact for repeated singular values too. The second needs
        distinct ones.

    Returns:
      Projected features `[n, d]`.

    Raises:
      ValueError: If `power` is negative.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, weights = jnp.array([[1.0, 1.0, 1.0]]), jnp.diag(jnp.array([4.0, 1.0, 0.0]))
      >>> print(jaxloss.project_spectral_complement(features, weights, power=0.5))
      [[0.  0.5 1. ]]

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, Sec. 3.4, supplement
      eq. (viii) to (xi).
    """
    power = _checks.in_range("power", power, at_least=0)
    features, weights = _checked(features, weights, stop_gradient)
    if stop_gradient:
        basis, _, spectral_weights, _ = _spectrum(weights, power)
        return features - _weighted_projection(features, basis, spectral_weights)
    return features - _spectral_part(features, weights, jnp.asarray(power, weights.dtype))


def spectral_overlap(weights: Float[Array, "d C"], power: Number) -> Float[Array, ""]:
    r"""The spectral norm of the overlap between the classifier and its spectral complement.

    .. math:: \|W^\top \tilde W \operatorname{diag}(1 - \tilde λ^p) \tilde W^\top\|_2
       = λ_{\max} \max_j \tilde λ_j (1 - \tilde λ_j^p)

    Args:
      weights: `[d, C]`, one column per class.
      power: p ≥ 0.

    Returns:
      A scalar.

    Raises:
      ValueError: If `power` is negative.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> print(jaxloss.spectral_overlap(jnp.diag(jnp.array([4.0, 1.0])), 0.5))
      0.5

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, supplement eq. (viii), (ix).
    """
    power = _checks.in_range("power", power, at_least=0)
    weights = _checks.floating("weights", weights, "d C")
    (weights,) = widen(weights)
    values = jnp.linalg.svd(weights, compute_uv=False)
    used = values > _rank_tolerance(weights.shape, values[0])
    relative = jnp.where(used, values, 1) / jnp.where(values[0] > 0, values[0], 1)
    return jnp.max(jnp.where(used, values * (1 - relative**power), 0))


def _spectrum(
    weights: Float[Array, "d C"], power: Number
) -> tuple[Float[Array, "d r"], Float[Array, " r"], Float[Array, " r"], Float[Array, "r C"]]:
    """Returns left singular vectors, singular values (0 if null), `λ̃^p`, and right vectors."""
    left, values, right = jnp.linalg.svd(weights, full_matrices=False)
    largest = values[0]
    null = values <= _rank_tolerance(weights.shape, largest)
    safe = jnp.where(null, 1, values)
    relative = safe / jnp.where(largest > 0, largest, 1)
    return left, jnp.where(null, 0, values), jnp.where(null, 0, relative**power), right


def _rank_tolerance(shape: tuple[int, ...], largest: Float[Array, ""]) -> Float[Array, ""]:
    return largest * max(shape) * jnp.finfo(largest.dtype).eps


def _weighted_projection(
    features: Float[Array, "n d"],
    basis: Float[Array, "d r"],
    spectral_weights: Float[Array, " r"],
) -> Float[Array, "n d"]:
    """Returns `x U diag(w) Uᵀ`."""
    return exact_product(exact_product(features, basis) * spectral_weights[None, :], basis.T)


@jax.custom_jvp
def _spectral_part(
    features: Float[Array, "n d"], weights: Float[Array, "d C"], power: Float[Array, ""]
) -> Float[Array, "n d"]:
    """Returns `x U diag(λ̃^p) Uᵀ`, the part that the spectral complement removes."""
    basis, _, spectral_weights, _ = _spectrum(weights, power)
    return _weighted_projection(features, basis, spectral_weights)


@_spectral_part.defjvp
def _spectral_part_jvp(
    primals: tuple[Float[Array, "n d"], Float[Array, "d C"], Float[Array, ""]],
    tangents: tuple[Float[Array, "n d"], Float[Array, "d C"], Float[Array, ""]],
) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    """Differentiates `F(W) = h(WWᵀ)`, `h(a) = (a / a_max)^{p/2}`, as a function of a matrix.

    The formula of Daleckii and Krein uses divided differences of h. They stay finite for repeated
    singular values, where the singular vectors have no derivative.
    """
    features, weights, power = primals
    d_features, d_weights, d_power = tangents
    left, values, spectral_weights, right = _spectrum(weights, power)
    largest = jnp.where(values[0] > 0, values[0], 1)
    kept = spectral_weights > 0
    safe = jnp.where(kept, values, 1)

    def part(x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        return _weighted_projection(x, left, spectral_weights)

    # Uᵀ d(WWᵀ) U = M Σ + Σ Mᵀ inside the span of W, and N Σ from the span to its complement.
    inside = exact_product(exact_product(left.T, d_weights), right.T)
    outside = exact_product(d_weights, right.T) - exact_product(left, inside)
    d_gram = inside * values[None, :] + values[:, None] * inside.T

    # h also depends on the largest eigenvalue. If it repeats, take the mean over its eigenspace.
    top = kept & (values >= values[0] * (1 - 10 * jnp.finfo(values.dtype).eps))
    d_largest = jnp.sum(jnp.where(top, jnp.diagonal(d_gram), 0)) / jnp.maximum(
        jnp.sum(top.astype(values.dtype)), 1
    )
    d_scale = -power / 2 * d_largest / largest**2

    x_left = exact_product(features, left)
    cross = spectral_weights / safe  # (h / a) σ
    quotients = _divided_differences(safe, kept, spectral_weights, power)
    d_part = (
        exact_product(exact_product(x_left, quotients * d_gram), left.T)
        + exact_product(x_left * cross[None, :], outside.T)
        + exact_product(exact_product(features, outside) * cross[None, :], left.T)
        + d_scale * part(features)
    )
    d_spectral_weights = jnp.where(kept, spectral_weights * jnp.log(safe / largest), 0) * d_power
    d_part = d_part + _weighted_projection(features, left, d_spectral_weights)
    return part(features), part(d_features) + d_part


def _divided_differences(
    values: Float[Array, " r"],
    kept: Bool[Array, " r"],
    spectral_weights: Float[Array, " r"],
    power: Float[Array, ""],
) -> Float[Array, "r r"]:
    """Returns `(h(a_i) − h(a_j)) / (a_i − a_j)` for `a = σ²`, and `h'(a_i)` where both are equal.

    Args:
      values: The singular values σ, 1 where not `kept`.
      kept: Which of them are not null. A null one has h = 0 and a = 0, as the complement has.
      spectral_weights: h(a).
      power: p, with `h(a) ∝ a^{p/2}`.
    """
    rows, columns = values[:, None], values[None, :]
    larger, smaller = jnp.maximum(rows, columns), jnp.minimum(rows, columns)
    h_larger = jnp.where(rows >= columns, spectral_weights[:, None], spectral_weights[None, :])
    log_ratio = jnp.log1p((smaller - larger) / larger) * 2
    distinct = log_ratio < 0
    log_ratio = jnp.where(distinct, log_ratio, -1)
    slope = jnp.where(distinct, jnp.expm1(power / 2 * log_ratio) / jnp.expm1(log_ratio), power / 2)
    both_kept = slope * h_larger / larger**2
    to_null = spectral_weights / values**2
    one_kept = jnp.where(kept[:, None], to_null[:, None], to_null[None, :])
    one_kept = jnp.where(kept[:, None] | kept[None, :], one_kept, 0)
    return jnp.where(kept[:, None] & kept[None, :], both_kept, one_kept)
