"""Hyperspherical classification: features are drawn to fixed prototypes on the unit sphere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from jaxloss import _checks
from jaxloss._batch import (
    AxisName,
    Reduction,
    clean_rows,
    counting_rows,
    poison,
    reduce,
    sum_over,
)
from jaxloss._linear import cosine_gaps, l2_normalize, widen


def update_class_means(
    class_means: Float[Array, "d C"],
    features: Float[Array, "n d"],
    labels: Int[Array, " n"],
    *,
    decay: float = 0.9,
    where: Bool[Array, " n"] | None = None,
    axis_name: AxisName | None = None,
) -> Float[Array, "d C"]:
    r"""Moving averages of the classes' directions, from which `assign_prototypes` assigns.

    .. math:: m_c ← \mathrm{normalize}\bigl(λ m_c + (1-λ) \, \mathrm{normalize}(μ_c)\bigr),
       \quad μ_c = \underset{y_i = c}{\mathrm{mean}} x_i

    The mean of a class that is absent from the batch stays as it is, bit for bit. Only C sums and
    counts travel between devices, and every device gets the same means.

    Args:
      class_means: `[d, C]`, m before the step; all 0 at the beginning, where the first step gives
        normalize(μ). Best in float32: in bfloat16, steps of 1 − λ soon round to nothing.
      features: `[n, d]`, any float dtype.
      labels: `[n]`, integers below C. Negative ones are ignored. Larger ones are left out too, for
        they belong to no column, and a NaN would spoil the state for good; the losses report them.
      decay: λ in [0, 1).
      where, axis_name: common to all losses, see `jaxloss`.

    Returns:
      Means `[d, C]` in the dtype of `class_means`, computed in float32 or wider: unit columns, or
      0 for a class that had no direction yet.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit, or the decay is out of range.

    References:
      Saadabadi et al., Hyperspherical Classification with Dynamic Label-to-Prototype Assignment,
      CVPR 2024 (moving averages of the class means).

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> means = jnp.array([[1.0, 0.0], [0.0, 0.0]])
      >>> features, labels = jnp.array([[0.0, 2.0], [3.0, 4.0]]), jnp.array([0, 1])
      >>> print(np.asarray(jaxloss.update_class_means(means, features, labels)).round(3))
      [[0.994 0.6  ]
       [0.11  0.8  ]]
    """
    decay = _checks.in_range("decay", decay, at_least=0, below=1)
    features = _checks.floating("features", features, "n d")
    labels = _checks.class_labels(labels, "features", features)
    class_means = _checks.columns(
        "class_means", class_means, "d C", features.shape[1], f"`features` {features.shape}"
    )
    counts = counting_rows(labels, _checks.row_mask(where, "features", features))
    num_classes = class_means.shape[1]
    old, features = widen(class_means, features)
    sums = _class_sums(clean_rows(features, counts), labels, counts, num_classes, axis_name)
    sizes = _class_sums(counts.astype(jnp.int32), labels, counts, num_classes, axis_name)
    # The direction of a mean is that of its sum.
    new = l2_normalize(decay * old + (1 - decay) * l2_normalize(sums.T, axis=0), axis=0)
    return jnp.where(sizes[None, :] > 0, new.astype(class_means.dtype), class_means)


def _class_sums(
    rows: Array, labels: Array, counts: Array, num_classes: int, axis_name: AxisName | None
) -> Array:
    """The sum [C, ...] over each class's counting rows on all devices."""
    # What lies outside 0 to C − 1 is dropped.
    group = jnp.where(counts & (labels < num_classes), labels, num_classes)
    return sum_over(jax.ops.segment_sum(rows, group, num_classes), axis_name)


