"""Protocol D: its losses, its data of several labels and of one, metrics, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from experiments.cli.main import main
from experiments.core.config import ModelConfig, SamplingConfig, set_options
from experiments.core.errors import ConfigError
from experiments.core.protocol import ImageSet, Outputs, Problem
from experiments.data.pipeline import load_split
from experiments.evaluation.classification import evaluate_scores
from experiments.papers import classification, multi_label
from experiments.papers.classification import ClassificationData
from experiments.papers.multi_label import (
    MultiLabel,
    MultiLabelConfig,
    MultiLabelData,
    MultiLabelLoss,
    TwoWay,
    TwoWayConfig,
)
from experiments.run import evaluate, load_run, plan_run, prepare_and_count, train_run
from experiments.training.step import build_outputs
from tests.jaxloss import references
from tests.tolerances import FLOAT32

TINY = MultiLabelConfig(
    data=MultiLabelData(name="voc2007@16"),
    sampling=SamplingConfig(batch_size=8),
    model=ModelConfig(widths=(4, 4, 4, 4)),
    steps=4,
    validate_every=2,
    log_every=1,
)
CLASSES = 6

SOFT_GAP: dict[str, Any] = {"positive_temperature": 2.0, "negative_temperature": 0.5, "margin": 0.7}
RAMP: dict[str, Any] = {"ramp": 0.2, "leak": 0.3, "binary_weight": 2.0}
FOCUS: dict[str, Any] = {"positive_focus": 1.0, "negative_focus": 2.0, "clip": 0.1}


@pytest.mark.parametrize(
    ("name", "reference", "options"),
    [
        ("two-way", references.two_way_loss, SOFT_GAP),
        ("sample-wise", references.sample_wise_loss, SOFT_GAP),
        ("class-wise", references.class_wise_loss, SOFT_GAP),
        ("bce", references.sigmoid_loss, {}),
        ("softmax", references.multilabel_softmax_loss, {}),
        ("asl", references.asymmetric_loss, FOCUS),
        ("warp", references.warp_loss, {}),
        ("rml", references.robust_multilabel_loss, RAMP),
    ],
)
def test_every_loss_is_that_of_the_reference(name, reference, options):
    """On targets of several labels, some unknown, and on one-hot targets of labels."""
    rng = np.random.default_rng(1)
    features, targets = rng.normal(size=(9, 5)), rng.integers(-1, 2, (9, CLASSES)).astype(np.int8)
    head = {"kernel": rng.normal(size=(5, CLASSES)), "bias": rng.normal(size=CLASSES)}
    logits, labels = features @ head["kernel"] + head["bias"], rng.integers(0, CLASSES, 9)
    # Options that a loss does not use change nothing.
    loss = MultiLabelLoss(name=name, **SOFT_GAP | FOCUS | RAMP, class_wise_over="device")
    for protocol, given, of in (
        (MultiLabel(MultiLabelConfig(loss=loss)), targets, targets),
        (TwoWay(TwoWayConfig(loss=loss)), labels, np.eye(CLASSES)[labels]),
    ):
        objective = protocol.objective(Problem(5, np.ones(CLASSES, int)))
        found = objective.loss(jnp.asarray(features), jnp.asarray(given), head, ())
        expected = reference(logits, of, **options)
        assert float(found.value) == pytest.approx(expected, rel=8 * FLOAT32)
        np.testing.assert_allclose(
            objective.logits(jnp.asarray(features), head, ()), logits, atol=16 * FLOAT32
        )
    right = np.mean(logits.argmax(1) == labels)
    assert float(found.means["train_accuracy"]) == pytest.approx(right)


@pytest.mark.parametrize("name", ["two-way", "class-wise", "sample-wise"])
@pytest.mark.parametrize("over", ["batch", "device"])
def test_the_class_wise_half_compares_the_batch_or_a_devices_share(name, over):
    """Value and gradient, where a step takes the mean of the gradients of all devices."""
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(4, 5, 3)).astype(np.float32)
    targets = rng.integers(0, 2, (4, 5, 3)).astype(np.int8)
    problem = Problem(3, np.ones(3, int), "devices")
    loss = multi_label.build_loss(MultiLabelLoss(name=name, class_wise_over=over), problem)
    value_and_gradient = jax.value_and_grad(lambda scale, x, t: loss(scale * x, t))
    found, gradient = jax.pmap(value_and_gradient, "devices", in_axes=(None, 0, 0))(
        1.0, logits, targets
    )

    def reference(scale):
        scaled = scale * np.float64(logits)
        whole = scaled.reshape(20, 3), targets.reshape(20, 3)
        shares = [whole] if over == "batch" else zip(scaled, targets, strict=True)
        classes = np.mean([references.class_wise_loss(*share) for share in shares])
        samples = references.sample_wise_loss(*whole)
        return {"two-way": classes + samples, "class-wise": classes, "sample-wise": samples}[name]

    np.testing.assert_allclose(found, np.full(4, reference(1.0)), rtol=4 * FLOAT32)
    slope = (reference(1 + 1e-4) - reference(1 - 1e-4)) / 2e-4
    assert float(gradient.mean()) == pytest.approx(slope, rel=4 * FLOAT32)


def test_the_asymmetric_loss_has_the_gradient_of_its_authors():
    """Of a negative whose q is 0.2189, unless the full gradient is chosen; tables say which."""
    found = {}
    for options in (MultiLabelLoss("asl"), MultiLabelLoss("asl", stop_focus_gradient=False)):
        loss = multi_label.build_loss(options, Problem(2, np.ones(2, int)))
        gradient = jax.jit(jax.grad(loss))(jnp.array([[0.5, -1.0]]), jnp.array([[1, 0]]))
        found[multi_label.label(options)] = gradient[0, 1].item()
    right = {"ASL": 0.00057841, "ASL, full gradient": 0.00261797}
    assert found == pytest.approx(right, rel=1e-5)


def contents(*parts: ImageSet) -> list[Any]:
    """The colours of images, of which each has its own, and labels, in an order of their own."""
    colours = np.concatenate([part.images[:].pixels[:, 8, 8] for part in parts])
    labels = np.concatenate([part.labels for part in parts])
    return sorted(zip(colours.tolist(), labels.tolist(), strict=True))


def test_splits_have_their_own_images(voc):
    counts = prepare_and_count(plan_run(TINY), voc)
    protocol = MultiLabel(TINY)
    for split, size in (("train", 20), ("validation", 8), ("test", 16)):
        images = protocol.load(voc, split)
        assert images.images.shape == (size, 16, 32, 3)
        assert images.labels.dtype == np.int8
        np.testing.assert_array_equal(counts[split], (images.labels == 1).sum(0))
    both = MultiLabel(set_options(TINY, {"data.train_on": "train+validation"}))
    assert both.parts(voc).keys() == {"train", "test"}
    parts = [protocol.load(voc, split) for split in ("train", "validation")]
    assert contents(both.load(voc, "train")) == contents(*parts)
    with pytest.raises(ConfigError, match=r"no validation images, only train, test; .*data\.hold"):
        both.load(voc, "validation")


def test_held_out_images_are_no_training_images(voc):
    """Neither the seed of the run nor the call changes which images are held out."""
    options = {"data.train_on": "train+validation", "data.holdout": 0.25}
    config = set_options(TINY, options)
    found = MultiLabel(config).parts(voc)
    parts = [found[split].load() for split in ("train", "validation")]
    assert [len(part.labels) for part in parts] == [found["train"].size, 7] == [21, 7]
    whole = contents(load_split("voc2007@16", "train+validation", **vars(voc)))
    assert contents(*parts) == whole
    assert len({str(colour) for colour, _ in whole}) == 28
    np.testing.assert_array_equal(found["validation"].counts(), (parts[1].labels == 1).sum(0))
    again = MultiLabel(dataclasses.replace(config, seed=1)).load(voc, "train")
    assert contents(again) == contents(parts[0])


@pytest.mark.long
def test_a_report_has_the_precision_of_the_scores(tmp_path, voc):
    train_run(plan_run(TINY), tmp_path, voc)
    run = load_run(tmp_path)
    report, protocol = evaluate(run, folders=voc), run.plan.protocol
    outputs_of = build_outputs(run.graphdef, run.objective, TINY.data, run.class_counts)
    outputs = {split: outputs_of(run.state, protocol.load(voc, split)) for split in protocol.splits}
    expected = {name: evaluate_scores(of.logits(), of.labels) for name, of in outputs.items()}
    means = {name: (of["map_class"], of["map_sample"]) for name, of in expected.items()}
    found = {metric["name"]: metric["value"] for metric in report["metrics"]}
    names = [metric.name for metric in protocol.metrics]
    assert found == pytest.approx(dict(zip(names, means["test"], strict=True)))
    assert protocol.validate(outputs["validation"]) == pytest.approx(np.mean(means["validation"]))
    assert "6 labels (14 more have no image)" in protocol.report(report)[0]


@pytest.mark.parametrize("imbalance", [1.0, 0.1])
def test_results_of_images_of_one_class_are_those_of_classification_and_of_multi_label_runs(
    imbalance,
):
    rng = np.random.default_rng(2)
    labels, scores = rng.integers(0, CLASSES, 40), rng.normal(size=(40, CLASSES))
    scores[np.arange(40), labels] += 1
    counts = np.array([2, 30, 9, 8, 20, 3])
    outputs = Outputs(np.zeros((40, 2)), labels, lambda: scores, counts)
    protocol = TwoWay(TwoWayConfig(data=ClassificationData(imbalance=imbalance)))
    results = protocol.evaluate("test", {"test": outputs}.__getitem__)
    found = {metric["name"]: metric["value"] for metric in results["metrics"]}
    assert list(found) == [metric.name for metric in protocol.metrics]
    targets, right = np.eye(CLASSES)[labels], scores.argmax(1) == labels
    assert found["accuracy"] == protocol.validate(outputs) == pytest.approx(np.mean(right))
    assert (results["train_samples"], results["classes"]) == (72, CLASSES)
    if imbalance < 1:  # Head, medium and tail are those of the training images.
        groups = {"class mean": range(6), "head": (1, 4), "medium": (2, 3), "tail": (0, 5)}
        for name, classes in groups.items():
            expected = np.mean([right[labels == c].mean() for c in classes])
            assert found[f"{name} accuracy"] == pytest.approx(expected)
    for name, average in (("mAP@class", "macro"), ("mAP@sample", "samples")):
        expected = average_precision_score(targets, scores, average=average)
        assert found[name] == pytest.approx(expected)


def test_the_classes_of_one_split_are_trained_on(folders):
    """The same images are for training, validation and test as among all classes: each for one."""
    novel, every = (
        TwoWay(TwoWayConfig(data=ClassificationData(class_split=classes, holdout=0.2)))
        for classes in ("novel", "all")
    )
    images = []
    for split in ("train", "validation", "test"):
        some, whole = (protocol.load(folders, split) for protocol in (novel, every))
        first = len(whole.class_names) - 50
        assert some.class_names == whole.class_names[first:]
        np.testing.assert_array_equal(some.labels, whole.labels[whole.labels >= first] - first)
        np.testing.assert_array_equal(some.images[:], whole.images[whole.labels >= first])
        images += [bytes(image) for image in some.images[:]]
    stored = load_split("icons", "novel", **vars(folders)).images[:]
    assert sorted(images) == sorted(bytes(image) for image in stored)
    few = ClassificationData(class_split="novel", classes=5, holdout=0.2)
    chosen = TwoWay(TwoWayConfig(data=few)).load(folders, "train").class_names
    assert len(set(chosen) & set(some.class_names)) == 5


def test_every_option_of_the_selection_changes_the_training_images(folders):
    data = ClassificationData(classes=9, samples_per_class=12, imbalance=0.1, holdout=0.1)

    def counts(**changes) -> list[int]:
        changed = dataclasses.replace(data, **changes)
        return classification.parts(changed, folders)["train"].counts().tolist()

    changes: dict[str, Any] = {"classes": 8, "samples_per_class": 5, "imbalance": 0.3}
    changes |= {"holdout": 0.4, "subset_seed": 3, "tail_from": "mean"}
    for option, value in changes.items():
        assert counts(**{option: value}) != counts(), option


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling.batch_size": 24}, "batch_size = 24 must be at most 20"),
        ({"sampling.strategy": "2x4"}, "sampling.strategy = 2x4 needs one class per image"),
        ({"data.holdout": 0.1}, "holdout = 0.1, but voc2007@16 has validation images of its"),
        ({"data.mixup": 1.0}, "data.mixup = 1.0 needs .* two-way compares samples with each"),
        ({"data.name": "coco", "data.train_on": "train+validation"}, "coco has no validation"),
        ({"loss.class_wise_over": "device"}, "class_wise_over = device needs --parallel pmap"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(options, message, voc, tmp_path):
    with pytest.raises(ConfigError, match=message):
        train_run(plan_run(set_options(TINY, options)), tmp_path / "run", voc, mode="jit")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("preset", "data", "message"),
    [
        ("icons", "voc2007@16", "choose the preset folder-labels"),
        ("icons-groups", "voc2007@16", "any number of labels per image, and one is needed"),
        ("kanji", "icons", "choose the preset folder"),
    ],
)
def test_data_of_another_kind_is_refused_in_a_sentence(preset, data, message, tmp_path, capsys):
    command = ["train", preset, "--data.name", data, "--directory", str(tmp_path / "run")]
    assert main([*command, "--data.mean", "0.5", "--data.std", "0.5"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
