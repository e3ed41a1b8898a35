"""The images of a split as archives contain them, and their conversion to the stored size."""

from __future__ import annotations

import csv
import functools
import io
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, NamedTuple
from xml.etree import ElementTree

import numpy as np
from PIL import Image, ImageFile, ImageOps

from experiments.data.builders.archives import (
    DamagedArchiveError,
    brief,
    load_pickle,
    reading,
    typed,
)
from experiments.storage import load_json, regular

Encoding = Literal["png", "jpeg"]

LONGEST = 2
"""The longer side of a photograph that is stored whole, relative to the size of the data set."""

Table = Sequence[Any] | np.ndarray
"""Pixels uint8 [n, h, w, c], or n encoded images."""


@dataclass(frozen=True)
class SourceImage:
    """An image and its origin."""

    content: Path | bytes | np.ndarray
    """A file, an encoded image (also as an array of bytes), or pixels uint8 [h, w, c]."""
    source: str
    """The name of the image in error messages."""


@dataclass(frozen=True)
class ClassSplit:
    """The images of one split, grouped by class."""

    classes: Mapping[str, Sequence[Any]]
    """The ordered keys of the images of every class: paths, or rows of a table."""
    open: Callable[[], Callable[[Any], SourceImage]]
    """Opens the images. Returns a function from a key to its image."""
    source: Path | str
    """The file or folder that defines the classes, for messages."""


@dataclass(frozen=True)
class MultiLabelSplit:
    """The images of one split, each with any number of labels."""

    names: tuple[str, ...]
    """The names of the labels."""
    keys: Sequence[Any]
    """The ordered keys of the images."""
    targets: np.ndarray
    """int8 [n, C]: 1 if the image has the label, 0 if not, −1 if unknown."""
    open: Callable[[], Callable[[Any], SourceImage]]
    """As in `ClassSplit`."""
    source: Path | str
    """The file or folder that defines the labels, for messages."""


def open_files() -> Callable[[Path], SourceImage]:
    """Opens images stored as separate files, whose keys are their paths."""
    return lambda path: SourceImage(path, str(path))


def split_of_files(classes: Mapping[str, Sequence[Path]], source: Path) -> ClassSplit:
    """A split of images stored as separate files.

    Args:
      classes: The files of every class.
      source: The file or folder that defines the classes.

    Returns:
      The classes and files, sorted by name.
    """
    return ClassSplit(_ordered(classes), open_files, source)


