"""Metric losses on features: every sample is compared with the others of its batch."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer

from jaxloss import _checks
from jaxloss._batch import (
    AxisName,
    Reduction,
    checked_rows,
    gather,
    labelled_rows,
    logsumexp_over,
    nan_where_no_class,
    own_positions,
    reduce,
    reference_rows,
    sum_over,
)
from jaxloss._checks import Number
from jaxloss._linear import exact_product, squared_distances, widen
from jaxloss._tiles import LOGSUMEXP, Statistic, anchors_and_references, pair_statistics

# NCA ----


def nca_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    *,
    temperature: Number = 1.0,
    references: Float[Array, "m d"] | None = None,
    reference_labels: Integer[Array, " m"] | None = None,
    reference_where: Bool[Array, " m"] | None = None,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Neighbourhood component analysis (NCA).

    .. math:: \ell_i = -\log \sum_{j≠i,\, y_j = y_i} e^{-\|x_i - x_j\|^2 / T}
       + \log \sum_{j≠i} e^{-\|x_i - x_j\|^2 / T}

    The memory does not grow with n². There is no forward mode: `jax.jvp` of the loss raises an
    error. `jax.jvp` and `jax.grad` of its gradient work.

    Args:
      features: `[n, d]`. Squared distances grow with d. A temperature of about d, or features
        divided by √d, keeps the exponentials in a useful range.
      labels: `[n]`, class indices without an upper limit.
      temperature: T > 0.
      references, reference_labels, reference_where, block_size: The keywords of pairwise losses in
        `jaxloss`.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        without another sample or a reference of its class, on any device, does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `temperature` or `block_size` is not positive.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
      >>> losses = jaxloss.nca_loss(features, jnp.array([0, 0, 1]), reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.0486 0.0181 0.    ]

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024 (NCA).
      Goldberger et al., Neighbourhood Components Analysis, NeurIPS 2004.
    """
    temperature = _checks.in_range("temperature", temperature, above=0)
    features, labels, valid = checked_rows("features", features, labels, where)
    given = reference_rows(references, reference_labels, reference_where, features)
    anchors, compared = anchors_and_references(features, labels, valid, given, axis_name)
    (sums,) = pair_statistics(
        (Statistic(LOGSUMEXP, _over_temperature),),
        jnp.asarray(temperature),
        anchors,
        compared,
        similarity="negative_squared_distance",
        block_size=block_size,
        axis_name=axis_name,
    )
    has_positive, has_negative = sums.positive != -jnp.inf, sums.negative != -jnp.inf
    # −log(p / (p + q)) = softplus(log q − log p) does not cancel for a small loss.
    values = _softplus_where(has_positive & has_negative, sums.negative - sums.positive)
    return reduce(values, valid & has_positive, sample_weights, reduction, axis_name)


def _over_temperature(
    similarities: Float[Array, "a b"], _positives: Bool[Array, "a b"], temperature: Float[Array, ""]
) -> Float[Array, "a b"]:
    return similarities / temperature


# Prototypical loss ----


def prototypical_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    *,
    num_classes: int | None = None,
    temperature: Number = 1.0,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Prototypical loss (Proto): softmax over the distances to the class means.

    .. math:: \ell_i = -\log \frac{e^{-\|x_i - μ_{y_i∖i}\|^2 / T}}
       {\sum_c e^{-\|x_i - μ_{c∖i}\|^2 / T}},
       \quad μ_{c∖i} = \underset{j≠i,\, y_j = c}{\mathrm{mean}} x_j

    The anchor is left out of its own class mean only. There
    `x_i − μ_{y∖i} = n_y/(n_y−1) · (x_i − μ_y)`, so no array of n·C·d numbers is needed.

    Args:
      features: `[n, d]`. As for `nca_loss`, a temperature of about d keeps the exponentials in a
        useful range.
      labels: `[n]`, class indices. They have no upper limit without `num_classes`.
      num_classes: C. If given, the loss computes C class means, and devices exchange only these.
        If None, it computes a mean per sample by an n×n membership product.
      temperature: T > 0.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        without another sample of its class, on any device, does not count. A class without a sample
        in the batch is not a candidate.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `temperature` or `num_classes` is not positive.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
      >>> labels = jnp.array([0, 0, 1, 1])
      >>> print(f"{jaxloss.prototypical_loss(features, labels, num_classes=2):.4f}")
      0.2415
      >>> print(f"{jaxloss.prototypical_loss(features, labels):.4f}")
      0.2415

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, supplement eq. (i).
      Snell et al., Prototypical Networks for Few-shot Learning, NeurIPS 2017.
    """
    temperature = _checks.in_range("temperature", temperature, above=0)
    if num_classes is not None:
        _checks.positive_count("num_classes", num_classes)
    features, labels, valid = labelled_rows("features", features, labels, where)
    (features,) = widen(features)
    if num_classes is None:
        means = _means_by_sample(features, labels, valid, axis_name)
    else:
        means = _means_by_class(features, labels, valid, num_classes, axis_name)

    own_size = means.sizes[means.own]
    leave_one_out = own_size / jnp.maximum(own_size - 1, 1)
    logits = -squared_distances(means.anchors, means.means) / temperature
    is_own = means.is_own & means.present[None, :]
    is_rival = ~means.is_own & means.present[None, :]
    own_logit = jnp.sum(jnp.where(is_own, logits, 0), axis=1) * leave_one_out**2
    log_odds = logsumexp_over(logits, is_rival, axis=1) - own_logit
    values = _softplus_where(jnp.any(is_rival, axis=1), log_odds)
    defined = valid & (own_size >= 2)
    if num_classes is not None:
        values = nan_where_no_class(values, labels, valid, num_classes)
        defined = defined | (valid & (labels >= num_classes))
    return reduce(values, defined, sample_weights, reduction, axis_name)


class _Means(NamedTuple):
    """Anchors and the class means of the global batch, both relative to the batch mean."""

    anchors: Float[Array, "n d"]
    means: Float[Array, "k d"]
    sizes: Float[Array, " k"]
    """The number of samples in each mean."""
    present: Bool[Array, " k"]
    """Which means are candidates: each class of the batch once."""
    own: Integer[Array, " n"]
    """The index of a mean of the anchor's class."""
    is_own: Bool[Array, "n k"]
    """Which means are of the anchor's class."""