def class_balanced_lengths(
    labels: Int[Array, " n"],
    num_classes: int,
    *,
    where: Bool[Array, " n"] | None = None,
    axis_name: AxisName | None = None,
) -> Float[Array, " C"]:
    r"""Lengths of prototypes that balance the classes of a batch: rare classes get long ones.

    .. math:: \sqrt{\frac{n / C_{\mathrm{present}}}{n_c}}

    The gradient of `dot_regression_loss` grows with the square of the length, so that in its mean
    every class that is present has the same weight.

    Args:
      labels: `[n]`, integers below C; negative ones are ignored, larger ones left out.
      num_classes: C.
      where, axis_name: common to all losses, see `jaxloss`.

    Returns:
      Lengths `[C]`, float32; 1 for an absent class.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit, or there are no classes.

    References:
      Saadabadi et al., Hyperspherical Classification with Dynamic Label-to-Prototype Assignment,
      CVPR 2024, supplement section 7.2; Yang et al., Inducing Neural Collapse in Imbalanced
      Learning, NeurIPS 2022.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> lengths = jaxloss.class_balanced_lengths(jnp.array([0, 0, 0, 2]), 3)
      >>> print(np.asarray(lengths).round(3))
      [0.816 1.    1.414]
    """
    _checks.positive_count("num_classes", num_classes)
    labels = _checks.integers("labels", labels, "n")
    counts = counting_rows(labels, _checks.row_mask(where, "labels", labels))
    sizes = _class_sums(counts.astype(jnp.int32), labels, counts, num_classes, axis_name)
    present = jnp.sum(sizes > 0).astype(jnp.float32)
    average = jnp.sum(sizes).astype(jnp.float32) / jnp.maximum(present, 1)
    lengths = jnp.sqrt(average / jnp.maximum(sizes, 1).astype(jnp.float32))
    return jnp.where(sizes > 0, lengths, 1)


