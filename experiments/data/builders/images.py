"""The images of a split as archives contain them, and their conversion to the stored size."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import re
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from experiments.data.builders.archives import DamagedArchiveError, load_pickle, readable
from experiments.data.builders.readers import column, entries, pixels
from experiments.storage import regular
from experiments.terminal import has_controls

Encoding = Literal["png", "jpeg"]

LONGEST = 2
"""The longer side of a photograph that is stored whole, relative to the size of the data set."""

LARGEST = 2**26
"""The most pixels of an image that is read, and of all that are decoded at a time."""
_MOST_BYTES = 8 * LARGEST
"""Of a file: more than any of so many pixels needs."""
Image.MAX_IMAGE_PIXELS = LARGEST // 2  # Pillow refuses twice as many, and warns below that.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Blocks of a large image go back to the system; of smaller blocks, every thread would keep some.
Image.core.set_block_size(2**26)

_FORMATS = (
    *("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "DIB", "PPM", "JPEG2000", "AVIF"),
    *("ICO", "PCX", "QOI", "SGI", "SUN", "TGA"),
)
"""The formats of images that are read, whatever the extension says. Others of Pillow's start a
program (EPS), open what is inside a file in any format (IPTC), or are not those of photographs."""

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
def _image_formats() -> tuple[str, ...]:
    """Of `_FORMATS`, those that this Pillow reads."""
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


@functools.cache
def _image_extensions() -> frozenset[str]:
    """The extensions of the images that are read, in lower case."""
    read = {*_image_formats(), "MPO"}  # Stereo photographs are opened as JPEG.
    return frozenset(end for end, name in Image.registered_extensions().items() if name in read)


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
      The files that are read, by file extension, without those that systems leave behind.
    """
    if not folder.is_dir():
        return []
    with os.scandir(folder) as found:
        names = [entry.name for entry in found if is_image(entry.name) and not _is_special(entry)]
    return [folder / name for name in names]


def is_image(name: str) -> bool:
    """Whether files of this name are read as images, by the extension."""
    return os.path.splitext(name)[1].lower() in _image_extensions() and not is_of_system(name)


