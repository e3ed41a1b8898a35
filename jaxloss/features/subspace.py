"""Projections of features onto the classifier's subspace and onto its complement."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from jaxloss.core import checks
from jaxloss.core.backend import platform
from jaxloss.core.checks import Number
from jaxloss.core.linear import sizes_are_known, widen
from jaxloss.core.products import Low, gram_of, low_dtypes, product, wide_product
from jaxloss.core.programs import compiled_once
from jaxloss.core.sharding import divided


@divided(result="rows")
def project_classifier(
    features: Float[Array, "n d"], weights: Float[Array, "d C"], *, epsilon: Number = 1e-4
) -> Float[Array, "n d"]:
    r"""Projection of features onto the subspace spanned by the classifier's weights.

    .. math:: P x = W (W^\top W + εI)^{-1} W^\top x
       = U \operatorname{diag}\!\left(\frac{σ^2}{σ^2 + ε}\right) U^\top x,
       \quad W = U \operatorname{diag}(σ) V^\top

    It takes Cholesky factorisations of the smaller Gram matrix, and no d×d matrix if d > C. √ε is
    at least the rank tolerance, 2·max(d, C)·eps times the longest column of W (of C > d classes,
    the longest row). If W is nearly rank-deficient, ε may be increased to the rounding error of the
    Gram matrix, about 1e-7·‖WᵀW‖ in float32.

    The weights get a gradient through the projection, as the formula has it. It is bounded for
    every W: the derivative of σ² / (σ² + ε) is less than 1/√ε. For a constant projection, pass
    `jax.lax.stop_gradient(weights)`.

    Args:
      features: `[n, d]`.
      weights: `[d, C]`, one column per class.
      epsilon: ε ≥ 0. Singular values below about √ε are treated as zero.

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
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, supplement eq. (vi). Its
      λ / (ε + λ) holds for the eigenvalues λ = σ² of WᵀW.
    """
    return split(_checked(features, weights), epsilon)[0]


@divided(result="rows")
def project_complement(
    features: Float[Array, "n d"], weights: Float[Array, "d C"], *, epsilon: Number = 1e-4
) -> Float[Array, "n d"]:
    r"""Projection of features onto the complement of the classifier's subspace.

    .. math:: (I - P) x = x - W (W^\top W + εI)^{-1} W^\top x

    The gradient of the features lies in the complement. The weights get one as in
    `project_classifier`.

    Args:
      features: `[n, d]`.
      weights: `[d, C]`, one column per class. With C ≥ d, the complement is usually empty; use
        `project_spectral_complement` instead.
      epsilon: ε ≥ 0, as in `project_classifier`.

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
    return split(_checked(features, weights), epsilon)[1]


Classifier: TypeAlias = tuple[Float[Array, "n d"], Float[Array, "d C"], tuple[Low, Low]]
"""Features and weights in one wide dtype, and in which low dtype each of them is exact."""


def _checked(features: Any, weights: Any) -> Classifier:
    """Checks the arguments, and widens them."""
    features = checks.floating("features", features, "n d")
    weights, _ = checks.classifier(features, weights)
    return *widen(features, weights), low_dtypes(features, weights)  # pyright: ignore


@compiled_once
def split(
    classifier: Classifier, epsilon: Any, products: Float[Array, "n C"] | None = None
) -> tuple[Float[Array, "n d"], Float[Array, "n d"]]:
    """Returns the parts of the features inside the classifier's subspace and outside it.

    Args:
      classifier: Features and weights.
      epsilon: Not checked yet.
      products: `X W`, if they are known.
    """
    features, weights, low = classifier
    epsilon = checks.in_range("epsilon", epsilon, weights.dtype, at_least=0)
    dim, num_classes = weights.shape
    if num_classes <= dim:
        if products is None:
            products = product(features, weights, low)
        coordinates, _ = _solve_gram(weights, epsilon, products.T, low)
        inside = product(weights, coordinates, (low[1], None), low).T
        return inside, features - inside
    # W(WᵀW+εI)⁻¹Wᵀ = I − ε(WWᵀ+εI)⁻¹ needs the smaller Gram matrix only.
    solution, used_epsilon = _solve_gram(weights.T, epsilon, features.T, low)
    outside = used_epsilon * solution.T
    return features - outside, outside


