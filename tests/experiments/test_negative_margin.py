"""Protocol E from its loss to its report, on a run of a few steps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from experiments.evaluation.outputs import build_outputs
from experiments.evaluation.run import evaluate_run, restore_run
from experiments.reporting.report import run_report
from experiments.training.objective import Problem
from experiments.training.preflight import check_run

from experiments.__main__ import main
from experiments.config import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    SamplingConfig,
)
from experiments.data.pipeline import class_counts, load_split
from experiments.data.sampling import episodes_hash, evaluation_episodes
from experiments.errors import ConfigError
from experiments.evaluation.fine_tuning import FineTuning, evaluate_fine_tuning
from experiments.protocols import negative_margin
from experiments.protocols.negative_margin import MarginLossConfig, NegativeMarginConfig
from tests.experiments import fake_archives

EVALUATION = EvaluationConfig(ways=3, shots=(2,), queries=4, episodes=8, distance="cosine")
TINY = NegativeMarginConfig(
    data=DataConfig(holdout=0.35),
    sampling=SamplingConfig(batch_size=16),
    model=ModelConfig(widths=(4, 4, 4, 4)),
    loss=MarginLossConfig(name="cosine", margin=-0.1),
    optimizer=OptimizerConfig(kind="adam", learning_rate=3e-3, warmup_steps=1, warmup_from=1 / 16),
    evaluation=EVALUATION,
    fine_tuning=FineTuning(passes=3),
    steps=4,
    validate_every=2,
    validation_episodes=20,
    log_every=1,
)


def with_loss(**changes) -> NegativeMarginConfig:
    return dataclasses.replace(TINY, loss=dataclasses.replace(TINY.loss, **changes))


def cross_entropy(logits: np.ndarray, labels: np.ndarray, smoothing: float = 0.0) -> float:
    """Mean over the samples of −Σ t log softmax, sample by sample in float64."""
    values = []
    for row, label in zip(logits, labels, strict=True):
        target = np.full(len(row), smoothing / len(row))
        target[label] += 1 - smoothing
        values.append(-(target * (row - np.log(np.exp(row).sum()))).sum())
    return float(np.mean(values))


def test_scales_are_the_papers():
    products, resnet12 = MarginLossConfig(name="softmax"), ModelConfig(backbone="resnet12")
    for config, scale in (
        (NegativeMarginConfig(model=resnet12), 30),
        (NegativeMarginConfig(loss=products, model=resnet12), 10),
        (NegativeMarginConfig(loss=products), 5),
    ):
        assert negative_margin.describe(config)["scale"] == scale


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"name": "cosine", "margin": -0.1}, 30),
        ({"name": "softmax", "margin": -0.3}, 5),
        ({"name": "softmax", "margin": 0.2, "scale": 2.0}, 2),
        ({"name": "cosine", "margin": 0.0, "label_smoothing": 0.05}, 30),
    ],
)
def test_the_objective_is_the_papers(changes, scale):
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(7, 6)).astype(np.float32), np.array([0, 3, 1, 1, 2, 0, 3])
    config = with_loss(**changes)
    objective = negative_margin.objective(config, Problem(6, np.full(4, 10), None))
    head = objective.head(jax.random.key(0))
    assert head["kernel"].shape == (6, 4)
    found = objective.loss(jax.numpy.asarray(features), jax.numpy.asarray(labels), head, ())

    kernel, x = np.asarray(head["kernel"], np.float64), features.astype(np.float64)
    if config.loss.name == "cosine":
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        kernel = kernel / np.linalg.norm(kernel, axis=0)
    logits = x @ kernel
    shifted = logits.copy()
    shifted[np.arange(7), labels] -= config.loss.margin
    expected = cross_entropy(scale * shifted, labels, config.loss.label_smoothing)
    assert float(found.value) == pytest.approx(expected, rel=1e-5)
    assert float(found.means["train_accuracy"]) == pytest.approx(
        np.mean(logits.argmax(1) == labels)
    )
    scores = objective.scores(jax.numpy.asarray(features), head, ())
    np.testing.assert_allclose(scores, scale * logits, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, folders) -> Path:
    """A run directory, made by the command line."""
    directory = tmp_path_factory.mktemp("run")
    options = [
        *("--data.holdout", "0.35", "--sampling.batch-size", "16", "--steps", "4"),
        *("--model.widths", "4", "4", "4", "4", "--optimizer.warmup-steps", "1"),
        *("--evaluation.ways", "3", "--evaluation.shots", "2", "--evaluation.queries", "4"),
        *("--evaluation.episodes", "8", "--fine-tuning.passes", "3", "--validate-every", "2"),
        *("--validation-episodes", "20", "--log-every", "1", "--loss.margin", "-0.1"),
        *("--directory", str(directory), "--data-dir", str(folders.data_dir)),
    ]
    assert main(["train", "icons-margin", *options]) == 0
    return directory


def test_a_run_is_judged_on_all_classes(trained, folders):
    report = json.loads((trained / "report.json").read_text())
    kinds, splits = ("2-shot", "discriminability"), ("novel", "validation", "base")
    assert list(report["metrics"]) == [f"{split} {kind}" for kind in kinds for split in splits]
    assert [r["split"] for r in report["results"]] == ["novel", "validation", "base"]
    run = restore_run(trained)
    assert isinstance(run.config, NegativeMarginConfig)
    outputs = build_outputs(run.setup, run.config.data, run.counts)
    images = negative_margin.load(run.config, folders, "held-out")
    features = outputs(run.state, images).features
    expected = evaluate_fine_tuning(
        features, images.labels, config=EVALUATION, settings=FineTuning(passes=3)
    )
    assert [{"split": "base"} | result._asdict() for result in expected] == report["results"][2:]
    assert report["metrics"]["base 2-shot"] == expected[0].accuracy

    length = np.linalg.norm(features.astype(np.float64), axis=1, keepdims=True)
    unit = features / np.where(length > 0, length, 1)
    square = (unit**2).sum(1)
    apart = (square[:, None] + square) / 2 - unit @ unit.T
    same = images.labels[:, None] == images.labels
    intra = apart[same & ~np.eye(len(same), dtype=bool)].mean()
    inter = apart[~same].mean()
    assert report["discriminability"].keys() == {"novel", "validation", "base"}
    assert report["discriminability"]["base"] == pytest.approx(
        {"intra": intra, "inter": inter, "ratio": inter / intra}, rel=1e-3
    )
    assert report["metrics"]["base discriminability"] == report["discriminability"]["base"]["ratio"]


def test_the_report_names_its_episodes(trained, folders):
    report = json.loads((trained / "report.json").read_text())
    novel = load_split("icons", "novel", data_dir=folders.data_dir).labels
    episodes = evaluation_episodes(novel, num_episodes=8, ways=3, shots=2, queries=4, seed=0)
    assert report["results"][0]["hash"] == episodes_hash(episodes)
    text = (trained / "report.md").read_text()
    assert text.startswith(run_report(report))
    result = report["results"][0]
    row = f"| novel | 2 | {100 * result['accuracy']:.2f} | ± {100 * result['interval']:.2f} | 8 |"
    assert f"{row} {episodes_hash(episodes)} |" in text
    assert "3 passes of fine-tuning a cosine classifier" in text
    assert f"| base | {report['discriminability']['base']['intra']:.4f} |" in text
    assert text.rstrip().endswith("those held out of the training.")
    told = run_report(report | {"weights": "resnet18.safetensors"})
    assert told.endswith("\n\nThe backbone started from resnet18.safetensors.")


@pytest.mark.parametrize(
    ("loss", "given", "used"),
    [("cosine", "same", "cosine"), ("softmax", "same", "linear"), ("softmax", "cosine", "cosine")],
)
def test_episodes_take_the_classifier_of_the_training(loss, given, used):
    assert NegativeMarginConfig().fine_tuning.classifier == "same"
    config = dataclasses.replace(
        NegativeMarginConfig(),
        loss=MarginLossConfig(name=loss),
        fine_tuning=FineTuning(classifier=given),
    )
    assert negative_margin.describe(config)["fine_tuning"]["classifier"] == used


def test_evaluate_takes_other_episodes(trained, folders):
    report = evaluate_run(trained, folders, split="validation", overrides={"shots": (3, 2)})
    assert list(report["metrics"]) == [
        "validation 3-shot",
        "validation 2-shot",
        "validation discriminability",
    ]
    assert list(report["discriminability"]) == ["validation"]


def test_evaluate_refuses_a_distance_that_would_change_nothing(trained, folders, capsys):
    given = ["evaluate", str(trained), "--data-dir", str(folders.data_dir)]
    assert main([*given, "--distance", "euclidean"]) == 2
    message = "the evaluation of protocol negative-margin has no distance"
    assert message in capsys.readouterr().err
    assert not list(trained.glob("evaluation-*"))


def test_held_out_images_are_no_training_images(folders):
    whole = load_split("icons", "base", data_dir=folders.data_dir)
    base, held_out = (negative_margin.load(TINY, folders, s) for s in ("base", "held-out"))
    counts = negative_margin.counts(TINY, folders)
    for images, split in ((base, "base"), (held_out, "held-out")):
        np.testing.assert_array_equal(np.bincount(images.labels), counts[split])
    np.testing.assert_array_equal(counts["base"] + counts["held-out"], np.bincount(whole.labels))
    both = np.concatenate([base.images[:], held_out.images[:]])
    labels = np.concatenate([base.labels, held_out.labels])
    order = np.argsort(labels, kind="stable")
    assert labels[order].tolist() == whole.labels.tolist()
    by_content = [sorted(map(bytes, part)) for part in (both, whole.images[:])]
    assert by_content[0] == by_content[1]
    plain = dataclasses.replace(TINY, data=DataConfig())
    assert negative_margin.counts(plain, folders).keys() == {"base", "validation", "novel"}
    np.testing.assert_array_equal(negative_margin.load(plain, folders, "base").labels, whole.labels)


def test_novel_classes_of_another_set_leave_all_own_ones_to_the_training(folders, tmp_path):
    fake_archives.cifar_fs_folder(tmp_path)
    folders = dataclasses.replace(folders, manual_dir=tmp_path)
    config = dataclasses.replace(TINY, novel_data="cifar_fs", data=DataConfig())
    stored = class_counts("icons", data_dir=folders.data_dir)
    counts = negative_margin.counts(config, folders)
    every = np.concatenate([stored["base"], stored["validation"], stored["novel"]])
    np.testing.assert_array_equal(counts["base"], every)
    assert counts["novel"].tolist() == [2, 1]
    images = negative_margin.load(config, folders, "base")
    np.testing.assert_array_equal(np.bincount(images.labels), every)
    assert negative_margin.load(config, folders, "novel").labels.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": MarginLossConfig(margin=-0.1, label_smoothing=0.05)}, "set one of them to 0"),
        ({"loss": MarginLossConfig(scale=-1.0)}, "loss.scale must be at least 0, got -1"),
        ({"data": DataConfig(samples_per_class=5)}, "no data.samples_per_class"),
        (
            {"evaluation": EvaluationConfig(shots=(5,), queries=90)},
            "classes of icons cannot give the evaluation",
        ),
        (
            {"evaluation": EvaluationConfig(shots=(5,), queries=25)},
            "held-out classes of icons cannot give the evaluation",
        ),
        ({"evaluation": EvaluationConfig(shots=())}, "evaluation.shots needs"),
        ({"fine_tuning": FineTuning(batch_size=0)}, "fine_tuning.batch_size must be at least 1"),
        ({"novel_data": "cifar10"}, "cifar10 holds no classes out"),
        ({"novel_data": "icons"}, "novel_data = icons has images of data.name = icons"),
        (
            {"data": DataConfig(name="mini_imagenet"), "novel_data": "tiered_imagenet@84"},
            "novel_data = tiered_imagenet@84 has images of data.name = mini_imagenet",
        ),
    ],
)
def test_what_cannot_end_well_is_told(folders, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_run(dataclasses.replace(TINY, **changes), folders)


def test_sets_of_two_sizes_need_one(monkeypatch):
    shapes = {"icons": (32, 32, 1), "cub_fewshot": (84, 84, 3)}
    monkeypatch.setattr(negative_margin, "image_shape", shapes.__getitem__)
    counts = {split: np.full(30, 90) for split in ("base", "held-out", "validation", "novel")}
    config = dataclasses.replace(TINY, novel_data="cub_fewshot")
    with pytest.raises(ConfigError, match="are 32×32×1, those of novel_data = cub_fewshot 84×84×3"):
        negative_margin.check(config, 16, counts)
    shapes["cub_fewshot"] = (84, 84, 1)
    resized = dataclasses.replace(TINY.data, image_size=32)
    negative_margin.check(dataclasses.replace(config, data=resized), 16, counts)
