"""Prepared data: written once, whole, in a fixed order; read, or refused where it is damaged."""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from experiments.data.pipeline import RecordImages, load_split
from experiments.datasets import describe, icons, lookup
from experiments.datasets.archives import DamagedArchiveError
from experiments.datasets.images import Encoding, SourceImage, encode
from experiments.datasets.preparation import prepare
from tests.experiments import fake_archives, fake_image_sets
from tests.experiments.fake_archives import decode, whole_images

ROOT = Path(__file__).parents[2]


def _script(code, *paths):
    return [sys.executable, "-c", textwrap.dedent(code), *map(str, paths)]


def test_a_killed_preparation_is_not_taken_for_data(dirs):
    fake_archives.mini_imagenet_folder(dirs["manual_dir"])
    script = """
        import os, signal, sys
        from pathlib import Path
        from experiments.datasets import lookup, preparation

        preparation.write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        data_dir, manual_dir = map(Path, sys.argv[1:])
        preparation.prepare(lookup("mini_imagenet"), data_dir=data_dir, manual_dir=manual_dir)
    """
    killed = subprocess.run(_script(script, *dirs.values()), cwd=ROOT, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    folder = dirs["data_dir"] / "mini_imagenet"
    assert list(folder.glob("incomplete.*"))
    assert not describe("mini_imagenet", **dirs).ready
    assert len(load_split("mini_imagenet", "novel", **dirs).labels) == 3
    assert not list(folder.glob("incomplete.*"))


def test_records_are_the_same_wherever_they_are_written(dirs, monkeypatch):
    fake_archives.mini_imagenet_folder(dirs["manual_dir"])
    load_split("mini_imagenet", "base", **dirs)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    again = {**dirs, "data_dir": dirs["data_dir"] / "again"}
    load_split("mini_imagenet", "base", **again)
    first, second = (
        sorted((d["data_dir"] / "mini_imagenet").rglob("*.array_record*")) for d in (dirs, again)
    )
    assert [path.name for path in first] == [path.name for path in second]
    assert [*map(Path.read_bytes, first)] == [*map(Path.read_bytes, second)]


def test_tfds_reads_what_was_prepared(dirs):
    fake_archives.cifar_fs_folder(dirs["manual_dir"])
    folder = prepare(lookup("cifar_fs"), **dirs).data_dir
    builder = tfds.builder_from_directory(folder)
    novel = builder.as_data_source("novel")  # pyright: ignore
    assert [record["label"] for record in novel] == [3, 3, 4]
    assert builder.info.features["label"].names == [  # pyright: ignore
        *("apple", "maple_tree", "otter", "baby", "worm")
    ]
    np.testing.assert_array_equal(novel[2]["image"], fake_archives.pixels("novel worm", 0, 32))
    assert {path.name for path in folder.parent.iterdir()} == {".lock", "3.0.0"}


def test_an_image_of_the_right_size_stays_as_it_is(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (84, 84, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    for content in (pixels, tmp_path / "a.png", (tmp_path / "a.png").read_bytes()):
        stored = encode(SourceImage(content, "a"), (84, 84, 3))
        np.testing.assert_array_equal(decode(stored), pixels)


@pytest.mark.parametrize(("height", "width"), [(168, 168), (240, 400), (500, 333), (40, 60)])
def test_another_image_is_resized_and_its_centre_cut_out(height, width):
    # Red grows from left to right and green from top to bottom, so colours are positions.
    rows, columns = np.mgrid[0:height, 0:width]
    channels = [(columns + 0.5) / width, (rows + 0.5) / height, 0 * rows]
    pixels = (255 * np.stack(channels, -1)).astype(np.uint8)
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


SIZES = [(90, 160), (160, 90), (48, 48)]
"""Height and width of photographs, each with a red band along every border."""
BORDERS = ("left", "right", "top", "bottom")


def marked(height: int, width: int, border: str) -> np.ndarray:
    """A black photograph with a red band along a border, an eighth of that side wide."""
    pixels = np.zeros((height, width, 3), np.uint8)
    turned = pixels if border in ("left", "right") else pixels.swapaxes(0, 1)
    eighth = turned.shape[1] // 8
    turned[:, slice(-eighth, None) if border in ("right", "bottom") else slice(eighth), 0] = 255
    return pixels


def test_photographs_are_stored_whole(dirs):
    """And read alike from memory and from records."""
    images = [marked(*size, border) for size in SIZES for border in BORDERS]
    for part, name in itertools.product(("train", "val"), ("ant", "bee")):
        folder = dirs["manual_dir"] / "food101" / part / name
        folder.mkdir(parents=True)
        for number, image in enumerate(images):
            Image.fromarray(image).save(folder / f"{number:02}.png")
    stored = load_split("food101@32", "test", **dirs).images[:]
    whole = whole_images(stored)
    expected = [size for size in ((32, 56), (56, 32), (32, 32)) for _ in BORDERS]
    assert [image.shape[:2] for image in whole] == 2 * expected
    for image, source in zip(whole, 2 * images, strict=True):
        small = Image.fromarray(source).resize(image.shape[1::-1], 2)
        assert np.abs(image.astype(int) - np.asarray(small)).mean() < 3
    beyond = load_split("food101@32", "test", memory_limit=0, **dirs).images
    for index in (np.array([5, 0, 5]), np.array([[1, 2], [3, 11]]), slice(None, None, 3), 7):
        found = beyond[index]
        np.testing.assert_array_equal(found.pixels, stored.pixels[index])
        np.testing.assert_array_equal(found.sizes, stored.sizes[index])
        assert (found.pixels.dtype, found.sizes.dtype) == (np.uint8, np.int32)


@pytest.mark.parametrize(
    ("size", "stored"),
    [
        ((500, 375), (341, 256)),
        ((375, 500), (256, 341)),
        ((1000, 500), (512, 256)),
        # Longer than 2:1: all of it is kept, at a lower resolution.
        ((3000, 500), (512, 85)),
        ((5, 3000), (1, 512)),
        ((600, 200), (512, 170)),
        # Small images keep their pixels.
        ((200, 180), (200, 180)),
    ],
)
def test_sizes_of_whole_photographs(size, stored):
    """Width and height."""
    columns, rows = np.meshgrid(*(np.linspace(0, 255, side) for side in size))
    pixels = np.stack([columns, rows, 0 * rows], -1).astype(np.uint8)
    image = decode(encode(SourceImage(pixels, "a"), (256, 256, 3), whole=True))
    assert image.shape[1::-1] == stored
    longer = int(np.argmax(size))
    line = image[:, :, longer].mean(longer)  # Along the longer side.
    assert line[0] <= 2
    assert line[-1] >= 253
    if size == stored:
        np.testing.assert_array_equal(image, pixels)


def test_the_icons_are_those_of_the_file(folders):
    facts = json.loads((icons.FOLDER / "icons.json").read_text(encoding="utf-8"))
    with np.load(icons.FOLDER / "icons.npz") as arrays:
        images, labels = arrays["images"], arrays["labels"]
    for split, tag in {"base": "base", "validation": "val", "novel": "novel"}.items():
        loaded = load_split("icons", split, data_dir=folders.data_dir)
        own = [number for number, of in enumerate(facts["split"]) if of == tag]
        assert loaded.class_names == tuple(facts["classes"][number] for number in own)
        assert len(own) == lookup("icons").classes[split]
        rows = np.concatenate([np.flatnonzero(labels == number) for number in own])
        np.testing.assert_array_equal(np.asarray(loaded.images[:])[..., 0], images[rows])
        np.testing.assert_array_equal(np.array(own)[loaded.labels], labels[rows])


def test_the_licences_are_those_of_the_file():
    facts = json.loads((icons.FOLDER / "icons.json").read_text(encoding="utf-8"))
    text = (icons.FOLDER / "LICENSES.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    for row, entry in zip(rows, facts["sets"], strict=True):
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert cells[:3] == [entry["name"], entry["author"], entry["license"]]
        assert entry["source"] in cells[3]
        assert f"\n## {entry['license']}\n" in text


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    folders = {"data_dir": folder / "data", "manual_dir": folder / "manual"}
    fake_archives.cifar_fs_folder(folders["manual_dir"])
    load_split("cifar_fs", "base", **folders)
    return folders


@pytest.mark.parametrize("rows", [None, np.array([4, 1, 2, 0])])
def test_a_split_beyond_the_limit_is_read_when_asked(cifar, rows):
    """The limit is for the images that are taken, not for all."""
    whole = load_split("cifar_fs", "base", **cifar)
    taken = np.arange(5) if rows is None else rows
    limit = len(taken) * 32 * 32 * 3
    inside, beyond = (
        load_split("cifar_fs", "base", rows=rows, memory_limit=of, **cifar)
        for of in (limit, limit - 1)
    )
    assert isinstance(inside.images, np.ndarray)
    assert isinstance(beyond.images, RecordImages)
    assert (beyond.images.shape, len(beyond.images)) == (inside.images.shape, len(taken))
    for found in (inside, beyond):
        np.testing.assert_array_equal(found.images[:], whole.images[taken])
        np.testing.assert_array_equal(found.labels, whole.labels[taken])
        assert found.class_names == whole.class_names
    some = np.array([3, 0, 0, 2], np.int32)
    shapes = (some, some[:0], some.reshape(2, 2), some - 1, inside.labels > 0, 3)
    for index in (*shapes, slice(1, None, 2)):
        assert beyond.images[index].dtype == np.uint8
        np.testing.assert_array_equal(beyond.images[index], inside.images[index])
    with pytest.raises(IndexError):
        beyond.images[np.array([5])]


@pytest.mark.long
def test_processes_may_prepare_at_once(dirs):
    fake_archives.mini_imagenet_folder(dirs["manual_dir"])
    code = """
        import sys, zlib
        from pathlib import Path
        from experiments.data.pipeline import load_split
        split = load_split("mini_imagenet", "base", data_dir=Path(sys.argv[1]),
                           manual_dir=Path(sys.argv[2]))
        print(zlib.crc32(split.images.pixels.tobytes()), split.labels.tolist())
    """
    command = _script(code, *dirs.values())
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(3)]
    answers = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(set(answers)) == 1
    assert len(list((dirs["data_dir"] / "mini_imagenet").glob("*"))) == 2  # data and lock


@pytest.mark.long
def test_one_line_is_printed_and_nothing_fetched(tmp_path):
    """No TensorFlow, no network, one line on the terminal, in a process of its own."""
    code = """
        import socket, sys
        from pathlib import Path
        socket.socket.connect = socket.getaddrinfo = None  # A call fails.
        from experiments.data.pipeline import load_split
        from experiments.datasets import overview
        for _ in range(2):
            load_split("icons", "validation", data_dir=Path(sys.argv[1]))
        overview(Path(sys.argv[1]))
        assert "tensorflow" not in sys.modules
        assert "jax" not in sys.modules
    """
    result = subprocess.run(_script(code, tmp_path), cwd=ROOT, capture_output=True, timeout=300)
    line = f"preparing icons in {tmp_path / 'icons/1.0.0'}\n".encode()
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", line)


def _flip(path):
    content = bytearray(path.read_bytes())
    content[100] ^= 255
    path.write_bytes(content)


def _text(content):
    return lambda path: path.write_text(content)


def _no_targets(path):
    np.save(path, np.zeros_like(np.load(path)))


COUNTS = {split: {"apple": 1} for split in ("base", "validation", "novel")}


@pytest.mark.parametrize(
    ("files", "damage", "ready"),
    [
        ("cifar_fs-novel*", Path.unlink, False),
        ("dataset_info.json", _text("{"), False),
        ("metadata.json", Path.unlink, False),
        ("*", Path.unlink, False),
        ("metadata.json", _text(json.dumps(COUNTS)), False),
        ("metadata.json", _text("[" * 10**5), False),
        ("cifar_fs-base*", lambda path: os.truncate(path, path.stat().st_size // 2), True),
        ("cifar_fs-base*", _flip, True),
        ("targets-train.npy", Path.unlink, True),
        ("targets-train.npy", _no_targets, True),
        ("targets-train.npy", lambda path: os.truncate(path, path.stat().st_size - 3), True),
    ],
)
def test_damaged_data_is_refused(dirs, files, damage, ready):
    """What only reading shows leaves the data set `ready`."""
    write, name, split = fake_archives.cifar_fs_folder, "cifar_fs", "base"
    if "targets" in files:
        write, name, split = fake_image_sets.coco_2017, "coco@16", "train"
    write(dirs["manual_dir"])
    folder = prepare(lookup(name), **dirs).data_dir
    for path in Path(folder).glob(files):
        damage(path)
    for memory_limit in (0, 2**30):
        with pytest.raises(DamagedArchiveError, match=rf"{folder}.*delete that folder"):
            load_split(name, split, memory_limit=memory_limit, **dirs).images[:]
    status = describe(name, **dirs)
    assert status.ready == ready
    assert ready or "delete that folder" in status.missing
