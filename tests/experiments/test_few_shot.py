"""Few-shot evaluation against SciPy's distances; fine-tuning against PyTorch's SGD in float64."""

import dataclasses
import json
from functools import partial

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.spatial.distance import cdist

from experiments.core.config import set_options
from experiments.core.protocol import Outputs, mean_and_interval
from experiments.data.sampling import episodes_hash, support_orders
from experiments.evaluation.few_shot import (
    Distance,
    EpisodeConfig,
    accuracies_of,
    evaluate_prototypes,
    notes_on_classes,
    prototype_predictions,
)
from experiments.evaluation.fine_tuning import (
    FineTuning,
    evaluate_fine_tuning,
    fine_tune,
    fine_tuned_predictions,
)
from experiments.papers import build_protocol
from experiments.papers.few_shot import FewShotConfig
from experiments.papers.negative_margin import NegativeMarginConfig
from jaxloss import sampling
from jaxloss.sampling import Episodes
from tests.tolerances import FLOAT32

LABELS = np.arange(300) * 7 % 12
DISTANCES: list[Distance] = ["euclidean", "cosine"]


def features_of(spread=1.0, d=6, seed=0):
    random = np.random.default_rng(seed)
    centres = spread * random.normal(size=(12, d))
    return (centres[LABELS] + random.normal(size=(300, d)) + 0.5).astype(np.float32)


def episodes_of(num=70, ways=5, shots=3, queries=4, seed=0):
    return sampling.episodes(
        LABELS, num_episodes=num, ways=ways, shots=shots, queries=queries, seed=seed
    )


def accuracies_by_scipy(features, episodes, distance):
    """The nearest prototype in float64, one episode at a time."""
    features = features.astype(np.float64)
    if distance == "cosine":
        features /= np.linalg.norm(features, axis=1, keepdims=True)
    accuracies = []
    for support, query in zip(*episodes, strict=True):
        distances = cdist(features[query.ravel()], features[support].mean(1), distance)
        predicted = distances.argmin(1).reshape(query.shape)
        accuracies.append(np.mean(predicted == np.arange(len(query))[:, None]))
    return np.array(accuracies)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize(("shots", "num"), [(1, 70), (3, 64), (3, 1)])
def test_accuracies_are_those_of_the_nearest_prototype(distance, shots, num):
    features, episodes = features_of(), episodes_of(num, shots=shots)
    found = accuracies_of(prototype_predictions(features, episodes, distance=distance))
    assert found.dtype == np.float32
    expected = accuracies_by_scipy(features, episodes, distance)
    assert 0.3 < expected.mean() < 0.95
    np.testing.assert_allclose(found, expected, rtol=FLOAT32)


def test_large_features_keep_their_digits():
    features, predict = features_of(), partial(prototype_predictions, episodes=episodes_of())
    plain, moved = (accuracies_of(predict(given)) for given in (features, features + 1000))
    np.testing.assert_allclose(moved, plain, atol=0.051)
    assert abs(moved.mean() - plain.mean()) < 0.003


def test_of_equally_near_prototypes_the_first_is_taken():
    # Prototypes at −1 and 1; the query of each class stands in the middle.
    features = np.array([[-1.0], [1.0], [0.0], [0.0]], np.float32)
    episode = Episodes(np.array([[[0], [1]]], np.int32), np.array([[[2], [3]]], np.int32))
    assert prototype_predictions(features, episode).ravel().tolist() == [0, 0]


def test_interval_is_its_formula():
    values = [0.2, 0.4, 0.9, 0.5]
    # Student's t of 3 degrees of freedom, from a table.
    expected = 0.5, 3.182446 * np.std(values, ddof=1) / 2
    assert mean_and_interval(values) == pytest.approx(expected)
    assert mean_and_interval(np.full(5, 0.25, np.float32)) == (0.25, 0.0)


# Threads of PyTorch cost more than they save on arrays of this size.
torch.set_num_threads(1)

SHORT = FineTuning(passes=8)
COSINE = partial(prototype_predictions, distance="cosine")
TUNED = partial(fine_tuned_predictions, settings=FineTuning(passes=3))


def activations_of(spread=0.6, d=24):
    return np.maximum(features_of(spread, d) - 0.2, 0)


def torch_logits(features, weights, classifier):
    if classifier == "cosine":
        return F.normalize(features) @ F.normalize(weights, dim=0)
    return features @ weights


