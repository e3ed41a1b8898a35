"""Images of one's own: class folders, splits, CSV files, and what is odd in them."""

from __future__ import annotations

import json
import os
import re
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import experiments
from experiments.cli.main import main
from experiments.core.config import Folders
from experiments.core.errors import ExperimentError
from experiments.core.storage import cache_folder
from experiments.data.pipeline import load_labels, load_split
from experiments.datasets import (
    folder as folders,
)
from experiments.datasets import (
    lookup,
    pinned,
    preparation,
    share_images,
    short_name,
)
from experiments.papers import build_protocol
from experiments.papers.presets import PRESETS
from experiments.run import plan_run, prepare_and_count, seen_in_training
from tests.experiments.fake_archives import write_image
from tests.experiments.tiny_runs import light_backbones

COUNTS = {"ant": 4, "bee": 6, "cat": 5, "dog": 5}


def put(folder: Path, counts: dict[str, int], size: tuple[int, int] = (30, 20)) -> Path:
    for name, count in counts.items():
        for i in range(count):
            write_image(folder / name / f"{i}.jpg", f"{folder.name}/{name}", i, size)
    return folder


def name_of(folder: Path) -> str:
    return f"folder:{folder}"


def found(name: str) -> dict[str, dict[str, int]]:
    splits = lookup(name).layouts[0].read(None)  # pyright: ignore
    return {split: of.counts() for split, of in splits.items()}


def write_csv(folder: Path, column: str, *rows: str) -> None:
    """A CSV file of the images, a row for each `SPLIT/CLASS/NAME` unless rows are given."""
    files = sorted(str(file.relative_to(folder)) for file in folder.glob("*/*/*"))
    own = (f'{file},"{file.split("/")[1]}",{file.split("/")[0]}' for file in files)
    header = f"file,{column}" + ",split" * (not rows)
    (folder / "labels.csv").write_text("\n".join([header, *(rows or own)]))


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
    assert lookup(name_of(tmp_path / "copy")).name == first.name
    write_image(folder / "ant/new.jpg", "new", 0)
    assert len(load_split(name_of(folder), "train", **dirs).labels) == 21
    assert len([*dirs["data_dir"].glob("folder_*")]) == 2


def test_a_run_keeps_to_the_content_that_it_was_trained_on(dirs, tmp_path):
    folder = put(tmp_path / "pets", COUNTS)
    load_split(name_of(folder), "train", **dirs)
    config = plan_run(config_of("folder", name_of(folder))).config
    assert re.fullmatch(rf"folder:{folder}#[0-9a-f]{{12}}", config.data.name)
    spec = lookup(name_of(folder))
    assert (config.data.mean, config.data.std) == (spec.mean, spec.std)
    write_image(folder / "eel/new.jpg", "new", 0)
    assert plan_run(config_of("folder", name_of(folder))).config.data.name != config.data.name
    for _ in range(2):  # The folder has changed; there is none.
        assert load_split(config.data.name, "train", **dirs).class_names == tuple(COUNTS)
        shutil.rmtree(folder, ignore_errors=True)
    with pytest.raises(ExperimentError, match="no longer has the files of folder_"):
        load_split(config.data.name, "train", data_dir=tmp_path / "elsewhere")


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
    for preset in ("folder-few-shot", "icons-margin"):
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
    assert share_images(name, inside)
    assert not share_images(name, name_of(put(tmp_path / "others", COUNTS)))


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
    picture.rotate(180).convert("P").save(folder / "ant/palette.gif")
    (folder / "notes.txt").write_text("beside the classes")
    (folder / "empty").mkdir()
    shutil.copy(folder / "bee/0.jpg", folder / "bee/copy.jpg")
    write_image(folder / _NFC / "a.png", "a", 0)
    write_image(folder / _NFD / "b.png", "b", 1)


def test_odd_files_are_taken_or_counted(dirs, tmp_path, capsys):
    folder = put(tmp_path / "pets", COUNTS)
    _odd_kinds(folder)
    expected = COUNTS | {"ant": 8, "bee": 7, _NFC: 2}
    assert found(name_of(folder))["train"] == expected
    loaded = load_split(name_of(folder), "train", **dirs)
    assert loaded.images.pixels.shape == (27, 100, 200, 3)
    assert main(["datasets", name_of(folder)]) == 0
    text = capsys.readouterr().out
    assert "27 images, 2 (café) to 8 (ant) of a class" in text
    assert "left out 1 file without an image: notes.txt" in text
    assert "left out 1 folder without images: empty" in text
    assert (
        "copies that may be in training and in test: 1, such as bee/copy.jpg of bee/0.jpg" in text
    )


