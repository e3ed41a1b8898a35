"""Protocol B: what is minimised, where its classifier starts, what a run is called."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experiments.presets.icons_groups import CONFIG as PRESET
from experiments.training.objective import Objective, Problem
from experiments.training.preflight import check_run

from experiments.errors import ConfigError
from experiments.protocols import group_softmax
from experiments.protocols.group_softmax import GroupSoftmaxConfig
from tests.jaxloss import references

DIM = 10
COUNTS = np.array([4, 4, 3, 5])


def configured(**options) -> GroupSoftmaxConfig:
    return dataclasses.replace(PRESET, loss=dataclasses.replace(PRESET.loss, **options))


def build(**options) -> Objective:
    return group_softmax.objective(configured(**options), Problem(DIM, COUNTS, None))


CONTIGUOUS = np.array([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]])


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"name": "softmax", "num_groups": 3}, {"num_groups": 1}),
        ({"name": "loose", "num_groups": 3}, {"num_groups": 3, "bound": "loose"}),
        ({"name": "tight", "num_groups": 3}, {"num_groups": 3, "bound": "tight"}),
        (
            {"name": "tight", "num_groups": 3, "grouping": "contiguous"},
            {"num_groups": 3, "bound": "tight", "groups": CONTIGUOUS.repeat(7, axis=0)},
        ),
    ],
)
def test_the_objective_is_the_papers(options, reference):
    objective = build(**options)
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(7, DIM)), rng.integers(0, len(COUNTS), 7)
    kernel, bias = rng.normal(size=(DIM, len(COUNTS))), rng.normal(size=len(COUNTS))
    head = {"kernel": jnp.float32(kernel), "bias": jnp.float32(bias)}
    loss = objective.loss(jnp.float32(features), jnp.int32(labels), head, ())
    expected = references.group_softmax_loss(features, labels, kernel, bias, **reference)
    assert float(loss.value) == pytest.approx(expected, rel=1e-5)
    logits = features @ kernel + bias
    np.testing.assert_allclose(objective.scores(jnp.float32(features), head, ()), logits, rtol=1e-4)
    told = np.mean(logits.argmax(axis=1) == labels)
    assert float(loss.means["train_accuracy"]) == pytest.approx(told)


def test_the_classifier_starts_small():
    """At the deviation 1 / √d of the other protocols, type I hardly learns."""
    objective = group_softmax.objective(PRESET, Problem(256, np.ones(100), None))
    head = objective.head(jax.random.key(0))
    assert head["kernel"].shape == (256, 100)
    assert float(head["kernel"].std()) == pytest.approx(0.1 / 256**0.5, rel=0.02)
    assert len(set(head["bias"].tolist())) == 1


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"name": "softmax"}, "Softmax"),
        ({"name": "tight"}, "Type I, G = 2"),
        ({"name": "loose", "num_groups": 4}, "Type II, G = 4"),
        ({"name": "loose", "grouping": "contiguous"}, "Type II, G = 2, contiguous"),
        ({"name": "softmax", "grouping": "contiguous"}, "Softmax"),
    ],
)
def test_labels_tell_what_is_minimised(options, label):
    assert group_softmax.describe(configured(**options))["label"] == label


def test_more_groups_than_features_are_told():
    with pytest.raises(ConfigError, match=r"loss.num_groups = 5 must be at most the 4 features"):
        group_softmax.check_options(configured(num_groups=5), 4)


def test_a_long_tail_of_two_classes_is_refused_before_the_training(folders):
    """It has no head, medium and tail to be told at the end."""
    data = dataclasses.replace(PRESET.data, classes=2, imbalance=0.5)
    sampling = dataclasses.replace(PRESET.sampling, batch_size=16)
    config = dataclasses.replace(PRESET, data=data, sampling=sampling)
    with pytest.raises(ConfigError, match="head, medium and tail need at least 3 classes"):
        check_run(config, folders)