def tune_with_torch(features, labels, weights, orders, settings, classifier="cosine"):
    """The loop of the paper's authors, batch by batch, in float64."""
    features, labels = torch.tensor(features, dtype=torch.float64), torch.tensor(labels).long()
    weights = torch.nn.Parameter(torch.tensor(np.asarray(weights), dtype=torch.float64))
    optimizer = torch.optim.SGD(
        [weights],
        lr=settings.learning_rate,
        momentum=settings.momentum,
        dampening=settings.dampening,
        weight_decay=settings.weight_decay,
    )
    for order in np.asarray(orders).tolist():
        for start in range(0, len(order), settings.batch_size):
            batch = order[start : start + settings.batch_size]
            logits = torch_logits(features[batch], weights, classifier)
            target = F.one_hot(labels[batch], weights.shape[1])
            loss = F.cross_entropy(
                settings.scale * (logits - settings.margin * target), labels[batch]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights.detach().numpy()


@pytest.mark.parametrize(
    ("shots", "d", "classifier", "change"),
    [
        # Of 5 and 25 samples, batches of 4 leave one over; samples and weights span 10 or 30
        # dimensions, fewer or more than d.
        (1, 64, "cosine", {"passes": 20}),
        (1, 64, "linear", {"passes": 20}),
        (5, 12, "cosine", {"passes": 10}),
        (5, 12, "linear", {"passes": 10}),
        pytest.param(5, 64, "cosine", {"passes": 100}, marks=pytest.mark.long),
        (5, 24, "cosine", {"momentum": 0.0}),
        (5, 24, "cosine", {"momentum": 0.5, "dampening": 0.0, "weight_decay": 0.1}),
        (5, 24, "cosine", {"margin": -0.3, "scale": 8.0, "weight_decay": 0.0}),
        (5, 24, "cosine", {"batch_size": 7, "dampening": 0.3}),
        (5, 24, "cosine", {"batch_size": 100}),
    ],
)
def test_weights_equal_those_of_pytorch(shots, d, classifier, change):
    features = activations_of(d=d)[episodes_of(1, shots=shots).support[0].ravel()]
    labels, settings = np.repeat(np.arange(5), shots), dataclasses.replace(SHORT, **change)
    random = np.random.default_rng(0)
    weights = (random.uniform(-1, 1, (d, 5)) / np.sqrt(d)).astype(np.float32)
    orders = np.array([random.permutation(len(labels)) for _ in range(settings.passes)], np.int32)
    expected = tune_with_torch(features, labels, weights, orders, settings, classifier)
    tune = jax.jit(fine_tune, static_argnames=("classifier", "settings"))
    found = tune(features, labels, weights, orders, classifier=classifier, settings=settings)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4 * FLOAT32)
    assert np.abs(found - weights).max() > 0.01


@pytest.mark.parametrize("classifier", ["cosine", "linear"])
def test_accuracies_equal_those_of_pytorch(classifier):
    shots, settings, expected = 3, FineTuning(passes=10), []
    features, episodes = activations_of(), episodes_of(3, shots=shots, queries=6)
    found = accuracies_of(
        fine_tuned_predictions(features, episodes, classifier=classifier, settings=settings, seed=3)
    )
    for e, (support, query) in enumerate(zip(*episodes, strict=True)):
        key = jax.random.fold_in(jax.random.key(3), e)
        weights = jax.random.uniform(key, (24, 5), minval=-(24**-0.5), maxval=24**-0.5)
        orders = support_orders(5 * shots, 10, seed=3, episode=e)
        labels = np.repeat(np.arange(5), shots)
        weights = tune_with_torch(
            features[support.ravel()], labels, weights, orders, settings, classifier
        )
        queries = torch.tensor(features[query.ravel()], dtype=torch.float64)
        predicted = torch_logits(queries, torch.tensor(weights), classifier).argmax(1).numpy()
        expected.append(np.mean(predicted == np.repeat(np.arange(5), 6)))
    assert 0.3 < np.mean(expected) < 0.95
    np.testing.assert_allclose(found, expected, rtol=FLOAT32)


@pytest.mark.long
@pytest.mark.parametrize("classifier", ["cosine", "linear"])
def test_an_episode_does_not_depend_on_how_many_there_are(classifier):
    episodes = episodes_of(130, shots=1)  # They are tuned in several groups.
    few = Episodes(episodes.support[:7], episodes.query[:7])
    how = {"classifier": classifier, "settings": SHORT}
    predicted = partial(fine_tuned_predictions, activations_of(), **how)
    expected = predicted(few, seed=1)
    np.testing.assert_array_equal(predicted(episodes, seed=1)[:7], expected)
    assert (predicted(few, seed=2) != expected).any()


