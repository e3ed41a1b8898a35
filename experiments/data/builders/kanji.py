"""Kanji: characters and the components they are made of, drawn from the strokes of KanjiVG."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image, ImageDraw

from experiments.data.archives import DamagedArchiveError, MissingArchiveError
from experiments.data.builders.frame import Facts
from experiments.data.builders.kinds import MultiLabelBuilder
from experiments.data.builders.layouts import Place
from experiments.data.builders.pictures import LabelledPictures, Picture

_PACKAGE = "kanjivg"
_INSTALL = 'pip install -e ".[kanji]"'
# A component is a label if so many characters have it.
_LEAST = 100
# Of ten characters: 6 to train, 2 to validate, 2 to test.
_SPLITS = {"train": range(0, 6), "validation": range(6, 8), "test": range(8, 10)}

_SVG = "{http://www.w3.org/2000/svg}"
_ELEMENT = "{http://kanjivg.tagaini.net}element"
_SIDE = 109
_STROKE = 5.0  # thicker than KanjiVG's 3, which is thinner than a pixel at 32×32
_OVERSAMPLING = 4
_TOKEN = r"[A-Za-z]|[-+]?(?:\d+\.?\d*|\.\d+)"


# --- The package --------------------------------------------------------------------------------


def _folder() -> Path:
    try:
        folder = Path(str(distribution(_PACKAGE).locate_file("kanji")))
    except PackageNotFoundError:
        raise MissingArchiveError(
            f"kanji is drawn from the package {_PACKAGE}, which is not installed: {_INSTALL}"
        ) from None
    if not folder.is_dir():
        raise MissingArchiveError(f"the package {_PACKAGE} has no folder {folder}: {_INSTALL}")
    return folder


def _character(path: Path) -> str:
    """The Chinese character that a file shows; empty for other scripts and for variants."""
    if not re.fullmatch(r"[0-9a-f]{5,6}", path.stem):
        return ""
    number = int(path.stem, 16)
    # The blocks of unified ideographs; `unicodedata` knows more of them in every Python.
    return chr(number) if 0x3400 <= number <= 0x9FFF or 0x20000 <= number <= 0x3FFFF else ""


def _parse(path: Path) -> ElementTree.Element:
    try:
        return ElementTree.parse(path).getroot()
    except ElementTree.ParseError as error:
        raise DamagedArchiveError(f"{path} is no SVG: {error}") from error


def _components(path: Path) -> frozenset[str]:
    """The components of a character; one that is itself a component has itself."""
    names = (group.get(_ELEMENT) for group in _parse(path).iter(f"{_SVG}g"))
    return frozenset(name for name in names if name)


def _read(size: int) -> dict[str, LabelledPictures]:
    folder = _folder()
    characters = {path: _character(path) for path in sorted(folder.glob("*.svg"))}
    components = {path: _components(path) for path, known in characters.items() if known}
    times = Counter(name for of in components.values() for name in of)
    names = tuple(sorted(name for name, count in times.items() if count >= _LEAST))
    splits = {}
    for split, tenths in _SPLITS.items():
        chosen = [path for path in components if _tenth(characters[path]) in tenths]
        rows = [[name in components[path] for name in names] for path in chosen]
        splits[split] = LabelledPictures(
            names=names,
            keys=chosen,
            targets=np.array(rows, np.int8).reshape(len(chosen), len(names)),
            open=lambda: _drawer(size),
            source=folder,
        )
    return splits


def _tenth(character: str) -> int:
    """A number from 0 to 9 that is a character's own, whatever others there are."""
    return int.from_bytes(hashlib.sha256(character.encode()).digest()[:8]) % 10


# --- Drawing ------------------------------------------------------------------------------------


