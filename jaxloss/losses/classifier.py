"""Softmax cross-entropy of a classifier, with its classes visited block by block.

Of each row three numbers are kept: the log-sum-exp over the other classes, the target's logit, and
the sum of the logits. The gradient visits the blocks again. It computes their logits anew, unless
they fit in the array of the weights' gradient, `[d, C]`, which keeps them until then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Bool, Float, Integer

from jaxloss.core import batch, checks, linear, logsumexp
from jaxloss.core.backend import indices, on_cpu
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.checks import Number
from jaxloss.core.logsumexp import Part, is_at_most, is_on, softplus, unless_left_out
from jaxloss.core.products import Low, low_dtypes, rounded, row_products, times, wide_product
from jaxloss.core.sharding import divided
from jaxloss.losses.logits import flat_columns, largest_of_class
from jaxloss.losses.margins import lowering, margins_of_samples

ClassSimilarity: TypeAlias = Literal["inner", "cosine"]
_First: TypeAlias = Integer[Array, ""] | int
"""The first class of a block."""


class _OfLogits(NamedTuple):
    """What the loss needs of the logits `[n, C]` of its rows, each `[n]`."""

    target: Float[Array, " n"]
    """Logit of the target; 0 if it is not among the classes."""
    rest: Float[Array, " n"]
    """Log-sum-exp over the classes other than the target; the lowest float if there are none."""
    total: Float[Array, " n"]
    """Sum over the classes."""


@divided
def classifier_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    weights: Float[Array, "d C *K"],
    bias: Float[Array, " C"] | None = None,
    *,
    similarity: ClassSimilarity = "inner",
    margin: Number | Float[Array, " C"] = 0.0,
    scale: Number = 1.0,
    sample_margin: Float[Array, " n"] | None = None,
    angular_margin: Number | Float[Array, " C"] = 0.0,
    sample_angular_margin: Float[Array, " n"] | None = None,
    label_smoothing: Number = 0.0,
    block_size: int | None = None,
    class_axis_name: AxisName | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Softmax cross-entropy of a linear or cosine classifier, for any number of classes.

    .. math:: \ell_i = -\sum_c t_{ic} \log \frac{e^{a_{ic}}}{\sum_k e^{a_{ik}}},
       \quad a_{ic} = β (z_{ic} - m_i [y_i = c]),
       \quad t_{ic} = (1-ε) [y_i = c] + ε / C

    It equals `margin_softmax_loss` of `linear_logits` or `cosine_logits`; with m = 0 and β = 1, it
    equals `softmax_loss` of them. With angular margins, the target's cosine changes as in
    `margin_softmax_loss`, before the bias is added. If the classes are visited in several blocks,
    the logits `[n, C]`, or `[n, C, K]`, need no memory of their own.

    Args:
      features: `[n, d]`.
      labels: `[n]`, class indices.
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
      block_size: Number of classes in a block. By default it follows from the shapes and the
        backend, with a single block where n·C is small or C ≤ 4d. A single block keeps its logits
        for the gradient. So do several if n ≤ d, in the memory of the weights' gradient; otherwise
        they are computed again, as always for bfloat16 and float16 on an accelerator. These and
        several blocks have a custom gradient: take it with `jax.grad`, because `jax.jvp` of the
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

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `scale`, `label_smoothing`, `angular_margin` or `block_size` is out of range,
        `similarity` is unknown, `similarity="inner"` comes with angular margins or sub-centres, or
        `class_axis_name` has an axis of `axis_name`.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features, labels = jnp.array([[1.0, 2.0], [2.0, 0.0]]), jnp.array([1, 0])
      >>> print(f"{jaxloss.classifier_loss(features, labels, jnp.eye(2), block_size=1):.4f}")
      0.2201

    References:
      Liu et al., Negative Margin Matters, ECCV 2020, eq. (7), (8).
      Deng et al., ArcFace, CVPR 2019, eq. (3); Sub-center ArcFace, ECCV 2020.
      Milakov and Gimelshein, Online Normalizer Calculation for Softmax, 2018.
    """
    checks.choice("similarity", similarity, ("inner", "cosine"))
    checks.block_size(block_size)
    features, labels, valid = batch.labelled_rows(features, labels, where)
    weights, bias = checks.classifier(features, weights, bias, sub_centres=similarity == "cosine")
    if shared := batch.axis_names(axis_name) & batch.axis_names(class_axis_name):
        raise ValueError(
            f"`class_axis_name` and `axis_name` must have no axis in common, got {set(shared)}"
        )

    wide = linear.wide_dtype(*jax.tree.leaves((features, weights, bias)))
    scale = checks.in_range("scale", scale, wide, above=0)
    label_smoothing = checks.in_range("label_smoothing", label_smoothing, wide, at_least=0, below=1)
    angles = angular_margin, sample_angular_margin
    num_own = weights.shape[1]
    margins = margins_of_samples(
        (margin, sample_margin), angles, labels, valid, wide, num_own, class_axis_name
    )
    if margins.angle is not None and similarity == "inner":
        raise ValueError(
            "`angular_margin` and `sample_angular_margin` are for cosines, got "
            "similarity='inner'; use similarity='cosine'"
        )

    # Of the logits β z: the target's, log Σ e^(β z) over the other classes, and Σ β z over all.
    target, rest, total = _over_classes(
        features, labels, weights, bias, scale, similarity, block_size, class_axis_name
    )
    # Without angles, no cosine is needed.
    cosines = target
    if margins.angle is not None:
        cosines = target / scale  # The logit is β (cos θ + b).
        if bias is not None:  # A class that is left out has an infinite loss, whatever its cosine.
            own_bias = batch.of_own_class(bias.astype(target.dtype), labels, class_axis_name)
            cosines = jnp.where(own_bias == -jnp.inf, 0, cosines - own_bias)
    lowered_by = scale * lowering(margins, cosines)
    # −log(e^a / (e^a + e^b)) = softplus(b − a) does not cancel for a small loss. Margins come after
    # the difference: beside a large logit, they would be lost.
    values = softplus(rest - target + lowered_by)
    num_classes = num_own * (1 if class_axis_name is None else batch.axis_size(class_axis_name))
    if is_on(label_smoothing):
        gaps = target - total / num_classes - lowered_by * (1 - 1 / num_classes)
        if isinstance(label_smoothing, jax.Array):  # At 0, a class that is left out adds nothing.
            gaps = jnp.where((label_smoothing == 0) & (gaps == jnp.inf), 0, gaps)
        values = values + label_smoothing * gaps
    values = batch.nan_where_no_class(values, labels, valid, num_classes)
    return batch.reduce(values, valid, sample_weights, reduction, axis_name)


