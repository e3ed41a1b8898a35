"""Protocol A: its losses by name, their labels, and how its runs are checked and evaluated."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

import jaxloss
from experiments.core.config import SamplingConfig
from experiments.core.errors import ConfigError
from experiments.core.protocol import Objective, Outputs, Problem
from experiments.evaluation.feature_space import classifier_subspace, split_by_span
from experiments.evaluation.few_shot import Distance, evaluate_prototypes
from experiments.papers import integration
from experiments.papers.few_shot import FewShot, FewShotConfig, IntegrationEvaluation
from experiments.papers.few_shot_data import FewShotData
from experiments.papers.integration import NAMES, IntegratedLoss, build_loss
from experiments.run import plan_run
from experiments.training.parallel import device_mesh
from tests.jaxloss import references
from tests.tolerances import FLOAT32

DIM, CLASSES = 7, 4
CLASSIFICATION = {"sce": references.softmax_loss, "bce": references.sigmoid_loss}
OPTIONS: dict[str, Any] = {"metric_weight": 0.7, "temperature": 0.3, "epsilon": 1e-2, "power": 0.6}
PROJECTIONS = {
    "": lambda features, kernel: features,
    "direct": partial(references.project_complement, epsilon=1e-2),
    "spectral": partial(references.project_spectral_complement, power=0.6),
}
UNIT: dict[str, Any] = {"similarity": "inner"}
PROBLEM = Problem(DIM, np.full(CLASSES, 9))


def by_reference(name: str, features, labels, kernel, bias) -> float:
    """The loss in float64, with the temperature in units of d."""
    of_distances: dict[str, Any] = {"temperature": 0.3 * DIM}
    metrics = {
        "nca": partial(references.nca_loss, **of_distances),
        "proto": partial(references.prototypical_loss, **of_distances, num_classes=CLASSES),
        "supcon": partial(references.supervised_contrastive_loss, temperature=0.05, **UNIT),
        "multi-similarity": partial(
            references.multi_similarity_loss, positive_scale=4.0, negative_scale=100.0, **UNIT
        ),
        "circle": partial(references.circle_loss, margin=0.4, scale=160.0, **UNIT),
        "proxy-anchor": partial(references.proxy_anchor_loss, proxies=kernel, scale=64.0),
        "proxy-nca": partial(references.proxy_nca_loss, proxies=kernel, temperature=1 / 18),
        **{
            f"triplet-{mining}": partial(
                references.triplet_loss, margin=0.1, mining=mining, normalize=False
            )
            for mining in ("hard", "semihard", "all")
        },
    }
    operator, _, parts = name.rpartition(":")
    value = 0.0
    for part in parts.split("+"):
        if part in CLASSIFICATION:
            logits = references.linear_logits(features, kernel, bias)
            value += CLASSIFICATION[part](logits, labels)
            continue
        # Metric losses of unit vectors get those of the features, also before a projection.
        of_units = not part.endswith(("nca", "proto", "anchor"))
        lengths = np.linalg.norm(features, axis=1, keepdims=True) if of_units else 1
        compared = PROJECTIONS[operator](features / lengths, kernel)
        value += (0.7 if "+" in parts else 1) * metrics[part](compared, labels)
    return value


TESTED = [
    *(name for name in NAMES if "+" not in name),
    *("sce+nca", "bce+proto", "direct:sce+proto", "direct:bce+nca", "spectral:sce+nca"),
    *("spectral:bce+proto", "direct:sce+supcon", "spectral:sce+triplet-hard"),
]
"""Every single loss, and each of the paper's in a sum of each kind."""


@pytest.mark.parametrize("name", TESTED)
def test_every_name_is_the_loss_that_it_says(name):
    rng = np.random.default_rng(3)
    features = rng.normal(size=(11, DIM))
    labels = np.array([0, 1, 1, 2, 0, 3, 3, 3, 2, 1, 0])
    kernel, bias = rng.normal(size=(DIM, CLASSES)), rng.normal(size=CLASSES)
    # With twice the sharpness, nca and proto have half the temperature.
    options: dict[str, Any] = OPTIONS | {"temperature": 0.6, "sharpness": 2.0}
    loss = jax.jit(build_loss(IntegratedLoss(name, **options), PROBLEM))
    found = loss(jnp.float32(features), jnp.asarray(labels), kernel, bias)
    assert float(found) == pytest.approx(
        by_reference(name, features, labels, kernel, bias), rel=16 * FLOAT32
    )


