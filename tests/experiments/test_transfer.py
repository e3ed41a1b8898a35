"""Linear evaluation of a run's checkpoint on another data set, from the images to the files."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from experiments.cli.main import main
from experiments.core.config import replace_option
from experiments.core.errors import ConfigError
from experiments.core.protocol import ImageSet, Metric
from experiments.data.selection import select
from experiments.datasets import DATASETS
from experiments.datasets.base import Dataset
from experiments.datasets.layouts import Layout
from experiments.datasets.splits import split_of_rows
from experiments.evaluation.linear import Labelled, evaluate_linear
from experiments.papers.classification import ClassificationData
from experiments.papers.few_shot import FewShotConfig
from experiments.papers.integration import IntegratedLoss
from experiments.papers.presets import PRESETS
from experiments.reporting.run import code_version
from experiments.run import load_run, seen_in_training
from experiments.sweeps import linear as transfer
from experiments.sweeps.linear import evaluate_run_linear, linear_report
from experiments.training.step import build_features
from tests.experiments.test_grid_report import squeezed
from tests.experiments.tiny_runs import TINY

CONFIG = dataclasses.replace(TINY, loss=IntegratedLoss(name="sce"))
PENALTIES = (1e-2, 1.0, 100.0)
SHAPE = (40, 44, 1)
CLASSES = ("left", "middle", "right")


def drawings(split: str) -> ImageSet:
    """Bars at a place of their class, in noise: 3 classes of 20 grey images."""
    rng = np.random.default_rng(len(split))
    labels = np.repeat(np.arange(3, dtype=np.int32), 20)
    images = rng.integers(0, 240, (60, *SHAPE), np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, 4 + 12 * label : 12 + 12 * label] += 12
    return ImageSet(images, labels, CLASSES)


def _read(search_path):
    rows = {name: [*range(20 * k, 20 * k + 20)] for k, name in enumerate(CLASSES)}
    return {
        split: split_of_rows(rows, lambda split=split: drawings(split).images, Path(split))
        for split in DRAWINGS.classes
    }


DRAWINGS = Dataset("drawings", "bars", {"train": 3, "test": 3}, (Layout("", (), _read),), SHAPE)
"""A data set of other images than the run's."""


@pytest.fixture
def other(monkeypatch):
    monkeypatch.setitem(DATASETS, "drawings", DRAWINGS)
    few = partial(evaluate_linear, penalties=PENALTIES)
    monkeypatch.setattr(transfer, "evaluate_linear", few)


def test_the_command_writes_what_classifiers_on_the_features_give(
    few_shot_run, folders, other, tmp_path, capsys, monkeypatch
):
    # Of the data that is evaluated, not of those of the run.
    odd = dataclasses.replace(DRAWINGS, remarks=("drawn in haste",))
    monkeypatch.setitem(DATASETS, "drawings", odd)
    directory, link = few_shot_run, tmp_path / "run"
    link.symlink_to(directory)
    given = ["linear", str(link / "checkpoints"), "--data", "drawings", "--holdout", "0.25"]
    given += ["--checkpoint", "latest", "--data-dir", str(folders.data_dir)]
    assert main(given) == 0
    stem = "linear-drawings-step6-holdout0.25"
    report = json.loads((directory / f"{stem}.json").read_text())

    restored = load_run(directory, "latest")
    seen = dataclasses.replace(restored.plan.config.data, image_size=32)
    assert (seen.mean, seen.std) == ((0.6,), (0.4,))
    features_of = build_features(restored.graphdef, seen)
    own, test = (
        Labelled(features_of(restored.state, images.images), images.labels)
        for images in map(drawings, ("train", "test"))
    )
    labels = np.asarray(own.labels)
    rows = select(labels, holdout=0.25, test_labels=np.asarray(test.labels)).rows
    assert len(rows["validation"]) == 15
    chosen, held_out = (
        Labelled(np.asarray(own.features)[rows[s]], labels[rows[s]])
        for s in ("train", "validation")
    )
    expected = evaluate_linear(chosen, held_out, test, penalties=PENALTIES)
    assert report["result"].keys() == expected.keys()
    for name, value in expected.items():
        assert report["result"][name] == pytest.approx(value, rel=1e-3), name
    assert 0.4 < expected["accuracy"] < 1
    assert (report["stored_size"], report["image_size"]) == ([40, 44], [32, 32])
    assert (report["classes"], report["seen_in_training"]) == (3, "")
    assert report["command"].endswith("--data-dir " + str(folders.data_dir))
    assert report["run"]["label"] == "SCE"
    assert all(report[name] == report["run"][name] for name in ("version", "commit"))
    assert report["notes"] == ["Data: drawn in haste."]

    printed = capsys.readouterr().out
    assert "Images were resized from 40×44 to 32×32 pixels." in printed
    markdown = (directory / f"{stem}.md").read_text()
    picture = f"![accuracy against λ]({stem}.png)\n\n"
    assert markdown.replace(picture, "") in printed
    assert markdown.endswith(f"{picture}`{report['command']}`\n")
    assert (directory / f"{stem}.png").read_bytes()[:4] == b"\x89PNG"


