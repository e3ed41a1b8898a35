"""Few-shot evaluation: the accuracy of the nearest prototype in every episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Ge
from jax import Array, lax

from experiments.config import Count, Seed
from experiments.data.sampling import (
    ClassIndex,
    Episodes,
    episodes_hash,
    evaluation_episodes,
    index_classes,
)
from jaxloss._linear import exact_product as product

EPISODES_AT_ONCE = 64
"""Bounds the gathered features to about 16 MB at 100 × 640."""


@dataclass(frozen=True)
class EpisodeConfig:
    """The episodes of a few-shot evaluation."""

    ways: Annotated[int, Ge(2)] = 5
    """Classes of an episode."""
    shots: tuple[Count, ...] = (1, 5)
    """Support images per class; one evaluation for each number."""
    queries: Count = 15
    """Query images per class."""
    episodes: Annotated[int, Ge(2)] = 2000
    """Episodes of each evaluation."""
    seed: Seed = 0
    """Seed that selects the episodes."""


Distance = Literal["euclidean", "cosine"]


class EpisodeResult(NamedTuple):
    """The accuracy over one list of episodes."""

    ways: int
    shots: int
    queries: int
    episodes: int
    classifier: str
    """How queries are classified."""
    accuracy: float
    """Mean over the episodes of the fraction of queries classified correctly."""
    interval: float
    """See `mean_and_interval`."""
    hash: str
    """Identifies the list of episodes: results with the same hash compare episode by episode."""


def prototype_predictions(
    features: np.ndarray | Array,
    episodes: Episodes,
    number: int | None = None,
    *,
    distance: Distance = "euclidean",
) -> np.ndarray:
    """The class of the nearest prototype: int32 [E, N, Q], or [N, Q] of the episode `number` alone.

    A prototype is the mean of a class's support features; of equally near ones the first is taken.
    With the cosine distance, features are divided by their length before the mean is taken.

    Args:
      features: Float [n, d], finite.
      episodes: Support int32 [E, N, K] and query int32 [E, N, Q], indices below n.
      number: Of an episode.
      distance: Of a query from a prototype.

    Raises:
      ValueError: An index is out of range, or a feature is not finite.
    """
    features, (support, query) = prepare_episodes(features, episodes)
    rows = slice(None) if number is None else [number]
    found = np.asarray(_nearest(features, support[rows], query[rows], distance=distance))
    return found if number is None else found[0]


def episode_accuracies(
    features: np.ndarray | Array, episodes: Episodes, *, distance: Distance = "euclidean"
) -> np.ndarray:
    """The accuracy of `prototype_predictions` in every episode: float32 [E], in [0, 1]."""
    return accuracies_of(prototype_predictions(features, episodes, distance=distance))


def accuracies_of(predictions: np.ndarray) -> np.ndarray:
    """The accuracy in every episode, float32 [E], of predicted classes, int32 [E, N, Q]."""
    return np.asarray(_accuracies(predictions))


@jax.jit
def _accuracies(predictions: Array) -> Array:
    right = predictions == jnp.arange(predictions.shape[1])[:, None]
    return right.mean((1, 2), dtype=jnp.float32)


def prepare_episodes(
    features: np.ndarray | Array, episodes: Episodes
) -> tuple[np.ndarray, Episodes]:
    """The features as float32 and the episodes as int32.

    Raises:
      ValueError: An index is out of range, or a feature is not finite.
    """
    features = np.asarray(features, np.float32)
    support, query = (np.asarray(part, np.int32) for part in episodes)
    low, high = min(support.min(), query.min()), max(support.max(), query.max())
    if low < 0 or high >= len(features):
        raise ValueError(
            f"episodes hold indices from {low} to {high}, but there are {len(features)} features"
        )
    if not np.isfinite(features).all():
        rows = int((~np.isfinite(features)).any(1).sum())
        raise ValueError(f"{rows} of {len(features)} features are not finite")
    return features, Episodes(support, query)


def mean_and_interval(accuracies: np.ndarray | Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % confidence interval, 1.96·σ/√E.

    Accuracies are floats [E], E > 1, and σ has E − 1 degrees of freedom.
    """
    values = np.asarray(accuracies, np.float64)
    return float(values.mean()), float(1.96 * values.std(ddof=1) / np.sqrt(values.size))


def configured_episodes(
    config: EpisodeConfig,
    labels: np.ndarray | ClassIndex,
    *,
    shots: int,
    num_episodes: int | None = None,
) -> Episodes:
    """The episodes of a configuration with one number of shots, by default all of them."""
    return evaluation_episodes(
        labels,
        num_episodes=config.episodes if num_episodes is None else num_episodes,
        ways=config.ways,
        shots=shots,
        queries=config.queries,
        seed=config.seed,
    )


def evaluate_prototypes(
    features: np.ndarray, labels: np.ndarray, *, config: EpisodeConfig, distance: Distance
) -> list[tuple[EpisodeResult, np.ndarray]]:
    """Classifies by the nearest prototype; the rest is as in `evaluate_episodes`."""
    classify = partial(episode_accuracies, features, distance=distance)
    return evaluate_episodes(
        classify, features, labels, config=config, classifier=f"{distance} prototypes"
    )


def evaluate_episodes(
    classify: Callable[[Episodes], np.ndarray],
    features: np.ndarray,
    labels: np.ndarray,
    *,
    config: EpisodeConfig,
    classifier: str,
) -> list[tuple[EpisodeResult, np.ndarray]]:
    """Mean accuracy and interval over the episodes of every number of shots in `config.shots`.

    Args:
      classify: Maps episodes to the accuracy in each.
      features: Float [n, d].
      labels: Integers [n].
      config: The episodes.
      classifier: Name of the classifier, for reports.

    Returns:
      For every number of shots the result, and the accuracy in every episode, float32 [E].

    Raises:
      ValueError: The labels do not fit the features.
      ConfigError: The labels do not give such episodes.
    """
    if len(features) != len(labels):
        raise ValueError(f"got {len(features)} features but {len(labels)} labels")
    index = index_classes(labels)
    results = []
    for shots in config.shots:
        episodes = configured_episodes(config, index, shots=shots)
        accuracies = classify(episodes)
        result = EpisodeResult(
            config.ways,
            shots,
            config.queries,
            config.episodes,
            classifier,
            *mean_and_interval(accuracies),
            episodes_hash(episodes),
        )
        results.append((result, accuracies))
    return results


def _unit(features: Array) -> Array:
    """Divide each row by its length; a zero row stays zero."""
    length = jnp.sqrt(jnp.square(features).sum(-1, keepdims=True))
    return features / jnp.where(length > 0, length, 1)


@partial(jax.jit, static_argnames="distance")
def _nearest(features: Array, support: Array, query: Array, *, distance: Distance) -> Array:
    """The class of the nearest prototype: int32 [E, N, Q]."""
    # A mean of zero keeps distances, and the digits that |p|² − 2 q·p would cancel.
    features = _unit(features) if distance == "cosine" else features - features.mean(0)

    def predict(episode: tuple[Array, Array]) -> Array:
        support, query = episode
        prototypes, queries = features[support].mean(1), features[query.ravel()]
        if distance == "cosine":
            scores = product(queries, _unit(prototypes).T)
        else:
            scores = 2 * product(queries, prototypes.T) - jnp.square(prototypes).sum(-1)
        return scores.argmax(-1).reshape(query.shape)

    return lax.map(predict, (support, query), batch_size=EPISODES_AT_ONCE)
