"""Metric losses on features: every sample is compared with the others of its batch."""

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
    gather,
    logsumexp_over,
    own_positions,
    poison,
    reduce,
    sum_over,
)
from jaxloss._linear import exact_product, squared_distances, widen


def _prepare(features, labels, where) -> tuple[Array, Array, Array]:
    features = _checks.floating("features", features, "n d")
    labels = _checks.class_labels(labels, "features", features)
    counts = counting_rows(labels, _checks.row_mask(where, "features", features))
    (features,) = widen(features)
    return clean_rows(features, counts), labels, counts


def _centered(rows: Array, center: Array) -> Array:
    """`rows − center`: distances do not change, but round less when the rows lie far from zero."""
    return rows - lax.stop_gradient(center)[None, :]


def nca_loss(
    features: Float[Array, "n d"],
    labels: Int[Array, " n"],
    *,
    temperature: float = 1.0,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Neighbourhood component analysis (NCA).

    .. math:: \ell_i = -\log \sum_{j≠i,\, y_j = y_i} e^{-\|x_i - x_j\|^2 / T}
       + \log \sum_{j≠i} e^{-\|x_i - x_j\|^2 / T}

    Args:
      features: `[n, d]`, any float dtype. Squared distances grow with d: a temperature of about d
        (or features divided by √d) keeps the exponentials in a useful range.
      labels: `[n]`, integers; a sample with a negative label is ignored, as a reference too.
      temperature: T > 0.
      block_size: compare with so many samples at a time, which bounds the memory by n·block_size
        instead of n², exact in value and gradient, at the price of computing the distances twice.
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`. A sample
        without another one of its class (on any device) does not count.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit, or the temperature or the block size is not positive.

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024 (NCA);
      Goldberger et al., Neighbourhood Components Analysis, NeurIPS 2004.

    Example:
      >>> import jax.numpy as jnp, numpy as np, jaxloss
      >>> features = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
      >>> losses = jaxloss.nca_loss(features, jnp.array([0, 0, 1]), reduction="none")
      >>> print(np.asarray(losses).round(4))
      [0.0486 0.0181 0.    ]
    """
    temperature = _checks.in_range("temperature", temperature, above=0)
    if block_size is not None:
        _checks.positive_count("block_size", block_size)
    features, labels, counts = _prepare(features, labels, where)
    references = gather(features, axis_name)
    reference_labels = gather(labels, axis_name)
    reference_counts = gather(counts, axis_name)
    num_counting = jnp.maximum(jnp.sum(reference_counts), 1).astype(features.dtype)
    center = jnp.sum(references, axis=0) / num_counting

    anchors = _centered(features, center)
    itself = own_positions(features.shape[0], axis_name)

    def compare(block, rows=None) -> tuple[Array, Array, Array, Array]:
        row_labels, row_counts, positions = block
        others = row_counts[None, :] & (itself[:, None] != positions[None, :])
        same_class = labels[:, None] == row_labels[None, :]
        similarities = -squared_distances(anchors, rows) / temperature
        return _split_logsumexp(similarities, others & same_class, others & ~same_class)

    rows = None if axis_name is None else _centered(references, center)
    block = (
        reference_labels,
        reference_counts,
        jnp.arange(references.shape[0], dtype=jnp.int32),
    )
    if block_size is None or block_size >= references.shape[0]:
        positive, has_positive, negative, has_negative = compare(block, rows)
    else:
        # The comparisons with a block are computed again for the gradient, not kept.
        blocks = _blocks((*block, anchors if rows is None else rows), block_size)
        parts = lax.map(jax.checkpoint(lambda part: compare(part[:3], part[3])), blocks)
        positive, has_positive = _join(*parts[:2])
        negative, has_negative = _join(*parts[2:])
    # −log(p / (p + q)) = softplus(log q − log p) is exact also where the loss is tiny.
    values = _softplus_if(has_negative, negative - positive)
    return reduce(
        values,
        counts & has_positive,
        sample_weights=sample_weights,
        reduction=reduction,
        axis_name=axis_name,
    )


def _split_logsumexp(
    logits: Array, positives: Array, negatives: Array
) -> tuple[Array, Array, Array, Array]:
    """`log Σ_j e^{z_ij}` over each of two disjoint masks, 0 where it is empty, and where it is not.

    One exponential for both: each logit is counted from the peak of its own mask.
    """
    has_positive, has_negative = jnp.any(positives, axis=1), jnp.any(negatives, axis=1)
    frozen = lax.stop_gradient(logits)

    def peak(mask, present):
        largest = jnp.max(frozen, axis=1, where=mask, initial=-jnp.inf)
        return jnp.where(present, largest, 0)

    positive_peak, negative_peak = peak(positives, has_positive), peak(negatives, has_negative)
    peaks = jnp.where(positives, positive_peak[:, None], negative_peak[:, None])
    used = positives | negatives
    terms = jnp.where(used, jnp.exp(jnp.where(used, logits - peaks, 0)), 0)

    def logarithm(mask, present, largest):
        total = jnp.sum(jnp.where(mask, terms, 0), axis=1)
        return jnp.log(jnp.where(present, total, 1)) + largest

    return (
        logarithm(positives, has_positive, positive_peak),
        has_positive,
        logarithm(negatives, has_negative, negative_peak),
        has_negative,
    )


def _blocks(arrays: tuple[Array, ...], size: int) -> tuple[Array, ...]:
    """Every array `[m, ...]` as `[ceil(m / size), size, ...]`, filled up with zeros."""
    missing = -arrays[0].shape[0] % size
    return tuple(
        jnp.pad(array, ((0, missing),) + ((0, 0),) * (array.ndim - 1)).reshape(
            -1, size, *array.shape[1:]
        )
        for array in arrays
    )


def _join(logsumexps: Array, present: Array) -> tuple[Array, Array]:
    """One log-sum-exp [n] of those of the blocks [k, n], and whether any of them has a term."""
    return logsumexp_over(logsumexps, present, axis=0), jnp.any(present, axis=0)


def _softplus_if(condition: Array, x: Array) -> Array:
    """`log(1 + e^x)`, 0 where the condition fails (no other class: the posterior is 1)."""
    return jnp.where(condition, jax.nn.softplus(jnp.where(condition, x, 0)), 0)


def prototypical_loss(
    features: Float[Array, "n d"],
    labels: Int[Array, " n"],
    *,
    num_classes: int | None = None,
    temperature: float = 1.0,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Prototypical loss (Proto): softmax over the distances to the class means.

    .. math:: \ell_i = -\log \frac{e^{-\|x_i - μ_{y_i∖i}\|^2 / T}}
       {\sum_c e^{-\|x_i - μ_{c∖i}\|^2 / T}},
       \quad μ_{c∖i} = \underset{j≠i,\, y_j = c}{\mathrm{mean}} x_j

    Only the mean of the anchor's own class changes by leaving the anchor out, and
    `x_i − μ_{y∖i} = n_y/(n_y−1) · (x_i − μ_y)`: no array of n·C·d numbers is needed.

    Args:
      features: `[n, d]`, any float dtype. As for `nca_loss`, a temperature of about d keeps the
        exponentials in a useful range.
      labels: `[n]`, integers; a sample with a negative label is ignored, in the means too.
      num_classes: C. With it, C class means are formed, and only they travel between devices;
        labels of C and more give NaN. Without it, the labels may be any integers and the samples
        stand for their classes, by an n×n membership product.
      temperature: T > 0.
      where, sample_weights, reduction, axis_name: common to all losses, see `jaxloss`. A sample
        without another one of its class (on any device) does not count; a class that is absent
        from the batch is no candidate.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; float32 or wider.

    Raises:
      TypeError: a dtype does not fit.
      ValueError: shapes do not fit, the temperature is not positive, or there are no classes.

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, supplement eq. (i);
      Snell et al., Prototypical Networks for Few-shot Learning, NeurIPS 2017.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
      >>> labels = jnp.array([0, 0, 1, 1])
      >>> print(f"{jaxloss.prototypical_loss(features, labels, num_classes=2):.4f}")
      0.2415
      >>> print(f"{jaxloss.prototypical_loss(features, labels):.4f}")
      0.2415
    """
    temperature = _checks.in_range("temperature", temperature, above=0)
    if num_classes is not None:
        _checks.positive_count("num_classes", num_classes)
    features, labels, counts = _prepare(features, labels, where)

    if num_classes is None:
        references = gather(features, axis_name)
        reference_labels = gather(labels, axis_name)
        reference_counts = gather(counts, axis_name)
        itself = own_positions(features.shape[0], axis_name)
        membership = (
            (reference_labels[:, None] == reference_labels[None, :])
            & reference_counts[:, None]
            & reference_counts[None, :]
        )
        sizes = jnp.sum(membership, axis=1).astype(features.dtype)
        center = jnp.sum(references, axis=0) / jnp.maximum(jnp.sum(reference_counts), 1).astype(
            features.dtype
        )
        features, references = _centered(features, center), _centered(references, center)
        sums = exact_product(membership.astype(features.dtype), references)
        means = sums / jnp.maximum(sizes, 1)[:, None]
        # Each class is a candidate once: at its first sample, which has none before it.
        position = jnp.arange(membership.shape[0], dtype=jnp.int32)
        earlier = position[None, :] < position[:, None]
        present = reference_counts & ~jnp.any(membership & earlier, axis=1)
        own = itself
        is_own = labels[:, None] == reference_labels[None, :]
    else:
        classes = jnp.arange(num_classes, dtype=labels.dtype)
        member = ((labels[:, None] == classes[None, :]) & counts[:, None]).astype(features.dtype)
        sizes = sum_over(jnp.sum(member, axis=0), axis_name)
        total = sum_over(jnp.sum(features, axis=0), axis_name)
        number = sum_over(jnp.sum(counts.astype(features.dtype)), axis_name)
        features = _centered(features, total / jnp.maximum(number, 1))
        sums = sum_over(exact_product(member.T, features), axis_name)
        means = sums / jnp.maximum(sizes, 1)[:, None]
        present = sizes > 0
        own = jnp.clip(labels, 0, num_classes - 1)
        is_own = labels[:, None] == classes[None, :]

    own_size = sizes[own]
    leave_one_out = own_size / jnp.maximum(own_size - 1, 1)
    rivals = present[None, :] & ~is_own
    logits = -squared_distances(features, means) / temperature
    own_logit = jnp.sum(jnp.where(is_own & present[None, :], logits, 0), axis=1) * leave_one_out**2
    log_odds = logsumexp_over(logits, rivals, axis=1) - own_logit
    values = _softplus_if(jnp.any(rivals, axis=1), log_odds)
    defined = counts & (own_size >= 2)
    if num_classes is not None:
        values = poison(labels, counts, num_classes, values)
        defined = defined | (counts & (labels >= num_classes))
    return reduce(
        values,
        defined,
        sample_weights=sample_weights,
        reduction=reduction,
        axis_name=axis_name,
    )
