"""A queue of the rows of earlier batches, as references of pairwise losses."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int32, Integer, Shaped

from jaxloss.core import batch, checks
from jaxloss.core.batch import AxisName
from jaxloss.core.sharding import divided


class Queue(NamedTuple):
    """A ring buffer of the latest rows, for `references=`.

    A pytree of arrays, which can be a part of a training state and of a checkpoint. A training step
    compares a batch with itself and with the queue, and then pushes it::

        loss = metric_loss(features, labels) + metric_loss(features, labels, references=queue)
        queue = jaxloss.push(queue, features, labels)
    """

    # Not m: devices do not get parts of it, as of references, but take their own.
    features: Float[Array, "size d"]
    """The rows. They have no gradient."""
    labels: Integer[Array, " size"]
    """The class indices of the rows; −1, which losses ignore, in empty places."""
    position: Int32[Array, ""]
    """The place of the next row, from 0 to m − 1."""


def make_queue(size: int, dim: int, dtype: DTypeLike = jnp.float32) -> Queue:
    """An empty queue of rows.

    Args:
      size: m, the largest number of rows.
      dim: d of the rows `[m, d]`.
      dtype: Of the rows, any float dtype. bfloat16 halves the memory.

    Returns:
      A `Queue` whose places are all empty. On a mesh of Explicit axes, copy it to all devices, as
      in `jax.device_put(queue, NamedSharding(mesh, PartitionSpec()))`, if a scan carries it.

    Raises:
      TypeError: If `size` or `dim` is not an integer, or `dtype` is not a float dtype.
      ValueError: If `size` or `dim` is below 1.

    Example:
      >>> import jaxloss
      >>> queue = jaxloss.make_queue(size=3, dim=2)
      >>> print(queue.features.shape, queue.labels, queue.position)
      (3, 2) [-1 -1 -1] 0

    References:
      Wang et al., Cross-Batch Memory for Embedding Learning, CVPR 2020.
      He et al., Momentum Contrast for Unsupervised Visual Representation Learning, CVPR 2020.
    """
    checks.positive_count("size", size)
    checks.positive_count("dim", dim)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`dtype` must be a float dtype, got {jnp.dtype(dtype)}")
    # The widest integers that are enabled, so that no label wraps around.
    return Queue(jnp.zeros((size, dim), dtype), jnp.full(size, -1, int), jnp.zeros((), jnp.int32))


@divided(result="replicated")
def push(
    queue: Queue,
    features: Float[Array, "n d"],
    labels: Integer[Array, " n"],
    *,
    where: Bool[Array, " n"] | None = None,
    axis_name: AxisName | None = None,
) -> Queue:
    r"""Puts rows into a queue, in place of the oldest ones.

    .. math:: q_{(p + r_i) \bmod m} ← x_i, \quad p ← (p + r) \bmod m

    Here r_i is the number of rows before i that count, and r that of all rows that do. Of more than
    m rows, the last m stay.

    Args:
      queue: A `Queue` of m rows, the same on every device.
      features: `[n, d]`. They are converted to the dtype of the queue. No gradient flows through
        the queue.
      labels: `[n]`, class indices. For losses without labels, pass zeros.
      where: A common keyword of `jaxloss`. Padding, rows of negative labels, and rows that are not
        finite in the dtype of the queue are not pushed, and leave no gap.
      axis_name: A common keyword of `jaxloss`. The rows of all devices are pushed, in the order of
        the axis, so that the queue stays the same on every device.

    Returns:
      The new `Queue`. Compute the loss of a batch before you push it; otherwise, its rows are
      compared with themselves.

    Raises:
      TypeError: If `queue` is not a `Queue`, or the dtype of its labels cannot hold that of
        `labels`. Outside of `jax.jit`, labels need to fit only in their values.
      ValueError: If `features` and `queue.features` have different d.

    Example:
      >>> import jax.numpy as jnp, jaxloss
      >>> queue = jaxloss.make_queue(size=3, dim=1)
      >>> queue = jaxloss.push(queue, jnp.array([[1.0], [2.0]]), jnp.array([5, 6]))
      >>> queue = jaxloss.push(queue, jnp.array([[3.0], [4.0]]), jnp.array([7, 8]))
      >>> print(queue.features[:, 0], queue.labels, queue.position)
      [4. 2. 3.] [8 6 7] 1

    References:
      Wang et al., Cross-Batch Memory for Embedding Learning, CVPR 2020.
      He et al., Momentum Contrast for Unsupervised Visual Representation Learning, CVPR 2020.
    """
    if not isinstance(queue, Queue):
        raise TypeError(
            f"`queue` must be a `jaxloss.Queue`, got {type(queue).__name__}; start with "
            "`make_queue`, or put restored arrays into `Queue(features, labels, position)`"
        )
    queue, given = checked_queue(queue), labels
    features, labels, valid = batch.labelled_rows(features, labels, where)
    labels = checks.same_labels(labels, given, queue.labels.dtype)
    size, dim = queue.features.shape
    if features.shape[1] != dim:
        raise ValueError(
            f"`features` must have shape [n, d] with d = {dim} to match `queue.features` "
            f"{queue.features.shape}, got {features.shape}"
        )
    features = features.astype(queue.features.dtype)
    valid = valid & jnp.all(jnp.isfinite(features), axis=1)
    rows = batch.gather_copies(features, axis_name)
    labels = batch.gather_copies(jnp.where(valid, labels, -1), axis_name)
    pushed = labels >= 0
    rank = jnp.cumsum(pushed, dtype=jnp.int32)
    number = rank[-1] if rank.size else jnp.zeros((), jnp.int32)
    # Among the last m rows, no two have the same place.
    stays = pushed & (rank > number - size)
    place = jnp.where(stays, (queue.position + rank - 1) % size, size)
    return Queue(
        lax.stop_gradient(queue.features).at[place].set(rows, mode="drop"),
        queue.labels.at[place].set(labels, mode="drop"),
        (queue.position + number) % size,
    )


def share_of(
    rows: Shaped[Array, "m ..."], axis_name: AxisName, filling: Any
) -> Shaped[Array, "k ..."]:
    """Returns the rows that this device contributes of those that are the same on every device."""
    number, devices = rows.shape[0], batch.axis_size(axis_name)
    share = -(-number // devices)
    padding = ((0, share * devices - number),) + ((0, 0),) * (rows.ndim - 1)
    rows = jnp.pad(rows, padding, constant_values=filling)
    return lax.dynamic_slice_in_dim(rows, batch.first_position(share, axis_name), share)


def checked_queue(queue: Queue) -> Queue:
    """Returns the queue as JAX arrays; one that is restored may have NumPy arrays."""
    features = checks.floating("queue.features", queue.features, "m d")
    labels = checks.integers("queue.labels", queue.labels, "m")
    checks.same_rows("queue.labels", labels, "queue.features", features)
    return Queue(features, labels, jnp.asarray(queue.position, jnp.int32))
