"""The images of an archive: by class, with the place each came from, and at one size."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from experiments.data.archives import DamagedArchiveError, load_pickle

Encoding = Literal["png", "jpeg"]

Table = Sequence[Any] | np.ndarray
"""Pixels uint8 [n, h, w, c], or n encoded images."""


@dataclass(frozen=True)
class Picture:
    """One image, and where it came from."""

    content: Path | bytes | np.ndarray
    """A file, an encoded image (also as an array of bytes), or pixels uint8 [h, w, c]."""
    source: str
    """Names the image in an error message."""


@dataclass(frozen=True)
class Pictures:
    """The images of one split."""

    classes: Mapping[str, Sequence[Any]]
    """For every class, in order, the keys of its images in order: paths, or rows of a table."""
    open: Callable[[], Callable[[Any], Picture]]
    """Opens the table; what it returns gives the image of a key."""
    source: Path | str
    """The file or folder that says which classes there are, for messages."""


@dataclass(frozen=True)
class LabelledPictures:
    """The images of one split, each with any number of labels."""

    names: tuple[str, ...]
    """The labels."""
    keys: Sequence[Any]
    """The keys of the images, in order."""
    targets: np.ndarray
    """int8 [n, C]: 1, 0, or −1 where it is unknown whether the image has the label."""
    open: Callable[[], Callable[[Any], Picture]]
    """As of `Pictures`."""
    source: Path | str
    """The file or folder that says which labels there are, for messages."""


def open_files() -> Callable[[Path], Picture]:
    """Opens images that are files of their own; the keys are their paths."""
    return lambda path: Picture(path, str(path))


def picture_files(classes: dict[str, list[Path]], source: Path) -> Pictures:
    """Images that are files of their own.

    Args:
        classes: The files of every class.
        source: The file or folder that says which classes there are.

    Returns:
        Classes and files, sorted by name.
    """
    ordered = {name: sorted(classes[name]) for name in sorted(classes)}
    return Pictures(ordered, open_files, source)


def picture_rows(
    classes: dict[str, list[int]], load: Callable[[], Table], source: Path
) -> Pictures:
    """Images that are rows of a table in one file.

    Args:
        classes: The rows of every class.
        load: Reads the table.
        source: The file, for messages.

    Returns:
        Classes and rows, sorted.
    """
    ordered = {name: sorted(classes[name]) for name in sorted(classes)}

    def open_table() -> Callable[[int], Picture]:
        table = load()
        rows = [row for rows in ordered.values() for row in rows]
        if rows and not 0 <= min(rows) <= max(rows) < len(table):
            raise DamagedArchiveError(
                f"{source} has {len(table)} images, but names number {min(rows)} to {max(rows)}"
            )
        return lambda row: Picture(table[row], f"{source}, image {row}")

    return Pictures(ordered, open_table, source)


def labelled_pickle(path: Path, prefix: str) -> Pictures:
    """Images from a pickle with `data` uint8 [n, h, w, 3] and `labels` [n].

    Args:
        path: The pickle.
        prefix: Goes before the number of a class that `catname2label` in the pickle does not
            name, because such files may each count from zero.

    Returns:
        Its classes and images.

    Raises:
        DamagedArchiveError: It is unreadable or of another form.
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
    return picture_rows(classes, lambda: pixels(load()["data"], path), path)


def list_images(folder: Path) -> list[Path]:
    """The image files of a folder, if there is one.

    Args:
        folder: The folder.

    Returns:
        Its files with the endings of JPEG and PNG, without hidden ones, which some systems leave
        in archives.
    """
    if not folder.is_dir():
        return []
    return [
        path
        for path in folder.iterdir()
        if path.suffix.lower() in (".jpg", ".jpeg", ".png") and not path.name.startswith(".")
    ]


def text(name: Any) -> str:
    """A name from a file as a string on one line."""
    return " ".join((name.decode("latin1") if isinstance(name, bytes) else str(name)).split())


def read_lines(path: Path) -> list[str]:
    """The lines of a text file.

    Args:
        path: The file.

    Returns:
        Its lines.

    Raises:
        DamagedArchiveError: It is no text.
    """
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except ValueError as error:
        raise DamagedArchiveError(f"{path} is no text: {error}") from error


def read_json(path: Path, *names: str) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: The file.
        *names: Entries that must be there.

    Returns:
        The object.

    Raises:
        DamagedArchiveError: It is no JSON, or an entry is missing.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedArchiveError(f"{path} is no JSON: {error}") from error
    return entries(content, path, *names)


def entries(content: Any, path: Path, *names: str) -> dict[str, Any]:
    """A dictionary from a file, checked to hold what is needed.

    Args:
        content: What the file held.
        path: The file, for messages.
        *names: Entries that must be there.

    Returns:
        The dictionary; names that were bytes are strings.

    Raises:
        DamagedArchiveError: It is no dictionary, or an entry is missing.
    """
    if not isinstance(content, dict):
        raise DamagedArchiveError(f"{path} holds {type(content).__name__}, not a dictionary")
    content = {text(name): value for name, value in content.items()}
    missing = [name for name in names if name not in content]
    if missing:
        raise DamagedArchiveError(f"{path} has no entry {', '.join(missing)}")
    return content


def pixels(array: Any, path: Path) -> np.ndarray:
    """An array from a file, checked to be colour images.

    Args:
        array: What the file held.
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
    picture: Picture,
    shape: tuple[int, int, int],
    *,
    margin: float = 1.1,
    encoding: Encoding = "png",
) -> bytes:
    """An image at the size of the data set, encoded.

    An image of the right size stays as it is, pixel for pixel if the encoding is PNG. Any other is
    resized until its shorter side is `margin` times the size (bilinear with antialiasing), and its
    centre cut out.

    Args:
        picture: The image.
        shape: Height, width and channels, 1 or 3.
        margin: 1 keeps as much of the image as the shape can.
        encoding: PNG, or JPEG of quality 95 with all of its colour.

    Returns:
        The encoded image.

    Raises:
        DamagedArchiveError: It cannot be read; the message names it.
    """
    height, width, channels = shape
    try:
        image = _open(picture.content).convert("L" if channels == 1 else "RGB")
        if image.size != (width, height):
            scale = margin * max(width / image.width, height / image.height)
            size = round(image.width * scale), round(image.height * scale)
            image = image.resize(size, Image.Resampling.BILINEAR)
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))
    except Exception as error:
        # Pillow's readers raise nearly anything on a file that is damaged.
        raise DamagedArchiveError(f"{picture.source} is no readable image: {error}") from error
    buffer = io.BytesIO()
    if encoding == "png":
        image.save(buffer, "PNG", compress_level=3)
    else:
        image.save(buffer, "JPEG", quality=95, subsampling=0)
    return buffer.getvalue()


def _open(content: Path | bytes | np.ndarray) -> Image.Image:
    if isinstance(content, np.ndarray) and content.ndim == 3 and content.shape[-1] in (1, 3):
        return Image.fromarray(content[..., 0] if content.shape[-1] == 1 else content)
    if isinstance(content, np.ndarray):  # as OpenCV encodes
        content = content.tobytes()
    with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
        image.load()
        return image
