"""Classification losses on logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Bool, Float, Integer, Real

from jaxloss import _checks
from jaxloss._batch import AxisName, Reduction, labelled_rows, nan_where_no_class, reduce
from jaxloss._checks import Number
from jaxloss._linear import widen


def softmax_loss(
    logits: Float[Array, "n C"],
    labels: Integer[Array, " n"],
    *,
    label_smoothing: Number = 0.0,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Softmax cross-entropy (SCE), with optional label smoothing.

    .. math:: \ell_i = -\sum_c t_{ic} \log \frac{e^{z_{ic}}}{\sum_k e^{z_{ik}}},
       \quad t_{ic} = (1-ε) [y_i = c] + ε / C

    Args:
      logits: `[n, C]`.
      labels: `[n]`, class indices.
      label_smoothing: ε in [0, 1).
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `label_smoothing` is out of range.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
      >>> losses = jaxloss.softmax_loss(logits, jnp.array([0, 2]), reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.2395 1.0986]

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024 (SCE).
      Liu et al., Negative Margin Matters, ECCV 2020, Table 6 (label smoothing).
    """
    label_smoothing = _checks.in_range("label_smoothing", label_smoothing, at_least=0, below=1)
    logits, labels, valid = labelled_rows("logits", logits, labels, where)
    (logits,) = widen(logits)
    values = _cross_entropy(logits, labels, valid)
    if isinstance(label_smoothing, jax.Array) or label_smoothing > 0:
        uniform = jax.nn.logsumexp(logits, axis=1) - jnp.mean(logits, axis=1)
        values = (1 - label_smoothing) * values + label_smoothing * uniform
    return reduce(values, valid, sample_weights, reduction, axis_name)


def margin_softmax_loss(
    logits: Float[Array, "n C"],
    labels: Integer[Array, " n"],
    *,
    margin: Number,
    scale: Number,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Softmax cross-entropy with a margin on the target's logit.

    .. math:: \ell_i = -\log \frac{e^{β (z_{iy} - m)}}{e^{β (z_{iy} - m)} + \sum_{c≠y} e^{β z_{ic}}}

    m < 0 gives the negative-margin loss, 0 the plain loss, m > 0 the large-margin loss.

    Args:
      logits: `[n, C]`, from `linear_logits` (eq. 7) or `cosine_logits` (eq. 8).
      labels: `[n]`, class indices.
      margin: m, any number.
      scale: β > 0.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `scale` is not positive.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> cosines, labels = jnp.array([[0.6, 0.2]]), jnp.array([0])
      >>> print(f"{jaxloss.margin_softmax_loss(cosines, labels, margin=-0.3, scale=10.0):.5f}")
      0.00091

    References:
      Liu et al., Negative Margin Matters, ECCV 2020, eq. (7), (8).
    """
    margin = _checks.in_range("margin", margin)
    scale = _checks.in_range("scale", scale, above=0)
    logits, labels, valid = labelled_rows("logits", logits, labels, where)
    (logits,) = widen(logits)
    is_target = labels[:, None] == jnp.arange(logits.shape[1], dtype=labels.dtype)[None, :]
    values = _cross_entropy(scale * jnp.where(is_target, logits - margin, logits), labels, valid)
    return reduce(values, valid, sample_weights, reduction, axis_name)


def _cross_entropy(
    logits: Float[Array, "n C"], labels: Integer[Array, " n"], valid: Bool[Array, " n"]
) -> Float[Array, " n"]:
    num_classes = logits.shape[1]
    in_range = jnp.clip(labels, 0, num_classes - 1)
    values = optax.softmax_cross_entropy_with_integer_labels(logits, in_range)
    return nan_where_no_class(values, labels, valid, num_classes)


def sigmoid_loss(
    logits: Float[Array, "n C"],
    labels: Integer[Array, " n"] | Real[Array, "n C"] | Bool[Array, "n C"],
    *,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""One-versus-rest binary cross-entropy (BCE), summed over the classes of a sample.

    .. math:: \ell_i = \sum_c \log(1 + e^{z_{ic}}) - t_{ic} z_{ic}

    Args:
      logits: `[n, C]`.
      labels: Class indices `[n]`, or multi-label targets `[n, C]`. Targets between 0 and 1 are soft
        labels; targets above 1, such as object counts, are taken as 1.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample whose
        targets are all unknown does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, -1.0], [0.0, 0.0]])
      >>> losses = jaxloss.sigmoid_loss(logits, jnp.array([0, 1]), reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.4402 1.3863]
      >>> print(f"{jaxloss.sigmoid_loss(logits, jnp.array([[1, 0], [0, 1]])):.4f}")
      0.9132

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024 (BCE).
    """
    logits = _checks.floating("logits", logits, "n C")
    (logits,) = widen(logits)
    if np.ndim(labels) == 2:
        targets = _checks.class_targets("labels", labels, logits)
    else:
        targets = _one_hot_targets(_checks.class_labels(labels, "logits", logits), logits)
    mask = _checks.row_mask(where, "logits", logits)
    known = ~(targets < 0)  # True for NaN, so that NaN stays visible.
    known = known if mask is None else known & mask[:, None]
    values = _binary_cross_entropy(jnp.where(known, logits, 0), jnp.clip(targets, 0, 1))
    values = jnp.sum(jnp.where(known, values, 0), axis=1)
    return reduce(values, jnp.any(known, axis=1), sample_weights, reduction, axis_name)


def _one_hot_targets(
    labels: Integer[Array, " n"], logits: Float[Array, "n C"]
) -> Float[Array, "n C"]:
    """Returns multi-label targets: unknown for a negative label, NaN for a label of C or more."""
    num_classes = logits.shape[1]
    targets = jax.nn.one_hot(labels, num_classes, dtype=logits.dtype)
    outside = jnp.where(labels < 0, -1, jnp.nan).astype(logits.dtype)
    is_class = (labels >= 0) & (labels < num_classes)
    return jnp.where(is_class[:, None], targets, outside[:, None])


def _binary_cross_entropy(
    logits: Float[Array, "n C"], targets: Float[Array, "n C"]
) -> Float[Array, "n C"]:
    """Returns `log(1 + e^z) − t z`, with a single exponential per logit."""
    positive = logits >= 0
    decay = jnp.log1p(jnp.exp(jnp.where(positive, -logits, logits)))
    return jnp.where(positive, logits, 0) - targets * logits + decay