_LINKS = ("eel", "eel and more")


def _linked(folder: Path) -> None:
    """Links to the inside, which count, and to the outside."""
    secret = put(folder.parent / "secret", {"dir": 3})
    (folder / "ant/again.jpg").symlink_to("../bee/0.jpg")
    (folder / "ant/more").symlink_to(folder / "cat", target_is_directory=True)
    (folder / "ant/out.jpg").symlink_to(secret / "dir/0.jpg")
    (folder / "bee/up").symlink_to("../../secret/dir")
    (folder / "eel").symlink_to(secret / "dir")
    (folder / "eel and more").symlink_to("/")


def test_links_out_of_the_folder_are_left_out(tmp_path, capsys):
    folder = put(tmp_path / "pets", COUNTS)
    _linked(folder)
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link"):
        assert found(name_of(path))["train"] == COUNTS | {"ant": 10}
        assert main(["datasets", name_of(path)]) == 0
        line = "left out 4 links out of the folder, to be copied into it: ant/out.jpg, bee/up, eel"
        assert line in capsys.readouterr().out


LINKS = "ant/0.jpg,a\nant/out.jpg,b\n../secret/dir/0.jpg,b\n/etc/passwd,c\neel/0.jpg,b\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: _keep("ant", *_LINKS)(f), r"one class only, 'ant'.*left out 3 links out of"),
        (lambda f: _keep(*_LINKS)(f), r"no images but behind 2 links .* such as eel; copy the"),
        (
            lambda f: (f / "train").symlink_to("../secret"),
            "train is a link out of the folder; copy",
        ),
        (
            lambda f: (f / "labels.csv").symlink_to("../l"),
            r"labels\.csv is a link out of the folder",
        ),
        (
            lambda f: write_csv(f, "label", *LINKS.split()),
            r"lists 4 files .*: 'ant/out\.jpg' in lin",
        ),
    ],
)
def test_a_folder_of_links_out_of_it_is_refused(tmp_path, change, message):
    folder = put(tmp_path / "pets", COUNTS)
    (tmp_path / "l").write_text("file,label\nant/0.jpg,a\nant/1.jpg,b\n")
    _linked(folder)
    change(folder)
    with pytest.raises(ExperimentError, match=message):
        found(name_of(folder))


def _written_again(file: Path) -> None:
    write_image(file, "other", 9)


def _into_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("change", [_written_again, Path.unlink, _into_a_pipe])
@pytest.mark.parametrize("moment", ["measured", "listed", "prepared"])
def test_an_image_that_changes_while_it_is_read_is_stored_under_no_name(
    dirs, tmp_path, monkeypatch, change, moment
):
    path = put(tmp_path / "pets", COUNTS) / "bee/3.jpg"

    changed = []

    def change_first(function):
        def run(*args, **kwargs):
            if not changed:
                changed.append(True)
                change(path)
            return function(*args, **kwargs)

        return run

    if moment == "prepared":
        lookup(name_of(tmp_path / "pets"))
        monkeypatch.setattr(preparation, "encode", change_first(preparation.encode))
    else:
        called = "_mean_and_deviation" if moment == "measured" else "_measure"
        monkeypatch.setattr(folders, called, change_first(getattr(folders, called)))
    message = r"bee/3\.jpg has changed while the images were read; run"
    with pytest.raises(ExperimentError, match=message):
        load_split(name_of(tmp_path / "pets"), "train", **dirs)
    assert not [p for p in dirs["data_dir"].rglob("*") if p.is_file() and p.name != ".lock"]
    monkeypatch.undo()
    loaded = load_split(name_of(tmp_path / "pets"), "train", **dirs)
    assert len(loaded.labels) == 20 - (change is not _written_again)


