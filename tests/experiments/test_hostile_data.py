"""Damaged and hostile files of the authors of data sets: the right answer, or a sentence."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.data import builders
from experiments.data.builders.base import ImageBuilder
from experiments.data.builders.images import ClassSplit
from experiments.errors import ExperimentError
from tests.experiments import fake_archives as few
from tests.experiments import fake_image_sets as many

LAYOUTS = {
    write: name
    for name, of in (few.LAYOUTS | many.ONE_LABEL | many.MANY_LABELS).items()
    for write in of
    if "mnist" not in name and name not in ("k49", "caltech101", "caltech256", "svhn_extra")
}
NASTY: list[Any] = [
    *(None, True, -1, 0.5, 1e999, math.nan, 10**25, 2**63, "", " ", "1", "a\0b", "\ud800", [], {}),
    *(
        "../../etc/x.jpg",
        "/etc/x.jpg",
        "..\\x.jpg",
        "C:x.jpg",
        "a/../../x.jpg",
        "..",
        ".",
        "x" * 5000,
    ),
    *([[1, [2]]], {"a": 1}, [None], "a\nb", "*", "[", "**/x", "é" * 200),
]


def lists(folder: Path) -> list[Path]:
    """The files that are no images and no archives."""
    archives = (".tgz", ".gz", ".tar", ".zip", ".bin")
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.suffix not in archives]
    return [file for file in files if file.open("rb").read(4) != b"\x89PNG"]


class Reader:
    """Reads a layout that was written into a folder and, where it is packed, extracted."""

    def __init__(self, write: Callable, root: Path):
        self.root, self.builder = root, builders.BUILDERS[LAYOUTS[write]]
        write(root / "manual")
        self.expected = self.read()
        self.lists = lists(root)

    def read(self) -> dict[str, list[str]]:
        """The images of every class or label, as text."""
        search_path = self.builder.search_path(self.root / "manual", self.root / "scratch")
        splits = ImageBuilder.read_splits(self.builder, search_path)  # pyright: ignore
        self.builder.check_splits(splits)
        "\n".join(self.builder.class_names(splits)).encode()
        for split in splits.values():
            if isinstance(split, ClassSplit):
                keys = [key for of in split.classes.values() for key in of]
            else:
                keys = [*split.keys]
                assert set(np.unique(split.targets)) <= {-1, 0, 1}
            for key in keys:
                if isinstance(key, Path):
                    assert Path(os.path.normpath(key)).is_relative_to(self.root)
                    assert "\0" not in str(key)
            if not isinstance(keys[0], Path):
                read = split.open()
                _ = [read(key) for key in keys]
        return {split: self.builder.class_names({split: of}) for split, of in splits.items()}

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
    for path in (reader.lists[index] for index in chosen):
        # MATLAB files take a process each.
        count = int(write is many.flowers102) if path.suffix == ".mat" else 2
        for content in changed(path.read_bytes(), rng, 40 * count if seed else count):
            reader.check(path, content)
        others = [*swapped(path)]
        for index in rng.permutation(len(others))[: None if seed else 5]:
            reader.check(path, others[index])
    assert reader.read() == reader.expected
