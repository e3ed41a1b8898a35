"""Losses on two views of the same samples, without labels, from statistics of the batch."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from jaxloss.core import batch, checks
from jaxloss.core.backend import indices
from jaxloss.core.batch import AxisName
from jaxloss.core.checks import Number
from jaxloss.core.linear import inverse_root, widen
from jaxloss.core.products import wide_product
from jaxloss.core.sharding import divided


class VICRegTerms(NamedTuple):
    """The terms of VICReg before their weights λ, μ and ν. They have no gradient."""

    invariance: Float[Array, ""]
    """The mean squared difference of the views."""
    variance: Float[Array, ""]
    """v(Z) + v(Z')."""
    covariance: Float[Array, ""]
    """c(Z) + c(Z')."""


@divided
def vicreg_loss(
    first: Float[Array, "n d"],
    second: Float[Array, "n d"],
    *,
    invariance: Number = 25.0,
    variance: Number = 25.0,
    covariance: Number = 1.0,
    epsilon: Number = 1e-4,
    metrics: bool = False,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    axis_name: AxisName | None = None,
) -> Any:
    r"""VICReg: equal views, a spread of at least 1 in every dimension, no correlation.

    .. math:: \ell = λ \, \mathrm{mean}_{ij} (z_{ij} - z'_{ij})^2 + μ \, (v(Z) + v(Z'))
       + ν \, (c(Z) + c(Z'))

    .. math:: v(Z) = \mathrm{mean}_j \max\big(0, 1 - \sqrt{C(Z)_{jj} + ε}\big), \quad
       c(Z) = \frac1d \sum_{j≠k} C(Z)_{jk}^2

    C is the unbiased covariance matrix of a view over the global batch. The first mean is over
    samples and dimensions, as in Algorithm 1 of the paper; eq. (5) sums over the dimensions, which
    is `invariance` times d. The authors' code and pytorch-metric-learning halve v: use half of
    their `variance`.

    Args:
      first, second: `[n, d]`, two views of each sample. Gradients reach both.
      invariance, variance, covariance: λ, μ, ν ≥ 0.
      epsilon: ε > 0.
      metrics: Whether to return `(loss, VICRegTerms)`, the terms before λ, μ and ν, as
        `jax.value_and_grad(..., has_aux=True)` takes it.
      where: A common keyword of `jaxloss`.
      sample_weights: floats `[n]`, the weights s ≥ 0 of the samples in the means and covariances,
        `C = Σ s_i (z_i − z̄)(z_i − z̄)ᵀ / (Σ s − Σ s² / Σ s)`. Doubling all of them changes nothing,
        and weight 0 removes a sample.
      reduction: `"mean"`, or `"sum"` for the value times Σ s, which is the number of samples
        without weights.
      axis_name: A common keyword of `jaxloss`. Devices exchange means and covariances, d² numbers.

    Returns:
      A scalar; with `metrics`, a pair of it and `VICRegTerms`. With fewer than two samples, v and c
      are 0.

    Raises:
      ValueError: If `invariance`, `variance` or `covariance` is negative, `epsilon` is not
        positive, or `reduction` is `"none"`.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> first = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -0.5]])
      >>> print(f"{jaxloss.vicreg_loss(first, 0.5 * first):.4f}")
      20.3776

    References:
      Bardes et al., VICReg: Variance-Invariance-Covariance Regularization for Self-Supervised
      Learning, ICLR 2022, eq. (1) to (6), Algorithm 1.
    """
    checks.no_terms("vicreg_loss", reduction)
    first, second, samples = _two_views(first, second, where, sample_weights, axis_name)
    unbiased = _unbiased(samples, axis_name)
    dtype = first.dtype
    invariance = checks.in_range("invariance", invariance, dtype, at_least=0)
    variance = checks.in_range("variance", variance, dtype, at_least=0)
    covariance = checks.in_range("covariance", covariance, dtype, at_least=0)
    epsilon = checks.in_range("epsilon", epsilon, dtype, above=0)
    dim = first.shape[1]
    gaps = jnp.sum((first - second) ** 2, axis=1) / dim
    total = jnp.sum(gaps if samples.shares is None else samples.shares * gaps)
    spread = redundancy = jnp.zeros_like(samples.divisor)
    for view in (first, second):
        moments = _moments(axis_name, view, samples) * (unbiased / samples.divisor)
        variances = jnp.diagonal(moments)
        spread += jnp.mean(jnp.maximum(1 - jnp.sqrt(variances + epsilon), 0))
        redundancy += jnp.sum(_off_diagonal(moments) ** 2) / dim
    spread, redundancy = (jnp.where(unbiased > 0, term, 0) for term in (spread, redundancy))
    terms = VICRegTerms(batch.sum_over(total, axis_name) / samples.divisor, spread, redundancy)
    value = invariance * terms.invariance + variance * spread + covariance * redundancy
    value = value * samples.total_weight if reduction == "sum" else value
    return (value, lax.stop_gradient(terms)) if metrics else value


@divided
def barlow_twins_loss(
    first: Float[Array, "n d"],
    second: Float[Array, "n d"],
    *,
    off_diagonal: Number = 5e-3,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""]:
    r"""Barlow Twins: the correlations between the dimensions of two views are the identity.

    .. math:: \ell = \sum_j (1 - R_{jj})^2 + λ \sum_{j≠k} R_{jk}^2, \quad
       R_{jk} = \frac{\sum_i (z_{ij} - \bar z_j)(z'_{ik} - \bar z'_k)}
       {\sqrt{\sum_i (z_{ij} - \bar z_j)^2} \sqrt{\sum_i (z'_{ik} - \bar z'_k)^2}}

    A dimension that is constant over the batch has the correlation 0 with every dimension, itself
    included: it adds 1 to the loss, and has a zero gradient. The authors' code has a batch
    normalisation in place of the roots, which adds 1e-5 to each variance.

    Args:
      first, second: `[n, d]`, two views of each sample. Gradients reach both.
      off_diagonal: λ ≥ 0.
      where: A common keyword of `jaxloss`.
      sample_weights: floats `[n]`, the weights s ≥ 0 of the samples in the sums over i and in the
        means. Doubling all of them changes nothing, and weight 0 removes a sample.
      reduction: `"mean"`, or `"sum"` for the value times Σ s, which is the number of samples
        without weights.
      axis_name: A common keyword of `jaxloss`. Devices exchange means and correlations, d² numbers.

    Returns:
      A scalar.

    Raises:
      ValueError: If `off_diagonal` is negative, or `reduction` is `"none"`.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> first = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, -0.5]])
      >>> print(f"{jaxloss.barlow_twins_loss(first, first + jnp.eye(3, 2)):.6f}")
      0.000711

    References:
      Zbontar et al., Barlow Twins: Self-Supervised Learning via Redundancy Reduction, ICML 2021,
      eq. (1), (2).
    """
    checks.no_terms("barlow_twins_loss", reduction)
    first, second, samples = _two_views(first, second, where, sample_weights, axis_name)
    off_diagonal = checks.in_range("off_diagonal", off_diagonal, first.dtype, at_least=0)
    first, second = (_scaled_columns(view, samples, axis_name) for view in (first, second))
    moments, *squares = _cross_moments(axis_name, first, second, samples)
    rows, columns = map(inverse_root, squares)  # 0 for a constant dimension.
    correlations = rows[:, None] * moments * columns[None, :]
    own = jnp.diagonal(correlations)
    others = off_diagonal * jnp.sum(_off_diagonal(correlations) ** 2)
    value = jnp.where(samples.total_weight == 0, 0, jnp.sum((1 - own) ** 2) + others)
    return value * samples.total_weight if reduction == "sum" else value


class _Samples(NamedTuple):
    """How the samples count."""

    valid: Bool[Array, " n"]
    shares: Float[Array, " n"] | None
    """The weights, divided by their sum over all devices; None if all valid samples count alike."""
    divisor: Float[Array, ""]
    """What a sum over the samples is divided by: the valid ones of all devices, or 1 for shares."""
    total_weight: Float[Array, ""]
    """The sum of the weights over all devices."""


def _two_views(
    first: Any, second: Any, where: Any, sample_weights: Any, axis_name: AxisName | None
) -> tuple[Float[Array, "n d"], Float[Array, "n d"], _Samples]:
    """Returns both views with zeros in the rows that do not count, and how many samples count."""
    first = checks.floating("first", first, "n d")
    second = checks.floating("second", second, "n d")
    checks.same_shape("second", second, "first", first)
    mask = checks.row_mask(where, "first", first)
    valid = jnp.ones(first.shape[0], bool) if mask is None else mask
    first, second = widen(batch.zero_invalid(first, valid), batch.zero_invalid(second, valid))
    if sample_weights is None:
        total = batch.sum_over(jnp.sum(valid.astype(first.dtype)), axis_name)
        return first, second, _Samples(valid, None, jnp.where(total == 0, 1, total), total)
    weights = batch.weights_of_samples(sample_weights, first.shape[0], first.dtype)
    weights = jnp.where(valid, weights, 0)
    total = batch.sum_over(jnp.sum(weights), axis_name)
    shares = weights / jnp.where(total == 0, 1, total)
    return first, second, _Samples(valid, shares, jnp.ones_like(total), total)


def _unbiased(samples: _Samples, axis_name: AxisName | None) -> Float[Array, ""]:
    """Returns the factor that makes a variance unbiased; 0 with fewer than two samples."""
    if samples.shares is None:  # The factor is n / (n − 1).
        biased = 1 - 1 / samples.divisor
    else:
        biased = _biased(samples.shares, axis_name)
    # Also alone is a sample beside others with shares so small that 1 / biased² overflows.
    alone = biased <= jnp.finfo(biased.dtype).tiny ** 0.5
    return jnp.where(alone, 0, 1 / jnp.where(alone, 1, biased))


def _biased(shares: Float[Array, " n"], axis_name: AxisName | None) -> Float[Array, ""]:
    """Returns `1 − Σ s²` of shares whose sum is 1, with all its digits where one of them is near 1.

    With the largest share s and the sum R and sum of squares Q of the others, it is R (2s + R) − Q.
    """
    positions = batch.own_positions(shares.shape[0], axis_name)
    largest = jnp.max(lax.stop_gradient(shares), initial=-jnp.inf)
    largest = batch.max_over(largest, axis_name)
    chosen = jnp.max(jnp.where(shares == largest, positions, -1), initial=-1)
    chosen = batch.max_over(chosen, axis_name)
    is_chosen = positions == chosen
    others = jnp.where(is_chosen, 0, shares)
    parts = jnp.stack([jnp.where(is_chosen, shares, 0), others, others * others])
    share, rest, squares = batch.sum_over(jnp.sum(parts, axis=1), axis_name)
    return rest * (2 * share + rest) - squares


def _centred(
    view: Float[Array, "n d"], samples: _Samples, axis_name: AxisName | None
) -> Float[Array, "n d"]:
    """Returns the deviations from the mean of the global batch; zeros in the invalid rows."""
    if view.size == 0:
        return view
    valid = samples.valid[:, None]
    shares = samples.valid.astype(view.dtype) if samples.shares is None else samples.shares
    # The shift by a row that counts makes the deviations of a constant dimension exactly 0. That of
    # the largest share keeps the digits of its own deviation, which is small where it is near 1.
    shares = lax.stop_gradient(shares)
    row = jnp.argmax(shares)
    shift, share = lax.stop_gradient(view)[row], shares[row]
    if axis_name is not None:
        has_shift = (share > 0) & (share == batch.max_over(share, axis_name))
        shift = batch.max_over(jnp.where(has_shift, shift, -jnp.inf), axis_name)
        shift = jnp.where(shift == -jnp.inf, 0, shift)  # No row counts on any device.
    shifted = jnp.where(valid, view - shift[None, :], 0)
    mean = batch.sum_over(jnp.sum(_weighted(shifted, samples), axis=0), axis_name) / samples.divisor
    return jnp.where(valid, shifted - mean[None, :], 0)


def _scaled_columns(
    view: Float[Array, "n d"], samples: _Samples, axis_name: AxisName | None
) -> Float[Array, "n d"]:
    """Returns the columns times powers of two, by which no square overflows or underflows."""
    if samples.shares is not None:  # A row without a weight scales nothing, and may overflow.
        view = jnp.where((samples.shares[:, None] == 0) & jnp.isfinite(view), 0, view)
    largest = jnp.max(jnp.abs(lax.stop_gradient(view)), axis=0, initial=0, keepdims=True)
    largest = batch.max_over(largest, axis_name)
    limit = jnp.finfo(view.dtype).maxexp - 2
    exponent = jnp.clip(jnp.frexp(largest)[1], -limit, limit)
    return view * jnp.ldexp(jnp.ones_like(largest), -exponent)


def _weighted(rows: Float[Array, "n d"], samples: _Samples) -> Float[Array, "n d"]:
    """Returns rows times their shares. Rows that do not count are zeros already."""
    return rows if samples.shares is None else samples.shares[:, None] * rows


def _weighted_change(
    rows: Float[Array, "n d"], d_rows: Float[Array, "n d"], samples: _Samples, d_samples: Any
) -> Float[Array, "n d"]:
    """Returns the derivative of one factor of `Σ s_i c_i c'_iᵀ`, and half of that of s."""
    change = _weighted(d_rows, samples)
    return change if samples.shares is None else change + d_samples.shares[:, None] / 2 * rows


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _moments(
    axis_name: AxisName | None, view: Float[Array, "n d"], samples: _Samples
) -> Float[Array, "d d"]:
    """Returns `Σ s_i c_i c_iᵀ` of the deviations c from the mean, over the global batch."""
    rows = _centred(view, samples, axis_name)
    return batch.sum_over(wide_product(_weighted(rows, samples).T, rows), axis_name)


@_moments.defjvp
def _moments_jvp(axis_name: AxisName | None, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """A half and its transpose: the gradient for a view then takes one product and not two.

    Deviations sum to zero, so that the change of the mean cancels.
    """
    (view, samples), (d_view, d_samples) = primals, tangents
    rows = _centred(view, samples, axis_name)
    change = _weighted_change(rows, d_view, samples, d_samples)
    half = batch.sum_over(wide_product(change.T, rows), axis_name)
    return _moments(axis_name, view, samples), half + half.T


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _cross_moments(
    axis_name: AxisName | None,
    first: Float[Array, "n d"],
    second: Float[Array, "n d"],
    samples: _Samples,
) -> tuple[Float[Array, "d d"], Float[Array, " d"], Float[Array, " d"]]:
    """Returns `Σ s_i c_i c'_iᵀ`, `Σ s_i c_i²` and `Σ s_i c'_i²` of the deviations c and c'."""
    a, b = (_centred(view, samples, axis_name) for view in (first, second))
    weighted = _weighted(a, samples)
    moments = wide_product(weighted.T, b)
    squares = jnp.sum(weighted * a, axis=0), jnp.sum(_weighted(b, samples) * b, axis=0)
    return jax.tree.map(partial(batch.sum_over, axis_name=axis_name), (moments, *squares))


@_cross_moments.defjvp
def _cross_moments_jvp(axis_name: AxisName | None, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """As in `_moments_jvp`, the change of the means cancels."""
    (first, second, samples), (d_first, d_second, d_samples) = primals, tangents
    a, b = (_centred(view, samples, axis_name) for view in (first, second))
    d_a = _weighted_change(a, d_first, samples, d_samples)
    d_b = _weighted_change(b, d_second, samples, d_samples)
    moments = wide_product(d_a.T, b) + wide_product(a.T, d_b)
    parts = moments, 2 * jnp.sum(d_a * a, axis=0), 2 * jnp.sum(d_b * b, axis=0)
    results = _cross_moments(axis_name, first, second, samples)
    return results, jax.tree.map(partial(batch.sum_over, axis_name=axis_name), parts)


def _off_diagonal(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Returns the matrix with zeros on its diagonal."""
    numbers = indices(matrix.shape[0])
    return jnp.where(numbers[:, None] == numbers[None, :], 0, matrix)
