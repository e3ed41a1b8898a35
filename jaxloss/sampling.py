"""Balanced batches and few-shot episodes: which samples, as pure functions of seed and step.

All functions return indices, NumPy arrays, for any data loader: call them outside of `jax.jit`.
Every draw sorts raw numbers of a Philox generator, whose stream NumPy guarantees not to change. A
draw is therefore the same on every platform and with every version of NumPy. A run can resume at
any step, and every process can draw the same batch and take its own part.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "ClassIndex",
    "Episodes",
    "class_batch",
    "episode_classes",
    "episodes",
    "index_classes",
    "random_batch",
]

# Tags of random streams: one seed gives independent numbers for every tag.
_EPOCH, _CLASSES, _EPISODES = range(3)


class ClassIndex(NamedTuple):
    """The samples of every class c: `order[offsets[c]:offsets[c + 1]]`."""

    order: np.ndarray
    """int64, the indices of the samples, sorted by class."""
    offsets: np.ndarray
    """int64 `[C + 1]`, the first position of every class in `order`. No class is empty."""


class Episodes(NamedTuple):
    """Indices of the samples of E episodes with N classes, K support and Q query samples each."""

    support: np.ndarray
    """int32 `[E, N, K]`."""
    query: np.ndarray
    """int32 `[E, N, Q]`."""


def index_classes(labels: Any) -> ClassIndex:
    """Sorts samples by class, once for all the batches of a run.

    Args:
      labels: Integers `[n]` of any values. A negative label means "ignore this sample". A
        `ClassIndex` stays as it is.

    Raises:
      TypeError: If `labels` are not integers.
      ValueError: If they are not `[n]`.

    Example:
      >>> from jaxloss.sampling import index_classes
      >>> index_classes([3, 0, 3, -1])
      ClassIndex(order=array([1, 0, 2]), offsets=array([0, 1, 3]))
    """
    if isinstance(labels, ClassIndex):
        return labels
    if isinstance(labels, np.ma.MaskedArray):
        raise TypeError("`labels` must be a plain array, got a masked one; use labels.filled(-1)")
    try:
        labels = np.asarray(labels)
    except TypeError as error:  # A traced array.
        raise TypeError(
            "`labels` must be an array whose values are known, got "
            f"{type(labels).__name__}; draw batches outside of `jax.jit`"
        ) from error
    labels = labels if labels.size else labels.astype(np.int64)
    if labels.dtype.kind not in "iu":
        raise TypeError(f"`labels` must be integers, got dtype {labels.dtype}")
    if labels.ndim != 1:
        raise ValueError(f"`labels` must have shape [n], got {labels.shape}")
    order = np.argsort(labels, kind="stable")
    order = order[np.count_nonzero(labels < 0) :]
    offsets = np.cumsum([0, *np.unique(labels[order], return_counts=True)[1]])
    return ClassIndex(order, offsets)


def random_batch(num_samples: int, batch_size: int, *, seed: int, step: int) -> np.ndarray:
    """Draws a batch from a sequence of permutations, without replacement within an epoch.

    An epoch consists of `num_samples // batch_size` full batches of one permutation, which depends
    on the seed and the epoch. The remaining samples are skipped in that epoch.

    Args:
      num_samples: n.
      batch_size: The number of samples in a batch.
      seed: From 0 on.
      step: The number of the batch, from 0 on.

    Returns:
      int64 `[batch_size]`, indices of samples.

    Raises:
      TypeError: If an argument is not an integer.
      ValueError: If `batch_size` is not between 1 and n, or another argument is out of range.

    Example:
      >>> from jaxloss.sampling import random_batch
      >>> print(random_batch(100, 5, seed=7, step=25))
      [90 11 94 91 51]
    """
    _check("step", step, 0)
    for name, size in (("num_samples", num_samples), ("batch_size", batch_size)):
        _check(name, size, 1)
    if batch_size > num_samples:
        raise ValueError(
            f"`batch_size` must be at most {num_samples}, the number of samples, got {batch_size}"
        )
    epoch, position = divmod(step, num_samples // batch_size)
    permutation = _epoch_permutation(num_samples, seed, epoch)
    return permutation[position * batch_size : (position + 1) * batch_size].copy()


def class_batch(labels: Any, ways: int, shots: int, *, seed: int, step: int) -> np.ndarray:
    """Draws P classes with K samples each (a P×K batch), without replacement.

    Args:
      labels: Integers `[n]`, or an `index_classes` of them, which saves sorting them at every step.
      ways: P, the number of classes.
      shots: K, the samples of each. Classes with fewer are never drawn.
      seed, step: As in `random_batch`.

    Returns:
      int64 `[P * K]`, indices of samples, grouped by class.

    Raises:
      TypeError: If `labels` or a number are not integers.
      ValueError: If fewer than P classes have K samples, or a number is out of range.

    Example:
      >>> import numpy as np
      >>> from jaxloss.sampling import class_batch
      >>> labels = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2])
      >>> batch = class_batch(labels, ways=2, shots=3, seed=0, step=0)
      >>> print(labels[batch])
      [2 2 2 0 0 0]

    References:
      Hermans et al., In Defense of the Triplet Loss for Person Re-Identification, 2017, section 2
      (P×K batches).
    """
    index = index_classes(labels)
    _check("ways", ways, 1)
    _check("shots", shots, 1)
    purpose = f"a batch of {ways} classes with {shots} samples each"
    eligible = _classes_with(np.diff(index.offsets), ways, shots, purpose)
    return _draw_classes(index, eligible, ways, shots, _stream(_CLASSES, seed, step)).ravel()


def episode_classes(counts: np.ndarray, ways: int, shots: int, queries: int) -> np.ndarray:
    """Returns the classes that episodes are drawn from.

    Args:
      counts: Integers `[C]`, the samples of every class.
      ways, shots, queries: As in `episodes`.

    Returns:
      int64, the classes with at least K + Q samples.

    Raises:
      TypeError: If a number is not an integer.
      ValueError: If there are fewer than N of them, or a number is out of range.

    Example:
      >>> import numpy as np
      >>> from jaxloss.sampling import episode_classes
      >>> print(episode_classes(np.array([5, 9, 7]), ways=2, shots=1, queries=5))
      [1 2]
    """
    for name, number in (("ways", ways), ("shots", shots), ("queries", queries)):
        _check(name, number, 1)
    purpose = f"an episode of {ways} ways, {shots} shots and {queries} queries"
    return _classes_with(np.asarray(counts), ways, shots + queries, purpose)


def episodes(
    labels: Any, *, num_episodes: int, ways: int, shots: int, queries: int, seed: int
) -> Episodes:
    """Draws a fixed list of few-shot episodes.

    Episode e depends only on the seed and on e: a longer list starts with the shorter one. Classes
    are in random order, and support and query samples are disjoint.

    Args:
      labels: As in `class_batch`.
      num_episodes: E.
      ways, shots, queries: N classes with K support and Q query samples each.
      seed: From 0 on.

    Returns:
      `Episodes`.

    Raises:
      TypeError: If `labels` or a number are not integers.
      ValueError: If fewer than N classes have K + Q samples, or a number is out of range.

    Example:
      >>> import numpy as np
      >>> from jaxloss.sampling import episodes
      >>> labels = np.arange(40) % 4
      >>> found = episodes(labels, num_episodes=3, ways=2, shots=1, queries=5, seed=0)
      >>> print(found.support.shape, found.query.shape, labels[found.query[0, :, 0]])
      (3, 2, 1) (3, 2, 5) [1 3]
    """
    _check("num_episodes", num_episodes, 0)
    index = index_classes(labels)
    eligible, count = episode_classes(np.diff(index.offsets), ways, shots, queries), shots + queries
    streams = (_stream(_EPISODES, seed, e) for e in range(num_episodes))
    drawn = [_draw_classes(index, eligible, ways, count, stream) for stream in streams]
    drawn = np.array(drawn, np.int32).reshape(num_episodes, ways, count)
    support, query = np.split(drawn, [shots], axis=2)
    return Episodes(support.copy(), query.copy())


def _stream(tag: int, seed: int, step: int) -> np.random.Philox:
    """The generator for a tag, seed and step. The streams of two tags are 2¹⁹² blocks apart."""
    _check("seed", seed, 0)
    _check("step", step, 0)
    key = np.array([seed, step], np.uint64)
    return np.random.Philox(key=key, counter=np.array([0, 0, 0, tag], np.uint64))


def _check(name: str, number: Any, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        hint = "; draw batches outside of `jax.jit`" * type(number).__name__.endswith("Tracer")
        raise TypeError(f"`{name}` must be an integer, got {type(number).__name__}{hint}")
    if not least <= number < 2**64:
        raise ValueError(f"`{name}` must be an integer from {least} on, got {number}")


def _choose(stream: np.random.Philox, size: int, count: int) -> np.ndarray:
    """Draws `count` distinct numbers below `size` in random order, int64 [count]."""
    keys = stream.random_raw(size)
    if 4 * count < size:
        smallest = np.sort(np.argpartition(keys, count - 1)[:count])
        return smallest[np.argsort(keys[smallest], kind="stable")]
    return np.argsort(keys, kind="stable")[:count]


def _classes_with(counts: np.ndarray, ways: int, needed: int, purpose: str) -> np.ndarray:
    """The classes with at least `needed` samples. Raises if there are fewer than `ways`."""
    eligible = np.flatnonzero(counts >= needed)
    if len(eligible) < ways:
        most = min(ways, len(counts))
        enough = f"; {most} have {np.sort(counts)[-most]} or more" if most else ""
        raise ValueError(
            f"{purpose} needs {ways} classes with at least {needed} samples each; of the "
            f"{len(counts)} classes, {len(eligible)} have that many{enough}"
        )
    return eligible


def _draw_classes(
    index: ClassIndex, eligible: np.ndarray, ways: int, count: int, stream: np.random.Philox
) -> np.ndarray:
    """Draws `count` samples of each of `ways` eligible classes, int64 [ways, count]."""
    starts, sizes = index.offsets[:-1], np.diff(index.offsets)
    chosen = eligible[_choose(stream, len(eligible), ways)]
    rows = [starts[c] + _choose(stream, int(sizes[c]), count) for c in chosen]
    return index.order[np.array(rows)]


@functools.lru_cache(maxsize=4)
def _epoch_permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of an epoch, cached because every batch of the epoch needs it."""
    permutation = _choose(_stream(_EPOCH, seed, epoch), num_samples, num_samples)
    permutation.setflags(write=False)
    return permutation
