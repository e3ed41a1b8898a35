"""Softmax cross-entropy of a classifier, for any number of classes."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Integer

from jaxloss.core import batch, checks, linear
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.blocks import in_blocks, sum_of_blocks
from jaxloss.core.checks import Number
from jaxloss.core.logsumexp import is_on, softplus
from jaxloss.core.sharding import divided
from jaxloss.losses import class_blocks
from jaxloss.losses.class_blocks import ClassSimilarity, Inputs, Kind, OfLogits
from jaxloss.losses.margins import Margins, lowering, margins_of_samples


class ClassifierMetrics(NamedTuple):
    """What `classifier_loss` of `metrics=True` reports of the global batch, without a gradient.

    Rows that count weigh alike, whatever their `sample_weights`.
    """

    accuracy: Float[Array, ""]
    """The share of rows whose class has the largest logit, without margins. An equal logit of
    another class is a miss. The class of targets is that of the largest one, the first of equal
    ones."""
    logsumexp: Float[Array, ""]
    """The mean over rows of the log-sum-exp of all logits, as the loss has them."""


@divided
def classifier_loss(
    features: Float[Array, "*n d"],
    labels: Integer[Array, " *n"] | Float[Array, "*n C"],
    weights: Float[Array, "d C *K"],
    bias: Float[Array, " C"] | None = None,
    *,
    similarity: ClassSimilarity = "inner",
    margin: Number | Float[Array, " C"] = 0.0,
    scale: Number = 1.0,
    sample_margin: Float[Array, " *n"] | None = None,
    angular_margin: Number | Float[Array, " C"] = 0.0,
    sample_angular_margin: Float[Array, " *n"] | None = None,
    label_smoothing: Number = 0.0,
    logsumexp_penalty: Number = 0.0,
    soft_cap: Number | None = None,
    block_size: int | None = None,
    class_axis_name: AxisName | None = None,
    where: Bool[Array, " *n"] | None = None,
    sample_weights: Float[Array, " *n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
    metrics: bool = False,
) -> Any:
    r"""Softmax cross-entropy of a linear or cosine classifier, for any number of classes.

    .. math:: \ell_i = -\sum_c t_{ic} \log \frac{e^{a_{ic}}}{\sum_k e^{a_{ik}}}
       + p \Big(\log \sum_k e^{a_{ik}}\Big)^2,
       \quad a_{ic} = β (z_{ic} - m_i [y_i = c]),
       \quad t_{ic} = (1-ε) [y_i = c] + ε / C

    It equals `margin_softmax_loss` of `linear_logits` or `cosine_logits`; with m = 0 and β = 1, it
    equals `softmax_loss` of them. With angular margins, the target's cosine changes as in
    `margin_softmax_loss`, before the bias is added. If the classes are visited in several blocks,
    the logits `[n, C]`, or `[n, C, K]`, need no memory of their own.

    Args:
      features: `[n, d]`; n may stand for several axes.
      labels: `[n]`, class indices; or `[n, C]`, floats t, as in `softmax_loss`. They go without
        margins, of which no class is the target, and without `class_axis_name`. Their loss is a
        difference of sums as large as the logits, of which `softmax_loss` keeps more digits.
      weights: `[d, C]`, one column per class; or `[d, C, K]` for K sub-centres per class, of which
        the largest cosine counts, with `similarity="cosine"` only.
      bias: `[C]`, or None: added to z. A class of −∞ is left out, if ε = 0; with label
        smoothing, the loss of such a class is infinite.
      similarity: `"inner"` for z of `linear_logits`, `"cosine"` for z of `cosine_logits`.
      margin: m, any number, or `[C]` for a margin per class.
      scale: β > 0.
      sample_margin: `[n]`, or None: added to m.
      angular_margin: Radians from 0 to π, a number or `[C]`; `similarity="cosine"` only.
      sample_angular_margin: `[n]` of any sign, or None: added to the angular margin;
        `similarity="cosine"` only.
      label_smoothing: ε in [0, 1). It smooths the targets of the scaled logits a, so the margin
        also lowers the target's logit in the mean over the classes.
      logsumexp_penalty: p, as in `softmax_loss`, of the logits a, which have scale and margins.
      soft_cap: s > 0, or None. It keeps logits between -s and s: `z ← s tanh(z / s)`, before scale
        and margins, as in Gemma 2. A class of −∞ stays left out. Not with angular margins.
      block_size: Number of classes in a block. By default it follows from the shapes and the
        backend, with a single block where n·C is small or C ≤ 4d. A single block keeps its logits
        for the gradient. So do several if n ≤ d, in the memory of the weights' gradient. If n > d,
        a mean or a sum has blocks of rows instead, each with its value and its gradient, as long as
        the logits of 128 rows are at most 16 MB, or 256 MB on an accelerator. Otherwise, logits are
        computed again, as always for bfloat16 and float16 on an accelerator. All but a single block
        of float32 have a custom gradient: take it with `jax.grad`, because `jax.jvp` of the
        loss raises a `TypeError`. The gradient itself has both modes.
      class_axis_name: A mapped axis, or a tuple of them, over which the classes are split. Each
        device passes its columns of `weights` and `bias`, and its margins `[C]`, in the order of
        the axis, and the same features and labels. Labels stay indices among all classes. Devices
        exchange a few numbers per row. Take the gradient outside `jax.shard_map`, or inside with
        `check_vma=True`: the weights' gradient is that of the device's own columns, and the
        features' gradient is complete on every device. Inside `jax.pmap`, or with
        `check_vma=False`, JAX adds up the loss of all devices of the axis: divide the gradients of
        `weights`, `bias` and margins `[C]` by the size of the axis, and take `jax.lax.pmean` of the
        other gradients over it.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`.
      metrics: Whether to return `(loss, ClassifierMetrics)`, for `jax.value_and_grad(...,
        has_aux=True)`. They come from the same blocks.

    Returns:
      A scalar, or `[n]` for `reduction="none"`; with `metrics`, a pair.

    Raises:
      ValueError: If `scale`, `label_smoothing`, `soft_cap`, `angular_margin` or `block_size` is out
        of range, `similarity` is unknown, `similarity="inner"` comes with angular margins or
        sub-centres, `class_axis_name` has an axis of `axis_name`, or targets come with margins or
        `class_axis_name`.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, labels = jnp.array([[1.0, 2.0], [2.0, 0.0]]), jnp.array([1, 0])
      >>> print(f"{jaxloss.classifier_loss(features, labels, jnp.eye(2), block_size=1):.4f}")
      0.2201
      >>> loss, metrics = jaxloss.classifier_loss(features, labels, jnp.eye(2), metrics=True)
      >>> print(f"{metrics.accuracy:.2f} {metrics.logsumexp:.4f}")
      1.00 2.2201

    References:
      Liu et al., Negative Margin Matters, ECCV 2020, eq. (7), (8).
      Deng et al., ArcFace, CVPR 2019, eq. (3); Sub-center ArcFace, ECCV 2020.
      Milakov and Gimelshein, Online Normalizer Calculation for Softmax, 2018.
      Gemma Team, Gemma 2: Improving Open Language Models at a Practical Size, 2024 (`soft_cap`).
    """
    checks.choice("similarity", similarity, ("inner", "cosine"))
    checks.block_size(block_size)
    if checks.is_soft(labels) and checks.rank(weights) == 1:
        raise ValueError("`weights` must have shape [d, C]; did you swap `labels` and `weights`?")
    features, labels, valid = batch.checked_rows("features", features, labels, where, soft=True)
    features = batch.zero_invalid(features, valid)
    weights, bias = checks.classifier(features, weights, bias, sub_centres=similarity == "cosine")
    if shared := batch.axis_names(axis_name) & batch.axis_names(class_axis_name):
        raise ValueError(
            f"`class_axis_name` and `axis_name` must have no axis in common, got {set(shared)}"
        )

    wide = linear.wide_dtype(*jax.tree.leaves((features, weights, bias)))
    scale = checks.in_range("scale", scale, wide, above=0)
    label_smoothing = checks.in_range("label_smoothing", label_smoothing, wide, at_least=0, below=1)
    penalty = checks.in_range("logsumexp_penalty", logsumexp_penalty, wide)
    if soft_cap is not None:
        soft_cap = checks.in_range("soft_cap", soft_cap, wide, above=0)
    angles = angular_margin, sample_angular_margin
    num_own = weights.shape[1]
    if labels.ndim == 2:
        _check_targets(labels, weights, class_axis_name, (margin, sample_margin, *angles))
        margins = Margins(0.0, None)
    else:
        margins = margins_of_samples(
            (margin, sample_margin), angles, labels, valid, wide, num_own, class_axis_name
        )
    if margins.angle is not None and soft_cap is not None:
        raise ValueError("`soft_cap` and angular margins, which need cosines, exclude each other")
    if margins.angle is not None and similarity == "inner":
        raise ValueError(
            "`angular_margin` and `sample_angular_margin` are for cosines, got "
            "similarity='inner'; use similarity='cosine'"
        )

    own_bias = None
    if margins.angle is not None and bias is not None:
        own_bias = batch.of_own_class(bias.astype(wide), labels, class_axis_name)
    terms = _Terms(margins, own_bias, scale, label_smoothing, penalty)
    kind, inputs = class_blocks.prepared(
        (features, labels, weights, bias), scale, similarity, block_size
    )
    kind = kind._replace(has_metrics=metrics)
    if soft_cap is not None:
        inputs = inputs._replace(cap=jnp.asarray(scale * soft_cap, wide))
    if labels.ndim == 2:
        largest = jnp.argmax(labels, axis=1) if metrics else 0
        inputs = inputs._replace(targets=labels, labels=jnp.where(valid, largest, -1))
    size = class_blocks.rows_of_block(kind, inputs)
    if size and block_size is None and class_axis_name is None and reduction != "none":
        shares = batch.shares(valid, sample_weights, reduction, axis_name, wide)
        total, watched = _by_rows(kind, inputs, size, terms, valid, shares)
        loss = batch.sum_over(total, axis_name)
    else:
        found = class_blocks.over_classes(kind, inputs, class_axis_name)
        num_classes = num_own * (1 if class_axis_name is None else batch.axis_size(class_axis_name))
        values, *of_rows = _values(found, terms, inputs.labels, valid, num_classes)
        loss = batch.reduce(values, valid, sample_weights, reduction, axis_name)
        watched = [jnp.sum(jnp.where(valid, x, 0)) for x in of_rows]
    if not metrics:
        return loss
    number = batch.sum_over(jnp.sum(valid, dtype=wide), axis_name)
    number = jnp.where(number == 0, 1, number)
    return loss, ClassifierMetrics(*(batch.sum_over(x, axis_name) / number for x in watched))


def _check_targets(
    targets: Float[Array, "n C"],
    weights: Float[Array, "d C *K"],
    class_axis_name: AxisName | None,
    margins: tuple[Any, ...],
) -> None:
    """Raises for what class indices alone allow, and unless there is a target for each class."""
    needs = None
    if class_axis_name is not None:
        needs = f"class_axis_name={class_axis_name!r}; for targets, pass all weights to each device"
    for name, margin in zip(_MARGINS, margins, strict=True):
        is_number = isinstance(margin, int | float)
        if margin is not None and (not is_number or margin != 0):
            needs = f"`{name}`, which lowers the logit of a sample's class"
    if needs is not None:
        raise ValueError(f"`labels` must be class indices, got {targets.shape}, for {needs}")
    source = f"`weights` {weights.shape}"
    checks.same_size("labels", targets, "n C", "C", weights.shape[1], source)


_MARGINS = "margin", "sample_margin", "angular_margin", "sample_angular_margin"


class _Terms(NamedTuple):
    """What the loss of a sample depends on beside its logits: numbers, or `[n]`."""

    margins: Margins
    own_bias: Float[Array, " n"] | None
    """The bias of the sample's class, where its cosine is needed."""
    scale: Number | Float[Array, " n"]
    label_smoothing: Number | Float[Array, " n"]
    logsumexp_penalty: Number | Float[Array, " n"]


def _values(
    found: OfLogits,
    terms: _Terms,
    labels: Integer[Array, " n"],
    valid: Bool[Array, " n"],
    num_classes: int,
) -> list[Float[Array, " n"]]:
    """Returns the losses, from the logits β z without margins, and what metrics are means of."""
    margins, own_bias, scale, label_smoothing, penalty = terms
    target, rest, total, mass, watched = found
    # Without angles, no cosine is needed.
    cosines = target if margins.angle is None else target / scale
    if own_bias is not None:  # The logit is β (cos θ + b).
        # A class that is left out has an infinite loss, whatever its cosine.
        cosines = jnp.where(own_bias == -jnp.inf, 0, cosines - own_bias)
    lowered_by = scale * lowering(margins, cosines)
    log_sum = rest
    if mass is None:
        # −log(e^a / (e^a + e^b)) = softplus(b − a) does not cancel for a small loss. Margins come
        # after the difference: beside a large logit, they would be lost.
        gap = rest - target + lowered_by
        values, mass = softplus(gap), 1
        if watched is not None or is_on(penalty):
            larger = jnp.where(gap > 0, rest, target - lowered_by)
            log_sum = larger + softplus(jnp.where(gap > 0, -gap, gap))
    else:
        mass = mass + batch.zero_or_nan(mass)
        values = mass * rest - target
    if is_on(label_smoothing):
        gaps = target - mass * (total / num_classes) - lowered_by * (1 - 1 / num_classes)
        if isinstance(label_smoothing, jax.Array):  # At 0, a class that is left out adds nothing.
            gaps = jnp.where((label_smoothing == 0) & (gaps == jnp.inf), 0, gaps)
        values = values + label_smoothing * gaps
    if is_on(penalty):
        values = values + penalty * jnp.square(log_sum)
    values = batch.nan_where_no_class(values, labels, valid, num_classes)
    if watched is None:
        return [values]
    hits = (watched[0] > watched[1]) & (labels < num_classes)
    log_sum = batch.nan_where_no_class(log_sum, labels, valid, num_classes)
    return [values, hits.astype(values.dtype), lax.stop_gradient(log_sum)]


# The logits of all classes, for a block of rows at a time ----


class _Known(NamedTuple):
    """What is known of a sum before the first number."""

    kind: Kind
    structure: Any
    """Of the terms."""
    places: tuple[tuple[str, Any], ...]
    """Where each term is: a number, or its index among those of the rows or the shared ones."""


def _by_rows(
    kind: Kind,
    inputs: Inputs,
    size: int,
    terms: _Terms,
    valid: Bool[Array, " n"],
    shares: Float[Array, " n"],
) -> tuple[Float[Array, ""], list[Float[Array, ""]]]:
    """Returns the sum of the losses times their shares, with its gradient, and sums for metrics."""
    kinds, inputs = class_blocks.unit_vectors(kind, inputs)
    leaves, structure = jax.tree.flatten(terms)
    places, arrays = [], {"rows": [], "shared": []}
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            where = "rows" if leaf.ndim else "shared"
            places.append((where, len(arrays[where])))
            arrays[where].append(leaf)
        else:
            places.append(("number", leaf))
    floats = in_blocks((inputs.features, shares, arrays["rows"], inputs.targets), size)
    integers = in_blocks((inputs.labels, valid), size)
    shared = inputs.weights, inputs.bias, arrays["shared"], inputs.cap
    known = [_Known(kind, structure, tuple(places)) for kind in kinds]
    totals = partial(_total, known[0]), partial(_total, known[1])
    return sum_of_blocks(totals, *batch.vary_alike((floats, integers, shared)))


def _total(
    known: _Known, floats: Any, integers: Any, shared: Any
) -> tuple[Float[Array, ""], list[Float[Array, ""]]]:
    (features, shares, of_rows, targets), (labels, valid) = floats, integers
    vectors, bias, of_all, cap = shared
    arrays = {"rows": of_rows, "shared": of_all}
    leaves = [arrays[where][k] if where in arrays else k for where, k in known.places]
    terms = jax.tree.unflatten(known.structure, leaves)
    # Padding has no target, which may be a class that is left out.
    own = jnp.where(valid, labels.astype(jnp.int32), -1)
    inputs = Inputs(features, None, own, vectors, bias, targets, cap)
    found: Any = class_blocks.in_blocks(known.kind, inputs)
    values, *watched = _values(found, terms, labels, valid, vectors.shape[1])
    total = jnp.sum(shares * jnp.where(valid, values, 0))
    return total, [jnp.sum(jnp.where(valid, x, 0)) for x in watched]