@pytest.mark.parametrize(
    "name", ["画" * 83, "--<b>a|b`$x$`*[c]'\"\\", "a#0123456789ab", "a\u202eb  {0}"]
)
def test_names_of_files_are_short_and_plain_whatever_the_folder_is_called(tmp_path, name):
    folder = put(tmp_path / "pets", COUNTS).rename(tmp_path / name)
    short = short_name(name_of(folder))
    assert len(f"linear-{short}-protocol.json.partial".encode()) < 160
    assert re.fullmatch(r"[^ ()<>|`$*\[\]{}\"'\\:?#%&\n\r\u2028\x00/]+-[0-9a-f]{12}", short)
    assert short_name(pinned(name_of(folder))) == short


def test_a_folder_whose_path_is_no_plain_text_is_refused(tmp_path):
    put(tmp_path / "a\n\x1b", COUNTS)
    with pytest.raises(ExperimentError, match=r"a\\n\\x1b has control characters in its path"):
        found(name_of(tmp_path / "a\n\x1b"))
    put(tmp_path / "pets", COUNTS).rename(tmp_path / os.fsdecode(b"caf\xe9"))
    with pytest.raises(ExperimentError, match=r"the folder /.*/caf\\xe9 is not UTF-8, which"):
        found(name_of(tmp_path / os.fsdecode(b"caf\xe9")))


