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
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from experiments.reporting.style import INK, LARGE, MEDIUM, SMALL, new_figure, series_mark
from experiments.storage import write_atomically, write_json, write_picture

FONTS: Any = {
    "font.size": SMALL,
    "axes.titlesize": LARGE,
    **{f"{part}.labelsize": MEDIUM for part in ("axes", "xtick", "ytick")},
    "legend.fontsize": MEDIUM,
    "legend.frameon": False,
}
"""What matplotlib is set to while pictures are drawn."""
CLASS_COLORS = tuple(series_mark(number).color for number in range(8))
"""Of the classes of a map, which are at most so many, and of an episode."""
STRIP = 1.61
"""Inches of the height of a row below a chart."""


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
    legend: Sequence[Line2D] = ()
    numbers: dict[str, Any] = field(default_factory=dict)
    """What the figure shows, as JSON types."""

    def __post_init__(self):
        self.figure = new_figure(
            *self.size, title=self.title, caption=self.caption, legend=self.legend
        )


class Tile(NamedTuple):
    """A place in a row of images."""

    image: np.ndarray | None = None
    """As in `drawn`; None leaves the place empty."""
    frame: str | None = None
    """The colour of a frame."""
    note: str = ""
    ink: str = INK
    """The colour of a grey image."""


def drawn(image: np.ndarray, color: str = INK) -> np.ndarray:
    """A uint8 image as it is drawn: [h, w, 3] as it is; [h, w, 1], light on dark, as RGBA ink."""
    if image.shape[2] == 3:
        return image
    ink = np.round(np.multiply(255, to_rgb(color))).astype(np.uint8)
    return np.concatenate([np.broadcast_to(ink, (*image.shape[:2], 3)), image], axis=2)


def draw_tile(axes: Axes, tile: Tile, x: float, y: float, size: float = 1.0) -> None:
    """Draws the image and the frame of a tile in the square with centre (x, y).

    The limits of the axes must be set, and one unit of x must be as long as one of y.
    """
    if tile.frame is not None:
        side = 0.94 * size
        style: Any = {"facecolor": "white", "edgecolor": tile.frame, "linewidth": 1.6, "zorder": 3}
        axes.add_patch(Rectangle((x - side / 2, y - side / 2), side, side, **style))
    if tile.image is not None:
        edge = 0.44 * size
        up = -edge if axes.yaxis_inverted() else edge
        extent = (x - edge, x + edge, y - up, y + up)
        axes.imshow(drawn(tile.image, tile.ink), extent=extent, aspect="equal", zorder=3.1)


def draw_rows(
    axes: Axes,
    rows: Sequence[tuple[str, Sequence[Tile]]],
    heading: str,
    *,
    room: float = 2.6,
    line: float = 0.3,
) -> None:
    """Fills an empty panel with rows of tiles of size 1, each with its name, below a heading.

    `room` is the width for the names, at the left; `line` the height for notes below the tiles.
    """
    width, pitch = room + max(len(tiles) for _, tiles in rows), 1 + line
    axes.set(xlim=(0, width), ylim=(pitch * len(rows), 0), aspect="equal")
    axes.axis("off")
    axes.set_title(heading, loc="left")
    for number, (name, tiles) in enumerate(rows):
        y = pitch * number + 0.5
        axes.text(room - 0.1, y, name, ha="right", va="center")
        for column, tile in enumerate(tiles):
            x = room + column + 0.5
            draw_tile(axes, tile, x, y)
            axes.text(x, y + 0.5 + line / 2, tile.note, size=7, ha="center", va="center", c=INK)


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
body {{ max-width: 100rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff;
       font: 16px/1.5 system-ui, sans-serif; }}
nav a {{ margin-right: 1rem; white-space: nowrap; }}
section {{ margin: 2.5rem 0; border-top: 1px solid #ddd; padding-top: 1.5rem; }}
img {{ max-width: 100%; height: auto; }}
footer {{ color: #555; font-size: 0.9rem; overflow-wrap: anywhere; }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
<nav>{links}</nav>
{sections}
<footer><ul>{notes}</ul><code>{command}</code></footer>
</html>
"""


def write_page(
    directory: Path,
    *,
    title: str,
    summary: str,
    pictures: Sequence[Picture],
    notes: Sequence[str],
    command: str,
) -> list[Path]:
    """Writes the page, the numbers of its pictures, and the pictures; returns the paths.

    Pictures are part of the page's text. Those of an earlier call are deleted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob("*.png"):
        stale.unlink()
    files = [write_picture(directory / f"{p.name}.png", p.figure) for p in pictures]
    page = _PAGE.format(
        title=escape(title),
        summary=escape(summary),
        links="\n".join(f'<a href="#{p.name}">{escape(p.title)}</a>' for p in pictures),
        sections="\n".join(map(_section, pictures, files)),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes),
        command=escape(command),
    )
    written = write_atomically(directory / "index.html", page)
    numbers = {picture.name: picture.numbers for picture in pictures}
    return [written, write_json(directory / "look.json", numbers), *files]


def _section(picture: Picture, file: Path) -> str:
    """A picture whose bytes are part of the text."""
    data = base64.b64encode(file.read_bytes()).decode("ascii")
    alt = escape(f"{picture.title}. {picture.caption}")
    image = f'<img src="data:image/png;base64,{data}" alt="{alt}"/>'
    return f'<section id="{picture.name}">{image}</section>'