def _solve_gram(
    factors: Float[Array, "m k"], epsilon: Number, right: Float[Array, "k n"], low: tuple[Low, Low]
) -> tuple[Float[Array, "k n"], Number]:
    """Returns `(FᵀF + εI)⁻¹ R` and the ε in use.

    The gradient is that of a linear system: products, and a solution with the same factor. It does
    not differentiate the factorisation.
    """
    # Zeros like `right` make the Gram matrix vary over the same devices, as the transposed solve
    # requires.
    factors = factors + jnp.zeros_like(right, shape=factors.shape)
    gram = gram_of(factors, low[1], low)
    solve, used_epsilon = _solver(lax.stop_gradient(factors), lax.stop_gradient(gram), epsilon)

    # With all bits, also of cotangents: the inverse magnifies an error by up to 1 / ε.
    solution = lax.custom_linear_solve(
        lambda x: product(gram, x, among=low) + used_epsilon * x,
        right,
        lambda _, right: solve(right),
        symmetric=True,
    )
    return solution, used_epsilon


def _solver(
    factors: Float[Array, "m k"], gram: Float[Array, "k k"], epsilon: Number
) -> tuple[Callable[[Float[Array, "k n"]], Float[Array, "k n"]], Number]:
    """Returns `R ↦ (FᵀF + εI)⁻¹ R`, and ε, increased where rounding requires it.

    A Gram matrix squares the condition number: its rounding error is not small against ε if W has
    large and small singular values. `Q = F L⁻ᵀ`, with √ε L⁻ᵀ below it, is almost orthonormal, so
    that a second factorisation, of its Gram matrix, corrects the first (Yamamoto et al., Roundoff
    error analysis of the CholeskyQR2 algorithm, 2015).
    """
    tolerance = 2 * max(factors.shape) * float(jnp.finfo(gram.dtype).eps)
    first, used_epsilon = _cholesky(gram, epsilon, tolerance)
    root = jnp.sqrt(lax.stop_gradient(used_epsilon))
    basis, rest = (
        jax.scipy.linalg.solve_triangular(first, right, lower=True)
        for right in (factors.T, root * jnp.eye(len(gram), dtype=gram.dtype))
    )
    of_basis = wide_product(basis, basis.T) + _lower_times(rest, rest.T)
    second = jnp.linalg.cholesky(of_basis, symmetrize_input=False)
    if platform() != "tpu":
        lower = wide_product(first, second)
        return lambda right: jax.scipy.linalg.cho_solve((lower, True), right), used_epsilon
    # Products take less time there than solutions of triangular systems.
    inverse = jax.scipy.linalg.solve_triangular(second, rest / root, lower=True)
    return lambda right: _upper_times(inverse.T, _lower_times(inverse, right)), used_epsilon


_BLOCK = 256
"""Rows of a triangular matrix that are multiplied at once, without most of its zeros."""


def _lower_times(lower: Float[Array, "k k"], right: Float[Array, "k n"]) -> Float[Array, "k n"]:
    ends = range(_BLOCK, len(lower) + _BLOCK, _BLOCK)
    return jnp.concatenate([wide_product(lower[k - _BLOCK : k, :k], right[:k]) for k in ends])


def _upper_times(upper: Float[Array, "k k"], right: Float[Array, "k n"]) -> Float[Array, "k n"]:
    starts = range(0, len(upper), _BLOCK)
    return jnp.concatenate([wide_product(upper[k : k + _BLOCK, k:], right[k:]) for k in starts])


