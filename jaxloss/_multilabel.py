"""Multi-label losses on logits: a sample may be of several classes, or of unknown ones."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Real

from jaxloss import _checks
from jaxloss._batch import AxisName, Reduction, any_over, logsumexp_over, reduce
from jaxloss._linear import widen


def _prepare(logits, targets, where) -> tuple[Array, Array]:
    """Logits and targets [n, C]; 0 and −1 where a class is unknown or a sample is padding."""
    logits = _checks.floating("logits", logits, "n C")
    (logits,) = widen(logits)
    targets = _checks.class_targets("targets", targets, "logits", logits)
    mask = _checks.row_mask(where, "logits", logits)
    known = ~(targets < 0) if mask is None else ~(targets < 0) & mask[:, None]
    # A NaN target is not hidden: it is a positive whose logit, and its gradient, are NaN.
    nan = known & jnp.isnan(targets)
    logits = jnp.where(known, logits, 0) * jnp.where(nan, jnp.nan, 1).astype(logits.dtype)
    return logits, jnp.where(known, jnp.where(nan, 1, targets), -1)


def _soft_gap(
    logits: Array,
    targets: Array,
    *,
    axis: int,
    positive_temperature: Any,
    negative_temperature: Any,
    margin: Any,
    log_weights: Array | float = 0.0,
    axis_name: AxisName | None = None,
) -> tuple[Array, Array]:
    """The losses of `sample_wise_loss` along axis 1, of `class_wise_loss` along 0, and whether
    there is a positive."""
    positive_temperature = _checks.in_range("positive_temperature", positive_temperature, above=0)
    negative_temperature = _checks.in_range("negative_temperature", negative_temperature, above=0)
    margin = _checks.in_range("margin", margin)

    def hardest(signed, members, temperature):
        exponents = signed / temperature + log_weights
        soft = logsumexp_over(exponents, members, axis=axis, axis_name=axis_name)
        return temperature * soft, any_over(members, axis=axis, axis_name=axis_name)

    negative, has_negative = hardest(logits, targets == 0, negative_temperature)
    positive, has_positive = hardest(-logits, targets > 0, positive_temperature)
    # A gap to nothing is −∞, whose softplus is 0. `positive − positive` is 0 too, or a NaN.
    gap = jnp.where(has_negative, negative + positive + margin, 0)
    values = jnp.where(has_negative, jax.nn.softplus(gap), positive - positive)
    return values, has_positive


def sample_wise_loss(
    logits: Float[Array, "n C"],
    targets: Real[Array, "n C"] | Bool[Array, "n C"],
    *,
    positive_temperature: float = 4.0,
    negative_temperature: float = 1.0,
    margin: float = 0.0,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Ranks the classes of a sample: its positives above its negatives.

    .. math:: \ell_i = \mathrm{softplus}\Big[T_N \log \sum_{c ∈ N_i} e^{z_{ic} / T_N}
       + T_P \log \sum_{c ∈ P_i} e^{-z_{ic} / T_P} + ε\Big]

    It does not change if the same number is added to all logits of a sample.

    Args:
      logits: `[n, C]`, any float dtype.
      targets: `[n, C]`, bool, integers or floats: above 0 positive, 0 negative, below 0 unknown,
        which adds nothing.
      positive_temperature: T_P > 0; above 1 it spreads the gradient over all positives.
      negative_temperature: T_N > 0.
      margin: ε = ε_N − ε_P, any number.
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`. A sample
        without a positive does not count; one with positives but no negative has loss 0.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit, or a temperature is not positive.

    References:
      Kobayashi, Two-Way Multi-Label Loss, CVPR 2023, eq. (14), (15), supplement eq. (iii).

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, 0.0, -1.0], [1.0, 1.0, 1.0]])
      >>> targets = jnp.array([[1, 0, 0], [1, 0, -1]])
      >>> losses = jaxloss.sample_wise_loss(logits, targets, reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.1698 0.6931]
    """
    logits, targets = _prepare(logits, targets, where)
    values, defined = _soft_gap(
        logits,
        targets,
        axis=1,
        positive_temperature=positive_temperature,
        negative_temperature=negative_temperature,
        margin=margin,
    )
    return reduce(
        values, defined, sample_weights=sample_weights, reduction=reduction, axis_name=axis_name
    )


def _log_weights(sample_weights: Any, targets: Array) -> tuple[Array, Array]:
    """`log s` [n, 1], 0 for padding, and the targets without the samples of weight 0."""
    weights = _checks.floating("sample_weights", sample_weights, "n")
    _checks.same_rows("sample_weights", weights, "logits", targets)
    weights = weights.astype(targets.dtype)[:, None]
    targets = jnp.where(weights == 0, -1, targets)
    used = jnp.any(targets >= 0, axis=1, keepdims=True)
    return jnp.log(jnp.where(used, weights, 1)), targets


