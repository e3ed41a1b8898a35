"""A classification loss and a metric loss, combined by means of the classifier's subspace."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
from jax import Array, lax
from jaxtyping import Bool, Float, Integer

from jaxloss.core import checks
from jaxloss.core.backend import on_cpu
from jaxloss.core.batch import AxisName, Reduction, labelled_rows
from jaxloss.core.checks import Number
from jaxloss.core.linear import product_with_columns, wide_dtype
from jaxloss.core.products import sixteen_bits, with_cotangent_at_once
from jaxloss.core.sharding import divided
from jaxloss.features.subspace import Classifier, SpectralBasis, spectral_complement, split
from jaxloss.losses.logits import widened_classifier
from jaxloss.losses.metric import nca_loss
from jaxloss.losses.softmax import softmax_loss

Loss: TypeAlias = Callable[..., Array]
Transform: TypeAlias = Callable[[Classifier, Array | None], Array]
_COMMON = ("where", "sample_weights", "reduction", "axis_name")


@divided
def sum_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    weights: Float[Array, "d C"],
    bias: Float[Array, " C"] | None = None,
    *,
    classification_loss: Loss = softmax_loss,
    metric_loss: Loss = nca_loss,
    metric_weight: Number = 1.0,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Plain sum of a classification loss and a metric loss (`+` in the paper).

    .. math:: \ell = \ell_{cls}(W^\top x + b, y) + w \, \ell_{metric}(x, y)

    Args:
      features: `[n, d]`.
      labels: `[n]`, class indices.
      weights: `[d, C]`, one column per class.
      bias: `[C]`, or None.
      classification_loss: A loss of two arrays gets logits and labels, such as `softmax_loss` or
        `sigmoid_loss`. A loss of four gets features, labels, weights and bias, such as
        `classifier_loss` or `group_softmax_loss`. Set its options with `functools.partial`, as in
        `partial(classifier_loss, similarity="cosine", scale=10.0)`.
      metric_loss: A loss of features and labels, with its options set by `functools.partial`, such
        as `partial(nca_loss, temperature=d / 8)`. The default of `nca_loss`, T = 1, fits features
        of length 1. Both losses must accept the common keywords of `jaxloss`.
      metric_weight: w.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. Each of the two
        losses is reduced on its own, over the samples that count for it.

    Returns:
      A scalar, or `[n]` for `reduction="none"`. It has a forward mode if both losses have one, and
      `nca_loss` has none.

    Raises:
      TypeError: If `classification_loss` takes neither two arrays nor four.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, labels = jnp.eye(4, 3), jnp.array([0, 0, 1, 1])
      >>> print(f"{jaxloss.sum_loss(features, labels, jnp.ones((3, 2))):.4f}")
      1.8814

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024 (sum loss, Tables B to D).
    """
    return _combined_loss(
        None,
        (features, labels, weights, bias),
        (classification_loss, metric_loss, metric_weight),
        (where, sample_weights, reduction, axis_name),
    )


@divided
def direct_sum_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    weights: Float[Array, "d C"],
    bias: Float[Array, " C"] | None = None,
    *,
    classification_loss: Loss = softmax_loss,
    metric_loss: Loss = nca_loss,
    metric_weight: Number = 1.0,
    epsilon: Number = 1e-4,
    stop_gradient: bool = False,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Direct sum: the metric loss uses the complement of the classifier (`⊕` in the paper).

    .. math:: \ell = \ell_{cls}(W^\top x + b, y)
       + w \, \ell_{metric}\big((I - W (W^\top W + εI)^{-1} W^\top) x, y\big)

    Args:
      features: `[n, d]` with d > C.
      labels, weights, bias, classification_loss, metric_loss, metric_weight: As in `sum_loss`. The
        metric loss gets the projected features, which no longer have unit norm: for a loss of
        cosines, normalise the features first, and pass `similarity="inner"` to it. Its own
        `references` or `proxies` are not projected: use `project_complement` first.
      epsilon: As in `project_complement`.
      stop_gradient: Whether the projection is a constant. The metric loss then has no gradient for
        the weights.
      where, sample_weights, reduction, axis_name: As in `sum_loss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`. Forward mode as in `sum_loss`.

    Raises:
      ValueError: If d ≤ C (use `spectral_sum_loss`), or `epsilon` is negative.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, labels = jnp.eye(4, 3), jnp.array([0, 0, 1, 1])
      >>> print(f"{jaxloss.direct_sum_loss(features, labels, jnp.ones((3, 2))):.4f}")
      1.9520

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, Sec. 2.4, supplement
      eq. (vi), (vii).
    """
    return _combined_loss(
        partial(_nonempty_complement, epsilon=epsilon, stop_gradient=stop_gradient),
        (features, labels, weights, bias),
        (classification_loss, metric_loss, metric_weight),
        (where, sample_weights, reduction, axis_name),
        shares_products=not stop_gradient,  # They have a gradient by the weights.
    )


@divided
def spectral_sum_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    weights: Float[Array, "d C"],
    bias: Float[Array, " C"] | None = None,
    *,
    classification_loss: Loss = softmax_loss,
    metric_loss: Loss = nca_loss,
    metric_weight: Number = 1.0,
    power: Number = 0.3,
    stop_gradient: bool = False,
    basis: SpectralBasis | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Spectral sum: a direct sum with a soft complement, for any d and C (`⊕̃_p` in the paper).

    .. math:: \ell = \ell_{cls}(W^\top x + b, y)
       + w \, \ell_{metric}\big(\tilde W \operatorname{diag}(1 - \tilde λ^p) \tilde W^\top x, y\big)

    Args:
      features: `[n, d]`. d may be smaller than C.
      labels, weights, bias, classification_loss, metric_loss, metric_weight: As in `sum_loss`. The
        metric loss gets the projected features, which no longer have unit norm: for a loss of
        cosines, normalise the features first, and pass `similarity="inner"` to it. Its own
        `references` or `proxies` are not projected: use `project_spectral_complement` first.
      power, stop_gradient, basis: As in `project_spectral_complement`. With `stop_gradient=True` or
        a `basis`, the metric loss has no gradient for the weights.
      where, sample_weights, reduction, axis_name: As in `sum_loss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`. Forward mode as in `sum_loss`.

    Raises:
      ValueError: If `power` is negative.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, labels = jnp.eye(4, 3), jnp.array([0, 0, 1, 1])
      >>> print(f"{jaxloss.spectral_sum_loss(features, labels, jnp.eye(3, 4)):.4f}")
      2.5029

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, Sec. 3.4, supplement
      eq. (viii) to (xi).
    """
    return _combined_loss(
        lambda classifier, _: spectral_complement(
            classifier, power=power, stop_gradient=stop_gradient, basis=basis
        ),
        (features, labels, weights, bias),
        (classification_loss, metric_loss, metric_weight),
        (where, sample_weights, reduction, axis_name),
    )


