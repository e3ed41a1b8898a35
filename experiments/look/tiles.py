"""Images as small tiles of a figure, and names that its font can draw."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import matplotlib.font_manager as fonts
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ft2font import FT2Font
from matplotlib.patches import Rectangle

from experiments.reporting.style import INK, series_mark

CLASS_COLORS = tuple(series_mark(number).color for number in range(8))
"""Of the classes of a map, which are at most so many, and of an episode."""
STRIP = 1.61
"""Inches of the height of a row below a chart."""


class Tile(NamedTuple):
    """A place in a row of images."""

    image: np.ndarray | None = None
    """As in `drawn`; None leaves the place empty."""
    frame: str | None = None
    """The colour of a frame."""
    note: str = ""


def drawn(image: np.ndarray, color: str = INK) -> np.ndarray:
    """A uint8 image as it is drawn: [h, w, 3] as it is; [h, w, 1], light on dark, as RGBA ink."""
    if image.shape[2] == 3:
        return image
    ink = np.round(np.multiply(255, to_rgb(color))).astype(np.uint8)
    return np.concatenate([np.broadcast_to(ink, (*image.shape[:2], 3)), image], axis=2)


def is_dark_on_light(images: np.ndarray) -> bool:
    """Whether grey images uint8 [n, h, w, 1] have a light ground, by their borders."""
    if images.shape[-1] != 1:
        return False
    sides = (images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1])
    return bool(np.median(np.concatenate(sides, axis=1)) >= 128)


def draw_tile(
    axes: Axes,
    image: np.ndarray,
    x: float,
    y: float,
    size: float = 1.0,
    *,
    color: str = INK,
    frame: str | None = None,
) -> None:
    """Draws an image in the square with centre (x, y), with a frame of a colour if one is given.

    The limits of the axes must be set, and one unit of x must be as long as one of y.
    """
    if frame is not None:
        side = 0.94 * size
        style: Any = {"facecolor": "white", "edgecolor": frame, "linewidth": 1.6}
        corner = (x - side / 2, y - side / 2)
        axes.add_patch(Rectangle(corner, side, side, zorder=3, **style))
    edge = 0.44 * size
    up = -edge if axes.yaxis_inverted() else edge
    extent = (x - edge, x + edge, y - up, y + up)
    axes.imshow(drawn(image, color), extent=extent, aspect="equal", zorder=3.1, clip_on=True)


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
        for column, (image, frame, note) in enumerate(tiles):
            x = room + column + 0.5
            if image is not None:
                draw_tile(axes, image, x, y, frame=frame)
            axes.text(x, y + 0.5 + line / 2, note, size=7, ha="center", va="center", c=INK)


def short(name: str, characters: int) -> str:
    """A name with at most so many characters; code points for those that the font lacks."""
    known = _characters()
    name = "".join(c if ord(c) in known else f"U+{ord(c):04X}" for c in name)
    name = name.replace("$", r"\$").replace("_", " ")
    return name if len(name) <= characters else name[: characters - 1] + "…"


@cache
def _characters() -> frozenset[int]:
    path = fonts.findfont(fonts.FontProperties())
    return frozenset(FT2Font(path).get_charmap())
