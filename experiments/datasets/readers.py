"""Lists, tables, JSON, XML and IDX files of others: the one place where their content is checked.

What is read is of the kind that is expected, or a `DamagedArchiveError` names file and place.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from xml.etree import ElementTree

import numpy as np

from experiments.core.storage import regular
from experiments.datasets.archives import DamagedArchiveError, brief, readable, reading


def _number(value: Any, where: Path | str) -> int:
    """Checks a whole number from 0 in a file; `where` names its place. Refuses booleans."""
    fraction = isinstance(value, float | np.floating) and value.is_integer()
    whole = isinstance(value, int | np.integer) or fraction
    if isinstance(value, bool) or not whole or not 0 <= value < 2**63:
        raise DamagedArchiveError(f"{where} should be a whole number from 0, not {brief(value)}")
    return int(value)


def text(name: Any, where: Path | str) -> str:
    """Converts a name in a file to a string on one line; `where` names its place."""
    name = name.decode("latin1") if isinstance(name, bytes) else name
    line = " ".join(name.split()) if isinstance(name, str) else ""
    if not line or re.search("[\0\ud800-\udfff]", line):
        raise DamagedArchiveError(f"{where} should be a name, not {brief(name)}")
    return line


def relative(name: Any, where: Path | str) -> str:
    """The path of a file in a list, with slashes; it must stay in the folder of the images."""
    name = name.decode("latin1") if isinstance(name, bytes) else name
    path = PurePosixPath(name.replace("\\", "/") if isinstance(name, str) else "")
    outside = path.is_absolute() or ".." in path.parts or PureWindowsPath(path).drive
    if outside or not path.name or re.search("[\0-\x1f\ud800-\udfff]", str(path)):
        raise DamagedArchiveError(f"{where} should be a path below the images, not {brief(name)}")
    return str(path)


_CHECKS: dict[type, Callable[[Any, str], Any]] = {int: _number, str: text, Path: relative}


def column(values: Any, kind: type, where: Path | str) -> list[Any]:
    """Checks a list, a tuple or an array in a file; of one value, also that, as in MATLAB files.

    The kind is `int`, `str` as in `text`, or `Path` as in `relative`.
    """
    values = values.ravel().tolist() if isinstance(values, np.ndarray) else values
    values = values if isinstance(values, list | tuple) else [values]
    check = _CHECKS[kind]
    return [check(value, f"{where}, entry {index}") for index, value in enumerate(values)]


def records(content: Mapping[str, Any], key: str, path: Path, **kinds: type) -> list[tuple]:
    """Some fields of every object in the list `content[key]` of a file.

    `kinds` has the fields, and the kind of each as in `column`.
    """
    found = content[key] if isinstance(content[key], list) else [content[key]]
    for index, entry in enumerate(found):
        absent = [name for name in kinds if not isinstance(entry, dict) or name not in entry]
        if absent:
            raise DamagedArchiveError(f"{path}: {key}, entry {index}, has no {absent[0]}")
    columns = [
        column([entry[name] for entry in found], kind, f"{path}: {name} of {key}")
        for name, kind in kinds.items()
    ]
    return list(zip(*columns, strict=True))


def multi_hot(own: Sequence[Iterable[Any]], names: Sequence[Any]) -> np.ndarray:
    """The labels of every image as targets, int8 [images, names]."""
    targets = np.zeros((len(own), len(names)), np.int8)
    columns = {name: column for column, name in enumerate(names)}
    for row, labels in zip(targets, own, strict=True):
        row[[columns[label] for label in labels]] = 1
    return targets


def read_bytes(path: Path) -> bytes:
    """The content of a file; a `DamagedArchiveError` if it cannot be read."""
    with reading(path, "file"):
        return regular(path).read_bytes()


def read_lines(path: Path) -> list[str]:
    """The lines of a text file."""
    with reading(readable(path), "text in UTF-8 (in Excel, save as `CSV UTF-8`)"):
        return regular(path).read_text("utf-8-sig").removesuffix("\n").split("\n")


def read_names(path: Path) -> list[str]:
    """The lines of a text file that are not blank, without spaces around them."""
    return [line.strip() for line in read_lines(path) if line.strip()]


def read_table(
    path: Path, delimiters: str = ","
) -> tuple[list[str], Iterator[tuple[int, dict[str, str]]]]:
    """Reads a CSV file that starts with the names of its columns.

    The first of the delimiters that is in this line separates cells.

    Returns:
      The columns, in lower case, and for every row that is not blank its line and its cells.
    """
    lines, shown = read_lines(path), readable(path)
    delimiter = next((sign for sign in delimiters if sign in "".join(lines[:1])), delimiters[0])
    rows = csv.reader((f"{line}\n" for line in lines), delimiter=delimiter, strict=True)

    def cells() -> Iterator[list[str]]:
        try:
            yield from ([" ".join(cell.splitlines()).strip() for cell in row] for row in rows)
        except csv.Error as error:
            raise DamagedArchiveError(
                f"{shown}, line {rows.line_num}: {error}; an open quote?"
            ) from error

    found = cells()
    header = [column.lower() for column in next(found, [])]

    def table() -> Iterator[tuple[int, dict[str, str]]]:
        for row in filter(any, found):
            if len(row) != len(header):
                raise DamagedArchiveError(
                    f"{shown}, line {rows.line_num}: {len(row)} cells for {len(header)} columns; "
                    f"put text that contains {delimiter!r} into quotes"
                )
            yield rows.line_num, dict(zip(header, row, strict=True))

    return header, table()


def read_xml(path: Path) -> ElementTree.Element:
    """The root of an XML file."""
    with reading(path, "XML file"):  # Expat refuses entities that grow.
        return ElementTree.fromstring(read_bytes(path))


def read_json(
    path: Path, *names: str, object_hook: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """The object in a JSON file, which has the entries `names`; `object_hook` as in `json`."""
    with reading(path, "JSON file"):
        content = json.loads(read_bytes(path), object_hook=object_hook)
    return entries(content, path, *names)


def entries(content: Any, path: Path, *names: str) -> dict[str, Any]:
    """The content of a file, a dictionary with the entries `names`; its keys become strings."""
    if not isinstance(content, dict):
        raise DamagedArchiveError(f"{path} should contain a dictionary, not {brief(content)}")
    content = {
        name.decode("latin1") if isinstance(name, bytes) else name: value
        for name, value in content.items()
    }
    missing = [name for name in names if name not in content]
    if missing:
        raise DamagedArchiveError(f"{path} has no entry {', '.join(missing)}")
    return content


def array(value: Any, shape: tuple[int | None, ...], where: Path | str) -> np.ndarray:
    """Checks an array of bytes in a file; sides that are None have any length."""
    found = brief(value)
    if isinstance(value, np.ndarray):
        known = [s if w is None else w for s, w in zip(value.shape, shape, strict=False)]
        if value.dtype == np.uint8 and [*value.shape] == known and value.ndim == len(shape):
            return value
        found = f"{value.dtype} {list(value.shape)}"
    expected = ", ".join("n" if side is None else str(side) for side in shape)
    raise DamagedArchiveError(f"{where} should be uint8 [{expected}], not {found}")


def pixels(value: Any, path: Path) -> np.ndarray:
    """Checks that the content of a file is an array of colour images, uint8 [n, h, w, 3]."""
    return array(value, (None, None, None, 3), f"{path}: images")


def read_idx(path: Path, shape: tuple[int | None, ...]) -> np.ndarray:
    """The array in an IDX file of bytes, compressed or not, whatever its name."""
    content = read_bytes(path)
    with reading(path, "IDX file"):
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        if content[:3] != b"\0\0\x08":
            raise ValueError(f"it starts with {content[:4].hex(' ') or 'nothing'}, not 00 00 08")
        start = 4 + 4 * content[3]
        sizes = np.frombuffer(content[4:start], ">u4").tolist()
        found = np.frombuffer(content, np.uint8, offset=start).reshape(sizes)
    return array(found, shape, f"{path}: its array")