def _cholesky(
    gram: Float[Array, "k k"], epsilon: Number, tolerance: float
) -> tuple[Float[Array, "k k"], Float[Array, ""]]:
    """Returns the Cholesky factor of `G + εI` and ε, increased where rounding requires it.

    The factor is a constant; ε keeps its gradient. √ε is at least `tolerance` times the length of
    the longest column, so that a null direction stays one.
    """
    limits = jnp.finfo(gram.dtype)
    identity = jnp.eye(gram.shape[0], dtype=gram.dtype)
    largest = jnp.max(jnp.diagonal(gram))
    rounding = 4 * limits.eps * jnp.max(jnp.sum(jnp.abs(gram), axis=1))
    constant = lax.stop_gradient(epsilon)
    requested = jnp.maximum(constant, tolerance**2 * largest)
    requested = requested + (rounding - rounding)  # A NaN of the Gram matrix stays visible.
    floor = jnp.maximum(jnp.maximum(requested, rounding), limits.tiny**0.5)

    def shifted(used: Float[Array, ""]) -> tuple[Float[Array, "k k"], Float[Array, ""]]:
        return jnp.linalg.cholesky(gram + used * identity, symmetrize_input=False), used

    def indefinite(state: tuple[Float[Array, "k k"], Float[Array, ""]]) -> Bool[Array, ""]:
        factor, used = state
        # Pivot by pivot: a minimum over many of them need not keep a NaN.
        definite = jnp.all(jnp.diagonal(factor) ** 2 > limits.eps * largest)
        return ~definite & (used < floor)

    factor, used = lax.while_loop(indefinite, lambda _: shifted(floor), shifted(requested))
    return factor, jnp.where(used > constant, used, epsilon)


class SpectralBasis(NamedTuple):
    """Where a classifier's weights lie: what `spectral_basis` returns."""

    vectors: Float[Array, "d r"]
    """Left singular vectors, one per column, with r = min(d, C)."""
    values: Float[Array, " r"]
    """Singular values λ, largest first. They are exactly 0 for null directions."""


@divided(result="replicated")
def spectral_basis(weights: Float[Array, "d C"]) -> SpectralBasis:
    r"""Left singular vectors and singular values of a classifier's weights.

    .. math:: W = \tilde W \operatorname{diag}(λ) V^\top

    The decomposition costs far more than all other parts of a spectral sum, above all on
    accelerators, and the weights change slowly. So compute the basis every few training steps, keep
    it in the training state, and pass it as `basis`: for example
    `basis = jax.lax.cond(step % 10 == 0, lambda: spectral_basis(weights), lambda: basis)`. It is a
    constant: it has no gradient.

    Args:
      weights: `[d, C]`, one column per class.

    Returns:
      The basis, a pytree of float32 or float64 arrays. Values below the rank tolerance,
      max(d, C)·eps·max λ, are 0.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, weights = jnp.array([[1.0, 1.0, 1.0]]), jnp.diag(jnp.array([4.0, 1.0, 0.0]))
      >>> basis = jaxloss.spectral_basis(weights)
      >>> print(basis.values)
      [4. 1. 0.]
      >>> print(jaxloss.project_spectral_complement(features, weights, power=0.5, basis=basis))
      [[0.  0.5 1. ]]

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, Sec. 3.4, supplement
      eq. (viii) to (xi).
    """
    weights = checks.floating("weights", weights, "d C")
    (weights,) = widen(weights)
    return _decompose(lax.stop_gradient(weights))[0]