def prototype_loss(
    features: Float[Array, "n d"],
    labels: Int[Array, " n"],
    prototypes: Float[Array, "d M"],
    *,
    assignment: Int[Array, " C"] | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Squared cosine distance to the prototype of the class (L_IPM).

    .. math:: \ell_i = \bigl(1 - \cos(x_i, p_{A(y_i)})\bigr)^2

    A feature is drawn to its own prototype alone, and is not pushed away from the others, which lie
    far apart already. A zero feature has the loss 1 and a zero gradient.

    Args:
      features: `[n, d]`, any float dtype.
      labels: `[n]`, integers below C; negative ones are ignored, larger ones give NaN.
      prototypes: `[d, M]`, a column each, of any length; for example from `uniform_prototypes`.
      assignment: A, int `[C]`, the column of each class, for example from `assign_prototypes`; a
        class assigned outside 0 to M − 1 gives NaN. None is the identity, with C = M.
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit.

    References:
      Saadabadi et al., Hyperspherical Classification with Dynamic Label-to-Prototype Assignment,
      CVPR 2024, L_IPM (supplement section 9).

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features, labels = jnp.array([[3.0, 4.0], [0.0, 0.0]]), jnp.array([0, 1])
      >>> losses = jaxloss.prototype_loss(
      ...     features, labels, jnp.eye(2), assignment=jnp.array([1, 0]), reduction="none"
      ... )
      >>> print(np.asarray(losses).round(4))
      [0.04 1.  ]
    """
    features, targets, column, counts = _prepare(
        features, labels, prototypes, assignment, None, where
    )
    return reduce(
        poison(column, counts, prototypes.shape[1], cosine_gaps(features, targets) ** 2),
        counts,
        sample_weights=sample_weights,
        reduction=reduction,
        axis_name=axis_name,
    )


def dot_regression_loss(
    features: Float[Array, "n d"],
    labels: Int[Array, " n"],
    prototypes: Float[Array, "d M"],
    *,
    assignment: Int[Array, " C"] | None = None,
    lengths: Float[Array, " C"] | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Dot-regression loss: the dot product with the prototype is drawn to its maximum.

    .. math:: \ell_i = \frac{(x_i^\top q_i - \|q_i\| \, \mathrm{sg}(\|x_i\|))^2}
       {2 \, \mathrm{sg}(\|x_i\|)}, \quad q_i = b_{y_i} p_{A(y_i)}

    sg stops the gradient, so that the one for a feature is `−(1 − cos)·‖q‖·q`: it is parallel to
    the prototype and independent of the feature's norm. A zero feature has neither loss nor
    gradient.

    Args:
      features: `[n, d]`, any float dtype.
      labels: `[n]`, integers below C; negative ones are ignored, larger ones give NaN.
      prototypes: `[d, M]`, a column each; for example from `uniform_prototypes`.
      assignment: A, int `[C]`, the column of each class, for example from `assign_prototypes`; a
        class assigned outside 0 to M − 1 gives NaN. None is the identity, with C = M.
      lengths: b, `[C]`, positive, for example from `class_balanced_lengths`; None is 1 for all.
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit.

    References:
      Saadabadi et al., Hyperspherical Classification with Dynamic Label-to-Prototype Assignment,
      CVPR 2024 (long-tailed setting, supplement section 7.2); Yang et al., Inducing Neural Collapse
      in Imbalanced Learning, NeurIPS 2022 (dot-regression loss).

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features, prototypes = jnp.array([[3.0, 4.0], [0.0, 2.0]]), jnp.eye(2)
      >>> losses = jaxloss.dot_regression_loss(
      ...     features, jnp.array([0, 1]), prototypes, reduction="none"
      ... )
      >>> print(np.asarray(losses).round(4))
      [0.4 0. ]
    """
    features, targets, column, counts = _prepare(
        features, labels, prototypes, assignment, lengths, where
    )
    norms = lax.stop_gradient(_norms(features))
    directions = features / jnp.where(norms == 0, 1, norms)[:, None]
    # ‖x‖ is taken out of the square, which then neither overflows nor divides by 0. Where x̂ is
    # close to q̂, 1 − x̂·q̂ cancels: its value comes from their difference, its gradient from it.
    units = l2_normalize(targets)
    gap = 1 - jnp.sum(directions * units, axis=1)
    gap += lax.stop_gradient(jnp.sum((directions - units) ** 2, axis=1) / 2 - gap)
    shortfall = _norms(targets) * gap
    return reduce(
        poison(column, counts, prototypes.shape[1], 0.5 * norms * shortfall**2),
        counts,
        sample_weights=sample_weights,
        reduction=reduction,
        axis_name=axis_name,
    )


def _prepare(
    features, labels, prototypes, assignment, lengths, where
) -> tuple[Array, Array, Array, Array]:
    """Features [n, d], their targets [n, d], the targets' columns [n], and what counts [n]."""
    features = _checks.floating("features", features, "n d")
    labels = _checks.class_labels(labels, "features", features)
    counts = counting_rows(labels, _checks.row_mask(where, "features", features))
    prototypes = _checks.columns(
        "prototypes", prototypes, "d M", features.shape[1], f"`features` {features.shape}"
    )
    features, prototypes = widen(features, prototypes)
    num_prototypes = prototypes.shape[1]
    if assignment is None:
        assignment = jnp.arange(num_prototypes, dtype=jnp.int32)
    assignment = _checks.integers("assignment", assignment, "C")
    num_classes = assignment.shape[0]

    known = jnp.clip(labels, 0, num_classes - 1)
    column = assignment[known]
    # M, which is no column, for what has no prototype.
    column = jnp.where((labels < num_classes) & (column >= 0), column, num_prototypes)
    targets = prototypes[:, jnp.clip(column, 0, num_prototypes - 1)].T
    if lengths is not None:
        lengths = _prepare_lengths(lengths, num_classes).astype(targets.dtype)
        targets = targets * lengths[known][:, None]
    return clean_rows(features, counts), clean_rows(targets, counts), column, counts


def _prepare_lengths(lengths, num_classes: int) -> Array:
    lengths = _checks.floating("lengths", lengths, "C")
    if lengths.shape[0] != num_classes:
        raise ValueError(
            f"`lengths` must have one number for each of the {num_classes} classes that "
            f"`assignment` (or without it `prototypes`) has, got shape {lengths.shape}"
        )
    return lengths


def _norms(rows: Array) -> Array:
    """`‖x_i‖` [n], with a zero gradient at 0."""
    return jnp.sum(rows * l2_normalize(rows), axis=1)
