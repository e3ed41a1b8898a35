"""Distillation: a student's scores follow those of a teacher."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float

from jaxloss.core import batch, checks
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.checks import Number
from jaxloss.core.linear import widen
from jaxloss.core.logsumexp import logsumexp, or_zero, unless_left_out
from jaxloss.core.sharding import divided


@divided
def score_distillation_loss(
    scores: Float[Array, "n k"],
    teacher_scores: Float[Array, "n k"],
    *,
    kind: Literal["kl", "margin_mse"] = "kl",
    temperature: Number = 1.0,
    teacher_temperature: Number | None = None,
    key_where: Bool[Array, "n k"] | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Distillation of scores: each query scores its candidates as a teacher does.

    .. math:: \ell_i = \sum_j p_{ij} \log \frac{p_{ij}}{q_{ij}}, \quad
       p_i = \mathrm{softmax}(t_i / T_t), \quad q_i = \mathrm{softmax}(s_i / T)

    This is `kind="kl"`, for teachers such as a cross-encoder. `"margin_mse"` compares the margins
    of the positive, in the first column, over the other candidates:

    .. math:: \ell_i = \mathrm{mean}_{j≥1} \big((s_{i0} - s_{ij}) - (t_{i0} - t_{ij})\big)^2

    Args:
      scores: `[n, k]`, of n queries with k candidates each, such as
        `jnp.einsum("nd,nkd->nk", queries, keys)`.
      teacher_scores: `[n, k]`. They have no gradient.
      kind: `"kl"` or `"margin_mse"`.
      temperature: T > 0, of `"kl"` alone. KL is not multiplied by T², as some do.
      teacher_temperature: T_t > 0; by default T.
      key_where: bool `[n, k]`. False marks padding among the candidates. A query without any does
        not count; of `"margin_mse"`, neither does one without its positive or another candidate.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `kind` is unknown, or `temperature` or `teacher_temperature` is not positive.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> scores, teacher = jnp.array([[2.0, 1.0, 0.0]]), jnp.array([[3.0, 1.0, 1.0]])
      >>> kl = jaxloss.score_distillation_loss(scores, teacher)
      >>> margins = jaxloss.score_distillation_loss(scores, teacher, kind="margin_mse")
      >>> print(f"{kl:.4f} {margins:.4f}")
      0.0616 0.5000

    References:
      Hinton et al., Distilling the Knowledge in a Neural Network, 2015.
      Hofstätter et al., Improving Efficient Neural Ranking Models with Cross-Architecture
      Knowledge Distillation, 2020 (`"margin_mse"`).
    """
    checks.choice("kind", kind, ("kl", "margin_mse"))
    scores = checks.floating("scores", scores, "n k")
    teacher_scores = checks.floating("teacher_scores", teacher_scores, "n k")
    checks.same_shape("teacher_scores", teacher_scores, "scores", scores)
    used = jnp.ones(scores.shape, bool)
    if key_where is not None:
        used = checks.mask_of("key_where", key_where, "n k", scores.shape)
    if (mask := checks.row_mask(where, "scores", scores)) is not None:
        used &= mask[:, None]
    scores, teacher_scores = widen(scores, lax.stop_gradient(teacher_scores))
    temperature = checks.in_range("temperature", temperature, scores.dtype, above=0)
    if teacher_temperature is None:
        teacher_temperature = temperature
    teacher_temperature = checks.in_range(
        "teacher_temperature", teacher_temperature, scores.dtype, above=0
    )
    scores, teacher = (jnp.where(used, x, 0) for x in (scores, teacher_scores))
    if kind == "kl":
        counts = jnp.any(used, axis=1)
        logits = scores / unless_left_out(temperature, scores)
        values = divergences(teacher / unless_left_out(teacher_temperature, teacher), logits, used)
    else:
        others = used.at[:, 0].set(False)
        counts = used[:, 0] & jnp.any(others, axis=1)
        gaps = scores - teacher
        squares = jnp.where(others, (gaps[:, :1] - gaps) ** 2, 0)
        number = jnp.maximum(jnp.sum(others, axis=1, dtype=gaps.dtype), 1)
        values = jnp.sum(squares, axis=1) / number
    return batch.reduce(values, counts, sample_weights, reduction, axis_name)


def divergences(
    teacher: Float[Array, "n k"], logits: Float[Array, "n k"], used: Bool[Array, "n k"]
) -> Float[Array, " n"]:
    """Returns `Σ_j p_j (log p_j − log q_j)` of the softmax of a teacher's logits and of others.

    A candidate that is not used has finite numbers. One whose p is 0 adds nothing.
    """
    p, q = (x - or_zero(logsumexp(x, used, axis=1))[:, None] for x in (teacher, logits))
    # The others, of which p or q may be -inf, must not be in the derivative either.
    has_share = used & (jnp.exp(p) != 0)
    shares, gaps = jnp.exp(jnp.where(has_share, p, -jnp.inf)), jnp.where(has_share, p - q, 0)
    return jnp.sum(shares * gaps, axis=1)