@divided(result="rows")
def project_spectral_complement(
    features: Float[Array, "n d"],
    weights: Float[Array, "d C"],
    *,
    power: Number = 0.3,
    stop_gradient: bool = False,
    basis: SpectralBasis | None = None,
) -> Float[Array, "n d"]:
    r"""Soft projection of features onto the directions that the classifier uses least.

    .. math:: \tilde W \operatorname{diag}(1 - \tilde λ^p) \tilde W^\top x,
       \quad W = \tilde W \operatorname{diag}(λ) V^\top, \quad \tilde λ = λ / \max λ

    λ holds the singular values, padded with zeros to length d. The projection is not zero for C ≥ d
    either. Directions below the rank tolerance, max(d, C)·eps·max λ, keep their full weight. p = 0
    gives the exact orthogonal complement.

    The weights get a gradient through the projection, as the formula has it. It is exact for
    repeated singular values, too. If the largest one repeats, λ̃ has a kink, and the gradient is
    the mean over its directions. For p < 1, the derivative of λ̃^p grows without bound as λ goes to
    0. Below the rank tolerance, λ is no more than rounding error, and λ̃^p is 0 and constant: a
    change of W that only lengthens a null direction has no gradient, and one that turns a used
    direction towards a null one has. The second derivative needs distinct singular values, none of
    them null; otherwise use `stop_gradient`.

    Args:
      features: `[n, d]`.
      weights: `[d, C]`, one column per class.
      power: p ≥ 0.
      stop_gradient: Treat the projection as a constant, so that only features get a gradient.
      basis: The `spectral_basis` of the weights, or of slightly older ones. It is used as it is,
        a constant: with it, the weights get no gradient, whatever `stop_gradient` is. By default,
        it is computed from the weights.

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
    classifier = _checked(features, weights)
    return spectral_complement(classifier, power=power, stop_gradient=stop_gradient, basis=basis)


@compiled_once
def spectral_complement(
    classifier: Classifier, *, power: Number, stop_gradient: bool, basis: SpectralBasis | None
) -> Float[Array, "n d"]:
    """Returns the projection of features that are in the dtype of the weights."""
    features, weights, low = classifier
    power = checks.in_range("power", power, weights.dtype, at_least=0)
    if basis is None and not stop_gradient:
        power = jnp.asarray(power, weights.dtype)
        return features - _spectral_part(low, features, weights, power)
    basis = spectral_basis(weights) if basis is None else basis
    vectors, values = _checked_basis(basis, weights)
    weighted = vectors * _spectral_weights(values, power)[None, :]
    return features - _through(low, features, weighted, vectors)


@divided(result="replicated")
def spectral_overlap(
    weights: Float[Array, "d C"], power: Number, *, basis: SpectralBasis | None = None
) -> Float[Array, ""]:
    r"""The spectral norm of the overlap between the classifier and its spectral complement.

    .. math:: \|W^\top \tilde W \operatorname{diag}(1 - \tilde λ^p) \tilde W^\top\|_2
       = λ_{\max} \max_j \tilde λ_j (1 - \tilde λ_j^p)

    Args:
      weights: `[d, C]`, one column per class.
      power: p ≥ 0.
      basis: As in `project_spectral_complement`.

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
    weights = checks.floating("weights", weights, "d C")
    (weights,) = widen(weights)
    power = checks.in_range("power", power, weights.dtype, at_least=0)
    if basis is None:
        values = jnp.linalg.svd(weights, compute_uv=False)
        values = _zero_if_null(values, weights.shape)
    else:
        values = _checked_basis(basis, weights).values
    return jnp.max(values * (1 - _spectral_weights(values, power)))


def _checked_basis(basis: Any, weights: Float[Array, "d C"]) -> SpectralBasis:
    """Returns the basis of weights of this shape, as a constant in their dtype."""
    if not isinstance(basis, SpectralBasis):
        raise TypeError(f"`basis` must be what spectral_basis returns, got {type(basis).__name__}")
    vectors = checks.floating("basis.vectors", basis.vectors, "d r")
    values = checks.floating("basis.values", basis.values, "r")
    rank = min(weights.shape)
    shapes = (weights.shape[0], rank), (rank,)
    if (vectors.shape, values.shape) != shapes:
        raise ValueError(
            f"`basis` must be of weights of shape {weights.shape}, with vectors {shapes[0]} and "
            f"values {shapes[1]}, got {vectors.shape} and {values.shape}"
        )
    basis = SpectralBasis(vectors.astype(weights.dtype), values.astype(weights.dtype))
    return lax.stop_gradient(basis)


def _decompose(weights: Float[Array, "d C"]) -> tuple[SpectralBasis, Float[Array, "C r"]]:
    """Returns the basis and the right singular vectors, one per column."""
    left, values, right = jnp.linalg.svd(weights, full_matrices=False)
    return SpectralBasis(left, _zero_if_null(values, weights.shape)), right.T


def _zero_if_null(values: Float[Array, " r"], shape: tuple[int, ...]) -> Float[Array, " r"]:
    """Returns the singular values with 0 for those below the rank tolerance."""
    tolerance = values[0] * max(shape) * jnp.finfo(values.dtype).eps
    return jnp.where(values <= tolerance, 0, values)  # NaN stays NaN.


