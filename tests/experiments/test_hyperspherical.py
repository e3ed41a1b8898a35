"""Protocol C: losses and logits, reassignment, its objective state, its prototypes."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from sklearn.preprocessing import normalize

import jaxloss
from experiments.core.config import SamplingConfig, set_options
from experiments.core.errors import ConfigError
from experiments.core.protocol import Objective, Outputs, Problem
from experiments.data.augment import mix_batch
from experiments.evaluation.classification import evaluate_logits
from experiments.papers import hyperspherical
from experiments.papers.hyperspherical import (
    Hyperspherical,
    HypersphericalConfig,
    HypersphericalLoss,
    spread_prototypes,
)
from experiments.papers.presets import PRESETS
from experiments.run import complete_run, evaluate, load_run, plan_run, train_run
from tests.experiments.tiny_runs import final_state, metrics
from tests.jaxloss import references
from tests.tolerances import FLOAT32

COUNTS = np.array([23, 43, 3, 12, 2, 7])
"""The training images of 6 classes of the icons in a long tail of factor 0.05."""
DIM = 3
_LONG_TAIL = PRESETS["icons-longtail"].config
assert isinstance(_LONG_TAIL, HypersphericalConfig)
TINY = HypersphericalConfig(
    data=dataclasses.replace(_LONG_TAIL.data, classes=6),
    sampling=SamplingConfig(batch_size=16),
    model=dataclasses.replace(_LONG_TAIL.model, widths=(4, 4, 4, 4), dim=DIM),
    loss=HypersphericalLoss(criterion="dot-regression", lengths="batch", reduction="sum"),
    # The preset's rate is for the mean of a batch.
    optimizer=dataclasses.replace(_LONG_TAIL.optimizer, learning_rate=0.1),
    # 90 images: an epoch is 5 steps.
    steps=12,
    validate_every=4,
    log_every=1,
)


def build(seed: int = 0, num_epochs: int = 2, axis_name: str | None = None, **options) -> Objective:
    problem = Problem(DIM, COUNTS, axis_name=axis_name, num_epochs=num_epochs, seed=seed)
    config = HypersphericalConfig(loss=HypersphericalLoss(**options))
    return Hyperspherical(config).objective(problem)


def samples(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(12, DIM)).astype(np.float32)
    return features, rng.integers(0, len(COUNTS), 12).astype(np.int32)


def dot_regression(features, labels, prototypes, *, images):
    """Of features of length 1, as the long-tailed setting has them."""
    lengths = references.class_balanced_lengths(images, len(COUNTS))
    assert len(set(lengths[labels])) > 2
    return references.dot_regression_loss(normalize(features), labels, prototypes, lengths=lengths)


OF_ALL = partial(dot_regression, images=np.repeat(np.arange(len(COUNTS)), COUNTS))
OF_BATCH = partial(dot_regression, images=samples()[1])
COSINE = partial(references.classifier_loss, similarity="cosine", scale=7.0)


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"name": "dynamic"}, references.prototype_loss),
        (
            {"name": "static", "reduction": "sum"},
            partial(references.prototype_loss, reduction="sum"),
        ),
        ({"name": "static", "criterion": "dot-regression"}, OF_ALL),
        ({"name": "static", "criterion": "dot-regression", "lengths": "batch"}, OF_BATCH),
        ({"name": "fixed-ce", "logits": "cosine"}, COSINE),
        ({"name": "fixed-ce"}, references.classifier_loss),
        # Cross-entropy is a mean whatever the reduction of the distances.
        ({"name": "fixed-ce", "reduction": "sum"}, references.classifier_loss),
    ],
)
def test_losses_and_logits_are_those_of_the_paper(options, reference):
    objective = build(**options, scale=7.0)
    state = objective.init_state()
    features, labels = samples()
    prototypes = np.asarray(state["prototypes"])[:, np.asarray(state["assignment"])]
    loss = objective.loss(jnp.asarray(features), jnp.asarray(labels), {}, state)
    assert float(loss.value) == pytest.approx(
        reference(features, labels, prototypes), rel=4 * FLOAT32
    )
    is_linear = reference is references.classifier_loss
    logits = (features if is_linear else 7 * normalize(features)) @ prototypes
    found = objective.logits(jnp.asarray(features), {}, state)
    np.testing.assert_allclose(found, logits, atol=4 * FLOAT32)
    right = np.mean(logits.argmax(1) == labels)
    assert float(loss.means["train_accuracy"]) == pytest.approx(right)


@pytest.mark.parametrize("name", ["softmax", "cosine-softmax"])
def test_trained_classifiers_have_no_objective_state_and_cosines_no_scale(name):
    objective = build(name=name, scale=7.0, reduction="sum")
    head = objective.init_head(jax.random.key(0))
    features, labels = samples()
    assert (objective.init_state(), objective.after_epoch) == ((), None)
    kernel, x = np.asarray(head["kernel"]), jnp.asarray(features)
    if name == "softmax":
        logits = features @ kernel + np.asarray(head["bias"])
    else:
        logits = references.cosine_logits(features, kernel)
    np.testing.assert_allclose(objective.logits(x, head, ()), logits, atol=4 * FLOAT32)
    value = objective.loss(x, jnp.asarray(labels), head, ()).value
    assert float(value) == pytest.approx(references.softmax_loss(logits, labels), rel=4 * FLOAT32)


def test_over_devices_the_batch_is_one_and_a_mixed_batch_has_the_lengths_of_its_own_labels():
    """Both terms of mixup's loss have those lengths: second labels are a permutation."""
    objective, spread = (
        build(name="dynamic", criterion="dot-regression", lengths="batch", axis_name=name)
        for name in (None, "data")
    )
    state, (features, labels) = objective.init_state(), samples()
    share = 0.7

    def mixed_loss(x, y):
        partners = mix_batch(x, y, jax.random.key(0), 1.0, axis_name="data").other_labels
        own, other = (spread.loss(x, labels, {}, state) for labels in (y, partners))
        means = own.objective_state["class_means"]
        return share * own.value + (1 - share) * other.value, means

    prototypes = np.asarray(state["prototypes"])[:, np.asarray(state["assignment"])]
    own, other = (OF_BATCH(features, of_term, prototypes) for of_term in (labels, labels[::-1]))
    batch = features.reshape(4, 3, DIM), labels.reshape(4, 3)
    found, means = jax.pmap(mixed_loss, "data")(*batch)
    expected = np.full(4, share * own + (1 - share) * other)
    np.testing.assert_allclose(found, expected, rtol=4 * FLOAT32)
    single = objective.loss(jnp.asarray(features), jnp.asarray(labels), {}, state).objective_state
    np.testing.assert_allclose(means, np.stack([single["class_means"]] * 4), atol=FLOAT32)


