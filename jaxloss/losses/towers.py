"""Losses of two towers: each query has one key, and the other keys are its negatives."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Integer

from jaxloss.core import checks
from jaxloss.core.batch import AxisName, Reduction, shares, sum_over
from jaxloss.core.checks import Number
from jaxloss.core.logsumexp import inverse_if_known, is_on, softplus
from jaxloss.core.sharding import divided
from jaxloss.losses.tower_logits import EqualIds, tower_logits
from jaxloss.pairs.fused import weighted_sum
from jaxloss.pairs.rows import Similarity
from jaxloss.pairs.statistics import LOGSUMEXP, SOFTPLUS
from jaxloss.pairs.towers import compare_towers


@divided
def info_nce_loss(
    queries: Float[Array, "n d"],
    keys: Float[Array, "m d"],
    *,
    temperature: Number = 0.07,
    symmetric: bool = True,
    ids: Integer[Array, " n"] | None = None,
    key_ids: Integer[Array, " m"] | None = None,
    equal_ids: EqualIds = "ignore",
    key_where: Bool[Array, " m"] | None = None,
    key_bias: Float[Array, " m"] | None = None,
    own_keys: Float[Array, "n k d"] | None = None,
    own_key_where: Bool[Array, "n k"] | None = None,
    hardness: Number = 0.0,
    margin_of_false_negatives: Number | None = None,
    guide: Float[Array, "n e"] | None = None,
    key_guide: Float[Array, "m e"] | None = None,
    own_key_guide: Float[Array, "n k e"] | None = None,
    guide_margin: Number = 0.0,
    logsumexp_penalty: Number = 0.0,
    positive_in_denominator: bool = True,
    same_tower_negatives: bool = False,
    similarity: Similarity = "cosine",
    metrics: bool = False,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Any:
    r"""InfoNCE: each query finds its key among all keys. The loss of CLIP, MoCo and CPC.

    .. math:: \ell_i = -\tfrac12 \log \frac{e^{s_{ii} / T}}{\sum_{j=1}^m e^{s_{ij} / T}}
       - \tfrac12 \log \frac{e^{s_{ii} / T}}{\sum_{j=1}^n e^{s_{ji} / T}}

    s_ij is the similarity of query i and key j, by default the cosine. Without `symmetric`, the
    loss is twice the first term. Options change the logits s_ij / T, which pairs are negatives, and
    which are positives; all off, they cost nothing.

    The memory of the value and its gradient does not grow with n·m. Take its derivative
    with `jax.grad`: `jax.jvp` of the loss raises a `TypeError`. Its gradient has both modes.

    Args:
      queries: `[n, d]`, such as image features.
      keys: `[m, d]` with m ≥ n, such as text features. Row i is the key of query i. The rows beyond
        n are further negatives, such as hard negatives or a queue. With `axis_name`, the keys of a
        device are those of its own queries, and then its share of the further ones, as many on
        every device. Sharded arrays need no such order.
      temperature: T > 0. It may be traced, and has a gradient. To learn it, train log(1/T), as CLIP
        does.
      symmetric: Whether keys also look for their queries, as in CLIP. The keys beyond n do not.
      ids: integers `[n]`. Pairs of different rows with equal ids are left out, such as two captions
        of one image. A negative id equals no other.
      key_ids: integers `[m]`, beside `ids`. A key of the query's id is left out, such as a sampled
        key, or one of a queue, that is the query's own item (an accidental hit). By default the
        first n keys have `ids`, and the others equal none.
      equal_ids: `"ignore"`, or `"positive"`: each key of an equal id is a positive of the query, as
        its own key is; the first n keys then have `ids`. The first term is the mean over the
        positives p of :math:`-\log (e^{s_{ip} / T} / \sum_j e^{s_{ij} / T})`, as in
        `supervised_contrastive_loss`; so is the second. If queries of an id are equal rows, such as
        an image that is repeated for its captions, this loss cannot fall below the log of their
        number, and `"ignore"` is the better choice.
      key_where: bool `[m]`. False marks padding among the keys. A query whose own key is padding
        does not count. For the rows of a queue after those of the batch, pass
        `jnp.concatenate([jnp.ones(n, bool), queue.labels >= 0])`.
      key_bias: floats `[m]`, added to each logit of a key: −log q for keys that were sampled with
        probability q (logQ correction); −log of its expected number in a batch beside `own_keys`.
      own_keys: `[n, k, d]`, k further keys for each query, which it alone sees as negatives, such
        as its mined hard negatives. They do not look for a query, and have no bias.
      own_key_where: bool `[n, k]`. False marks padding among them.
      hardness: h, usually above 0. The logit of a negative grows by h · s, in which s has no
        gradient, so that hard negatives weigh more.
      margin_of_false_negatives: τ, or None. A negative with s_ij > s_ii + τ is left out: it is
        probably none. For the second term, that is a query with s_ji > s_ii + τ. The choice has no
        gradient.
      guide, key_guide, own_key_guide: `[n, e]`, `[m, e]`, `[n, k, e]`, or None: features of
        queries, keys and own keys by another model, without a gradient. A negative is left out if
        the cosine of its guide and the query's exceeds that of the own key minus `guide_margin`; so
        is, for the second term, a query.
      guide_margin: Any number. It does nothing without `guide`.
      logsumexp_penalty: c, usually above 0. The first term grows by c times the square of the
        log-sum-exp of all logits of the query; so does the second. It keeps logits from drifting.
      positive_in_denominator: False leaves positives out of the sums: the decoupled loss. A query
        without a negative does not count then; with `symmetric`, nor one whose key has none.
      same_tower_negatives: Whether the other queries are negatives of a query, too, and the other
        keys (those beyond n, too) those of a key, by the same ids and options. Without `symmetric`,
        it takes 1.5 times as many operations, and with it twice as many.
      similarity: As in `supervised_contrastive_loss`.
      metrics: Whether to return `(loss, ContrastiveMetrics)` of the queries, as
        `jax.value_and_grad(..., has_aux=True)` takes it. It costs little, as the same tiles serve
        both.
      block_size: The keyword of pairwise losses in `jaxloss`.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A row of
        `where=False` is neither query nor key.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; with `metrics`, a pair of it and
      `ContrastiveMetrics`.

    Raises:
      ValueError: If `temperature` or `block_size` is not positive, `similarity` or `equal_ids` is
        unknown, a mask or a guide comes without its rows, or if there are fewer keys than queries.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> images = jnp.array([[1.0, 0.0], [0.0, 1.0]])
      >>> texts = jnp.array([[2.0, 1.0], [0.0, 3.0]])
      >>> print(f"{jaxloss.info_nce_loss(images, texts, temperature=0.5):.4f}")
      0.2276

    References:
      Radford et al., Learning Transferable Visual Models From Natural Language Supervision,
        ICML 2021 (CLIP), figure 3.
      van den Oord et al., Representation Learning with Contrastive Predictive Coding, 2018,
        eq. (4).
      He et al., Momentum Contrast, CVPR 2020, eq. (1) (without `symmetric`, with a queue).
      Yi et al., Sampling-Bias-Corrected Neural Modeling, RecSys 2019, eq. (3) (`key_bias`).
      Yeh et al., Decoupled Contrastive Learning, ECCV 2022, eq. (6) (`positive_in_denominator`).
      Li et al., Towards General Text Embeddings with Multi-stage Contrastive Learning, 2023,
        eq. (2) (`same_tower_negatives`; there, both sides in one softmax).
      Solatorio, GISTEmbed, 2024, section 3 (`guide`).
      Eysenbach et al., Contrastive Learning as Goal-Conditioned Reinforcement Learning, NeurIPS
        2022 (`logsumexp_penalty`).
    """
    towers = compare_towers(
        queries,
        keys,
        ids=ids,
        key_ids=key_ids,
        key_where=key_where,
        guide=guide,
        key_guide=key_guide,
        guide_similarity="cosine",
        similarity=similarity,
        where=where,
        block_size=block_size,
        axis_name=axis_name,
    )
    dtype = towers.dtype
    temperature = checks.in_range("temperature", temperature, dtype, above=0)
    penalty = checks.in_range("logsumexp_penalty", logsumexp_penalty, dtype)
    logits = tower_logits(
        towers,
        lambda s, T: s / T,
        jnp.asarray(temperature, dtype),
        bound=inverse_if_known(temperature) if similarity == "cosine" else None,
        has_ids=ids is not None,
        equal_ids=equal_ids,
        key_bias=key_bias,
        hardness=hardness,
        margin_of_false_negatives=margin_of_false_negatives,
        guide_margin=guide_margin,
    )
    alone = logits.logits_of_own_keys(queries, own_keys, own_key_where, own_key_guide)
    sides, found = logits.log_sums(
        alone, symmetric=symmetric, same_tower=same_tower_negatives, metrics=metrics
    )
    if positive_in_denominator:
        counts, values = None, [side.losses for side in sides]
    else:
        values = [side.decoupled_losses for side in sides]
        counts = functools.reduce(jnp.logical_and, [side.has_negative for side in sides])
    if is_on(penalty):
        c = jnp.asarray(penalty, dtype)
        values += [c * side.every**2 for side in sides]
    values = sum(values[1:], values[0])
    values = values / 2 if symmetric else values
    loss = towers.reduce(values, counts, sample_weights, reduction)
    if not metrics:
        return loss
    return loss, logits.metrics_of(found, sides[0].every, alone, counts)


@divided
def sigmoid_contrastive_loss(
    queries: Float[Array, "n d"],
    keys: Float[Array, "m d"],
    *,
    scale: Number = 10.0,
    bias: Number = -10.0,
    ids: Integer[Array, " n"] | None = None,
    key_ids: Integer[Array, " m"] | None = None,
    equal_ids: EqualIds = "ignore",
    key_where: Bool[Array, " m"] | None = None,
    key_bias: Float[Array, " m"] | None = None,
    own_keys: Float[Array, "n k d"] | None = None,
    own_key_where: Bool[Array, "n k"] | None = None,
    hardness: Number = 0.0,
    margin_of_false_negatives: Number | None = None,
    guide: Float[Array, "n e"] | None = None,
    key_guide: Float[Array, "m e"] | None = None,
    own_key_guide: Float[Array, "n k e"] | None = None,
    guide_margin: Number = 0.0,
    similarity: Similarity = "cosine",
    metrics: bool = False,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Any:
    r"""The loss of SigLIP: each pair of a query and a key is classified by itself.

    .. math:: \ell_i = -\sum_{j=1}^m \log σ(t_{ij} (a s_{ij} + b)), \quad
       t_{ij} = 1 \text{ if } i = j, \text{ else } -1

    s_ij is the similarity of query i and key j, by default the cosine. Memory, forward mode and
    options are as in `info_nce_loss`.

    Args:
      queries: `[n, d]`, such as image features.
      keys: `[m, d]` with m ≥ n, as in `info_nce_loss`: row i is the key of query i, and the rows
        beyond n are further negatives.
      scale: a > 0.
      bias: b. Scale and bias get gradients, so that they can be learned. The paper starts from
        10 and -10, and learns log a.
      ids, key_ids, equal_ids, key_where, key_bias, own_keys, own_key_where, hardness,
        margin_of_false_negatives, guide, key_guide, own_key_guide, guide_margin, similarity,
        metrics: As in `info_nce_loss`, with t = 1 for each
        positive. The log-sum-exp of `metrics` is that of a s + b.
      block_size: The keyword of pairwise losses in `jaxloss`.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A row of
        `where=False` is neither query nor key.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; with `metrics`, a pair of it and
      `ContrastiveMetrics`.

    Raises:
      ValueError: If `scale` or `block_size` is not positive, if `bias` is not finite, `similarity`
        or `equal_ids` is unknown, a mask or a guide comes without its rows, or if there are fewer
        keys than queries.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> images = jnp.array([[1.0, 0.0], [0.0, 1.0]])
      >>> texts = jnp.array([[2.0, 1.0], [0.0, 3.0]])
      >>> print(f"{jaxloss.sigmoid_contrastive_loss(images, texts):.4f}")
      1.0257

    References:
      Zhai et al., Sigmoid Loss for Language Image Pre-Training, ICCV 2023, section 3.2.
    """
    towers = compare_towers(
        queries,
        keys,
        ids=ids,
        key_ids=key_ids,
        key_where=key_where,
        guide=guide,
        key_guide=key_guide,
        guide_similarity="cosine",
        similarity=similarity,
        where=where,
        block_size=block_size,
        axis_name=axis_name,
    )
    dtype = towers.dtype
    scale = checks.in_range("scale", scale, dtype, above=0)
    bias = checks.in_range("bias", bias, dtype)
    logits = tower_logits(
        towers,
        _on_line,
        _Line(jnp.asarray(scale, dtype), jnp.asarray(bias, dtype)),
        bound=None,
        has_ids=ids is not None,
        equal_ids=equal_ids,
        key_bias=key_bias,
        hardness=hardness,
        margin_of_false_negatives=margin_of_false_negatives,
        guide_margin=guide_margin,
    )
    alone = logits.logits_of_own_keys(queries, own_keys, own_key_where, own_key_guide)
    terms, others = logits.statistic(SOFTPLUS, sign=-1), ()
    if metrics:
        others = (logits.statistic(LOGSUMEXP, has_gradient=False), *logits.watched())
    # The tiles have the own key only where all keys of an id are positives.
    own = jnp.zeros_like(towers.own) if logits.of_ids else softplus(-logits.own)
    if alone is not None:
        own = own + jnp.sum(softplus(alone.logits), axis=1, where=alone.used)
    if reduction == "none":
        (sums, *found), _ = logits.statistics(terms, *others)
        values = own + sums.positive + sums.negative
        loss = towers.reduce(values, sample_weights=sample_weights, reduction=reduction)
    else:
        valid = towers.anchors.valid
        weights = shares(valid, sample_weights, reduction, axis_name, dtype)
        total = jnp.sum(weights * jnp.where(valid, own, 0))
        of_tiles, found = weighted_sum(logits.towers, logits.params, (terms, *others), weights)
        loss = sum_over(total + of_tiles, axis_name)
    if not metrics:
        return loss
    log_sums, *found = found
    every = logits.log_sums_of(log_sums, own_keys=alone).every
    return loss, logits.metrics_of((found, []), every, alone)


class _Line(NamedTuple):
    """Logits `scale · s + bias`."""

    scale: Float[Array, ""]
    bias: Float[Array, ""]


def _on_line(similarities: Float[Array, " ..."], line: _Line) -> Float[Array, " ..."]:
    return line.scale * similarities + line.bias