@pytest.mark.parametrize(
    ("classifier", "evaluate", "predict", "options"),
    [
        *(
            (f"{of} prototypes", evaluate_prototypes, prototype_predictions, {"distance": of})
            for of in DISTANCES
        ),
        ("cosine", evaluate_fine_tuning, fine_tuned_predictions, {"settings": SHORT}),
    ],
)
def test_results_follow_the_configuration(classifier, evaluate, predict, options):
    config = EpisodeConfig(ways=4, shots=(1, 5), queries=6, episodes=30)
    features = features_of(0.6, 24)
    found = evaluate(features, LABELS, config=config, **options)
    assert [result.shots for result, _ in found] == [1, 5]
    for result, accuracies in found:
        episodes = episodes_of(30, 4, result.shots, 6, 0)
        single = accuracies_of(predict(features, episodes, **options))
        np.testing.assert_array_equal(accuracies, single)
        assert (result.accuracy, result.interval) == mean_and_interval(single)
        assert result.hash == episodes_hash(episodes)
        assert result[:5] == (4, result.shots, 6, 30, classifier)
        assert json.loads(json.dumps(result._asdict())) == result._asdict()


@pytest.mark.parametrize(
    ("kind", "options", "shots", "predict"),
    [
        (FewShotConfig, {}, 1, partial(prototype_predictions, distance="euclidean")),
        (FewShotConfig, {"distance": "cosine"}, 1, COSINE),
        (NegativeMarginConfig, {"shots": 2}, 2, COSINE),
        (NegativeMarginConfig, {"distance": "euclidean"}, 1, prototype_predictions),
        (NegativeMarginConfig, {"shots": 3, "selection": "fine-tuned"}, 3, TUNED),
    ],
)
def test_a_validation_is_the_accuracy_in_episodes_of_its_own(kind, options, shots, predict):
    names = {"shots": "evaluation.validation_shots", "selection": "evaluation.selection"}
    names["distance"] = "evaluation.validation_distance"
    own = {"ways": 3, "shots": (5,), "queries": 4, "episodes": 9, "validation_episodes": 7}
    changes = {f"evaluation.{name}": value for name, value in own.items()}
    config = set_options(kind(), changes | {names[name]: of for name, of in options.items()})
    if kind is NegativeMarginConfig:
        config = set_options(config, {"fine_tuning.passes": 3})
    features = features_of(0.6, 24)
    outputs = Outputs(features, LABELS, lambda: features, np.ones(12, int))
    expected = accuracies_of(predict(features, episodes_of(7, 3, shots, 4))).mean()
    assert build_protocol(config).validate(outputs) == pytest.approx(expected, rel=FLOAT32)


@pytest.mark.parametrize(
    ("counts", "shots", "noted"),
    [
        ([7, 8, 9, 30], (1, 2), ""),
        ([2, 3, 7, 8, 9], (1, 2), "1-shot and 2-shot episodes draw from the same 3 of 5 classes, "),
        (
            [6, 10, 10, 6],
            (1, 5, 2),
            "1-shot episodes draw from 4 of 4 classes; 2-shot and 5-shot episodes draw from the "
            "same 2 of 4 classes, those with at least 10 images. Their accuracies",
        ),
    ],
)
def test_classes_that_are_too_small_for_episodes_are_counted(counts, shots, noted):
    labels = np.repeat(np.arange(len(counts)), counts)
    config = EpisodeConfig(ways=2, shots=shots, queries=5, episodes=20)
    features = np.zeros((len(labels), 1), np.float32)
    found = evaluate_prototypes(features, labels, config=config, distance="euclidean")
    results = [result._asdict() for result, _ in found]
    for result in results:
        episodes = sampling.episodes(
            labels, num_episodes=200, ways=2, shots=result["shots"], queries=5, seed=0
        )
        assert result["classes"] == len(np.unique(labels[episodes.support]))
        assert result["available"] == len(counts)
    notes = notes_on_classes(results)
    assert len(notes) == bool(noted)
    assert "".join(notes).startswith(noted)
    # Of several splits, each has a sentence of its own.
    named = [result | {"split": split} for split in ("novel", "base") for result in results]
    of_each = ["novel classes" in note for note in notes_on_classes(named)]
    assert of_each == [True, False][: 2 * len(notes)]