def _is_special(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder, or a pipe, a socket or a device. A link to nothing is an error."""
    return not entry.is_file() and os.path.exists(entry)


def list_files(folder: Path) -> list[Path]:
    """Lists the files in a folder and its subfolders, without those that systems leave behind.

    Args:
      folder: The folder.

    Returns:
      The files, also those behind links that stay in the folder, each once; not pipes, sockets and
      devices.

    Raises:
      OSError: A folder cannot be read.
    """
    return [Path(entry.path) for entry in _walk(folder, folder, []) if not _is_special(entry)]


def list_images_and_others(
    folder: Path, root: Path | None
) -> tuple[list[Path], list[Path], list[Path]]:
    """As `list_files`, but links may lead anywhere below `root`, or anywhere at all.

    Returns:
      The images; all others, also pipes, sockets and devices; and the links that lead out.
    """
    found: dict[bool, list[Path]] = {True: [], False: []}
    links: list[Path] = []
    for entry in _walk(folder, root, links):
        found[is_image(entry.name) and not _is_special(entry)].append(Path(entry.path))
    return found[True], found[False], links


def leads_out(path: Path | os.DirEntry[str], root: Path | None) -> bool:
    """Whether it is a link to a place that is not below `root`."""
    if root is None or not path.is_symlink():
        return False
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def _walk(folder: Path, root: Path | None, links: list[Path]) -> Iterator[os.DirEntry[str]]:
    """All that is no folder, in a folder and its subfolders; `links` receives what leads out."""
    visited: set[str] = set()
    places = [os.fspath(folder)]
    while places:
        real = os.path.realpath(place := places.pop(0))
        if real in visited:  # A link to a folder above.
            continue
        visited.add(real)
        with os.scandir(place) as found:
            named = [entry for entry in found if not is_of_system(entry.name)]
        entries = [entry for entry in named if not leads_out(entry, root)]
        links += [Path(entry.path) for entry in named if leads_out(entry, root)]
        below = [entry.path for entry in entries if entry.is_dir()]
        places[:0] = sorted(below)
        yield from (entry for entry in entries if not entry.is_dir())


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


def class_name(folder: Path) -> str:
    """The class that a folder is named after.

    Args:
      folder: The folder of a class.

    Returns:
      Its name.

    Raises:
      DamagedArchiveError: The name is not UTF-8, or has control characters. The message has the
        path.
    """
    try:
        folder.name.encode()
    except UnicodeEncodeError:
        problem = "is not UTF-8"
    else:
        if not has_controls(folder.name):
            return folder.name
        problem = "has several lines or control characters"
    raise DamagedArchiveError(
        f"the name of the folder {readable(folder)} {problem}; rename it, as the class has its name"
    )


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
        with _opened(image.content) as opened:
            decoded = _decoded(opened, channels, background, bits)
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


@contextlib.contextmanager
def _opened(content: Path | bytes | np.ndarray) -> Iterator[Image.Image]:
    """Opens an image, which is decoded in the context; the one way from a file to an image."""
    if isinstance(content, np.ndarray) and content.ndim == 3 and content.shape[-1] in (1, 3):
        yield Image.fromarray(content[..., 0] if content.shape[-1] == 1 else content)
        return
    if isinstance(content, np.ndarray):  # An encoded image, as OpenCV returns it.
        content = content.tobytes()
    if isinstance(content, Path) and regular(content).stat().st_size > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes; resize it")
    file = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        with Image.open(file, formats=_image_formats()) as image, _in_turn(_size(image)):
            yield image
    except Image.DecompressionBombError as error:
        raise ValueError(f"it has more than {LARGEST:,} pixels; resize it") from error


def _size(image: Image.Image) -> int:
    """The most pixels that are decoded at once: of the image, of a tile of a TIFF, in an icon."""
    tags = getattr(image, "tag_v2", {})
    size = max(image.width * image.height, int(tags.get(322, 0)) * int(tags.get(323, 0)))
    if size > LARGEST:
        raise Image.DecompressionBombError
    return LARGEST if image.format == "ICO" else size


_decoding, _room = threading.Condition(), LARGEST


@contextlib.contextmanager
def _in_turn(size: int) -> Iterator[None]:
    """Waits until the images that other threads decode leave room for so many pixels.

    Those of less than a megapixel do not wait.
    """
    global _room
    size = 0 if size < 2**20 else size
    with _decoding:
        _decoding.wait_for(lambda: _room >= size)
        _room -= size
    try:
        yield
    finally:
        with _decoding:
            _room += size
            _decoding.notify_all()


def read_image(content: Path | bytes | np.ndarray, channels: int, **how: Any) -> Image.Image:
    """Decodes an image.

    Args:
      content: As in `SourceImage`.
      channels: 1 for grey, 3 for RGB.
      **how: Optional arguments of `_decoded`.

    Returns:
      The image of 8 bits a channel, turned as its EXIF orientation says, and opaque.
    """
    with _opened(content) as image:
        return _decoded(image, channels, **how)


def hash_pixels(content: Path, channels: int, **how: Any) -> tuple[tuple[int, int], bytes]:
    """The size and a hash of the pixels of what `read_image` returns."""
    with _opened(content) as image:
        decoded = _decoded(image, channels, **how)
        return decoded.size, hashlib.blake2b(decoded.tobytes()).digest()


def _decoded(
    image: Image.Image,
    channels: int,
    background: str = "white",
    bits: int = 16,
    small: bool = False,
) -> Image.Image:
    """Decodes an opened image; it takes at most 12 bytes a pixel.

    Args:
      image: The image, which changes.
      channels: As in `read_image`, as what is returned.
      background: The colour that transparent images are laid on, as Pillow names it. What a file
        hides under transparent pixels is arbitrary.
      bits: How many of the lower bits count in greys of 16 bits of which the file states nothing.
      small: Whether to decode a JPEG at an eighth of its size, for speed.
    """
    if small:
        image.draft(None, (1, 1))
    image.load()
    white, inverted = _range_of_greys(image, bits)
    image.getexif()
    transparency = image.info.get("transparency")
    # Pillow now knows the orientation. The rest is neither stored nor converted: damaged EXIF data
    # would stop `exif_transpose`.
    image.info.clear()
    ImageOps.exif_transpose(image, in_place=True)
    if white is not None:
        levels = np.asarray(image).astype(np.uint32)
        opaque = None if transparency is None else levels != transparency  # A level.
        np.minimum(levels, white, out=levels)
        levels *= 255
        levels += white // 2
        levels //= white
        image = Image.fromarray((255 - levels if inverted else levels).astype(np.uint8))
        if opaque is not None:
            image.putalpha(Image.fromarray(opaque.astype(np.uint8) * 255))
    elif transparency is not None:
        image.info["transparency"] = transparency
    if image.has_transparency_data:
        over = image if image.mode == "RGBA" else image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, background), over)
    return image.convert("L" if channels == 1 else "RGB")


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


def inspect_image(content: Path | bytes) -> Inspected:
    """What an image needs of its data set; most images are not decoded for it."""
    with _opened(content) as image:
        transparent, largest, deep = image.has_transparency_data, 0, image.mode[:4] == "I;16"
        tiles = str(image.tile)  # pyright: ignore[reportAttributeAccessIssue]
        coarse = False if not deep and re.search(";16[BLN]", tiles) else None
        if deep and image.format in ("PNG", "TIFF") and _range_of_greys(image, 0)[0] == 0:
            levels = np.asarray(image)
            opaque = levels[levels != image.info.get("transparency", -1)]
            transparent, largest = opaque.size < levels.size, int(opaque.max(initial=0))
        elif transparent or coarse is not None:
            extrema: Any = image.convert("RGBA").getextrema()  # Of every channel.
            transparent = extrema[3][0] < 255
            coarse = coarse if coarse is None else max(most for _, most in extrema[:3]) < 128
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
