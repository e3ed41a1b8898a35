"""Pictures, images as tiles in them, and the one self-contained page that shows them."""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape as escape_html
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.font_manager as fonts
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from experiments.core.storage import write_atomically, write_json, write_picture
from experiments.core.terminal import one_line
from experiments.reporting.style import INK, new_figure


@dataclass
class Picture:
    """A figure to draw in, with the numbers that it shows."""

    name: str  # Of its file, without the ending.
    title: str
    caption: str  # How to read it, in a sentence or two.
    size: tuple[float, float]  # Width and height in inches.
    numbers: dict[str, Any] = field(default_factory=dict)  # What it shows, as JSON types.

    def __post_init__(self):
        self.figure = new_figure(*self.size)  # The page has title and caption as text.


class Tile(NamedTuple):
    """A place in a row of images; without an image it is empty."""

    image: np.ndarray | None = None  # As in `draw_image`.
    frame: str = "none"  # The colour of a frame.
    note: str = ""


def draw_image(axes: Axes, image: np.ndarray, x: float, y: float, side: float, frame: str) -> None:
    """Draws an image, uint8 [h, w, 1 or 3], in a frame: the square around (x, y) with this side."""
    left, bottom, length = x - 0.44 * side, y - 0.44 * side, 0.88 * side
    extent = (left, left + length, bottom, bottom + length)
    axes.imshow(image, "gray", extent=extent, vmin=0, vmax=255, aspect="equal", zorder=3)
    edge: Any = {"fill": False, "edgecolor": frame, "linewidth": 1.6, "zorder": 3}
    axes.add_patch(Rectangle((left, bottom), length, length, **edge))


def draw_rows(axes: Axes, rows: Sequence[tuple[str, Sequence[Tile]]], heading: str) -> None:
    """Fills an empty panel with rows of tiles of size 1, each with its name, below a heading."""
    room = 2.6 if any(name for name, _ in rows) else 0
    pitch = 1 + 0.3 * max(1 + tile.note.count("\n") for _, tiles in rows for tile in tiles)
    for number, (name, tiles) in enumerate(rows):
        y = -pitch * number - 0.5
        axes.text(-0.1, y, name, ha="right", va="center")
        for column, (image, frame, note) in enumerate(tiles):
            if image is not None:
                draw_image(axes, image, column + 0.5, y, 1, frame)
            axes.text(column + 0.5, y - 0.52, note, size=7, ha="center", va="top", c=INK)
    axes.set(xlim=(-room, max(len(tiles) for _, tiles in rows)), ylim=(-pitch * len(rows), 0))
    axes.axis("off")
    axes.set_title(heading, loc="left")


def short(name: str, characters: int) -> str:
    """A name with at most so many characters; code points for those that the font lacks."""
    font = fonts.get_font(fonts.findfont(fonts.FontProperties()))
    name = "".join(c if font.get_char_index(ord(c)) else f"U+{ord(c):04X}" for c in name)
    return name if len(name) <= characters else name[: characters - 1] + "…"


def wrapped(name: str, characters: int, lines: int) -> str:
    """As `short`, on at most so many lines of so many characters, broken at words if possible."""
    rows = textwrap.wrap(short(name, 999), characters)
    rest = " ".join(rows[lines - 1 :]).replace("- ", "-")
    return "\n".join(filter(None, [*rows[: lines - 1], short(rest, characters)]))


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>
body {{ max-width: 80rem; margin: 0 auto; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }}
nav a {{ display: inline-block; margin-right: 1rem; }}
p, li, figcaption {{ max-width: 50rem; }}
figure {{ margin: 1rem 0 3rem; overflow-x: auto; }}
img {{ width: 100%; min-width: 44rem; }}
code {{ overflow-wrap: anywhere; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
<nav>{links}</nav>
{sections}
<footer><ul>{notes}</ul><code>{command}</code></footer>
</body>
</html>
"""
_SECTION = """<section id="{name}"><h2>{title}</h2>
<figure><figcaption>{caption}</figcaption>
<img src="data:image/png;base64,{data}" alt="{title}. {caption}"/></figure></section>"""


def escape(text: str) -> str:
    """Text of others for the page, on one line."""
    return escape_html(one_line(text))


def write_page(
    directory: Path, pictures: Sequence[Picture], notes: Sequence[str], **texts: str
) -> list[Path]:
    """Writes the page, the numbers of its pictures, and the pictures; returns the paths.

    The texts are `title`, `summary` and `command`. Pictures are part of the page's text.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files, sections = [], []
    for picture in pictures:
        files.append(write_picture(directory / f"{picture.name}.png", picture.figure))
        data = base64.b64encode(files[-1].read_bytes()).decode()
        words = {"title": escape(picture.title), "caption": escape(picture.caption)}
        sections.append(_SECTION.format(name=picture.name, data=data, **words))
    page = _PAGE.format(
        links="\n".join(f'<a href="#{p.name}">{escape(p.title)}</a>' for p in pictures),
        sections="\n".join(sections),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes),
        **{name: escape(text) for name, text in texts.items()},
    )
    numbers = {picture.name: picture.numbers for picture in pictures}
    written = write_atomically(directory / "index.html", page)
    return [written, write_json(directory / "look.json", numbers), *files]
