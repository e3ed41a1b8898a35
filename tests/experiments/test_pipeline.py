import json
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.data import builders, pipeline
from experiments.data.builders.archives import DamagedArchiveError
from experiments.data.pipeline import RecordImages, load_split
from tests.experiments import fake_archives

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    folders = {"data_dir": folder / "data", "manual_dir": folder / "manual"}
    fake_archives.cifar_fs_folder(folders["manual_dir"])
    load_split("cifar_fs", "base", **folders)
    return folders


@pytest.mark.parametrize(
    "index",
    [
        np.array([4, 0, 0, 2], np.int32),
        np.array([-1]),
        np.array([], int),
        np.array([[0, 1], [4, 3]]),
        np.array([True, False, False, True, False]),
        3,
        slice(1, None, 2),
    ],
    ids=lambda i: str(i).replace("\n", ""),
)
def test_a_split_beyond_the_limit_is_read_when_asked(cifar, index):
    inside = load_split("cifar_fs", "base", memory_limit=5 * 32 * 32 * 3, **cifar)
    beyond = load_split("cifar_fs", "base", memory_limit=5 * 32 * 32 * 3 - 1, **cifar)
    assert isinstance(inside.images, np.ndarray)
    assert isinstance(beyond.images, RecordImages)
    assert beyond.images.shape == inside.images.shape
    assert len(beyond.images) == 5
    np.testing.assert_array_equal(beyond.labels, inside.labels)
    assert beyond.images[index].dtype == np.uint8
    np.testing.assert_array_equal(beyond.images[index], inside.images[index])


def test_some_of_a_split_are_taken_without_reading(cifar):
    whole = load_split("cifar_fs", "base", **cifar)
    rows = np.array([4, 1, 2])
    # The limit is for the images that are taken, not for all.
    limit = 3 * 32 * 32 * 3
    for memory_limit, kind in ((limit, np.ndarray), (limit - 1, RecordImages)):
        some = load_split("cifar_fs", "base", rows=rows, memory_limit=memory_limit, **cifar)
        assert type(some.images) is kind
        assert some.images.shape == (3, *whole.images.shape[1:])
        np.testing.assert_array_equal(some.labels, whole.labels[rows])
        assert some.class_names == whole.class_names
        np.testing.assert_array_equal(some.images[np.array([2, 0])], whole.images[[2, 4]])


@pytest.mark.parametrize(("spared", "kind"), [(0, np.ndarray), (1, RecordImages)])
def test_by_default_a_quarter_of_the_memory_is_taken(cifar, monkeypatch, spared, kind):
    there = SimpleNamespace(available=4 * 5 * 32 * 32 * 3 - spared)
    monkeypatch.setattr(pipeline.psutil, "virtual_memory", lambda: there)
    assert type(load_split("cifar_fs", "base", **cifar).images) is kind


def test_an_index_beyond_the_end_is_refused(cifar):
    beyond = load_split("cifar_fs", "base", memory_limit=0, **cifar)
    with pytest.raises(IndexError):
        beyond.images[np.array([5])]


def _script(code, *paths):
    return [sys.executable, "-c", textwrap.dedent(code), *map(str, paths)]


def test_processes_may_prepare_at_once(tmp_path):
    fake_archives.mini_imagenet_folder(tmp_path / "manual")
    code = """
        import sys, zlib
        from pathlib import Path
        from experiments.data.pipeline import load_split
        split = load_split("mini_imagenet", "base", data_dir=Path(sys.argv[1]),
                           manual_dir=Path(sys.argv[2]))
        print(zlib.crc32(split.images.pixels.tobytes()), split.labels.tolist())
    """
    command = _script(code, tmp_path / "data", tmp_path / "manual")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(3)]
    answers = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], answers
    assert len({out for out, _ in answers}) == 1
    assert len(list((tmp_path / "data" / "mini_imagenet").glob("*"))) == 2  # data and lock


def test_nothing_is_printed_and_nothing_fetched(tmp_path):
    """No TensorFlow, no network, no word on the terminal, in a process of its own."""
    code = """
        import socket, sys
        from pathlib import Path

        def refuse(*args, **kwargs):
            raise RuntimeError("the network was asked for")

        socket.socket.connect = refuse
        socket.getaddrinfo = refuse
        from experiments.data import builders
        from experiments.data.pipeline import load_split
        for _ in range(2):
            load_split("icons", "validation", data_dir=Path(sys.argv[1]))
        builders.dataset_status(Path(sys.argv[1]))
        assert "tensorflow" not in sys.modules
        assert "jax" not in sys.modules
    """
    result = subprocess.run(
        _script(code, tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("damage", ["record file", "info", "metadata", "empty"])
def test_prepared_data_with_a_part_missing_is_refused(tmp_path, damage):
    folders = {"data_dir": tmp_path / "data", "manual_dir": tmp_path / "manual"}
    fake_archives.cifar_fs_folder(folders["manual_dir"])
    load_split("cifar_fs", "base", **folders)
    folder = folders["data_dir"] / "cifar_fs" / "1.0.0"
    if damage == "record file":
        next(folder.glob("cifar_fs-novel*")).unlink()
    elif damage == "info":
        (folder / "dataset_info.json").write_text("{")
    elif damage == "metadata":
        (folder / "metadata.json").unlink()
    else:
        for path in folder.iterdir():
            path.unlink()
    with pytest.raises(DamagedArchiveError, match=r"cifar_fs.1\.0\.0.*delete that folder"):
        load_split("cifar_fs", "base", **folders)
    status = builders.describe("cifar_fs", **folders)
    assert not status.ready
    assert "delete that folder" in status.missing


@pytest.mark.parametrize("damage", ["counts", "cut", "flip"])
@pytest.mark.parametrize("memory_limit", [0, 2**30])
def test_damaged_records_are_named(tmp_path, damage, memory_limit):
    fake_archives.cifar_fs_folder(tmp_path / "downloads" / "manual")
    load_split("cifar_fs", "base", data_dir=tmp_path)
    folder = tmp_path / "cifar_fs" / "1.0.0"
    [path] = folder.glob("cifar_fs-base*")
    content = bytearray(path.read_bytes())
    if damage == "counts":
        counts = {split: {"apple": 1} for split in ("base", "validation", "novel")}
        (folder / "metadata.json").write_text(json.dumps(counts))
    elif damage == "cut":
        del content[len(content) // 2 :]
    else:
        content[100] ^= 255
    path.write_bytes(content)
    with pytest.raises(DamagedArchiveError, match=r"cifar_fs.1\.0\.0.*delete that folder"):
        assert load_split("cifar_fs", "base", data_dir=tmp_path, memory_limit=memory_limit).images[
            :
        ]
