"""Base and novel classes of a data set that holds none out, for the protocols A and E."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from experiments.core.config import Folders, replace_option
from experiments.core.errors import ConfigError
from experiments.data.pipeline import load_split
from experiments.papers import build_protocol, few_shot_data
from experiments.papers.few_shot import FewShotConfig
from experiments.papers.few_shot_data import FewShotData, MarginData
from experiments.papers.presets import PRESETS, negative_margin
from experiments.run import complete_run, plan_run, prepare_and_count, seen_in_training
from tests.experiments.fake_image_sets import idx
from tests.experiments.tiny_runs import light_backbones

DATA = MarginData(name="fashion_mnist", base_classes=5, subset_seed=2)


@pytest.fixture(scope="module")
def fashion(tmp_path_factory, folders) -> Folders:
    """30 training and 20 test images of each class."""
    folder = tmp_path_factory.mktemp("fashion")
    (folder / "fashion-mnist").mkdir()
    rng = np.random.default_rng(0)
    for part, count in {"train": 30, "t10k": 20}.items():
        labels = rng.permutation(np.repeat(np.arange(10, dtype=np.uint8), count))
        images = rng.integers(0, 256, (len(labels), 28, 28), np.uint8)
        for array, kind in ((images, "images-idx3"), (labels, "labels-idx1")):
            (folder / f"fashion-mnist/{part}-{kind}-ubyte").write_bytes(idx(array))
    return dataclasses.replace(folders, manual_dir=folder)


def own(folders, split, names):
    """The stored images of the classes, in the order of their names."""
    whole = load_split("fashion_mnist", split, **vars(folders))
    return [whole.images[:][whole.labels == whole.class_names.index(name)] for name in names]


@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_chosen_classes_are_base_classes_and_all_others_novel(fashion, holdout):
    data = dataclasses.replace(DATA, holdout=holdout)
    found = few_shot_data.parts(data, fashion)
    counts = {split: part.counts() for split, part in found.items()}
    assert {split: sorted({*of.tolist()}) for split, of in counts.items()} == {
        "base": [24 if holdout else 30],
        "novel": [20],
        "held-out": [6 if holdout else 20],
    }
    parts = {split: part.load() for split, part in found.items()}
    base, novel = parts["base"].class_names, parts["novel"].class_names
    assert parts["held-out"].class_names == base
    every = load_split("fashion_mnist", "test", **vars(fashion)).class_names
    assert base == tuple(name for name in every if name not in novel)
    assert len(base) == len(novel) == 5
    for split, part in parts.items():
        np.testing.assert_array_equal(part.labels, np.repeat(np.arange(5), counts[split]))
    for split, stored in (("novel", "test"), ("base", "train"), ("held-out", "test")):
        if split == "novel" or not holdout:
            wanted = np.concatenate(own(fashion, stored, parts[split].class_names))
            np.testing.assert_array_equal(parts[split].images[:], wanted)
    if holdout:
        found = [*parts["base"].images[:], *parts["held-out"].images[:]]
        wanted = [image for of in own(fashion, "train", base) for image in of]
        assert sorted(map(bytes, found)) == sorted(map(bytes, wanted))


def test_the_stated_seeds_choose_eight_splits(fashion):
    (stated,) = re.findall(r"subset_seed=([\d,]{9,})", Path(negative_margin.__file__).read_text())
    seeds = [int(seed) for seed in stated.split(",")]
    data = [FewShotData(name="fashion_mnist", base_classes=5, subset_seed=seed) for seed in seeds]
    chosen = {few_shot_data.parts(d, fashion)["base"].load().class_names for d in data}
    assert len(chosen) == len(seeds) == 8


def test_all_classes_are_base_classes_for_another_set(fashion):
    data = MarginData(name="fashion_mnist", novel="icons")
    parts = few_shot_data.parts(data, fashion)
    assert parts["base"].counts().tolist() == [30] * 10
    assert parts["held-out"].counts().tolist() == [20] * 10
    assert len(parts["novel"].counts()) == 50
    held_out = parts["held-out"].load()
    np.testing.assert_array_equal(
        held_out.images[:], load_split("fashion_mnist", "test", **vars(fashion)).images[:]
    )


@pytest.mark.parametrize(
    ("preset", "options", "message"),
    [
        ("fashion", {"base_classes": 0}, "set data.base_classes, so that the others are novel"),
        ("fashion-margin", {"base_classes": 0}, "fashion_mnist has the splits train, test, and"),
        ("fashion", {"base_classes": 1}, r"data.base_classes = 1 must be from 2 to 9$"),
        ("fashion-margin", {"base_classes": 10}, r"data.base_classes = 10 must be from 2 to 9$"),
        ("fashion", {"base_classes": 6}, "novel classes of fashion_mnist do not give the eval"),
        ("icons", {"base_classes": 101}, "must be from 2 to 100, or 0 for all"),
        ("fashion", {"name": "voc2007"}, "voc2007 has any number of labels per image"),
    ],
)
def test_classes_that_cannot_be_chosen_are_refused(fashion, preset, options, message):
    config = PRESETS[preset].config
    for option, value in options.items():
        config = replace_option(config, f"data.{option}", value)
    with pytest.raises(ConfigError, match=message):
        prepare_and_count(plan_run(config), fashion)


def test_there_are_no_validation_classes_to_evaluate(fashion):
    data = FewShotData(name="fashion_mnist", base_classes=5)
    protocol = build_protocol(FewShotConfig(data=data))
    message = "fashion_mnist has no validation classes; it has base, novel"
    with pytest.raises(ConfigError, match=message):
        protocol.load(fashion, "validation")
    with pytest.raises(ConfigError, match=message):
        few_shot_data.parts_of(DATA, "validation")


def test_fewer_base_classes_of_a_set_that_holds_classes_out(folders):
    data = FewShotData(base_classes=7, subset_seed=1)
    protocol = build_protocol(FewShotConfig(data=data))
    counts = protocol.counts_by_split(folders)
    assert [len(counts[split]) for split in ("base", "validation", "novel")] == [7, 29, 50]
    images = protocol.load(folders, "base")
    np.testing.assert_array_equal(np.bincount(images.labels), counts["base"])


def test_test_images_are_new_to_a_run_on_training_images():
    assert seen_in_training(PRESETS["fashion"].config, "fashion_mnist", "all") == ""
    assert seen_in_training(PRESETS["icons"].config, "icons", "all") != ""


@pytest.mark.long
@pytest.mark.parametrize(("preset", "base"), [("fashion", None), ("fashion-margin", "test images")])
def test_a_run_without_validation_classes_is_evaluated_at_its_end(fashion, tmp_path, preset, base):
    config: object = PRESETS[preset].config
    changes = {"steps": 2, "validate_every": 1, "optimizer.warmup_steps": 0}
    changes |= {"evaluation.episodes": 3, "sampling.batch_size": 16}
    if base:
        changes |= {"evaluation.queries": 8, "fine_tuning.passes": 2}
    for option, value in changes.items():
        config = replace_option(config, option, value)
    with light_backbones():
        complete_run(plan_run(config), tmp_path / "run", fashion, command="typed")
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["step"] == 2
    assert report["validation"] is None
    text = (tmp_path / "run/report.md").read_text()
    wanted = "Base classes: 5 of fashion_mnist, chosen by the seed 0."
    if base:
        assert [metric["name"] for metric in report["metrics"]][:2] == [
            "novel 1-shot",
            "novel 5-shot",
        ]
        wanted = "Images of the 5 base classes (fashion_mnist): test images."
    assert wanted in text
