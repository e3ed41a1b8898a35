"""Metric losses on pairs: every sample is compared with the others, or with references."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Integer

from jaxloss.core import checks
from jaxloss.core.batch import AxisName, Reduction, zero_or_nan
from jaxloss.core.checks import Number
from jaxloss.core.logsumexp import softplus_of_gap_where, softplus_where
from jaxloss.core.sharding import divided
from jaxloss.losses.contrastive_metrics import Watched, contrastive_metrics, watched
from jaxloss.pairs.comparison import Comparison, compare
from jaxloss.pairs.queue import Queue
from jaxloss.pairs.rows import Similarity
from jaxloss.pairs.statistics import LOGSUMEXP, PEAK, ByClass, Pair, Statistic, over_temperature


@divided
def nca_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    *,
    temperature: Number = 1.0,
    metrics: bool = False,
    references: Float[Array, "m d"] | Queue | None = None,
    reference_labels: Integer[Array, " m"] | None = None,
    reference_where: Bool[Array, " m"] | None = None,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Any:
    r"""Neighbourhood component analysis (NCA).

    .. math:: \ell_i = -\log \sum_{j≠i,\, y_j = y_i} e^{-\|x_i - x_j\|^2 / T}
       + \log \sum_{j≠i} e^{-\|x_i - x_j\|^2 / T}

    The memory of the value and its gradient does not grow with n². Take its derivative
    with `jax.grad`: `jax.jvp` of the loss raises a `TypeError`. Its gradient has both modes.

    Args:
      features: `[n, d]`. Squared distances grow with d. A temperature of d / 8 to d, or features
        divided by √d, keeps the exponentials in a useful range. Distances far below those between
        other rows are rounding errors: see *Distances* in `jaxloss`.
      labels: `[n]`, class indices without an upper limit.
      temperature: T > 0. The default is the formula of the papers, and fits features of length 1.
      metrics: As in `supervised_contrastive_loss`; similarities are the negative squared distances.
      references, reference_labels, reference_where, block_size: The keywords of pairwise losses in
        `jaxloss`.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        without another sample or a reference of its class, on any device, does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; with `metrics`, a pair of it and
      `ContrastiveMetrics`.

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
    pairs = compare(
        features,
        checks.not_multi_hot("labels", labels),
        references=references,
        reference_labels=reference_labels,
        reference_where=reference_where,
        similarity="negative_squared_distance",
        where=where,
        block_size=block_size,
        axis_name=axis_name,
    )
    temperature = checks.in_range("temperature", temperature, pairs.dtype, above=0)
    logits = Statistic(LOGSUMEXP, over_temperature, is_smooth=True)
    others = watched(over_temperature) if metrics else ()
    sums, *found = pairs.statistics(jnp.asarray(temperature), logits, *others)
    # −log(p / (p + q)) = softplus(log q − log p) does not cancel for a small loss.
    defined = sums.has_positive & sums.has_negative
    values = softplus_of_gap_where(defined, sums.negative, sums.positive)
    own = jnp.where(sums.has_positive, sums.positive, 0)
    values = values + jnp.where(sums.has_negative, 0, zero_or_nan(own))
    loss = pairs.reduce(values, sums.has_positive, sample_weights, reduction)
    if not metrics:
        return loss
    return loss, contrastive_metrics(pairs, Watched(*found), own + values, sums.has_positive)


