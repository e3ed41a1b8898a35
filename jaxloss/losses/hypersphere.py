"""Hyperspherical classification: features move towards fixed prototypes on the unit sphere."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Integer, Real

from jaxloss.core import batch, checks
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.checks import Number
from jaxloss.core.linear import inverse_or_zero, l2_normalize, squares_are_normal, widen
from jaxloss.core.sharding import divided


@divided(result="replicated")
def update_class_means(
    class_means: Float[Array, "d C"],
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    *,
    decay: Number = 0.9,
    where: Bool[Array, " n"] | None = None,
    axis_name: AxisName | None = None,
) -> Float[Array, "d C"]:
    r"""Updates moving averages of the class directions, the input of `assign_prototypes`.

    .. math:: m_c ← \mathrm{normalize}\bigl(λ m_c + (1-λ) \, \mathrm{normalize}(μ_c)\bigr),
       \quad μ_c = \underset{y_i = c}{\mathrm{mean}} x_i

    The mean of a class without a sample in the batch does not change. Devices exchange C sums and
    class sizes only, and all get the same means.

    Args:
      class_means: `[d, C]`, m before the update. Start with zeros: the first update then gives
        normalize(μ). Use float32, because bfloat16 rounds small updates to zero.
      features: `[n, d]`.
      labels: `[n]`, class indices. Labels of C or more, and rows that are not finite, are ignored,
        because a NaN would stay in the state. The losses return NaN for them.
      decay: λ in [0, 1).
      where, axis_name: The common keywords of `jaxloss`.

    Returns:
      Means `[d, C]` in the dtype of `class_means`: unit columns, or 0 for a class without a sample
      so far.

    Raises:
      ValueError: If `decay` is out of range.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> means = jnp.array([[1.0, 0.0], [0.0, 0.0]])
      >>> features, labels = jnp.array([[0.0, 2.0], [3.0, 4.0]]), jnp.array([0, 1])
      >>> print(np.asarray(jaxloss.update_class_means(means, features, labels)).round(3))
      [[0.994 0.6  ]
       [0.11  0.8  ]]

    References:
      Saadabadi et al., Hyperspherical Classification with Dynamic Label-to-Prototype Assignment,
      CVPR 2024, the authors' published code (moving averages; there of one sample of a class in a
      batch, added in place, so that its λ of 0.9 amounts to 0.95).
    """
    features, labels, valid = batch.checked_rows("features", features, labels, where)
    valid = valid & jnp.all(jnp.isfinite(features), axis=1)
    features = batch.zero_invalid(features, valid)
    class_means = checks.matching("class_means", class_means, "d C", features)
    num_classes = class_means.shape[1]
    old, features = widen(class_means, features)
    decay = checks.in_range("decay", decay, old.dtype, at_least=0, below=1)
    sums = _class_sums(features, labels, valid, num_classes, axis_name)
    sizes = _class_sums(valid.astype(jnp.int32), labels, valid, num_classes, axis_name)
    # A mean and its sum have the same direction.
    new = l2_normalize(decay * old + (1 - decay) * l2_normalize(sums.T, axis=0), axis=0)
    # Finite rows may have a sum that is not.
    changes = (sizes > 0) & jnp.all(jnp.isfinite(new), axis=0)
    return jnp.where(changes[None, :], new.astype(class_means.dtype), class_means)


def _class_sums(
    rows: Real[Array, " n *shape"],
    labels: Integer[Array, " n"],
    valid: Bool[Array, " n"],
    num_classes: int,
    axis_name: AxisName | None,
) -> Real[Array, " C *shape"]:
    """Returns the sums over the valid rows of each class, on all devices."""
    # `segment_sum` drops the rows of segment C.
    group = jnp.where(valid & (labels < num_classes), labels, num_classes)
    return batch.sum_over(jax.ops.segment_sum(rows, group, num_classes), axis_name)


@divided(result="replicated")
def class_balanced_lengths(
    labels: Integer[Array, " n"],
    num_classes: int,
    *,
    where: Bool[Array, " n"] | None = None,
    axis_name: AxisName | None = None,
) -> Float[Array, " C"]:
    r"""Lengths of prototypes that balance the classes of a batch. Rare classes get long ones.

    .. math:: \sqrt{\frac{n / C_{\mathrm{present}}}{n_c}}

    The gradient of `dot_regression_loss` is proportional to the squared length. With these lengths,
    every class in the batch has the same weight in its mean.

    Args:
      labels: `[n]`, class indices. Labels of C or more are ignored.
      num_classes: C.
      where, axis_name: The common keywords of `jaxloss`.

    Returns:
      Lengths `[C]`, float32, with 1 for a class without a sample.

    Raises:
      ValueError: If `num_classes` is below 1.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> lengths = jaxloss.class_balanced_lengths(jnp.array([0, 0, 0, 2]), 3)
      >>> print(np.asarray(lengths).round(3))
      [0.816 1.    1.414]

    References:
      Saadabadi et al., Hyperspherical Classification with Dynamic Label-to-Prototype Assignment,
      CVPR 2024, supplement section 7.2; Yang et al., Inducing Neural Collapse in Imbalanced
      Learning, NeurIPS 2022.
    """
    checks.positive_count("num_classes", num_classes)
    labels = checks.integers("labels", labels, "n")
    valid = batch.valid_rows(labels, checks.row_mask(where, "labels", labels))
    sizes = _class_sums(valid.astype(jnp.int32), labels, valid, num_classes, axis_name)
    present = jnp.sum(sizes > 0).astype(jnp.float32)
    average = jnp.sum(sizes).astype(jnp.float32) / jnp.maximum(present, 1)
    lengths = jnp.sqrt(average / jnp.maximum(sizes, 1).astype(jnp.float32))
    return jnp.where(sizes > 0, lengths, 1)


@divided
def prototype_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    prototypes: Float[Array, "d M"],
    *,
    assignment: Integer[Array, " C"] | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Squared cosine distance to the prototype of the class (L_IPM in the paper).

    .. math:: \ell_i = \bigl(1 - \cos(x_i, p_{A(y_i)})\bigr)^2

    The loss pulls a feature towards its own prototype. It does not push it away from the others,
    which are already far apart. A zero feature has loss 1 and a zero gradient.

    Args:
      features: `[n, d]`.
      labels: `[n]`, class indices.
      prototypes: `[d, M]`, one column per prototype, of any length. See `uniform_prototypes`.
      assignment: A, int `[C]`, the prototype of each class. See `assign_prototypes`. An index
        outside 0 to M − 1 gives NaN. None means prototype c for class c, with C = M.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features, labels = jnp.array([[3.0, 4.0], [0.0, 0.0]]), jnp.array([0, 1])
      >>> losses = jaxloss.prototype_loss(
      ...     features, labels, jnp.eye(2), assignment=jnp.array([1, 0]), reduction="none"
      ... )
      >>> print(np.asarray(losses).round(4))
      [0.04 1.  ]

    References:
      Saadabadi et al., Hyperspherical Classification with Dynamic Label-to-Prototype Assignment,
      CVPR 2024, L_IPM (supplement section 9).
    """
    features, targets, column, valid = _features_and_targets(
        features, labels, prototypes, assignment, None, where
    )
    values = cosine_gaps(features, targets, valid) ** 2
    values = batch.nan_where_no_class(values, column, valid, prototypes.shape[1])
    return batch.reduce(values, valid, sample_weights, reduction, axis_name)


