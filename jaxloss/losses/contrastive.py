"""Contrastive losses: a softmax over cosines picks the references of an anchor's own class."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Integer, Real

from jaxloss.core import checks
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.checks import Number
from jaxloss.core.logsumexp import inverse_if_known, softplus, softplus_of_gap_where
from jaxloss.core.sharding import divided
from jaxloss.losses.contrastive_metrics import Watched, contrastive_metrics, num_others, watched
from jaxloss.pairs.comparison import compare
from jaxloss.pairs.fused import in_two_stages
from jaxloss.pairs.queue import Queue
from jaxloss.pairs.rows import Similarity
from jaxloss.pairs.statistics import LOGSUMEXP, SUM, ByClass, Pair, Statistic, over_temperature


@divided
def supervised_contrastive_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"] | Real[Array, "n C"] | Bool[Array, "n C"],
    *,
    temperature: Number = 0.1,
    denominator: Literal["all", "negatives"] = "all",
    similarity: Similarity = "cosine",
    metrics: bool = False,
    references: Float[Array, "m d"] | Queue | None = None,
    reference_labels: Integer[Array, " m"] | Real[Array, "m C"] | Bool[Array, "m C"] | None = None,
    reference_where: Bool[Array, " m"] | None = None,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Any:
    r"""Supervised contrastive loss (SupCon), and SINCERE.

    .. math:: \ell_i = -\frac{1}{|P_i|} \sum_{p ∈ P_i}
       \log \frac{e^{s_{ip} / T}}{\sum_{a ∈ P_i ∪ N_i} e^{s_{ia} / T}}

    s_ij is the similarity, by default the cosine. P_i are the references of the anchor's class, and
    N_i those of other classes; neither contains the anchor. With `denominator="negatives"`, a
    positive competes with the negatives only, not with other positives: the sum runs over p and
    N_i.

    With multi-hot targets, each positive has a weight, the Jaccard overlap of the two sets of
    classes. The mean over positives becomes a weighted mean. Pairs without overlap are negatives.

    The memory of the value and its gradient does not grow with n². Take its derivative
    with `jax.grad`: `jax.jvp` of the loss raises a `TypeError`. Its gradient has both modes.

    Args:
      features: `[n, d]`.
      labels: Class indices `[n]` without an upper limit, or multi-hot targets `[n, C]` of at least
        two classes. A class that is unknown for one of two samples is left out of their overlap.
      temperature: T > 0. It may be traced, and has a gradient.
      denominator: `"all"`, or `"negatives"`. With one positive for every anchor, both are equal.
      similarity: s_ij: `"cosine"`, `"inner"`, `"negative_squared_distance"` −‖x − y‖², or
        `"negative_distance"` −‖x − y‖. A zero vector has cosines of 0 and no gradient. Distances
        far below those between other rows are rounding errors: see *Distances* in `jaxloss`.
      metrics: Whether to return `(loss, ContrastiveMetrics)`, as `jax.value_and_grad(...,
        has_aux=True)` takes it. It costs little, as the same tiles serve both.
      references, reference_labels, reference_where, block_size: The keywords of pairwise losses in
        `jaxloss`. The labels of references are of the same kind as `labels`.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        without a positive does not count, nor one whose targets are all unknown.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; with `metrics`, a pair of it and
      `ContrastiveMetrics`. The code of Khosla et al. multiplies the loss by T / 0.07.

    Raises:
      ValueError: If `temperature` or `block_size` is not positive, or `denominator` or `similarity`
        is unknown.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features = jnp.array([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0], [-1.0, 0.0]])
      >>> labels = jnp.array([0, 0, 1, 1])
      >>> loss = jaxloss.supervised_contrastive_loss(features, labels, temperature=0.5)
      >>> print(f"{loss:.4f}")
      0.8861
      >>> targets = jnp.array([[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1]])
      >>> loss = jaxloss.supervised_contrastive_loss(features, targets, temperature=0.5)
      >>> print(f"{loss:.4f}")
      0.4607

    References:
      Khosla et al., Supervised Contrastive Learning, NeurIPS 2020, eq. (2), L_out.
      Feeney and Hughes, SINCERE: Supervised Information Noise-Contrastive Estimation REvisited,
      2023 (`denominator="negatives"`). With classes of two samples, it is NT-Xent: Chen et al.,
      SimCLR, ICML 2020, eq. (1).
      Lin et al., An Effective Deployment of Contrastive Learning in Multi-label Text
      Classification, Findings of ACL 2023 (Jaccard overlaps).
    """
    checks.choice("denominator", denominator, ("all", "negatives"))
    pairs = compare(
        features,
        labels,
        references=references,
        reference_labels=reference_labels,
        reference_where=reference_where,
        similarity=similarity,
        where=where,
        block_size=block_size,
        axis_name=axis_name,
    )
    temperature = checks.in_range("temperature", temperature, pairs.dtype, above=0)
    params = jnp.asarray(temperature)
    bound = inverse_if_known(temperature) if similarity == "cosine" else None
    logits = Statistic(LOGSUMEXP, over_temperature, bound=bound, is_smooth=True)
    overlap = Statistic(SUM, _overlap, is_smooth=True)
    others = watched(over_temperature)[: 2 + (checks.rank(labels) == 2)] if metrics else ()
    if denominator == "all":
        weighted_logit = Statistic(SUM, _weighted_logit, is_smooth=True)
        sums, weights, weighted, *found = pairs.statistics(
            params, logits, overlap, weighted_logit, *others
        )
        total_weight = jnp.where(sums.has_positive, weights.positive, 1)
        # A single positive is its own log-sum-exp, so that a small loss does not cancel.
        among_positives = sums.positive - weighted.positive / total_weight
        values = among_positives + _against_negatives(sums)
    else:
        (sums, weights, *found), (weighted,) = in_two_stages(
            pairs,
            params,
            (logits, overlap, *others),
            _of_negatives,
            (Statistic(SUM, _weighted_loss, is_smooth=True),),
        )
        total_weight = jnp.where(sums.has_positive, weights.positive, 1)
        means = weighted.positive / total_weight
        # Without negatives, a NaN is not hidden either.
        values = jnp.where(sums.has_negative | jnp.isnan(means), means, 0)
    loss = pairs.reduce(values, sums.has_positive, sample_weights, reduction)
    if not metrics:
        return loss
    log_sums = sums.positive + _against_negatives(sums)
    largest, total, *counted = found
    # Overlaps of class indices are 1: their sum is the number of positives.
    number = counted[0].positive if counted else weights.positive
    numbers = ByClass(number, num_others(pairs) - number)
    found = Watched(largest, total, numbers)
    return loss, contrastive_metrics(pairs, found, log_sums, sums.has_positive)


def _against_negatives(sums: ByClass) -> Float[Array, " n"]:
    """Returns by how much the log-sum-exp of all logits exceeds that of the positives."""
    defined = sums.has_positive & sums.has_negative
    return softplus_of_gap_where(defined, sums.negative, sums.positive)


def _overlap(pair: Pair, _: Array) -> Float[Array, "a b"]:
    return pair.same.astype(pair.similarity.dtype)


def _weighted_logit(pair: Pair, temperature: Float[Array, ""]) -> Float[Array, "a b"]:
    return pair.same.astype(pair.similarity.dtype) * pair.similarity / temperature


def _of_negatives(first: tuple[ByClass, ...]) -> Float[Array, " *n"]:
    """Returns the log-sum-exps of the negatives; 0 without any."""
    sums, *_ = first
    return jnp.where(sums.has_negative, sums.negative, 0)


def _weighted_loss(pair: Pair, temperature: Float[Array, ""]) -> Float[Array, "a b"]:
    """Of a positive against the log-sum-exp of the anchor's negatives."""
    losses = softplus(pair.anchor - pair.similarity / temperature)
    return pair.same.astype(pair.similarity.dtype) * losses
