"""Prototypical loss: every sample is compared with the means of the classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer

from jaxloss.core import checks, logsumexp
from jaxloss.core.batch import (
    AxisName,
    Reduction,
    comparable,
    gather,
    labelled_rows,
    nan_where_no_class,
    reduce,
    sum_over,
    vary_alike,
    zero_invalid,
)
from jaxloss.core.blocks import classes_of_means
from jaxloss.core.checks import Number
from jaxloss.core.linear import negative_squared_distances, widen
from jaxloss.core.logsumexp import Part, softplus
from jaxloss.core.products import (
    Low,
    low_dtypes,
    product,
    rounded,
    row_products,
    split,
    times,
    wide_product,
)
from jaxloss.core.sharding import divided
from jaxloss.pairs.queue import Queue, reference_rows
from jaxloss.pairs.rows import exact_center


@divided
def prototypical_loss(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    *,
    num_classes: int | None = None,
    temperature: Number = 1.0,
    references: Float[Array, "m d"] | Queue | None = None,
    reference_labels: Integer[Array, " m"] | None = None,
    reference_where: Bool[Array, " m"] | None = None,
    block_size: int | None = None,
    where: Bool[Array, " n"] | None = None,
    sample_weights: Float[Array, " n"] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
) -> Float[Array, ""] | Float[Array, " n"]:
    r"""Prototypical loss (Proto): softmax over the distances to the class means.

    .. math:: \ell_i = -\log \frac{e^{-\|x_i - μ_{y_i∖i}\|^2 / T}}
       {\sum_c e^{-\|x_i - μ_{c∖i}\|^2 / T}},
       \quad μ_{c∖i} = \underset{j≠i,\, y_j = c}{\mathrm{mean}} x_j

    With `references` (a support set), the means are those of the references, and no sample is left
    out. The loss visits the classes tile by tile, as many tiles as the batch needs. Take its
    derivative with `jax.grad`: `jax.jvp` of the loss raises a `TypeError`. Its gradient has both
    modes.

    Args:
      features: `[n, d]`. As for `nca_loss`, a temperature of d / 8 to d keeps the exponentials in a
        useful range, and distances far below those between classes are rounding errors.
      labels: `[n]`, class indices. They have no upper limit without `num_classes`.
      num_classes: C. If None, the loss sorts the labels to find the classes. Devices then exchange
        their labels. In both cases they exchange sums over classes, and no features.
      temperature: T > 0.
      references, reference_labels, reference_where: The keywords of pairwise losses in `jaxloss`.
        A reference label of C or more makes every loss that counts NaN.
      block_size: The number of classes in a tile. Memory grows with n·block_size. Value and
        gradient do not depend on it. All tiles after the first are computed twice. The default is
        64, or 512 with `num_classes`.
      where, sample_weights, reduction, axis_name: The common keywords of `jaxloss`. A sample
        without another sample or a reference of its class, on any device, does not count. A class
        without a sample or a reference is not a candidate.

    Returns:
      A scalar, or `[n]` for `reduction="none"`.

    Raises:
      ValueError: If `temperature`, `num_classes` or `block_size` is not positive.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> features = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
      >>> labels = jnp.array([0, 0, 1, 1])
      >>> print(f"{jaxloss.prototypical_loss(features, labels, num_classes=2):.4f}")
      0.2415
      >>> print(f"{jaxloss.prototypical_loss(features, labels):.4f}")
      0.2415
      >>> support = {"references": features, "reference_labels": labels}
      >>> print(f"{jaxloss.prototypical_loss(jnp.zeros((1, 2)), jnp.array([0]), **support):.4f}")
      0.1269

    References:
      Kobayashi, Direct-Sum Approach to Integrate Losses, BMVC 2024, supplement eq. (i).
      Snell et al., Prototypical Networks for Few-shot Learning, NeurIPS 2017.
    """
    for name, count in (("num_classes", num_classes), ("block_size", block_size)):
        if count is not None:
            checks.positive_count(name, count)
    features, labels, valid = labelled_rows(features, labels, where)
    support = reference_rows(
        references, reference_labels, reference_where, features, axis_name=axis_name
    )
    own, own_size, rivals = _class_logits(
        features, labels, valid, support, temperature, num_classes, block_size, axis_name
    )
    if support is None:  # x − μ_{y∖i} = (x − μ_y) n / (n − 1) for a class of n samples.
        own = own * (own_size / jnp.maximum(own_size - 1, 1)) ** 2
        own_size = own_size - 1
    # −log(e^a / (e^a + e^b)) = softplus(b − a) does not cancel for a small loss.
    values = softplus(rivals - own)
    defined = valid & (own_size > 0)
    if num_classes is not None:
        values = nan_where_no_class(values, labels, valid, num_classes)
        defined = defined | (valid & (labels >= num_classes))
    return reduce(values, defined, sample_weights, reduction, axis_name)


def _class_logits(
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    valid: Bool[Array, " n"],
    support: tuple[Float[Array, "m d"], Integer[Array, " m"], Bool[Array, " m"]] | None,
    temperature: Number,
    num_classes: int | None,
    block_size: int | None,
    axis_name: AxisName | None,
) -> tuple[Float[Array, " n"], Float[Array, " n"], Float[Array, " n"]]:
    """Returns what the loss needs of the logits `−‖x_i − μ_c‖² / T` of all classes.

    Args:
      features, labels, valid: Of the samples.
      support: The same of the references; None if the samples are the references.
      temperature, num_classes, block_size, axis_name: As in the loss.

    Returns:
      For each sample the logit of its class (0 if the class is absent), the number of rows in this
      class, and the log-sum-exp of the logits of the other classes (−∞ if there are none).
    """
    rows, row_labels, row_valid = (features, labels, valid) if support is None else support
    low = low_dtypes(features, rows)
    anchors, rows = widen(features, zero_invalid(rows, row_valid))
    if support is not None and num_classes is not None:
        in_range = nan_where_no_class(jnp.ones_like(rows[:, 0]), row_labels, row_valid, num_classes)
        rows = rows * in_range[:, None]
    # Distances stay the same around the mean, and are rounded less far from zero.
    number = sum_over(jnp.sum(row_valid.astype(rows.dtype)), axis_name)
    center = sum_over(jnp.sum(rows, axis=0), axis_name) / jnp.maximum(number, 1)
    center = lax.stop_gradient(center)
    temperature = checks.in_range("temperature", temperature, rows.dtype, above=0)
    scale = lax.rsqrt(jnp.asarray(temperature, rows.dtype))
    tiles, keys = _cut(
        *comparable(labels, row_labels), row_valid, num_classes, block_size, axis_name
    )
    own_scale = None
    if any(low):  # A scale would not be exact in a low dtype, nor would every center.
        sides = ((anchors, valid, low[0]), (rows, row_valid, low[1]))
        center = exact_center(center, list(sides[: 1 if support is None else 2]), axis_name)
        scale, own_scale = jnp.ones_like(scale), scale * scale
    center = center[None, :]
    references = None if support is None else (rows - center) * scale
    anchors = jnp.where(valid[:, None], anchors - center, 0) if any(low) else anchors - center
    rows = _Inputs(anchors * scale, references, own_scale)
    return _over_classes(tiles._replace(low=low), *vary_alike((rows, keys)))


# Classes in tiles ----


class _Cut(NamedTuple):
    """How the classes are split, known when a function is traced."""

    size: int
    """The number of classes in a tile."""
    limit: int
    """The largest number of tiles."""
    axis_name: AxisName | None
    """The axis over which the rows are split."""
    low: tuple[Low, Low] = (None, None)
    """In which low dtype the anchors are exact, and the references."""

    def loaded(self, rows: _Inputs) -> tuple[Array, Array]:
        """Returns the anchors and the references in the dtypes in which they are multiplied."""
        anchors = rows.anchors if self.low[0] is None else rows.anchors.astype(self.low[0])
        if rows.references is None:
            return anchors, anchors
        references = rows.references
        return anchors, references if self.low[1] is None else references.astype(self.low[1])


class _Inputs(NamedTuple):
    """The samples that are compared with class means, and those of the means."""

    anchors: Float[Array, "n d"]
    references: Float[Array, "m d"] | None
    """None if the anchors are the references."""
    scale: Float[Array, ""] | None
    """1 / T, if the rows are not divided by its root."""


class _Keys(NamedTuple):
    """The classes of the rows, and of the global batch."""

    anchors: Integer[Array, " n"]
    references: Integer[Array, " m"]
    valid: Bool[Array, " m"]
    """The references that are not padding."""
    classes: Integer[Array, " k"]
    """The classes to compare with, padded to whole tiles."""
    num_classes: Int32[Array, ""]


class _ClassTile(NamedTuple):
    """A few classes, and their logits `−‖x_i − μ_c‖²`, times the scale."""

    member: Float[Array, "m b"]
    """1 where a reference is of a class."""
    sizes: Float[Array, " b"]
    means: Float[Array, "b d"]
    is_own: Bool[Array, "n b"]
    is_rival: Bool[Array, "n b"]
    logits: Float[Array, "n b"]


def _cut(
    labels: Integer[Array, " n"],
    reference_labels: Integer[Array, " m"],
    valid: Bool[Array, " m"],
    num_classes: int | None,
    block_size: int | None,
    axis_name: AxisName | None,
) -> tuple[_Cut, _Keys]:
    if num_classes is None:
        all_labels, all_valid = gather(reference_labels, axis_name), gather(valid, axis_name)
        classes, count = _distinct(all_labels, all_valid)
    else:
        classes, count = jnp.arange(num_classes, dtype=labels.dtype), jnp.int32(num_classes)
    most = max(classes.shape[0], 1)
    size = classes_of_means(most, block_size, known=num_classes is not None)
    limit = -(-most // size)
    classes = jnp.pad(classes, (0, size * limit - classes.shape[0]))
    keys = _Keys(labels, reference_labels, valid, classes, count)
    return _Cut(size, limit, axis_name), keys


def _distinct(
    labels: Integer[Array, " m"], valid: Bool[Array, " m"]
) -> tuple[Integer[Array, " m"], Int32[Array, ""]]:
    """Returns the classes of the valid rows in ascending order, padded, and their number."""
    largest = jnp.max(labels, where=valid, initial=0)
    ordered = jnp.sort(jnp.where(valid, labels, largest))
    repeated = (ordered == jnp.roll(ordered, 1)) & (jnp.arange(ordered.shape[0]) > 0)
    classes = jnp.sort(jnp.where(repeated, largest, ordered))
    return classes, jnp.sum(~repeated, dtype=jnp.int32)


def _tile(
    tiles: _Cut,
    position: int | Int32[Array, ""],
    rows: _Inputs,
    squares: Float[Array, " n"],
    keys: _Keys,
) -> _ClassTile:
    """Returns the tile at a position. `squares` are the squared norms of the anchors."""
    first = position * tiles.size
    classes = lax.dynamic_slice_in_dim(keys.classes, first, tiles.size)
    anchors, references = tiles.loaded(rows)
    member = (keys.references[:, None] == classes[None, :]) & keys.valid[:, None]
    member = member.astype(squares.dtype)
    sizes = sum_over(jnp.sum(member, axis=0), tiles.axis_name)
    sums = sum_over(product(member.T, references, (tiles.low[1],) * 2), tiles.axis_name)
    means = sums / jnp.maximum(sizes, 1)[:, None]
    is_padding = first + jnp.arange(tiles.size, dtype=jnp.int32) >= keys.num_classes
    present = ((sizes > 0) & ~is_padding)[None, :]
    is_own = keys.anchors[:, None] == classes[None, :]
    products = row_products(anchors, means)
    logits = negative_squared_distances(products, squares, jnp.sum(means * means, axis=1))
    logits = logits if rows.scale is None else logits * rows.scale
    return _ClassTile(member, sizes, means, is_own & present, ~is_own & present, logits)


def _fold(
    step: Callable[[_ClassTile, Any, Any], Any],
    tiles: _Cut,
    state: Any,
    rows: _Inputs,
    keys: _Keys,
    shared: Any,
) -> Any:
    """Returns the state after `state = step(tile, state, shared)` for every tile with classes."""
    operands = (rows, jnp.sum(rows.anchors * rows.anchors, axis=1), keys)
    # Outside the loop, the compiler shares the first tile between the loss and its gradient.
    state = step(_tile(tiles, 0, *operands), state, shared)
    return state if tiles.limit == 1 else _loop(step, tiles, state, operands, shared)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _loop(
    step: Callable[[_ClassTile, Any, Any], Any], tiles: _Cut, state: Any, operands: Any, shared: Any
) -> Any:
    """Visits the tiles after the first. Their number is known at run time only."""
    *_, keys = operands

    def visit(position: int | Integer[Array, ""], state: Any) -> Any:
        # JAX counts in int64 where the number of tiles is known and x64 is on, and without jit in
        # Python's integers.
        return step(_tile(tiles, jnp.asarray(position, jnp.int32), *operands), state, shared)

    return lax.fori_loop(1, -(-keys.num_classes // tiles.size), visit, state)


@_loop.defjvp
def _loop_jvp(
    step: Callable[[_ClassTile, Any, Any], Any], tiles: _Cut, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    """Visits as many tiles as there may be: a loop of a fixed length has a reverse mode."""

    def loop(state: Any, operands: Any, shared: Any) -> Any:
        *_, keys = operands

        def visit(state: Any, position: Int32[Array, ""]) -> tuple[Any, None]:
            used = position * tiles.size < keys.num_classes

            def visit_used(state: Any) -> Any:
                return step(_tile(tiles, position, *operands), state, shared)

            return lax.cond(used, visit_used, lambda state: state, state), None

        return lax.scan(visit, state, jnp.arange(1, tiles.limit, dtype=jnp.int32))[0]

    return jax.jvp(loop, primals, tangents)


# Own class and rivals ----


class _SoFar(NamedTuple):
    """Sums over the tiles so far, for each anchor."""

    own: Float[Array, " n"]
    """The logit of its class."""
    own_size: Float[Array, " n"]
    """The number of references in its class."""
    rivals: Part
    """The logits of the other classes."""


class _InputGradients(NamedTuple):
    """Sums over the tiles so far."""

    anchors: Float[Array, "n d"]
    references: Float[Array, "m d"] | None
    scale: Float[Array, ""] | None
    weights: Float[Array, " n"]
    """The derivatives by the logits of an anchor, summed over the classes."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_classes(tiles: _Cut, rows: _Inputs, keys: _Keys) -> tuple[Array, Array, Array]:
    return _forward(tiles, rows, keys)[0]