def _means_by_sample(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    valid: Bool[Array, " n"],
    axis_name: AxisName | None,
) -> _Means:
    """Returns a class mean per sample of the global batch, for labels without a limit."""
    anchors, references = _rows_and_references(features, labels, valid, axis_name)
    same_class = references.labels[:, None] == references.labels[None, :]
    member = same_class & references.valid[:, None] & references.valid[None, :]
    sizes = jnp.sum(member, axis=1).astype(features.dtype)
    sums = exact_product(member.astype(features.dtype), references.features)
    # A class is a candidate at its first sample only.
    earlier = references.positions[None, :] < references.positions[:, None]
    return _Means(
        anchors=anchors.features,
        means=sums / jnp.maximum(sizes, 1)[:, None],
        sizes=sizes,
        present=references.valid & ~jnp.any(member & earlier, axis=1),
        own=anchors.positions,
        is_own=labels[:, None] == references.labels[None, :],
    )


def _means_by_class(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    valid: Bool[Array, " n"],
    num_classes: int,
    axis_name: AxisName | None,
) -> _Means:
    """Returns the C class means. Devices exchange sums over classes, not features."""
    is_own = labels[:, None] == jnp.arange(num_classes, dtype=labels.dtype)[None, :]
    member = (is_own & valid[:, None]).astype(features.dtype)
    sizes = sum_over(jnp.sum(member, axis=0), axis_name)
    total = sum_over(jnp.sum(features, axis=0), axis_name)
    number = sum_over(jnp.sum(valid.astype(features.dtype)), axis_name)
    anchors = _centered(features, _mean(total, number))
    sums = sum_over(exact_product(member.T, anchors), axis_name)
    return _Means(
        anchors=anchors,
        means=sums / jnp.maximum(sizes, 1)[:, None],
        sizes=sizes,
        present=sizes > 0,
        own=jnp.clip(labels, 0, num_classes - 1),
        is_own=is_own,
    )


# Both ----


class _Rows(NamedTuple):
    """Samples, with their positions in the global batch."""

    features: Float[Array, "n d"]
    labels: Integer[Array, " n"]
    valid: Bool[Array, " n"]
    positions: Int32[Array, " n"]


def _rows_and_references(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    valid: Bool[Array, " n"],
    axis_name: AxisName | None,
) -> tuple[_Rows, _Rows]:
    """Returns the samples of this device and of all devices, both relative to the batch mean."""
    all_features, all_labels = gather(features, axis_name), gather(labels, axis_name)
    all_valid = gather(valid, axis_name)
    mean = _mean(jnp.sum(all_features, axis=0), jnp.sum(all_valid))
    own = own_positions(features.shape[0], axis_name)
    positions = jnp.arange(all_labels.shape[0], dtype=jnp.int32)
    return (
        _Rows(_centered(features, mean), labels, valid, own),
        _Rows(_centered(all_features, mean), all_labels, all_valid, positions),
    )


def _mean(
    total: Float[Array, " d"], number: Integer[Array, ""] | Float[Array, ""]
) -> Float[Array, " d"]:
    return total / jnp.maximum(number, 1).astype(total.dtype)


def _centered(rows: Float[Array, "n d"], center: Float[Array, " d"]) -> Float[Array, "n d"]:
    """Returns `rows − center`. Distances stay the same and are rounded less far from zero."""
    return rows - lax.stop_gradient(center)[None, :]


def _softplus_where(condition: Bool[Array, " n"], x: Float[Array, " n"]) -> Float[Array, " n"]:
    """Returns `log(1 + e^x)`, and 0 where the condition is False."""
    return jnp.where(condition, jax.nn.softplus(jnp.where(condition, x, 0)), 0)
