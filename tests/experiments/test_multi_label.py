"""Protocol D: its losses, the images of every split, a run, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.cli.main import main
from experiments.core.config import ModelConfig, SamplingConfig, replace_option
from experiments.core.errors import ConfigError
from experiments.core.protocol import Metric, Outputs, Problem
from experiments.data.pipeline import load_labels, load_split
from experiments.evaluation.multilabel import evaluate_scores
from experiments.papers import multi_label
from experiments.papers.multi_label import MultiLabelConfig, MultiLabelData, MultiLabelLoss
from experiments.reporting.run import report_text
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
    rng = np.random.default_rng(1)
    features, targets = rng.normal(size=(9, 5)), rng.integers(-1, 2, (9, 6)).astype(np.int8)
    head = {"kernel": rng.normal(size=(5, 6)), "bias": rng.normal(size=6)}
    # Options that a loss does not use change nothing.
    loss = MultiLabelLoss(name=name, **SOFT_GAP | FOCUS | RAMP, class_wise_over="device")
    objective = multi_label.objective(loss, Problem(5, np.ones(6, int)))
    value, state, _ = objective.loss(jnp.asarray(features), jnp.asarray(targets), head, ())
    logits = features @ head["kernel"] + head["bias"]
    assert float(value) == pytest.approx(reference(logits, targets, **options), rel=8 * FLOAT32)
    assert state == ()
    np.testing.assert_allclose(
        objective.logits(jnp.asarray(features), head, ()),
        logits,
        rtol=16 * FLOAT32,
        atol=4 * FLOAT32,
    )


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


@pytest.mark.parametrize("name", ["bce", "asl"])
def test_the_head_starts_near_the_loss_of_few_labels(name):
    """With zeros for a bias, the negatives alone would make the first loss C log 2 = 48.5."""
    rng = np.random.default_rng(0)
    targets = (rng.random((64, 70)) < 3.2 / 70).astype(np.int8)
    objective = multi_label.objective(MultiLabelLoss(name=name), Problem(32, np.ones(70, int)))
    features, head = jnp.zeros((64, 32)), objective.init_head(jax.random.key(0))
    value = objective.loss(features, jnp.asarray(targets), head, ()).value
    assert float(value) < 0.32 * 70 * np.log(2)


def test_splits_have_their_own_images(voc):
    counts = prepare_and_count(plan_run(TINY), voc)
    protocol = multi_label.build(TINY)
    for split, size in (("train", 20), ("validation", 8), ("test", 16)):
        images = protocol.load(voc, split)
        assert images.images.shape == (size, 16, 32, 3)
        assert images.labels.dtype == np.int8
        np.testing.assert_array_equal(counts[split], (images.labels == 1).sum(0))
    data = dataclasses.replace(TINY.data, train_on="train+validation")
    both = multi_label.build(dataclasses.replace(TINY, data=data))
    assert both.parts(voc).keys() == {"train", "test"}
    joined = both.load(voc, "train")
    parts = [protocol.load(voc, split) for split in ("train", "validation")]
    for content in (lambda part: part.labels, lambda part: part.images[:].pixels):
        np.testing.assert_array_equal(content(joined), np.concatenate([*map(content, parts)]))
    # Targets are read without the images.
    targets, _ = load_labels("voc2007@16", "train+validation", **vars(voc))
    np.testing.assert_array_equal(targets, joined.labels)
    with pytest.raises(ConfigError, match=r"no images are held out for validation; set data\.hold"):
        both.load(voc, "validation")


def test_held_out_images_are_no_training_images(voc):
    data = dataclasses.replace(TINY.data, train_on="train+validation", holdout=0.25)
    whole = load_split("voc2007@16", "train+validation", **vars(voc))
    found = multi_label.parts(data, voc)
    parts = [found[split].load() for split in ("train", "validation")]
    assert [len(part.labels) for part in parts] == [21, 7]

    def contents(*parts):
        # Every image has a colour of its own.
        colours = np.concatenate([part.images[:].pixels[:, 8, 8] for part in parts])
        labels = np.concatenate([part.labels for part in parts])
        return sorted(zip(colours.tolist(), labels.tolist(), strict=True))

    assert contents(*parts) == contents(whole)
    assert len(np.unique(whole.images[:].pixels[:, 8, 8], axis=0)) == 28
    np.testing.assert_array_equal(found["validation"].counts(), (parts[1].labels == 1).sum(0))
    # Neither the seed of the run nor the call changes which images are held out.
    protocol = multi_label.build(MultiLabelConfig(data=data, sampling=TINY.sampling, seed=1))
    expected = {"label": "Two-way", "train_on": "train+validation", "holdout": 0.25}
    assert protocol.description == expected
    again = protocol.load(voc, "train")
    np.testing.assert_array_equal(again.images[:].pixels, parts[0].images[:].pixels)


def test_validation_is_the_mean_of_the_two():
    rng = np.random.default_rng(2)
    scores, targets = rng.normal(size=(30, 5)), (rng.random((30, 5)) < 0.3).astype(np.int8)
    result = evaluate_scores(scores, targets)
    assert abs(result.map_class - result.map_sample) > 0.05
    protocol = multi_label.build(TINY)
    value = protocol.validate(Outputs(np.zeros((30, 1)), targets, lambda: scores, np.ones(5)))
    assert protocol.validation_metric == Metric("mean of mAP@class and mAP@sample")
    assert value == pytest.approx((result.map_class + result.map_sample) / 2)


@pytest.mark.long
def test_a_report_has_the_precision_of_the_scores(tmp_path, voc):
    train_run(plan_run(TINY), tmp_path, voc)
    run = load_run(tmp_path)
    report, protocol = evaluate(run, folders=voc), run.plan.protocol
    images = protocol.load(voc, "test")
    outputs_of = build_outputs(run.graphdef, run.objective, TINY.data, run.class_counts)
    expected = evaluate_scores(outputs_of(run.state, images).logits(), images.labels)
    values = {"mAP@class": expected.map_class, "mAP@sample": expected.map_sample}
    found = {metric["name"]: metric["value"] for metric in report["metrics"]}
    assert found == pytest.approx(values)
    assert list(found) == [metric.name for metric in protocol.metrics]
    text = report_text(protocol, report)
    assert text.startswith(
        "- Loss: Two-way\n- Data: voc2007@16\n- Training batches: random, seed 0\n"
    )
    assert "6 labels (14 more have no image)" in text


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
    config = TINY
    for option, value in options.items():
        config = replace_option(config, option, value)
    with pytest.raises(ConfigError, match=message):
        train_run(plan_run(config), tmp_path / "run", voc, mode="jit")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("preset", "data", "message"),
    [
        ("icons", "voc2007@16", "choose a preset of several labels, such as folder-labels"),
        ("icons-groups", "voc2007@16", "any number of labels per image, and classification needs"),
        ("kanji", "icons", "choose the preset folder"),
    ],
)
def test_data_of_another_kind_is_refused_in_a_sentence(preset, data, message, tmp_path, capsys):
    command = ["train", preset, "--data.name", data, "--directory", str(tmp_path / "run")]
    assert main([*command, "--data.mean", "0.5", "--data.std", "0.5"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
