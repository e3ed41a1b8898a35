"""Protocol D on images of one class: its losses, its metrics, and a run."""

import dataclasses
from typing import Any
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest
from experiments.papers.two_way import TwoWayConfig
from sklearn.metrics import average_precision_score

from experiments.core.errors import ConfigError
from experiments.core.protocol import ImageSet, Outputs, Problem
from experiments.data.pipeline import load_split
from experiments.papers import classification, two_way
from experiments.papers.classification import ClassificationData
from experiments.papers.multi_label import MultiLabelLoss
from experiments.run import plan_run
from tests.jaxloss import references
from tests.tolerances import FLOAT32

CLASSES = 6


def test_targets_are_one_hot():
    rng = np.random.default_rng(1)
    features, labels = rng.normal(size=(9, 5)), rng.integers(0, CLASSES, 9)
    head = {"kernel": rng.normal(size=(5, CLASSES)), "bias": rng.normal(size=CLASSES)}
    logits, targets = features @ head["kernel"] + head["bias"], np.eye(CLASSES)[labels]
    for loss, expected in (
        (MultiLabelLoss(name="two-way"), references.two_way_loss(logits, targets)),
        (MultiLabelLoss(name="softmax"), references.softmax_loss(logits, labels)),
    ):
        objective = two_way.objective(loss, Problem(5, np.ones(CLASSES, int)))
        value, _, means = objective.loss(jnp.asarray(features), jnp.asarray(labels), head, ())
        assert float(value) == pytest.approx(expected, rel=8 * FLOAT32)
        assert float(means["train_accuracy"]) == pytest.approx(np.mean(logits.argmax(1) == labels))


@pytest.mark.parametrize("imbalance", [1.0, 0.1])
def test_the_results_are_those_of_classification_and_of_multi_label_runs(imbalance):
    rng = np.random.default_rng(2)
    labels, scores = rng.integers(0, CLASSES, 40), rng.normal(size=(40, CLASSES))
    scores[np.arange(40), labels] += 1
    counts = np.array([2, 30, 9, 8, 20, 3])
    outputs = Outputs(np.zeros((40, 2)), labels, lambda: scores, counts)
    protocol = two_way.build(TwoWayConfig(data=ClassificationData(imbalance=imbalance)))
    results = protocol.evaluate("test", lambda split: {"test": outputs}[split])
    found = {metric["name"]: metric["value"] for metric in results["metrics"]}
    assert list(found) == [metric.name for metric in protocol.metrics]
    targets = np.eye(CLASSES)[labels]
    right = scores.argmax(1) == labels
    assert found["accuracy"] == pytest.approx(np.mean(right))
    assert (results["train_samples"], results["classes"]) == (72, CLASSES)
    if imbalance < 1:  # Head, medium and tail are those of the training images.
        groups = {"class mean": range(6), "head": (1, 4), "medium": (2, 3), "tail": (0, 5)}
        for name, classes in groups.items():
            expected = np.mean([right[labels == c].mean() for c in classes])
            assert found[f"{name} accuracy"] == pytest.approx(expected)
    for name, average in (("mAP@class", "macro"), ("mAP@sample", "samples")):
        expected = average_precision_score(targets, scores, average=average)
        assert found[name] == pytest.approx(expected)
    text = "\n".join(protocol.report(results | {"split": "test"}))
    assert f"{100 * found['mAP@class']:.2f}" in text
    assert protocol.validate(outputs) == pytest.approx(found["accuracy"])


def test_every_option_of_the_selection_is_taken(folders, monkeypatch):
    monkeypatch.setattr(classification, "select", chosen := Mock(wraps=classification.select))
    data: dict[str, Any] = {
        "classes": 7,
        "samples_per_class": 9,
        "subset_seed": 3,
        "imbalance": 0.5,
    }
    data |= {"tail_from": "mean", "holdout": 0.2}
    classification.parts(ClassificationData(**data), folders)
    assert data.items() <= chosen.call_args.kwargs.items()


def images_of(*parts: ImageSet) -> list[tuple[bytes, int]]:
    """With their labels, in an order of their own."""
    pairs = (zip(part.images[:], part.labels.tolist(), strict=True) for part in parts)
    return sorted((image.tobytes(), label) for pair in pairs for image, label in pair)


def test_the_classes_of_one_split_are_trained_on(folders):
    """The same images are for training, validation and test as among all classes: each for one."""
    novel, every = (
        two_way.build(TwoWayConfig(data=ClassificationData(class_split=classes, holdout=0.2)))
        for classes in ("novel", "all")
    )
    for split in ("train", "validation", "test"):
        some, whole = (protocol.load(folders, split) for protocol in (novel, every))
        first = len(whole.class_names) - 50
        assert some.class_names == whole.class_names[first:]
        np.testing.assert_array_equal(some.labels, whole.labels[whole.labels >= first] - first)
        np.testing.assert_array_equal(some.images[:], whole.images[whole.labels >= first])
    stored = load_split("icons", "novel", **vars(folders))
    parts = [novel.load(folders, split) for split in novel.splits]
    assert images_of(*parts) == images_of(stored)
    assert novel.description["class_split"] == "novel"
    assert [len(counts) for counts in novel.counts_by_split(folders).values()] == [50] * 3
    few = ClassificationData(class_split="novel", classes=5, holdout=0.2)
    chosen = two_way.build(TwoWayConfig(data=few)).load(folders, "train").class_names
    assert len(chosen) == 5
    assert set(chosen) < set(some.class_names)


def test_mixed_images_do_not_fit():
    mixed = TwoWayConfig(data=ClassificationData(mixup=1.0))
    with pytest.raises(ConfigError, match="two-way compares samples"):
        plan_run(mixed)
    plan_run(dataclasses.replace(mixed, loss=MultiLabelLoss(name="bce")))
