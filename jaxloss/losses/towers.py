"""Losses of two towers: each query has one key, and the other keys are its negatives."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Integer

from jaxloss.core import checks
from jaxloss.core.batch import AxisName, Reduction, shares, sum_over
from jaxloss.core.checks import Number
from jaxloss.core.logsumexp import inverse_if_known, softplus
from jaxloss.core.sharding import divided
from jaxloss.pairs.comparison import compare_towers
from jaxloss.pairs.fused import weighted_sum
from jaxloss.pairs.statistics import LOGSUMEXP, SOFTPLUS, Statistic


@divided
def info_nce_loss(
    queries: Float[Array, "n d"],
    keys: Float[Array, "m d"],
    *,
    temperature: Number = 0.07,
    symmetric: bool = True,
    ids: Integer[Array, " n"] | None = None,
    key_where: Bool[Array, " m"] | None = None,
    normalize: bool = True,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""InfoNCE: each query finds its key among all keys. The loss of CLIP, MoCo and CPC.

    .. math:: \ell_i = -\tfrac12 \log \frac{e^{s_{ii} / T}}{\sum_{j=1}^m e^{s_{ij} / T}}
       - \tfrac12 \log \frac{e^{s_{ii} / T}}{\sum_{j=1}^n e^{s_{ji} / T}}

    s_ij is the cosine of query i and key j. Without `symmetric`, the loss is twice the first term.
    The memory of the value and its gradient does not grow with n·m. There is no forward mode:
    `jax.jvp` of the loss raises a `TypeError`. `jax.jvp` and `jax.grad` of its gradient work.

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
      key_where: bool `[m]`. False marks padding among the keys. A query whose own key is padding
        does not count. For the rows of a queue after those of the batch, pass
        `jnp.concatenate([jnp.ones(n, bool), queue.labels >= 0])`.
      normalize: Whether s_ij is the cosine. If False, it is the inner product.
      block_size: The keyword of pairwise losses in `jaxloss`.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A row of
        `where=False` is neither query nor key.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `temperature` or `block_size` is not positive, or if there are fewer keys than
        queries.

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
    """
    towers = compare_towers(
        queries,
        keys,
        ids=ids,
        key_where=key_where,
        similarity="cosine" if normalize else "inner",
        where=where,
        block_size=block_size,
        axis_name=axis_name,
    )
    dtype = towers.own.dtype
    temperature = checks.in_range("temperature", temperature, dtype, above=0)
    bound = inverse_if_known(temperature) if normalize else None
    temperature = jnp.asarray(temperature, dtype)
    logits = Statistic(LOGSUMEXP, lambda s, T: s / T, bound=bound, is_smooth=True)
    own = towers.own / temperature
    # −log(e^a / (e^a + e^b)) = softplus(b − a) does not cancel for a small loss.
    if symmetric:
        (of_queries,), (of_keys,) = towers.statistics(temperature, logits, of_keys=True)
        values = (softplus(of_queries - own) + softplus(of_keys[: own.shape[0]] - own)) / 2
    else:
        (of_queries,) = towers.statistics(temperature, logits)
        values = softplus(of_queries - own)
    return towers.reduce(values, sample_weights=sample_weights, reduction=reduction)


@divided
def sigmoid_contrastive_loss(
    queries: Float[Array, "n d"],
    keys: Float[Array, "m d"],
    *,
    scale: Number = 10.0,
    bias: Number = -10.0,
    ids: Integer[Array, " n"] | None = None,
    key_where: Bool[Array, " m"] | None = None,
    normalize: bool = True,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""The loss of SigLIP: each pair of a query and a key is classified by itself.

    .. math:: \ell_i = -\sum_{j=1}^m \log σ(t_{ij} (a s_{ij} + b)), \quad
       t_{ij} = 1 \text{ if } i = j, \text{ else } -1

    s_ij is the cosine of query i and key j. The memory of the value and its gradient does not grow
    with n·m. There is no forward mode: `jax.jvp` of the loss raises a `TypeError`. `jax.jvp` and
    `jax.grad` of its gradient work.

    Args:
      queries: `[n, d]`, such as image features.
      keys: `[m, d]` with m ≥ n, as in `info_nce_loss`: row i is the key of query i, and the rows
        beyond n are further negatives.
      scale: a > 0.
      bias: b. Scale and bias get gradients, so that they can be learned. The paper starts from
        10 and -10, and learns log a.
      ids, key_where, normalize: As in `info_nce_loss`.
      block_size: The keyword of pairwise losses in `jaxloss`.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A row of
        `where=False` is neither query nor key.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `scale` or `block_size` is not positive, if `bias` is not finite, or if there
        are fewer keys than queries.

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
        key_where=key_where,
        similarity="cosine" if normalize else "inner",
        where=where,
        block_size=block_size,
        axis_name=axis_name,
    )
    dtype = towers.own.dtype
    scale = checks.in_range("scale", scale, dtype, above=0)
    bias = checks.in_range("bias", bias, dtype)
    params = _Line(jnp.asarray(scale, dtype), jnp.asarray(bias, dtype))
    own = softplus(-_on_line(towers.own, params))
    negatives, valid = Statistic(SOFTPLUS, _on_line, is_smooth=True), towers.sides.anchors.valid
    if reduction == "none":
        (others,) = towers.statistics(params, negatives)
        return towers.reduce(own + others, sample_weights=sample_weights, reduction=reduction)
    weights = shares(valid, sample_weights, reduction, axis_name, dtype)
    total = jnp.sum(weights * jnp.where(valid, own, 0))
    total = total + weighted_sum(towers.sides, params, negatives, weights)
    return sum_over(total, axis_name)


class _Line(NamedTuple):
    """Logits `scale · s + bias`."""

    scale: Float[Array, ""]
    bias: Float[Array, ""]


def _on_line(similarities: Float[Array, " ..."], line: _Line) -> Float[Array, " ..."]:
    return line.scale * similarities + line.bias
