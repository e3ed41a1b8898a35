"""Few-shot evaluation: features once, then the nearest prototype in every episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from experiments.config import EvaluationConfig
from experiments.data.sampling import Episodes, episodes_hash, evaluation_episodes, index_classes
from jaxloss._linear import exact_product as product

# Episodes classified at once: bounds the gathered features to about 16 MB at 100 × 640.
_EPISODES_AT_ONCE = 64


class Images(Protocol):
    """Images that an array of indices reads, such as a uint8 array."""

    def __len__(self) -> int:
        """How many images there are."""
        ...

    def __getitem__(self, indices: np.ndarray, /) -> np.ndarray:
        """The images [len(indices), h, w, c]."""
        ...


class FewShotResult(NamedTuple):
    """The outcome of one list of episodes."""

    ways: int
    shots: int
    queries: int
    episodes: int
    distance: str
    accuracy: float
    """Mean over the episodes of the part of the queries that were right, in [0, 1]."""
    interval: float
    """Half the width of the 95 % confidence interval of the mean, 1.96·σ/√E."""
    hash: str
    """Names the list of episodes: results with the same hash compare episode by episode."""


def extract_features(
    embed: Callable[[Any], Array], images: Images, *, batch_size: int = 256
) -> np.ndarray:
    """The features of every image.

    The last batch is filled up with copies of the last image, so that `embed` compiles once.

    Args:
        embed: Maps uint8 [batch_size, h, w, c] to features [batch_size, d]; jitted by the caller.
        images: uint8 [n, h, w, c], or anything with a length that is indexed by an integer array.
        batch_size: Images of a call.

    Returns:
        float32 [n, d].

    Raises:
        ValueError: If there is no image, `batch_size` is not positive, or `embed` does not return
            a row per image.
    """
    count = len(images)
    if count == 0 or batch_size < 1:
        raise ValueError(f"need images and a positive batch size, got {count} and {batch_size}")
    parts = []
    for start in range(0, count, batch_size):
        indices = np.minimum(np.arange(start, start + batch_size), count - 1)
        part = np.asarray(embed(np.asarray(images[indices])), np.float32)
        if part.ndim != 2 or len(part) != batch_size:
            raise ValueError(f"embed must return [{batch_size}, d], got {list(part.shape)}")
        parts.append(part[: count - start])
    return np.concatenate(parts)


def episode_accuracies(
    features: np.ndarray | Array,
    episodes: Episodes,
    *,
    distance: Literal["euclidean", "cosine"] = "euclidean",
) -> np.ndarray:
    """The accuracy of the nearest prototype in every episode.

    A prototype is the mean of a class's support features; a query takes the class of the nearest.
    With the cosine, features are divided by their length before the mean. Of equally near
    prototypes the first is taken: features that do not tell the classes apart are right by chance.

    Args:
        features: Float [n, d], finite.
        episodes: Support int32 [E, N, K] and query int32 [E, N, Q], indices below n.
        distance: `euclidean` or `cosine`.

    Returns:
        float32 [E], in [0, 1].

    Raises:
        ValueError: If shapes do not fit, an index is out of range, a feature is not finite, or the
            distance is unknown.
    """
    if distance not in _PREPARE:
        raise ValueError(f"distance must be one of {', '.join(_PREPARE)}, got {distance!r}")
    features, (support, query) = prepare_episodes(features, episodes)
    return np.asarray(_accuracies(features, support, query, distance=distance))


def prepare_episodes(
    features: np.ndarray | Array, episodes: Episodes
) -> tuple[np.ndarray, Episodes]:
    """The features as float32 and the episodes as int32, once they are known to fit.

    Raises:
        ValueError: If shapes do not fit, an index is out of range, or a feature is not finite.
    """
    features = np.asarray(features, np.float32)
    support, query = (np.asarray(part, np.int32) for part in episodes)
    if features.ndim != 2 or support.ndim != 3 or support.shape[:2] != query.shape[:2]:
        raise ValueError(
            "need features [n, d], support [E, N, K] and query [E, N, Q], got "
            f"{list(features.shape)}, {list(support.shape)} and {list(query.shape)}"
        )
    if not support.size or not query.size:
        raise ValueError(f"empty episodes: {list(support.shape)} and {list(query.shape)}")
    low = min(support.min(), query.min())
    high = max(support.max(), query.max())
    if low < 0 or high >= len(features):
        raise ValueError(
            f"episodes hold indices from {low} to {high}, but there are {len(features)} features"
        )
    if not np.isfinite(features).all():
        rows = int((~np.isfinite(features)).any(1).sum())
        raise ValueError(f"{rows} of {len(features)} features are not finite")
    return features, Episodes(support, query)


def mean_and_interval(accuracies: np.ndarray | Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % confidence interval.

    Args:
        accuracies: Floats [E], E > 1.

    Returns:
        (mean, 1.96·σ/√E), σ with E − 1 degrees of freedom.

    Raises:
        ValueError: If there are fewer than two accuracies.
    """
    values = np.asarray(accuracies, np.float64)
    if values.ndim != 1 or values.size < 2:
        raise ValueError(f"an interval needs at least two accuracies, got {list(values.shape)}")
    return float(values.mean()), float(1.96 * values.std(ddof=1) / np.sqrt(values.size))