def _forward(
    tiles: _Cut, rows: _Inputs, keys: _Keys
) -> tuple[tuple[Array, Array, Array], tuple[_Inputs, _Keys, Array]]:
    zero = jnp.zeros_like(rows.anchors[:, 0])
    nothing = _SoFar(zero, zero, Part(zero - jnp.inf, zero))
    own, own_size, rivals = _fold(_add_tile, tiles, nothing, rows, keys, ())
    rivals = logsumexp.result(rivals)
    return (own, own_size, rivals), (rows, keys, rivals)


def _add_tile(tile: _ClassTile, sums: _SoFar, _: tuple[()]) -> _SoFar:
    rivals = logsumexp.part(logsumexp.finite_from_below(tile.logits), tile.is_rival, axis=1)
    return _SoFar(
        own=sums.own + jnp.sum(jnp.where(tile.is_own, tile.logits, 0), axis=1),
        own_size=sums.own_size + jnp.sum(jnp.where(tile.is_own, tile.sizes[None, :], 0), axis=1),
        rivals=logsumexp.merge(sums.rivals, rivals),
    )


def _backward(
    tiles: _Cut, residuals: tuple[_Inputs, _Keys, Array], cotangents: tuple[Array, Array, Array]
) -> tuple[_Inputs, None]:
    rows, keys, rivals = residuals
    d_own, _, d_rivals = cotangents
    zeros = _InputGradients(*jax.tree.map(jnp.zeros_like, rows), weights=jnp.zeros_like(rivals))
    shared = (rows, rivals, d_own, d_rivals)
    sums = _fold(partial(_add_gradients, tiles), tiles, zeros, rows, keys, shared)
    d_anchors = sums.anchors - 2 * sums.weights[:, None] * rows.anchors
    return _Inputs(d_anchors, sums.references, sums.scale), None


