"""Base and novel classes of the protocols A and E: held out by a set, chosen, or of another set."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from experiments.core.config import Folders, set_options
from experiments.core.errors import ConfigError
from experiments.core.protocol import Part
from experiments.data.pipeline import load_split, stored_counts
from experiments.datasets import DATASETS
from experiments.datasets.archives import MissingArchiveError
from experiments.papers.few_shot_data import MarginData
from experiments.papers.negative_margin import NegativeMargin, NegativeMarginConfig
from experiments.papers.presets import PRESETS
from experiments.run import complete_run, plan_run, prepare_and_count, seen_in_training
from tests.experiments import fake_archives
from tests.experiments.fake_image_sets import idx
from tests.experiments.tiny_runs import light_backbones

DATA = MarginData(name="fashion_mnist", base_classes=5, subset_seed=2)


def protocol_of(data: MarginData) -> NegativeMargin:
    return NegativeMargin(NegativeMarginConfig(data=data))


def parts_of(data: MarginData, folders: Folders) -> dict[str, Part]:
    return protocol_of(data).parts(folders)


@pytest.fixture(scope="module")
def fashion(tmp_path_factory, folders) -> Folders:
    """30 training and 20 test images of each class."""
    folder, rng, files = tmp_path_factory.mktemp("fashion"), np.random.default_rng(0), {}
    for part, count in {"train": 30, "t10k": 20}.items():
        labels = rng.permutation(np.repeat(np.arange(10, dtype=np.uint8), count))
        images = rng.integers(0, 256, (len(labels), 28, 28), np.uint8)
        files[f"fashion-mnist/{part}-images-idx3-ubyte"] = idx(images)
        files[f"fashion-mnist/{part}-labels-idx1-ubyte"] = idx(labels)
    fake_archives.write(folder, files)
    return dataclasses.replace(folders, manual_dir=folder)


def contents(*parts) -> list[bytes]:
    """The images and names of classes of parts, in an order of their own."""
    return sorted(
        bytes(image) + part.class_names[label].encode()
        for part in parts
        for image, label in zip(part.images[:], part.labels, strict=True)
    )


def of_classes(whole, names):
    """The images of some classes of a set."""
    rows = np.isin(np.array(whole.class_names)[whole.labels], names)
    return dataclasses.replace(whole, images=whole.images[:][rows], labels=whole.labels[rows])


@pytest.mark.parametrize("holdout", [0.0, 0.2])
def test_chosen_classes_are_base_classes_and_all_others_novel(fashion, holdout):
    found = parts_of(dataclasses.replace(DATA, holdout=holdout), fashion)
    counts = {split: part.counts() for split, part in found.items()}
    assert {split: sorted({*of.tolist()}) for split, of in counts.items()} == {
        "base": [24 if holdout else 30],
        "novel": [20],
        "held-out": [6 if holdout else 20],
    }
    parts = {split: part.load() for split, part in found.items()}
    for split, part in parts.items():
        np.testing.assert_array_equal(part.labels, np.repeat(np.arange(5), counts[split]))
    base, novel = parts["base"].class_names, parts["novel"].class_names
    assert parts["held-out"].class_names == base
    train, test = (load_split("fashion_mnist", s, **vars(fashion)) for s in ("train", "test"))
    assert base == tuple(name for name in test.class_names if name not in novel)
    trained = [parts["base"], *[parts["held-out"]] * bool(holdout)]
    assert contents(*trained) == contents(of_classes(train, base))
    assert contents(parts["novel"]) == contents(of_classes(test, novel))
    if not holdout:
        assert contents(parts["held-out"]) == contents(of_classes(test, base))


def test_all_classes_are_base_classes_for_another_set(fashion, folders, tmp_path):
    # Of a set that holds no classes out, the test images are held out.
    parts = parts_of(MarginData(name="fashion_mnist", novel="icons"), fashion)
    assert parts["base"].counts().tolist() == [30] * 10
    whole = load_split("fashion_mnist", "test", **vars(fashion))
    np.testing.assert_array_equal(parts["held-out"].load().images[:], whole.images[:])
    assert len(parts["novel"].counts()) == 50

    fake_archives.cifar_fs_folder(tmp_path)
    places = dataclasses.replace(folders, manual_dir=tmp_path)
    parts = parts_of(MarginData(novel="cifar_fs"), places)
    stored = stored_counts("icons", data_dir=folders.data_dir)
    every = np.concatenate([stored["base"], stored["validation"], stored["novel"]])
    np.testing.assert_array_equal(parts["base"].counts(), every)
    np.testing.assert_array_equal(np.bincount(parts["base"].load().labels), every)
    assert parts["novel"].counts().tolist() == [2, 1]
    assert parts["novel"].load().labels.tolist() == [0, 0, 1]


@pytest.mark.parametrize(("holdout", "base_classes"), [(0, 0), (0.35, 0), (0, 7), (0.35, 7)])
def test_images_of_the_chosen_base_classes_are_for_training_or_held_out(
    folders, holdout, base_classes
):
    seed = 3 * bool(base_classes)
    data = MarginData(holdout=holdout, base_classes=base_classes, subset_seed=seed)
    whole = load_split("icons", "base", data_dir=folders.data_dir)
    found = parts_of(data, folders)
    assert ("held-out" in found) == bool(holdout)
    parts = []
    for split in ("base", "held-out")[: 2 if holdout else 1]:
        parts.append(found[split].load())
        np.testing.assert_array_equal(np.bincount(parts[-1].labels), found[split].counts())
    names = parts[0].class_names
    assert len(names) == base_classes or names == whole.class_names
    assert contents(*parts) == contents(of_classes(whole, names))
    if base_classes:
        other = parts_of(MarginData(base_classes=7), folders)["base"].load()
        assert other.class_names != names
    novel, every = (parts_of(d, folders)["novel"].load() for d in (data, MarginData()))
    np.testing.assert_array_equal(novel.labels, every.labels)


OTHER = {"n01532829": 4, "n01930112": 1, "n02108551": 2, "n02950826": 3}
"""Test images of a fake ImageNet by class; the first and the third are the base classes of a
fake mini-ImageNet."""


@pytest.fixture
def imagenets(folders, tmp_path):
    fake_archives.mini_imagenet_folder(tmp_path)
    counts, parts = (
        {"train": dict.fromkeys(OTHER, 1), "test": OTHER},
        {"train": "train", "test": "val"},
    )
    fake_archives.fake(counts, "imagenet/{part}/{name}/{i}.JPEG", parts=parts)(tmp_path)
    return Folders(data_dir=tmp_path / "data", manual_dir=tmp_path)


ON_OTHERS = MarginData(name="mini_imagenet@16", base_test="imagenet@16")


def test_base_classes_are_evaluated_on_other_images_of_the_same_classes(imagenets):
    parts = parts_of(ON_OTHERS, imagenets)
    assert parts["held-out"].counts().tolist() == [4, 2]
    assert parts["base"].counts().tolist() == [2, 3]
    found, base = (parts[split].load() for split in ("held-out", "base"))
    assert found.class_names == base.class_names == ("n01532829", "n02108551")
    assert found.labels.tolist() == [0] * 4 + [1] * 2
    expected = [
        fake_archives.colour(f"test {name}", i)
        for name in base.class_names
        for i in range(OTHER[name])
    ]
    np.testing.assert_allclose(found.images[:].pixels[:, 0, 0], expected, atol=3)
    # The training does not change.
    unchanged = parts_of(dataclasses.replace(ON_OTHERS, base_test=""), imagenets)
    trained = unchanged["base"].load()
    np.testing.assert_array_equal(trained.images[:].pixels, base.images[:].pixels)
    assert "held-out" not in unchanged


def test_other_images_have_all_base_classes_and_are_for_these_alone(imagenets):
    folder = imagenets.manual_dir / "imagenet"
    for split in ("train", "val"):
        (folder / split / "n01532829").rename(imagenets.manual_dir / split)
    with pytest.raises(ConfigError, match=r"lacks 1 of the 2 base classes .*, such as n01532829"):
        parts_of(ON_OTHERS, imagenets)["held-out"].counts()
    shutil.rmtree(folder)
    shutil.rmtree(imagenets.data_dir)
    parts = parts_of(ON_OTHERS, imagenets)
    assert len(parts["novel"].load().labels) == parts["novel"].counts().sum() > 0
    with pytest.raises(MissingArchiveError, match="imagenet"):
        parts["held-out"].load()


@pytest.mark.parametrize(
    ("preset", "options", "message"),
    [
        ("fashion", {"data.base_classes": 0}, "data.base_classes, so that the others are novel"),
        ("fashion-margin", {"data.base_classes": 0}, "fashion_mnist has the splits train, test,"),
        ("fashion", {"data.base_classes": 1}, r"data.base_classes = 1 must be from 2 to 8$"),
        ("fashion", {"data.base_classes": 6}, "novel classes of fashion_mnist do not give the"),
        ("icons", {"data.base_classes": 101}, "must be from 2 to 100, or 0 for all"),
        ("fashion", {"data.name": "voc2007"}, "voc2007 has any number of labels per image"),
        ("icons-margin", {"loss.label_smoothing": 0.05}, "set one of them to 0"),
        ("icons-margin", {"evaluation.queries": 90}, "an .*; pass .*queries"),
        ("icons-margin", {"data.novel": "cifar10"}, "data.novel = cifar10 has the splits train"),
        ("icons-margin", {"data.base_test": "imagenet"}, "data.base_test = imagenet exclude each"),
        (
            "mini-imagenet-margin",
            {"data.name": "mini_imagenet@64", "data.base_test": "imagenet200"},
            "not in it; set it to imagenet, or empty and use data.holdout",
        ),
        (
            "mini-imagenet-margin",
            {"data.novel": "tiered_imagenet"},
            "tiered_imagenet shares images with data.name = mini_imagenet@257",
        ),
    ],
)
def test_what_cannot_end_well_is_refused(fashion, preset, options, message):
    config = set_options(PRESETS[preset].config, options)
    with pytest.raises(ConfigError, match=message):
        prepare_and_count(plan_run(config), fashion)


def test_sets_of_two_sizes_need_one(monkeypatch):
    def set_shape(*shape):
        novel = dataclasses.replace(DATASETS["cub_fewshot"], image_shape=shape)
        monkeypatch.setitem(DATASETS, "cub_fewshot", novel)

    set_shape(84, 84, 3)
    counts = {split: np.full(30, 90) for split in ("base", "held-out", "validation", "novel")}
    data = MarginData(holdout=0.35, novel="cub_fewshot")
    message = r"images of icons are 32×32×1, those of data\.novel = cub_fewshot are 84×84×3; set"
    with pytest.raises(ConfigError, match=message):
        protocol_of(data).check_data(16, counts)
    set_shape(84, 84, 1)
    protocol_of(dataclasses.replace(data, image_size=32)).check_data(16, counts)


def test_there_are_no_validation_classes_and_test_images_are_new(fashion):
    protocol = protocol_of(dataclasses.replace(DATA, subset_seed=0))
    with pytest.raises(ConfigError, match="has no validation images, only base, novel, held-out"):
        protocol.load(fashion, "validation")
    with pytest.raises(ConfigError, match="fashion_mnist has no validation classes; it has base"):
        protocol.parts_of("validation")
    assert seen_in_training(PRESETS["fashion"].config, "fashion_mnist", "all") == ""
    assert seen_in_training(PRESETS["icons"].config, "icons", "all") != ""


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "wanted"),
    [
        ("fashion", "Base classes: 5 of fashion_mnist, chosen by the seed 0."),
        ("fashion-margin", "Images of the 5 base classes (fashion_mnist): test images."),
    ],
)
def test_a_run_without_validation_classes_is_evaluated_at_its_end(
    fashion, tmp_path, preset, wanted
):
    changes = {"steps": 2, "validate_every": 1, "optimizer.warmup_steps": 0}
    changes |= {"evaluation.episodes": 3, "sampling.batch_size": 16, "evaluation.queries": 8}
    if preset == "fashion-margin":
        changes["fine_tuning.passes"] = 2
    config = set_options(PRESETS[preset].config, changes)
    with light_backbones():
        complete_run(plan_run(config), tmp_path / "run", fashion, command="typed")
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert (report["step"], report["validation"]) == (2, None)
    assert wanted in Path(tmp_path / "run/report.md").read_text()
