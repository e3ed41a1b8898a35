"""Multi-label losses on logits whose terms are weighted: by a focus, by ranks, or by a softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Real

from jaxloss.core import checks
from jaxloss.core.batch import AxisName, Reduction, reduce, vary_alike
from jaxloss.core.checks import Number
from jaxloss.core.logsumexp import finite_from_below, is_on
from jaxloss.core.sharding import divided
from jaxloss.losses import multilabel


@divided
def multilabel_softmax_loss(
    logits: Float[Array, "*n C"],
    targets: Real[Array, "*n C"] | Bool[Array, "*n C"],
    *,
    where: Bool[Array, " *n"] | None = None,
    sample_weights: Float[Array, " *n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " *n"]:
    r"""Softmax cross-entropy against the targets of a sample, normalised to sum to 1.

    .. math:: \ell_i = -\sum_{c ∈ P_i} \frac{t_{ic}}{\sum_{k ∈ P_i} t_{ik}}
       \log \frac{e^{z_{ic}}}{\sum_{k ∈ P_i ∪ N_i} e^{z_{ik}}}

    Args:
      logits: `[n, C]`; n may stand for several axes.
      targets: `[n, C]`, multi-label targets. Positive targets are proportions. The softmax leaves
        out unknown classes.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        without a positive does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, 0.0, -1.0], [1.0, 1.0, 1.0]])
      >>> targets = jnp.array([[1, 0, 0], [1, 1, -1]])
      >>> losses = jaxloss.multilabel_softmax_loss(logits, targets, reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.1698 0.6931]

    References:
      Kobayashi, Two-Way Multi-Label Loss, CVPR 2023, the softmax baseline.
    """
    logits, targets, known = multilabel.checked_targets(logits, targets, where)
    amounts = jnp.where(known, targets, 0)
    total_amount = jnp.sum(amounts, axis=1)
    defined = total_amount != 0  # True for NaN, so that NaN stays visible.
    known = known & defined[:, None]  # A sample that does not count has no gradient.
    relative, _ = multilabel.relative_to_largest(multilabel.above_lowest(logits), known, axis=1)
    log_total = jnp.log(jnp.where(defined, jnp.sum(jnp.exp(relative), axis=1), 1))
    weighted = amounts * jnp.where(amounts == 0, 0, relative)
    values = log_total - jnp.sum(weighted, axis=1) / jnp.where(defined, total_amount, 1)
    return reduce(values, defined, sample_weights, reduction, axis_name)


@divided
def asymmetric_loss(
    logits: Float[Array, "*n C"],
    targets: Real[Array, "*n C"] | Bool[Array, "*n C"],
    *,
    positive_focus: Number = 0.0,
    negative_focus: Number = 4.0,
    clip: Number = 0.05,
    stop_focus_gradient: bool = False,
    where: Bool[Array, " *n"] | None = None,
    sample_weights: Float[Array, " *n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " *n"]:
    r"""Asymmetric loss (ASL): focal cross-entropy with separate focus for positives and negatives.

    .. math:: \ell_i = -\sum_{c ∈ P_i} (1 - p_{ic})^{γ_+} \log p_{ic}
       - \sum_{c ∈ N_i} q_{ic}^{γ_-} \log(1 - q_{ic}),
       \quad p_{ic} = \frac{1}{1 + e^{-z_{ic}}}, \quad q_{ic} = \max(p_{ic} - m, 0)

    With `stop_focus_gradient=True`, the value stays the same, and the gradient is that of weighted
    cross-entropies:

    .. math:: \frac{∂\ell_i}{∂z_{ic}} = -(1 - p_{ic})^{γ_+} (1 - p_{ic}) \;\; (c ∈ P_i),
       \quad q_{ic}^{γ_-} \frac{p_{ic} (1 - p_{ic})}{1 - q_{ic}} \;\; (c ∈ N_i)

    The authors of the loss train so (`disable_torch_grad_focal_loss=True` in their code). The full
    gradient, the default here, is up to 1 + γ times as large.

    Args:
      logits: `[n, C]`; n may stand for several axes.
      targets: `[n, C]`, multi-label targets.
      positive_focus: γ₊ ≥ 0.
      negative_focus: γ₋ ≥ 0.
      clip: m in [0, 1). A negative with a lower probability adds nothing. To learn m, start above
        0: at 0 its gradient is not defined.
      stop_focus_gradient: Treat the focus weights, the powers by γ₊ and γ₋, as constants. Then the
        gradient by γ₊ and by γ₋ is 0, and that by m is the one through log(1 − q).
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        whose targets are all unknown does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `positive_focus`, `negative_focus` or `clip` is out of range.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, 0.0, -1.0], [1.0, 1.0, 1.0]])
      >>> targets = jnp.array([[1, 0, 0], [1, 0, -1]])
      >>> losses = jaxloss.asymmetric_loss(logits, targets, reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.152  0.5591]

    References:
      Ridnik et al., Asymmetric Loss for Multi-Label Classification, ICCV 2021; for
      `stop_focus_gradient`, the authors' published code.
    """
    logits, targets = multilabel.known_targets(logits, targets, where)
    positive_focus = checks.in_range("positive_focus", positive_focus, logits.dtype, at_least=0)
    negative_focus = checks.in_range("negative_focus", negative_focus, logits.dtype, at_least=0)
    clip = checks.in_range("clip", clip, logits.dtype, at_least=0, below=1)
    p, not_p, log_p, log_not_p = _sigmoids(logits)
    of_positives = log_p
    # Elsewhere, a derivative of 0 is multiplied by them, and they may be infinite.
    if is_on(positive_focus):
        of_positives = jnp.where(targets > 0, log_p, 0)
    # A negative at or below the clip adds nothing. The 1 keeps its logarithm finite.
    clipped = p <= clip
    q = jnp.where(clipped, 1, p - clip)
    # Without a clip, q is p: the derivatives of log p stay finite where those of log q overflow.
    has_clip = jnp.asarray(clip > 0)
    log_q = jnp.where(has_clip, jnp.log(jnp.where(has_clip, q, 1)), log_p)
    log_not_q = jnp.where(has_clip, jnp.log(jnp.where(has_clip, not_p + clip, 1)), log_not_p)
    if isinstance(clip, jax.Array) or clip == 0:
        log_not_q = jnp.where(targets == 0, log_not_q, 0)
    weights = _power(not_p, log_not_p, positive_focus), _power(q, log_q, negative_focus)
    weights = lax.stop_gradient(weights) if stop_focus_gradient else weights
    positive_weights, negative_weights = weights
    negatives = jnp.where(clipped, 0, -negative_weights * log_not_q)
    negatives = jnp.where(targets == 0, negatives, 0)
    values = jnp.where(targets > 0, -positive_weights * of_positives, negatives)
    defined = jnp.any(targets >= 0, axis=1)
    return reduce(jnp.sum(values, axis=1), defined, sample_weights, reduction, axis_name)


def _sigmoids(logits: Float[Array, "n C"]) -> tuple[Float[Array, "n C"], ...]:
    """Returns `p = 1/(1 + e^{−z})`, `1 − p`, `log p` and `log(1 − p)`, by one exponential."""
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


def _power(
    base: Float[Array, "n C"], log_base: Float[Array, "n C"], exponent: Number
) -> Float[Array, "n C"]:
    """Returns `base^exponent`, by multiplication if the exponent is a whole number."""
    if isinstance(exponent, float) and exponent.is_integer():
        return base ** int(exponent)
    if isinstance(exponent, jax.Array):  # 0 · ∞ is NaN.
        log_base = finite_from_below(log_base)
    return jnp.exp(exponent * log_base)


@divided
def warp_loss(
    logits: Float[Array, "*n C"],
    targets: Real[Array, "*n C"] | Bool[Array, "*n C"],
    *,
    where: Bool[Array, " *n"] | None = None,
    sample_weights: Float[Array, " *n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " *n"]:
    r"""Weighted approximate-rank pairwise loss (WARP), as the expectation over sampled negatives.

    .. math:: \ell_i = \sum_{p ∈ P_i} \frac{H(r_p)}{r_p} \sum_{k ∈ V_p} 1 - z_{ip} + z_{ik},
       \quad V_p = \{k ∈ N_i : z_{ik} > z_{ip} - 1\}, \quad r_p = |V_p|, \quad
       H(r) = \sum_{j=1}^r \frac{1}{j}

    The rank r_p has no gradient. A loop over classes needs memory for n·C numbers only.

    Args:
      logits: `[n, C]`; n may stand for several axes.
      targets: `[n, C]`, multi-label targets.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        whose targets are all unknown does not count. A sample without a violated pair has loss 0.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, 1.5, -1.0], [1.0, 1.0, 1.0]])
      >>> targets = jnp.array([[1, 0, 0], [1, 0, 0]])
      >>> losses = jaxloss.warp_loss(logits, targets, reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.5 1.5]

    References:
      Gong et al., Deep Convolutional Ranking for Multilabel Image Annotation, arXiv 1312.4894;
      Kobayashi, Two-Way Multi-Label Loss, CVPR 2023, supplement, Table B.
    """
    logits, targets = multilabel.known_targets(logits, targets, where)
    positive_weights, negative_weights = _rank_weights(logits, targets)
    # Both weights have the same sum, so a shift of the logits does not change the loss. Relative to
    # the largest negative, the sum does not cancel.
    _, peak = multilabel.relative_to_largest(logits, targets == 0, axis=1)
    logits = logits - peak
    # No violated pair has a positive of inf or a negative of -inf, and 0 · ∞ is NaN.
    gaps = jnp.where(positive_weights == 0, 0, 1 - logits)
    logits = jnp.where(negative_weights == 0, 0, logits)
    values = jnp.sum(positive_weights * gaps + negative_weights * logits, axis=1)
    defined = jnp.any(targets >= 0, axis=1)
    return reduce(values, defined, sample_weights, reduction, axis_name)


@divided
def robust_multilabel_loss(
    logits: Float[Array, "*n C"],
    targets: Real[Array, "*n C"] | Bool[Array, "*n C"],
    *,
    ramp: Number = -0.8,
    leak: Number = 0.1,
    binary_weight: Number = 5.0,
    where: Bool[Array, " *n"] | None = None,
    sample_weights: Float[Array, " *n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " *n"]:
    r"""Robust multi-label loss (RML): WARP and one-versus-rest hinges, cut off as ramps.

    .. math:: \ell_i = \sum_{p ∈ P_i} H(r_p) \sum_{k ∈ N_i} ρ(z_{ip} - z_{ik})
       + κ \Big[\sum_{p ∈ P_i} ρ(z_{ip}) + \sum_{k ∈ N_i} ρ(-z_{ik})\Big], \quad
       ρ(t) = \max(1 - t, 0) - (1 - λ) \max(s - t, 0)

    Where t is below s, which a wrong label may explain, the slope of ρ is λ in place of 1. r_p and
    H are those of `warp_loss`: the rank, which has no gradient, is counted, where the authors
    estimate it by sampling. They also divide the loss by a constant, 20. A loop over classes needs
    memory for n·C numbers only.

    Args:
      logits: `[n, C]`; n may stand for several axes.
      targets: `[n, C]`, multi-label targets.
      ramp: s < 1, where the ramp ends.
      leak: λ ≥ 0, the slope beyond; 1 gives hinges.
      binary_weight: κ ≥ 0, the weight of the terms of single classes.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        whose targets are all unknown does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `ramp`, `leak` or `binary_weight` is out of range.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, 1.5, -1.0], [1.0, 1.0, 1.0]])
      >>> targets = jnp.array([[1, 0, 0], [1, 0, 0]])
      >>> losses = jaxloss.robust_multilabel_loss(logits, targets, reduction="none")
      >>> print(np.asarray(losses).round(4))
      [ 9.85 21.2 ]

    References:
      Cevikalp et al., Semi-Supervised Robust Deep Neural Networks for Multi-Label Classification,
      CVPR Workshops 2019, in the form and with the constants of the authors' published code for
      labelled images; Kobayashi, Two-Way Multi-Label Loss, CVPR 2023, supplement, Table B.
    """
    logits, targets = multilabel.known_targets(logits, targets, where)
    ramp = checks.in_range("ramp", ramp, logits.dtype, below=1)
    leak = checks.in_range("leak", leak, logits.dtype, at_least=0)
    binary_weight = checks.in_range("binary_weight", binary_weight, logits.dtype, at_least=0)
    margins = jnp.where(targets > 0, logits, -logits)
    known = targets >= 0
    near, past = known & ~(margins >= 1), known & ~(margins >= ramp)
    # Two hinges, of which the second would lose what their difference is beside a large margin.
    to_ramp = jnp.where(past, 1 - ramp, jnp.where(near, 1 - margins, 0))
    beyond = jnp.sum(jnp.where(past, ramp - margins, 0), axis=1)
    binary = jnp.sum(to_ramp, axis=1) + leak * beyond
    values = _ranked_ramps(logits, targets, ramp, leak) + binary_weight * binary
    defined = jnp.any(targets >= 0, axis=1)
    return reduce(values, defined, sample_weights, reduction, axis_name)


def _rank_weights(
    logits: Float[Array, "n C"], targets: Float[Array, "n C"]
) -> tuple[Float[Array, "n C"], Float[Array, "n C"]]:
    """Returns the weights of positives and of negatives, both without a gradient.

    Each is the sum of `H(r_p) / r_p` over the violated pairs. The loop over classes never holds all
    C² pairs.
    """
    logits, targets = vary_alike((lax.stop_gradient(logits), targets))
    negative = targets == 0
    harmonic = _harmonic(logits)

    def rank(negative_weights: Array, column: tuple[Array, Array]) -> tuple[Array, Array]:
        logit, is_positive = column
        # The difference comes first: beside a large logit, 1 would be lost.
        violated = negative & is_positive[:, None] & (logits - logit[:, None] > -1)
        ranks = jnp.sum(violated, axis=1, dtype=jnp.int32)
        total = harmonic[ranks]
        weight = total / jnp.maximum(ranks, 1).astype(logits.dtype)
        return negative_weights + jnp.where(violated, weight[:, None], 0), total

    zeros = jnp.where(negative, jnp.zeros((), logits.dtype), 0)
    negative_weights, positive_weights = lax.scan(rank, zeros, (logits.T, (targets > 0).T))
    # NaN has no rank. Returning it as the weight makes its gradient NaN as well.
    return jnp.where(jnp.isnan(logits), logits, positive_weights.T), negative_weights


def _ranked_ramps(
    logits: Float[Array, "n C"], targets: Float[Array, "n C"], ramp: Number, leak: Number
) -> Float[Array, " n"]:
    """Returns the sums of `H(r_p) ρ(t)` over the pairs, where t is `z_p − z_k`.

    The loop over classes computes the values from differences, and the weights that are their
    derivatives by the logits, by s and by λ.
    """
    logits, targets = vary_alike((logits, targets))
    negative, fixed = targets == 0, lax.stop_gradient(logits)
    end, slope, harmonic = *lax.stop_gradient((ramp, leak)), _harmonic(logits)

    def visit(sums: tuple[Array, ...], column: tuple[Array, Array]) -> tuple[Any, Array]:
        logit, is_positive = column
        gaps = logit[:, None] - fixed
        violated = negative & is_positive[:, None] & (gaps < 1)
        past = violated & (gaps < end)
        weight = harmonic[jnp.sum(violated, axis=1, dtype=jnp.int32)]
        slopes = jnp.where(past, slope, jnp.where(violated, 1, 0)) * weight[:, None]
        to_ramp = jnp.where(past, 1 - end, jnp.where(violated, 1 - gaps, 0))
        beyond = weight * jnp.sum(jnp.where(past, end - gaps, 0), axis=1)
        number = weight * jnp.sum(past, axis=1, dtype=fixed.dtype)
        value = weight * jnp.sum(to_ramp, axis=1) + slope * beyond
        new = (slopes, value, beyond, number)
        return jax.tree.map(jnp.add, sums, new), jnp.sum(slopes, axis=1)

    zeros = jnp.where(negative, jnp.zeros((), fixed.dtype), 0)
    start = (zeros, *3 * (zeros[:, 0],))
    sums, of_positives = lax.scan(visit, start, (fixed.T, (targets > 0).T))
    of_negatives, value, beyond, number = sums
    # NaN has no rank. Returning it as the weight makes its gradient NaN as well.
    of_positives = jnp.where(jnp.isnan(fixed), fixed, of_positives.T)
    moved = jnp.sum((of_negatives - of_positives) * _change(logits), axis=1)
    moved_end, moved_slope = (_change(jnp.asarray(x, fixed.dtype)) for x in (ramp, leak))
    return value + moved + (slope - 1) * number * moved_end + beyond * moved_slope


def _change(x: Float[Array, " *shape"]) -> Float[Array, " *shape"]:
    """Returns 0 with a derivative of 1 by x, which a factor turns into a slope that is known.

    The derivative is 0 where x is infinite.
    """
    finite = jnp.where(jnp.isinf(x), 0, x)
    return finite - lax.stop_gradient(finite)


def _harmonic(logits: Float[Array, "n C"]) -> Float[Array, " _"]:
    """Returns `H(0), …, H(C)`."""
    steps = np.arange(1, logits.shape[1] + 1)
    return jnp.asarray(np.cumsum([0.0, *(1 / steps)]), logits.dtype)
