"""The images of a split as archives contain them, and their conversion to the stored size."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from experiments.data.builders.archives import DamagedArchiveError, load_pickle

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
    ordered = {name: sorted(classes[name]) for name in sorted(classes)}
    return ClassSplit(ordered, open_files, source)


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
    ordered = {name: sorted(classes[name]) for name in sorted(classes)}

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
    names = {int(label): text(name) for name, label in content.get("catname2label", {}).items()}
    classes: dict[str, list[int]] = {}
    for row, label in enumerate(content["labels"]):
        label = int(label)
        classes.setdefault(names.get(label, f"{prefix} {label:03}"), []).append(row)
    if len(content["labels"]) != len(content["data"]):
        raise DamagedArchiveError(f"{path}: data and labels differ in length")
    return split_of_rows(classes, lambda: pixels(load()["data"], path), path)


def list_images(folder: Path) -> list[Path]:
    """Lists the image files of a folder.

    Args:
      folder: The folder. It may not exist.

    Returns:
      The JPEG and PNG files, by file extension, without the hidden files that some systems add
      to archives.
    """
    if not folder.is_dir():
        return []
    return [
        path
        for path in folder.iterdir()
        if path.suffix.lower() in (".jpg", ".jpeg", ".png") and not path.name.startswith(".")
    ]


def text(name: Any) -> str:
    """Converts a name from a file to a string on one line."""
    return " ".join((name.decode("latin1") if isinstance(name, bytes) else str(name)).split())


def read_lines(path: Path) -> list[str]:
    """Reads the lines of a text file.

    Args:
      path: The file.

    Returns:
      The lines.

    Raises:
      DamagedArchiveError: The file is not text.
    """
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except ValueError as error:
        raise DamagedArchiveError(f"{path} is not a text file: {error}") from error


def read_json(
    path: Path, *names: str, object_hook: Callable[[dict[str, Any]], Any] | None = None
) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Args:
      path: The file.
      *names: The required entries.
      object_hook: Applied to every object, as in `json.load`.

    Returns:
      The object.

    Raises:
      DamagedArchiveError: The file is not JSON, or an entry is missing.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file, object_hook=object_hook)
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
        raise DamagedArchiveError(f"{path} contains {type(content).__name__}, not a dictionary")
    content = {text(name): value for name, value in content.items()}
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
    array = np.asarray(array)
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
) -> bytes:
    """Converts an image to the size of the data set, and encodes it.

    An image of the right size is not resized; with PNG its pixels are unchanged. Any other image is
    resized (bilinear, with antialiasing) and cropped at the centre. With `whole`, nothing is
    cropped or enlarged: the shorter side becomes `shape[0]` pixels long, or less if the longer one
    would exceed `LONGEST` times as many.

    Args:
      image: The image.
      shape: Height, width and channels (1 or 3).
      whole: Whether to keep all of the image, and its aspect ratio.
      encoding: PNG, or JPEG with quality 95 and no chroma subsampling.

    Returns:
      The encoded image.

    Raises:
      DamagedArchiveError: The image cannot be read. The message contains its source.
    """
    height, width, channels = shape
    try:
        decoded = _open(image.content).convert("L" if channels == 1 else "RGB")
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


def _open(content: Path | bytes | np.ndarray) -> Image.Image:
    if isinstance(content, np.ndarray) and content.ndim == 3 and content.shape[-1] in (1, 3):
        return Image.fromarray(content[..., 0] if content.shape[-1] == 1 else content)
    if isinstance(content, np.ndarray):  # An encoded image, as OpenCV returns it.
        content = content.tobytes()
    with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
        image.load()
        return image
