"""Images of one's own: class folders, splits, CSV files, and what is odd in them."""

from __future__ import annotations

import re
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import experiments
from experiments.cli.main import main
from experiments.core.config import Folders
from experiments.core.errors import ExperimentError
from experiments.core.storage import cache_folder
from experiments.data.pipeline import load_labels, load_split
from experiments.datasets import base, lookup, pinned, share_images, short_name
from experiments.datasets import folder as folder_module
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


def found(folder: Path | str) -> dict[str, dict[str, int]]:
    splits = lookup(f"folder:{folder}").layouts[0].read(None)  # pyright: ignore
    return {split: of.counts() for split, of in splits.items()}


def remarks(folder: Path | str) -> tuple[str, ...]:
    return lookup(f"folder:{folder}").remarks


def csv(folder: Path, text: str, encoding: str = "utf-8") -> None:
    (folder / "labels.csv").write_text(text, encoding=encoding)


def list_in_csv(folder: Path, column: str) -> None:
    """A CSV file with a row for each `SPLIT/CLASS/NAME`."""
    files = sorted(str(file.relative_to(folder)) for file in folder.glob("*/*/*"))
    rows = (f'{file},"{file.split("/")[1]}",{file.split("/")[0]}' for file in files)
    csv(folder, "\n".join([f"file,{column},split", *rows]))


def config_of(preset: str, folder: Path, **data):
    config = PRESETS[preset].config
    return replace(config, data=replace(config.data, name=f"folder:{folder}", **data))


def test_the_prepared_data_has_the_name_of_its_content(dirs, tmp_path):
    folder = put(tmp_path / "pets", COUNTS)
    loaded = load_split(f"folder:{folder}", "train", **dirs)
    assert loaded.class_names == tuple(COUNTS)
    assert np.bincount(loaded.labels).tolist() == [*COUNTS.values()]
    (first,) = dirs["data_dir"].glob("folder_*")
    shutil.copytree(folder, tmp_path / "copy")
    assert lookup(f"folder:{tmp_path}/copy").name == first.name
    write_image(folder / "ant/new.jpg", "new", 0)
    assert len(load_split(f"folder:{folder}", "train", **dirs).labels) == 21
    assert len([*dirs["data_dir"].glob("folder_*")]) == 2


def test_a_run_keeps_to_the_content_that_it_was_trained_on(dirs, tmp_path):
    folder = put(tmp_path / "pets", COUNTS)
    load_split(f"folder:{folder}", "train", **dirs)
    data = plan_run(config_of("folder", folder)).config.data
    assert re.fullmatch(rf"folder:{folder}#[0-9a-f]{{12}}", data.name)
    spec = lookup(f"folder:{folder}")
    assert (data.mean, data.std) == (spec.mean, spec.std)
    write_image(folder / "eel/new.jpg", "new", 0)
    assert plan_run(config_of("folder", folder)).config.data.name != data.name
    for _ in range(2):  # The folder has changed; there is none.
        assert load_split(data.name, "train", **dirs).class_names == tuple(COUNTS)
        shutil.rmtree(folder, ignore_errors=True)
    with pytest.raises(ExperimentError, match="no longer has the files of folder_"):
        load_split(data.name, "train", data_dir=tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("parts", "shared", "expected"),
    [
        ("train test", True, "train test"),
        ("Train val", True, "train test"),
        ("train valid test", True, "train validation test"),
        ("train", True, "train"),
        ("base validation novel", False, "base validation novel"),
        ("train val test", False, "base validation novel"),
    ],
)
def test_splits_share_their_classes_or_hold_them_out(tmp_path, parts, shared, expected):
    counts = [{f"{name}{part * (not shared)}": 2 for name in COUNTS} for part in parts.split()]
    for part, of in zip(parts.split(), counts, strict=True):
        put(tmp_path / part, of)
    wanted = [*zip(expected.split(), counts, strict=True)]
    assert [*found(tmp_path).items()] == wanted
    list_in_csv(tmp_path, "label")
    assert [*found(tmp_path / "labels.csv").items()] == wanted


