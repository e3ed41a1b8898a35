"""Damaged and hostile files of the authors of data sets: the right answer, or a sentence."""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
import math
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import savemat

from experiments.core.errors import ExperimentError
from experiments.data.pipeline import load_labels
from experiments.datasets import DATASETS, kanji, pickles
from experiments.datasets.archives import DamagedArchiveError
from experiments.datasets.pickles import load_mat, load_pickle, load_torch_list
from experiments.datasets.readers import (
    read_idx,
    read_json,
    read_lines,
    read_table,
    read_xml,
    relative,
)
from experiments.datasets.splits import MultiLabelSplit, check_splits, split_of_pickle
from tests.experiments import fake_archives as few
from tests.experiments import fake_image_sets as many

LAYOUTS = {
    write: name
    for name, of in (few.LAYOUTS | many.ONE_LABEL | many.MANY_LABELS).items()
    for write in of
    if "mnist" not in name and name not in ("k49", "caltech101", "caltech256", "svhn_extra")
}
BAD_PATHS = [
    "../x.jpg",
    "/etc/x",
    "..\\x",
    "a/../../x",
    "C:x.jpg",
    "\\\\host\\x",
    "..",
    ".",
    "",
    " \0",
]
NASTY: list[Any] = [
    *(None, True, -1, 0.5, 1e999, math.nan, 10**25, 2**63, " ", "1", "a\0b", "\ud800", [], {}),
    *([[1, [2]]], {"a": 1}, [None], "a\nb", "*", "[", "**/x", "é" * 200, "x" * 5000, *BAD_PATHS),
]


def lists(folder: Path) -> list[Path]:
    """The files that are no images and no archives."""
    archives = (".tgz", ".gz", ".tar", ".zip", ".bin")
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.suffix not in archives]
    return [file for file in files if file.open("rb").read(4) != b"\x89PNG"]


class Reader:
    """Reads a layout that was written into a folder and, where it is packed, extracted."""

    def __init__(self, write: Callable, root: Path):
        self.root, self.dataset = root, DATASETS[LAYOUTS[write]]
        write(root / "manual")
        self.expected = self.read()
        self.lists = lists(root)

    def read(self) -> dict[str, list[str]]:
        """The names of every class or label, by split."""
        splits = self.dataset.read(
            self.dataset.search_path(self.root / "manual", self.root / "scratch")
        )
        "\n".join(check_splits(splits)).encode()
        for split in splits.values():
            keys = [key for key, _ in split.labelled([*split.counts()])]
            if isinstance(split, MultiLabelSplit):
                assert set(np.unique(split.targets)) <= {-1, 0, 1}
            for key in keys:
                if isinstance(key, Path):
                    assert Path(os.path.normpath(key)).is_relative_to(self.root)
                    assert "\0" not in str(key)
            if not isinstance(keys[0], Path):
                read = split.open()
                _ = [read(key) for key in keys]
        return {split: [*of.counts()] for split, of in splits.items()}

    def check(self, path: Path, content: bytes) -> str:
        """What reading says with another content of a file, which is put back."""
        before = path.read_bytes()
        path.write_bytes(content)
        try:
            self.read()
            return ""
        except ExperimentError as error:
            return str(error)
        finally:
            path.write_bytes(before)


def changed(content: bytes, rng: np.random.Generator, count: int) -> Iterator[bytes]:
    """Contents with a changed byte, cut, or with a part doubled, deleted or random."""
    for number in range(count):
        at = int(rng.integers(len(content) + 1))
        end = at + int(rng.integers(1, 9))
        new = [
            bytes([rng.integers(256)]) + content[at + 1 : end],
            b"",
            2 * content[at:end],
            rng.bytes(end - at),
            bytes([content[at % len(content)] ^ (1 << int(rng.integers(8)))])
            + content[at + 1 : end],
        ]
        yield content[:at] if number % 6 == 5 else content[:at] + new[number % 6] + content[end:]