def _over_classes(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    weights: Float[Array, "d C *K"],
    bias: Float[Array, " C"] | None,
    scale: Number,
    similarity: ClassSimilarity,
    block_size: int | None,
    class_axis_name: AxisName | None,
) -> _OfLogits:
    """Returns what the loss needs of the logits `β z`, also of classes on other devices."""
    arrays = jax.tree.leaves((features, weights, bias))
    wide, low = linear.wide_dtype(*arrays), low_dtypes(*arrays)[:2]
    features = features.astype(wide)
    if bias is not None:
        bias = bias.astype(wide)
        bias = unless_left_out(scale, bias) * bias
    num_classes = weights.shape[1]
    size = _classes_of_block(features, weights) if block_size is None else block_size
    first = batch.first_position(num_classes, class_axis_name)
    labels = labels - jnp.asarray(first, labels.dtype)
    factors, is_near = None, False
    if any(low):
        # Norms and scale come in after the product: before it, rows would not be exact.
        factors = jnp.full_like(features, scale, shape=labels.shape)
        if similarity == "cosine":
            features = features * linear.power_of_two_scale(features)
            factors = factors * linear.inverse_norms_of_scaled(features)
            is_near = bias is None and is_at_most(64, scale) and num_classes >= _SAMPLED
    else:
        # Scaled features and a scaled bias have scaled logits.
        features = scale * (linear.l2_normalize(features) if similarity == "cosine" else features)
    kind = _Kind(similarity, min(size, num_classes), low, is_near)
    visit = _one_block if size >= num_classes and factors is None else _in_blocks
    found: Any = visit(kind, batch.vary_alike(_Inputs(features, factors, labels, weights, bias)))
    if class_axis_name is None:
        return found
    every = jnp.ones_like(found.rest, dtype=bool)
    rest = logsumexp.logsumexp(
        found.rest[:, None], every[:, None], axis=1, axis_name=class_axis_name
    )
    target, total = (batch.sum_over(part, class_axis_name) for part in (found.target, found.total))
    return _OfLogits(target, rest, total)