@divided
def dot_regression_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    prototypes: Float[Array, "d M"],
    *,
    assignment: Integer[Array, " C"] | None = None,
    lengths: Float[Array, " C"] | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Dot-regression loss: regresses the dot product with the prototype to its maximum.

    .. math:: \ell_i = \frac{(x_i^\top q_i - \|q_i\| \, \mathrm{sg}(\|x_i\|))^2}
       {2 \, \mathrm{sg}(\|x_i\|)}, \quad q_i = b_{y_i} p_{A(y_i)}

    sg stops the gradient. The gradient for a feature is then `−(1 − cos)·‖q‖·q`: parallel to the
    prototype and independent of the feature's norm. A zero feature has loss 0 and a zero gradient.

    Train with unit features, as the authors do, x / ‖x‖ with a gradient through the norm. A raw
    feature is only pushed along its prototype, and nothing takes away what points to another one.
    Its norm, and the loss with it, can grow without end.

    Args:
      features: `[n, d]`, unit vectors for training.
      labels: `[n]`, class indices.
      prototypes, assignment: As in `prototype_loss`. The length of a prototype matters here.
      lengths: b > 0, `[C]`. See `class_balanced_lengths`. None means 1 for all classes.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features, prototypes = jnp.array([[3.0, 4.0], [0.0, 2.0]]), jnp.eye(2)
      >>> losses = jaxloss.dot_regression_loss(
      ...     features, jnp.array([0, 1]), prototypes, reduction="none"
      ... )
      >>> print(np.asarray(losses).round(4))
      [0.4 0. ]

    References:
      Saadabadi et al., Hyperspherical Classification with Dynamic Label-to-Prototype Assignment,
      CVPR 2024, the authors' published code (long tails); Yang et al., Inducing Neural Collapse in
      Imbalanced Learning, NeurIPS 2022 (dot-regression loss).
    """
    features, targets, column, valid = _features_and_targets(
        features, labels, prototypes, assignment, lengths, where
    )
    # Zeros in invalid rows of the targets give the features no gradient there.
    targets = batch.zero_invalid(targets, valid)
    products = jnp.where(valid, jnp.sum(features * targets, axis=1), 0)
    norms = lax.stop_gradient(row_norms(features, valid))
    lengths_of_targets = row_norms(targets, valid)
    inverse = inverse_or_zero(norms)
    # ‖x‖ is factored out of the square, which then neither overflows nor divides by 0. The
    # difference cancels for small angles. Take its gradient from here and its value from 1 − cos.
    shortfall = lengths_of_targets - products * inverse
    gaps = unit_gaps(features, targets, inverse, inverse_or_zero(lengths_of_targets))
    shortfall += lax.stop_gradient(lengths_of_targets * gaps - shortfall)
    values = 0.5 * norms * shortfall**2
    values = batch.nan_where_no_class(values, column, valid, prototypes.shape[1])
    return batch.reduce(values, valid, sample_weights, reduction, axis_name)


def _features_and_targets(
    features: Any, labels: Any, prototypes: Any, assignment: Any, lengths: Any, where: Any
) -> tuple[Float[Array, "n d"], Float[Array, "n d"], Integer[Array, " n"], Bool[Array, " n"]]:
    """Checks the arguments, and looks up the prototype of each sample.

    Returns:
      The features, their prototypes, the columns of these (M if there is none), and the mask of the
      valid samples. The other rows may hold anything.
    """
    features, labels, valid = batch.checked_rows("features", features, labels, where)
    prototypes = checks.matching("prototypes", prototypes, "d M", features)
    features, prototypes = widen(features, prototypes)
    num_prototypes = prototypes.shape[1]
    if assignment is None:
        assignment = jnp.arange(num_prototypes, dtype=jnp.int32)
    assignment = checks.integers("assignment", assignment, "C")
    num_classes = assignment.shape[0]

    nearest = jnp.clip(labels, 0, num_classes - 1)
    column = assignment[nearest]
    column = jnp.where((labels < num_classes) & (column >= 0), column, num_prototypes)
    targets = prototypes[:, jnp.clip(column, 0, num_prototypes - 1)].T
    if lengths is not None:
        lengths = checks.floating("lengths", lengths, "C")
        source = "`assignment` (or `prototypes` without it)"
        checks.same_size("lengths", lengths, "C", "C", num_classes, source)
        targets = targets * lengths.astype(targets.dtype)[nearest][:, None]
    return features, targets, column, valid


@jax.custom_jvp
def row_norms(x: Float[Array, "n d"], valid: Bool[Array, " n"]) -> Float[Array, " n"]:
    """Returns `‖x_i‖`, and 0 in invalid rows. A zero row has a zero gradient.

    It reads the rows as they are. Zeros in place of the invalid ones would be another array.
    """
    squared = jnp.sum(x * x, axis=1)
    exact = jnp.all(squares_are_normal(squared) | ~valid)
    norms = lax.cond(exact, lambda squared, _: jnp.sqrt(squared), _scaled_norms, squared, x)
    return jnp.where(valid, norms, 0)


def _scaled_norms(_: Float[Array, " n"], x: Float[Array, "n d"]) -> Float[Array, " n"]:
    scale = jnp.max(jnp.abs(x), axis=1)
    zero = scale < jnp.finfo(x.dtype).tiny  # False for NaN, so that NaN stays visible.
    scaled = x / jnp.where(zero, 1, scale)[:, None]
    return jnp.where(zero, 0, scale * jnp.sqrt(jnp.sum(scaled * scaled, axis=1)))


@row_norms.defjvp
def _row_norms_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x, valid), (d_x, _) = primals, tangents
    norms = row_norms(x, valid)
    units = jnp.where(valid[:, None], x, 0) * inverse_or_zero(norms)[:, None]
    return norms, jnp.sum(units * d_x, axis=1)


def unit_gaps(
    a: Float[Array, "n d"],
    b: Float[Array, "n d"],
    inverse_a: Float[Array, " n"],
    inverse_b: Float[Array, " n"],
) -> Float[Array, " n"]:
    """Returns `1 − cos(a_i, b_i)` from the rows and their inverse norms; 1 for a zero row.

    It is computed as `½‖â − b̂‖²`, which does not cancel for cosines close to 1.
    """
    gaps = jnp.sum((a * inverse_a[:, None] - b * inverse_b[:, None]) ** 2, axis=1) / 2
    return jnp.where((inverse_a == 0) | (inverse_b == 0), 1, gaps)


@jax.custom_jvp
def cosine_gaps(
    a: Float[Array, "n d"], b: Float[Array, "n d"], valid: Bool[Array, " n"]
) -> Float[Array, " n"]:
    """Returns `1 − cos(a_i, b_i)`, which is 1 for a zero row. Invalid rows have no gradient."""
    inverse_a, inverse_b = (inverse_or_zero(row_norms(rows, valid)) for rows in (a, b))
    return unit_gaps(a, b, inverse_a, inverse_b)


@cosine_gaps.defjvp
def _cosine_gaps_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    """`∂(1 − cos)/∂a = (cos · â − b̂) / ‖a‖`, in one pass over both factors."""
    (a, b, valid), (d_a, d_b, _) = primals, tangents
    gaps = cosine_gaps(a, b, valid)
    inverse_a, inverse_b = (inverse_or_zero(row_norms(rows, valid)) for rows in (a, b))
    a, b = jnp.where(valid[:, None], a, 0), jnp.where(valid[:, None], b, 0)
    cosines = jnp.where((inverse_a == 0) | (inverse_b == 0), 0, 1 - gaps)

    def part(
        x: Array, y: Array, inverse_x: Array, inverse_y: Array, d_x: Array
    ) -> Float[Array, " n"]:
        # Without the halves, XLA writes out [n, d] broadcasts that it shares with the value.
        towards = x * (cosines * inverse_x / 2)[:, None] - y * (inverse_y / 2)[:, None]
        return jnp.sum(towards * (2 * inverse_x)[:, None] * d_x, axis=1)

    return gaps, part(a, b, inverse_a, inverse_b, d_a) + part(b, a, inverse_b, inverse_a, d_b)