def _combined_loss(
    transform: Transform | None,
    arrays: tuple[Any, Any, Any, Any],
    losses: tuple[Loss, Loss, Any],
    common: tuple[Any, Any, Any, AxisName | None],
    *,
    shares_products: bool = False,
) -> Float[Array, ""] | Float[Array, " n"]:
    """Returns `classification_loss(Wᵀx + b) + metric_weight · metric_loss(transform(x, W))`.

    Args:
      transform: Maps features and weights, and their products or None, to the features of the
        metric loss. None: the features.
      arrays: Features, labels, weights and bias, not checked yet.
      losses: The classification loss, the metric loss and its weight.
      common: The common keywords of `jaxloss`, in their order.
      shares_products: Whether `transform` gets the products of which the logits are computed.
    """
    features, labels, weights, bias = arrays
    classification_loss, metric_loss, metric_weight = losses
    for name, loss in zip(("classification_loss", "metric_loss"), losses[:2], strict=True):
        _check_keywords(name, loss)
    features, labels, _ = labelled_rows(features, labels, common[0])
    weights, bias = checks.classifier(features, weights, bias)
    dtype = wide_dtype(*jax.tree.leaves((features, weights, bias)))
    metric_weight = checks.in_range("metric_weight", metric_weight, dtype)
    keywords = dict(zip(_COMMON, common, strict=True))
    # Widened once, so that the sum of their gradients is rounded once.
    wide_features, wide_weights, wide_bias, low = widened_classifier(features, weights, bias)
    products = None
    if _takes_classifier(classification_loss):
        classification = classification_loss(features, labels, weights, bias, **keywords)
    else:
        logits = product_with_columns(wide_features, wide_weights, low)
        if shares_products:
            products = logits = logits if on_cpu() else with_cotangent_at_once(logits)
        logits = logits if wide_bias is None else logits + wide_bias[None, :]
        classification = classification_loss(logits, labels, **keywords)
    if transform is None:
        metric = metric_loss(features, labels, **keywords)
    else:
        features = transform((wide_features, wide_weights, low), products)
        with sixteen_bits(low[0] is not None):
            metric = metric_loss(features, labels, **keywords)
    for name, found in (("classification_loss", classification), ("metric_loss", metric)):
        if isinstance(found, tuple):
            raise TypeError(f"`{name}` must return a loss, got a tuple; leave out `metrics=True`")
    return classification + metric_weight * metric


def _check_keywords(name: str, loss: Any) -> None:
    """Raises unless `loss` is a function that takes the common keywords."""
    if not callable(loss):
        raise TypeError(f"`{name}` must be a function, got {type(loss).__name__}")
    parameters = inspect.signature(loss).parameters.values()
    missing = {*_COMMON} - {p.name for p in parameters}
    if missing and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        scored = "logits" if name == "classification_loss" else "features"
        raise TypeError(
            f"`{name}` must take the keywords {', '.join(_COMMON)}, and pass them on to a loss; it "
            f"does not take {', '.join(sorted(missing))}. Set options with functools.partial, or "
            f"write `def loss({scored}, labels, **keywords)`"
        )


def _takes_classifier(loss: Loss) -> bool:
    """Returns whether a loss takes features, labels, weights and bias; if not, it takes logits.

    Two positional arguments without a default are logits and labels. Three or four of at least four
    are those of a classifier, whose bias may have a default.
    """
    parameters = inspect.signature(loss).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    if len(required) == 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    if len(required) in (3, 4) and len(positional) >= 4:
        return True
    raise TypeError(
        "`classification_loss` must take logits and labels, or features, labels, weights and "
        f"bias; got a function of {', '.join(required) or 'no arrays'}"
    )


def _nonempty_complement(
    classifier: Classifier,
    products: Float[Array, "n C"] | None,
    *,
    epsilon: Number,
    stop_gradient: bool,
) -> Float[Array, "n d"]:
    features, weights, low = classifier
    if weights.shape[0] <= weights.shape[1]:
        raise ValueError(
            "`weights` must have more features than classes (d > C) for direct_sum_loss, "
            f"got shape {weights.shape}; use spectral_sum_loss"
        )
    weights = lax.stop_gradient(weights) if stop_gradient else weights
    return split((features, weights, low), epsilon, products)[1]
