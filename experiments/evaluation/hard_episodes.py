"""The episodes with the lowest accuracy, with the prediction of every query."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from experiments.contracts import EpisodeClassifier, Metric
from experiments.data.sampling import Episodes, support_orders
from experiments.evaluation.feature_space import unit_features
from experiments.evaluation.few_shot import Distance, EpisodeConfig, configured_episodes
from experiments.evaluation.fine_tuning import (
    LOGITS,
    Classifier,
    FineTuning,
    fine_tune,
    first_weights,
)


class HardEpisode(NamedTuple):
    """An episode and its outcome."""

    number: int
    """In the list of episodes, from 0."""
    accuracy: float
    """In [0, 1]."""
    support: np.ndarray
    """int32 [N, K], rows of the features."""
    query: np.ndarray
    """int32 [N, Q]."""
    predictions: np.ndarray
    """int64 [N, Q], the class from 0 to N−1 that each query is assigned to."""


def hardest_episodes(
    accuracies: np.ndarray,
    episodes: Episodes,
    predict: Callable[[int], np.ndarray],
    *,
    count: int,
) -> list[HardEpisode]:
    """The episodes with the lowest accuracy, from the lowest; the first of equal ones.

    Args:
      accuracies: Floats [E].
      episodes: The episodes.
      predict: Maps the number of an episode to its predictions [N, Q].
      count: How many.
    """
    order = np.argsort(accuracies, kind="stable")[:count]
    return [
        HardEpisode(
            int(e), float(accuracies[e]), episodes.support[e], episodes.query[e], predict(int(e))
        )
        for e in order
    ]


def episode_classifier(
    config: EpisodeConfig,
    *,
    name: str,
    metric: Callable[[int], Metric],
    accuracies: Callable[[np.ndarray, Episodes], np.ndarray],
    predictions: Callable[[np.ndarray, Episodes, int], np.ndarray],
) -> EpisodeClassifier:
    """The classifier of an evaluation's episodes with the fewest shots.

    Args:
      config: The episodes.
      metric: Maps a number of shots to its metric.
      name, accuracies, predictions: As in `EpisodeClassifier`.
    """
    shots = min(config.shots)
    episodes = partial(configured_episodes, config, shots=shots)
    return EpisodeClassifier(name, shots, metric(shots).name, episodes, accuracies, predictions)


def prototype_predictions(
    features: np.ndarray, episodes: Episodes, number: int, *, distance: Distance
) -> np.ndarray:
    """The nearest prototype of every query of an episode: int64 [N, Q].

    Args:
      features: Floats [n, d].
      episodes: All episodes.
      number: The number of this one, from 0.
      distance: Of a query from a prototype.
    """
    support, query = episodes.support[number], episodes.query[number]
    features = np.asarray(features, np.float64)
    if distance == "cosine":
        features = unit_features(features)
        prototypes = unit_features(features[support].mean(1))
        return (features[query] @ prototypes.T).argmax(-1)
    prototypes = features[support].mean(1)
    return (2 * features[query] @ prototypes.T - (prototypes**2).sum(1)).argmax(-1)


def fine_tuned_predictions(
    features: np.ndarray,
    episodes: Episodes,
    number: int,
    *,
    classifier: Classifier,
    settings: FineTuning,
    seed: int,
) -> np.ndarray:
    """The predictions of the classifier that is fine-tuned in an episode: int64 [N, Q].

    Arguments are those of `prototype_predictions` and `fine_tuned_accuracies`.
    """
    support, query = episodes.support[number], episodes.query[number]
    ways, shots = support.shape
    features = np.asarray(features, np.float32)
    weights = fine_tune(
        features[support.ravel()],
        np.repeat(np.arange(ways), shots),
        first_weights(jax.random.fold_in(jax.random.key(seed), number), features.shape[1], ways),
        support_orders(ways * shots, settings.passes, seed=seed, episode=number),
        classifier=classifier,
        settings=settings,
    )
    logits = LOGITS[classifier](features[query.ravel()], weights)
    return np.asarray(logits).argmax(-1).reshape(query.shape)
