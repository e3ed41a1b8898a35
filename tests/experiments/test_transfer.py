"""Linear evaluation of a run's checkpoint on another data set, from the images to the files."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from experiments.cli.main import main
from experiments.core.config import replace_option
from experiments.core.errors import ConfigError
from experiments.core.protocol import ImageSet
from experiments.data.selection import select
from experiments.datasets import DATASETS
from experiments.datasets.base import Dataset
from experiments.datasets.layouts import Layout
from experiments.datasets.splits import split_of_rows
from experiments.evaluation.linear import Labelled, evaluate_linear
from experiments.papers.classification import ClassificationData
from experiments.papers.integration import IntegratedLoss
from experiments.papers.presets import PRESETS
from experiments.run import load_run, plan_run, seen_in_training, train_run
from experiments.sweeps import linear as transfer
from experiments.sweeps.linear import evaluate_run_linear, linear_notes
from experiments.training.step import build_features
from tests.experiments.test_grid_report import squeezed
from tests.experiments.tiny_runs import TINY, light_backbones

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
    # Remarks are those of the data that is evaluated, not of those of the run.
    odd = dataclasses.replace(DRAWINGS, remarks=("drawn in haste",))
    monkeypatch.setitem(DATASETS, "drawings", odd)
    few = partial(evaluate_linear, penalties=PENALTIES)
    monkeypatch.setattr(transfer, "evaluate_linear", few)


def test_the_command_writes_what_classifiers_on_the_features_give(
    few_shot_run, folders, other, tmp_path, capsys
):
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
    assert (report["classes"], report["seen_in_training"]) == (3, "")
    markdown = (directory / f"{stem}.md").read_text()
    assert markdown.strip() in capsys.readouterr().out
    assert f"| SCE | {100 * report['result']['accuracy']:.1f} |" in squeezed(markdown)
    assert "Images were resized from 40×44 to 32×32 pixels." in markdown
    assert "- SCE (seed 0): Data: drawn in haste." in markdown
    # Solves that did not converge are counted.
    result = report["result"] | {"unconverged": 2, "converged": False}
    assert linear_notes(report | {"result": result})[-1].startswith("3 solves ended")


@pytest.mark.parametrize(
    ("preset", "trained_on", "data", "split", "seen"),
    [
        ("mini-imagenet", "mini_imagenet", "mini_imagenet@84", "all", True),
        ("mini-imagenet", "mini_imagenet@84", "imagenet@128", "all", True),
        ("cub-margin", "cub_fewshot", "cub@64", "all", True),
        ("cifar-fs", "cifar_fs", "cifar100", "all", True),
        # Images of one set that others contain are reported for every protocol.
        ("imagenet-groups", "imagenet", "tiered_imagenet", "all", True),
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


def test_several_runs_are_compared_pair_by_pair(tmp_path, folders, monkeypatch, capsys):
    """Of two losses and two seeds; a report that is there is read, unless it is of another run."""
    few = partial(evaluate_linear, penalties=PENALTIES)
    monkeypatch.setattr(transfer, "evaluate_linear", few)
    paths = [tmp_path / f"{loss}{seed}" for loss in ("sce", "bce") for seed in (0, 1)]
    with light_backbones():
        for path in paths:
            loss, seed = IntegratedLoss(name=path.name[:3]), int(path.name[3])
            config = dataclasses.replace(TINY, loss=loss, seed=seed, steps=2)
            train_run(plan_run(config), path, folders)

        def linear(*paths: Path, baseline: str = "SCE") -> int:
            options = ["--data", "icons", "--split", "novel", "--baseline", baseline]
            options += ["--data-dir", str(folders.data_dir), "--directory", str(tmp_path / "table")]
            return main(["linear", *map(str, paths), *options])

        assert linear(*paths) == 0
        shown = capsys.readouterr().out
        files = [path / "linear-icons-novel.json" for path in paths]
        value = [json.loads(f.read_text())["result"]["accuracy"] for f in files]
        stored = json.loads((tmp_path / "table" / "table.json").read_text())
        difference = stored["differences"][0]
        assert (difference["metric"], difference["place"]) == ("accuracy", ["BCE"])
        assert difference["values"] == pytest.approx([value[2] - value[0], value[3] - value[1]])
        assert "### Linear evaluation on the novel classes of icons" in shown
        assert shown.count("features, then classifiers") == 4
        assert f"| SCE | {50 * (value[0] + value[1]):.1f} ± " in squeezed(shown)

        # One of another checkpoint or version is replaced.
        for file, old, new in [(files[2], '"step": 2', '"step": 9'), (files[0], '"ver', '"was')]:
            file.write_text(file.read_text().replace(old, new))
        assert linear(*paths) == 0
        assert capsys.readouterr().out.count("features, then classifiers") == 2
        assert linear(*paths, baseline="NCA") == 2
        assert "no run has the label 'NCA'; the runs have SCE, BCE" in capsys.readouterr().err
        shutil.copytree(paths[0], tmp_path / "again")
        assert linear(tmp_path / "again", *paths) == 2
        assert "are both of SCE and seed 0; name one" in capsys.readouterr().err
