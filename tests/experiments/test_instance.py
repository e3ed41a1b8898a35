"""Instance discrimination: every training image is a class, and novel classes evaluate it."""

from __future__ import annotations

import jax
import numpy as np

import jaxloss
from experiments.contracts import Outputs, Problem
from experiments.data.pipeline import load_split, stored_counts
from experiments.protocols import few_shot, instance
from experiments.protocols.few_shot import FewShotEvaluation
from experiments.protocols.instance import InstanceConfig, InstanceLoss
from tests.tolerances import FLOAT32


def test_every_base_image_is_a_class_and_the_others_keep_theirs(folders):
    protocol = instance.build(InstanceConfig())
    base, novel = (protocol.load(folders, split) for split in ("base", "novel"))
    stored = load_split("icons", "base", **vars(folders))
    np.testing.assert_array_equal(base.images, stored.images)
    np.testing.assert_array_equal(base.labels, np.arange(4650))
    assert base.labels.dtype == np.int32
    assert len(set(base.class_names)) == 4650
    assert base.class_names[7] == f"{stored.class_names[stored.labels[7]]} 7"
    assert len(novel.class_names) == 50
    counts = protocol.counts_by_split(folders)
    np.testing.assert_array_equal(counts["base"], np.ones(4650))
    expected = stored_counts("icons", data_dir=folders.data_dir)["novel"]
    np.testing.assert_array_equal(counts["novel"], expected)


def test_the_requested_split_is_evaluated():
    rng = np.random.default_rng(0)
    labels, features = np.arange(40) % 4, rng.normal(size=(40, 3)).astype(np.float32)
    outputs = Outputs(features, labels, lambda: features, np.ones(4, int))
    evaluation = FewShotEvaluation(ways=3, shots=(2,), queries=4, episodes=6)
    protocol = instance.build(InstanceConfig(evaluation=evaluation))
    found = protocol.evaluate("novel", {"novel": outputs}.__getitem__)
    assert found == few_shot.evaluate_distances(evaluation, outputs)
    assert [m["name"] for m in found["metrics"]] == [m.name for m in protocol.metrics]


def test_the_loss_is_that_of_cosines_with_a_margin():
    problem = Problem(num_features=5, class_counts=np.ones(7, np.int64))
    options = InstanceLoss(margin=0.3, scale=9.0)
    objective = instance.objective(options, problem)
    head = objective.init_head(jax.random.key(0))
    features = jax.random.normal(jax.random.key(1), (4, 5))
    labels = jax.numpy.array([6, 0, 3, 3], np.int32)
    loss = objective.loss(features, labels, head, ())
    cosines = jaxloss.cosine_logits(features, head["kernel"])
    expected = jaxloss.margin_softmax_loss(cosines, labels, margin=0.3, scale=9.0, reduction="none")
    np.testing.assert_allclose(loss.value, np.mean(expected), rtol=4 * FLOAT32)
    probability = np.mean(np.exp(-np.asarray(expected)))
    np.testing.assert_allclose(loss.means["target_probability"], probability, rtol=4 * FLOAT32)
    np.testing.assert_allclose(objective.logits(features, head, ()), 9 * cosines, rtol=FLOAT32)