def test_class_means_move_with_every_batch_and_the_assignment_after_an_epoch():
    objective = build(name="dynamic", decay=0.7)
    assert objective.after_epoch is not None
    state = start = objective.init_state()
    means = np.zeros((DIM, len(COUNTS)))
    for seed in range(3):
        features, labels = samples(seed)
        batch = jnp.asarray(features), jnp.asarray(labels)
        state = objective.loss(*batch, {}, state).objective_state
        means = references.class_means(means, features, labels, decay=0.7)
    np.testing.assert_allclose(state["class_means"], means, atol=4 * FLOAT32)
    np.testing.assert_array_equal(state["assignment"], start["assignment"])
    after, numbers = objective.after_epoch(state)
    cosines = means.T @ np.asarray(state["prototypes"])
    rows, columns = linear_sum_assignment(-cosines)
    np.testing.assert_array_equal(after["assignment"], columns)
    moved = np.sum(columns != np.asarray(start["assignment"]))
    assert moved > 0
    assert numbers["reassigned"] == moved
    assert float(numbers["alignment"]) == pytest.approx(
        cosines[rows, columns].mean(), rel=16 * FLOAT32
    )
    again, _ = objective.after_epoch(after)
    assert again["reassigned"].tolist() == [moved, 0]
    assert again["alignment"][1] == again["alignment"][0] == numbers["alignment"]


