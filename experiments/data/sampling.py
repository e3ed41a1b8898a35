"""Sampling of batches and episodes: indices only, as pure functions of seed and step.

Every draw sorts raw numbers of a Philox generator, whose stream NumPy guarantees not to change. A
draw is therefore the same on every platform and with every version of NumPy. A run can resume at
any step, and every process can draw the same batch and take its own shard.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from typing import NamedTuple

import numpy as np

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
    """Sorts the samples of integer labels [n] by class; an index stays as it is."""
    if isinstance(labels, ClassIndex):
        return labels
    order = np.argsort(labels, kind="stable")
    offsets = np.cumsum([0, *np.unique(labels, return_counts=True)[1]])
    return ClassIndex(order, offsets)


def parse_product(text: str) -> tuple[int, int] | None:
    """The numbers of a text such as `32x4`; None for any other text."""
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
    return (int(match[1]), int(match[2])) if match else None


def parse_strategy(strategy: str) -> tuple[int, int] | None:
    """The N and K of a sampling strategy `NxK`, None for `random`; or raises a `ConfigError`."""
    if strategy == "random":
        return None
    ways_shots = parse_product(strategy)
    if ways_shots is None:
        raise ConfigError(
            f"sampling.strategy must be `random`, or `NxK` for N classes with K samples each, "
            f"for example `32x4`; got {strategy!r}"
        )
    return ways_shots


def describe_strategy(strategy: str) -> str:
    """A sampling strategy in words, such as `32-way 4-shot`."""
    parsed = parse_strategy(strategy)
    return "random" if parsed is None else f"{parsed[0]}-way {parsed[1]}-shot"


def batch_size_of(strategy: str, batch_size: int) -> int:
    """The number of samples in a batch: `batch_size` for `random`, N·K for `NxK`."""
    ways_shots = parse_strategy(strategy)
    return batch_size if ways_shots is None else math.prod(ways_shots)


def random_batch(num_samples: int, batch_size: int, *, seed: int, step: int) -> np.ndarray:
    """Draws a batch from a sequence of permutations, without replacement within an epoch.

    An epoch consists of `num_samples // batch_size` full batches of one permutation, which depends
    on the seed and the epoch. The remaining samples are skipped in that epoch.
    """
    if batch_size > num_samples:
        raise ConfigError(
            f"sampling.batch_size = {batch_size} must be in 1 … {num_samples}, the number of "
            "training samples"
        )
    epoch, position = divmod(step, num_samples // batch_size)
    permutation = _epoch_permutation(num_samples, seed, epoch)
    return permutation[position * batch_size : (position + 1) * batch_size].copy()


def episodic_batch(
    labels: np.ndarray | ClassIndex, ways: int, shots: int, *, seed: int, step: int
) -> np.ndarray:
    """Draws N classes with K samples each, without replacement, grouped by class."""
    index = index_classes(labels)
    purpose = f"sampling.strategy {ways}x{shots}"
    eligible = _classes_with(np.diff(index.offsets), ways, shots, purpose)
    return _draw_classes(index, eligible, ways, shots, _stream(_EPISODIC, seed, step)).ravel()


def draw_batch(
    index: ClassIndex | int, strategy: str, batch_size: int, *, seed: int, step: int
) -> np.ndarray:
    """Draws the training batch of a step: int64 [batch_size_of(strategy, batch_size)].

    The index has the samples of every class; their number suffices for random batches. Raises a
    `ConfigError` where the strategy does not fit the data.
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


def episode_classes(counts: np.ndarray, ways: int, shots: int, queries: int) -> np.ndarray:
    """The classes that episodes are drawn from: those with at least K + Q of the samples [C]."""
    purpose = f"an episode of {ways} ways, {shots} shots and {queries} queries"
    return _classes_with(counts, ways, shots + queries, purpose)


def evaluation_episodes(
    labels: np.ndarray | ClassIndex,
    *,
    num_episodes: int,
    ways: int,
    shots: int,
    queries: int,
    seed: int,
) -> Episodes:
    """Draws a fixed list of few-shot episodes of N classes with K support and Q query samples.

    Episode e depends only on the seed and on e: a longer list starts with the shorter one. Classes
    are in random order, and support and query samples are disjoint. The classes, and errors, are
    those of `episode_classes`.
    """
    index, count = index_classes(labels), shots + queries
    eligible = episode_classes(np.diff(index.offsets), ways, shots, queries)
    streams = (_stream(_EVALUATION, seed, e) for e in range(num_episodes))
    drawn = [_draw_classes(index, eligible, ways, count, stream) for stream in streams]
    support, query = np.split(np.array(drawn, np.int32), [shots], axis=2)
    return Episodes(support.copy(), query.copy())


def support_orders(num_samples: int, passes: int, *, seed: int, episode: int) -> np.ndarray:
    """The order of an episode's support samples in every pass of fine-tuning.

    int32 [passes, num_samples]; `episode` is its number in the list of episodes of this seed.
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


def _stream(tag: int, seed: int, step: int) -> np.random.Philox:
    """The generator for a tag, seed and step. The streams of two tags are 2¹⁹² blocks apart."""
    key = np.array([seed, step], np.uint64)
    return np.random.Philox(key=key, counter=np.array([0, 0, 0, tag], np.uint64))


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
        raise ConfigError(
            f"{purpose} needs {ways} classes with at least {needed} samples each; of the "
            f"{len(counts)} classes, {len(eligible)} have that many "
            f"(largest: {counts.max()}, smallest: {counts.min()})"
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
