"""What a softmax cross-entropy needs of its logits, with the classes visited block by block.

Of each row three numbers are kept: the log-sum-exp over the other classes, the target's logit, and
the sum of the logits. The gradient visits the blocks again. It computes their logits anew, unless
they fit in the array of the weights' gradient, `[d, C]`, which keeps them until then, or there is
a single block of wide numbers.
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

from jaxloss.core import batch, linear, logsumexp
from jaxloss.core.backend import indices, on_cpu
from jaxloss.core.batch import AxisName
from jaxloss.core.blocks import even_size
from jaxloss.core.checks import Number
from jaxloss.core.logsumexp import Part, is_at_most, unless_left_out
from jaxloss.core.products import (
    Low,
    low_dtypes,
    meets_in_one_pass,
    rounded,
    row_products,
    switch,
    times,
    wide_product,
)
from jaxloss.losses.logits import flat_columns, largest_of_class

ClassSimilarity: TypeAlias = Literal["inner", "cosine"]
_First: TypeAlias = Integer[Array, ""] | int
"""The first class of a block."""


class OfLogits(NamedTuple):
    """What the loss needs of the logits `[n, C]` of its rows, each `[n]`."""

    target: Float[Array, " n"]
    """Logit of the target; 0 if it is not among the classes. With soft targets, `Σ_c t_c z_c`."""
    rest: Float[Array, " n"]
    """Log-sum-exp over the classes other than the target; the lowest float if there are none. With
    soft targets, over all classes."""
    total: Float[Array, " n"]
    """Sum over the classes."""
    mass: Float[Array, " n"] | None
    """Sum of soft targets; infinity where one is below 0."""
    watched: tuple[Float[Array, " n"], Float[Array, " n"]] | None
    """For metrics, without a gradient: the logit of the row's class, and the largest of others."""


class Inputs(NamedTuple):
    """What the logits are computed from: `z_ic = a_i r_c x_i · w_c + b_c`."""

    features: Float[Array, "n d"]
    factors: Float[Array, " n"] | None
    """a. With None, a is in the features."""
    labels: Any
    """Beside targets, the class of the largest one; -1 for rows whose targets are not read."""
    weights: Float[Array, "d C *K"]
    """r are their inverse norms, or 1."""
    bias: Float[Array, " C"] | None
    targets: Float[Array, "n C"] | None = None
    cap: Float[Array, ""] | None = None
    """s of logits `s tanh(z / s)`."""


class Kind(NamedTuple):
    """How logits are computed."""

    similarity: ClassSimilarity
    """Of rows that are scaled, and normalised for cosines, with the weight vectors."""
    block_size: int
    low: tuple[Low, Low]
    """In which low dtype features and weights are exact. Then norms come in after the product."""
    is_near: bool
    """Whether all logits are between -64 and 64, so that they need no maximum."""
    switch: Any
    """JAX's own switch of precision. A backward pass may be traced outside of the user's `with`."""
    has_metrics: bool = False


def prepared(
    arrays: tuple[Array, Any, Array, Array | None],
    scale: Number,
    similarity: ClassSimilarity,
    block_size: int | None,
) -> tuple[Kind, Inputs]:
    """Returns what the logits `β z` are computed from, from features, labels, weights and bias."""
    features, labels, weights, bias = arrays
    floats = jax.tree.leaves((features, weights, bias))
    wide, low = linear.wide_dtype(*floats), low_dtypes(*floats)[:2]
    features = features.astype(wide)
    if bias is not None:
        bias = bias.astype(wide)
        bias = unless_left_out(scale, bias) * bias
    size = _classes_of_block(features, weights) if block_size is None else block_size
    factors, is_near = None, False
    if any(low):
        # Norms and scale come in after the product: before it, rows would not be exact.
        factors = jnp.full_like(features, scale, shape=features.shape[:1])
        if similarity == "cosine":
            features = features * linear.power_of_two_scale(features)
            factors = factors * linear.inverse_norms_of_scaled(features)
            is_near = bias is None and is_at_most(64, scale) and weights.shape[1] >= _SAMPLED
    else:
        # Scaled features and a scaled bias have scaled logits.
        features = scale * (linear.l2_normalize(features) if similarity == "cosine" else features)
    kind = Kind(similarity, min(size, weights.shape[1]), low, is_near, switch())
    return kind, Inputs(features, factors, labels, weights, bias)


