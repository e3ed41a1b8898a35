import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from experiments.data import builders
from experiments.data.builders import base
from experiments.data.builders.archives import MissingArchiveError
from experiments.data.builders.images import Encoding, SourceImage, encode
from experiments.data.pipeline import load_split
from tests.experiments import fake_archives
from tests.experiments.fake_archives import decode

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dirs(tmp_path):
    return {"data_dir": tmp_path / "data", "manual_dir": tmp_path / "manual"}


def test_a_missing_list_is_named(dirs):
    """No rule takes the place of two of three lists."""
    fake_archives.cub_archive(dirs["manual_dir"])
    (dirs["manual_dir"] / "val.json").unlink()
    with pytest.raises(MissingArchiveError, match=r"base\.json exists, but not val\."):
        load_split("cub_fewshot", "base", **dirs)
    # No record file, and nothing half-done, is in the data directory.
    assert not [p for p in dirs["data_dir"].rglob("*") if p.is_file() and p.name != ".lock"]


def test_a_killed_preparation_is_not_taken_for_data(dirs):
    fake_archives.mini_imagenet_folder(dirs["manual_dir"])
    # The second split waits until the process is killed.
    script = """
        import sys, time
        from pathlib import Path
        from experiments.data.builders import base, images
        from experiments.data.pipeline import load_split

        def encode(picture, *args, **kwargs):
            if "n02950826" in picture.source:
                # In one piece: print writes the line end apart, and threads meet here.
                sys.stdout.write("now\\n")
                sys.stdout.flush()
                time.sleep(60)
            return images.encode(picture, *args, **kwargs)

        base.encode = encode
        data_dir, manual_dir = map(Path, sys.argv[1:])
        load_split("mini_imagenet", "base", data_dir=data_dir, manual_dir=manual_dir)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, dirs.values())],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    folder = dirs["data_dir"] / "mini_imagenet"
    assert list(folder.glob("incomplete.*"))
    assert not builders.describe("mini_imagenet", **dirs).ready
    assert len(load_split("mini_imagenet", "novel", **dirs).labels) == 3
    assert not list(folder.glob("incomplete.*"))


def test_several_record_files_keep_the_order(dirs, monkeypatch):
    monkeypatch.setattr(base, "_IMAGES_PER_FILE", 2)
    expected = fake_archives.cifar_fs_folder(dirs["manual_dir"])
    images = load_split("cifar_fs", "base", **dirs)
    files = list((dirs["data_dir"] / "cifar_fs").rglob("cifar_fs-base*"))
    assert len(files) == 3
    colours = [colour for of in expected.splits["base"].values() for colour in of]
    np.testing.assert_array_equal(images.images[:][:, 0, 0], colours)


def test_records_are_the_same_wherever_they_are_written(dirs, monkeypatch):
    fake_archives.mini_imagenet_folder(dirs["manual_dir"])
    load_split("mini_imagenet", "base", **dirs)
    # File systems list files in any order.
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(sorted(listed(self), reverse=True)))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    again = {**dirs, "data_dir": dirs["data_dir"] / "again"}
    load_split("mini_imagenet", "base", **again)
    first, second = (
        sorted((d["data_dir"] / "mini_imagenet").rglob("*.array_record*")) for d in (dirs, again)
    )
    assert [path.name for path in first] == [path.name for path in second]
    assert len(first) == 3
    assert [*map(Path.read_bytes, first)] == [*map(Path.read_bytes, second)]


def test_the_builder_works_without_the_pipeline(dirs):
    fake_archives.cifar_fs_folder(dirs["data_dir"] / "downloads" / "manual")
    builder = builders.BUILDERS["cifar_fs"](data_dir=str(dirs["data_dir"]))
    builder.download_and_prepare(file_format="array_record")
    novel = builder.as_data_source("novel")  # pyright: ignore
    assert [record["label"] for record in novel] == [3, 3, 4]
    assert builder.info.features["label"].names == [  # pyright: ignore
        *("apple", "maple_tree", "otter", "baby", "worm")
    ]
    np.testing.assert_array_equal(novel[2]["image"], fake_archives.pixels("novel worm", 0, 32))


# --- Images -------------------------------------------------------------------------------------


def test_an_image_of_the_right_size_stays_as_it_is(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (84, 84, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    for content in (pixels, tmp_path / "a.png", (tmp_path / "a.png").read_bytes()):
        np.testing.assert_array_equal(
            decode(encode(SourceImage(content, "a"), (84, 84, 3))), pixels
        )


@pytest.mark.parametrize(("height", "width"), [(168, 168), (240, 400), (500, 333), (40, 60)])
def test_another_image_is_resized_and_its_centre_cut_out(height, width):
    # Red grows from left to right and green from top to bottom, so colours are positions.
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack(
        [255 * (columns + 0.5) / width, 255 * (rows + 0.5) / height, np.zeros_like(rows)], -1
    ).astype(np.uint8)
    starts: dict[Encoding, bytes] = {"jpeg": b"\xff\xd8\xff\xe0", "png": b"\x89PNG"}
    for encoding, start in starts.items():
        content = encode(SourceImage(pixels, "a"), (84, 84, 3), encoding=encoding)
        assert content[:4] == start
        result, scale = decode(content).astype(float), 84 / min(height, width)
        assert result.shape == (84, 84, 3)
        for channel, side in ((0, width), (1, height)):
            line = result.mean(channel)[:, channel]
            positions = side * scale / 2 + np.arange(84) - 41.5
            np.testing.assert_allclose(line, 255 * positions / (side * scale), atol=4)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_any_mode_becomes_colour(tmp_path, mode):
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.new("L", (90, 100), 255).convert(mode).save(path)
    result = decode(encode(SourceImage(path, "a"), (84, 84, 3)))
    assert result.shape == (84, 84, 3)
    assert result.min() >= 254


# --- The icons ----------------------------------------------------------------------------------

ICONS = Path(builders.__file__).parent / "icons"


def test_the_icons_are_those_of_the_file(folders):
    facts = json.loads((ICONS / "icons.json").read_text(encoding="utf-8"))
    with np.load(ICONS / "icons.npz") as arrays:
        images, labels = arrays["images"], arrays["labels"]
    seen, tags = 0, {"base": ("base", 100), "validation": ("val", 29), "novel": ("novel", 50)}
    for split, (tag, count) in tags.items():
        loaded = load_split("icons", split, data_dir=folders.data_dir)
        names = [n for n, t in zip(facts["classes"], facts["split"], strict=True) if t == tag]
        assert loaded.class_names == tuple(names)
        assert len(names) == count
        own = [facts["classes"].index(name) for name in names]
        rows = np.concatenate([np.flatnonzero(labels == number) for number in own])
        np.testing.assert_array_equal(np.asarray(loaded.images[:])[..., 0], images[rows])
        np.testing.assert_array_equal(np.array(own)[loaded.labels], labels[rows])
        seen += len(rows)
    assert seen == len(labels) == 8526


def test_the_licences_are_those_of_the_file():
    facts = json.loads((ICONS / "icons.json").read_text(encoding="utf-8"))
    text = (ICONS / "LICENSES.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(facts["sets"])
    for row, entry in zip(rows, facts["sets"], strict=True):
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert cells[:3] == [entry["name"], entry["author"], entry["license"]]
        assert entry["source"] in cells[3]
        assert f"\n## {entry['license']}\n" in text


# --- Status -------------------------------------------------------------------------------------


def test_status_follows_the_data(dirs):
    fake_archives.cub_archive(dirs["manual_dir"])
    before = builders.describe("cub_fewshot", **dirs)
    assert (before.state, before.missing) == ("available", "")
    files = {"CUB_200_2011.tgz", "base.json", "val.json", "novel.json"}
    assert {path.name for path in before.found} == files
    assert str(dirs["manual_dir"] / "val.json") in str(before)
    load_split("cub_fewshot", "base", **dirs)
    after = builders.describe("cub_fewshot", **dirs)
    assert after.ready
    assert after.classes == {"base": 4, "validation": 2, "novel": 2}
    assert after.state == "prepared"
    assert after.location.is_dir()
    assert f"prepared in {after.location}" in str(after)
