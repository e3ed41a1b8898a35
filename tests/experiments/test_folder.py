"""Images of one's own: class folders, splits, CSV files, and what is odd in them."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import unicodedata
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import experiments
from experiments.assembly import plan_run, prepare_and_count
from experiments.cli.main import main
from experiments.config import Folders
from experiments.data import builders
from experiments.data.builders import base
from experiments.data.builders import folder as folders
from experiments.data.builders.folder import parse
from experiments.data.pipeline import load_labels, load_split
from experiments.errors import ExperimentError
from experiments.presets import PRESETS
from experiments.protocols import build_protocol
from experiments.storage import cache_folder
from experiments.trained_on import seen_in_training
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
    picture.rotate(180).convert("P").save(folder / "ant/palette.gif")
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


def _only_links(folder: Path) -> None:
    for name in COUNTS:
        shutil.rmtree(folder / name)
        (folder / name).symlink_to(folder.parent / "secret/dir")


def _one_class_is_a_link(folder: Path) -> None:
    for name in [*COUNTS][1:]:
        shutil.rmtree(folder / name)


def _linked_split(folder: Path) -> None:
    (folder / "train").symlink_to(folder.parent / "secret")


def _linked_labels(folder: Path) -> None:
    (folder.parent / "labels").write_text("file,label\nant/0.jpg,a\nant/1.jpg,b\n")
    (folder / "labels.csv").symlink_to("../labels")


def _listed_links(folder: Path) -> None:
    rows = "ant/0.jpg,a\nant/out.jpg,b\n../secret/dir/0.jpg,b\n/etc/passwd,c\neel/0.jpg,b\n"
    (folder / "labels.csv").write_text(f"file,label\n{rows}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_one_class_is_a_link, r"one class only, 'ant'.*left out 3 links out of the folder"),
        (_only_links, r"no images but behind 6 links .* such as ant; copy the files into it"),
        (_linked_split, "train is a link out of the folder; copy it in"),
        (_linked_labels, r"labels\.csv is a link out of the folder; copy it in"),
        (_listed_links, r"lists 4 files that are not images in .*: 'ant/out\.jpg' in line 3"),
    ],
)
def test_a_folder_of_links_out_of_it_is_refused(tmp_path, change, message):
    folder = put(tmp_path / "pets", COUNTS)
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
                changed.append(change(path))
            return function(*args, **kwargs)

        return run

    if moment == "prepared":
        builders.builder_class(name_of(tmp_path / "pets"))
        monkeypatch.setattr(base, "encode", change_first(base.encode))
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


ODD_NAMES = {
    "long": "a" * 250,
    "long in three bytes": "画" * 83,
    "another direction": "a\u202eb",
    "markup": "<b>a|b<i>`$x$`*[c](d)",
    "formats": "{0} %s {pets}",
    "dash": "--help",
    "dots": "....",
    "spaces": "   ",
    "quotes": "a'b\"c\\d",
    "a hash": "a#0123456789ab",
}


@pytest.mark.parametrize("name", ODD_NAMES.values(), ids=ODD_NAMES)
def test_names_of_files_are_short_and_plain_whatever_the_folder_is_called(tmp_path, name):
    folder = put(tmp_path / "pets", COUNTS).rename(tmp_path / name)
    short = builders.short_name(name_of(folder))
    assert len(f"linear-{short}-protocol.json.partial".encode()) < 160
    start, _, content = short.rpartition("-")
    assert re.fullmatch(r"[^ ()<>|`$*\[\]{}\"'\\:?#%&\n\r\u2028\x00/]+", start)
    assert re.fullmatch("[0-9a-f]{12}", content)
    assert builders.short_name(builders.pinned(name_of(folder))) == short
    other = builders.short_name(name_of(put(tmp_path / "my pets", COUNTS)))
    assert other.startswith("my_pets-")


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
    "an entry less": lambda path: path.write_text(path.read_text().replace('"side"', '"mean"')),
    "NaN": _edited(mean=[float("nan")] * 3),
    "another number": _edited(side=29),
    "another hash": _edited(content="../../etc"),
}


@pytest.mark.parametrize("damage", DAMAGED_FACTS.values(), ids=DAMAGED_FACTS)
def test_damaged_facts_are_measured_again(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = name_of(put(tmp_path / "pets", COUNTS))
    facts = builders.builder_class(name).FACTS  # pyright: ignore
    (path,) = cache_folder("folders").glob("at-*.json")
    before = path.read_text()
    damage(path)
    folders._examine.cache_clear()
    again = builders.builder_class(name).FACTS  # pyright: ignore
    assert again == facts
    assert json.loads(path.read_text()) == json.loads(before)


def remarks(folder: Path | str) -> list[str]:
    return builders.builder_class(f"folder:{folder}").remarks()


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
        stored[colour] = builders.builder_class(name).name
        if colour == "@black":  # All are equal: one of each class is left.
            assert not loaded.images.pixels.any()
            assert len(loaded.labels) == 2
            continue
        images = loaded.images.pixels[:, :20, :20]
        assert {int((image != 0).any(-1).sum()) for image in images[:2]} == {300}
        assert (images[0][15:] == seen).all()
        assert not images[0][:5].any()
        spec = builders.builder_class(name).SPEC
        np.testing.assert_allclose(spec.mean, images.mean((0, 1, 2)) / 255, atol=1e-4)
    assert len({*stored.values()}) == 3
    white = builders.builder_class(f"{name_of(folder)}@12@white")
    assert (white.name, white.SPEC.image_shape[0]) == (f"{stored['']}_at_12", 12)
    run = plan_run(config_of("folder", f"{name_of(folder)}@black")).config
    assert builders.builder_class(run.data.name).name == stored["@black"]


def test_a_colour_at_the_end_of_a_path_that_exists_is_a_part_of_it(tmp_path):
    put(tmp_path / "pets@black", COUNTS)
    assert found(f"folder:{tmp_path}/pets@black")["train"] == COUNTS
    assert found(f"folder:{tmp_path}/pets@black@16@red")["train"] == COUNTS
    with pytest.raises(ExperimentError, match="pets@blakc does not exist"):
        found(f"folder:{tmp_path}/pets@blakc")


@pytest.mark.parametrize(("largest", "white"), [(4095, 4095), (1000, 1023), (70, 255)])
def test_the_largest_grey_of_a_folder_says_how_many_bits_count(dirs, tmp_path, largest, white):
    levels = np.random.default_rng(0).integers(0, largest // 2, (6, 20, 20), np.uint16)
    levels[5, 0, 0] = largest
    for number, image in enumerate(levels):
        path = tmp_path / "scans" / "ab"[number % 2] / f"{number}.{'tif' if number % 3 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    (line,) = remarks(tmp_path / "scans")
    assert re.search(rf"none is above {largest}, .* {white} is white", line)
    images = load_split(name_of(tmp_path / "scans"), "train", **dirs).images.pixels[:, :20, :20, 0]
    expected = np.floor(levels[[0, 2, 4, 1, 3, 5]] * (255 / white) + 0.5)
    np.testing.assert_array_equal(images, expected)


def test_16_bits_that_all_count_need_no_line(tmp_path):
    for number in range(4):
        path = tmp_path / "scans" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 9), 17000 * number, np.uint16)).save(path)
    assert remarks(tmp_path / "scans") == []


def test_dark_colours_of_16_bits_get_a_line(tmp_path):
    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content).to_bytes(4)
        return len(content).to_bytes(4) + kind + content + check

    header = b"".join(number.to_bytes(4) for number in (5, 4)) + b"\x10\2\0\0\0"
    for name, level in {"a/0.png": 9, "a/1.png": 4095, "b/0.png": 700, "b/1.png": 3000}.items():
        row = b"\0" + level.to_bytes(2) * 15
        parts = (
            chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row * 4)) + chunk(b"IEND", b"")
        )
        (tmp_path / "scans" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "scans" / name).write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    (line,) = remarks(tmp_path / "scans")
    assert line.startswith("colours of 16 bits: none of 4 images")


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
        files = sorted(str(file.relative_to(folder)) for file in folder.glob("*/*/*.jpg"))
        rows = (f'{file},"{file.split("/")[1]}",{file.split("/")[0]}' for file in files)
        _csv("\n".join([f"file,{kind},split", *rows]))(folder)
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


def test_splits_without_a_class_in_common_are_said_to_be_base_and_novel(tmp_path):
    put(tmp_path / "pets/train", {"ant": 2, "bee": 2})
    put(tmp_path / "pets/test", {"cat": 2})
    details = builders.builder_class(name_of(tmp_path / "pets")).details()
    assert "base and novel classes" in details[-1]


# --- Copies -------------------------------------------------------------------------------------


def _copies(folder: Path) -> None:
    """Two splits, of which five test images have the pixels of training images."""
    put(folder / "train", {"ant": 6, "bee": 6})
    put(folder / "test", {"ant": 3, "bee": 3})
    train, test = folder / "train", folder / "test"
    shutil.copy(train / "ant/0.jpg", test / "ant/same.jpg")
    shutil.copy(train / "ant/1.jpg", test / "bee/other class.jpg")
    with Image.open(train / "bee/2.jpg") as image:
        image.save(test / "bee/other format.bmp")
        exif = Image.Exif()
        exif[0x0112] = 6
        image.transpose(Image.Transpose.ROTATE_90).save(test / "bee/turned.png", exif=exif)
        changed = image.copy()
        changed.putpixel((7, 7), (1, 2, 3))
        changed.save(test / "bee/nearly.png")
        image.convert("RGBA").save(test / "bee/with alpha.png")


@pytest.mark.parametrize("kind", ["folders", "label", "labels"])
def test_test_images_that_are_copies_of_training_images_are_counted(tmp_path, kind):
    folder = tmp_path / "pets"
    _copies(folder)
    if kind != "folders":
        files = sorted(str(file.relative_to(folder)) for file in folder.glob("*/*/*"))
        rows = (f"{file},{file.split('/')[1]},{file.split('/')[0]}" for file in files)
        _csv("\n".join([f"file,{kind},split", *rows]))(folder)
    (line,) = remarks(folder)
    pair = "5, such as test/ant/same.jpg of train/ant/0.jpg"
    assert line.startswith(f"test images that are copies of train images: {pair}")


def test_equal_jpegs_are_found_among_others_of_their_size(tmp_path):
    random = np.random.default_rng(0)
    for part, name in itertools.product(("train", "test"), ("a/0", "a/1", "b/0", "b/1")):
        path = tmp_path / "pets" / part / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (24, 32, 3), np.uint8)).save(path)
    content = (tmp_path / "pets/train/a/1.jpg").read_bytes()
    comment = b"\xff\xfe\0\6more"
    (tmp_path / "pets/test/b/9.jpg").write_bytes(content[:2] + comment + content[2:])
    (line,) = remarks(tmp_path / "pets")
    assert "train images: 1, such as test/b/9.jpg of train/a/1.jpg" in line
    with Image.open(tmp_path / "pets/train/b/0.jpg") as image:
        image.save(tmp_path / "pets/test/a/9.png")
    (line,) = remarks(tmp_path / "pets")
    assert "train images: 2, such as test/a/9.png of train/b/0.jpg" in line


@pytest.mark.parametrize("several", [False, True])
def test_copies_in_a_folder_without_splits(tmp_path, several):
    folder = put(tmp_path / "pets", {"ant": 5, "bee": 5})
    shutil.copy(folder / "ant/0.jpg", folder / "bee/copy.jpg")
    with Image.open(folder / "bee/1.jpg") as image:
        image.save(folder / "bee/equal.png")
    if several:
        files = sorted(str(file.relative_to(folder)) for file in folder.glob("*/*"))
        _csv("\n".join(["file,labels", *(f"{file},{file[:3]}|pet" for file in files)]))(folder)
    assert found(name_of(folder))["train"] == {
        "ant": 5,
        "bee": 6,
        **({"pet": 11} if several else {}),
    }
    (line,) = remarks(folder)
    assert line.startswith("copies of an image with other labels")
    assert ": 1, such as bee/copy.jpg of ant/0.jpg" in line


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
    "one label": (
        _csv("file,label\nant/0.jpg,x\nant/1.jpg,x\n"),
        "images of one class only, 'x'; add images of another class",
    ),
    "cp1252": (
        _bytes("file,label\nant/0.jpg,Käse".encode("cp1252")),
        "labels.csv is not.* UTF-8.*save",
    ),
    "UTF-16": (
        _bytes("file,label\nant/0.jpg,Käse".encode("utf-16")),
        "labels.csv is not.* UTF-8.*save",
    ),
    "HEIC alone": (_heic_alone, r"has 20 files, but none is an image .* ant/0\.heic; convert"),
    "HEIC as JPEG": (_heic("ant/9.jpg"), "ant/9.jpg; .* convert 1 of them from HEIC to JPEG"),
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


def test_disjoint_splits_are_said_in_training(tmp_path):
    """A typing error in a name makes base and novel classes of them."""
    for split, names in {"train": "ab", "test": "cd"}.items():
        put(tmp_path / split, dict.fromkeys(names, 2))
    (line,) = remarks(tmp_path)
    assert "no class in common" in line


def test_size_and_colour_in_any_order_and_a_path_of_the_same_letters(tmp_path):
    for name, option in (("pics@black", "@64"), ("pics", "@#204060@64"), ("pics", "@64@BLACK")):
        (tmp_path / name).mkdir(exist_ok=True)
        own = parse(f"folder:{tmp_path / name}{option}")
        assert own.path == tmp_path / name
        assert own.size == "64"
        assert own.colour == {"@#204060@64": "#204060", "@64@BLACK": "black"}.get(option, "")


def test_a_case_that_differs_in_one_of_three_splits_is_named(tmp_path):
    for split, names in {"train": ("Cat",), "validation": ("Cat", "cat"), "test": ("cat",)}.items():
        put(tmp_path / split, dict.fromkeys((*names, "dog"), 2))
    with pytest.raises(ExperimentError, match=r"'cat' .* 'Cat'|'Cat' .* 'cat'"):
        remarks(tmp_path)