def _ordered(classes: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Classes and keys, sorted. One name is one class, however its accents are encoded."""
    merged: dict[str, list[Any]] = {}
    for name, keys in classes.items():
        merged.setdefault(unicodedata.normalize("NFC", name), []).extend(keys)
    return {name: sorted(merged[name]) for name in sorted(merged)}


def split_of_rows(
    classes: dict[str, list[int]], load: Callable[[], Table], source: Path
) -> ClassSplit:
    """A split of images stored as rows of a table.

    Args:
      classes: The rows of every class.
      load: Reads the table.
      source: The file of the table, for messages.

    Returns:
      The classes and rows, sorted.
    """
    ordered = _ordered(classes)

    def open_table() -> Callable[[int], SourceImage]:
        table = load()
        rows = [row for rows in ordered.values() for row in rows]
        if rows and not 0 <= min(rows) <= max(rows) < len(table):
            raise DamagedArchiveError(
                f"{source} has {len(table)} images, but refers to rows {min(rows)} to {max(rows)}"
            )
        return lambda row: SourceImage(table[row], f"{source}, image {row}")

    return ClassSplit(ordered, open_table, source)


def split_of_pickle(path: Path, prefix: str) -> ClassSplit:
    """A split from a pickle with `data` uint8 [n, h, w, 3] and `labels` [n].

    Args:
      path: The pickle.
      prefix: Precedes the number of a class that the pickle's `catname2label` does not name.
        Several files may each count their classes from zero.

    Returns:
      The classes and images.

    Raises:
      DamagedArchiveError: The file is unreadable or has another structure.
    """

    def load() -> dict[str, Any]:
        return entries(load_pickle(path), path, "data", "labels")

    content = load()
    named = entries(content.get("catname2label", {}), path)
    numbers = column([*named.values()], int, f"{path}: catname2label")
    names = dict(zip(numbers, column([*named], str, f"{path}: catname2label"), strict=True))
    labels = column(content["labels"], int, f"{path}: labels")
    if len(labels) != len(pixels(content["data"], path)):
        raise DamagedArchiveError(f"{path}: data and labels differ in length")
    classes: dict[str, list[int]] = {}
    for row, label in enumerate(labels):
        classes.setdefault(names.get(label, f"{prefix} {label:03}"), []).append(row)
    return split_of_rows(classes, lambda: pixels(load()["data"], path), path)


@functools.cache
def _image_extensions() -> frozenset[str]:
    """The extensions of the images that Pillow reads by itself, in lower case."""
    Image.init()
    stubs = {name for name, (opener, _) in Image.OPEN.items() if _is_stub(opener)}
    # A video is only identified, and Ghostscript, if it is there, draws EPS at any size. Stereo
    # photographs (MPO) are opened as JPEG.
    read = {*Image.OPEN, "MPO"} - stubs - {"MPEG", "EPS"}
    return frozenset(end for end, name in Image.registered_extensions().items() if name in read)


def _is_stub(opener: Any) -> bool:
    return isinstance(opener, type) and issubclass(opener, ImageFile.StubImageFile)


# In lower case. Hidden files and folders are skipped, too.
_OF_SYSTEMS = {
    *("__macosx", "@eadir", "@recycle", "@recently-snapshot", "#recycle", "#snapshot"),
    *("lost+found", "$recycle.bin", "system volume information", "network trash folder"),
    *("temporary items", "thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "icon\r"),
}


def is_of_system(name: str) -> bool:
    """Whether systems, and not people, leave files or folders of this name behind."""
    return name.startswith(".") or name.lower() in _OF_SYSTEMS


def list_folders(folder: Path) -> list[Path]:
    """Lists the folders in a folder, without those that systems leave behind.

    Args:
      folder: The folder.

    Returns:
      The folders, also those behind links, sorted.
    """
    # Path.iterdir needs a system call per file to tell folders apart; there may be 50,000 files.
    with os.scandir(folder) as found:
        names = [entry.name for entry in found if not is_of_system(entry.name) and entry.is_dir()]
    return [folder / name for name in sorted(names)]


def list_images(folder: Path) -> list[Path]:
    """Lists the image files of a folder.

    Args:
      folder: The folder. It may not exist.

    Returns:
      The files that Pillow reads, by file extension, without those that systems leave behind.
    """
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if is_image(path.name)]


def is_image(name: str) -> bool:
    """Whether Pillow reads files of this name, by the extension."""
    return os.path.splitext(name)[1].lower() in _image_extensions() and not is_of_system(name)


def list_files(folder: Path) -> list[Path]:
    """Lists the files in a folder and its subfolders, without those that systems leave behind.

    Args:
      folder: The folder.

    Returns:
      The files, also those behind links, each once.

    Raises:
      OSError: A folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    files, visited = [], set()
    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:  # A link to a folder above.
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not is_of_system(name))
        files += [Path(place, name) for name in names if not is_of_system(name)]
    return files


