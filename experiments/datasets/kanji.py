"""Kanji: Chinese characters with their components or by radical, drawn from KanjiVG strokes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from experiments.datasets.archives import MissingArchiveError
from experiments.datasets.base import Dataset
from experiments.datasets.images import SourceImage
from experiments.datasets.layouts import Layout, SearchPath
from experiments.datasets.readers import multi_hot, read_xml
from experiments.datasets.splits import ClassSplit, MultiLabelSplit, grouped

_PACKAGE = "kanjivg"
_INSTALL = 'pip install -e ".[kanji]"'
# A component is a label if at least this many characters contain it.
_MIN_CHARACTERS = 100
# 60 % of the characters for training, 20 % for validation, 20 % for testing.
_SPLITS = {"train": range(0, 6), "validation": range(6, 8), "test": range(8, 10)}
# A radical is a class if it has enough characters for episodes of 5 shots and 16 queries.
_MIN_RADICAL = 21
# About 50 % of the radicals for training, 20 % for validation, 30 % as novel classes.
_RADICAL_SPLITS = {"base": range(0, 5), "validation": range(5, 7), "novel": range(7, 10)}

_SVG = "{http://www.w3.org/2000/svg}"
_KVG = "{http://kanjivg.tagaini.net}"
_SIDE = 109
_STROKE = 5.0  # KanjiVG's 3 would be less than one pixel at 32×32.
_OVERSAMPLING = 4
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)"


# --- The package --------------------------------------------------------------------------------


def _folder() -> Path:
    with contextlib.suppress(PackageNotFoundError):
        folder = Path(str(distribution(_PACKAGE).locate_file("kanji")))
        if folder.is_dir():
            return folder
    raise MissingArchiveError(
        f"kanji data sets need the package {_PACKAGE}, which is not installed: {_INSTALL}"
    )


def _character(path: Path) -> str:
    """The Chinese character of a file; empty for other scripts and for variants."""
    if not re.fullmatch(r"[0-9a-f]{5,6}", path.stem):
        return ""
    number = int(path.stem, 16)
    # The blocks of unified ideographs. The range of `unicodedata` depends on Python's version.
    return chr(number) if 0x3400 <= number <= 0x9FFF or 0x20000 <= number <= 0x3FFFF else ""


def _components(path: Path) -> frozenset[str]:
    """The components of a character, including the character itself."""
    names = (group.get(f"{_KVG}element") for group in read_xml(path).iter(f"{_SVG}g"))
    return frozenset(name for name in names if name)


def _radical(path: Path) -> str:
    """The radical of a character in traditional dictionaries, which is the general one by default.

    Forms of a radical, such as 氵 of 水, count as the radical. Empty if none is marked.
    """
    marked = {
        group.get(f"{_KVG}radical"): group.get(f"{_KVG}original") or group.get(f"{_KVG}element")
        for group in read_xml(path).iter(f"{_SVG}g")
    }
    return marked.get("tradit") or marked.get("general") or ""


def _characters(folder: Path) -> dict[Path, str]:
    """The files of Chinese characters, in the order of their code points."""
    characters = {path: _character(path) for path in sorted(folder.glob("*.svg"))}
    return {path: character for path, character in characters.items() if character}


def _read(search_path: SearchPath) -> dict[str, MultiLabelSplit]:
    folder = _folder()
    characters = _characters(folder)
    components = {path: _components(path) for path in characters}
    occurrences = Counter(name for names in components.values() for name in names)
    names = tuple(sorted(name for name, count in occurrences.items() if count >= _MIN_CHARACTERS))
    splits = {}
    for split, tenths in _SPLITS.items():
        chosen = [path for path in components if _tenth(characters[path]) in tenths]
        targets = multi_hot([components[path].intersection(names) for path in chosen], names)
        splits[split] = MultiLabelSplit(names, chosen, targets, folder, _drawer)
    return splits


def _read_radicals(search_path: SearchPath) -> dict[str, ClassSplit]:
    folder = _folder()
    members = grouped((_radical(path), path) for path in _characters(folder))
    enough = [name for name in sorted(members) if name and len(members[name]) >= _MIN_RADICAL]
    return {
        split: ClassSplit(
            {name: members[name] for name in enough if _tenth(name) in tenths}, folder, _drawer
        )
        for split, tenths in _RADICAL_SPLITS.items()
    }


def _tenth(character: str) -> int:
    """A number from 0 to 9 that depends on the character alone."""
    return int.from_bytes(hashlib.sha256(character.encode()).digest()[:8]) % 10


# --- Drawing ------------------------------------------------------------------------------------


def _drawer() -> Callable[[Path], SourceImage]:
    """Opens the characters, which are drawn at the size of the data set."""
    return lambda path: SourceImage(lambda side: _draw(path, side), str(path))


def _draw(path: Path, size: int) -> np.ndarray:
    """Draws white strokes with round ends on black."""
    side = _OVERSAMPLING * size
    scale = side / _SIDE
    radius = _STROKE * scale / 2
    image = Image.new("L", (side, side))
    pen = ImageDraw.Draw(image)
    for stroke in read_xml(path).iter(f"{_SVG}path"):
        points = [point * scale for point in _points(stroke.get("d", ""))]
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
    """The points x + iy along an SVG path of moves and cubic curves."""
    here, control = 0j, 0j
    for command, rest in re.findall("([A-Za-z])([^A-Za-z]*)", path):
        numbers = [*map(float, re.findall(_NUMBER, rest))]
        points = [complex(x, y) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]
        if not points or command not in "MmCcSs":
            raise ValueError(f"unexpected command {command!r} in {path!r}")
        while points:
            origin = here if command.islower() else 0j
            if command in "Mm":
                here = control = origin + points.pop(0)
                yield here
                continue
            # A smooth curve continues in the direction in which the previous one ended.
            first = origin + points.pop(0) if command in "Cc" else 2 * here - control
            control, end = origin + points.pop(0), origin + points.pop(0)
            yield from _curve(here, first, control, end)
            here = end


def _curve(a: complex, b: complex, c: complex, d: complex) -> Iterator[complex]:
    """Points on a cubic Bézier curve, without the first."""
    steps = max(2, math.ceil((abs(b - a) + abs(c - b) + abs(d - c)) / 3))
    for step in range(1, steps + 1):
        t = step / steps
        yield (1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * b + 3 * (1 - t) * t**2 * c + t**3 * d


_PROVENANCE: dict[str, Any] = {
    "image_shape": (48, 48, 1),
    "source": "KanjiVG, copyright Ulrich Apel, CC BY-SA 3.0, https://kanjivg.tagaini.net/",
    "images_of": "kanji",
    "resizable": True,
}
DATASETS = (
    # The components that at least 100 characters contain. A hash of the character determines its
    # split. A few characters have no label.
    Dataset(
        name="kanji",
        description="6,422 Chinese characters with labels for 70 components, drawn at 48×48, grey",
        classes=dict.fromkeys(_SPLITS, 70),
        layouts=(Layout("the package", (), _read, check=_folder),),
        multi_label=True,
        **_PROVENANCE,
    ),
    # The characters of a class share one component, in any place and form; the rest of each
    # differs, and occurs in other classes, too. A hash of the radical determines its split.
    Dataset(
        name="kanji_radicals",
        description="5,407 Chinese characters of 67 radicals, drawn at 48×48, grey",
        classes={"base": 33, "validation": 14, "novel": 20},
        layouts=(Layout("the package", (), _read_radicals, check=_folder),),
        **_PROVENANCE,
    ),
)