@divided
def multi_similarity_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    *,
    positive_scale: Number = 2.0,
    negative_scale: Number = 50.0,
    threshold: Number = 0.5,
    mining_margin: Number | None = None,
    similarity: Similarity = "cosine",
    references: Float[Array, "m d"] | Queue | None = None,
    reference_labels: Integer[Array, " m"] | None = None,
    reference_where: Bool[Array, " m"] | None = None,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Multi-similarity loss.

    .. math:: \ell_i = \tfrac1α \log\Big(1 + \sum_{p ∈ P_i} e^{-α (s_{ip} - λ)}\Big)
       + \tfrac1β \log\Big(1 + \sum_{n ∈ N_i} e^{β (s_{in} - λ)}\Big)

    s_ij is the similarity, by default the cosine. P_i are the references of the anchor's class, and
    N_i those of other classes; neither contains the anchor. With `mining_margin` ε, only pairs that
    are hard to tell apart are in the sums: negatives with :math:`s_{in} > \min_P s - ε`, and
    positives with :math:`s_{ip} < \max_N s + ε`.
    An anchor without positives has no mined negatives, and vice versa.

    Memory and forward mode are as in `nca_loss`.

    Args:
      features: `[n, d]`.
      labels: `[n]`, class indices without an upper limit.
      positive_scale, negative_scale: α > 0 and β > 0.
      threshold: λ, the cosine at which a single pair has half of its largest weight.
      mining_margin: ε ≥ 0, or None for all pairs. The choice of pairs has no gradient.
      similarity: As in `supervised_contrastive_loss`.
      references, reference_labels, reference_where, block_size: The keywords of pairwise losses in
        `jaxloss`.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        without a positive counts: its first term is 0.

    Returns:
      A scalar, or `[n]` for `reduction="none"`. The paper has λ = 1. The authors' code has β = 40,
      always mines with ε = 0.1, and divides by all samples of the batch.

    Raises:
      ValueError: If `positive_scale`, `negative_scale` or `block_size` is not positive,
        `mining_margin` is negative, or `similarity` is unknown.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features = jnp.array([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0], [-1.0, 0.0]])
      >>> labels = jnp.array([0, 0, 1, 1])
      >>> print(f"{jaxloss.multi_similarity_loss(features, labels):.4f}")
      0.6279
      >>> print(f"{jaxloss.multi_similarity_loss(features, labels, mining_margin=0.1):.4f}")
      0.3889

    References:
      Wang et al., Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning,
      CVPR 2019.
    """
    pairs = compare(
        features,
        checks.not_multi_hot("labels", labels),
        references=references,
        reference_labels=reference_labels,
        reference_where=reference_where,
        similarity=similarity,
        where=where,
        block_size=block_size,
        axis_name=axis_name,
    )
    alpha = checks.in_range("positive_scale", positive_scale, pairs.dtype, above=0)
    beta = checks.in_range("negative_scale", negative_scale, pairs.dtype, above=0)
    threshold = checks.in_range("threshold", threshold, pairs.dtype)
    margin, mask = 0.0, None
    if mining_margin is not None:
        margin = checks.in_range("mining_margin", mining_margin, pairs.dtype, at_least=0)
        pairs, mask = pairs.given(_hardest(pairs)), _is_hard
    logits = Statistic(LOGSUMEXP, _multi_similarity_logit, mask, is_smooth=True)
    (sums,) = pairs.statistics((alpha, beta, threshold, margin), logits)
    positive = softplus_where(sums.has_positive, sums.positive)
    negative = softplus_where(sums.has_negative, sums.negative)
    values = positive / jnp.asarray(alpha, pairs.dtype) + negative / jnp.asarray(beta, pairs.dtype)
    return pairs.reduce(values, jnp.ones_like(sums.has_positive), sample_weights, reduction)


def _multi_similarity_logit(pair: Pair, params: tuple[Array, ...]) -> Float[Array, "a b"]:
    alpha, beta, threshold, _ = params
    return (pair.similarity - threshold) * jnp.where(pair.same, -alpha, beta)


def _hardest(pairs: Comparison) -> ByClass:
    """Returns the similarities with which those of positives and of negatives are compared."""
    hardness = Statistic(PEAK, _hardness, is_smooth=True, has_gradient=False)
    (hardest,) = pairs.statistics((), hardness)
    return ByClass(hardest.negative, -hardest.positive)


def _hardness(pair: Pair, _params: tuple[()]) -> Float[Array, "a b"]:
    return jnp.where(pair.same, -pair.similarity, pair.similarity)


def _is_hard(pair: Pair, params: tuple[Array, ...]) -> Bool[Array, "a b"]:
    # The difference comes first: beside a large similarity, the margin would be lost.
    s, hardest = pair.similarity, pair.anchor
    gaps = jnp.where(pair.same, s - hardest.positive, hardest.negative - s)
    return ~(gaps >= params[3])  # A NaN is hard, so that it stays visible.


@divided
def circle_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    *,
    margin: Number = 0.4,
    scale: Number = 80.0,
    similarity: Similarity = "cosine",
    references: Float[Array, "m d"] | Queue | None = None,
    reference_labels: Integer[Array, " m"] | None = None,
    reference_where: Bool[Array, " m"] | None = None,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Circle loss.

    .. math:: \ell_i = \log\Big(1 + \sum_{n ∈ N_i} e^{γ [s_{in} + m]_+ (s_{in} - m)}
       \sum_{p ∈ P_i} e^{-γ [1 + m - s_{ip}]_+ (s_{ip} - 1 + m)}\Big)

    s_ij is the similarity, by default the cosine. P_i are the references of the anchor's class, and
    N_i those of other classes; neither contains the anchor. The brackets are weights that have no
    gradient.

    Memory and forward mode are as in `nca_loss`.

    Args:
      features: `[n, d]`.
      labels: `[n]`, class indices without an upper limit.
      margin: m, usually between 0 and 1. A smaller margin is stricter.
      scale: γ > 0.
      similarity: As in `supervised_contrastive_loss`.
      references, reference_labels, reference_where, block_size: The keywords of pairwise losses in
        `jaxloss`.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        without a positive or without a negative does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `scale` or `block_size` is not positive, or `similarity` is unknown.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features = jnp.array([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0], [-1.0, 0.0]])
      >>> print(f"{jaxloss.circle_loss(features, jnp.array([0, 0, 1, 1]), scale=4.0):.4f}")
      3.1335

    References:
      Sun et al., Circle Loss: A Unified Perspective of Pair Similarity Optimization, CVPR 2020,
      eq. (4) to (8).
    """
    pairs = compare(
        features,
        checks.not_multi_hot("labels", labels),
        references=references,
        reference_labels=reference_labels,
        reference_where=reference_where,
        similarity=similarity,
        where=where,
        block_size=block_size,
        axis_name=axis_name,
    )
    margin = checks.in_range("margin", margin, pairs.dtype)
    scale = checks.in_range("scale", scale, pairs.dtype, above=0)
    logits = Statistic(LOGSUMEXP, _circle_logit, is_smooth=True)
    (sums,) = pairs.statistics((jnp.asarray(margin), jnp.asarray(scale)), logits)
    defined = sums.has_positive & sums.has_negative
    values = softplus_where(defined, sums.positive + sums.negative)
    return pairs.reduce(values, defined, sample_weights, reduction)


def _circle_logit(pair: Pair, params: tuple[Array, Array]) -> Float[Array, "a b"]:
    margin, scale = params
    signed = jnp.where(pair.same, 1 - pair.similarity, pair.similarity)  # 0 at best.
    weights = lax.stop_gradient(jax.nn.relu(signed + margin))
    return scale * weights * (signed - margin)
