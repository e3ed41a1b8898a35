"""Few-shot evaluation against explicit loops, and its edge cases."""

import json

import numpy as np
import pytest

from experiments.contracts import mean_and_interval
from experiments.data.sampling import Episodes, episodes_hash, evaluation_episodes
from experiments.evaluation.few_shot import (
    EpisodeConfig,
    EpisodeResult,
    accuracies_of,
    evaluate_prototypes,
    prototype_predictions,
)

LABELS = np.arange(300) * 7 % 12
DISTANCES = ["euclidean", "cosine"]


def features_of(spread=1.0, d=6, seed=0):
    random = np.random.default_rng(seed)
    centres = spread * random.normal(size=(12, d))
    return (centres[LABELS] + random.normal(size=(300, d)) + 0.5).astype(np.float32)


def episodes_of(num=70, ways=5, shots=3, queries=4, seed=0):
    return evaluation_episodes(
        LABELS, num_episodes=num, ways=ways, shots=shots, queries=queries, seed=seed
    )


def episode_accuracies(*arguments, **options):
    return accuracies_of(prototype_predictions(*arguments, **options))


def accuracies_by_loops(features, episodes, distance):
    """The nearest prototype in float64, one query at a time."""
    features = np.asarray(features, np.float64)
    if distance == "cosine":
        features = features / np.linalg.norm(features, axis=1, keepdims=True)
    accuracies = []
    for support, query in zip(*episodes, strict=True):
        prototypes = [np.mean([features[i] for i in samples], 0) for samples in support]
        right = 0
        for truth, samples in enumerate(query):
            for i in samples:
                if distance == "cosine":
                    scores = [-features[i] @ p / np.linalg.norm(p) for p in prototypes]
                else:
                    scores = [np.linalg.norm(features[i] - p) for p in prototypes]
                right += int(np.argmin(scores)) == truth
        accuracies.append(right / query.size)
    return np.array(accuracies)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize(("shots", "num"), [(1, 70), (3, 64), (3, 1)])
def test_accuracies_equal_the_loops(distance, shots, num):
    features, episodes = features_of(), episodes_of(num, shots=shots)
    found = episode_accuracies(features, episodes, distance=distance)
    assert found.dtype == np.float32
    assert found.shape == (num,)
    expected = accuracies_by_loops(features, episodes, distance)
    assert 0.3 < expected.mean() < 0.95
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_distances_differ_and_follow_their_invariances():
    features, episodes = features_of(), episodes_of()
    euclidean = episode_accuracies(features, episodes)
    cosine = episode_accuracies(features, episodes, distance="cosine")
    assert (euclidean != cosine).any()
    moved = episode_accuracies(features + 1000, episodes)
    np.testing.assert_allclose(moved, euclidean, atol=0.051)
    assert abs(moved.mean() - euclidean.mean()) < 0.003
    lengths = np.random.default_rng(1).uniform(0.1, 10, (300, 1)).astype(np.float32)
    scaled = episode_accuracies(features * lengths, episodes, distance="cosine")
    np.testing.assert_allclose(scaled, cosine, atol=0.051)
    assert abs(scaled.mean() - cosine.mean()) < 0.003


def test_of_equally_near_prototypes_the_first_is_taken():
    # Prototypes at −1 and 1; the query of each class stands in the middle.
    features = np.array([[-1.0], [1.0], [0.0], [0.0]], np.float32)
    episode = Episodes(np.array([[[0], [1]]], np.int32), np.array([[[2], [3]]], np.int32))
    np.testing.assert_array_equal(episode_accuracies(features, episode), [0.5])


def test_interval_is_its_formula():
    values = [0.2, 0.4, 0.9, 0.5]
    mean, interval = mean_and_interval(values)
    assert type(mean) is float
    assert type(interval) is float
    assert mean == pytest.approx(0.5)
    variance = (0.3**2 + 0.1**2 + 0.4**2) / 3
    assert interval == pytest.approx(1.96 * variance**0.5 / 2)
    assert mean_and_interval(np.full(5, 0.25, np.float32)) == (0.25, 0.0)


@pytest.mark.parametrize("distance", DISTANCES)
def test_results_follow_the_configuration(distance):
    config = EpisodeConfig(ways=4, shots=(1, 3), queries=5, episodes=80)
    features = features_of()
    found = evaluate_prototypes(features, LABELS, config=config, distance=distance)
    results = [result for result, _ in found]
    assert [result.shots for result in results] == [1, 3]
    for result, accuracies in found:
        episodes = episodes_of(80, 4, result.shots, 5, 0)
        single = episode_accuracies(features, episodes, distance=distance)
        np.testing.assert_array_equal(accuracies, single)
        expected = mean_and_interval(single)
        assert (result.accuracy, result.interval) == expected
        assert result.hash == episodes_hash(episodes)
        assert (result.ways, result.queries, result.episodes) == (4, 5, 80)
        assert isinstance(result, EpisodeResult)
        assert result.classifier == f"{distance} prototypes"
        assert json.loads(json.dumps(result._asdict())) == result._asdict()
    assert results[1].accuracy > results[0].accuracy