def evaluate_features(
    features: np.ndarray, labels: np.ndarray, *, config: EvaluationConfig
) -> list[FewShotResult]:
    """Evaluate features on the episodes of every shot count of a configuration.

    Args:
        features: Float [n, d].
        labels: Integers [n].
        config: Ways, shot counts, queries, number and seed of the episodes, distance.

    Returns:
        A result for each shot count, in the order of `config.shots`.

    Raises:
        ValueError: If the labels do not fit the features, or do not have the episodes asked for.
    """
    accuracies_of = partial(episode_accuracies, features, distance=config.distance)
    return [
        FewShotResult(distance=config.distance, **summary)
        for summary in summarize_episodes(accuracies_of, features, labels, config)
    ]


def summarize_episodes(
    accuracies_of: Callable[[Episodes], np.ndarray],
    features: np.ndarray,
    labels: np.ndarray,
    config: EvaluationConfig,
) -> list[dict[str, Any]]:
    """What the results of every way to classify episodes have in common.

    Args:
        accuracies_of: Maps episodes to the accuracy in each.
        features: Float [n, d].
        labels: Integers [n].
        config: Ways, shot counts, queries, number and seed of the episodes.

    Returns:
        For each shot count, in the order of `config.shots`, the fields of a `FewShotResult` but the
        distance.

    Raises:
        ValueError: If the labels do not fit the features, or do not have the episodes asked for.
    """
    if len(features) != len(labels):
        raise ValueError(f"got {len(features)} features but {len(labels)} labels")
    index = index_classes(labels)
    summaries = []
    for shots in config.shots:
        episodes = evaluation_episodes(
            index,
            num_episodes=config.episodes,
            ways=config.ways,
            shots=shots,
            queries=config.queries,
            seed=config.seed,
        )
        accuracy, interval = mean_and_interval(accuracies_of(episodes))
        summary = {
            "ways": config.ways,
            "shots": shots,
            "queries": config.queries,
            "episodes": config.episodes,
            "accuracy": accuracy,
            "interval": interval,
            "hash": episodes_hash(episodes),
        }
        summaries.append(summary)
    return summaries


def _centre(features: Array) -> Array:
    """Move the mean to zero: keeps distances, and the digits that |p|² − 2 q·p would cancel."""
    return features - features.mean(0)


def _unit(features: Array) -> Array:
    """Divide each row by its length; a zero row stays zero."""
    length = jnp.sqrt(jnp.square(features).sum(-1, keepdims=True))
    return features / jnp.where(length > 0, length, 1)


def _euclidean_scores(queries: Array, prototypes: Array) -> Array:
    return 2 * product(queries, prototypes.T) - jnp.square(prototypes).sum(-1)


def _cosine_scores(queries: Array, prototypes: Array) -> Array:
    return product(queries, _unit(prototypes).T)


_PREPARE = {"euclidean": _centre, "cosine": _unit}
_SCORES = {"euclidean": _euclidean_scores, "cosine": _cosine_scores}


@partial(jax.jit, static_argnames="distance")
def _accuracies(features: Array, support: Array, query: Array, *, distance: str) -> Array:
    features = _PREPARE[distance](features)

    def accuracy(episode: tuple[Array, Array]) -> Array:
        support, query = episode
        prototypes = features[support].mean(1)
        scores = _SCORES[distance](features[query.ravel()], prototypes)
        truth = jnp.repeat(jnp.arange(query.shape[0]), query.shape[1])
        return (scores.argmax(-1) == truth).mean(dtype=jnp.float32)

    return lax.map(accuracy, (support, query), batch_size=_EPISODES_AT_ONCE)
