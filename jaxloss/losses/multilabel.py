"""Multi-label losses on logits: a sample has several classes, and some may be unknown."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Real

from jaxloss.core import batch, checks
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.checks import Number
from jaxloss.core.linear import widen
from jaxloss.core.logsumexp import softplus
from jaxloss.core.sharding import divided


@divided
def sample_wise_loss(
    logits: Float[Array, "*n C"],
    targets: Real[Array, "*n C"] | Bool[Array, "*n C"],
    *,
    positive_temperature: Number = 4.0,
    negative_temperature: Number = 1.0,
    margin: Number = 0.0,
    where: Bool[Array, " *n"] | None = None,
    sample_weights: Float[Array, " *n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " *n"]:
    r"""Ranks the positive classes of a sample above its negative classes.

    .. math:: \ell_i = \mathrm{softplus}\Big[T_N \log \sum_{c ∈ N_i} e^{z_{ic} / T_N}
       + T_P \log \sum_{c ∈ P_i} e^{-z_{ic} / T_P} + ε\Big]

    The loss does not change if a number is added to all logits of a sample.

    Args:
      logits: `[n, C]`; n may stand for several axes.
      targets: `[n, C]`, multi-label targets.
      positive_temperature: T_P > 0. Values above 1 spread the gradient over all positives.
      negative_temperature: T_N > 0.
      margin: ε = ε_N − ε_P, any number.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        without a positive does not count. A sample with positives but no negative has loss 0.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `positive_temperature` or `negative_temperature` is not positive.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, 0.0, -1.0], [1.0, 1.0, 1.0]])
      >>> targets = jnp.array([[1, 0, 0], [1, 0, -1]])
      >>> losses = jaxloss.sample_wise_loss(logits, targets, reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.1698 0.6931]

    References:
      Kobayashi, Two-Way Multi-Label Loss, CVPR 2023, eq. (14), (15), supplement eq. (iii).
    """
    logits, targets = known_targets(logits, targets, where)
    numbers = positive_temperature, negative_temperature, margin
    values, defined = _soft_gap(logits, targets, 1, numbers)
    return batch.reduce(values, defined, sample_weights, reduction, axis_name)


@divided(result="losses of classes")
def class_wise_loss(
    logits: Float[Array, "*n C"],
    targets: Real[Array, "*n C"] | Bool[Array, "*n C"],
    *,
    positive_temperature: Number = 4.0,
    negative_temperature: Number = 1.0,
    margin: Number = 0.0,
    where: Bool[Array, " *n"] | None = None,
    sample_weights: Float[Array, " *n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " C"]:
    r"""Ranks the positive samples of a class above its negative samples.

    .. math:: \ell_c = \mathrm{softplus}\Big[T_N \log \sum_{i ∈ N_c} s_i e^{z_{ic} / T_N}
       + T_P \log \sum_{i ∈ P_c} s_i e^{-z_{ic} / T_P} + ε\Big]

    The loss does not change if a number is added to all logits of a class.

    Args:
      logits: `[n, C]`; n may stand for several axes.
      targets: `[n, C]`, multi-label targets.
      positive_temperature, negative_temperature, margin: As in `sample_wise_loss`.
      where: A common keyword of `jaxloss`.
      sample_weights: floats `[n]`, s ≥ 0. They weight the samples inside the logarithms: weight 2
        equals the same sample twice, and weight 0 removes it. Negative weights give NaN. Doubling
        all weights changes the loss.
      reduction: Over the classes. `"mean"` and `"sum"` include the classes with a positive.
        `"none"` gives `[C]`, with 0 for the other classes. A class with positives but no negative
        has loss 0.
      axis_name: A common keyword of `jaxloss`. Every device computes the losses of all classes over
        the global batch. Devices exchange C numbers, not the logits.

    Returns:
      A scalar, or `[C]` for `reduction="none"`.

    Raises:
      ValueError: If `positive_temperature` or `negative_temperature` is not positive.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> logits = jnp.array([[2.0, 0.0, -1.0], [1.0, 1.0, 1.0]])
      >>> targets = jnp.array([[1, 0, 0], [0, 1, 0]])
      >>> losses = jaxloss.class_wise_loss(logits, targets, reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.3133 0.3133 0.    ]
      >>> print(f"{jaxloss.class_wise_loss(logits, targets):.4f}")
      0.3133

    References:
      Kobayashi, Two-Way Multi-Label Loss, CVPR 2023, eq. (14), (17), supplement eq. (iii).
    """
    logits, targets = known_targets(logits, targets, where)
    log_weights = 0.0
    if sample_weights is not None:
        weights = batch.weights_of_samples(sample_weights, targets.shape[0], targets.dtype)[:, None]
        targets = jnp.where(weights == 0, -1, targets)  # Weight 0 removes a sample.
        used = jnp.any(targets >= 0, axis=1, keepdims=True)
        log_weights = jnp.log(jnp.where(used, weights, 1))
    numbers = positive_temperature, negative_temperature, margin
    values, defined = _soft_gap(logits, targets, 0, numbers, log_weights, axis_name)
    # Every device has the same C values, so the reduction needs no axis.
    return batch.reduce(values, defined, None, reduction, None)


@divided
def two_way_loss(
    logits: Float[Array, "*n C"],
    targets: Real[Array, "*n C"] | Bool[Array, "*n C"],
    *,
    positive_temperature: Number = 4.0,
    negative_temperature: Number = 1.0,
    margin: Number = 0.0,
    where: Bool[Array, " *n"] | None = None,
    sample_weights: Float[Array, " *n"] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""]:
    r"""Two-way loss: `class_wise_loss` plus `sample_wise_loss`.

    .. math:: \ell = \mathrm{mean}_c \, \ell_c + \mathrm{mean}_i \, \ell_i

    Args:
      logits: `[n, C]`; n may stand for several axes.
      targets: `[n, C]`, multi-label targets.
      positive_temperature, negative_temperature, margin: As in `sample_wise_loss`.
      where, sample_weights, axis_name: As in the two losses.
      reduction: `"mean"`, or `"sum"` for the sum over classes plus the sum over samples. For
        unreduced values, call the two losses with `reduction="none"`.

    Returns:
      A scalar.

    Raises:
      ValueError: If `positive_temperature` or `negative_temperature` is not positive, or
        `reduction` is `"none"`.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> logits = jnp.array([[2.0, 0.0, -1.0], [1.0, 1.0, 1.0]])
      >>> targets = jnp.array([[1, 0, 0], [0, 1, 0]])
      >>> print(f"{jaxloss.two_way_loss(logits, targets):.4f}")
      0.9475

    References:
      Kobayashi, Two-Way Multi-Label Loss, CVPR 2023, eq. (17).
    """
    if reduction == "none":
        raise ValueError(
            "`reduction` must be mean or sum for two_way_loss, got 'none'; for unreduced values, "
            "call class_wise_loss and sample_wise_loss"
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


def _soft_gap(
    logits: Float[Array, "n C"],
    targets: Float[Array, "n C"],
    axis: int,
    numbers: tuple[Any, Any, Any],
    log_weights: Float[Array, "n 1"] | float = 0.0,
    axis_name: AxisName | None = None,
) -> tuple[Float[Array, " k"], Bool[Array, " k"]]:
    """Returns the softplus of the soft maxima over positives and negatives along `axis`.

    Args:
      numbers: Both temperatures and the margin, not checked yet.

    Returns:
      The losses, and whether there is a positive.
    """
    dtype = logits.dtype
    positive_temperature = checks.in_range("positive_temperature", numbers[0], dtype, above=0)
    negative_temperature = checks.in_range("negative_temperature", numbers[1], dtype, above=0)
    margin = checks.in_range("margin", numbers[2], dtype)

    def soft_maximum(
        signed: Float[Array, "n C"],
        members: Bool[Array, "n C"],
        temperature: Number,
        counts: Bool[Array, " k"] | None = None,
    ) -> tuple[Float[Array, " k"], Float[Array, " k"], Bool[Array, " k"]]:
        """Returns a peak, which has no gradient, what is added to it, and whether there is any."""
        # Relative to the peak, the derivative by the temperature does not cancel.
        gaps, peak = relative_to_largest(signed, members, axis, axis_name)
        traced = isinstance(temperature, jax.Array)
        if counts is not None:  # Elsewhere, none has a gradient, and a traced T meets no NaN.
            elsewhere = 0 if traced else lax.stop_gradient(gaps)
            gaps = jnp.where(jnp.expand_dims(counts, axis), gaps, elsewhere)
        # The exponential of this is 0. Infinity would be NaN times 0, and a lower T gives it.
        if traced or temperature < 1:
            gaps = jnp.maximum(gaps, -2000 * lax.stop_gradient(temperature))
        shares = jnp.exp(gaps / temperature + log_weights)
        total = batch.sum_over(jnp.sum(shares, axis), axis_name)
        not_empty = total != 0
        log_total = jnp.log(jnp.where(not_empty, total, 1))
        return jnp.squeeze(peak, axis), temperature * log_total, not_empty

    logits = above_lowest(logits)
    low, positive, has_positive = soft_maximum(-logits, targets > 0, positive_temperature)
    # Without a positive, a NaN among the negatives reaches no gradient.
    peak, negative, has_negative = soft_maximum(
        logits, targets == 0, negative_temperature, has_positive
    )
    # Without a negative the gap is −∞ and its softplus 0. `positive − positive` is 0 or NaN.
    gap = jnp.where(has_positive, (peak + low) + (negative + positive) + margin, 0)
    values = jnp.where(has_negative, softplus(gap), positive - positive)
    return values, has_positive


def checked_targets(
    logits: Any, targets: Any, where: Any, name: str = "targets", hint: str = ""
) -> tuple[Float[Array, "n C"], Float[Array, "n C"], Bool[Array, "n C"]]:
    """Checks logits and targets. Returns both in one dtype, and the mask of known targets."""
    logits = checks.floating("logits", logits, "n C")
    (logits,) = widen(logits)
    targets = checks.as_array(name, targets)
    checks.same_shape(name, targets, "logits", logits, hint)
    checks.not_complex(name, targets)
    targets = targets.astype(logits.dtype)
    mask = checks.row_mask(where, "logits", logits)
    known = ~(targets < 0)  # True for NaN, so that NaN stays visible.
    return logits, targets, known if mask is None else known & mask[:, None]


def known_targets(
    logits: Any, targets: Any, where: Any
) -> tuple[Float[Array, "n C"], Float[Array, "n C"]]:
    """Checks logits and targets, and sets them to 0 and −1 where they are unknown or padding."""
    logits, targets, known = checked_targets(logits, targets, where)
    # A NaN target stays visible: it becomes a positive with a logit and a gradient of NaN.
    nan = known & jnp.isnan(targets)
    logits = jnp.where(known, logits, 0) * (1 + batch.nan_where(nan, logits.dtype))
    return logits, jnp.where(known, jnp.where(nan, 1, targets), -1)


def relative_to_largest(
    logits: Float[Array, "n C"],
    members: Bool[Array, "n C"],
    axis: int,
    axis_name: AxisName | None = None,
) -> tuple[Float[Array, "n C"], Float[Array, "a b"]]:
    """Returns the logits of members relative to the largest one, and this, without a gradient.

    The others get the lowest float, which is the largest of an empty set: it counts as 0.
    """
    lowest = jnp.finfo(logits.dtype).min
    logits = jnp.where(members, logits, lowest)
    peak = jnp.max(logits, axis, initial=lowest, keepdims=True)
    peak = batch.max_over(peak, axis_name)
    peak = lax.stop_gradient(jnp.where(peak == lowest, 0, peak))
    return logits - peak, peak


@jax.custom_jvp
def above_lowest(x: Float[Array, "n C"]) -> Float[Array, "n C"]:
    """Returns finite numbers in place of ±∞, above the lowest float, which marks an empty set.

    Its derivative is 1, which a share of 0 multiplies: XLA need not store where x is ±∞.
    """
    limits = jnp.finfo(x.dtype)
    return jnp.clip(x, limits.min * (1 - limits.eps), limits.max * (1 - limits.eps))


@above_lowest.defjvp
def _above_lowest_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return above_lowest(*primals), *tangents