def class_wise_loss(
    logits: Float[Array, "n C"],
    targets: Real[Array, "n C"] | Bool[Array, "n C"],
    *,
    positive_temperature: float = 4.0,
    negative_temperature: float = 1.0,
    margin: float = 0.0,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " C"]:
    r"""Ranks the samples of a class: its positives above its negatives.

    .. math:: \ell_c = \mathrm{softplus}\Big[T_N \log \sum_{i ∈ N_c} s_i e^{z_{ic} / T_N}
       + T_P \log \sum_{i ∈ P_c} s_i e^{-z_{ic} / T_P} + ε\Big]

    It does not change if the same number is added to all logits of a class.

    Args:
      logits: `[n, C]`, any float dtype.
      targets: `[n, C]`, bool, integers or floats: above 0 positive, 0 negative, below 0 unknown,
        which adds nothing.
      positive_temperature: T_P > 0.
      negative_temperature: T_N > 0.
      margin: ε = ε_N − ε_P, any number.
      where: bool `[n]`; False rows are padding.
      sample_weights: floats `[n]`, s: a sample of weight 2 is as good as the same sample twice, one
        of weight 0 is absent, negative weights give NaN. Twice the weights is not the same loss.
      reduction: over the classes. `"mean"` is over those with a positive, `"sum"` is their sum,
        `"none"` gives `[C]`, 0 for a class without a positive. A class that has positives but no
        negative has loss 0.
      axis_name: common to all losses, see `jaxloss`. Every device has the losses of all its
        classes over the global batch; C numbers travel, not the logits.

    Returns:
      A scalar, or `[C]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit, or a temperature is not positive.

    References:
      Kobayashi, Two-Way Multi-Label Loss, CVPR 2023, eq. (14), (17), supplement eq. (iii).

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, 0.0, -1.0], [1.0, 1.0, 1.0]])
      >>> targets = jnp.array([[1, 0, 0], [0, 1, 0]])
      >>> losses = jaxloss.class_wise_loss(logits, targets, reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.3133 0.3133 0.    ]
      >>> print(f"{jaxloss.class_wise_loss(logits, targets):.4f}")
      0.3133
    """
    logits, targets = _prepare(logits, targets, where)
    log_weights = 0.0
    if sample_weights is not None:
        log_weights, targets = _log_weights(sample_weights, targets)
    values, defined = _soft_gap(
        logits,
        targets,
        axis=0,
        positive_temperature=positive_temperature,
        negative_temperature=negative_temperature,
        margin=margin,
        log_weights=log_weights,
        axis_name=axis_name,
    )
    # The terms are the same on every device: they are summed over classes alone.
    return reduce(values, defined, sample_weights=None, reduction=reduction, axis_name=None)


def two_way_loss(
    logits: Float[Array, "n C"],
    targets: Real[Array, "n C"] | Bool[Array, "n C"],
    *,
    positive_temperature: float = 4.0,
    negative_temperature: float = 1.0,
    margin: float = 0.0,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""]:
    r"""Two-way loss: `class_wise_loss` plus `sample_wise_loss`.

    .. math:: \ell = \mathrm{mean}_c \, \ell_c + \mathrm{mean}_i \, \ell_i

    Args:
      logits: `[n, C]`, any float dtype.
      targets: `[n, C]`, bool, integers or floats: above 0 positive, 0 negative, below 0 unknown,
        which adds nothing.
      positive_temperature: T_P > 0.
      negative_temperature: T_N > 0.
      margin: ε = ε_N − ε_P, any number.
      where, sample_weights, axis_name: as for the two losses.
      reduction: `"mean"`, or `"sum"` for the sum over classes plus that over samples. The loss has
        no terms to return: for these, call the two losses with `reduction="none"`.

    Returns:
      A scalar; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit, a temperature is not positive, or the reduction is `"none"`.

    References:
      Kobayashi, Two-Way Multi-Label Loss, CVPR 2023, eq. (17).

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> logits = jnp.array([[2.0, 0.0, -1.0], [1.0, 1.0, 1.0]])
      >>> targets = jnp.array([[1, 0, 0], [0, 1, 0]])
      >>> print(f"{jaxloss.two_way_loss(logits, targets):.4f}")
      0.9475
    """
    if reduction == "none":
        raise ValueError(
            "`reduction` must be mean or sum, got 'none': the terms of `two_way_loss` are the [C] "
            "of `class_wise_loss` and the [n] of `sample_wise_loss`"
        )
    options: dict[str, Any] = {
        "positive_temperature": positive_temperature,
        "negative_temperature": negative_temperature,
        "margin": margin,
        "where": where,
        "sample_weights": sample_weights,
        "reduction": reduction,
        "axis_name": axis_name,
    }
    return class_wise_loss(logits, targets, **options) + sample_wise_loss(
        logits, targets, **options
    )


