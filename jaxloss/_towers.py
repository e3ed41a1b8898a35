"""Losses of two towers: each query has one key, and the other keys are its negatives.

Both losses compare queries with keys by `_tiles`, with the ids of a batch as labels: two rows of
one id are not negatives of each other. The similarity of a query and its own key is computed apart,
because the engine cannot tell this key from others of its id.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer

from jaxloss import _checks
from jaxloss._batch import (
    AxisName,
    Reduction,
    first_position,
    gather,
    own_positions,
    reduce,
    shares,
    sum_over,
    zero_invalid,
)
from jaxloss._checks import Number
from jaxloss._linear import inverse_norms_of_scaled, l2_normalize, power_of_two_scaled, widen
from jaxloss._logsumexp import softplus
from jaxloss._products import low_dtypes
from jaxloss._sharding import divided
from jaxloss._statistics import (
    SOFTPLUS,
    ByClass,
    Rows,
    Statistic,
    logsumexp_of_cosines,
    over_temperature,
)
from jaxloss._tiles import pair_statistics, statistics_in_both_directions, weighted_sum


@divided()
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
    towers = _towers(queries, keys, ids, key_where, where, normalize, axis_name)
    dtype = towers.similarities.dtype
    temperature = _checks.in_range("temperature", temperature, dtype, above=0)
    logsumexp = logsumexp_of_cosines(temperature, normalize)
    temperature = jnp.asarray(temperature, dtype)
    own = towers.similarities / temperature

    negatives = Statistic(logsumexp, over_temperature, negatives_only=True)
    arguments = (negatives,), temperature, towers.queries, towers.keys
    options: Any = {**towers.options, "block_size": block_size, "axis_name": axis_name}

    def against(rivals: ByClass) -> Float[Array, " n"]:
        # −log(e^a / (e^a + e^b)) = softplus(b − a) does not cancel for a small loss.
        return softplus(rivals.negative[: own.shape[0]] - own)

    if symmetric:
        (of_queries,), (of_keys,) = statistics_in_both_directions(*arguments, **options)
        values = (against(of_queries) + against(of_keys)) / 2
    else:
        (of_queries,) = pair_statistics(*arguments, **options)
        values = against(of_queries)
    return reduce(values, towers.queries.valid, sample_weights, reduction, axis_name)


@divided()
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
    towers = _towers(queries, keys, ids, key_where, where, normalize, axis_name)
    dtype = towers.similarities.dtype
    scale = _checks.in_range("scale", scale, dtype, above=0)
    bias = _checks.in_range("bias", bias, dtype)
    params = _Line(jnp.asarray(scale, dtype), jnp.asarray(bias, dtype))
    negatives = Statistic(SOFTPLUS, _on_line, negatives_only=True)
    rows = (towers.queries, towers.keys)
    options: Any = {**towers.options, "block_size": block_size, "axis_name": axis_name}
    valid = towers.queries.valid
    own = softplus(-(params.scale * towers.similarities + params.bias))
    if reduction == "none":
        (others,) = pair_statistics((negatives,), params, *rows, **options)
        return reduce(own + others.negative, valid, sample_weights, reduction, axis_name)
    weights = shares(valid, sample_weights, reduction, axis_name, dtype)
    total = jnp.sum(weights * jnp.where(valid, own, 0))
    total = total + weighted_sum(negatives, params, weights, *rows, **options)
    return sum_over(total, axis_name)


class _Line(NamedTuple):
    """Logits `scale · s + bias`."""

    scale: Float[Array, ""]
    bias: Float[Array, ""]


class _Towers(NamedTuple):
    """Labels are such that only equal ones of a query and a key are no negatives."""

    queries: Rows
    keys: Rows
    similarities: Float[Array, " n"]
    """Of the queries and their own keys."""
    options: dict[str, Any]
    """How the rows are compared."""


def _towers(
    queries: Any,
    keys: Any,
    ids: Any,
    key_where: Any,
    where: Any,
    normalize: bool,
    axis_name: AxisName | None,
) -> _Towers:
    """Checks both towers, and returns them as the rows of this device."""
    queries = _checks.floating("queries", queries, "n d")
    keys = _checks.key_features(keys, queries)
    valid = _mask(_checks.row_mask(where, "queries", queries), queries)
    key_valid = _mask(_checks.row_mask(key_where, "keys", keys, name="key_where", shape="m"), keys)
    number, num_keys = queries.shape[0], keys.shape[0]
    positions = own_positions(number, axis_name)
    labels = positions
    if ids is not None:
        labels = _checks.integers("ids", ids, "n")
        _checks.same_rows("ids", labels, "queries", queries)
        if num_keys > number and jnp.issubdtype(labels.dtype, jnp.unsignedinteger):
            labels = _numbered(labels, axis_name)  # All their values may be ids, so none is free.
        labels = jnp.where(labels < 0, -2 - positions.astype(labels.dtype), labels)
    valid = valid & key_valid[:number]
    key_valid = jnp.concatenate([valid, key_valid[number:]])
    no_label = jnp.full(num_keys - number, -1).astype(labels.dtype)

    low = low_dtypes(queries, keys)
    if any(low) and normalize:  # Unit vectors would not be exact in a low dtype.
        queries, keys = widen(
            *(
                power_of_two_scaled(rows, its_valid)
                for rows, its_valid in ((queries, valid), (keys, key_valid))
            )
        )
        own, other = zero_invalid(queries, valid), zero_invalid(keys[:number], valid)
        norms = inverse_norms_of_scaled(own) * inverse_norms_of_scaled(other)
        similarities = jnp.sum(own * other, axis=1) * norms
    else:
        load = l2_normalize if normalize else zero_invalid
        queries, keys = widen(queries, keys)
        loaded = load(queries, valid), load(keys, key_valid)
        similarities = jnp.sum(loaded[0] * loaded[1][:number], axis=1)
        if not any(low):
            queries, keys = loaded
    return _Towers(
        # Different positions, because no row of one tower is a row of the other.
        Rows(queries, labels, valid, jnp.zeros_like(labels, jnp.int32)),
        Rows(
            keys,
            jnp.concatenate([labels, no_label]),
            key_valid,
            jnp.ones_like(key_valid, jnp.int32),
        ),
        similarities,
        {
            "similarity": "cosine" if any(low) and normalize else "product",
            "low": (low[0], low[1]),
        },
    )


def _numbered(ids: Integer[Array, " n"], axis_name: AxisName | None) -> Int32[Array, " n"]:
    """Returns numbers from 0 on that are equal where the ids of all devices are."""
    everyone = gather(ids, axis_name)
    _, numbers = jnp.unique(everyone, size=max(len(everyone), 1), return_inverse=True)
    first = first_position(ids.shape[0], axis_name)
    return lax.dynamic_slice_in_dim(numbers.astype(jnp.int32), first, ids.shape[0])


def _mask(where: Bool[Array, " n"] | None, rows: Float[Array, "n d"]) -> Bool[Array, " n"]:
    return jnp.ones(rows.shape[0], bool) if where is None else where


def _on_line(
    similarities: Float[Array, "a b"], _positives: Bool[Array, "a b"], line: _Line
) -> Float[Array, "a b"]:
    return line.scale * similarities + line.bias