@pytest.mark.parametrize(
    ("preset", "more"), [("folder-few-shot", {}), ("icons-margin", {"holdout": 0.2})]
)
def test_few_shot_protocols_split_the_classes(dirs, tmp_path, preset, more):
    places = Folders(**dirs)
    protocol = build_protocol(config_of(preset, put(tmp_path / "pets", COUNTS), **more))
    counts = protocol.counts_by_split(places)
    base, novel = (protocol.load(places, split) for split in ("base", "novel"))
    assert sorted(counts["novel"]) == sorted(COUNTS[name] for name in novel.class_names)
    assert {*base.class_names} | {*novel.class_names} == {*COUNTS} or more
    assert counts["base"].sum() + novel.labels.size + sum(counts.get("held-out", [])) == 20


@pytest.mark.parametrize("preset", ["folder", "folder-labels"])
def test_validation_images_of_ones_own_validate(dirs, tmp_path, preset):
    folder, sizes = tmp_path / "pets", {"train": 7, "validation": 4, "test": 5}
    for part, size in sizes.items():
        put(folder / part, {"ant": size, "bee": size})
    if preset == "folder-labels":
        list_in_csv(folder, "labels")
    protocol, places = build_protocol(config_of(preset, folder)), Folders(**dirs)
    assert {split: of[0] for split, of in protocol.counts_by_split(places).items()} == sizes
    for split in sizes:
        stored = load_split(f"folder:{folder}", split, **dirs)
        mine = protocol.load(places, split)
        np.testing.assert_array_equal(mine.images.pixels[:], stored.images.pixels[:])
        np.testing.assert_array_equal(mine.labels, stored.labels)


def test_classification_tests_on_a_share_and_linear_knows_what_was_seen(dirs, tmp_path):
    folder = put(tmp_path / "pets", {"ant": 6, "bee": 6, "cat": 6, "dog": 7})
    counts = build_protocol(config_of("folder", folder)).counts_by_split(Folders(**dirs))
    assert counts["test"].tolist() == [2, 2, 2, 2]
    assert counts["validation"].tolist() == [1, 1, 1, 1]
    assert counts["train"].tolist() == [3, 3, 3, 4]
    name = f"folder:{folder}"
    assert seen_in_training(config_of("folder", folder), name) == ""
    assert "base classes" in seen_in_training(config_of("folder-few-shot", folder), name)
    inside = put(folder / "ant", {"a": 2, "b": 2})
    assert share_images(name, f"folder:{inside}")
    assert not share_images(name, f"folder:{put(tmp_path / 'others', COUNTS)}")


