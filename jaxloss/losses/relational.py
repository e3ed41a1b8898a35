"""A loss on similarities within a batch: they follow those of a teacher."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxloss.core import checks
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.checks import Number
from jaxloss.core.logsumexp import inverse_if_known
from jaxloss.core.sharding import divided
from jaxloss.pairs.comparison import compare
from jaxloss.pairs.fused import in_two_stages
from jaxloss.pairs.rows import Similarity
from jaxloss.pairs.statistics import COUNT, LOGSUMEXP, SUM, ByClass, Pair, Statistic


@divided
def relational_loss(
    features: Float[Array, "n d"],
    teacher: Float[Array, "n e"],
    *,
    kind: Literal["kl", "mse"] = "kl",
    temperature: Number = 1.0,
    teacher_temperature: Number | None = None,
    similarity: Similarity = "cosine",
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Similarities of the rows of a batch follow those of a teacher's features, of any width.

    .. math:: \ell_i = \sum_{j≠i} p_{ij} \log \frac{p_{ij}}{q_{ij}}, \quad
       p_{ij} = \frac{e^{t_{ij} / T'}}{\sum_{k≠i} e^{t_{ik} / T'}}, \quad
       q_{ij} = \frac{e^{s_{ij} / T}}{\sum_{k≠i} e^{s_{ik} / T}}

    s and t are the similarities of the features and of the teacher's. With `kind="mse"`, it is the
    mean of (s_ij − t_ij)² over j ≠ i, without temperatures. There is no n×n array. Take derivatives
    with `jax.grad`: `jax.jvp` raises a `TypeError`. A gradient has both modes.

    Args:
      features: `[n, d]`.
      teacher: `[n, e]`, features of the same samples by another network, or by an earlier state of
        this one. They have no gradient.
      kind: `"kl"` or `"mse"`.
      temperature: T > 0. It may be traced, and has a gradient.
      teacher_temperature: T' > 0; by default T.
      similarity: Of both, as in `supervised_contrastive_loss`.
      block_size: The keyword of pairwise losses in `jaxloss`.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        without another one does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `kind` or `similarity` is unknown, or if a temperature or `block_size` is not
        positive.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features = jnp.array([[1.0, 0.0], [3.0, 4.0], [0.0, 2.0]])
      >>> teacher = jnp.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
      >>> print(f"{jaxloss.relational_loss(features, teacher, temperature=0.5):.4f}")
      0.2117

    References:
      Fang et al., SEED: Self-supervised Distillation For Visual Representation, ICLR 2021, eq. (5)
        (`"kl"`, there with a queue).
      Siméoni et al., DINOv3, 2025, eq. (2) (Gram anchoring, `"mse"` of cosines).
    """
    checks.choice("kind", kind, ("kl", "mse"))
    rows = checks.floating("features", features, "n d")
    teacher = checks.floating("teacher", teacher, "n e")
    checks.same_rows("teacher", teacher, "features", rows)
    pairs = compare(
        rows,
        jnp.zeros(rows.shape[0], jnp.int32),  # All are of one class.
        guide=teacher,
        similarity=similarity,
        where=where,
        block_size=block_size,
        axis_name=axis_name,
    )
    temperature = checks.in_range("temperature", temperature, pairs.dtype, above=0)
    by = temperature if teacher_temperature is None else teacher_temperature
    by = checks.in_range("teacher_temperature", by, pairs.dtype, above=0)
    params = jnp.asarray(temperature, pairs.dtype), jnp.asarray(by, pairs.dtype)
    if kind == "mse":
        statistics = Statistic(SUM, _squared_gap, is_smooth=True), Statistic(COUNT, is_smooth=True)
        total, number = pairs.statistics(params, *statistics)
        values = total.positive / jnp.maximum(number.positive, 1)
        return pairs.reduce(values, total.has_positive, sample_weights, reduction)
    bounds = [inverse_if_known(T) if similarity == "cosine" else None for T in (temperature, by)]
    logits = Statistic(LOGSUMEXP, _logit, bound=bounds[0], is_smooth=True)
    is_traced = isinstance(by, Array)  # A number has no gradient, and a teacher none anyway.
    targets = Statistic(LOGSUMEXP, _target, None, bounds[1], True, has_gradient=is_traced)
    (sums, of_teacher), (gaps,) = in_two_stages(
        pairs,
        params,
        (logits, targets),
        _log_sums_of_teacher,
        (Statistic(SUM, _weighted_gap, is_smooth=True),),
    )
    counts = sums.has_positive
    values = jnp.where(counts, sums.positive, 0) + gaps.positive
    values = values - _log_sums_of_teacher((sums, of_teacher))
    return pairs.reduce(values, counts, sample_weights, reduction)


def _logit(pair: Pair, temperatures: tuple[Array, Array]) -> Float[Array, "a b"]:
    return pair.similarity / temperatures[0]


def _target(pair: Pair, temperatures: tuple[Array, Array]) -> Float[Array, "a b"]:
    return pair.guide / temperatures[1]


def _squared_gap(pair: Pair, _: object) -> Float[Array, "a b"]:
    return (pair.similarity - pair.guide) ** 2


def _log_sums_of_teacher(sums: tuple[ByClass, ...]) -> Float[Array, " *n"]:
    """Returns log-sum-exps of the teacher's logits; 0 without any."""
    _, of_teacher = sums
    return jnp.where(of_teacher.has_positive, of_teacher.positive, 0)


def _weighted_gap(pair: Pair, temperatures: tuple[Array, Array]) -> Float[Array, "a b"]:
    """The gap of both logits times the teacher's probability."""
    target, log_sum = _target(pair, temperatures), pair.anchor
    # No logit is above their log-sum-exp, but for that of a row and itself, which does not count.
    probability = jnp.exp(jnp.minimum(target - log_sum, 0))
    return probability * (target - _logit(pair, temperatures))
