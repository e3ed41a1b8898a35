"""Images of one's own: class folders, splits, CSV files, and what is odd in them."""

from __future__ import annotations

import re
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.assembly import plan_run, prepare_and_count
from experiments.cli.main import main
from experiments.config import Folders
from experiments.data import builders
from experiments.data.pipeline import load_labels, load_split
from experiments.errors import ExperimentError
from experiments.presets import PRESETS
from experiments.protocols import build_protocol
from experiments.trained_on import seen_in_training
from tests.experiments.fake_archives import write_image

COUNTS = {"ant": 4, "bee": 6, "cat": 5, "dog": 5}


def put(folder: Path, counts: dict[str, int], size: tuple[int, int] = (30, 20)) -> Path:
    for name, count in counts.items():
        for i in range(count):
            write_image(folder / name / f"{i}.jpg", f"{folder.name}/{name}", i, size)
    return folder


def name_of(folder: Path) -> str:
    return f"folder:{folder}"


def found(name: str) -> dict[str, dict[str, int]]:
    return builders.builder_class(name).FACTS.classes  # pyright: ignore


def config_of(preset: str, name: str):
    config = PRESETS[preset].config
    return replace(config, data=replace(config.data, name=name))


def test_a_folder_is_prepared_under_the_name_of_its_content(dirs, tmp_path):
    folder = put(tmp_path / "pets", COUNTS)
    loaded = load_split(name_of(folder), "train", **dirs)
    assert loaded.class_names == tuple(COUNTS)
    assert np.bincount(loaded.labels).tolist() == [*COUNTS.values()]
    (first,) = dirs["data_dir"].glob("folder_*")
    shutil.copytree(folder, tmp_path / "copy")
    assert builders.builder_class(name_of(tmp_path / "copy")).name == first.name
    write_image(folder / "ant/new.jpg", "new", 0)
    assert len(load_split(name_of(folder), "train", **dirs).labels) == 21
    assert len([*dirs["data_dir"].glob("folder_*")]) == 2


def test_a_run_keeps_to_the_content_that_it_was_trained_on(dirs, tmp_path):
    folder = put(tmp_path / "pets", COUNTS)
    load_split(name_of(folder), "train", **dirs)
    config = plan_run(config_of("folder", name_of(folder))).config
    assert re.fullmatch(rf"folder:{folder}#[0-9a-f]{{12}}", config.data.name)
    spec = builders.builder_class(name_of(folder)).SPEC
    assert (config.data.mean, config.data.std) == (spec.mean, spec.std)
    write_image(folder / "eel/new.jpg", "new", 0)
    assert plan_run(config_of("folder", name_of(folder))).config.data.name != config.data.name
    for _ in range(2):  # The folder has changed; there is none.
        assert load_split(config.data.name, "train", **dirs).class_names == tuple(COUNTS)
        shutil.rmtree(folder, ignore_errors=True)
    with pytest.raises(ExperimentError, match="no longer has the files of folder_"):
        load_split(config.data.name, "train", data_dir=tmp_path / "elsewhere")


def test_a_folder_that_is_gone_goes_on_as_it_was_last_prepared(dirs, tmp_path, caplog, capsys):
    folder = put(tmp_path / "pets", COUNTS)
    load_split(name_of(folder), "train", **dirs)
    _keep("ant", "bee")(folder)
    prepared = builders.builder_class(name_of(folder)).name
    load_split(name_of(folder), "train", **dirs)
    shutil.rmtree(folder)
    for _ in range(2):
        assert builders.builder_class(name_of(folder)).name == prepared
    assert caplog.messages[-1].endswith("pets is gone; what was prepared from it is used")
    assert sum("is gone;" in message for message in caplog.messages) == 1
    assert load_split(name_of(folder), "train", **dirs).class_names == ("ant", "bee")
    elsewhere = ["--data-dir", str(tmp_path / "elsewhere"), "--directory", str(tmp_path / "run")]
    assert main(["train", "folder", "--data.name", name_of(folder), *elsewhere]) == 2
    assert f"no longer has the files of {prepared}, which is not prep" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("train", "test"), ["train", "test"]),
        (("Train", "val"), ["train", "test"]),
        (("train", "valid", "test"), ["train", "validation", "test"]),
        (("train",), ["train"]),
    ],
)
def test_splits_of_the_same_classes(tmp_path, parts, expected):
    for part in parts:
        put(tmp_path / part, COUNTS)
    assert found(name_of(tmp_path)) == dict.fromkeys(expected, COUNTS)