def _add_gradients(
    tiles: _Cut, tile: _ClassTile, sums: _InputGradients, shared: Any
) -> _InputGradients:
    """With `D` the derivatives by the logits: `2 D μ` for the anchors, `2 (Dᵀ x − Σ D μ)` for μ."""
    rows, rivals, d_own, d_rivals = shared
    log_softmax = jnp.where(tile.is_rival, tile.logits - rivals[:, None], -jnp.inf)
    d_logits = d_rivals[:, None] * jnp.exp(log_softmax)
    d_logits = d_logits + jnp.where(tile.is_own, d_own[:, None], 0)
    d_scale = sums.scale
    if rows.scale is not None:
        d_scale = d_scale + jnp.sum(d_logits * tile.logits) / rows.scale
        d_logits = rounded(d_logits * rows.scale, tiles.low[0] or tiles.low[1])
    anchors, _ = tiles.loaded(rows)
    d_means = times(d_logits.T, anchors) - jnp.sum(d_logits, axis=0)[:, None] * tile.means
    d_sums = 2 * sum_over(d_means, tiles.axis_name) / jnp.maximum(tile.sizes, 1)[:, None]
    weights = sums.weights + jnp.sum(d_logits, axis=1)
    if rows.scale is None and sums.references is None:  # One product for both roles of the anchors.
        left, right = [2 * d_logits, tile.member], [tile.means, d_sums]
        both = wide_product(jnp.concatenate(left, axis=1), jnp.concatenate(right))
        return _InputGradients(sums.anchors + both, None, d_scale, weights)
    if rows.scale is None:
        of_means = wide_product(d_logits, tile.means)
        of_sums = wide_product(tile.member, d_sums)
    else:  # Means have no low dtype: they are a sum of two parts, and members are 0 or 1.
        large, small = split(tile.means, 2)
        of_means = times(d_logits, small) + times(d_logits, large)
        of_sums = times(d_sums.T, tile.member.T.astype(jnp.bfloat16)).T
    if sums.references is None:
        return _InputGradients(sums.anchors + 2 * of_means + of_sums, None, d_scale, weights)
    return _InputGradients(sums.anchors + 2 * of_means, sums.references + of_sums, d_scale, weights)


_over_classes.defvjp(_forward, _backward)