def alike(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of different names that are equal but for case, spaces and encoded accents.

    The first of a pair comes before the second.
    """
    first: dict[str, str] = {}
    pairs = []
    for name in dict.fromkeys(names):
        folded = unicodedata.normalize("NFC", name).casefold()
        key = unicodedata.normalize("NFC", " ".join(folded.split()))
        if first.setdefault(key, name) != name:
            pairs.append((first[key], name))
    return pairs


def left_out(paths: Iterable[Path], folder: Path, noun: str, why: str) -> list[str]:
    """A line with the number of a folder's files or folders (`noun`), why, and the first names.

    No line if there are none.
    """
    names = sorted(readable(path.relative_to(folder)) for path in paths)
    if not names:
        return []
    count = f"{len(names)} {noun}" + "s" * (len(names) > 1)
    shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
    return [f"left out {count} {why}: {shown}"]


def readable(path: Path) -> str:
    """The path, with the bytes that are not UTF-8 as `\\xe9`."""
    text = os.fsencode(path).decode("utf-8", "backslashreplace")
    return text.replace("\n", "\\n").replace("\r", "\\r")


def class_name(folder: Path) -> str:
    """The class that a folder is named after.

    Args:
      folder: The folder of a class.

    Returns:
      Its name.

    Raises:
      DamagedArchiveError: The name is not UTF-8, or has several lines. The message has the path.
    """
    try:
        folder.name.encode()
    except UnicodeEncodeError:
        problem = "is not UTF-8"
    else:
        if folder.name.splitlines() == [folder.name]:
            return folder.name
        problem = "has several lines"
    raise DamagedArchiveError(
        f"the name of the folder {readable(folder)} {problem}; rename it, as the class has its name"
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

    def unique(pairs: list[tuple[str, Any]]) -> Any:
        entry = dict(pairs)
        if len(entry) < len(pairs):
            raise ValueError("an object has an entry twice")
        return entry if object_hook is None else object_hook(entry)

    try:
        if regular(path).stat().st_size > most:
            raise ValueError(f"it is larger than {most >> 20} MiB")
        content = load_json(path, unique)
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


def encode(
    image: SourceImage,
    shape: tuple[int, int, int],
    *,
    whole: bool = False,
    encoding: Encoding = "png",
    background: str = "white",
    bits: int = 16,
) -> bytes:
    """Converts an image, read by `read_image`, to the size of the data set, and encodes it.

    An image of the right size is not resized; with PNG its pixels are unchanged. Any other image is
    resized (bilinear, with antialiasing) and cropped at the centre. With `whole`, nothing is
    cropped or enlarged: the shorter side becomes `shape[0]` pixels long, or less if the longer one
    would exceed `LONGEST` times as many.

    Args:
      image: The image.
      shape: Height, width and channels (1 or 3).
      whole: Whether to keep all of the image, and its aspect ratio.
      encoding: PNG, or JPEG with quality 95 and no chroma subsampling.
      background, bits: As in `read_image`.

    Returns:
      The encoded image.

    Raises:
      DamagedArchiveError: The image cannot be read, or has greys of 32 bits (modes I and F), of
        which nothing states the white. The message contains its source.
    """
    height, width, channels = shape
    try:
        decoded = read_image(image.content, channels, background=background, bits=bits)
        if whole:
            size = _whole_size(*decoded.size, height)
            if size != decoded.size:
                decoded = decoded.resize(size, Image.Resampling.BILINEAR)
        elif decoded.size != (width, height):
            scale = max(width / decoded.width, height / decoded.height)
            size = round(decoded.width * scale), round(decoded.height * scale)
            decoded = decoded.resize(size, Image.Resampling.BILINEAR)
            left, top = (decoded.width - width) // 2, (decoded.height - height) // 2
            decoded = decoded.crop((left, top, left + width, top + height))
    except Exception as error:
        # Pillow's decoders raise almost any exception on a damaged file.
        raise DamagedArchiveError(f"{image.source} is not a readable image: {error}") from error
    buffer = io.BytesIO()
    if encoding == "png":
        decoded.save(buffer, "PNG", compress_level=3)
    else:
        decoded.save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


def _whole_size(width: int, height: int, side: int) -> tuple[int, int]:
    """Width and height of a photograph as it is stored whole; lengths are rounded down."""
    shorter, longer = sorted((width, height))
    if shorter > side:
        shorter, longer = side, longer * side // shorter
    if longer > LONGEST * side:
        shorter, longer = max(1, shorter * LONGEST * side // longer), LONGEST * side
    return (shorter, longer) if width < height else (longer, shorter)


def read_image(
    content: Path | bytes | np.ndarray,
    channels: int,
    *,
    background: str = "white",
    bits: int = 16,
    small: bool = False,
) -> Image.Image:
    """Decodes an image: the one way from a file to pixels.

    Args:
      content: As in `SourceImage`.
      channels: 1 for grey, 3 for RGB.
      background: The colour that transparent images are laid on, as Pillow names it. What a file
        hides under transparent pixels is arbitrary.
      bits: How many of the lower bits count in greys of 16 bits of which the file states nothing.
      small: Whether to decode a JPEG at an eighth of its size, for speed.

    Returns:
      The image of 8 bits a channel, turned as its EXIF orientation says, and opaque.
    """
    if isinstance(content, np.ndarray) and content.ndim == 3 and content.shape[-1] in (1, 3):
        turned = Image.fromarray(content[..., 0] if content.shape[-1] == 1 else content)
        return turned.convert("L" if channels == 1 else "RGB")
    if isinstance(content, np.ndarray):  # An encoded image, as OpenCV returns it.
        content = content.tobytes()
    with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
        if small:
            image.draft(None, (1, 1))
        image.load()
        white, inverted = _range_of_greys(image, bits)
        image.getexif()
        transparency = image.info.get("transparency")
        # Pillow now knows the orientation. The rest is neither stored nor converted: damaged EXIF
        # data would stop `exif_transpose`.
        image.info.clear()
        turned = ImageOps.exif_transpose(image)
    if white is not None:
        levels = np.asarray(turned).astype(np.uint32)
        grey = (np.minimum(levels, white) * 255 + white // 2) // white
        turned = Image.fromarray((255 - grey if inverted else grey).astype(np.uint8))
        if transparency is not None:  # A level.
            turned.putalpha(Image.fromarray(np.where(levels == transparency, 0, 255).astype("u1")))
    elif transparency is not None:
        turned.info["transparency"] = transparency
    if turned.has_transparency_data:
        canvas = Image.new("RGBA", turned.size, background)
        canvas.alpha_composite(turned.convert("RGBA"))
        turned = canvas
    return turned.convert("L" if channels == 1 else "RGB")


class Inspected(NamedTuple):
    """What `inspect_image` finds."""

    size: tuple[int, int]
    """The shorter and the longer side."""
    is_jpeg: bool
    grey: bool
    transparent: bool
    """Whether a pixel is transparent."""
    largest: int
    """The largest of greys of 16 bits of which the file does not state how many count; else 0."""
    coarse: bool | None
    """Of colours of 16 bits, of which Pillow reads the upper 8: whether all are below half."""


def inspect_image(content: bytes) -> Inspected:
    """What an image needs of its data set; most images are not decoded for it."""
    with Image.open(io.BytesIO(content)) as image:
        transparent, largest, deep = image.has_transparency_data, 0, image.mode[:4] == "I;16"
        coarse = False if not deep and re.search(";16[BLN]", str(image.tile)) else None
        if deep and image.format in ("PNG", "TIFF") and _range_of_greys(image, 0)[0] == 0:
            levels = np.asarray(image)
            opaque = levels[levels != image.info.get("transparency", -1)]
            transparent, largest = opaque.size < levels.size, int(opaque.max(initial=0))
        elif transparent or coarse is not None:
            *colours, alpha = np.asarray(image.convert("RGBA")).reshape(-1, 4).T
            transparent = bool(alpha.min() < 255)
            coarse = coarse if coarse is None else max(map(np.max, colours)) < 128
        grey = image.mode in ("1", "L", "LA", "La", "I", "F") or deep
        size, is_jpeg = (min(image.size), max(image.size)), image.format in ("JPEG", "MPO")
        return Inspected(size, is_jpeg, grey, transparent, largest, coarse)


def _range_of_greys(image: Image.Image, bits: int) -> tuple[int | None, bool]:
    """The white of greys with more than 8 bits, None for other images; and whether 0 is white.

    `bits` count where the format does not say how many of 16 do. Raises a ValueError for greys of
    32 bits, as no format states their white.
    """
    if image.mode.startswith("I;16") and image.format == "TIFF":
        tags: Any = image.tag_v2  # pyright: ignore[reportAttributeAccessIssue]
        stated, photometric = tags.get(258, (16,))[0], tags.get(262, 1)
        return 2 ** (bits if stated == 16 else stated) - 1, photometric == 0
    # Pillow scales those of JPEG 2000 and PGM to 16 bits.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return 2 ** (bits if image.format == "PNG" else 16) - 1, False
    if image.mode in ("I", "F"):
        kind = "integers" if image.mode == "I" else "floats"
        raise ValueError(
            f"its greys are {kind} (mode {image.mode}), and nothing states which of them is white; "
            "convert it to 8 or 16 bits"
        )
    return None, False