@pytest.mark.parametrize("parts", [("base", "validation", "novel"), ("train", "val", "test")])
def test_splits_of_other_classes_hold_classes_out(tmp_path, parts):
    for part in parts:
        put(tmp_path / part, {f"{part} {name}": 2 for name in COUNTS})
    splits = found(name_of(tmp_path))
    assert [*splits] == ["base", "validation", "novel"]
    assert [len(of) for of in splits.values()] == [4, 4, 4]
    assert set(splits["novel"]) == {f"{parts[2]} {name}" for name in COUNTS}


def test_few_shot_protocols_split_the_classes(dirs, tmp_path):
    name, folders = name_of(put(tmp_path / "pets", COUNTS)), Folders(**dirs)
    for preset in ("folder-few-shot", "icons-margin", "icons-instances"):
        protocol = build_protocol(config_of(preset, name))
        if preset == "icons-margin":
            config = config_of(preset, name)
            config = replace(config, data=replace(config.data, holdout=0.2))
            protocol = build_protocol(config)
        counts = protocol.counts_by_split(folders)
        base, novel = (protocol.load(folders, split) for split in ("base", "novel"))
        assert len(novel.class_names) == 2
        assert counts["novel"].sum() == len(novel.labels)
        assert sorted(counts["novel"]) == sorted(COUNTS[name] for name in novel.class_names)
        if preset == "folder-few-shot":
            assert {*base.class_names} | {*novel.class_names} == {*COUNTS}
        assert counts["base"].sum() + novel.labels.size + sum(counts.get("held-out", [])) == 20


def test_classification_tests_on_a_split_larger_than_that_for_training(dirs, tmp_path):
    for part, size in (("train", 7), ("test", 20)):
        put(tmp_path / "pets" / part, {"ant": size, "bee": size + 1})
    protocol = build_protocol(config_of("folder", name_of(tmp_path / "pets")))
    counts = protocol.counts_by_split(Folders(**dirs))
    assert counts["test"].tolist() == [20, 21]
    test = protocol.load(Folders(**dirs), "test")
    assert np.bincount(test.labels).tolist() == [20, 21]


@pytest.mark.parametrize("preset", ["folder", "folder-labels"])
def test_validation_images_of_ones_own_validate(dirs, tmp_path, preset):
    folder, sizes = tmp_path / "pets", {"train": 7, "validation": 4, "test": 5}
    for part, size in sizes.items():
        put(folder / part, {"ant": size, "bee": size})
    if preset == "folder-labels":
        files = sorted(str(file.relative_to(folder)) for file in folder.glob("*/*/*"))
        rows = (f"{file},{file.split('/')[1]}|pet,{file.split('/')[0]}" for file in files)
        (folder / "labels.csv").write_text("\n".join(["file,labels,split", *rows]))
    config = config_of(preset, name_of(folder))
    assert vars(config.data)["holdout"]
    protocol, folders = build_protocol(config), Folders(**dirs)
    counts = protocol.counts_by_split(folders)
    assert {split: of[0] for split, of in counts.items()} == sizes
    for split in sizes:
        stored = load_split(config.data.name, split, **dirs)
        mine = protocol.load(folders, split)
        np.testing.assert_array_equal(mine.images.pixels[:], stored.images.pixels[:])
        np.testing.assert_array_equal(mine.labels, stored.labels)


def test_a_folder_of_grey_images(dirs, tmp_path):
    folder = tmp_path / "pets"
    pixels = np.random.default_rng(0).integers(0, 256, (8, 30, 20), np.uint8)
    for number, image in enumerate(pixels):
        place = folder / ("ant" if number < 4 else "bee")
        place.mkdir(parents=True, exist_ok=True)
        # The last ones lie on their side, and are stored so.
        Image.fromarray(image if number % 4 < 3 else image.T).save(place / f"{number}.png")
    loaded = load_split(name_of(folder), "train", **dirs)
    assert loaded.images.pixels.shape[-1] == 1
    assert loaded.images.sizes.tolist() == ([[30, 20]] * 3 + [[20, 30]]) * 2
    found = sorted(image[..., 0][:20, :30].tobytes() for image in loaded.images.pixels[:])
    assert found == sorted(image.T.tobytes() for image in pixels)


def test_a_folder_without_validation_classes_says_so_whatever_its_name(dirs, tmp_path):
    name = name_of(put(tmp_path / "{pets}", COUNTS))
    protocol = build_protocol(config_of("folder-few-shot", name))
    message = re.escape(f"{name} has no validation classes; it has base, novel")
    with pytest.raises(ExperimentError, match=message):
        protocol.load(Folders(**dirs), "validation")