def _edited(**change):
    def edit(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return edit


DAMAGED_FACTS = {
    "no JSON": lambda path: path.write_bytes(b"\xff{"),
    "nested": lambda path: path.write_text("[" * 100_000),
    "a list": lambda path: path.write_text("[]"),
    "a pipe": _into_a_pipe,
    "another entry": _edited(more=1),
    "another number": _edited(side=29),
    "another hash": _edited(content="../../etc"),
}


@pytest.mark.parametrize("damage", DAMAGED_FACTS.values(), ids=DAMAGED_FACTS)
def test_damaged_facts_are_measured_again(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = name_of(put(tmp_path / "pets", COUNTS))
    before = lookup(name)
    (path,) = cache_folder("folders").glob("at-*.json")
    text = path.read_text()
    damage(path)
    folders._examine.cache_clear()
    again = lookup(name)
    assert (again.name, again.mean, again.details) == (before.name, before.mean, before.details)
    assert path.read_text() == text


def remarks(folder: Path | str) -> tuple[str, ...]:
    return lookup(f"folder:{folder}").remarks


def test_transparent_images_are_stored_on_the_colour_of_the_name(dirs, tmp_path):
    folder = tmp_path / "drawings"
    for number in range(6):  # Black on transparent black; the last ones are opaque.
        pixels = np.zeros((20, 20, 4), np.uint8)
        pixels[number : number + 5, :, 3] = 255
        pixels[..., 3] |= 255 * (number > 3)
        place = folder / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number}.{'gif' if number == 2 else 'png'}")
    stored = {}
    for colour, seen in {"": 255, "@black": 0, "@#00ff00": (0, 255, 0)}.items():
        name = f"{name_of(folder)}{colour}"
        (first, *_) = remarks(f"{folder}{colour}")
        assert first.startswith(f"transparent images: 4, laid on {colour[1:] or 'white'}")
        loaded = load_split(name, "train", **dirs)
        stored[colour] = lookup(name).name
        if colour == "@black":
            assert not loaded.images.pixels.any()
            continue
        images = loaded.images.pixels[:, :20, :20]
        assert {int((image != 0).any(-1).sum()) for image in images[:2]} == {300}
        assert (images[0][15:] == seen).all()
        assert not images[0][:5].any()
        spec = lookup(name)
        np.testing.assert_allclose(spec.mean, images.mean((0, 1, 2)) / 255, atol=1e-4)
    assert len({*stored.values()}) == 3
    white = lookup(f"{name_of(folder)}@12@white")
    assert (white.name, white.image_shape[0]) == (f"{stored['']}_at_12", 12)
    run = plan_run(config_of("folder", f"{name_of(folder)}@black")).config
    assert lookup(run.data.name).name == stored["@black"]


def test_a_colour_at_the_end_of_a_path_that_exists_is_a_part_of_it(tmp_path):
    put(tmp_path / "pets@black", COUNTS)
    assert found(f"folder:{tmp_path}/pets@black")["train"] == COUNTS
    assert found(f"folder:{tmp_path}/pets@black@16@red")["train"] == COUNTS
    with pytest.raises(ExperimentError, match="pets@blakc does not exist"):
        found(f"folder:{tmp_path}/pets@blakc")


@pytest.mark.parametrize(
    ("largest", "white"), [(4095, 4095), (1000, 1023), (70, 255), (40_000, 65535)]
)
def test_the_largest_grey_of_a_folder_says_how_many_bits_count(dirs, tmp_path, largest, white):
    levels = np.random.default_rng(0).integers(0, largest // 2, (6, 20, 20), np.uint16)
    levels[5, 0, 0] = largest
    for number, image in enumerate(levels):
        path = tmp_path / "scans" / "ab"[number % 2] / f"{number}.{'tif' if number % 3 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    lines = [f"greys of 16 bits: none is above {largest}, so {white} is white"]
    assert remarks(tmp_path / "scans") == tuple(lines if white < 65535 else [])
    images = load_split(name_of(tmp_path / "scans"), "train", **dirs).images.pixels[:, :20, :20, 0]
    expected = np.floor(levels[[0, 2, 4, 1, 3, 5]] * (255 / white) + 0.5)
    np.testing.assert_array_equal(images, expected)


# --- Names that are nearly the same -------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [("Cat", "cat"), ("sea  lion", "Sea lion"), ("CAFE\u0301", "café")],
)
@pytest.mark.parametrize("more", [{}, {"dog": 3}])
@pytest.mark.parametrize("kind", ["folders", "label", "labels"])
def test_one_class_with_two_names_is_an_error_that_has_both(tmp_path, first, second, more, kind):
    folder = tmp_path / "pets"
    put(folder / "train", {first: 3, "emu": 3} | more)
    put(folder / "test", {second: 3} | more | ({} if more else {"owl": 3}))
    if kind != "folders":
        write_csv(folder, kind)
    first, second = (unicodedata.normalize("NFC", name) for name in (first, second))
    with pytest.raises(ExperimentError) as error:
        found(name_of(folder))
    assert {first, second} <= {*re.findall("'(.+?)'", str(error.value))}


def test_spaces_at_the_end_are_an_error_in_folders_and_nothing_in_cells(tmp_path):
    folder = put(tmp_path / "pets/train", {"cat": 2, "dog": 2}).parent
    put(folder / "test", {"cat ": 2, "dog": 2})
    with pytest.raises(ExperimentError, match="'cat ' of test is 'cat'"):
        found(name_of(folder))
    rows = ["train/cat/0.jpg,cat,train", "train/dog/0.jpg,dog ,train"]
    rows += ["train/cat/1.jpg, cat\xa0,test", "train/dog/1.jpg,dog,test"]
    _csv("\n".join(["file,label,split", *rows]))(folder)
    assert found(name_of(folder)) == {
        "train": {"cat": 1, "dog": 1},
        "test": {"cat": 1, "dog": 1},
    }


def test_names_that_differ_in_case_get_one_line_where_they_may_be_two_classes(tmp_path):
    for parts, counts in {
        "letters": {".": {"A": 2, "a": 2, "b": 2, "B": 2}},
        "split": {"train": {"A": 2, "a": 2}, "test": {"A": 2, "a": 2}},
        "few": {"base": {"A": 2, "b": 2}, "novel": {"a": 2, "c": 2}},
    }.items():
        for part, of_part in counts.items():
            put(tmp_path / parts / part, of_part)
        *_, line = remarks(tmp_path / parts)
        assert "'A' and 'a'" in line
        assert ("'B' and 'b'" in line) == (parts == "letters")


# --- Copies -------------------------------------------------------------------------------------


def _copies(folder: Path) -> None:
    """Two splits, of which two test images are copies of training images."""
    put(folder / "train", {"ant": 6, "bee": 6})
    put(folder / "test", {"ant": 3, "bee": 3})
    shutil.copy(folder / "train/ant/0.jpg", folder / "test/ant/same.jpg")
    shutil.copy(folder / "train/ant/1.jpg", folder / "test/bee/other class.jpg")
    shutil.copy(folder / "train/ant/2.jpg", folder / "train/bee/no harm.jpg")


@pytest.mark.parametrize("kind", ["folders", "label", "labels"])
def test_test_images_that_are_copies_of_training_images_are_counted(tmp_path, kind):
    folder = tmp_path / "pets"
    _copies(folder)
    if kind != "folders":
        write_csv(folder, kind)
    (line,) = remarks(folder)
    assert ": 2, such as test/ant/same.jpg of train/ant/0.jpg" in line


def test_training_and_its_report_say_what_is_odd_and_which_augmentations_are_on(
    dirs, tmp_path, caplog, capsys
):
    _copies(tmp_path / "pets")
    options = {"steps": 1, "sampling.batch_size": 4, "model.widths": (4, 4, 4, 4)}
    options |= {"data.name": name_of(tmp_path / "pets"), "data.color_jitter": 0}
    options |= {"data.image_size": 16, "data.resize": 16, "data.crop_scale": ()}
    with light_backbones():
        experiments.train("folder", options, directory=tmp_path / "run", folders=Folders(**dirs))
    (line,) = remarks(tmp_path / "pets")
    assert f"data: {line}" in caplog.messages
    assert f"\n- Data: {line}.\n" in (tmp_path / "run/report.md").read_text()
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "augmentation: mirror images (--data.no-flip for none)"


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


def _bytes(content: bytes):
    return lambda folder: (folder / "labels.csv").write_bytes(content) and None


def _heic(name: str):
    content = b"\0\0\0\x18ftypheic" + bytes(40)
    return lambda folder: (folder / name).write_bytes(content) and None


def _heic_alone(folder: Path) -> None:
    for file in folder.glob("*/*.jpg"):
        file.rename(file.with_suffix(".heic"))


def _heic_in_csv(folder: Path) -> None:
    _heic("ant/9.heic")(folder)
    _csv("file,label\nant/0.jpg,x\nant/9.heic,y\n")(folder)


TYPED = "file,labels,split\nant/0.jpg,a,train\nant/1.jpg,"
ERRORS = {
    "no folder": (lambda folder: shutil.rmtree(folder), "pets does not exist"),
    "no images": (_keep(), "has no images; put the images of each class into a folder"),
    "no classes": (_without_folders, "20 beside; make a folder for each class"),
    "one class": (_keep("ant"), "images of one class only, 'ant'; add images of another"),
    "nested": (_one_folder_too_many, r"only, 'all'; for its 4 folders, set folder:.*pets/all"),
    "damaged": (_break("ant/0.jpg", "dog/1.jpg"), "2 of 20 images .*ant/0.jpg is .*dog/1.jpg is"),
    "columns": (_csv("name,label\n"), "has the columns name, label; it needs file and labels"),
    "empty": (_csv(""), r"has the columns \(none\)"),
    "absent": (_csv("file,labels\nx.jpg,a\nant/0.jpg,a\n"), "lists 1 file .*'x.jpg' in line 2"),
    "cells": (_csv("file,labels\nant/0.jpg,a,b\n"), "line 2: 3 cells for 2 columns"),
    "two classes": (
        _csv("file,label\nant/0.jpg,a\nant/0.jpg,b\n"),
        "lines 2 and 3: .* or two labels",
    ),
    "no label": (_csv("file,label\nant/0.jpg,\n"), "line 2: 'ant/0.jpg' has no label"),
    "split": (_csv(TYPED + "a,foo\n"), "line 3: .*has the split 'foo', none of train"),
    "unknown label": (_csv(TYPED + "b,test\n"), "no image of the split train has the label 'b'"),
    "only test": (_csv("file,labels,split\nant/0.jpg,a,test\n"), "has the splits test; use train"),
    "no rows": (_csv("file,labels\n"), "lists no images"),
    "one label": (_csv("file,label\nant/0.jpg,x\nant/1.jpg,x\n"), "images of one class only, 'x'"),
    "cp1252": (_bytes("file,label\nant/0.jpg,Käse".encode("cp1252")), "not.* UTF-8.*save"),
    "UTF-16": (_bytes("file,label\nant/0.jpg,Käse".encode("utf-16")), "not.* UTF-8.*save"),
    "HEIC alone": (_heic_alone, r"among 20 files, such as ant/0\.heic; convert"),
    "HEIC as JPEG": (_heic("ant/9.jpg"), "ant/9.jpg .* it is HEIC; convert it to JPEG"),
    "HEIC in a list": (_heic_in_csv, r"'ant/9.heic' in line 3 \(convert it to JPEG or PNG\)"),
}


@pytest.mark.parametrize(("change", "message"), ERRORS.values(), ids=ERRORS)
def test_an_error_is_one_line(tmp_path, capsys, change, message):
    folder = put(tmp_path / "pets", COUNTS)
    change(folder)
    assert main(["datasets", name_of(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("preset", "counts", "message"),
    [
        ("folder-few-shot", {"a": 9, "b": 9}, "has 2 classes, and few-shot evaluation needs 3"),
        ("folder", {"a": 9, "b": 9}, "set --sampling.batch-size 10, or add images"),
        ("folder", {"a": 1, "b": 9}, "class a has too few images to hold out"),
        ("folder-labels", {"a": 9, "b": 9}, "choose the preset folder"),
    ],
)
def test_what_a_preset_cannot_train_ends_in_what_to_do(
    dirs, tmp_path, capsys, preset, counts, message
):
    name = name_of(put(tmp_path / "pets", counts))
    where = ["--data-dir", str(dirs["data_dir"]), "--directory", str(tmp_path / "run")]
    assert main(["train", preset, "--data.name", name, *where]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_all_images_that_cannot_be_read_are_named_at_once(dirs, tmp_path, capsys):
    """Those for test are not measured: preparation begins."""
    put(tmp_path / "pets/train", COUNTS)
    for file in put(tmp_path / "pets/test", COUNTS | {"bee": 11}).glob("bee/*.jpg"):
        file.write_bytes(file.read_bytes()[:-30])
    data = dirs["data_dir"]
    assert main(["prepare", name_of(tmp_path / "pets"), "--data-dir", str(data)]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert "11 of 25 images cannot be read; repair or delete them: " in line
    shown = re.findall(r"test/bee/(\d+).jpg is not a readable image", line)
    assert shown == ["0", "1", "10", *"2345678"]
    assert line.endswith("; …")
    assert not [*data.glob("folder_*/*[0-9]*")]


@pytest.mark.parametrize("name", ["flowers", "./flowers", "no/flowers", "~/flowers"])
def test_a_path_in_place_of_a_data_set_is_told_its_prefix(tmp_path, monkeypatch, capsys, name):
    (tmp_path / "flowers").mkdir()  # `flowers102` is the nearest data set.
    monkeypatch.chdir(tmp_path)
    assert main(["datasets", name]) == 2
    assert f"images of your own, set folder:{name}" in capsys.readouterr().err


# --- CSV files ----------------------------------------------------------------------------------


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
        lookup(name_of(folder)).details
    )
    plan = plan_run(config_of("folder-labels", name_of(folder)))
    with pytest.raises(ExperimentError, match="batch_size = 32 must be at most 5"):
        prepare_and_count(plan, Folders(**dirs))
    protocol = plan.protocol
    shown = [protocol.load(Folders(**dirs), split) for split in ("train", "validation", "test")]
    assert [len(part.labels) for part in shown] == [5, 1, 3]
    seen = np.concatenate([part.labels for part in shown])
    assert sorted(map(bytes, seen)) == sorted(map(bytes, np.array(expected, np.int8)))


def test_every_label_has_a_training_image(dirs, tmp_path, caplog):
    folder = put(tmp_path / "pets", {"a": 40})
    rows = [f"a/{i}.jpg,{'red' if i % 2 else 'blue'}|rare {i // 2}" for i in range(40)]
    _csv("\n".join(["file,labels", *rows]))(folder)
    config = config_of("folder-labels", name_of(folder))
    counts = prepare_and_count(
        plan_run(replace(config, sampling=replace(config.sampling, batch_size=4))), Folders(**dirs)
    )
    assert counts["train"].min() >= 1
    every = np.sum([*counts.values()], axis=0)
    assert sorted(every.tolist()) == [2] * 20 + [20, 20]
    assert counts["test"].sum() > 12
    absent = int((counts["test"] == 0).sum())
    assert f"{absent} labels have no test image" in caplog.messages


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


def test_a_column_that_becomes_one_of_labels_is_measured_anew(tmp_path):
    folder = put(tmp_path / "pets", {"a": 4})
    for column in ("label", "labels"):
        rows = (f"a/{i}.jpg,{'xxyy'[i]}" for i in range(4))
        (folder / "labels.csv").write_text("\n".join([f"file,{column}", *rows]))
        assert lookup(name_of(folder)).multi_label == (column == "labels")