def test_labels_tell_the_losses_apart():
    expected = {"sce": "SCE", "bce+proto": "BCE+Proto", "direct:sce+nca": "SCE⊕NCA"}
    assert {name: integration.label(name) for name in expected} == expected
    assert len({integration.label(name) for name in NAMES}) == len(NAMES) == 42


@pytest.mark.parametrize("name", ["direct:sce+nca", "spectral:bce+proto"])
def test_with_stop_gradient_the_classifier_learns_from_the_classification_loss_alone(name):
    rng = np.random.default_rng(8)
    features = jnp.float32(rng.normal(size=(8, DIM)))
    labels = jnp.asarray([0, 1, 1, 2, 0, 3, 3, 2])
    kernel, bias = jnp.float32(rng.normal(size=(DIM, CLASSES))), jnp.zeros(CLASSES)

    def gradient(name, **options):
        loss = build_loss(IntegratedLoss(name, temperature=0.3, **options), PROBLEM)
        return jax.jit(jax.grad(lambda kernel: loss(features, labels, kernel, bias)))(kernel)

    alone = gradient(name.partition(":")[2].partition("+")[0])
    np.testing.assert_allclose(gradient(name, stop_gradient=True), alone, atol=FLOAT32)
    assert np.max(np.abs(gradient(name) - alone)) > 1e-3


def test_mixed_images_and_queues_need_a_loss_that_can_have_them():
    data = FewShotData(mixup=0.5)
    plan_run(FewShotConfig(data=data, loss=IntegratedLoss("sce")))
    plan_run(FewShotConfig(loss=IntegratedLoss("sce+circle", queue=8)))
    for name in ("nca", "sce+proto", "spectral:bce+nca"):
        with pytest.raises(ConfigError, match=r"mixup = 0\.5 needs a loss of single samples"):
            plan_run(FewShotConfig(data=data, loss=IntegratedLoss(name)))
    for name in ("sce", "proxy-anchor"):
        with pytest.raises(ConfigError, match=rf"queue = 8 needs a metric loss .* {name} has non"):
            plan_run(FewShotConfig(loss=IntegratedLoss(name, queue=8)))


EVALUATION = IntegrationEvaluation(ways=3, shots=(2, 6), queries=4, episodes=9, span=True)


def build(loss: Any = "direct:sce+nca", strategy: str = "random", **changes) -> FewShot:
    evaluation = dataclasses.replace(EVALUATION, **changes)
    sampling = SamplingConfig(batch_size=40, strategy=strategy)
    return FewShot(
        FewShotConfig(loss=IntegratedLoss(loss), evaluation=evaluation, sampling=sampling)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # 1-shot validations take 5 images, 6-shot evaluations 10.
        ({"validation": np.full(3, 4)}, "the validation classes of icons do not give the eval"),
        ({"novel": np.array([9, 10, 10])}, "the novel classes of icons do not give the eval"),
        ({"novel": np.full(2, 50)}, "needs 3 classes with at least 6 samples"),
        ({"base": np.full(21, 1)}, "direct:sce.nca leaves .* no subspace: the classifier of 21 cl"),
    ],
)
def test_classes_must_give_the_episodes_and_features_a_subspace(changes, message):
    counts = {"base": np.full(20, 1), "validation": np.full(3, 5), "novel": np.full(3, 10)}
    check_data = build().check_data
    check_data(21, counts)
    check_data(21, {split: counts[split] for split in ("base", "novel")})
    with pytest.raises(ConfigError, match=message):
        check_data(21, counts | changes)
    build("spectral:sce+nca").check_data(20, counts)