def _spectral_weights(values: Float[Array, " r"], power: Number) -> Float[Array, " r"]:
    """Returns `λ̃^p`, and 0 for null directions whatever p is."""
    null = values == 0
    largest = jnp.where(values[0] > 0, values[0], 1)
    return jnp.where(null, 0, (jnp.where(null, largest, values) / largest) ** power)


def _through(
    low: tuple[Low, Low],
    features: Float[Array, "n d"],
    left: Float[Array, "d r"],
    right: Float[Array, "d r"],
) -> Float[Array, "n d"]:
    """Returns `X L Rᵀ` in the cheaper order, for features that are exact in the first low dtype.

    With its gradient this takes 4 products of n·d·r, or 2 of n·d·d after one of d·d·r.
    """
    (num_samples, dim), rank = features.shape, left.shape[1]
    known = sizes_are_known(num_samples)
    if known and 2 * num_samples * dim + dim * rank < 4 * num_samples * rank:
        return product(features, wide_product(left, right.T), (low[0], None), low)
    return product(product(features, left, (low[0], None), low), right.T, among=low)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _spectral_part(
    low: tuple[Low, Low],
    features: Float[Array, "n d"],
    weights: Float[Array, "d C"],
    power: Float[Array, ""],
) -> Float[Array, "n d"]:
    """Returns `x U diag(λ̃^p) Uᵀ`, the part that the spectral complement removes."""
    (vectors, values), _ = _decompose(weights)
    return _through(low, features, vectors * _spectral_weights(values, power)[None, :], vectors)


@_spectral_part.defjvp
def _spectral_part_jvp(low: tuple[Low, Low], primals: Any, tangents: Any) -> tuple[Any, Any]:
    """Differentiates `h(WWᵀ)`, `h(a) = (a / a_max)^{p/2}`, as a function of a matrix.

    The formula of Daleckii and Krein has divided differences of h over pairs of eigenvalues. They
    stay finite for repeated singular values, where the singular vectors have no derivative.
    """
    features, weights, power = primals
    d_features, d_weights, d_power = tangents
    (vectors, values), right = _decompose(weights)
    spectral_weights = _spectral_weights(values, power)
    kept = spectral_weights > 0
    # h does not depend on the scale of W: all lengths are relative to the largest.
    largest = jnp.where(values[0] > 0, values[0], 1)
    relative, d_weights = values / largest, d_weights / largest
    safe = jnp.where(kept, relative, 1)
    quotients = _divided_differences(safe, kept, spectral_weights, power)

    # dW Wᵀ U, inside the span of U and outside of it. WᵀU, a product, would have more rounding.
    half = wide_product(d_weights, right * relative[None, :])
    inside = wide_product(vectors.T, half)
    d_gram = inside + inside.T

    # h also depends on the largest eigenvalue. If it repeats, take the mean over its eigenspace.
    top = kept & (relative >= 1 - 10 * jnp.finfo(values.dtype).eps)
    d_largest = jnp.sum(jnp.where(top, jnp.diagonal(d_gram), 0)) / jnp.maximum(
        jnp.sum(top.astype(values.dtype)), 1
    )
    d_scaled = -power / 2 * d_largest * spectral_weights
    d_scaled += jnp.where(kept, spectral_weights * jnp.log(safe), 0) * d_power

    d_vectors = wide_product(vectors, quotients * d_gram) + vectors * d_scaled[None, :]
    # In this order, the gradient keeps U alone, and not the d×d matrix of the forward pass.
    inside_span = product(d_features, vectors, among=low) * spectral_weights[None, :]
    d_part = product(inside_span, vectors.T, among=low)
    if vectors.shape[1] < vectors.shape[0]:
        outside = half - wide_product(vectors, inside)
        to_null = spectral_weights / safe**2  # The divided difference of an eigenvalue and 0.
        d_vectors += outside * to_null[None, :]
        d_part += _through(low, features, vectors * to_null[None, :], outside)
    d_part += _through(low, features, d_vectors, vectors)
    return _through(low, features, vectors * spectral_weights[None, :], vectors), d_part


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
