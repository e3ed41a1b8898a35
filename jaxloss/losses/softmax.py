"""Classification losses on logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Integer, Real

from jaxloss.core import batch, checks
from jaxloss.core.backend import on_cpu
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.blocks import even_size, in_blocks, sum_of_blocks
from jaxloss.core.checks import Number
from jaxloss.core.linear import sizes_are_known, widen
from jaxloss.core.logsumexp import is_on, softplus, unless_left_out
from jaxloss.core.sharding import divided
from jaxloss.losses.margins import lowering, margins_of_samples
from jaxloss.losses.multilabel import checked_targets


@divided
def softmax_loss(
    logits: Float[Array, "*n C"],
    labels: Integer[Array, " *n"] | Float[Array, "*n C"],
    *,
    label_smoothing: Number = 0.0,
    logsumexp_penalty: Number = 0.0,
    where: Bool[Array, " *n"] | None = None,
    sample_weights: Float[Array, " *n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " *n"]:
    r"""Softmax cross-entropy (SCE) of class indices or soft targets.

    .. math:: \ell_i = -\sum_c t_{ic} \log \frac{e^{z_{ic}}}{\sum_k e^{z_{ik}}}
       + p \Big(\log \sum_k e^{z_{ik}}\Big)^2, \quad t_{ic} = (1-ε) [y_i = c] + ε / C

    Targets of mixup or of a teacher are t without smoothing. With it, a share ε of a row's sum is
    spread evenly over the classes: `t ← (1 − ε) t + ε (Σ t) / C`.

    Args:
      logits: `[n, C]`; n may stand for several axes.
      labels: `[n]`, class indices; or `[n, C]`, floats t ≥ 0 whose rows sum to 1 or less. Every row
        counts, also one of zeros; `where` leaves rows out. A target below 0 gives NaN. A target of
        0 for a logit of −∞ adds nothing. Targets have a gradient.
      label_smoothing: ε in [0, 1).
      logsumexp_penalty: p, usually above 0, such as 1e-4: the z-loss, which keeps the log-sum-exp
        near 0.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`. On a CPU, the mean or sum of many targets `[n, C]`
      has no forward mode (`jax.jvp`); its gradient has one.

    Raises:
      ValueError: If `label_smoothing` is out of range.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
      >>> losses = jaxloss.softmax_loss(logits, jnp.array([0, 2]), reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.2395 1.0986]
      >>> mixed = jnp.array([[0.75, 0.25, 0.0], [0.0, 0.25, 0.75]])
      >>> losses = jaxloss.softmax_loss(logits, mixed, reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.7395 1.0986]

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024 (SCE).
      Liu et al., Negative Margin Matters, ECCV 2020, Table 6 (label smoothing).
      Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018 (targets).
      Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, JMLR 2023, section 5
        (`logsumexp_penalty`).
    """
    logits, labels, valid = batch.checked_rows("logits", logits, labels, where, soft=True)
    (logits,) = widen(logits)
    label_smoothing = checks.in_range(
        "label_smoothing", label_smoothing, logits.dtype, at_least=0, below=1
    )
    penalty = checks.in_range("logsumexp_penalty", logsumexp_penalty, logits.dtype)
    numbers, size = (label_smoothing, penalty), None
    if labels.ndim == 2:
        checks.same_shape("labels", labels, "logits", logits)
        size = _rows_of_block(logits, numbers)
    if size is None or reduction == "none":
        values = _values(numbers, logits, labels, valid)
        return batch.reduce(values, valid, sample_weights, reduction, axis_name)
    shares = batch.shares(valid, sample_weights, reduction, axis_name, logits.dtype)
    blocks = in_blocks((logits, labels, shares), size), in_blocks(valid, size), ()
    found: Any = sum_of_blocks((partial(_total, numbers),) * 2, *batch.vary_alike(blocks))
    return batch.sum_over(found[0], axis_name)


def _rows_of_block(logits: Float[Array, "n C"], numbers: tuple[Number, Number]) -> int | None:
    """Returns how many rows of logits and targets stay in the cache of a CPU, where it matters."""
    number, num_classes = logits.shape
    is_traced = any(isinstance(x, jax.Array) for x in numbers)
    if is_traced or not on_cpu() or not sizes_are_known(number) or logits.size < 2**18:
        return None
    most = 2**17 // num_classes
    return even_size(number, max(most // 4, 8), max(most, 32))


def _total(numbers: Any, floats: Any, valid: Any, shared: Any) -> tuple[Float[Array, ""], Any]:
    """Returns the loss of a block of rows, for `sum_of_blocks`."""
    logits, targets, shares = floats
    values = _values(numbers, logits, targets, valid)
    return jnp.sum(shares * jnp.where(valid, values, 0)), shared


def _values(
    numbers: tuple[Number, Number],
    logits: Float[Array, "n C"],
    labels: Integer[Array, " n"] | Float[Array, "n C"],
    valid: Bool[Array, " n"],
) -> Float[Array, " n"]:
    """Returns the losses of the rows, with this `label_smoothing` and `logsumexp_penalty`."""
    label_smoothing, penalty = numbers
    relative, log_total, peak = relative_to_peak(logits, valid)
    total: Any = 1
    if labels.ndim == 1:
        values = cross_entropy(relative, log_total, labels, valid)
    else:
        targets = batch.zero_invalid(labels.astype(logits.dtype), valid)
        # Neither 0 · ∞, nor a gradient of ∞ by a target of a class that is left out.
        left_out = (targets == 0) & (relative == -jnp.inf)
        total = batch.mass_of(targets)
        total = total + batch.zero_or_nan(total)
        values = total * log_total - jnp.sum(targets * jnp.where(left_out, 0, relative), axis=1)
    if is_on(label_smoothing):
        uniform = total * (log_total - jnp.mean(relative, axis=1))
        if isinstance(label_smoothing, jax.Array):  # At 0, a class that is left out adds nothing.
            uniform = jnp.where((label_smoothing == 0) & (uniform == jnp.inf), values, uniform)
        values = (1 - label_smoothing) * values + label_smoothing * uniform
    if is_on(penalty):
        values = values + penalty * jnp.square(peak + log_total)
    return values


@divided
def margin_softmax_loss(
    logits: Float[Array, "*n C"],
    labels: Integer[Array, " *n"],
    *,
    margin: Number | Float[Array, " C"] = 0.0,
    scale: Number = 1.0,
    sample_margin: Float[Array, " *n"] | None = None,
    angular_margin: Number | Float[Array, " C"] = 0.0,
    sample_angular_margin: Float[Array, " *n"] | None = None,
    where: Bool[Array, " *n"] | None = None,
    sample_weights: Float[Array, " *n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " *n"]:
    r"""Softmax cross-entropy with a margin on the target's logit.

    .. math:: \ell_i = -\log \frac{e^{β t_i}}{e^{β t_i} + \sum_{c≠y} e^{β z_{ic}}},
       \quad t_i = \cos(θ_i + a_i) - m_i, \quad z_{iy} = \cos θ_i

    Without angles a, this is t = z − m for any logits: m < 0 gives the negative-margin loss, 0 the
    plain loss, m > 0 the large-margin loss (CosFace). a > 0 is ArcFace. Margins of samples give
    AdaFace and MagFace.

    An angle θ + a below 0 counts as 0: t = 1 − m. Above π, t = cos θ + cos a − 1 − m, which
    continues cos(θ + a) at π and keeps falling. sin θ is taken as at least 0.001, so that the
    gradient is finite at cos θ = ±1. Above π, pytorch-metric-learning has cos θ − a sin a, which
    jumps, and insightface has cos(θ + a), which rises again.

    Args:
      logits: `[n, C]`, from `linear_logits` (eq. 7) or `cosine_logits` (eq. 8). With angles they
        must be cosines.
      labels: `[n]`, class indices.
      margin: m, any number, or `[C]` for a margin per class.
      scale: β > 0.
      sample_margin: `[n]`, or None: added to m.
      angular_margin: a in radians, from 0 to π, a number or `[C]`.
      sample_angular_margin: `[n]` of any sign, or None: added to a.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `scale` is not positive, or `angular_margin` is not from 0 to π.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> cosines, labels = jnp.array([[0.6, 0.2]]), jnp.array([0])
      >>> print(f"{jaxloss.margin_softmax_loss(cosines, labels, margin=-0.3, scale=10.0):.5f}")
      0.00091
      >>> print(f"{jaxloss.margin_softmax_loss(cosines, labels, angular_margin=0.5):.5f}")
      0.72205

    References:
      Liu et al., Negative Margin Matters, ECCV 2020, eq. (7), (8).
      Wang et al., CosFace, CVPR 2018. Deng et al., ArcFace, CVPR 2019, eq. (3).
      Kim et al., AdaFace, CVPR 2022. Meng et al., MagFace, CVPR 2021.
    """
    logits, labels, valid = batch.checked_rows("logits", logits, labels, where)
    (logits,) = widen(logits)
    scale = checks.in_range("scale", scale, logits.dtype, above=0)
    dtype, num_classes = logits.dtype, logits.shape[1]
    angles = angular_margin, sample_angular_margin
    margins = margins_of_samples((margin, sample_margin), angles, labels, valid, dtype, num_classes)
    is_target = batch.is_own_class(labels, num_classes)
    own = jnp.sum(jnp.where(is_target & valid[:, None], logits, 0), axis=1)
    lowered_by = lowering(margins, own)
    lost = None
    # Angles are for cosines, which are not large.
    if margins.angle is None and not (isinstance(lowered_by, float) and lowered_by == 0):
        lost = scale * _lost_beside(_at_own_class(logits, labels), lowered_by)
    is_traced = isinstance(scale, jax.Array)
    if isinstance(lowered_by, jax.Array):
        is_traced = is_traced or lowered_by.ndim == 0
        lowered_by = lowered_by[:, None] if lowered_by.ndim == 1 else lowered_by
    lowered = jnp.where(is_target, logits - lowered_by, logits)
    if is_traced:
        relative, log_total, _ = relative_to_peak(lowered, valid, scale)
    else:  # This keeps no array of the differences for the gradient.
        relative, log_total, _ = relative_to_peak(scale * lowered, valid)
    values = cross_entropy(relative, log_total, labels, valid, lost)
    return batch.reduce(values, valid, sample_weights, reduction, axis_name)


def relative_to_peak(
    logits: Float[Array, "n C"], valid: Bool[Array, " n"], scale: Number | None = None
) -> tuple[Float[Array, "n C"], Float[Array, " n"], Float[Array, " n"]]:
    """Returns `a − max a` and `log Σ e^{a − max a}` of the logits or the scaled logits a.

    They are zeros and `log C` in rows that are not valid. The maximum reads the logits as they are.
    Zeros in the invalid rows would be another array. It comes last, without the scale.
    """
    peak = jnp.where(valid, jnp.max(lax.stop_gradient(logits), axis=1), 0)
    relative = jnp.where(valid[:, None], logits - peak[:, None], 0)
    # Its derivative sees no invalid row, and no product of large numbers.
    if scale is not None:
        relative = unless_left_out(scale, relative) * relative
    return relative, jnp.log(jnp.sum(jnp.exp(relative), axis=1)), peak


def _at_own_class(values: Float[Array, "n C"], labels: Integer[Array, " n"]) -> Float[Array, " n"]:
    """Returns the value at the label of each row; of the nearest class, if there is none."""
    nearest = jnp.clip(labels, 0, values.shape[1] - 1)
    return jnp.take_along_axis(values, nearest[:, None], axis=1)[:, 0]


def _lost_beside(
    own: Float[Array, " n"], margin: Number | Float[Array, " n"]
) -> Float[Array, " n"]:
    """Returns the digits of a margin that are lost where it is subtracted from a large logit."""
    own, margin = lax.stop_gradient((own, jnp.asarray(margin, own.dtype)))
    lost = (own - (own - margin)) - margin
    # A traced scale multiplies it: 0 · NaN is NaN. Of more, nothing is left of the margin.
    return jnp.where(jnp.abs(lost) < 80, lost, 0)


def cross_entropy(
    relative: Float[Array, "n C"],
    log_total: Float[Array, " n"],
    labels: Integer[Array, " n"],
    valid: Bool[Array, " n"],
    lost: Float[Array, " n"] | None = None,
) -> Float[Array, " n"]:
    """Returns `−log p_y` from the results of `relative_to_peak`; NaN if a label is C or more.

    If the target's logit has been rounded by more than a little, what was lost is added to it.
    """
    num_classes = relative.shape[1]
    own = _at_own_class(relative, labels)
    if lost is not None:
        # Below, rounding is as large; above, nothing is left of the margin, and e^80 is finite.
        matters = valid & (jnp.abs(lost) > 1e-5) & (jnp.abs(lost) < 80)
        moved = own + jnp.where(matters, lost, 0)
        others = jnp.where(matters, jnp.exp(log_total) - jnp.exp(own), 0)
        total = jnp.maximum(others, 0) + jnp.exp(moved)
        log_total = jnp.where(matters, jnp.log(jnp.where(matters, total, 1)), log_total)
        own = moved
    return batch.nan_where_no_class(log_total - own, labels, valid, num_classes)


@divided
def sigmoid_loss(
    logits: Float[Array, "*n C"],
    labels: Integer[Array, " *n"] | Real[Array, "*n C"] | Bool[Array, "*n C"],
    *,
    where: Bool[Array, " *n"] | None = None,
    sample_weights: Float[Array, " *n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " *n"]:
    r"""One-versus-rest binary cross-entropy (BCE), summed over the classes of a sample.

    .. math:: \ell_i = \sum_c \log(1 + e^{z_{ic}}) - t_{ic} z_{ic}

    Args:
      logits: `[n, C]`; n may stand for several axes.
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
    per_sample = _of_targets if checks.rank(labels) == 2 else _of_classes
    values, mask = per_sample(logits, labels, where)
    return batch.reduce(values, mask, sample_weights, reduction, axis_name)


def _of_classes(
    logits: Any, labels: Any, where: Any
) -> tuple[Float[Array, " n"], Bool[Array, " n"]]:
    """Returns the sigmoid losses of samples of one class each, and which of them count."""
    logits, labels, valid = batch.checked_rows("logits", logits, labels, where)
    (logits,) = widen(logits)
    is_target = batch.is_own_class(labels, logits.shape[1])
    signed = jnp.where(is_target, -logits, logits)
    values = jnp.sum(softplus(jnp.where(valid[:, None], signed, 0)), axis=1)
    return batch.nan_where_no_class(values, labels, valid, logits.shape[1]), valid


def _of_targets(
    logits: Any, targets: Any, where: Any
) -> tuple[Float[Array, " n"], Bool[Array, " n"]]:
    """Returns the sigmoid losses of samples of multi-label targets, and which of them count."""
    hint = "; the class indices of a column are labels[:, 0]" if targets.shape[1] == 1 else ""
    logits, targets, known = checked_targets(logits, targets, where, "labels", hint)
    logits, targets = jnp.where(known, logits, 0), jnp.clip(targets, 0, 1)
    # `max(z, 0) − t z`, before the small term is added, which would be lost. 0 · ∞ is NaN.
    slopes = jnp.where(logits >= 0, 1 - targets, -targets)
    values = jnp.where(slopes == 0, 0, slopes * logits)
    # `log(1 + e^{−|z|})`, with the derivatives at 0 from the right.
    values = values + jnp.log1p(jnp.exp(jnp.where(logits >= 0, -logits, logits)))
    return jnp.sum(jnp.where(known, values, 0), axis=1), jnp.any(known, axis=1)
