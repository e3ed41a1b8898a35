"""Linear evaluation of a run's checkpoint on another data set, from the images to the files."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import transfer
from experiments.cli.main import main
from experiments.config import (
    Folders,
    ModelConfig,
    SamplingConfig,
    TrainConfig,
    replace_option,
)
from experiments.contracts import ImageSet
from experiments.data import builders
from experiments.data.builders import BUILDERS
from experiments.data.selection import select
from experiments.errors import ConfigError
from experiments.evaluation.linear import Labelled, evaluate_linear
from experiments.presets import PRESETS
from experiments.protocols import build_protocol
from experiments.protocols.few_shot import FewShotConfig, FewShotEvaluation
from experiments.protocols.integration import IntegratedLoss
from experiments.reporting import linear as linear_reporting
from experiments.reporting.linear import linear_report
from experiments.runs import plan_run, restore_run, train_run
from experiments.training.step import build_embed
from experiments.transfer import evaluate_run_linear

CONFIG = FewShotConfig(
    sampling=SamplingConfig(batch_size=16),
    model=ModelConfig(widths=(4, 4, 4, 4)),
    loss=IntegratedLoss(name="sce"),
    evaluation=FewShotEvaluation(episodes=20, validation_episodes=20),
    steps=1,
)
PENALTIES = (1e-2, 1.0, 100.0)
SHAPE = (40, 44, 1)


def drawings(split: str) -> ImageSet:
    """Bars at a place of their class, in noise: 3 classes of 20 grey images."""
    rng = np.random.default_rng(len(split))
    labels = np.repeat(np.arange(3, dtype=np.int32), 20)
    images = rng.integers(0, 240, (60, *SHAPE), np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, 4 + 12 * label : 12 + 12 * label] += 12
    return ImageSet(images, labels, ("left", "middle", "right"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, folders) -> tuple[Path, Folders]:
    directory = tmp_path_factory.mktemp("run")
    train_run(plan_run(CONFIG), directory, folders)
    return directory, folders


@pytest.fixture
def other(monkeypatch):
    """A data set `drawings` of other images, with splits for training and test."""
    shape_of, class_of = transfer.image_shape, transfer.builder_class
    of_drawings = SimpleNamespace(SPEC=SimpleNamespace(image_shape=SHAPE, whole=False))
    monkeypatch.setattr(
        transfer, "image_shape", lambda name: SHAPE if name == "drawings" else shape_of(name)
    )
    monkeypatch.setattr(
        transfer,
        "builder_class",
        lambda name: of_drawings if name == "drawings" else class_of(name),
    )
    monkeypatch.setattr(transfer, "stored_splits", lambda name: ("train", "test"))
    monkeypatch.setattr(
        transfer, "load_split", lambda name, split, data_dir, manual_dir: drawings(split)
    )
    few = partial(evaluate_linear, penalties=PENALTIES)
    monkeypatch.setattr(transfer, "evaluate_linear", few)


def test_the_command_writes_what_classifiers_on_the_features_give(run, other, tmp_path, capsys):
    directory, folders = run
    link = tmp_path / "run"
    link.symlink_to(directory)
    given = ["linear", str(link / "checkpoints"), "--data", "drawings", "--holdout", "0.25"]
    assert main([*given, "--data-dir", str(folders.data_dir)]) == 0
    stem = "linear-drawings-holdout0.25"
    report = json.loads((directory / f"{stem}.json").read_text())

    restored = restore_run(directory)
    seen = dataclasses.replace(CONFIG.data, image_size=32)
    embed = build_embed(restored.network.graphdef, seen)

    def features(split: str) -> Labelled:
        images = drawings(split)
        return Labelled(np.asarray(embed(restored.state, images.images)), images.labels)

    own, test = features("train"), features("test")
    rows = select(
        np.asarray(own.labels),
        holdout=0.25,
        test_labels=np.asarray(test.labels),
    ).rows
    assert len(rows["validation"]) == 15
    chosen, held_out = (
        Labelled(np.asarray(own.features)[rows[s]], np.asarray(own.labels)[rows[s]])
        for s in ("train", "validation")
    )
    expected = evaluate_linear(chosen, held_out, test, penalties=PENALTIES)._asdict()
    assert report["result"].keys() == expected.keys()
    for name, value in expected.items():
        assert report["result"][name] == pytest.approx(value, rel=1e-3), name
    assert 0.4 < expected["accuracy"] < 1
    assert (report["stored_size"], report["image_size"]) == ([40, 44], [32, 32])
    assert (report["classes"], report["seen_in_training"]) == (3, "")
    assert report["command"].endswith("--data-dir " + str(folders.data_dir))

    assert report["run"]["label"] == "SCE"
    assert (report["version"], report["commit"], report["notes"]) == (
        *(report["run"]["version"], report["run"]["commit"]),
        [],
    )

    printed = capsys.readouterr().out
    assert "Images were resized from 40×44 to 32×32 pixels." in printed
    assert f" {100 * report['result']['accuracy']:.2f} " in printed
    assert printed.splitlines()[0] in (directory / f"{stem}.md").read_text()
    assert f"]({stem}.png)" in (directory / f"{stem}.md").read_text()
    figure = (directory / f"{stem}.png").read_bytes()
    assert figure.startswith(b"\x89PNG")
    assert len(figure) > 10_000


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ((), "linear-cub@64"),
        (("--checkpoint", "best", "--holdout", "0.2"), "linear-cub@64"),
        (("--checkpoint", "latest"), "linear-cub@64-step7"),
        (("--checkpoint", "7", "--holdout", "0.125"), "linear-cub@64-step7-holdout0.125"),
    ],
)
def test_a_report_is_named_by_what_is_not_the_default(monkeypatch, tmp_path, given, name):
    monkeypatch.setattr(transfer, "evaluate_run_linear", lambda *_, **__: {"step": 7})
    monkeypatch.setattr(linear_reporting, "linear_report", lambda _: "")
    monkeypatch.setattr(linear_reporting, "linear_figure", lambda *_, **__: None)
    monkeypatch.setattr(linear_reporting, "write_picture", lambda path, figure: path)
    assert main(["linear", str(tmp_path), "--data", "cub@64", *given]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.json", f"{name}.md"]


def test_images_that_the_model_was_trained_on_are_reported(run, monkeypatch):
    directory, folders = run
    parts = []

    def recorded(*given: Labelled) -> Labelled:
        parts.extend(given)
        return given[0]

    monkeypatch.setattr(transfer, "evaluate_linear", recorded)
    report = evaluate_run_linear(directory, folders, data="icons")
    assert report["seen_in_training"]
    assert report["classes"] == 179
    assert sum(len(part.labels) for part in parts) == 8526
    assert len(parts[2].labels) == pytest.approx(0.3 * 8526, rel=0.02)
    assert [len(np.unique(part.labels)) for part in parts] == [179] * 3


@pytest.mark.parametrize(
    ("preset", "trained_on", "data", "seen"),
    [
        ("mini-imagenet", "mini_imagenet", "mini_imagenet@84", True),
        ("mini-imagenet", "mini_imagenet@84", "mini_imagenet@32", True),
        ("mini-imagenet", "mini_imagenet@84", "imagenet@128", True),
        ("tiered-imagenet", "tiered_imagenet", "mini_imagenet", True),
        ("cub", "cub_fewshot", "cub", True),
        ("cub-margin", "cub_fewshot", "cub@64", True),
        ("cifar-fs", "cifar_fs", "cifar100", True),
        # Images of one set that others contain are reported for every protocol.
        ("imagenet-groups", "imagenet", "tiered_imagenet", True),
        ("imagenet-groups", "imagenet", "stl10", True),
        ("caltech256-groups", "caltech256", "caltech101", True),
        # Of one set, these protocols leave out what the evaluation does.
        ("imagenet-groups", "imagenet@128", "imagenet", False),
        ("icons-groups", "icons", "icons", False),
        ("cub", "cub_fewshot", "cars", False),
        ("cifar-fs", "cifar_fs", "cifar10", False),
    ],
)
def test_sets_that_share_images_are_known(preset, trained_on, data, seen):
    config = replace_option(PRESETS[preset].config, "data.name", trained_on)
    assert bool(seen_in_training(config, data)) == seen


def seen_in_training(config: TrainConfig, data: str) -> str:
    holds_classes_out = "base" in build_protocol(config).splits
    return transfer._seen_in_training(config, data, holds_classes_out=holds_classes_out)


def test_base_classes_at_another_size_count_as_seen():
    config = replace_option(PRESETS["icons"].config, "data.name", "icons@48")
    seen = "base classes of icons@48, which include test images"
    assert seen_in_training(config, "icons") == seen


def test_what_the_initial_weights_have_seen_counts(run, tmp_path):
    """A few-shot run has seen images of the icons that are test images of a classification."""

    def started_from(weights):
        return replace_option(PRESETS["icons-groups"].config, "model.weights", str(weights))

    directory, _ = run
    seen = "base classes of icons, which include test images"
    assert seen_in_training(started_from(directory), "icons") == seen
    assert seen_in_training(started_from(directory / "checkpoints"), "icons") == seen
    for weights in (tmp_path, tmp_path / "resnet.safetensors"):
        assert not seen_in_training(started_from(weights), "icons")
    assert not seen_in_training(started_from(directory), "cifar10")


def test_the_sets_that_share_images_exist():
    names = [name for group in builders._SHARE_IMAGES for name in group]
    assert set(names) <= set(BUILDERS)
    assert len(set(names)) == len(names)


def test_a_report_states_which_images_were_seen(run, other):
    report = evaluate_run_linear(*run, data="drawings")
    seen = "icons, which shares images with drawings"
    text = linear_report(report | {"seen_in_training": seen})
    assert "was trained on icons, which shares images with drawings: this is no transfer" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "kanji"}, "any number of labels"),
        ({"data": "cifar10"}, "images of cifar10 have 3 channels, and the run was trained on"),
        ({"data": "icons", "holdout": 0.0}, "holdout must be above 0 and below 1, got 0.0"),
        ({"data": "icons", "which": "worst"}, "checkpoint must be best, latest"),
        ({"data": "faces"}, "no data set 'faces'"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(run, options, message):
    with pytest.raises(ConfigError, match=message):
        evaluate_run_linear(run[0], run[1], **options)


def test_a_model_of_oblong_images_takes_no_others(run, other, monkeypatch):
    restored = restore_run(run[0])
    oblong = restored._replace(plan=restored.plan._replace(image_shape=(32, 30, 1)))
    monkeypatch.setattr(transfer, "restore_run", lambda *_: oblong)
    with pytest.raises(ConfigError, match="32×30, which is not square; train it"):
        evaluate_run_linear(run[0], run[1], data="drawings")


def test_a_model_that_resizes_keeps_its_way(run, other):
    trained_with = restore_run(run[0]).plan.config.data
    data = dataclasses.replace(trained_with, image_size=32, resize=36)
    assert transfer._preparation(data, "drawings", (32, 32, 1)) == data