def outputs(head=None, classes=6) -> Outputs:
    rng = np.random.default_rng(0)
    labels = np.arange(90) * 7 % 6
    features = rng.normal(size=(6, 5))[labels] + rng.normal(size=(90, 5))
    logits, counts = np.zeros((90, 6)), np.ones(6, int)
    return Outputs(features.astype(np.float32), labels % classes, lambda: logits, counts, (), head)


HEAD = {
    "kernel": np.random.default_rng(4).normal(size=(5, 3)).astype(np.float32),
    "bias": np.zeros(3, np.float32),
}


@pytest.mark.parametrize(("strategy", "batch_size"), [("random", 40), ("3x4", 12)])
def test_the_evaluation_has_a_metric_and_a_row_for_each_distance_and_number_of_shots(
    strategy, batch_size
):
    """And measures the span of the classifier, with gradients in batches of training images."""
    protocol, training = build(strategy=strategy), outputs(HEAD, classes=3)
    results = protocol.evaluate("novel", {"novel": outputs(HEAD), "base": training}.__getitem__)
    (features, labels), kernel = outputs()[:2], HEAD["kernel"].astype(np.float64)
    suffixes: dict[Distance, str] = {"euclidean": "", "cosine": " (cosine)"}
    expected = {
        f"{result.shots}-shot accuracy{suffix}": (result, accuracies.tolist())
        for distance, suffix in suffixes.items()
        for result, accuracies in evaluate_prototypes(
            features, labels, config=EVALUATION, distance=distance
        )
    }
    assert results["results"] == [result._asdict() for result, _ in expected.values()]
    assert results["episodes"] == {name: found for name, (_, found) in expected.items()}
    values: dict[str, Any] = {name: result.accuracy for name, (result, _) in expected.items()}
    retrieval = jaxloss.retrieval_metrics(jnp.asarray(features), jnp.asarray(labels), ks=(1,))
    values |= {"recall@1": float(retrieval.recall[0]), "MAP@R": float(retrieval.map_at_r)}
    inside = features @ kernel @ np.linalg.pinv(kernel)
    for part, rows in (("inside", inside), ("outside", features - inside)):
        for result, _ in evaluate_prototypes(rows, labels, config=EVALUATION, distance="euclidean"):
            values[f"{result.shots}-shot accuracy {part} the span"] = result.accuracy
    subspace = classifier_subspace(features, labels, kernel)
    cosine = integration.gradient_cosine(IntegratedLoss("direct:sce+nca"), training, batch_size)
    values |= {
        "variance inside the span": subspace.variance_share,
        "effective rank of the classifier": subspace.effective_rank,
        "cosine of the gradients inside the span": cosine,
    }
    found = {metric["name"]: metric["value"] for metric in results["metrics"]}
    assert found == pytest.approx(values, abs=1e-6)
    assert list(found) == list(values) == [metric.name for metric in protocol.metrics]
    intervals = [metric["interval"] for metric in results["metrics"][:4]]
    assert intervals == [result.interval for result, _ in expected.values()]
    assert json.loads(json.dumps(results)) == results
    assert results["subspace"] == subspace._asdict()
    # A validation logs the same of the classifier.
    assert protocol.diagnose(outputs(HEAD)) == {
        "classifier_rank": subspace.effective_rank,
        "variance_in_span": subspace.variance_share,
        "class_variance_in_span": subspace.class_variance_share,
    }
    text = "\n".join(protocol.report(results))
    assert all(result.hash in text for result, _ in expected.values())
    recall, precision = values["recall@1"], values["MAP@R"]
    assert f"(cosine): recall@1 {100 * recall:.2f} %, MAP@R {100 * precision:.2f} %." in text


def test_without_a_classification_loss_there_is_no_span():
    """Its classifier does not learn. Equal distances are evaluated once."""
    protocol = build("nca", distances=("cosine", "cosine"))
    results = protocol.evaluate("novel", lambda split: outputs(HEAD))
    assert results["metrics"][2]["name"] == "recall@1"
    assert [metric["value"] for metric in results["metrics"][4:]] == [None] * 7
    assert results["subspace"] is None
    assert protocol.diagnose(outputs()) == {}