def stub_evaluation(monkeypatch, config_of_run, evaluate, *, step) -> None:
    """Takes these configurations and reports of runs, and writes the JSON alone."""

    def write(folder: Path, report: dict[str, Any], name: str, *, command: str) -> list[Path]:
        file = folder / f"{name}.json"
        file.write_text(json.dumps(report | {"command": command}))
        return [file]

    def load_run(path, *_):
        return SimpleNamespace(directory=path, step=step, **vars(config_of_run(path)))

    monkeypatch.setattr(transfer, "config_of_run", config_of_run)
    monkeypatch.setattr(transfer, "load_run", load_run)
    monkeypatch.setattr(transfer, "evaluate_run_linear", evaluate)
    monkeypatch.setattr(transfer, "write_linear_report", write)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ((), "linear-cub@64"),
        (("--checkpoint", "best", "--holdout", "0.2"), "linear-cub@64"),
        (("--checkpoint", "latest"), "linear-cub@64-step7"),
        (("--checkpoint", "7", "--holdout", "0.125"), "linear-cub@64-step7-holdout0.125"),
        (("--split", "novel"), "linear-cub@64-novel"),
    ],
)
def test_a_report_is_named_by_what_is_not_the_default(monkeypatch, tmp_path, given, name):
    stub_evaluation(monkeypatch, lambda _: CONFIG, lambda *_: {}, step=7)
    assert main(["linear", str(tmp_path), "--data", "cub@64", *given]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.json"]


@pytest.mark.parametrize(
    ("preset", "trained_on", "data", "split", "seen"),
    [
        ("mini-imagenet", "mini_imagenet", "mini_imagenet@84", "all", True),
        ("mini-imagenet", "mini_imagenet@84", "imagenet@128", "all", True),
        ("cub-margin", "cub_fewshot", "cub@64", "all", True),
        ("cifar-fs", "cifar_fs", "cifar100", "all", True),
        # Images of one set that others contain are reported for every protocol.
        ("imagenet-groups", "imagenet", "tiered_imagenet", "all", True),
        ("caltech256-groups", "caltech256", "caltech101", "all", True),
        # Of one set, these protocols leave out what the evaluation does.
        ("imagenet-groups", "imagenet@128", "imagenet", "all", False),
        ("cub", "cub_fewshot", "cars", "all", False),
        # A split counts where its classes were trained on.
        ("icons", "icons", "icons", "base", True),
        ("mini-imagenet", "mini_imagenet", "mini_imagenet", "novel", False),
        ("mini-imagenet-cub", "mini_imagenet", "mini_imagenet", "novel", True),
        ("mini-imagenet-cub", "mini_imagenet", "cub_fewshot", "novel", False),
    ],
)
def test_sets_that_share_images_are_known(preset, trained_on, data, split, seen):
    config = replace_option(PRESETS[preset].config, "data.name", trained_on)
    assert bool(seen_in_training(config, data, split)) == seen


def test_what_the_initial_weights_have_seen_counts(few_shot_run, tmp_path):
    """A few-shot run has seen images of the icons that are test images of a classification."""

    def seen(weights, data="icons"):
        config = replace_option(PRESETS["icons-groups"].config, "model.weights", str(weights))
        return seen_in_training(config, data)

    for weights in (few_shot_run, few_shot_run / "checkpoints"):
        assert seen(weights) == "base classes of icons, which include test images"
    for weights in (tmp_path, tmp_path / "resnet.safetensors"):
        assert not seen(weights)
    assert not seen(few_shot_run, "cifar10")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "kanji"}, "any number of labels"),
        ({"name": "cifar10"}, "images of cifar10 have 3 channels, and the run was trained on"),
        ({"name": "icons", "holdout": 0.0}, "holdout must be above 0 and below 1, got 0.0"),
        ({"name": "drawings", "class_split": "novel"}, "drawings does not hold novel classes out"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(few_shot_run, folders, other, options, message):
    data = ClassificationData(**{"holdout": 0.2} | options)
    with pytest.raises(ConfigError, match=message):
        evaluate_run_linear(load_run(few_shot_run), folders, data)


ACCURACIES = {"sce": (0.5, 0.6), "bce": (0.7, 0.65)}
"""Of seeds 0 and 1."""


def test_several_runs_are_compared_pair_by_pair(tmp_path, monkeypatch, capsys):
    def config_of_run(path: Path) -> FewShotConfig:
        config = dataclasses.replace(CONFIG, seed=int(path.name))
        return replace_option(config, "loss.name", path.parent.name)

    def report(config, *_, **__) -> dict[str, Any]:
        evaluated.append(config)
        value = ACCURACIES[config.loss.name][config.seed]
        metrics = [Metric("accuracy").measured(value)]
        seen = {"seen_in_training": "icons", "version": "1", "commit": None}
        return seen | {"run": code_version(), "step": 1, "metrics": metrics}

    evaluated, table = [], tmp_path / "table"
    stub_evaluation(monkeypatch, config_of_run, report, step=1)
    paths = [tmp_path / name / seed for name in ACCURACIES for seed in ("0", "1")]
    for path in paths:
        path.mkdir(parents=True)

    def linear(*paths: Path, baseline: str = "SCE") -> int:
        options = ["--data", "icons", "--split", "novel", "--directory", str(table)]
        return main(["linear", *map(str, paths), *options, "--baseline", baseline])

    assert linear(*paths) == 0
    assert len(evaluated) == 4
    (difference,) = json.loads((table / "table.json").read_text())["differences"]
    assert (difference["place"], difference["n"]) == (["BCE"], 2)
    assert difference["values"] == pytest.approx([0.2, 0.05])
    assert (table / "differences.png").exists()
    printed = squeezed(capsys.readouterr().out)
    assert "### Linear evaluation on the novel classes of icons" in printed
    assert "Backbones were trained on icons: this is not a transfer." in printed
    assert "| SCE | 55.0 ± 7.1 |" in printed

    # A report of the same checkpoint is read; one of another checkpoint or version is replaced.
    for path, old, new in [(paths[2], '"step": 1', '"step": 2'), (paths[0], '"version"', '"was"')]:
        file = path / "linear-icons-novel.json"
        file.write_text(file.read_text().replace(old, new))
    assert linear(*paths) == 0
    assert [config.loss.name for config in evaluated[4:]] == ["sce", "bce"]

    assert linear(*paths, baseline="NCA") == 2
    assert "no run has the label 'NCA'; the runs have SCE, BCE" in capsys.readouterr().err
    assert linear(tmp_path / "again" / "sce" / "0", *paths) == 2
    assert "are both of SCE and seed 0; name one" in capsys.readouterr().err


REPORT = {
    "run": {"label": "SCE", "data": "icons", "sampling": "random", "seed": 0},
    "data": "drawings",
    "split": "all",
    "step": 7,
    "num_features": 64,
    "image_size": [32, 32],
    "stored_size": [32, 32],
    "classes": 3,
    "seen_in_training": "",
    "version": "0.9.0",
    "commit": None,
    "result": {
        "accuracy": 0.76123,
        "class_mean_accuracy": 0.7,
        "validation_accuracy": 0.75,
        "best_test_accuracy": 0.8,
        "best_test_penalty": 100.0,
        "penalty": 1.0,
        "penalties": [0.01, 1.0, 100.0],
        "train_samples": 30,
        "validation_samples": 10,
        "test_samples": 20,
        "unconverged": 0,
        "converged": True,
    },
}


def test_numbers_have_two_digits():
    lines = [" ".join(line.split()) for line in linear_report(REPORT).splitlines()]
    assert lines[0].endswith(
        "of the features of SCE trained on icons, random batches, seed 0, step 7, d = 64."
    )
    assert "| validation | 1 | 23.88 | 76.12 | 70.00 | 75.00 |" in lines
    assert "| test, as in the paper | 100 | 20.00 | 80.00 | – | – |" in lines
    assert any("chosen on the test images" in line for line in lines)
    assert not any(word in " ".join(lines) for word in ("resized", "transfer", "tolerance"))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"stored_size": [40, 44]}, "Images were resized from 40×44 to 32×32 pixels."),
        (
            {"seen_in_training": "icons"},
            "The backbone was trained on icons: this is not a transfer.",
        ),
        (
            {"result": REPORT["result"] | {"unconverged": 2, "converged": False}},
            "3 solves ended before they met the tolerance.",
        ),
        ({"notes": ["Another checkpoint was taken."]}, "- Another checkpoint was taken."),
    ],
)
def test_what_limits_the_result_is_stated(changed, sentence):
    assert sentence in linear_report(REPORT | changed).splitlines()
