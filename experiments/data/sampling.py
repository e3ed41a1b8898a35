"""Sampling of batches and episodes: indices only, as pure functions of seed and step.

Every draw sorts raw numbers of a Philox generator, whose stream NumPy guarantees not to change. A
draw is therefore the same on every platform and with every version of NumPy. A run can resume at
any step, and every process can draw the same batch and take its own shard.
"""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple

import numpy as np

from experiments.config import parse_strategy
from experiments.errors import ConfigError

# Tags of random streams: one seed gives independent numbers for every tag.
_EPOCH, _EPISODIC, _EVALUATION, _SUPPORT = range(4)


class ClassIndex(NamedTuple):
    """The samples of every class c: `order[offsets[c]:offsets[c + 1]]`."""

    order: np.ndarray
    """int64 [n], sample indices sorted by class."""
    offsets: np.ndarray
    """int64 [C + 1], the first position of every class in `order`. No class is empty."""


class Episodes(NamedTuple):
    """Sample indices of E episodes with N classes, K support and Q query samples per class."""

    support: np.ndarray
    """int32 [E, N, K]."""
    query: np.ndarray
    """int32 [E, N, Q]."""


def index_classes(labels: np.ndarray | ClassIndex) -> ClassIndex:
    """Sorts the samples of labels [n] by class, once for all draws; an index stays as it is.

    Raises:
      ValueError: The labels are empty, not one-dimensional, or not integers.
    """
    if isinstance(labels, ClassIndex):
        return labels
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.size == 0 or labels.dtype.kind not in "iu":
        raise ValueError(
            f"labels must be integers [n] with n > 0, got {labels.dtype} {list(labels.shape)}"
        )
    order = np.argsort(labels, kind="stable").astype(np.int64)
    starts = np.flatnonzero(np.diff(labels[order])) + 1
    return ClassIndex(order, np.concatenate([[0], starts, [labels.size]]).astype(np.int64))