def test_the_cosine_of_the_gradients_is_that_of_finite_differences():
    rng = np.random.default_rng(9)
    features, labels = rng.normal(size=(6, DIM)), np.array([0, 1, 1, 2, 0, 2])
    kernel, bias = (rng.normal(size=of).astype(np.float32) for of in ((DIM, CLASSES), CLASSES))
    counts, head = np.ones(CLASSES, int), {"kernel": kernel, "bias": bias}
    of_training = Outputs(features.astype(np.float32), labels, lambda: features, counts, head=head)
    found = integration.gradient_cosine(IntegratedLoss("direct:sce+nca", **OPTIONS), of_training, 6)

    def slope(name):
        gradient: Any = scipy.optimize.approx_fprime(
            features.ravel(),
            lambda x: by_reference(name, x.reshape(features.shape), labels, kernel, bias),
        )
        return split_by_span(gradient.reshape(features.shape), kernel)[0].ravel()

    first, second = slope("sce"), slope("nca")
    expected = first @ second / np.linalg.norm(first) / np.linalg.norm(second)
    assert abs(expected) > 0.05
    assert found == pytest.approx(expected, abs=1e-3)
    assert integration.gradient_cosine(IntegratedLoss("sce"), of_training, 6) is None


QUEUED = IntegratedLoss("direct:sce+multi-similarity", queue=12, metric_weight=0.5)


def objective(options: IntegratedLoss = QUEUED, **where) -> Objective:
    problem = Problem(9, np.full(4, 9), **where)
    return FewShot(FewShotConfig(loss=options)).objective(problem)


def batches():
    rng = np.random.default_rng(5)
    for labels in ([0, 1, 1, 2, 0, 3, 3, 2], [2, 2, 1, 0, 3, 1, 0, 3]):
        yield jnp.float32(rng.normal(size=(8, 9))), jnp.asarray(labels)


def test_the_metric_loss_compares_with_the_batch_and_with_earlier_ones():
    first, (x, labels) = batches()
    with_queue, alone = objective(), objective(dataclasses.replace(QUEUED, queue=0))
    head = with_queue.init_head(jax.random.key(0))
    value, state, _ = with_queue.loss(*first, head, with_queue.init_state())
    assert float(value) == pytest.approx(float(alone.loss(*first, head, ()).value), rel=FLOAT32)
    assert sorted(state.labels.tolist()) == [-1] * 4 + [0, 0, 1, 1, 2, 2, 3, 3]
    earlier, now = (
        jaxloss.project_complement(rows / jnp.linalg.norm(rows, axis=1)[:, None], head["kernel"])
        for rows in (first[0], x)
    )
    of_queue = jaxloss.multi_similarity_loss(
        now, labels, similarity="inner", references=earlier, reference_labels=first[1]
    )
    expected = alone.loss(x, labels, head, ()).value + 0.5 * of_queue
    value, state, _ = with_queue.loss(x, labels, head, state)
    assert float(value) == pytest.approx(float(expected), rel=4 * FLOAT32)
    assert (state.labels >= 0).all()


def test_devices_share_the_references_and_keep_the_same_queue():
    single, several = objective(), objective(axis_name="batch")
    head, state = single.init_head(jax.random.key(0)), single.init_state()
    on_mesh = jax.jit(objective(mesh=device_mesh(jax.devices()[:4])).loss)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state)
    step = jax.pmap(several.loss, axis_name="batch", in_axes=(0, 0, None, 0))
    for x, labels in batches():
        expected = single.loss(x, labels, head, state)
        found = step(x.reshape(4, 2, 9), labels.reshape(4, 2), head, states)
        np.testing.assert_allclose(found.value, np.full(4, expected.value), rtol=4 * FLOAT32)
        of_mesh = on_mesh(x, labels, head, state)
        np.testing.assert_allclose(of_mesh.value, expected.value, rtol=4 * FLOAT32)
        chex.assert_trees_all_close(of_mesh.objective_state, expected.objective_state, atol=FLOAT32)
        state, states = expected.objective_state, found.objective_state
        copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state)
        chex.assert_trees_all_close(states, copies, atol=FLOAT32)