def places(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """The places in a value of JSON types, of every list the first and the last."""
    yield at
    if isinstance(value, dict):
        for key in [*value][:6]:
            yield from places(value[key], (*at, key))
    elif isinstance(value, list):
        for index in {0, len(value) - 1} if value else ():
            yield from places(value[index], (*at, index))


def put(value: Any, at: tuple, new: Any) -> Any:
    if not at:
        return new
    value = copy.copy(value)
    value[at[0]] = put(value[at[0]], at[1:], new)
    return value


def swapped(path: Path) -> Iterator[bytes]:
    """Contents in which every value in turn is another one."""
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        for at in places(content):
            for new in NASTY:
                yield json.dumps(put(content, at, new)).encode()
    elif path.suffix == ".csv":
        rows = [*csv.reader(io.StringIO(path.read_text()))]
        for row, column in ((r, c) for r in (0, 1, len(rows) - 1) for c in range(len(rows[0]))):
            for new in NASTY:
                buffer = io.StringIO()
                csv.writer(buffer).writerows(put(rows, (row, column), new))
                yield buffer.getvalue().encode("utf-8", "surrogatepass")
    elif path.suffix in (".txt", ".xml"):
        text = path.read_text()
        words = text.split()
        for word in {words[0], words[-1], words[0].partition("/")[0]}:
            for new in NASTY:
                yield text.replace(word, str(new), 1).encode("utf-8", "surrogatepass")
    elif path.suffix in ("", ".pkl", ".pickle"):
        content = pickle.loads(path.read_bytes())
        for at in places(content):
            for new in [*NASTY, np.zeros((2, 0)), np.array(1), np.arange(3.5), np.float32(1)]:
                yield pickle.dumps(put(content, at, new))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))]
)
@pytest.mark.parametrize("write", LAYOUTS, ids=lambda write: write.__name__)
def test_changed_files_are_read_or_refused(tmp_path, write, seed):
    """Changed bytes, and other values; all of the latter in a long test."""
    reader, rng = Reader(write, tmp_path), np.random.default_rng(seed)
    chosen = rng.permutation(len(reader.lists))[: None if seed else 8]
    # MATLAB files take a process each.
    slow = any(path.suffix == ".mat" for path in reader.lists)
    for path in (reader.lists[index] for index in chosen):
        count = int(write is many.flowers102) if path.suffix == ".mat" else 1 if slow else 2
        for content in changed(path.read_bytes(), rng, 40 * count if seed else count):
            reader.check(path, content)
        others = [*swapped(path)]
        for index in rng.permutation(len(others))[: None if seed else 1 if slow else 5]:
            reader.check(path, others[index])
    assert reader.read() == reader.expected


@pytest.mark.parametrize("name", [*BAD_PATHS, "a\n", "\ud800", "x" * 256, None, 1, [], b"../x"])
def test_a_path_in_a_list_stays_in_its_folder(name):
    with pytest.raises(DamagedArchiveError, match=r"val\.csv, line 3"):
        relative(name, "val.csv, line 3")
    assert relative("./a b/c\\d.jpg", "") == "a b/c/d.jpg"


@pytest.mark.parametrize("name", BAD_PATHS)
def test_readers_of_lists_refuse_paths_to_elsewhere(tmp_path, name):
    """Each by its own file, in which a path is another one."""
    quoted = json.dumps(name)[1:-1]
    for number, (write, place, found, new) in enumerate(
        [
            (few.cifar_fs_folder, "val.txt", "otter", name),
            (few.inat2017_boxes, "train_2017_bboxes.json", few.INAT_FILE, quoted),
            (few.mini_imagenet_folder, "val.csv", "n0295082600000000.jpg", name),
            (many.coco_2017, "instances_val2017.json", "000000000042.jpg", quoted),
            (many.food101_folder, "test.txt", "bee/", f"bee/{name}/../../"),
            (many.nus_wide_table, "nus_wid_data.csv", "images/actor_0001_2124494179.jpg", name),
            (many.cub, "images.txt", "001.Bird_a/train_0.jpg", name),
        ]
    ):
        reader = Reader(write, tmp_path / str(number))
        (file,) = (file for file in reader.lists if file.name == place)
        text = file.read_text()
        assert found in text
        said = reader.check(file, text.replace(found, new, 1).encode())
        # A blank line has no name.
        assert file.name in said or (name == "" and "no image" in said) or write is many.cub, write


def read_all(path: Path) -> list:
    return [*read_table(path)[1]]


def _deep(kind: bytes) -> bytes:
    return b"\x80\x02(K\x01\x85" + b"2\x86" * 60 + kind + b"."


_BIG = (2**40).to_bytes(8, "little")
_LISTS = [["a"], ["b"]]
for _ in range(60):
    _LISTS = [_LISTS, _LISTS]
