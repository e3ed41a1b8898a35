"""Lists, tables, JSON, XML and IDX files of others: the one place where their content is checked.

What is read is of the kind that is expected, or a `DamagedArchiveError` names file and place.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from xml.etree import ElementTree

import numpy as np

from experiments.core.storage import load_json, regular
from experiments.datasets.archives import (
    DamagedArchiveError,
    brief,
    readable,
    reading,
    typed,
)


def number(value: Any, where: Path | str) -> int:
    """Checks a whole number from 0 in a file; `where` names its place. Refuses booleans."""
    kinds = int | np.integer, float | np.floating
    whole = isinstance(value, kinds[0]) or (isinstance(value, kinds[1]) and value.is_integer())
    if isinstance(value, bool) or not whole or not 0 <= value < 2**63:
        raise DamagedArchiveError(f"{where} should be a whole number from 0, not {brief(value)}")
    return int(value)


def text(name: Any, where: Path | str) -> str:
    """Converts a name in a file to a string on one line; `where` names its place."""
    name = name.decode("latin1") if isinstance(name, bytes) else name
    line = " ".join(name.split()) if isinstance(name, str) else ""
    if not line or len(line) > 1000 or re.search("[\0\ud800-\udfff]", line):
        raise DamagedArchiveError(f"{where} should be a name, not {brief(name)}")
    return line


def relative(name: Any, where: Path | str) -> str:
    """The path of a file in a list, with slashes; it must stay in the folder of the images."""
    name = name.decode("latin1") if isinstance(name, bytes) else name
    path = PurePosixPath(name.replace("\\", "/") if isinstance(name, str) else "")
    outside = path.is_absolute() or ".." in path.parts or PureWindowsPath(path).drive
    if outside or not path.name or re.search("[\0-\x1f\ud800-\udfff]", str(path)):
        raise DamagedArchiveError(f"{where} should be a path below the images, not {brief(name)}")
    if len(str(path)) > 1000 or any(len(part.encode()) > 255 for part in path.parts):
        raise DamagedArchiveError(f"{where} is too long for a path: {brief(name)}")
    return str(path)


_CHECKS: dict[type, Callable[[Any, str], Any]] = {int: number, str: text, Path: relative}


def column(values: Any, kind: type, where: Path | str) -> list[Any]:
    """Checks a list, a tuple or an array in a file; of one value, also that, as in MATLAB files.

    The kind is `int` as in `number`, `str` as in `text`, or `Path` as in `relative`.
    """
    if isinstance(values, np.ndarray):
        if values.size > 2**24:
            raise DamagedArchiveError(f"{where} should be a list, not {values.size} numbers")
        values = values.ravel().tolist()
    elif not isinstance(values, list | tuple):
        values = [values]
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


def multi_hot(own: Sequence[Iterable[Any]], names: Sequence[Any], path: Path) -> np.ndarray:
    """The labels of every image as targets, int8 [images, names]."""
    if len(own) * len(names) > 2**29:
        raise DamagedArchiveError(f"{path} has too many labels: {len(names)} for {len(own)} images")
    targets = np.zeros((len(own), len(names)), np.int8)
    columns = {name: column for column, name in enumerate(names)}
    for row, labels in zip(targets, own, strict=True):
        row[[columns[label] for label in labels]] = 1
    return targets


def read_bytes(path: Path, most: int) -> bytes:
    """Reads a file of at most so many bytes; raises a `DamagedArchiveError` for any other."""
    try:
        with open(regular(path), "rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise DamagedArchiveError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise DamagedArchiveError(f"{path} has more than {most:,} bytes, too many for its kind")
    return content


def read_lines(path: Path, most: int = 2**18) -> list[str]:
    """The lines of a text file. The longest published list, of NUS-WIDE, has 161,789."""
    content = read_bytes(path, 2**26)
    try:
        whole = content.decode("utf-8-sig")
        if "\0" in whole:
            raise ValueError("it has a character 0")
    except ValueError as error:
        raise DamagedArchiveError(
            f"{path} is not text in UTF-8 ({error}); save it so, in Excel as `CSV UTF-8`"
        ) from error
    whole = whole.replace("\r\n", "\n").replace("\r", "\n")
    if whole.count("\n") > most:
        raise DamagedArchiveError(f"{path} has more than {most:,} lines")
    lines = whole.removesuffix("\n").split("\n") if whole else []
    if any(len(line) > 2**20 for line in lines):
        raise DamagedArchiveError(f"{path} has a line of more than a million characters")
    return lines


def read_names(path: Path) -> list[str]:
    """The lines of a text file that are not blank, without spaces around them."""
    return [line.strip() for line in read_lines(path) if line.strip()]


def read_table(
    path: Path, delimiters: str = ",", most: int = 2**18
) -> tuple[list[str], Iterator[tuple[int, dict[str, str]]]]:
    """Reads a CSV file that starts with the names of its columns.

    The first of the delimiters that is in this line separates cells.

    Returns:
      The columns, in lower case, and for every row that is not blank its line and its cells.
    """
    lines, shown = read_lines(path, most), readable(path)
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
    if twice := [name for name, count in Counter(header).items() if name and count > 1]:
        raise DamagedArchiveError(f"{shown} has the column {brief(twice[0])} twice")

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
    """The root of an XML file of at most 128 KiB; raises a `DamagedArchiveError` for any other."""
    content = read_bytes(path, 2**17)
    with reading(path, "XML file"):  # Expat refuses entities that grow.
        return ElementTree.fromstring(content)


def read_json(
    path: Path,
    *names: str,
    object_hook: Callable[[dict[str, Any]], Any] | None = None,
    most: int = 2**24,
) -> dict[str, Any]:
    """The object in a JSON file, which has the entries `names`; arguments as in `load_json`."""
    try:
        content = load_json(path, object_hook=object_hook)
    except OSError as error:
        raise DamagedArchiveError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedArchiveError(f"{path} is not a JSON file: {error}") from error
    return entries(content, path, *names)


def entries(content: Any, path: Path, *names: str) -> dict[str, Any]:
    """The content of a file, a dictionary with the entries `names`; its keys become strings."""
    if not isinstance(content, dict):
        raise DamagedArchiveError(f"{path} contains {typed(content)}, not a dictionary")
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
    expected = ", ".join("n" if side is None else str(side) for side in shape)
    found = typed(value)
    if isinstance(value, np.ndarray):
        found = f"{value.dtype} {list(value.shape)}"
        known = len(shape) == value.ndim
        if value.dtype == np.uint8 and known and all(map(_fits, value.shape, shape)):
            return value
    raise DamagedArchiveError(f"{where} should be uint8 [{expected}], not {found}")


def _fits(side: int, wanted: int | None) -> bool:
    return wanted is None or side == wanted


def pixels(value: Any, path: Path) -> np.ndarray:
    """Checks that the content of a file is an array of colour images, uint8 [n, h, w, 3]."""
    return array(value, (None, None, None, 3), f"{path}: images")


def read_idx(path: Path, shape: tuple[int | None, ...]) -> np.ndarray:
    """The array in an IDX file of bytes, compressed or not, whatever its name."""
    content = read_bytes(path, 2**30)
    with reading(path, "IDX file"):
        if content[:2] == b"\x1f\x8b":
            file = gzip.GzipFile(fileobj=io.BytesIO(content))
        else:
            file = io.BytesIO(content)
        start = file.read(4)
        if start[:3] != b"\0\0\x08" or not start[3:]:
            raise ValueError(f"it starts with {start.hex(' ') or 'nothing'}, not 00 00 08")
        sizes = np.frombuffer(file.read(4 * start[3]), ">u4").tolist()
        size = math.prod(sizes)
        if size > 2**30:
            raise ValueError(f"its header says {sizes}, more than {2**30:,} bytes")
        found = file.read(size + 1)  # A bomb says less than it has.
        if len(found) != size:
            more = "more" if len(found) > size else len(found)
            raise ValueError(f"its header says {sizes}, {size} bytes, and it has {more}")
        found = np.frombuffer(found, np.uint8).reshape(sizes)
    return array(found, shape, f"{path}: its array")
