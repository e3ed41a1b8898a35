"""Classification losses on logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Bool, Float, Int, Real

from jaxloss import _checks
from jaxloss._batch import AxisName, Reduction, clean_rows, counting_rows, poison, reduce
from jaxloss._linear import widen


def _prepare(logits, labels, where) -> tuple[Array, Array, Array]:
    logits = _checks.floating("logits", logits, "n C")
    labels = _checks.class_labels(labels, "logits", logits)
    counts = counting_rows(labels, _checks.row_mask(where, "logits", logits))
    (logits,) = widen(logits)
    return clean_rows(logits, counts), labels, counts


def _cross_entropy(logits: Array, labels: Array, counts: Array) -> Array:
    num_classes = logits.shape[1]
    known = jnp.clip(labels, 0, num_classes - 1)
    values = optax.softmax_cross_entropy_with_integer_labels(logits, known)
    return poison(labels, counts, num_classes, values)


def _binary_cross_entropy(logits: Array, targets: Array) -> Array:
    """`log(1 + e^z) − t z`, one exponential of each logit."""
    positive = logits >= 0
    decay = jnp.log1p(jnp.exp(jnp.where(positive, -logits, logits)))
    return jnp.where(positive, logits, 0) - targets * logits + decay


def softmax_loss(
    logits: Float[Array, "n C"],
    labels: Int[Array, " n"],
    *,
    label_smoothing: float = 0.0,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Softmax cross-entropy (SCE), with optional label smoothing.

    .. math:: \ell_i = -\sum_c t_{ic} \log \frac{e^{z_{ic}}}{\sum_k e^{z_{ik}}},
       \quad t_{ic} = (1-ε) [y_i = c] + ε / C

    Args:
      logits: `[n, C]`, any float dtype.
      labels: `[n]`, integers below C; negative ones are ignored, larger ones give NaN.
      label_smoothing: ε in [0, 1).
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit, or ε is out of range.

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024 (SCE);
      smoothing as in Liu et al., Negative Margin Matters, ECCV 2020, Table 6.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
      >>> losses = jaxloss.softmax_loss(logits, jnp.array([0, 2]), reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.2395 1.0986]
    """
    label_smoothing = _checks.in_range("label_smoothing", label_smoothing, at_least=0, below=1)
    logits, labels, counts = _prepare(logits, labels, where)
    values = _cross_entropy(logits, labels, counts)
    if isinstance(label_smoothing, jax.Array) or label_smoothing > 0:
        uniform = jax.nn.logsumexp(logits, axis=1) - jnp.mean(logits, axis=1)
        values = (1 - label_smoothing) * values + label_smoothing * uniform
    return reduce(
        values, counts, sample_weights=sample_weights, reduction=reduction, axis_name=axis_name
    )


def sigmoid_loss(
    logits: Float[Array, "n C"],
    labels: Int[Array, " n"] | Real[Array, "n C"] | Bool[Array, "n C"],
    *,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""One-versus-rest binary cross-entropy (BCE), summed over the classes of a sample.

    .. math:: \ell_i = \sum_c \log(1 + e^{z_{ic}}) - t_{ic} z_{ic}

    Args:
      logits: `[n, C]`, any float dtype.
      labels: classes `[n]` (integers below C; negative ones are ignored, larger ones give NaN), or
        multi-hot targets `[n, C]`: 1 positive, 0 negative, below 0 unknown, which adds nothing. A
        sample without any known target does not count. Floats within (0, 1) are soft targets;
        more than 1 (a count of objects) is 1.
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit.

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024 (BCE).

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, -1.0], [0.0, 0.0]])
      >>> losses = jaxloss.sigmoid_loss(logits, jnp.array([0, 1]), reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.4402 1.3863]
      >>> print(f"{jaxloss.sigmoid_loss(logits, jnp.array([[1, 0], [0, 1]])):.4f}")
      0.9132
    """
    if np.ndim(labels) != 2:
        logits, labels, counts = _prepare(logits, labels, where)
        num_classes = logits.shape[1]
        targets = jax.nn.one_hot(labels, num_classes, dtype=logits.dtype)
        values = jnp.sum(_binary_cross_entropy(logits, targets), axis=1)
        values = poison(labels, counts, num_classes, values)
    else:
        logits = _checks.floating("logits", logits, "n C")
        (logits,) = widen(logits)
        targets = _checks.class_targets("labels", labels, "logits", logits)
        known = ~(targets < 0)  # A NaN among the targets is not hidden.
        mask = _checks.row_mask(where, "logits", logits)
        counts = jnp.any(known, axis=1) if mask is None else jnp.any(known, axis=1) & mask
        used = known & counts[:, None]
        values = _binary_cross_entropy(jnp.where(used, logits, 0), jnp.clip(targets, 0, 1))
        values = jnp.sum(jnp.where(used, values, 0), axis=1)
    return reduce(
        values, counts, sample_weights=sample_weights, reduction=reduction, axis_name=axis_name
    )


def margin_softmax_loss(
    logits: Float[Array, "n C"],
    labels: Int[Array, " n"],
    *,
    margin: float,
    scale: float,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Softmax cross-entropy with a margin on the target's logit.

    .. math:: \ell_i = -\log \frac{e^{β (z_{iy} - m)}}{e^{β (z_{iy} - m)} + \sum_{c≠y} e^{β z_{ic}}}

    m < 0 is the negative-margin loss, 0 the plain one, m > 0 the large-margin one.

    Args:
      logits: `[n, C]`, any float dtype; from `linear_logits` (eq. 7) or `cosine_logits` (eq. 8).
      labels: `[n]`, integers below C; negative ones are ignored, larger ones give NaN.
      margin: m, any number.
      scale: β > 0.
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit, or the scale is not positive.

    References:
      Liu et al., Negative Margin Matters, ECCV 2020, eq. (7), (8).

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> cosines, labels = jnp.array([[0.6, 0.2]]), jnp.array([0])
      >>> print(f"{jaxloss.margin_softmax_loss(cosines, labels, margin=-0.3, scale=10.0):.5f}")
      0.00091
    """
    margin = _checks.in_range("margin", margin)
    scale = _checks.in_range("scale", scale, above=0)
    logits, labels, counts = _prepare(logits, labels, where)
    is_target = labels[:, None] == jnp.arange(logits.shape[1], dtype=labels.dtype)[None, :]
    values = _cross_entropy(scale * jnp.where(is_target, logits - margin, logits), labels, counts)
    return reduce(
        values, counts, sample_weights=sample_weights, reduction=reduction, axis_name=axis_name
    )