@pytest.mark.parametrize("preset", ["folder", "folder-few-shot", "folder-labels"])
def test_new_pictures_are_seen_as_those_of_the_data_set(dirs, tmp_path, capsys, caplog, preset):
    """The files of the test images, as new ones, have the same features, logits and nearest."""
    folder, places, several = tmp_path / "Blüten 1", Folders(**dirs), preset == "folder-labels"
    put(folder, {f"{name} ü": 12 for name in COUNTS}, size=(40, 60))
    if several:
        rows = (f"{file.relative_to(folder)},{file.parent.name}" for file in folder.glob("*/*"))
        csv(folder, "\n".join(["file,labels", *rows]))
    options: dict[str, Any] = {
        "data.name": f"folder:{folder}",
        "steps": 1,
        "model.widths": (4,) * 4,
    }
    if preset == "folder-few-shot":
        options |= {"evaluation.ways": 2, "evaluation.shots": 1, "evaluation.queries": 2}
        options |= {"evaluation.episodes": 9, "loss.name": "sce"}
    report = experiments.train(preset, options, directory=tmp_path / "run", folders=places)
    size = {"folder": 28, "folder-few-shot": 24, "folder-labels": 28}[preset]
    assert f"Batches have {size} images, not 32: there are no more." in report["notes"]
    run = experiments.load_run(tmp_path / "run")
    known = experiments.features_of(run, folders=places)
    assert known.files is not None
    if not several:
        names = [known.class_names[label] for label in known.labels]
        assert names == [Path(file).parent.name for file in known.files]
    found = experiments.features_of(run, known.files)
    np.testing.assert_array_equal(found.features, known.features)
    np.testing.assert_array_equal(found.logits(), known.logits())
    assert (found.labels == -1).all()
    assert found.labels.ndim == known.labels.ndim
    pixels = np.stack([np.asarray(Image.open(file)) for file in known.files])
    given = experiments.features_of(run, pixels)
    np.testing.assert_array_equal(given.features, found.features)
    with pytest.raises(ExperimentError, match="must be uint8"):
        experiments.features_of(run, pixels / 255)
    assert len(f"{run}{known}".splitlines()) < 10

    capsys.readouterr()
    broken = tmp_path / "no.jpg"
    broken.write_bytes(Path(known.files[0]).read_bytes()[:-99])
    command = ["predict", str(tmp_path / "run"), "--data-dir", str(dirs["data_dir"])]
    assert main([*command, str(folder / "ant ü"), known.files[0]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13
    file, _, words = lines[-1].partition(": ")
    assert file == known.files[0]
    best = run.class_names[known.logits()[0].argmax()]
    assert words.startswith("" if preset == "folder-few-shot" else best)
    assert main([*command, str(broken), known.files[0]]) == 0
    assert capsys.readouterr().out.splitlines() == lines[-1:]
    assert caplog.messages[-1].startswith(f"{broken} is not a readable image: ")
    for files in ([broken], [broken, tmp_path / "none.png"]):
        assert main([*command, *map(str, files)]) == 2
        assert "no.jpg is not" in capsys.readouterr().err + caplog.text
    with pytest.raises(ExperimentError, match=r"no\.jpg is not a readable image"):
        experiments.features_of(run, [known.files[0], broken])


# --- Odd folders --------------------------------------------------------------------------------

_NFC, _NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


def test_odd_files_are_taken_or_counted(tmp_path, capsys):
    folder = put(tmp_path / "pets", COUNTS)
    write_image(folder / "ant/more/deep.webp", "deep", 0)
    (folder / "notes.txt").write_text("beside the classes")
    (folder / "ant" / "b.HEIC").touch()
    (folder / "empty").mkdir()
    shutil.copy(folder / "bee/0.jpg", folder / "bee/copy.jpg")
    write_image(folder / _NFC / "a.png", "a", 0)
    write_image(folder / _NFD / "b.png", "b", 1)
    assert found(folder)["train"] == COUNTS | {"ant": 5, "bee": 7, _NFC: 2}
    assert main(["datasets", f"folder:{folder}"]) == 0
    text = capsys.readouterr().out
    assert "24 images, 2 (café) to 7 (bee) of a class or label" in text
    line = "left out 2 files of other kinds: ant/b.HEIC, notes.txt; convert .heic to JPEG or PNG"
    assert line in text
    assert line in remarks(folder)  # Which training and its report print.
    assert "left out 1 folder without images: empty" in text
    assert ": 1, such as bee/copy.jpg of bee/0.jpg" in text


@pytest.mark.parametrize("kind", ["folders", "label", "labels"])
def test_damaged_images_are_left_out_and_named(dirs, tmp_path, caplog, capsys, kind):
    """One of each kind of damage, one class that has no other image, and seven in all."""
    folder, name = (
        put(tmp_path / "pets", COUNTS | {"eel": 4}, (300, 200)),
        f"folder:{tmp_path}/pets",
    )
    if kind != "folders":
        files = sorted(str(file.relative_to(folder)) for file in folder.glob("*/*"))
        csv(folder, "\n".join([f"file,{kind}", *(f"{file},{file[:3]}" for file in files)]))
    (folder / "ant/0.jpg").write_bytes((folder / "ant/0.jpg").read_bytes()[:-400])
    (folder / "bee/1.jpg").write_bytes(b"")
    (folder / "bee/2.jpg").write_text("a text")
    for file in (folder / "eel").iterdir():
        file.write_bytes(b"no image")
    left, damaged, lost = {"ant": 3, "bee": 4, "cat": 5, "dog": 5}, "", ""
    for _ in range(2):  # Measured, then from the cache.
        assert found(folder) == {"train": left}
        damaged, lost = remarks(folder)[:2]
        start = "left out 7 damaged images: ant/0.jpg (OSError: image file is truncated"
        assert damaged.startswith(start)
        assert re.findall(r"(\w+/\d).jpg \(c", damaged) == ["bee/1", "bee/2", "eel/0", "eel/1"]
        assert damaged.endswith(", …")
        assert lost == "left out eel: none of their images can be read"
        folder_module._examine_again.cache_clear()
    loaded = load_split(name, "train", **dirs)
    assert loaded.class_names == tuple(left)
    assert loaded.files is not None
    assert [Path(file).parent.name for file in loaded.files] == np.repeat(
        [*left], [*left.values()]
    ).tolist()
    assert main(["datasets", name]) == 0
    assert f"  {damaged}\n  {lost}\n" in capsys.readouterr().out
    for kept, message in {
        "cat": "one class only, 'cat'",
        "-": "no image of the split train",
    }.items():
        for file in folder.glob(f"[!{kept[0]}]*/*.jpg"):
            file.write_bytes(b"no image")
        folder_module._examine_again.cache_clear()
        if kind != "labels" or kept == "-":
            with pytest.raises(
                ExperimentError, match=rf"^left out \d+ damaged .*them, .*{message}"
            ):
                found(folder)


@pytest.mark.parametrize("change", [lambda file: write_image(file, "other", 9), Path.unlink])
@pytest.mark.parametrize("moment", ["measured", "prepared"])
def test_an_image_that_changes_while_it_is_read_is_stored_under_no_name(
    dirs, tmp_path, monkeypatch, change, moment
):
    name = f"folder:{put(tmp_path / 'pets', COUNTS)}"
    module = {"measured": folder_module, "prepared": base}[moment]
    encode, changed = module.encode, []

    def change_first(*args, **kwargs):
        content = encode(*args, **kwargs)
        if not changed:
            changed.append(True)
            change(tmp_path / "pets/bee/3.jpg")
        return content

    if moment == "prepared":
        lookup(name)
    monkeypatch.setattr(module, "encode", change_first)
    with pytest.raises(ExperimentError, match=r"has changed while it was read|3\.jpg"):
        load_split(name, "train", **dirs)
    assert not [*dirs["data_dir"].glob("folder_*/*.*.*")]
    monkeypatch.undo()
    assert len(load_split(name, "train", **dirs).labels) == 20 - (change is Path.unlink)


@pytest.mark.parametrize("name", ["画" * 83, "--<b>a|b`$x$`*[c]'\"\\", "a#0123456789ab"])
def test_names_of_files_are_short_and_plain_whatever_the_folder_is_called(tmp_path, name):
    folder = put(tmp_path / "pets", COUNTS).rename(tmp_path / name)
    short = short_name(f"folder:{folder}")
    assert len(short.encode()) < 120
    assert re.fullmatch(r"[^ ()<>|`$*\[\]{}\"'\\:?#%&/]+-[0-9a-f]{12}", short)
    assert short_name(pinned(f"folder:{folder}")) == short


def test_what_is_measured_is_kept_and_damaged_files_of_it_are_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = f"folder:{put(tmp_path / 'pets', COUNTS)}"
    before = lookup(name)
    files = [*cache_folder("folders").glob("*.json")]
    folder_module._examine_again.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "_measure", None)
        assert lookup(name).details == before.details
    for content in ("[", "[]", '{"content": "a"}'):
        for file in files:
            file.write_text(content)
        folder_module._examine_again.cache_clear()
        assert lookup(name).details == before.details


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
        spec = lookup(f"folder:{folder}{colour}")
        stored[colour] = spec.name
        assert spec.remarks[0].startswith(f"transparent images: 4, laid on {colour[1:] or 'white'}")
        images = load_split(f"folder:{folder}{colour}", "train", **dirs).images.pixels
        assert (images[0][15:20, :20] == seen).all()
        assert not images[0][:5].any()
        np.testing.assert_allclose(spec.mean, images[:, :20, :20].mean((0, 1, 2)) / 255, atol=1e-4)
    assert len({*stored.values()}) == 3
    white = lookup(f"folder:{folder}@12@white")
    assert (white.name, white.image_shape[0]) == (f"{stored['']}_at_12", 12)
    run = plan_run(config_of("folder", Path(f"{folder}@black"))).config
    assert lookup(run.data.name).name == stored["@black"]


def test_a_colour_at_the_end_of_a_path_that_exists_is_a_part_of_it(tmp_path):
    put(tmp_path / "pets@black", COUNTS)
    assert found(f"{tmp_path}/pets@black")["train"] == COUNTS
    assert found(f"{tmp_path}/pets@black@16@red")["train"] == COUNTS
    with pytest.raises(ExperimentError, match="pets@blakc does not exist"):
        found(f"{tmp_path}/pets@blakc")


@pytest.mark.parametrize(("largest", "white"), [(4095, 4095), (1000, 1023), (40_000, 65535)])
def test_the_largest_grey_of_a_folder_says_how_many_bits_count(dirs, tmp_path, largest, white):
    levels = np.random.default_rng(0).integers(0, largest // 2, (6, 20, 20), np.uint16)
    levels[5, 0, 0] = largest
    for number, image in enumerate(levels):
        path = tmp_path / "scans" / "ab"[number % 2] / f"{number}.{'tif' if number % 3 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    lines = [f"greys of 16 bits: none is above {largest}, so {white} is white"]
    assert remarks(tmp_path / "scans") == tuple(lines if white < 65535 else [])
    images = load_split(f"folder:{tmp_path}/scans", "train", **dirs).images.pixels
    assert images.shape[-1] == 1
    expected = np.floor(levels[[0, 2, 4, 1, 3, 5]] * (255 / white) + 0.5)
    np.testing.assert_array_equal(images[:, :20, :20, 0], expected)


@pytest.mark.parametrize(
    ("first", "second"), [("Cat", "cat"), ("sea  lion", "Sea lion"), ("CAFE\u0301", "café")]
)
@pytest.mark.parametrize("kind", ["folders", "label", "labels"])
def test_one_class_with_two_names_is_an_error_that_has_both(tmp_path, first, second, kind):
    put(tmp_path / "train", {first: 3, "emu": 3, "dog": 3})
    put(tmp_path / "test", {second: 3, "dog": 3})
    if kind != "folders":
        list_in_csv(tmp_path, kind)
    first, second = (unicodedata.normalize("NFC", name) for name in (first, second))
    with pytest.raises(ExperimentError) as error:
        found(tmp_path)
    assert {first, second} <= {*re.findall("'(.+?)'", str(error.value))}


def test_names_that_differ_in_case_get_one_line_where_they_may_be_two_classes(tmp_path):
    letters, few = tmp_path / "letters", tmp_path / "few"
    put(letters, {"A": 2, "a": 2, "b": 2, "B": 2})
    put(few / "base", {"A": 2, "b": 2})
    put(few / "novel", {"a": 2, "c": 2})
    for folder in (letters, few):
        *_, line = remarks(folder)
        assert "'A' and 'a'" in line
        assert ("'B' and 'b'" in line) == (folder == letters)


@pytest.mark.parametrize("kind", ["folders", "label", "labels"])
def test_training_and_its_report_say_what_is_odd(dirs, tmp_path, caplog, capsys, kind):
    """Two test images are copies of training images."""
    folder = tmp_path / "pets"
    put(folder / "train", {"ant": 6, "bee": 6})
    put(folder / "test", {"ant": 3, "bee": 3})
    for number, copy in enumerate(("test/ant/same", "test/bee/other class", "train/bee/no harm")):
        shutil.copy(folder / f"train/ant/{number}.jpg", folder / f"{copy}.jpg")
    if kind != "folders":
        list_in_csv(folder, kind)
    (line,) = remarks(folder)
    assert ": 2, such as test/ant/same.jpg of train/ant/0.jpg" in line
    if kind != "folders":
        return
    options = {"steps": 1, "sampling.batch_size": 4, "model.widths": (4, 4, 4, 4)}
    options |= {"data.name": f"folder:{folder}", "data.color_jitter": 0}
    options |= {"data.image_size": 16, "data.resize": 16, "data.crop_scale": ()}
    with light_backbones():
        experiments.train("folder", options, directory=tmp_path / "run", folders=Folders(**dirs))
    assert f"data: {line}" in caplog.messages
    assert f"\n- Data: {line}.\n" in (tmp_path / "run/report.md").read_text()
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "augmentation: mirror images (--data.no-flip for none)"


# --- CSV files ----------------------------------------------------------------------------------


def test_a_file_of_several_labels(dirs, tmp_path):
    folder, rows = put(tmp_path / "pets", {"a": 10}), []
    for i in range(9):
        rows.append(f'a/{i}.jpg,"{("red", "red, round", "round|small")[i % 3]}"')
    rows += ["a/0.jpg,small", "a\\8.jpg,"]  # A file may have several lines.
    csv(folder, "\ufefffile,labels\n" + "\n".join(rows))
    targets, _ = load_labels(f"folder:{folder}", "train", **dirs)
    expected = [[1, 0, 0], [1, 1, 0], [0, 1, 1]] * 3
    expected[0] = [1, 0, 1]
    np.testing.assert_array_equal(targets, expected)
    details = "".join(lookup(f"folder:{folder}").details)
    assert "1 image that labels.csv does not list: a/9.jpg" in details
    protocol, places = build_protocol(config_of("folder-labels", folder)), Folders(**dirs)
    shown = [protocol.load(places, split).labels for split in ("train", "validation", "test")]
    assert [*map(len, shown)] == [5, 1, 3]
    seen = np.concatenate(shown)
    assert sorted(map(bytes, seen)) == sorted(map(bytes, np.array(expected, np.int8)))


def test_every_label_has_a_training_image(dirs, tmp_path, caplog):
    folder = put(tmp_path / "pets", {"a": 40})
    rows = [f"a/{i}.jpg,{'red' if i % 2 else 'blue'}|rare {i // 2}" for i in range(40)]
    csv(folder, "\n".join(["file,labels", *rows]))
    config = config_of("folder-labels", folder)
    counts = prepare_and_count(
        plan_run(replace(config, sampling=replace(config.sampling, batch_size=4))), Folders(**dirs)
    )
    assert counts["train"].min() >= 1
    assert sorted(np.sum([*counts.values()], axis=0).tolist()) == [2] * 20 + [20, 20]
    absent = int((counts["test"] == 0).sum())
    assert f"{absent} labels have no test image" in caplog.messages


def test_test_images_of_several_labels_may_have_none(tmp_path):
    put(tmp_path, {"a": 4})
    rows = ("file,labels,split", "a/0.jpg,x,train", "a/1.jpg,x|y,train", "a/2.jpg,,test")
    csv(tmp_path, "\n".join(rows))
    assert found(tmp_path) == {"train": {"x": 2, "y": 1}, "test": {"x": 0, "y": 0}}


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_cells_and_their_delimiters(tmp_path, delimiter):
    folder, rows = put(tmp_path / "pets", {"a": 8}), ["file,label,split"]
    rows += [f"a/{i}.jpg, {'xy'[i % 2]} z\xa0,{'train' if i < 4 else 'val'}" for i in range(8)]
    csv(folder, "\n".join(rows).replace(",", delimiter))
    assert found(folder / "labels.csv") == {s: {"x z": 2, "y z": 2} for s in ("train", "test")}


def test_a_column_that_becomes_one_of_labels_is_measured_anew(tmp_path):
    folder = put(tmp_path / "pets", {"a": 4})
    for column in ("label", "labels"):
        csv(folder, "\n".join([f"file,{column}", *(f"a/{i}.jpg,{'xxyy'[i]}" for i in range(4))]))
        assert lookup(f"folder:{folder}").multi_label == (column == "labels")


# --- Errors -------------------------------------------------------------------------------------


def _only(*names: str):
    def change(folder: Path) -> None:
        for path in folder.iterdir():
            if path.name not in names:
                shutil.rmtree(path)

    return change


def _renamed(**names: str):
    def change(folder: Path) -> None:
        for old, new in names.items():
            (folder / old).rename(folder / new)

    return change


def _csv(text: str, encoding: str = "utf-8"):
    return lambda folder: csv(folder, text, encoding)


TYPED = "file,labels,split\nant/0.jpg,a,train\nant/1.jpg,"
ERRORS = {
    "no folder": (shutil.rmtree, "pets does not exist"),
    "no images": (_only(), "has no folder of images; put the images of each class"),
    "one class": (_only("ant"), "images of one class only, 'ant'; add images of another"),
    "two trains": (_renamed(ant="train", bee="training"), "has both train and training"),
    "control": (_renamed(ant="a\nb"), r"a\\nb .*rename it"),
    "columns": (_csv("name,label\n"), "has the columns name, label; it needs file and labels"),
    "empty": (_csv(""), r"has the columns \(none\)"),
    "absent": (_csv("file,labels\nx.jpg,a\nant/0.jpg,a\n"), "lists 1 file.*'x.jpg' in line 2"),
    "elsewhere": (_csv("file,labels\n../x.jpg,a\n/etc/passwd,b\n"), "lists 2 files of which"),
    "cells": (_csv("file,labels\nant/0.jpg,a,b\n"), "line 2: 3 cells for 2 columns"),
    "two labels": (_csv("file,label\nant/0.jpg,a\nant/0.jpg,b\n"), "line 3: .* or two labels"),
    "no label": (_csv("file,label\nant/0.jpg,\n"), "line 2: 'ant/0.jpg' has no label"),
    "split": (_csv(TYPED + "a,foo\n"), "line 3: .*has the split 'foo', none of train"),
    "unknown label": (_csv(TYPED + "b,test\n"), "no image of the split train has the label 'b'"),
    "only test": (_csv("file,labels,split\nant/0.jpg,a,test\n"), "has the splits test; use train"),
    "cp1252": (_csv("file,label\nant/0.jpg,Käse", "cp1252"), "save it as UTF-8"),
    "UTF-16": (_csv("file,label\nant/0.jpg,Käse", "utf-16"), "UTF-8"),
}


@pytest.mark.parametrize(("change", "message"), ERRORS.values(), ids=ERRORS)
def test_an_error_is_one_line(tmp_path, capsys, change, message):
    folder = put(tmp_path / "pets", COUNTS)
    change(folder)
    assert main(["datasets", f"folder:{folder}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("preset", "counts", "message"),
    [
        ("folder-few-shot", {"a": 9, "b": 9}, "needs at least four classes, two base"),
        ("folder-few-shot", dict.fromkeys("abcdefg", 20), "pass --evaluation.ways 3, or a smaller"),
        ("folder", {"a": 1, "b": 9}, "class a has too few images to hold out"),
        ("folder-labels", {"a": 9, "b": 9}, "choose the preset folder"),
    ],
)
def test_what_a_preset_cannot_train_ends_in_what_to_do(dirs, tmp_path, preset, counts, message):
    put(tmp_path / "pets", counts)
    with pytest.raises(ExperimentError, match=message):
        prepare_and_count(plan_run(config_of(preset, tmp_path / "pets")), Folders(**dirs))


@pytest.mark.parametrize("name", ["flowers", "no/flowers"])
def test_a_path_in_place_of_a_data_set_is_told_its_prefix(tmp_path, monkeypatch, name):
    (tmp_path / "flowers").mkdir()  # `flowers102` is the nearest data set.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExperimentError, match=f"images of your own, set folder:{name}"):
        lookup(name)
