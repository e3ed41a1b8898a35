"""Prototypical loss: every sample is compared with the means of the classes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, Integer

from jaxloss.core import batch, checks
from jaxloss.core.backend import on_cpu
from jaxloss.core.batch import AxisName, Reduction
from jaxloss.core.checks import Number
from jaxloss.core.linear import sizes_are_known, wide_dtype, widen
from jaxloss.core.logsumexp import softplus
from jaxloss.core.products import Low, low_dtypes, product
from jaxloss.core.sharding import divided
from jaxloss.pairs.comparison import compare
from jaxloss.pairs.queue import Queue
from jaxloss.pairs.row_blocks import places_in_order
from jaxloss.pairs.rows import How, Rows, anchors_and_references, center_for
from jaxloss.pairs.statistics import LOGSUMEXP, Statistic, over_temperature
from jaxloss.pairs.visits import fits


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
    out. Memory grows with the means, which are no more than the references, and not with n·C.
    Take the derivative with `jax.grad`: `jax.jvp` of the loss raises a `TypeError`. Its gradient
    has both modes.

    Args:
      features: `[n, d]`. As for `nca_loss`, a temperature of d / 8 to d keeps the exponentials in a
        useful range, and distances far below those between classes are rounding errors.
      labels: `[n]`, class indices. They have no upper limit without `num_classes`.
      num_classes: C. If None, the loss sorts the labels to find the classes. Devices then exchange
        their labels. In both cases they exchange sums over classes and means, and no features.
      temperature: T > 0.
      references, reference_labels, reference_where: The keywords of pairwise losses in `jaxloss`.
        A reference label of C or more makes every loss that counts NaN.
      block_size: The keyword of pairwise losses in `jaxloss`, for samples and classes.
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
    features, labels, valid = batch.checked_rows("features", features, labels, where)
    anchors, support = anchors_and_references(
        features, labels, valid, references, reference_labels, reference_where, axis_name=axis_name
    )
    classes = _classes(anchors, support or anchors, num_classes, axis_name)
    anchors, rows = _centered(anchors, support, axis_name)
    means, sizes, shares = _means(rows or anchors, classes, axis_name)
    slots = batch.own_positions(means.shape[0], shares)
    pairs = compare(
        anchors.features,
        classes.of_anchors,
        references=means,
        reference_labels=slots,
        reference_where=sizes[slots] > 0,
        similarity="negative_squared_distance",
        where=valid,
        block_size=block_size,
        axis_name=shares,
    )
    if classes.number != num_classes:  # Most slots may be empty.
        blocks = block_size, block_size or _CLASSES
        pairs = pairs._replace(how=pairs.how._replace(block_sizes=blocks, ends_early=True))
    temperature = checks.in_range("temperature", temperature, pairs.dtype, above=0)
    (logits,) = pairs.statistics(
        jnp.asarray(temperature), Statistic(LOGSUMEXP, over_temperature, is_smooth=True)
    )
    own, defined = jnp.where(logits.has_positive, logits.positive, 0), logits.has_positive
    if support is None:  # x − μ_{y∖i} = (x − μ_y) n / (n − 1) for a class of n samples.
        own_size = jnp.take(sizes, classes.of_anchors, mode="fill", fill_value=0)
        own = own * (own_size / jnp.maximum(own_size - 1, 1)) ** 2
        defined = own_size > 1
    # −log(e^a / (e^a + e^b)) = softplus(b − a) does not cancel for a small loss.
    values = softplus(logits.negative - own)
    if num_classes is not None:
        values = batch.nan_where_no_class(values, labels, valid, num_classes)
        defined = defined | (labels >= num_classes)
        if support is not None:
            too_large = jnp.any(support.valid & (support.labels >= num_classes))
            too_large = too_large.astype(values.dtype)
            values = values * (
                1 + batch.nan_where(batch.sum_over(too_large, axis_name) > 0, values.dtype)
            )
    return batch.reduce(values, valid & defined, sample_weights, reduction, axis_name)


_CLASSES = 64
"""Of a tile, if there are as many slots as rows: the classes are most often far fewer."""


class _Classes(NamedTuple):
    """The classes of the global batch, which have slots from 0 on."""

    of_anchors: Int32[Array, " n"]
    """The slots; that after the last for a class without a row."""
    of_rows: Int32[Array, " m"]
    """The same of the rows of the means, without the invalid ones."""
    number: int


def _classes(
    anchors: Rows, rows: Rows, num_classes: int | None, axis_name: AxisName | None
) -> _Classes:
    """Returns the classes: the labels below C, or those that the rows have if these are fewer."""
    num_rows = rows.labels.shape[0] * (1 if axis_name is None else batch.axis_size(axis_name))
    if num_classes is not None:
        rows = rows._replace(valid=rows.valid & (rows.labels < num_classes))
    if num_classes is not None and (not sizes_are_known(num_rows) or num_classes <= num_rows):
        number = num_classes

        def slots(labels: Integer[Array, " n"]) -> Int32[Array, " n"]:
            return jnp.where(labels < number, labels, number).astype(jnp.int32)
    else:
        last = jnp.asarray(jnp.iinfo(rows.labels.dtype).max, rows.labels.dtype)
        ordered = jnp.sort(batch.gather(jnp.where(rows.valid, rows.labels, last), axis_name))
        number = ordered.shape[0]
        rank = jnp.cumsum(ordered != jnp.roll(ordered, 1), dtype=jnp.int32)
        rank = rank - rank[:1]

        def slots(labels: Integer[Array, " n"]) -> Int32[Array, " n"]:
            if not labels.shape[0] or not number:
                return jnp.full(labels.shape, number, jnp.int32)
            place = jnp.minimum(places_in_order(ordered, labels, "left"), number - 1)
            return jnp.where(ordered[place] == labels, rank[place], number)

    return _Classes(
        slots(anchors.labels), jnp.where(rows.valid, slots(rows.labels), number), number
    )


def _centered(
    anchors: Rows, references: Rows | None, axis_name: AxisName | None
) -> tuple[Rows, Rows | None]:
    """Returns the rows relative to their center: means far from 0 would lose digits."""
    arrays = anchors.features, (references or anchors).features
    dtype, low = wide_dtype(*arrays), low_dtypes(*arrays)
    how = How("negative_squared_distance", dtype, low, axis_name=axis_name)
    center: Any = center_for(anchors, references, how)

    def moved(rows: Rows, low: Low) -> Rows:
        features = rows.features.astype(dtype) - center[None, :]
        return rows._replace(features=batch.zero_invalid(features.astype(low or dtype), rows.valid))

    return moved(anchors, low[0]), references and moved(references, low[1])


def _means(
    rows: Rows, classes: _Classes, axis_name: AxisName | None
) -> tuple[Float[Array, "k d"], Float[Array, " C"], AxisName | None]:
    """Returns the means of the classes, how many rows they have on all devices, and an axis.

    Large means are shared out over it: a device has those of as many slots as each of the others.
    It is None where every device has all of them.
    """
    features, number = rows.features, classes.number
    dtype = wide_dtype(features)
    ones = jnp.ones(features.shape[0], dtype)
    sizes = batch.sum_over(jax.ops.segment_sum(ones, classes.of_rows, number), axis_name)
    if axis_name is None or fits(number * features.shape[1], dtype):
        sums = batch.sum_over(_sums(features, classes.of_rows, number), axis_name)
        return sums / jnp.maximum(sizes, 1)[:, None], sizes, None
    devices = batch.axis_size(axis_name)
    share = -(-number // devices)
    first = batch.own_positions(share, axis_name)[0]
    sizes = jnp.pad(sizes, (0, share * devices - number))

    def of_device(sums: Array, begin: Int32[Array, ""]) -> tuple[Array, None]:
        # Those of one device at a time: no device has the sums of all classes at once.
        slots = classes.of_rows - begin
        slots = jnp.where((slots >= 0) & (slots < share), slots, share)
        theirs = batch.sum_over(_sums(features, slots, share), axis_name)
        return jnp.where(begin == first, theirs, sums), None

    begins = share * jnp.arange(devices, dtype=jnp.int32)
    sums = batch.vary_alike((jnp.zeros_like(features, dtype, (share, features.shape[1])), first))[0]
    sums, _ = lax.scan(jax.checkpoint(of_device), sums, begins)
    own = lax.dynamic_slice_in_dim(sizes, first, share)
    return sums / jnp.maximum(own, 1)[:, None], sizes, axis_name


def _sums(
    features: Float[Array, "m d"], slots: Int32[Array, " m"], number: int
) -> Float[Array, "C d"]:
    """Returns the sums of the rows of each slot."""
    (wide,) = widen(features)
    rows = slots.shape[0]
    if on_cpu() or not sizes_are_known(rows, number) or not fits(rows * number, wide.dtype):
        return jax.ops.segment_sum(wide, slots, number)
    # Accelerators multiply faster than they add rows to rows. 0 times what is not finite is NaN.
    wide = batch.zero_invalid(wide, slots < number)
    is_of = (jnp.arange(number, dtype=jnp.int32)[:, None] == slots[None, :]).astype(wide.dtype)
    return product(is_of, wide, low_dtypes(features) * 2)
