"""Lists, tables, JSON, XML and IDX files of others; a `DamagedArchiveError` names the file."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from xml.etree import ElementTree

import numpy as np

from experiments.core.storage import regular
from experiments.datasets.archives import (
    DamagedArchiveError,
    brief,
    names_file,
    readable,
    reading,
)


def text(name: Any, where: Path | str) -> str:
    """A name in a file as a string on one line; `where` names its place."""
    line = " ".join(name.split()) if isinstance(name, str) else ""
    if not line or re.search("[\0\ud800-\udfff]", line):
        raise DamagedArchiveError(f"{where} should be a name, not {brief(name)}")
    return line


def relative(name: Any, where: Path | str) -> str:
    """The path of a file in a list, with slashes; it must stay in the folder of the images."""
    path = PurePosixPath(name.replace("\\", "/") if isinstance(name, str) else "")
    outside = path.is_absolute() or ".." in path.parts or PureWindowsPath(path).drive
    if outside or not path.name or re.search("[\0-\x1f\ud800-\udfff]", str(path)):
        raise DamagedArchiveError(f"{where} should be a path below the images, not {brief(name)}")
    return str(path)


def multi_hot(own: Sequence[Iterable[Any]], names: Sequence[Any]) -> np.ndarray:
    """The labels of every image as targets, int8 [images, names]."""
    targets = np.zeros((len(own), len(names)), np.int8)
    columns = {name: column for column, name in enumerate(names)}
    for row, labels in zip(targets, own, strict=True):
        row[[columns[label] for label in labels]] = 1
    return targets


def read_lines(path: Path) -> list[str]:
    """The lines of a text file."""
    with reading(readable(path), "text in UTF-8 (save it as UTF-8; in Excel, as `CSV UTF-8`)"):
        return regular(path).read_text("utf-8-sig").removesuffix("\n").split("\n")


def read_names(path: Path) -> list[str]:
    """The lines of a text file that are not blank, without spaces around them."""
    return [line.strip() for line in read_lines(path) if line.strip()]


def read_table(
    path: Path, *needed: str, delimiters: str = ","
) -> tuple[list[str], Iterator[tuple[int, dict[str, str]]]]:
    """The columns of a CSV file, in lower case, and line and cells of every row that is not blank.

    The first line has the columns, those `needed` among them; the first of the delimiters that is
    in it separates cells.
    """
    lines, shown = read_lines(path), readable(path)
    delimiter = next((sign for sign in delimiters if sign in lines[0]), delimiters[0])
    rows = csv.reader((f"{line}\n" for line in lines), delimiter=delimiter, strict=True)

    def cells() -> Iterator[list[str]]:
        with reading(shown, "CSV file"):
            yield from ([" ".join(cell.splitlines()).strip() for cell in row] for row in rows)

    found = cells()
    header = [column.lower() for column in next(found, [])]
    if not {*needed} <= {*header}:
        raise DamagedArchiveError(f"{shown} should start with the line {','.join(needed)}")

    if len({*filter(None, header)}) < len([*filter(None, header)]):
        raise DamagedArchiveError(f"{shown} has a column twice: {delimiter.join(header)}")

    def table() -> Iterator[tuple[int, dict[str, str]]]:
        for row in filter(any, found):
            if len(row) != len(header):
                raise DamagedArchiveError(
                    f"{shown}, line {rows.line_num}: {len(row)} cells for {len(header)} columns; "
                    f"put text that contains {delimiter!r} into quotes"
                )
            yield rows.line_num, dict(zip(header, row, strict=True))

    return header, table()


@names_file
def read_xml(path: Path) -> ElementTree.Element:
    """The root of an XML file."""
    return ElementTree.fromstring(regular(path).read_bytes())  # Expat refuses entities that grow.


@names_file
def read_json(path: Path, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The value in a JSON file; `object_hook` as in `json`."""
    return json.loads(regular(path).read_bytes(), object_hook=object_hook)


@names_file
def read_idx(path: Path) -> np.ndarray:
    """The array in an IDX file of bytes, compressed or not, whatever its name."""
    content = regular(path).read_bytes()
    content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"it starts with {content[:4].hex(' ') or 'nothing'}, not 00 00 08")
    start = 4 + 4 * content[3]
    sizes = np.frombuffer(content[4:start], ">u4").tolist()
    return np.frombuffer(content, np.uint8, offset=start).reshape(sizes)
