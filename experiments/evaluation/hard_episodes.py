"""The episodes with the lowest accuracy, with the prediction of every query."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

import jaxloss
from experiments.data.sampling import Episodes, support_orders
from experiments.evaluation.feature_space import unit_features
from experiments.evaluation.few_shot import Distance
from experiments.evaluation.fine_tuning import Classifier, FineTuning, fine_tune, first_weights

_LOGITS = {"cosine": jaxloss.cosine_logits, "linear": jaxloss.linear_logits}


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


def prototype_predictions(
    features: np.ndarray, support: np.ndarray, query: np.ndarray, *, distance: Distance
) -> np.ndarray:
    """The nearest prototype of every query of an episode: int64 [N, Q].

    Args:
      features: Floats [n, d].
      support: Integers [N, K], rows of the features.
      query: Integers [N, Q].
      distance: Of a query from a prototype.
    """
    features = np.asarray(features, np.float64)
    if distance == "cosine":
        features = unit_features(features)
        prototypes = unit_features(features[support].mean(1))
        return (features[query] @ prototypes.T).argmax(-1)
    prototypes = features[support].mean(1)
    return (2 * features[query] @ prototypes.T - (prototypes**2).sum(1)).argmax(-1)


def fine_tuned_predictions(
    features: np.ndarray,
    support: np.ndarray,
    query: np.ndarray,
    *,
    classifier: Classifier,
    settings: FineTuning,
    seed: int,
    episode: int,
) -> np.ndarray:
    """The predictions of the classifier that is fine-tuned in an episode: int64 [N, Q].

    Arguments are those of `prototype_predictions` and `fine_tuned_accuracies`; `episode` is the
    number of the episode, on which first weights and orders depend.
    """
    ways, shots = support.shape
    features = np.asarray(features, np.float32)
    weights = fine_tune(
        features[support.ravel()],
        np.repeat(np.arange(ways), shots),
        first_weights(jax.random.fold_in(jax.random.key(seed), episode), features.shape[1], ways),
        support_orders(ways * shots, settings.passes, seed=seed, episode=episode),
        classifier=classifier,
        settings=settings,
    )
    logits = _LOGITS[classifier](features[query.ravel()], weights)
    return np.asarray(logits).argmax(-1).reshape(query.shape)