def _classes_of_block(features: Float[Array, "n d"], weights: Float[Array, "d C *K"]) -> int:
    """Returns the number of classes whose logits are computed at once.

    All of them where the logits are few, or not many more than the features. Otherwise, on a CPU,
    the logits and the weights of a block fit into a cache of 1 MB, or it has 512 columns: each
    block adds to the gradient of all features, which is slow in many small ones. On accelerators,
    all blocks but a small one have the same size.
    """
    (number, dim), num_classes = features.shape, weights.shape[1]
    num_columns = weights.size // dim
    all_logits, in_cache = (2**20, 2**18) if on_cpu() else (2**24, 2**26)
    known = linear.sizes_are_known(number)
    if num_columns <= 4 * dim or (known and number * num_columns <= all_logits):
        return num_classes
    columns = max(512, in_cache // (number + dim) // 128 * 128) if known else 512
    size = max(1, columns * num_classes // num_columns)
    if on_cpu() or size < 512 or size >= num_classes:
        return size
    return num_classes // -(-num_classes // size) // 128 * 128


def rows_of_block(kind: Kind, inputs: Inputs) -> int | None:
    """Returns of how many rows the logits of all classes fit, where that is the faster way.

    It is where the gradient would compute the logits again, and products are the larger part of the
    time: not of short rows, or of a low precision.
    """
    (number, dim), num_classes = inputs.features.shape, inputs.weights.shape[1]
    if any(kind.low) or kind.block_size == num_classes or not linear.sizes_are_known(number):
        return None
    most = (2**22 if on_cpu() else 2**26) // (inputs.weights.size // dim)
    if most < 128 or number <= dim or dim < 128:
        return None
    if inputs.targets is not None:
        return even_size(number, 128, min(3 * most // 2, 1024))
    blocks = -(-number // most)
    return -(-number // (8 * blocks)) * 8


def unit_vectors(kind: Kind, inputs: Inputs) -> tuple[tuple[Kind, Kind], Inputs]:
    """Returns the same with the weight vectors normalised for cosines, in blocks and in one."""
    vectors = inputs.weights.astype(inputs.features.dtype)
    if kind.similarity == "cosine":
        units = linear.l2_normalize(flat_columns(vectors), axis=0)
        vectors = units.reshape(vectors.shape)
    kind = kind._replace(similarity="inner")
    kinds = kind, kind._replace(block_size=vectors.shape[1])
    return kinds, inputs._replace(weights=vectors)


def over_classes(kind: Kind, inputs: Inputs, class_axis_name: AxisName | None = None) -> OfLogits:
    """Returns what the loss needs of the logits, also of classes on other devices."""
    num_classes, labels = inputs.weights.shape[1], inputs.labels
    first = batch.first_position(num_classes, class_axis_name)
    if class_axis_name is not None:
        inputs = inputs._replace(labels=labels - jnp.asarray(first, labels.dtype))
    visit = in_blocks
    if kind.block_size == num_classes and inputs.factors is None:
        visit = _one_block
    found: Any = visit(kind, batch.vary_alike(inputs))
    if class_axis_name is None:
        return found
    every = jnp.ones_like(found.rest, dtype=bool)
    rest = logsumexp.logsumexp(
        found.rest[:, None], every[:, None], axis=1, axis_name=class_axis_name
    )
    target, total = (batch.sum_over(part, class_axis_name) for part in (found.target, found.total))
    watched = None
    if found.watched is not None:
        largest = batch.max_over(found.watched[1], class_axis_name)
        watched = lax.stop_gradient(target), largest
    return OfLogits(target, rest, total, None, watched)


class _OfSomeLogits(NamedTuple):
    """`OfLogits` of some of the classes."""

    target: Float[Array, " n"]
    rest: Part
    total: Float[Array, " n"]
    mass: Float[Array, " n"] | None
    watched: tuple[Float[Array, " n"], Float[Array, " n"]] | None


_Own: TypeAlias = tuple[Bool[Array, "n B"], Float[Array, "n B"] | None]
"""Which of some classes is the label of a row, and their targets."""


def _sums(
    kind: Kind, logits: Float[Array, "n B"], own: _Own, peak: Float[Array, " n"] | None = None
) -> _OfSomeLogits:
    """With a peak, the rest is relative to it."""
    is_label, targets = own
    others = ~is_label if targets is None else jnp.ones_like(is_label)
    if peak is None:
        rest = logsumexp.part(logits, others, axis=1)
    else:
        rest = logsumexp.part_relative_to(peak, logits, others, axis=1)
    if targets is None:
        target, mass = jnp.sum(jnp.where(is_label, logits, 0), axis=1), None
    else:
        target = jnp.sum(targets * _zero_if_left_out(targets, logits), axis=1)
        mass = batch.mass_of(targets)
    watched = None
    if _is_watched(kind, targets):
        fixed = lax.stop_gradient(logits)
        largest = jnp.max(jnp.where(is_label, -jnp.inf, fixed), axis=1, initial=-jnp.inf)
        watched = jnp.sum(jnp.where(is_label, fixed, 0), axis=1), largest
    return _OfSomeLogits(target, rest, jnp.sum(logits, axis=1), mass, watched)


def _is_watched(kind: Kind, targets: Float[Array, "n _"] | None) -> bool:
    """Whether metrics need more than target and peak, which may be a sampled one."""
    return kind.has_metrics and (targets is not None or any(kind.low))


def _zero_if_left_out(
    targets: Float[Array, "n B"], logits: Float[Array, "n B"]
) -> Float[Array, "n B"]:
    """Returns the logits with 0 in place of -inf where the target is 0: 0 · ∞ is NaN."""
    return jnp.where((targets == 0) & (logits == -jnp.inf), 0, logits)


def _merge(a: _OfSomeLogits, b: _OfSomeLogits) -> _OfSomeLogits:
    watched = None
    if a.watched is not None and b.watched is not None:
        watched = a.watched[0] + b.watched[0], jnp.maximum(a.watched[1], b.watched[1])
    rest, mass = logsumexp.merge(a.rest, b.rest), jax.tree.map(jnp.add, a.mass, b.mass)
    return _OfSomeLogits(a.target + b.target, rest, a.total + b.total, mass, watched)


def _result(kind: Kind, sums: _OfSomeLogits) -> OfLogits:
    # A class that is left out has a logit of -inf, from which -inf cannot be subtracted.
    rest = logsumexp.finite_from_below(logsumexp.result(sums.rest))
    watched = sums.watched
    if kind.has_metrics and watched is None:
        watched = lax.stop_gradient(sums.target), sums.rest.peak
    return OfLogits(sums.target, rest, sums.total, sums.mass, watched)


_SAMPLED = 128
"""Classes, of which the largest logit stands for that of all."""


def _norms(kind: Kind, weights: Float[Array, "d C *K"], dtype: Any) -> linear.InverseNorms | None:
    """Returns the inverse norms of the weight vectors for cosines, `[1, C]` or `[1, C, K]`."""
    if kind.similarity == "inner":
        return None

    def norms_of(block: Float[Array, "d B *K"]) -> linear.InverseNorms:
        norms = linear.inverse_norms(flat_columns(block), axis=0, dtype=dtype)
        return jax.tree.map(lambda x: x.reshape(1, *block.shape[1:]), norms)

    if not on_cpu():
        return norms_of(weights)

    def visit(found: Any, first: _First, size: int) -> Any:  # Without a wide copy of all weights.
        norms = norms_of(_block(weights, first, size))
        return jax.tree.map(partial(_with_block, first=first), found, norms)

    zeros = jnp.zeros_like(weights, dtype, shape=(1, *weights.shape[1:]))
    start = linear.InverseNorms(zeros, zeros)
    return _over_blocks(visit, start, weights.shape[1], kind.block_size)


def _vectors(
    kind: Kind, dtype: Any, norms: linear.InverseNorms | None, block: Float[Array, "d B *K"]
) -> Float[Array, "d _"]:
    """Returns the columns that features are multiplied with: for cosines, of length 1.

    Columns of low precision have the scale of their norms only.
    """
    vectors = flat_columns(block.astype(dtype))
    if norms is not None and not any(kind.low):
        return linear.l2_normalize(vectors, axis=0, norms=norms)
    return _exact_in(kind.low[1], vectors if norms is None else vectors * norms.scale)


def _exact_in(low: Low, array: Float[Array, "a b"]) -> Float[Array, "a b"]:
    return array if low is None else array.astype(low)


def _products(
    kind: Kind, rows: Float[Array, "n d"], vectors: Float[Array, "d _"]
) -> Float[Array, "n _"]:
    return row_products(rows, vectors.T) if any(kind.low) else wide_product(rows, vectors)


def _logits(
    products: Float[Array, "n _"],
    of_products: Float[Array, "n _"] | None,
    weights: Float[Array, "d B *K"],
    bias: Float[Array, " B"] | None,
) -> Float[Array, "n B"]:
    """Returns the logits of classes from the products with their vectors."""
    products = products if of_products is None else products * of_products
    logits = largest_of_class(products, weights)
    return logits if bias is None else logits + bias[None, :]


def _capped(logits: Float[Array, "n B"], cap: Float[Array, ""] | None) -> Float[Array, "n B"]:
    """Returns `s tanh(z / s)` of the logits; -inf of a class that is left out."""
    if cap is None:
        return logits
    left_out = logits == -jnp.inf
    return jnp.where(left_out, logits, cap * jnp.tanh(jnp.where(left_out, 0, logits) / cap))


def _own(inputs: Inputs, targets: Float[Array, "n B"] | None, first: _First, size: int) -> _Own:
    """Returns what is asked of the classes from `first` on."""
    labels, classes = inputs.labels, first + indices(size)
    is_label = labels[:, None] == classes.astype(labels.dtype)[None, :]
    if targets is not None:
        targets = jnp.where(labels[:, None] >= 0, targets.astype(inputs.features.dtype), 0)
    return is_label, targets


def _one_block(kind: Kind, inputs: Inputs) -> OfLogits:
    inputs = unit_vectors(kind, inputs)[1]
    products = linear.product_with_columns(inputs.features, flat_columns(inputs.weights))
    logits = _capped(_logits(products, None, inputs.weights, inputs.bias), inputs.cap)
    own = _own(inputs, inputs.targets, 0, inputs.weights.shape[1])
    return _result(kind, _sums(kind, logits, own))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_blocks(kind: Kind, inputs: Inputs) -> OfLogits:
    """Returns the same as `_one_block`, without logits of more than a block of classes."""
    norms = _norms(kind, inputs.weights, inputs.features.dtype)
    return _found_and_products(kind, inputs, norms, keep=False)[0]


def _forward(kind: Kind, inputs: Any) -> tuple[OfLogits, Any]:
    values = jax.tree.map(lambda x: x.value, inputs, is_leaf=lambda x: hasattr(x, "perturbed"))
    number, dim = values.features.shape
    # The products wait for the gradient in its own array: no memory, and one product less.
    in_gradient = (
        inputs.weights.perturbed
        and linear.sizes_are_known(number)
        and number <= dim
        and _empty_gradient(values.weights).dtype == values.features.dtype
    )
    keep = values.factors is None and (in_gradient or _is_single(kind, values))
    norms = _norms(kind, values.weights, values.features.dtype)
    found, kept = _found_and_products(kind, values, norms, keep=keep)
    # Whether targets have a gradient is in the structure of what is kept.
    of_targets = () if inputs.targets is not None and inputs.targets.perturbed else None
    return found, (values, found.rest, kept, norms, of_targets)


def _is_single(kind: Kind, inputs: Inputs) -> bool:
    return kind.block_size == inputs.weights.shape[1]


def _found_and_products(
    kind: Kind, inputs: Inputs, norms: linear.InverseNorms | None, *, keep: bool
) -> tuple[OfLogits, Array | None]:
    """Returns what is found, and products that are kept for the gradient.

    Those of several blocks are in the first n of the d rows of an array like the weights.
    """
    if inputs.factors is not None and inputs.weights.shape[1] >= _SAMPLED:
        return _relative_to_some(kind, inputs, norms), None
    kept = _empty_gradient(inputs.weights) if keep and not _is_single(kind, inputs) else None
    sums, kept = _visited(kind, inputs, norms, kept=kept, keep=keep)
    return _result(kind, sums), kept


def _visited(
    kind: Kind,
    inputs: Inputs,
    norms: linear.InverseNorms | None,
    rows: Array | None = None,
    peak: Array | None = None,
    kept: Array | None = None,
    *,
    keep: bool = False,
) -> tuple[_OfSomeLogits, Array | None]:
    """Visits all blocks, with other rows than the exact features, and relative to a peak."""
    features, weights = inputs.features, inputs.weights
    rows = _exact_in(kind.low[0], features) if rows is None else rows

    def visit(carry: Any, first: _First, size: int) -> tuple[_OfSomeLogits, Array | None]:
        sums, kept = carry
        vectors, for_logits, own, _ = _loaded(kind, inputs, norms, first, size)
        products = _products(kind, rows, vectors)
        if kept is not None:
            kept = _with_block(kept, products.reshape(-1, size, *weights.shape[2:]), first)
        elif keep:
            kept = products
        logits = _capped(_logits(products, *for_logits), inputs.cap)
        return _merge(sums, _sums(kind, logits, own, peak)), kept

    zero = jnp.zeros_like(features, shape=features.shape[:1])
    watched = (zero, zero - jnp.inf) if _is_watched(kind, inputs.targets) else None
    mass = None if inputs.targets is None else zero
    nothing = _OfSomeLogits(zero, Part(zero - jnp.inf, zero), zero, mass, watched)
    return _over_blocks(visit, (nothing, kept), weights.shape[1], kind.block_size)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _relative_to_some(kind: Kind, inputs: Inputs, norms: linear.InverseNorms | None) -> OfLogits:
    """Visits all blocks with exponentials relative to a sampled peak, and again if one overflows.

    The derivatives are those of a visit without a peak: through one that overflowed, 0 · ∞ is NaN.
    """
    rows, peak = _exact_in(kind.low[0], inputs.features), _sampled_peak(kind, inputs, norms)
    sums, _ = _visited(kind, inputs, norms, rows, peak)
    if kind.is_near:
        return _result(kind, sums)
    # With its own rows: XLA for TPUs would keep shared ones out of the fast memory.
    again = rows * lax.optimization_barrier(jnp.ones((), rows.dtype))
    fits = jnp.all(jnp.isfinite(sums.rest.total))
    sums = lax.cond(fits, lambda: sums, lambda: _visited(kind, inputs, norms, again)[0])
    return _result(kind, sums)


@_relative_to_some.defjvp
def _relative_jvp(kind: Kind, primals: Any, tangents: Any) -> tuple[Any, Any]:
    _, found = jax.jvp(lambda *of: _result(kind, _visited(kind, *of)[0]), primals, tangents)
    return _relative_to_some(kind, *primals), found


def _sampled_peak(
    kind: Kind, inputs: Inputs, norms: linear.InverseNorms | None
) -> Float[Array, " n"]:
    """Returns the largest logit of some classes other than the target.

    Relative to it, the exponentials of all logits are most often finite, and one of them is 1. So
    no maximum of all logits is needed before the first exponential.
    """
    # If all logits are near, no exponential is above e^74, and no sum of them below e^-54.
    lowest = -10 if kind.is_near else jnp.finfo(inputs.features.dtype).min
    vectors, for_logits, (is_label, targets), _ = _loaded(kind, inputs, norms, 0, _SAMPLED)
    products = _products(kind, _exact_in(kind.low[0], inputs.features), vectors)
    logits = _capped(_logits(products, *for_logits), inputs.cap)
    if targets is None:
        logits = jnp.where(is_label, lowest, logits)
    return lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=1), lowest))


def _loaded(
    kind: Kind, inputs: Inputs, norms: linear.InverseNorms | None, first: _First, size: int
) -> tuple[Array, tuple[Array | None, Array, Array | None], _Own, linear.InverseNorms | None]:
    """Returns of a block: columns, what `_logits` gets, what is asked of it, and inverse norms."""
    of_classes = inputs.weights, inputs.bias, norms, inputs.targets
    block, bias, norms, targets = _block(of_classes, first, size)
    norms = jax.tree.map(flat_columns, norms)
    vectors = _vectors(kind, inputs.features.dtype, norms, block)
    factors = inputs.factors
    if factors is not None:
        factors = factors[:, None] if norms is None else factors[:, None] * norms.relative
    return vectors, (factors, block, bias), _own(inputs, targets, first, size), norms


def _backward(kind: Kind, residuals: Any, cotangents: OfLogits) -> tuple[Inputs]:
    inputs, rest, kept, norms, of_targets = residuals
    features, factors, _, weights, bias, targets, cap = inputs
    slopes = [jnp.zeros_like(rest) if isinstance(x, SymbolicZero) else x for x in cotangents[:4]]
    rows = _exact_in(kind.low[0], features)
    is_single = _is_single(kind, inputs)
    # XLA multiplies row-major factors fastest on a CPU.
    features_by_column = features.T

    def visit(gradients: Any, first: _First, size: int) -> Any:
        d_features, d_weights, d_bias, d_targets, d_cap = gradients
        vectors, for_logits, own, own_norms = _loaded(kind, inputs, norms, first, size)
        block = for_logits[1]
        if kept is None:
            products = _products(kind, rows, vectors)
        elif is_single:
            products = kept
        else:
            products = flat_columns(_block(d_weights, first, size))[: features.shape[0]]
        of_block = products, for_logits, cap, own
        d_products, d_logits, d_shares, of_cap = _slopes(of_block, rest, slopes)
        if d_targets is not None:
            d_targets = _with_block(d_targets, d_shares, first)
        d_cap = jax.tree.map(jnp.add, d_cap, of_cap)
        if factors is None:
            d_features = d_features + wide_product(d_products, vectors.T)
            of_weights = partial(_vectors, kind, features.dtype, own_norms)
            (d_block,) = jax.vjp(of_weights, block)[1](wide_product(features_by_column, d_products))
        else:
            radial: Any = 0
            if own_norms is not None:
                relative = own_norms.relative
                # Of the columns and their gradients, which need not be read for that.
                along = jnp.sum(d_products * products, axis=0, keepdims=True)
                radial = vectors.astype(rest.dtype) * (along * relative**2 * own_norms.scale)
                d_products = d_products * own_norms.scale
            d_products = rounded(d_products, kind.low[0] or kind.low[1])
            if meets_in_one_pass():
                # XLA would keep float32 numbers, and round them again in each product.
                d_products = lax.optimization_barrier(d_products.astype(jnp.bfloat16))
            columns = _exact_in(kind.low[1], flat_columns(block))
            d_features = d_features + times(d_products, columns.T)
            d_vectors = times(d_products.T, rows).T - radial
            if own_norms is not None:
                d_vectors = jnp.where(own_norms.relative == 0, 0, d_vectors)
            d_block = d_vectors.reshape(block.shape)
        d_weights = _with_block(d_weights, d_block, first)
        if d_bias is not None:
            d_bias = _with_block(d_bias, jnp.sum(d_logits, axis=0), first)
        return d_features, d_weights, d_bias, d_targets, d_cap

    arrays = features, weights, bias, None if of_targets is None else targets, cap
    empty = jax.tree.map(_empty_gradient, arrays)
    if kept is not None and not is_single:
        empty = empty[0], kept, *empty[2:]
    with jax.default_matmul_precision(kind.switch):
        gradients = _over_blocks(visit, empty, weights.shape[1], kind.block_size)
    d_features, d_weights, d_bias, d_targets, d_cap = gradients
    d_factors = None
    if factors is not None:
        # The products do not know the factors, of which `Σ_c d_ic z_ic` is the gradient.
        d_factors = jnp.sum(features * d_features, axis=1) * linear.inverse_or_zero(factors)
    if d_targets is not None:
        d_targets = d_targets.astype(targets.dtype)
    d_weights = d_weights.astype(weights.dtype)
    return (Inputs(d_features, d_factors, None, d_weights, d_bias, d_targets, d_cap),)


in_blocks.defvjp(_forward, _backward, symbolic_zeros=True)


def _slopes(
    of_block: tuple[Array, Any, Array | None, _Own], rest: Float[Array, " n"], slopes: list[Any]
) -> tuple[Float[Array, "n _"], Float[Array, "n B"], Any, Any]:
    """Returns the gradients by products, logits without a cap, targets and cap, of a block.

    Its products come with what else `_logits` gets. The slopes are those by what is found.
    """
    products, for_logits, cap, (is_label, targets) = of_block
    plain, to_products = jax.vjp(lambda products: _logits(products, *for_logits), products)
    logits, to_plain = jax.vjp(_capped, plain, cap)
    of_target, of_rest, of_total, *of_mass = (x[:, None] for x in slopes if x is not None)
    if targets is None:
        d_logits = of_rest * jnp.exp(jnp.where(is_label, 0, logits - rest[:, None]))
        d_logits, d_targets = jnp.where(is_label, of_target, d_logits), None
    else:
        d_logits = of_rest * jnp.exp(logits - rest[:, None]) + of_target * targets
        d_targets = of_target * _zero_if_left_out(targets, logits) + of_mass[0]
    d_plain, d_cap = to_plain(d_logits + of_total)
    return to_products(d_plain)[0], d_plain, d_targets, d_cap


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
    visit: Callable[[Any, _First, int], Any], carry: Any, num_classes: int, block_size: int
) -> Any:
    """Calls `visit(carry, first class, number of classes)` on every block of the classes.

    The last block, which is smaller, comes first: what it computes is then in the carry, and not in
    memory during the scan.
    """
    if block_size == num_classes:
        return visit(carry, 0, block_size)
    num_blocks, remainder = divmod(num_classes, block_size)
    start = num_blocks * block_size

    def step(carry: Any, first: Array) -> tuple[Any, None]:
        return visit(carry, first, block_size), None

    if remainder and on_cpu():
        carry = visit(carry, start, remainder)
    carry, _ = lax.scan(step, carry, jnp.arange(num_blocks, dtype=jnp.int32) * block_size)
    if remainder and not on_cpu():
        carry = visit(carry, start, remainder)
    return carry