def _drawer(size: int) -> Callable[[Path], Picture]:
    def draw(path: Path) -> Picture:
        try:
            strokes = [
                list(_points(stroke.get("d", ""))) for stroke in _parse(path).iter(f"{_SVG}path")
            ]
        except (ValueError, IndexError) as error:
            raise DamagedArchiveError(
                f"{path} has a stroke that cannot be read: {error}"
            ) from error
        return Picture(draw_strokes(strokes, size), str(path))

    return draw


def draw_strokes(strokes: list[list[complex]], size: int) -> np.ndarray:
    """Draws lines with round ends, bright on black.

    Args:
        strokes: For every stroke its points x + iy, 0 to 109.
        size: Height and width of the image.

    Returns:
        uint8 [size, size, 1].
    """
    side = _OVERSAMPLING * size
    scale = side / _SIDE
    radius = _STROKE * scale / 2
    image = Image.new("L", (side, side))
    pen = ImageDraw.Draw(image)
    for stroke in strokes:
        points = [point * scale for point in stroke]
        for start, end in itertools.pairwise(points):
            if start != end:
                across = (end - start) / abs(end - start) * 1j * radius
                corners = (start + across, end + across, end - across, start - across)
                pen.polygon([(corner.real, corner.imag) for corner in corners], fill=255)
        for point in points:
            box = (point.real - radius, point.imag - radius)
            pen.ellipse((*box, point.real + radius, point.imag + radius), fill=255)
    return np.asarray(image.resize((size, size), Image.Resampling.BOX))[..., None]


def _points(path: str) -> Iterator[complex]:
    """The points along an SVG path of moves and cubic curves.

    Raises:
        ValueError, IndexError: The path has something else, or ends early.
    """
    tokens = re.findall(_TOKEN, path)
    here, control, command, at = 0j, 0j, "", 0

    def take() -> complex:
        nonlocal at
        at += 2
        return complex(float(tokens[at - 2]), float(tokens[at - 1]))

    while at < len(tokens):
        if tokens[at].isalpha():
            command = tokens[at]
            at += 1
        origin = here if command.islower() else 0j
        if command in ("M", "m") and not control:
            here = origin + take()
            control = here
            yield here
        elif command in ("C", "c", "S", "s"):
            # A smooth curve goes on in the direction in which the one before ended.
            first = origin + take() if command in "Cc" else 2 * here - control
            control, end = origin + take(), origin + take()
            yield from _curve(here, first, control, end)
            here = end
        else:
            raise ValueError(f"the command {command!r} in {path!r}")


def _curve(a: complex, b: complex, c: complex, d: complex) -> Iterator[complex]:
    """Points on a cubic Bézier curve, without its first."""
    steps = max(2, math.ceil((abs(b - a) + abs(c - b) + abs(d - c)) / 3))
    for step in range(1, steps + 1):
        t = step / steps
        yield (1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * b + 3 * (1 - t) * t**2 * c + t**3 * d


# --- The data set -------------------------------------------------------------------------------


class Kanji(MultiLabelBuilder):
    """Chinese characters with the components that are in at least 100 of them, grey.

    The drawings are made from the package `kanjivg` (CC BY-SA 3.0), of which nothing is shipped.
    The splits differ in characters; a character is in the split that its hash says. A few
    characters have none of the labels.
    """

    name = "kanji"
    FACTS = Facts(
        description="6,422 Chinese characters with any of 70 components, drawn at 48×48, grey",
        image_shape=(48, 48, 1),
        classes=dict.fromkeys(_SPLITS, 70),
        homepage="https://kanjivg.tagaini.net/",
        citation="KanjiVG, copyright Ulrich Apel, CC BY-SA 3.0.",
        sizes=True,
        requires=f"It takes the package {_PACKAGE}: {_INSTALL}",
    )

    @classmethod
    def check_source(cls, place: Place) -> None:
        """Raises MissingArchiveError unless the package is installed."""
        _folder()

    def read_splits(self, place: Place) -> dict[str, LabelledPictures]:
        """The characters of every split, from the package."""
        return _read(self.FACTS.image_shape[0])
