"""Few-shot evaluation: the accuracy of the nearest prototype in every episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from experiments.core.config import Count, Several
from experiments.core.protocol import mean_and_interval
from experiments.data.sampling import episode_classes, episodes_hash, errors_of
from jaxloss import sampling
from jaxloss.core.products import wide_product as product
from jaxloss.sampling import ClassIndex, Episodes, index_classes

EPISODES_AT_ONCE = 64
"""Bounds the gathered features to about 16 MB at 100 × 640."""

Distance = Literal["euclidean", "cosine"]


@dataclass(frozen=True)
class EpisodeConfig:
    """The episodes of a few-shot evaluation."""

    ways: Several = 5
    """Classes of an episode."""
    shots: tuple[Count, ...] = field(default=(1, 5), metadata={"distinct": True})
    """Support images per class; one evaluation for each number."""
    queries: Count = 15
    """Query images per class."""
    episodes: Several = 2000
    """Episodes of each evaluation."""
    validation_distance: Distance = "euclidean"
    """Distance of a query from the nearest prototype in a validation."""
    validation_episodes: Count = 500
    """Episodes of a validation, with the ways and queries above."""


class EpisodeResult(NamedTuple):
    """The accuracy over one list of episodes, and its interval, as in `mean_and_interval`."""

    ways: int
    shots: int
    queries: int
    episodes: int
    classifier: str
    accuracy: float
    interval: float
    hash: str
    """Identifies the list of episodes: results with the same hash compare episode by episode."""
    classes: int  # Classes that the episodes are drawn from: those with enough images.
    available: int  # Classes of the split.


def prototype_predictions(
    features: np.ndarray | Array, episodes: Episodes, *, distance: Distance = "euclidean"
) -> np.ndarray:
    """The class of the nearest prototype for every query, of equal distances the first.

    A prototype is the mean of a class's support features [K, d]. With the cosine distance, features
    are divided by their length before the mean is taken. Predictions are int32 [E, N, Q].
    """
    features = jnp.asarray(features, jnp.float32)
    return np.asarray(_nearest(features, *episodes, distance=distance))


def accuracies_of(predictions: np.ndarray) -> np.ndarray:
    """The accuracy in every episode, float32 [E], of predicted classes, int32 [E, N, Q]."""
    return np.asarray(_accuracies(predictions))


@jax.jit
def _accuracies(predictions: Array) -> Array:
    right = predictions == jnp.arange(predictions.shape[1])[:, None]
    return right.mean((1, 2), dtype=jnp.float32)


def configured_episodes(
    config: EpisodeConfig,
    labels: np.ndarray | ClassIndex,
    *,
    shots: int,
    num_episodes: int | None = None,
) -> Episodes:
    """The episodes of a configuration with one number of shots, by default all of them."""
    count = config.episodes if num_episodes is None else num_episodes
    own: Any = {"ways": config.ways, "shots": shots, "queries": config.queries}
    with errors_of("evaluation"):  # One seed: the same episodes for all runs.
        return sampling.episodes(labels, num_episodes=count, **own, seed=0)


def evaluate_prototypes(
    features: np.ndarray, labels: np.ndarray, *, config: EpisodeConfig, distance: Distance
) -> list[tuple[EpisodeResult, np.ndarray]]:
    """Classifies by the nearest prototype; the rest is as in `evaluate_episodes`."""
    predict = partial(prototype_predictions, distance=distance)
    name = f"{distance} prototypes"
    return evaluate_episodes(predict, features, labels, config=config, classifier=name)


def evaluate_episodes(
    predict: Callable[[np.ndarray, Episodes], np.ndarray],
    features: np.ndarray,
    labels: np.ndarray,
    *,
    config: EpisodeConfig,
    classifier: str,
) -> list[tuple[EpisodeResult, np.ndarray]]:
    """Mean accuracy and interval over the episodes of every number of shots in `config.shots`.

    `predict` maps features [n, d] and episodes to predicted classes, int32 [E, N, Q], and
    `classifier` is its name. Returns for every number of shots the result, and the accuracy in
    every episode, float32 [E]; a `ConfigError` if the labels do not give such episodes.
    """
    index = index_classes(labels)
    counts, results = np.diff(index.offsets), []
    for shots in config.shots:
        episodes = configured_episodes(config, index, shots=shots)
        accuracies = accuracies_of(predict(features, episodes))
        result = EpisodeResult(
            config.ways,
            shots,
            config.queries,
            config.episodes,
            classifier,
            *mean_and_interval(accuracies),
            episodes_hash(episodes),
            len(episode_classes(counts, config.ways, shots, config.queries)),
            len(counts),
        )
        results.append((result, accuracies))
    return results


def notes_on_classes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each split whose episodes leave out classes: which shots draw from which."""
    of_split: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for result in results:
        groups = of_split.setdefault(result.get("split", ""), {})
        groups.setdefault(result["classes"], []).append(result)
    notes = []
    for split, groups in of_split.items():
        parts, kind = [], f"{split} classes".lstrip()
        # The classes for more shots are among those for fewer: equal numbers are the same classes.
        for classes, of in sorted(groups.items(), reverse=True):
            shots = sorted({result["shots"] for result in of})
            names = " and ".join(f"{number}-shot" for number in shots)
            same, total = "the same " * (len(shots) > 1), of[0]["available"]
            part = f"{names} episodes draw from {same}{classes} of {total} {kind}"
            if classes < total:
                part += f", those with at least {shots[-1] + of[0]['queries']} images"
            parts.append(part)
        differ = " Their accuracies are over different classes." if len(groups) > 1 else ""
        if any(classes < of[0]["available"] for classes, of in groups.items()):
            notes.append(f"{'; '.join(parts)}.{differ}")
    return notes


def _unit(features: Array) -> Array:
    """Divide each row by its length; a zero row stays zero."""
    length = jnp.sqrt(jnp.square(features).sum(-1, keepdims=True))
    return features / jnp.where(length > 0, length, 1)


@partial(jax.jit, static_argnames="distance")
def _nearest(features: Array, support: Array, query: Array, *, distance: Distance) -> Array:
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
