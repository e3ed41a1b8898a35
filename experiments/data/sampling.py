"""The batches and episodes of an experiment: `jaxloss.sampling` by the options of a run."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from experiments.core.errors import ConfigError
from jaxloss import sampling
from jaxloss.sampling import ClassIndex, Episodes


def parse_strategy(strategy: str) -> tuple[int, int] | None:
    """The N and K of a sampling strategy `NxK`, None for `random`; or raises a `ConfigError`."""
    if strategy == "random":
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", strategy)
    if match is None:
        raise ConfigError(
            f"sampling.strategy must be `random`, or `NxK` for N classes with K samples each, "
            f"for example `32x4`; got {strategy!r}"
        )
    return int(match[1]), int(match[2])


def batch_size_of(strategy: str, batch_size: int) -> int:
    """The number of samples in a batch: `batch_size` for `random`, N·K for `NxK`."""
    ways_shots = parse_strategy(strategy)
    return batch_size if ways_shots is None else math.prod(ways_shots)


def draw_batch(
    index: ClassIndex | int, strategy: str, batch_size: int, *, seed: int, step: int
) -> np.ndarray:
    """Draws the training batch of a step: int64 [batch_size_of(strategy, batch_size)].

    The index has the samples of every class; their number suffices for random batches.
    """
    ways_shots = parse_strategy(strategy)
    if ways_shots is None:
        count = index if isinstance(index, int) else len(index.order)
        with errors_of("sampling.batch_size"):
            return sampling.random_batch(count, batch_size, seed=seed, step=step)
    if isinstance(index, int):
        raise ConfigError(
            f"sampling.strategy = {strategy} needs exactly one class per image; use `random`"
        )
    with errors_of(f"sampling.strategy = {strategy}"):
        return sampling.class_batch(index, *ways_shots, seed=seed, step=step)


def episode_classes(counts: np.ndarray, ways: int, shots: int, queries: int) -> np.ndarray:
    """The classes that episodes are drawn from: those with at least K + Q of the samples [C]."""
    with errors_of("evaluation"):
        return sampling.episode_classes(counts, ways, shots, queries)


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Raises what the data cannot give as an error of an option."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def support_orders(num_samples: int, passes: int, *, seed: int, episode: int) -> np.ndarray:
    """The order of an episode's support samples in every pass of fine-tuning.

    int32 [passes, num_samples]; `episode` is its number in the list of episodes of this seed.
    """
    # The streams of `jaxloss.sampling` are those of the counters 0 to 2.
    key, counter = np.array([seed, episode], np.uint64), np.array([0, 0, 0, 3], np.uint64)
    keys = np.random.Philox(key=key, counter=counter).random_raw(passes * num_samples)
    return np.argsort(keys.reshape(passes, num_samples), axis=1, kind="stable").astype(np.int32)


def episodes_hash(episodes: Episodes) -> str:
    """A hash of a list of episodes: 16 hexadecimal digits, the same on every platform."""
    digest = hashlib.sha256()
    for part in episodes:
        digest.update(np.asarray(part.shape, "<i4").tobytes())
        digest.update(np.ascontiguousarray(part, "<i4").tobytes())
    return digest.hexdigest()[:16]