def _classes_of_block(features: Float[Array, "n d"], weights: Float[Array, "d C *K"]) -> int:
    """Returns the number of classes whose logits are computed at once.

    All of them where the logits are few, or not many more than the features. Otherwise, on a CPU,
    the logits and the weights of a block fit into a cache of 1 MB, or it has 512 columns: each
    block adds to the gradient of all features, which is slow in many small ones.
    """
    (number, dim), num_classes = features.shape, weights.shape[1]
    num_columns = weights.size // dim
    all_logits, in_cache = (2**20, 2**18) if on_cpu() else (2**24, 2**26)
    known = linear.sizes_are_known(number)
    if num_columns <= 4 * dim or (known and number * num_columns <= all_logits):
        return num_classes
    columns = max(512, in_cache // (number + dim) // 128 * 128) if known else 512
    return max(1, columns * num_classes // num_columns)


class _Inputs(NamedTuple):
    """What the logits are computed from: `z_ic = a_i r_c x_i · w_c + b_c`."""

    features: Float[Array, "n d"]
    factors: Float[Array, " n"] | None
    """a. With None, a and the inverse norms r are in the features and in the weight vectors."""
    labels: Any
    weights: Float[Array, "d C *K"]
    bias: Float[Array, " C"] | None


class _OfSomeLogits(NamedTuple):
    """`_OfLogits` of some of the classes."""

    target: Float[Array, " n"]
    rest: Part
    total: Float[Array, " n"]


def _sums(
    logits: Float[Array, "n B"],
    is_target: Bool[Array, "n B"],
    peak: Float[Array, " n"] | None = None,
) -> _OfSomeLogits:
    """With a peak, the rest is relative to it."""
    if peak is None:
        rest = logsumexp.part(logits, ~is_target, axis=1)
    else:
        rest = logsumexp.part_relative_to(peak, logits, ~is_target, axis=1)
    target = jnp.sum(jnp.where(is_target, logits, 0), axis=1)
    return _OfSomeLogits(target, rest, jnp.sum(logits, axis=1))


def _merge(a: _OfSomeLogits, b: _OfSomeLogits) -> _OfSomeLogits:
    return _OfSomeLogits(a.target + b.target, logsumexp.merge(a.rest, b.rest), a.total + b.total)


def _result(sums: _OfSomeLogits) -> _OfLogits:
    # A class that is left out has a logit of -inf, from which -inf cannot be subtracted.
    rest = logsumexp.finite_from_below(logsumexp.result(sums.rest))
    return _OfLogits(sums.target, rest, sums.total)


class _Kind(NamedTuple):
    """How logits are computed."""

    similarity: ClassSimilarity
    block_size: int
    low: tuple[Low, Low]
    """In which low dtype features and weights are exact. Then norms come in after the product."""
    is_near: bool
    """Whether all logits are between -64 and 64, so that they need no maximum."""


_SAMPLED = 128
"""Classes, of which the largest logit stands for that of all."""


def _vectors(
    kind: _Kind, dtype: Any, norms: linear.InverseNorms | None, block: Float[Array, "d B *K"]
) -> tuple[Float[Array, "d _"], linear.InverseNorms | None]:
    """Returns the columns that features are multiplied with, and for cosines inverse norms.

    Norms that are known are not computed again. Columns of low precision have their scale only.
    """
    vectors = flat_columns(block.astype(dtype))
    if kind.similarity == "cosine":
        if not any(kind.low):
            norms = linear.inverse_norms(vectors, axis=0) if norms is None else norms
            return linear.l2_normalize(vectors, axis=0, norms=norms), norms
        power_of_two = linear.power_of_two_scale(vectors, axis=0) if norms is None else norms.scale
        vectors = vectors * power_of_two
        if norms is None:
            norms = linear.InverseNorms(
                power_of_two, linear.inverse_norms_of_scaled(vectors, axis=0)[None, :]
            )
    return _exact_in(kind.low[1], vectors), norms


def _exact_in(low: Low, array: Float[Array, "a b"]) -> Float[Array, "a b"]:
    return array if low is None else array.astype(low)


def _products(
    rows: Float[Array, "n d"],
    factors: Float[Array, " n"] | None,
    vectors: Float[Array, "d _"],
    norms: linear.InverseNorms | None,
) -> tuple[Float[Array, "n _"], Float[Array, "n _"] | None]:
    """Returns the products, and by what those of rows and vectors are multiplied in them."""
    if factors is None:
        return wide_product(rows, vectors), None
    of_products = factors[:, None]
    if norms is not None:
        of_products = of_products * norms.relative
    return row_products(rows, vectors.T) * of_products, of_products


def _logits(
    products: Float[Array, "n _"], weights: Float[Array, "d B *K"], bias: Float[Array, " B"] | None
) -> Float[Array, "n B"]:
    """Returns the logits of classes from the products with their vectors."""
    logits = largest_of_class(products, weights)
    return logits if bias is None else logits + bias[None, :]


def _is_target(labels: Integer[Array, " n"], first: _First, size: int) -> Bool[Array, "n B"]:
    """Returns which of the classes from `first` on is the target of a row."""
    classes = first + indices(size)
    return labels[:, None] == classes.astype(labels.dtype)[None, :]


def _one_block(kind: _Kind, inputs: _Inputs) -> _OfLogits:
    features, _, labels, weights, bias = inputs
    vectors = _vectors(kind, features.dtype, None, weights)[0]
    logits = _logits(linear.product_with_columns(features, vectors), weights, bias)
    return _result(_sums(logits, _is_target(labels, 0, weights.shape[1])))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(kind: _Kind, inputs: _Inputs) -> _OfLogits:
    """Returns the same as `_one_block`, without logits of more than a block of classes."""
    return _found_and_products(kind, inputs, keep=False)[0]


def _forward(kind: _Kind, inputs: Any) -> tuple[_OfLogits, Any]:
    values = jax.tree.map(lambda x: x.value, inputs, is_leaf=lambda x: hasattr(x, "perturbed"))
    number, dim = values.features.shape
    # The products wait for the gradient in its own array: no memory, and one product less.
    keep = (
        values.factors is None
        and inputs.weights.perturbed
        and linear.sizes_are_known(number)
        and number <= dim
        and _empty_gradient(values.weights).dtype == values.features.dtype
    )
    found, *kept = _found_and_products(kind, values, keep=keep)
    return found, (values, found.rest, *kept)


def _found_and_products(
    kind: _Kind, inputs: _Inputs, *, keep: bool
) -> tuple[_OfLogits, Float[Array, "d C *K"] | None, Any]:
    """Returns what is found, and for the gradient kept products and norms of weight vectors.

    The products, if kept, are in the first n of the d rows of an array like the weights.
    """
    features, factors, labels, weights, bias = inputs
    rows = _exact_in(kind.low[0], features)

    def logits_of(
        first: _First, size: int
    ) -> tuple[Array, Array, Array, linear.InverseNorms | None]:
        block, block_bias = _block((weights, bias), first, size)
        vectors, norms = _vectors(kind, features.dtype, None, block)
        products, _ = _products(rows, factors, vectors, norms)
        logits = _logits(products, block, block_bias)
        return products, logits, _is_target(labels, first, size), norms

    peak = None
    if kind.is_near:
        _, logits, is_target, _ = logits_of(0, _SAMPLED)
        # No exponential is then above e^74, and no sum of them below e^-54.
        peak = jnp.max(jnp.where(is_target, -10, logits), axis=1)
        peak = lax.stop_gradient(jnp.maximum(peak, -10))

    def visit(carry: Any, first: _First, size: int, _: None) -> tuple[Any, Any]:
        sums, kept = carry
        products, logits, is_target, norms = logits_of(first, size)
        if kept is not None:
            kept = _with_block(kept, products.reshape(-1, size, *weights.shape[2:]), first)
        return (_merge(sums, _sums(logits, is_target, peak)), kept), norms

    zero = jnp.zeros_like(features, shape=labels.shape)
    nothing = _OfSomeLogits(zero, Part(zero - jnp.inf, zero), zero)
    carry = (nothing, _empty_gradient(weights) if keep else None)
    (sums, kept), norms = _over_blocks(visit, carry, weights.shape[1], kind.block_size)
    return _result(sums), kept, norms


def _backward(kind: _Kind, residuals: Any, cotangents: _OfLogits) -> tuple[_Inputs]:
    (features, factors, labels, weights, bias), rest, kept, norms = residuals
    cotangents = _OfLogits(
        *(jnp.zeros_like(rest) if isinstance(x, SymbolicZero) else x for x in cotangents)
    )
    rows = _exact_in(kind.low[0], features)
    # XLA multiplies row-major factors fastest on a CPU.
    columns = features.T

    def visit(gradients: Any, first: _First, size: int, norms: Any) -> tuple[Any, None]:
        d_features, d_weights, d_bias = gradients
        block, block_bias = _block((weights, bias), first, size)
        of_block = partial(_vectors, kind, features.dtype, norms)
        vectors, pull_back, norms = jax.vjp(of_block, block, has_aux=True)
        if kept is None:
            products, of_products = _products(rows, factors, vectors, norms)
        else:
            products = flat_columns(_block(d_weights, first, size))[: features.shape[0]]
            of_products = None
        is_target = _is_target(labels, first, size)
        d_products, d_logits = _slopes(products, block, block_bias, rest, is_target, cotangents)
        if of_products is None:
            (d_block,) = pull_back(wide_product(columns, d_products))
            d_features = d_features + wide_product(d_products, vectors.T)
        else:
            d_products = rounded(d_products * of_products, kind.low[0] or kind.low[1])
            d_features = d_features + times(d_products, vectors.T)
            d_vectors = times(d_products.T, rows).T
            if norms is not None:
                vectors = vectors.astype(d_vectors.dtype)
                d_vectors = (
                    linear.tangential(d_vectors, vectors, norms.relative, axis=0) * norms.scale
                )
            d_block = d_vectors.reshape(block.shape)
        d_weights = _with_block(d_weights, d_block, first)
        if d_bias is not None:
            d_bias = _with_block(d_bias, jnp.sum(d_logits, axis=0), first)
        return (d_features, d_weights, d_bias), None

    d_features, d_bias = jax.tree.map(_empty_gradient, (features, bias))
    d_weights = _empty_gradient(weights) if kept is None else kept
    carry = (d_features, d_weights, d_bias)
    gradients, _ = _over_blocks(visit, carry, weights.shape[1], kind.block_size, norms)
    d_features, d_weights, d_bias = gradients
    d_factors = None
    if factors is not None:
        # The products do not know the factors, of which `Σ_c d_ic z_ic` is the gradient.
        d_factors = jnp.sum(features * d_features, axis=1) * linear.inverse_or_zero(factors)
    return (_Inputs(d_features, d_factors, None, d_weights.astype(weights.dtype), d_bias),)


_in_blocks.defvjp(_forward, _backward, symbolic_zeros=True)


def _slopes(
    products: Float[Array, "n _"],
    weights: Float[Array, "d B *K"],
    bias: Float[Array, " B"] | None,
    rest: Float[Array, " n"],
    is_target: Bool[Array, "n B"],
    cotangents: _OfLogits,
) -> tuple[Float[Array, "n _"], Float[Array, "n B"]]:
    """Returns the gradients by the products and by the logits of a block of classes."""
    logits, to_products = jax.vjp(lambda products: _logits(products, weights, bias), products)
    softmax = jnp.exp(jnp.where(is_target, 0, logits - rest[:, None]))
    of_rest = cotangents.rest[:, None] * softmax
    d_logits = jnp.where(is_target, cotangents.target[:, None], of_rest) + cotangents.total[:, None]
    return to_products(d_logits)[0], d_logits


def _block(arrays: Any, first: _First, size: int) -> Any:
    """Returns `size` of the classes, the second axis of the weights and the only one of a bias."""
    # Without the barrier, XLA on a CPU converts all of a bfloat16 array ahead of the loop.
    if on_cpu():
        arrays, first = lax.optimization_barrier((arrays, first))
    return jax.tree.map(
        lambda array: lax.dynamic_slice_in_dim(array, first, size, min(1, array.ndim - 1)), arrays
    )


def _with_block(array: Array, block: Array, first: _First) -> Array:
    """Returns `array` with `block` in place of classes."""
    block = block.astype(array.dtype)
    return lax.dynamic_update_slice_in_dim(array, block, first, min(1, array.ndim - 1))


def _empty_gradient(array: Float[Array, " ..."]) -> Float[Array, " ..."]:
    """Returns the zeros into which the gradients of blocks are written."""
    # For each block of a bfloat16 array, XLA on a CPU would convert the array there and back.
    slow = array.dtype == jnp.bfloat16 and on_cpu()
    return jnp.zeros_like(array, dtype=jnp.float32 if slow else array.dtype)


def _over_blocks(
    visit: Callable[[Any, _First, int, Any], tuple[Any, Any]],
    carry: Any,
    num_classes: int,
    block_size: int,
    given: tuple[Any, Any] = (None, None),
) -> tuple[Any, tuple[Any, Any]]:
    """Calls `visit(carry, first class, number of classes, given)` on every block of the classes.

    The last block, which is smaller, comes first: what it computes is then in the carry, and not in
    memory during the scan. What is given to the visits, and what they return beside the carry, is
    a pair: of the last block if it is smaller, and of the other blocks, one after the other.
    """
    num_blocks, remainder = divmod(num_classes, block_size)
    last, others = given
    if remainder:
        carry, last = visit(carry, num_blocks * block_size, remainder, last)

    def step(carry: Any, block: tuple[Array, Any]) -> tuple[Any, Any]:
        return visit(carry, block[0], block_size, block[1])

    starts = jnp.arange(num_blocks, dtype=jnp.int32) * block_size
    carry, others = lax.scan(step, carry, (starts, others))
    return carry, (last, others)
