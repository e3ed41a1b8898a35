"""Pictures, images as tiles in them, and the one self-contained page that shows them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.font_manager as fonts
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from experiments.reporting.style import INK, new_figure
from experiments.storage import write_atomically, write_json, write_picture


@dataclass
class Picture:
    """A figure to draw in, with the numbers that it shows."""

    name: str
    """Of its file, without the ending."""
    title: str
    caption: str
    """How to read it, in a sentence or two; the figure shows it, too."""
    size: tuple[float, float]
    """Inches of the room for panels."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """What the figure shows, as JSON types."""

    def __post_init__(self):
        self.figure = new_figure(*self.size, title=self.title, caption=self.caption)


class Tile(NamedTuple):
    """A place in a row of images; without an image it is empty."""

    image: np.ndarray | None = None
    """As in `draw_image`."""
    frame: str = "none"
    """The colour of a frame."""
    note: str = ""


def draw_image(
    axes: Axes, image: np.ndarray, xy: Sequence[float], *, side: float, frame: str, ink: str = INK
) -> None:
    """Draws an image and its frame in the square with centre (x, y) and sides of a length.

    The image is uint8 [h, w, 3], or [h, w, 1], light on dark, which is drawn as ink of a colour.
    """
    if image.shape[2] == 1:
        ground = np.broadcast_to(to_rgb(ink), (*image.shape[:2], 3))
        image = np.dstack([ground, image / 255])
    (left, bottom), (right, top) = np.subtract(xy, 0.44 * side), np.add(xy, 0.44 * side)
    axes.imshow(image, extent=(left, right, bottom, top), aspect="equal", zorder=3)
    edge: Any = {"fill": False, "edgecolor": frame, "linewidth": 1.6, "zorder": 3}
    axes.add_patch(Rectangle((left, bottom), right - left, top - bottom, **edge))


def draw_rows(axes: Axes, rows: Sequence[tuple[str, Sequence[Tile]]], heading: str) -> None:
    """Fills an empty panel with rows of tiles of size 1, each with its name, below a heading."""
    room = 2.6 if any(name for name, _ in rows) else 0
    pitch = 1 + 0.3 * max(1 + tile.note.count("\n") for _, tiles in rows for tile in tiles)
    axes.set(xlim=(-room, max(len(tiles) for _, tiles in rows)), ylim=(-pitch * len(rows), 0))
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title(heading, loc="left")
    for number, (name, tiles) in enumerate(rows):
        y = -pitch * number - 0.5
        axes.text(-0.1, y, name, ha="right", va="center")
        for column, (image, frame, note) in enumerate(tiles):
            if image is not None:
                draw_image(axes, image, (column + 0.5, y), side=1, frame=frame)
            axes.text(column + 0.5, y - pitch / 2, note, size=7, ha="center", va="center", c=INK)


def short(name: str, characters: int) -> str:
    """A name with at most so many characters; code points for those that the font lacks."""
    font = fonts.get_font(fonts.findfont(fonts.FontProperties()))
    name = "".join(c if font.get_char_index(ord(c)) else f"U+{ord(c):04X}" for c in name)
    name = name.replace("$", r"\$").replace("_", " ")
    return name if len(name) <= characters else name[: characters - 1] + "…"


_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8"/>
<title>{title}</title>
<style>
body {{ max-width: 100rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 sans-serif; }}
nav a {{ margin-right: 1rem; }}
img {{ max-width: 100%; margin: 1.5rem 0; }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
<nav>{links}</nav>
{sections}
<footer><ul>{notes}</ul><code>{command}</code></footer>
</html>
"""
_SECTION = '<section id="{}"><img src="data:image/png;base64,{}" alt="{}"/></section>'


def write_page(
    directory: Path, pictures: Sequence[Picture], notes: Sequence[str], **texts: str
) -> list[Path]:
    """Writes the page, the numbers of its pictures, and the pictures; returns the paths.

    The texts are `title`, `summary` and `command`. Pictures are part of the page's text. Those of
    an earlier call are deleted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files, sections = [], []
    for picture in pictures:
        files.append(write_picture(directory / f"{picture.name}.png", picture.figure))
        data = base64.b64encode(files[-1].read_bytes()).decode()
        alt = escape(f"{picture.title}. {picture.caption}")
        sections.append(_SECTION.format(picture.name, data, alt))
    page = _PAGE.format(
        links="\n".join(f'<a href="#{p.name}">{escape(p.title)}</a>' for p in pictures),
        sections="\n".join(sections),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes),
        **{name: escape(text) for name, text in texts.items()},
    )
    numbers = {picture.name: picture.numbers for picture in pictures}
    written = write_atomically(directory / "index.html", page)
    for stale in {*directory.glob("*.png")} - {*files}:
        stale.unlink()
    return [written, write_json(directory / "look.json", numbers), *files]