def test_the_first_assignment_depends_on_the_seed_alone_and_static_keeps_it():
    def first(seed: int, name) -> list[int]:
        return build(seed, name=name).init_state()["assignment"].tolist()

    assert sorted(first(0, "dynamic")) == [*range(len(COUNTS))]
    assert first(0, "dynamic") == first(0, "static") == first(0, "fixed-ce") != first(1, "static")
    static, (features, labels) = build(name="static"), map(jnp.asarray, samples())
    state = static.init_state()
    assert static.after_epoch is None
    assert static.loss(features, labels, {}, state).objective_state is state


@pytest.fixture(scope="module")
def whole(tmp_path_factory, folders) -> Path:
    """A run that nothing stopped: 2 epochs and 2 steps."""
    directory = tmp_path_factory.mktemp("run") / "whole"
    complete_run(plan_run(TINY), directory, folders, command="typed")
    return directory


@pytest.mark.long
def test_the_report_states_how_the_assignment_changed_and_a_resumed_run_remembers(
    whole, tmp_path, folders, killed_after
):
    logged = [row for row in metrics(whole) if "reassigned" in row]
    assert [row["step"] for row in logged] == [5, 10]
    report = evaluate(load_run(whole, "latest"), folders=folders)
    assert report["assignment"]["reassigned"] == [row["reassigned"] for row in logged]
    np.testing.assert_allclose(
        report["assignment"]["alignment"], [row["alignment"] for row in logged], rtol=FLOAT32
    )
    # It continues from step 8, and the second epoch ends once more.
    killed_after(11, lambda: train_run(plan_run(TINY), tmp_path, folders))
    train_run(plan_run(TINY), tmp_path, folders)
    chex.assert_trees_all_equal(final_state(tmp_path), final_state(whole))


@pytest.mark.parametrize("name", ["dynamic", "fixed-ce", "softmax", "cosine-softmax"])
def test_calibration_is_that_of_the_logits_or_of_the_cosines(name):
    """The error is computed from the cosines alone, without loss.scale."""
    objective = build(name=name, scale=9.0)
    state, head = objective.init_state(), objective.init_head(jax.random.key(3))
    features, labels = samples()
    logits = plain = np.asarray(objective.logits(jnp.asarray(features), head, state))
    outputs = Outputs(features, labels, lambda: logits, COUNTS, state)
    if name in ("dynamic", "fixed-ce"):
        assigned = np.asarray(state["prototypes"])[:, np.asarray(state["assignment"])]
        plain = normalize(features) @ assigned
        assert np.abs(plain - logits).max() > 0.1
    config = HypersphericalConfig(loss=HypersphericalLoss(name=name, scale=9.0))
    for calibration, expected in (("logits", logits), ("cosines", plain)):
        protocol = Hyperspherical(set_options(config, {"evaluation.calibration": calibration}))
        results: Any = protocol.evaluate("test", lambda split: outputs) | {"split": "test"}
        wanted = evaluate_logits(expected, labels)["calibration_error"]
        assert results["result"]["calibration_error"] == pytest.approx(wanted, rel=4 * FLOAT32)
        says_so = "cosines without a scale" in "\n".join(protocol.report(results))
        assert says_so == (calibration == "cosines" and name != "softmax")


def test_prototypes_need_two_dimensions():
    with pytest.raises(ConfigError, match=r"model.dim = 1 must be at least 2"):
        plan_run(set_options(TINY, {"model.dim": 1}))


def test_uniform_prototypes_are_those_of_the_first_process(monkeypatch):
    """What another host computes may differ in the last bits."""
    few_steps = partial(jaxloss.uniform_prototypes, num_steps=20)
    monkeypatch.setattr(hyperspherical.jaxloss, "uniform_prototypes", few_steps)
    first = np.full((3, 7), 0.5, np.float32)
    monkeypatch.setattr(hyperspherical, "from_first", lambda own: first + 0 * own)
    np.testing.assert_array_equal(spread_prototypes.__wrapped__(7, 3), first)