_LABELS = pickle.dumps({"data": np.zeros((1, 2, 2, 3), np.uint8), "labels": _LISTS})
_TEXT = b"X" + (2**20).to_bytes(4, "little") + b"a" * 2**20 + b"q\0" + b"0"
_NUMBERS = pickle.dumps([*range(200_000)], protocol=2)[2:-1] + b"q\0" + b"0"
HOSTILE: dict[str, tuple[Callable, bytes]] = {
    **{f"key {kind!r}": (load_pickle, _deep(kind)) for kind in (b"Nd", b"\x91")},
    "memo of 2 GB": (load_pickle, b"\x80\x02]r\xff\xff\xff\x0fh\x01."),
    "bytes of 1 TB": (load_pickle, b"\x80\x04\x8e" + _BIG + b"x."),
    "bytearray of 1 TB": (load_pickle, b"\x80\x05\x96" + _BIG + b"x."),
    "sets": (load_pickle, b"\x80\x04" + b"\x8f" * 10**6),
    "marks": (load_pickle, b"(" * 10**6),
    "str of lists": (load_pickle, b"\x80\x02cbuiltins\nstr\n](]]e\x85R."),
    "defaults": (load_pickle, b"\x80\x02c_codecs\nencode\nN}X\1\0\0\0aK\1s\x86b."),
    "an object": (load_pickle, b"\x80\x02cnumpy\ndtype\n)\x81."),
    # Of a string of 1 MB, a list of 200,000 numbers, and no reader that would stop earlier.
    **{
        f"many {kind}": (load_pickle, b"\x80\x04" + start + b"]" + b"(" + each * 2000 + b"e.")
        for kind, start, each in (
            ("encodings", _TEXT, b"c_codecs\nencode\nh\0\x85R"),
            ("sets", _NUMBERS, b"cbuiltins\nset\nh\0\x85R"),
            ("frozen sets", _NUMBERS, b"cbuiltins\nfrozenset\nh\0\x85\x81"),
        )
    },
    "shared lists": (lambda path: split_of_pickle(path, ""), _LABELS),
    "torch of 32 MB": (load_torch_list, bytes(2**25)),
    "no CSV": (read_all, b'file,label\n"a,b\n'),
    "cell": (read_all, b"file,label\na," + b"x" * 200_000),
    "columns": (read_table, b"," * 10**7),
    "twice": (read_table, b"file,file\n"),
    "line": (read_lines, b"x" * 2**21),
    "lines": (read_lines, b"\n" * 2**22),
    "UTF-16": (read_lines, "a\n".encode("utf-16-le")),
    "depth": (read_json, b"[" * 10**6),
    "digits": (read_json, b'{"a":' + b"9" * 5000 + b"}"),
    "list": (read_json, b"[1]"),
    "17 MB": (read_json, b" " * (17 << 20)),
    "IDX of 4 GB": (
        lambda path: read_idx(path, (None,)),
        gzip.compress(b"\0\0\x08\1" + b"\xff" * 4),
    ),
    "laughs": (
        read_xml,
        b'<!DOCTYPE a [<!ENTITY b "' + b"x" * 10**5 + b'">]><a>' + b"&b;" * 10**5 + b"</a>",
    ),
    "encoding": (read_xml, b'<?xml version="1.0" encoding="x"?><a/>'),
    **{
        f"far {n}": (
            lambda path: kanji._draw(path, 8),
            b'<a xmlns="http://www.w3.org/2000/svg"><path d="M1,1c9,9,9,9,1'
            + b"0" * n
            + b',1"/></a>',
        )
        for n in (9, 400)
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(tmp_path, name):
    read, content = HOSTILE[name]
    (tmp_path / "hostile").write_bytes(content)
    with pytest.raises(ExperimentError, match="hostile") as error:
        read(tmp_path / "hostile")
    assert len(str(error.value)) < 700


@pytest.mark.parametrize(
    "read", [load_pickle, load_torch_list, load_mat, read_lines, read_json, read_xml]
)
def test_pipes_and_folders_are_refused(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(DamagedArchiveError, match=path.name):
            read(path)


def test_pickled_cycles_are_read(tmp_path):
    cycle: list[Any] = [np.arange(2)]
    cycle.append((cycle, {"a": cycle}))
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(cycle))
    found = load_pickle(tmp_path / "a.pkl")
    assert found[0].tolist() == [0, 1]
    assert found[1][0] is found


def test_the_reader_of_matlab_files_has_a_limit_and_may_crash(tmp_path, monkeypatch):
    zeros = np.zeros((5000, 6000), np.uint8)
    savemat(tmp_path / "a.mat", {"x": zeros}, do_compression=True)
    assert load_mat(tmp_path / "a.mat", "x")["x"].shape == zeros.shape
    monkeypatch.setattr(pickles, "_MATLAB_MEMORY", 0)
    with pytest.raises(DamagedArchiveError, match=r"a\.mat is not a readable MATLAB file: Memory"):
        load_mat(tmp_path / "a.mat", "x")
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(
        DamagedArchiveError, match=r"a\.mat .* its reader crashed with the status 1"
    ):
        load_mat(tmp_path / "a.mat", "x")


@pytest.mark.parametrize("file", ["metadata.json", "dataset_info.json", "label.labels.txt"])
def test_edited_counts_of_prepared_data_are_refused(tmp_path, file):
    dirs = {"data_dir": tmp_path / "data", "manual_dir": tmp_path}
    few.cifar_fs_folder(tmp_path)
    before, rng = load_labels("cifar_fs", "novel", **dirs)[0], np.random.default_rng(0)
    path = tmp_path / "data/cifar_fs/3.0.0" / file
    content = path.read_bytes()
    edits = [*changed(content, rng, 10)]
    if file.endswith(".json"):
        others = [(at, new) for at in places(json.loads(content)) for new in NASTY]
        some = (others[index] for index in rng.permutation(len(others))[:40])
        edits += [json.dumps(put(json.loads(content), at, new)).encode() for at, new in some]
    for edited in edits:
        path.write_bytes(edited)
        try:
            np.testing.assert_array_equal(load_labels("cifar_fs", "novel", **dirs)[0], before)
        except DamagedArchiveError as error:
            assert re.search(r"(?s)3\.0\.0.*delete that folder", str(error))  # noqa: PT017
