"""The episodes with the lowest accuracy, with the prediction of every query."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from experiments.contracts import EpisodeClassifier, Metric
from experiments.data.sampling import Episodes
from experiments.evaluation.few_shot import EpisodeConfig, configured_episodes


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
    """int32 [N, Q], the class from 0 to N−1 that each query is assigned to."""


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

    `metric` maps a number of shots to its metric; the rest is as in `EpisodeClassifier`.
    """
    shots = min(config.shots)
    episodes = partial(configured_episodes, config, shots=shots)
    return EpisodeClassifier(name, shots, metric(shots).name, episodes, accuracies, predictions)