def random_batch(num_samples: int, batch_size: int, *, seed: int, step: int) -> np.ndarray:
    """Draws a batch from a sequence of permutations, without replacement within an epoch.

    An epoch consists of `num_samples // batch_size` full batches of one permutation, which depends
    on the seed and the epoch. The remaining samples are skipped in that epoch.

    Returns:
      int64 [batch_size], distinct sample indices.

    Raises:
      ConfigError: The batch size is not in 1 … n.
    """
    if not 1 <= batch_size <= num_samples:
        raise ConfigError(
            f"sampling.batch_size = {batch_size} must be in 1 … {num_samples}, the number of "
            "training samples"
        )
    _check_stream(seed, step)
    epoch, position = divmod(step, num_samples // batch_size)
    permutation = _epoch_permutation(num_samples, seed, epoch)
    return permutation[position * batch_size : (position + 1) * batch_size].copy()


def episodic_batch(
    labels: np.ndarray | ClassIndex, ways: int, shots: int, *, seed: int, step: int
) -> np.ndarray:
    """Draws an N-way K-shot batch: N classes with K samples each, without replacement.

    Classes with fewer than K samples are never drawn.

    Returns:
      int64 [ways·shots], sample indices grouped by class.

    Raises:
      ConfigError: Fewer than N classes have K samples.
    """
    index = index_classes(labels)
    eligible = _classes_with(index, ways, shots, f"sampling.strategy {ways}x{shots}")
    return _draw_classes(index, eligible, ways, shots, _stream(_EPISODIC, seed, step)).ravel()


def draw_batch(
    index: ClassIndex | int, strategy: str, batch_size: int, *, seed: int, step: int
) -> np.ndarray:
    """Draws the training batch of a step.

    Args:
      index: The samples of every class. The number of samples suffices for random batches.
      strategy: `random` or `NxK`.
      batch_size: Number of samples in a random batch. An `NxK` batch has N·K.
      seed: Seed of the run.
      step: Training step, counted from 0.

    Returns:
      int64 [batch_size_of(strategy, batch_size)], sample indices.

    Raises:
      ConfigError: The strategy does not fit the data.
    """
    ways_shots = parse_strategy(strategy)
    if ways_shots is None:
        count = index if isinstance(index, int) else len(index.order)
        return random_batch(count, batch_size, seed=seed, step=step)
    if isinstance(index, int):
        raise ConfigError(
            f"sampling.strategy = {strategy} needs exactly one class per image; use `random`"
        )
    return episodic_batch(index, *ways_shots, seed=seed, step=step)


def check_episodes(labels: np.ndarray | ClassIndex, *, ways: int, shots: int, queries: int) -> None:
    """Raises a `ConfigError` where `evaluation_episodes` cannot draw such episodes."""
    _episode_classes(index_classes(labels), ways, shots, queries)


def evaluation_episodes(
    labels: np.ndarray | ClassIndex,
    *,
    num_episodes: int,
    ways: int,
    shots: int,
    queries: int,
    seed: int,
) -> Episodes:
    """Draws a fixed list of few-shot episodes.

    Episode e depends only on the seed and on e: a longer list starts with the shorter one. Classes
    are in random order, support and query samples are disjoint, and classes with fewer than K + Q
    samples are never drawn.

    Args:
      labels: Integers [n], or their ClassIndex.
      num_episodes: Number E of episodes.
      ways: Number N of classes in an episode.
      shots: Number K of support samples per class.
      queries: Number Q of query samples per class.
      seed: Seed of the list.

    Raises:
      ConfigError: Fewer than N classes have K + Q samples.
    """
    index = index_classes(labels)
    eligible = _episode_classes(index, ways, shots, queries)
    samples = np.empty((num_episodes, ways, shots + queries), np.int32)
    for e in range(num_episodes):
        stream = _stream(_EVALUATION, seed, e)
        samples[e] = _draw_classes(index, eligible, ways, shots + queries, stream)
    return Episodes(samples[:, :, :shots].copy(), samples[:, :, shots:].copy())


def support_orders(num_samples: int, passes: int, *, seed: int, episode: int) -> np.ndarray:
    """The order of the S support samples of an episode in every pass of fine-tuning.

    Returns:
      int32 [passes, num_samples], one permutation per row; `episode` is its index in the list of
      episodes of this seed.
    """
    keys = _stream(_SUPPORT, seed, episode).random_raw(passes * num_samples)
    return np.argsort(keys.reshape(passes, num_samples), axis=1, kind="stable").astype(np.int32)


def episodes_hash(episodes: Episodes) -> str:
    """A hash of a list of episodes: 16 hexadecimal digits, the same on every platform."""
    digest = hashlib.sha256()
    for part in episodes:
        digest.update(np.asarray(part.shape, "<i4").tobytes())
        digest.update(np.ascontiguousarray(part, "<i4").tobytes())
    return digest.hexdigest()[:16]


def _check_stream(seed: int, step: int) -> None:
    if seed < 0 or step < 0:
        raise ValueError(f"seed and step must not be negative, got {seed} and {step}")


def _stream(tag: int, seed: int, step: int) -> np.random.Philox:
    """The generator for a tag, seed and step. The streams of two tags are 2¹⁹² blocks apart."""
    _check_stream(seed, step)
    key = np.array([seed, step], np.uint64)
    return np.random.Philox(key=key, counter=np.array([0, 0, 0, tag], np.uint64))


def _choose(stream: np.random.Philox, size: int, count: int) -> np.ndarray:
    """Draws `count` distinct numbers below `size` in random order, int64 [count]."""
    keys = stream.random_raw(size)
    if 4 * count < size:
        smallest = np.sort(np.argpartition(keys, count - 1)[:count])
        return smallest[np.argsort(keys[smallest], kind="stable")]
    return np.argsort(keys, kind="stable")[:count]


def _classes_with(index: ClassIndex, ways: int, needed: int, purpose: str) -> np.ndarray:
    """The classes with at least `needed` samples. Raises if there are fewer than `ways`."""
    if ways < 1 or needed < 1:
        raise ValueError(f"ways and shots must be positive, got {ways} and {needed}")
    counts = np.diff(index.offsets)
    eligible = np.flatnonzero(counts >= needed)
    if len(eligible) < ways:
        raise ConfigError(
            f"{purpose} needs {ways} classes with at least {needed} samples each; of the "
            f"{len(counts)} classes, {len(eligible)} have that many "
            f"(largest: {counts.max()}, smallest: {counts.min()})"
        )
    return eligible


def _episode_classes(index: ClassIndex, ways: int, shots: int, queries: int) -> np.ndarray:
    purpose = f"an episode of {ways} ways, {shots} shots and {queries} queries"
    return _classes_with(index, ways, shots + queries, purpose)


def _draw_classes(
    index: ClassIndex, eligible: np.ndarray, ways: int, count: int, stream: np.random.Philox
) -> np.ndarray:
    """Draws `count` samples of each of `ways` eligible classes, int64 [ways, count]."""
    drawn = np.empty((ways, count), np.int64)
    for row, c in enumerate(eligible[_choose(stream, len(eligible), ways)]):
        start, stop = index.offsets[c], index.offsets[c + 1]
        drawn[row] = index.order[start + _choose(stream, int(stop - start), count)]
    return drawn


@functools.lru_cache(maxsize=4)
def _epoch_permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of an epoch, cached because every batch of the epoch needs it."""
    permutation = _choose(_stream(_EPOCH, seed, epoch), num_samples, num_samples)
    permutation.setflags(write=False)
    return permutation
