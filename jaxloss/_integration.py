"""A classification loss and a metric loss, integrated through the classifier's subspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import Array
from jaxtyping import Bool, Float, Int

from jaxloss import _checks
from jaxloss._batch import AxisName, Reduction, clean_rows, counting_rows
from jaxloss._linear import linear_logits
from jaxloss._metric import nca_loss
from jaxloss._softmax import softmax_loss
from jaxloss._subspace import project_complement, project_spectral_complement

Loss = Callable[..., Array]


def _prepare(features: Any, labels: Any, weights: Any, where: Any) -> tuple[Array, Array]:
    """The features, zero where a sample does not count, and the weights."""
    features = _checks.floating("features", features, "n d")
    weights, _ = _checks.classifier(features, weights)
    labels = _checks.class_labels(labels, "features", features)
    counts = counting_rows(labels, _checks.row_mask(where, "features", features))
    return clean_rows(features, counts), weights


def _integrate(
    features: Any,
    metric_features: Any,
    labels: Any,
    weights: Any,
    bias: Any,
    *,
    classification_loss: Loss,
    metric_loss: Loss,
    metric_weight: float,
    **common: Any,
) -> Array:
    logits = linear_logits(features, weights, bias)
    classification = classification_loss(logits, labels, **common)
    return classification + metric_weight * metric_loss(metric_features, labels, **common)


def sum_loss(
    features: Float[Array, "n d"],
    labels: Int[Array, " n"],
    weights: Float[Array, "d C"],
    bias: Float[Array, " C"] | None = None,
    *,
    classification_loss: Loss = softmax_loss,
    metric_loss: Loss = nca_loss,
    metric_weight: float = 1.0,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Plain sum of a classification loss and a metric loss (`+` in the paper).

    .. math:: \ell = \ell_{cls}(W^\top x + b, y) + w \, \ell_{metric}(x, y)

    Args:
      features: `[n, d]`, any float dtype.
      labels: `[n]`, integers below C; negative ones are ignored, larger ones give NaN.
      weights: `[d, C]`, a column for each class.
      bias: `[C]`, or None.
      classification_loss: takes logits and labels, as `softmax_loss` or `sigmoid_loss` does.
      metric_loss: takes features and labels; set its options by `functools.partial`, as in
        `partial(nca_loss, temperature=64.0)`.
      metric_weight: w.
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`. Each part
        is reduced by itself, over the samples that count for it.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit.

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024 (sum loss, Tables B to D).

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, labels = jnp.eye(4, 3), jnp.array([0, 0, 1, 1])
      >>> print(f"{jaxloss.sum_loss(features, labels, jnp.ones((3, 2))):.4f}")
      1.8814
    """
    metric_weight = _checks.in_range("metric_weight", metric_weight)
    features, weights = _prepare(features, labels, weights, where)
    return _integrate(
        features,
        features,
        labels,
        weights,
        bias,
        classification_loss=classification_loss,
        metric_loss=metric_loss,
        metric_weight=metric_weight,
        where=where,
        sample_weights=sample_weights,
        reduction=reduction,
        axis_name=axis_name,
    )


def direct_sum_loss(
    features: Float[Array, "n d"],
    labels: Int[Array, " n"],
    weights: Float[Array, "d C"],
    bias: Float[Array, " C"] | None = None,
    *,
    classification_loss: Loss = softmax_loss,
    metric_loss: Loss = nca_loss,
    metric_weight: float = 1.0,
    epsilon: float = 1e-4,
    stop_gradient: bool = True,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Direct sum: the metric loss sees only what the classifier does not (`⊕` in the paper).

    .. math:: \ell = \ell_{cls}(W^\top x + b, y)
       + w \, \ell_{metric}\big((I - W (W^\top W + εI)^{-1} W^\top) x, y\big)

    Args:
      features: `[n, d]` with d > C, any float dtype.
      labels: `[n]`, integers below C; negative ones are ignored, larger ones give NaN.
      weights: `[d, C]`, a column for each class.
      bias: `[C]`, or None.
      classification_loss, metric_loss, metric_weight: as in `sum_loss`.
      epsilon: ε ≥ 0, as in `project_complement`.
      stop_gradient: take the projection as a constant, so that the metric loss moves no weights.
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit, d ≤ C (use `spectral_sum_loss`), or ε is negative.

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, Sec. 2.4, supplement
      eq. (vi), (vii).

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, labels = jnp.eye(4, 3), jnp.array([0, 0, 1, 1])
      >>> print(f"{jaxloss.direct_sum_loss(features, labels, jnp.ones((3, 2))):.4f}")
      1.9520
    """
    metric_weight = _checks.in_range("metric_weight", metric_weight)
    features, weights = _prepare(features, labels, weights, where)
    if weights.shape[0] <= weights.shape[1]:
        raise ValueError(
            f"`weights` {weights.shape} leave no complement: direct_sum_loss needs more features "
            f"than classes (d > C), got d = {weights.shape[0]} and C = {weights.shape[1]}; "
            "use spectral_sum_loss"
        )
    return _integrate(
        features,
        project_complement(features, weights, epsilon=epsilon, stop_gradient=stop_gradient),
        labels,
        weights,
        bias,
        classification_loss=classification_loss,
        metric_loss=metric_loss,
        metric_weight=metric_weight,
        where=where,
        sample_weights=sample_weights,
        reduction=reduction,
        axis_name=axis_name,
    )


def spectral_sum_loss(
    features: Float[Array, "n d"],
    labels: Int[Array, " n"],
    weights: Float[Array, "d C"],
    bias: Float[Array, " C"] | None = None,
    *,
    classification_loss: Loss = softmax_loss,
    metric_loss: Loss = nca_loss,
    metric_weight: float = 1.0,
    power: float = 0.3,
    stop_gradient: bool = True,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Spectral sum: a soft complement, for features of any dimension (`⊕̃_p` in the paper).

    .. math:: \ell = \ell_{cls}(W^\top x + b, y)
       + w \, \ell_{metric}\big(\tilde W \operatorname{diag}(1 - \tilde λ^p) \tilde W^\top x, y\big)

    Args:
      features: `[n, d]`, any float dtype; d may be smaller than C.
      labels: `[n]`, integers below C; negative ones are ignored, larger ones give NaN.
      weights: `[d, C]`, a column for each class.
      bias: `[C]`, or None.
      classification_loss, metric_loss, metric_weight: as in `sum_loss`.
      power: p ≥ 0, as in `project_spectral_complement`.
      stop_gradient: take the projection as a constant, so that the metric loss moves no weights.
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit, or p is negative.

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, Sec. 3.4, supplement
      eq. (viii) to (xi).

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, labels = jnp.eye(4, 3), jnp.array([0, 0, 1, 1])
      >>> print(f"{jaxloss.spectral_sum_loss(features, labels, jnp.eye(3, 4)):.4f}")
      2.5029
    """
    metric_weight = _checks.in_range("metric_weight", metric_weight)
    features, weights = _prepare(features, labels, weights, where)
    return _integrate(
        features,
        project_spectral_complement(features, weights, power=power, stop_gradient=stop_gradient),
        labels,
        weights,
        bias,
        classification_loss=classification_loss,
        metric_loss=metric_loss,
        metric_weight=metric_weight,
        where=where,
        sample_weights=sample_weights,
        reduction=reduction,
        axis_name=axis_name,
    )
