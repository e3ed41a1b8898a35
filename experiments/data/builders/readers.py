"""Text, tables, JSON and XML of authors of data sets: the one place where their content is checked.

What is read is of the kind that is expected, or a `DamagedArchiveError` names file and place.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from xml.etree import ElementTree

import numpy as np

from experiments.data.builders.archives import (
    DamagedArchiveError,
    brief,
    readable,
    reading,
    typed,
)
from experiments.storage import load_json, regular


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
    """Checks the path of a file in a list, which must stay in the folder of the images.

    Args:
      name: The path, with slashes or backslashes.
      where: Names the list, and its line or entry.

    Returns:
      The path, with slashes.

    Raises:
      DamagedArchiveError: It is empty, absolute, has `..` or a drive, or is no path at all.
    """
    name = name.decode("latin1") if isinstance(name, bytes) else name
    path = PurePosixPath(name.replace("\\", "/") if isinstance(name, str) else "")
    outside = path.is_absolute() or ".." in path.parts or PureWindowsPath(path).drive
    if outside or not path.name or re.search("[\0-\x1f\ud800-\udfff]", str(path)):
        raise DamagedArchiveError(
            f"{where} should be a path in the folder of the images, not {brief(name)}"
        )
    if len(str(path)) > 1000 or any(len(part.encode()) > 255 for part in path.parts):
        raise DamagedArchiveError(f"{where} is too long for a path: {brief(name)}")
    return str(path)


_CHECKS: dict[type, Callable[[Any, str], Any]] = {int: number, str: text, Path: relative}


def column(values: Any, kind: type, where: Path | str) -> list[Any]:
    """Checks a list in a file.

    Args:
      values: A list, a tuple or an array; of one value, also that, as MATLAB files have it.
      kind: `int` as in `number`, `str` as in `text`, or `Path` as in `relative`.
      where: Names the list in messages.

    Returns:
      The values.

    Raises:
      DamagedArchiveError: It is no list, or one of its values is something else.
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
    """Checks a list of objects in a file, and returns some fields of each.

    Args:
      content: The content of the file.
      key: The entry with the list.
      path: The file, for messages.
      **kinds: The fields, and the kind of each as in `column`.

    Returns:
      A tuple for every object.

    Raises:
      DamagedArchiveError: A field is absent or something else.
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


def no_labels(count: int, names: Sequence[Any], path: Path) -> np.ndarray:
    """Targets of images without any label, int8 [count, names], unless these are too many."""
    if count * len(names) > 2**29:
        raise DamagedArchiveError(f"{path} has too many labels: {len(names)} for {count} images")
    return np.zeros((count, len(names)), np.int8)


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
    """Reads the lines of a text file.

    Args:
      path: The file.
      most: The largest number of lines. The longest published list, of NUS-WIDE, has 161,789.

    Returns:
      The lines.

    Raises:
      DamagedArchiveError: The file is not text, or too long for a list.
    """
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


def read_table(
    path: Path, delimiters: str = ",", most: int = 2**18
) -> tuple[list[str], Iterator[tuple[int, dict[str, str]]]]:
    """Reads a CSV file that starts with the names of its columns.

    Args:
      path: The file.
      delimiters: Which of these comes first in the first line separates cells.
      most: The largest number of lines.

    Returns:
      The columns, in lower case, and for every row that is not blank its line and its cells.

    Raises:
      DamagedArchiveError: The file is not CSV, a row has another number of cells, or a column is
        there twice.
    """
    lines, shown = read_lines(path, most), readable(path)
    delimiter = next((sign for sign in delimiters if sign in "".join(lines[:1])), delimiters[0])
    rows = csv.reader((f"{line}\n" for line in lines), delimiter=delimiter, strict=True)

    def cells() -> Iterator[list[str]]:
        try:
            yield from ([" ".join(cell.splitlines()).strip() for cell in row] for row in rows)
        except csv.Error as error:
            raise DamagedArchiveError(
                f"{shown}, line {rows.line_num}: {error}; is a quote not closed?"
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
    """Reads the object in a JSON file.

    Args:
      path: The file.
      *names: The required entries.
      object_hook: Applied to every object, as in `json.load`.
      most: The largest size in bytes.

    Returns:
      The object.

    Raises:
      DamagedArchiveError: The file is not JSON, or an entry is missing.
    """

    try:
        content = load_json(path, most=most, object_hook=object_hook)
    except OSError as error:
        raise DamagedArchiveError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedArchiveError(f"{path} is not a JSON file: {error}") from error
    return entries(content, path, *names)


def entries(content: Any, path: Path, *names: str) -> dict[str, Any]:
    """Checks that the content of a file is a dictionary with the required entries.

    Args:
      content: The content of the file.
      path: The file, for messages.
      *names: The required entries.

    Returns:
      The dictionary, with keys of type bytes converted to strings.

    Raises:
      DamagedArchiveError: It is not a dictionary, or an entry is missing.
    """
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


def pixels(array: Any, path: Path) -> np.ndarray:
    """Checks that the content of a file is an array of colour images.

    Args:
      array: The content of the file.
      path: The file, for messages.

    Returns:
      uint8 [n, h, w, 3].

    Raises:
      DamagedArchiveError: It is something else.
    """
    if not isinstance(array, np.ndarray):
        raise DamagedArchiveError(f"{path}: images should be an array, not {typed(array)}")
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3:
        raise DamagedArchiveError(
            f"{path}: images should be uint8 [n, h, w, 3], not {array.dtype} {list(array.shape)}"
        )
    return array