def multilabel_softmax_loss(
    logits: Float[Array, "n C"],
    targets: Real[Array, "n C"] | Bool[Array, "n C"],
    *,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Softmax cross-entropy against the targets of a sample, normalised to sum 1.

    .. math:: \ell_i = -\sum_{c ∈ P_i} \frac{t_{ic}}{\sum_{k ∈ P_i} t_{ik}}
       \log \frac{e^{z_{ic}}}{\sum_{k ∈ P_i ∪ N_i} e^{z_{ik}}}

    Args:
      logits: `[n, C]`, any float dtype.
      targets: `[n, C]`, bool, integers or floats: above 0 positive, with that proportion; 0
        negative; below 0 unknown, which the softmax leaves out.
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`. A sample
        without a positive does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit.

    References:
      Kobayashi, Two-Way Multi-Label Loss, CVPR 2023, the softmax loss of its comparisons.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, 0.0, -1.0], [1.0, 1.0, 1.0]])
      >>> targets = jnp.array([[1, 0, 0], [1, 1, -1]])
      >>> losses = jaxloss.multilabel_softmax_loss(logits, targets, reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.1698 0.6931]
    """
    logits, targets = _prepare(logits, targets, where)
    positive = targets > 0
    amounts = jnp.where(positive, targets, 0)
    defined = jnp.any(positive, axis=1)
    proportions = amounts / jnp.where(defined, jnp.sum(amounts, axis=1), 1)[:, None]
    log_total = logsumexp_over(logits, targets >= 0, axis=1)
    values = jnp.sum(proportions * jnp.where(positive, log_total[:, None] - logits, 0), axis=1)
    return reduce(
        values, defined, sample_weights=sample_weights, reduction=reduction, axis_name=axis_name
    )


def asymmetric_loss(
    logits: Float[Array, "n C"],
    targets: Real[Array, "n C"] | Bool[Array, "n C"],
    *,
    positive_focus: float = 0.0,
    negative_focus: float = 4.0,
    clip: float = 0.05,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Asymmetric loss (ASL): focal cross-entropy, harder on easy negatives; summed over classes.

    .. math:: \ell_i = -\sum_{c ∈ P_i} (1 - p_{ic})^{γ_+} \log p_{ic}
       - \sum_{c ∈ N_i} q_{ic}^{γ_-} \log(1 - q_{ic}),
       \quad p_{ic} = \frac{1}{1 + e^{-z_{ic}}}, \quad q_{ic} = \max(p_{ic} - m, 0)

    Args:
      logits: `[n, C]`, any float dtype.
      targets: `[n, C]`, bool, integers or floats: above 0 positive, 0 negative, below 0 unknown,
        which adds nothing.
      positive_focus: γ₊ ≥ 0.
      negative_focus: γ₋ ≥ 0.
      clip: m in [0, 1): a negative below this probability adds nothing.
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`. A sample
        without any known target does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit, or a hyperparameter is out of range.

    References:
      Ben-Baruch et al., Asymmetric Loss for Multi-Label Classification, ICCV 2021.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, 0.0, -1.0], [1.0, 1.0, 1.0]])
      >>> targets = jnp.array([[1, 0, 0], [1, 0, -1]])
      >>> losses = jaxloss.asymmetric_loss(logits, targets, reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.152  0.5591]
    """
    positive_focus = _checks.in_range("positive_focus", positive_focus, at_least=0)
    negative_focus = _checks.in_range("negative_focus", negative_focus, at_least=0)
    clip = _checks.in_range("clip", clip, at_least=0, below=1)
    logits, targets = _prepare(logits, targets, where)
    p, not_p, log_p, log_not_p = _sigmoids(logits)
    positives = -_power(not_p, log_not_p, positive_focus) * log_p
    # A negative at or below the clip adds nothing; 1 keeps its logarithm finite.
    clipped = p <= clip
    q = jnp.where(clipped, 1, p - clip)
    # Without a clip q is p, whose logarithm has derivatives where those of log q overflow.
    has_clip = jnp.asarray(clip > 0)
    log_q = jnp.where(has_clip, jnp.log(jnp.where(has_clip, q, 1)), log_p)
    log_not_q = jnp.where(has_clip, jnp.log(jnp.where(has_clip, not_p + clip, 1)), log_not_p)
    negatives = jnp.where(clipped, 0, -_power(q, log_q, negative_focus) * log_not_q)
    values = jnp.where(targets > 0, positives, jnp.where(targets == 0, negatives, 0))
    return reduce(
        jnp.sum(values, axis=1),
        jnp.any(targets >= 0, axis=1),
        sample_weights=sample_weights,
        reduction=reduction,
        axis_name=axis_name,
    )


def _sigmoids(logits: Array) -> tuple[Array, Array, Array, Array]:
    """`p = 1/(1 + e^{−z})`, `1 − p` and their logarithms, by one exponential."""
    positive = logits >= 0
    decay = jnp.exp(jnp.where(positive, -logits, logits))
    larger, log_larger = 1 / (1 + decay), -jnp.log1p(decay)
    smaller, log_smaller = decay * larger, jnp.where(positive, -logits, logits) + log_larger
    return (
        jnp.where(positive, larger, smaller),
        jnp.where(positive, smaller, larger),
        jnp.where(positive, log_larger, log_smaller),
        jnp.where(positive, log_smaller, log_larger),
    )


def _power(base: Array, log_base: Array, exponent: Any) -> Array:
    """`base^exponent`, by products where the exponent is a whole number."""
    if isinstance(exponent, float) and exponent.is_integer():
        return base ** int(exponent)
    return jnp.exp(exponent * log_base)


def warp_loss(
    logits: Float[Array, "n C"],
    targets: Real[Array, "n C"] | Bool[Array, "n C"],
    *,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Weighted approximate-rank pairwise loss (WARP), in expectation over its sampled negatives.

    .. math:: \ell_i = \sum_{p ∈ P_i} \frac{H(r_p)}{r_p} \sum_{k ∈ V_p} 1 - z_{ip} + z_{ik},
       \quad V_p = \{k ∈ N_i : z_{ik} > z_{ip} - 1\}, \quad r_p = |V_p|, \quad
       H(r) = \sum_{j=1}^r \frac{1}{j}

    The rank r_p is a constant in the gradient. Class by class, for n·C numbers of memory.

    Args:
      logits: `[n, C]`, any float dtype.
      targets: `[n, C]`, bool, integers or floats: above 0 positive, 0 negative, below 0 unknown,
        which adds nothing.
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`. A sample
        without any known target does not count; one without a pair to rank has loss 0.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit.

    References:
      Gong et al., Deep Convolutional Ranking for Multilabel Image Annotation, arXiv 1312.4894;
      Kobayashi, Two-Way Multi-Label Loss, CVPR 2023, supplement, Table B.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, 1.5, -1.0], [1.0, 1.0, 1.0]])
      >>> targets = jnp.array([[1, 0, 0], [1, 0, 0]])
      >>> losses = jaxloss.warp_loss(logits, targets, reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.5 1.5]
    """
    logits, targets = _prepare(logits, targets, where)
    pulls, pushes = _rank_forces(logits, targets)
    # Pulls and pushes add up to the same, so that the logits may be counted from any number: from
    # the largest negative, the sum does not cancel.
    peak = jnp.max(logits, axis=1, where=targets == 0, initial=-jnp.inf, keepdims=True)
    logits = logits - lax.stop_gradient(jnp.where(jnp.isneginf(peak), 0, peak))
    return reduce(
        jnp.sum(pulls * (1 - logits) + pushes * logits, axis=1),
        jnp.any(targets >= 0, axis=1),
        sample_weights=sample_weights,
        reduction=reduction,
        axis_name=axis_name,
    )


def _rank_forces(logits: Array, targets: Array) -> tuple[Array, Array]:
    """`H(r_p)` of the positives and `Σ_p H(r_p) / r_p` over the positives that a negative violates,
    both [n, C] and constants in the gradient; class by class, so that C² pairs never meet."""
    logits = lax.stop_gradient(logits)
    negative = targets == 0
    harmonic = jnp.asarray(np.cumsum([0.0, *(1 / np.arange(1, logits.shape[1] + 1))]), logits.dtype)

    def rank(pushes, column):
        logit, is_positive = column
        violated = negative & is_positive[:, None] & (logits > logit[:, None] - 1)
        ranks = jnp.sum(violated, axis=1, dtype=jnp.int32)
        pull = harmonic[ranks]
        share = pull / jnp.maximum(ranks, 1).astype(logits.dtype)
        return pushes + jnp.where(violated, share[:, None], 0), pull

    nothing = jnp.where(negative, jnp.zeros((), logits.dtype), 0)
    pushes, pulls = lax.scan(rank, nothing, (logits.T, (targets > 0).T))
    # A NaN has no rank: without this, its gradient would be a number.
    return jnp.where(jnp.isnan(logits), logits, pulls.T), pushes
