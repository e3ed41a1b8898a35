"""The predictions in an episode have the accuracy that the evaluation of all episodes gives."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.data.sampling import evaluation_episodes
from experiments.evaluation.few_shot import episode_accuracies, prototype_predictions
from experiments.evaluation.fine_tuning import (
    FineTuning,
    fine_tuned_accuracies,
    fine_tuned_predictions,
)
from experiments.evaluation.hard_episodes import hardest_episodes

LABELS = np.repeat(np.arange(4), 10)
FEATURES = np.random.default_rng(0).normal(size=(40, 5)) + 1.2 * np.eye(5)[LABELS]
EPISODES = evaluation_episodes(LABELS, num_episodes=12, ways=3, shots=2, queries=4, seed=0)
TRUTH = np.arange(3)[:, None]


@pytest.mark.parametrize("distance", ["euclidean", "cosine"])
def test_prototypes_predict_as_they_are_evaluated(distance):
    accuracies = episode_accuracies(FEATURES, EPISODES, distance=distance)

    def predict(e):
        return prototype_predictions(FEATURES, EPISODES, e, distance=distance)

    hardest = hardest_episodes(accuracies, EPISODES, predict, count=12)
    assert [h.number for h in hardest] == np.argsort(accuracies, kind="stable").tolist()
    for episode in hardest:
        assert (episode.predictions == TRUTH).mean() == pytest.approx(episode.accuracy)
        assert episode.query.tolist() == EPISODES.query[episode.number].tolist()
    assert hardest[0].accuracy < hardest[-1].accuracy


@pytest.mark.parametrize("classifier", ["cosine", "linear"])
def test_fine_tuned_classifiers_predict_as_they_are_evaluated(classifier):
    options = {"classifier": classifier, "settings": FineTuning(passes=5), "seed": 3}
    accuracies = fine_tuned_accuracies(FEATURES, EPISODES, **options)
    for e in (0, 5):
        predictions = fine_tuned_predictions(FEATURES, EPISODES, e, **options)
        assert predictions.shape == (3, 4)
        assert (predictions == TRUTH).mean() == pytest.approx(accuracies[e])


def test_the_first_of_equal_episodes_is_the_harder_one():
    accuracies = np.array([0.5, 0.25, 0.5, 0.25])
    hardest = hardest_episodes(accuracies, EPISODES, lambda e: np.full((3, 4), e), count=3)
    assert [(h.number, h.accuracy) for h in hardest] == [(1, 0.25), (3, 0.25), (0, 0.5)]
    assert hardest[1].predictions[0, 0] == 3