def test_classification_tests_on_a_share_and_linear_knows_what_was_seen(dirs, tmp_path):
    folder, folders = put(tmp_path / "pets", COUNTS), Folders(**dirs)
    name = name_of(folder)
    with pytest.raises(ExperimentError, match="class ant has too few images to hold out"):
        build_protocol(config_of("folder", name)).counts_by_split(folders)
    put(folder, {"ant": 6, "bee": 6, "cat": 6, "dog": 7})
    counts = build_protocol(config_of("folder", name)).counts_by_split(folders)
    assert counts["test"].tolist() == [2, 2, 2, 2]
    assert counts["validation"].tolist() == [1, 1, 1, 1]
    assert counts["train"].tolist() == [3, 3, 3, 4]
    assert seen_in_training(config_of("folder", name), name) == ""
    assert "base classes" in seen_in_training(config_of("folder-few-shot", name), name)
    inside = name_of(put(tmp_path / "pets" / "ant", {"a": 2, "b": 2}))
    assert builders.share_images(name, inside)
    assert not builders.share_images(name, name_of(put(tmp_path / "others", COUNTS)))


# --- Odd folders --------------------------------------------------------------------------------

_NFC, _NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


def _odd_kinds(folder: Path) -> None:
    """The formats, modes and files that people have."""
    picture = Image.fromarray(np.arange(1200, dtype=np.uint32).reshape(30, 40).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(folder / "ant/grey.png")
    picture.convert("RGBA").save(folder / "ant/transparent.webp")
    picture.convert("RGB").save(folder / "ant/turned.JPG", exif=exif)
    picture.convert("P").save(folder / "ant/palette.gif")
    (folder / "notes.txt").write_text("beside the classes")
    (folder / "empty").mkdir()
    shutil.copy(folder / "bee/0.jpg", folder / "bee/copy.jpg")
    write_image(folder / _NFC / "a.png", "a", 0)
    write_image(folder / _NFD / "b.png", "b", 1)


def test_odd_files_are_taken_or_counted(dirs, tmp_path, capsys):
    folder = put(tmp_path / "pets", COUNTS)
    _odd_kinds(folder)
    expected = COUNTS | {"ant": 8, _NFC: 2}
    assert found(name_of(folder))["train"] == expected
    loaded = load_split(name_of(folder), "train", **dirs)
    assert loaded.images.pixels.shape == (26, 100, 200, 3)
    assert main(["datasets", name_of(folder)]) == 0
    text = capsys.readouterr().out
    assert "26 images, 2 (café) to 8 (ant) of a class" in text
    assert "left out 1 file without an image: notes.txt" in text
    assert "left out 1 folder without images: empty" in text
    assert "left out 1 image that equal another one of the same class: bee/copy.jpg" in text


def _break(*names: str):
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes(b"no image")

    return change


def _keep(*names: str):
    def change(folder: Path) -> None:
        for path in folder.iterdir():
            if path.name not in names:
                shutil.rmtree(path)

    return change


def _without_folders(folder: Path) -> None:
    for path in [*folder.glob("*/*.jpg")]:
        path.rename(folder / f"{path.parent.name}-{path.name}")


def _one_folder_too_many(folder: Path) -> None:
    shutil.copytree(folder, folder / "all")
    _keep("all")(folder)


def _csv(text: str):
    return lambda folder: (folder / "labels.csv").write_text(text, encoding="utf-8") and None


ERRORS = {
    "no folder": (lambda folder: shutil.rmtree(folder), "pets does not exist"),
    "no images": (_keep(), "has no images; put the images of each class into a folder"),
    "no classes": (_without_folders, "has 20 images, but no folder per class"),
    "one class": (_keep("ant"), "images of one class only, 'ant'; add images of another"),
    "nested": (_one_folder_too_many, r"only, 'all'; for its 4 folders, set folder:.*pets/all"),
    "damaged": (_break("ant/0.jpg", "dog/1.jpg"), "2 of 20 images cannot be read: ant/0.jpg, dog/"),
    "columns": (_csv("name,label\n"), "has the columns name, label; it needs file and labels"),
    "empty": (_csv(""), r"has the columns \(none\)"),
    "absent": (_csv("file,labels\nx.jpg,a\nant/0.jpg,a\n"), "lists 1 file .*'x.jpg' in line 2"),
    "cells": (_csv("file,labels\nant/0.jpg,a,b\n"), "line 2: 3 cells for 2 columns"),
    "two classes": (_csv("file,label\nant/0.jpg,a\nant/0.jpg,b\n"), "lines 2 and 3: .* two labels"),
    "no label": (_csv("file,label\nant/0.jpg,\n"), "line 2: ant/0.jpg has no label"),
    "split": (_csv("file,labels,split\nant/0.jpg,a,foo\n"), "line 2: the split 'foo' is none"),
    "unknown label": (
        _csv("file,labels,split\nant/0.jpg,a,train\nant/1.jpg,b,test\n"),
        "no training image has the label 'b'",
    ),
    "only test": (_csv("file,labels,split\nant/0.jpg,a,test\n"), "has the splits test; use train"),
    "no rows": (_csv("file,labels\n"), "lists no images"),
}


@pytest.mark.parametrize(("change", "message"), ERRORS.values(), ids=ERRORS)
def test_an_error_is_one_line(tmp_path, capsys, change, message):
    folder = put(tmp_path / "pets", COUNTS)
    change(folder)
    assert main(["datasets", name_of(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


@pytest.mark.parametrize("part", [".", "test"])
def test_all_images_that_cannot_be_read_are_named_at_once(dirs, tmp_path, capsys, part):
    folder, data = put(tmp_path / "pets" / part, COUNTS | {"bee": 11}), dirs["data_dir"]
    for file in folder.glob("bee/*.jpg"):
        file.write_bytes(file.read_bytes()[:-30])
    if part == ".":
        _break("ant/3.jpg")(folder)
    else:  # The images for test are not measured: preparation begins.
        put(tmp_path / "pets" / "train", COUNTS)
    assert main(["prepare", name_of(tmp_path / "pets"), "--data-dir", str(data)]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    counts = "12 of 25" if part == "." else "11 of 45"
    shown = [str(Path(part, "bee", f"{i}.jpg")) for i in (0, 1, 10, 2, 3, 4, 5, 6, 7, 8)]
    shown = ["ant/3.jpg", *shown[:9]] if part == "." else shown
    assert f"pets: {counts} images cannot be read: {', '.join(shown)}, …; repair or delete" in line
    assert not [*data.glob("folder_*/*[0-9]*")]


@pytest.mark.parametrize("name", ["flowers", "./flowers", "no/flowers", "~/flowers"])
def test_a_path_in_place_of_a_data_set_is_told_its_prefix(tmp_path, monkeypatch, capsys, name):
    (tmp_path / "flowers").mkdir()  # `flowers102` is the nearest data set.
    monkeypatch.chdir(tmp_path)
    assert main(["datasets", name]) == 2
    assert f"images of your own, set folder:{name}" in capsys.readouterr().err


def test_a_preset_for_a_folder_asks_for_one(capsys):
    assert main(["train", "folder"]) == 2
    assert "set data.name = folder:PATH" in capsys.readouterr().err


# --- CSV files ----------------------------------------------------------------------------------


def test_classes_that_look_like_several_labels_are_noted(tmp_path):
    folder = put(tmp_path / "pets", {"a": 3})
    _csv("file,label\na/0.jpg,red|round\na/1.jpg,red|small\na/2.jpg,blue\n")(folder)
    notes = builders.builder_class(name_of(folder)).details()
    assert notes[-1].startswith("2 classes have ; or | in their name, such as red|round: for sev")


def test_a_file_of_several_labels(dirs, tmp_path):
    folder, rows = put(tmp_path / "pets", {"a": 10}), []
    for i in range(9):
        rows.append(f'a/{i}.jpg,"{("red", "red, round", "round|small")[i % 3]}"')
    rows += ["a/0.jpg,small", "a\\8.jpg,"]  # A file may have several lines.
    _csv("\ufefffile,labels\n" + "\n".join(rows))(folder)
    targets, _ = load_labels(name_of(folder), "train", **dirs)
    expected = [[1, 0, 0], [1, 1, 0], [0, 1, 1]] * 3
    expected[0] = [1, 0, 1]
    np.testing.assert_array_equal(targets, expected)
    assert "1 image that labels.csv does not list: a/9.jpg" in "".join(
        builders.builder_class(name_of(folder)).details()
    )
    plan = plan_run(config_of("folder-labels", name_of(folder)))
    with pytest.raises(ExperimentError, match="batch_size = 32 must be at most 5"):
        prepare_and_count(plan, Folders(**dirs))
    protocol = plan.protocol
    shown = [protocol.load(Folders(**dirs), split) for split in ("train", "validation", "test")]
    assert [len(part.labels) for part in shown] == [5, 1, 3]
    seen = np.concatenate([part.labels for part in shown])
    assert sorted(map(bytes, seen)) == sorted(map(bytes, np.array(expected, np.int8)))


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_file_of_single_labels_with_splits(tmp_path, delimiter):
    folder = put(tmp_path / "pets", {"a": 8})
    rows = ["file,label,split"]
    rows += [f"a/{i}.jpg,{'xy'[i % 2]} z,{'train' if i < 4 else 'val'}" for i in range(8)]
    _csv("\n".join(rows).replace(",", delimiter))(folder)
    assert found(name_of(folder / "labels.csv")) == {
        "train": {"x z": 2, "y z": 2},
        "test": {"x z": 2, "y z": 2},
    }
