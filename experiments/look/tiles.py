"""Images as small tiles of a figure, and names that its font can draw."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import matplotlib.font_manager as fonts
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.gridspec import SubplotSpec
from matplotlib.patches import Rectangle
from PIL import Image

from experiments.reporting.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    INK,
    LARGE,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    VERMILLION,
)

WRONG = VERMILLION
"""The colour of frames around mistakes."""
TRAINED, OTHERS = BLUE, VERMILLION
"""The colours of training images and of others."""
CLASS_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
"""Of the classes of a map, which are at most so many, and of an episode."""
STRIP = 1.61
"""Inches of the height of a strip."""

_SIDE = 96
"""Pixels of the longer side of a tile; larger images are reduced."""
_STRIP_TEXT = 0.75
"""Room for the text below a tile of a strip, in tiles."""


def tile(image: np.ndarray, color: str = INK) -> np.ndarray:
    """An image as it is drawn: float32 RGBA [h, w, 4].

    Grey images become ink of one colour on a transparent ground; colours of other images stay.

    Args:
      image: uint8 [h, w, 1], light on dark (see `is_dark_on_light`), or [h, w, 3].
      color: The ink.
    """
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    if (longest := max(picture.size)) > _SIDE:
        width, height = (max(1, round(side * _SIDE / longest)) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    values = np.asarray(picture) / np.float32(255)
    rgba = np.ones((*values.shape[:2], 4), np.float32)
    if values.ndim == 3:
        rgba[..., :3] = values
    else:
        rgba[..., :3], rgba[..., 3] = to_rgb(color), values
    return rgba


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
    half, pad = size / 2, 0.06 * size
    edge = half - pad
    if frame is not None:
        corner = (x - half + pad / 2, y - half + pad / 2)
        style: Any = {"facecolor": "white", "edgecolor": frame, "linewidth": 1.6}
        axes.add_patch(Rectangle(corner, size - pad, size - pad, zorder=3, **style))
    downwards = axes.yaxis_inverted()
    bottom, top = (y + edge, y - edge) if downwards else (y - edge, y + edge)
    axes.imshow(
        tile(image, color),
        extent=(x - edge, x + edge, bottom, top),
        interpolation="antialiased",
        aspect="equal",
        zorder=3.1,
        clip_on=True,
    )


def tile_axes(axes: Axes, width: float, height: float, title: str = "") -> None:
    """Empties axes for tiles of size 1: x from 0 to width, y from 0 downwards to height."""
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title(title, size=LARGE, loc="left")


def draw_strip(
    figure: Figure,
    place: SubplotSpec,
    heading: str,
    shown: Sequence[tuple[Sequence[np.ndarray], Sequence[str], str]],
) -> None:
    """Draws classes, or pairs of classes, side by side: images, their names, and a value."""
    axes = figure.add_subplot(place)
    size = max((len(images) for images, _, _ in shown), default=1)
    gap = 0.5 if size > 1 else 0.25
    tile_axes(axes, max(len(shown), 1) * (size + gap), 1 + _STRIP_TEXT, heading)
    middle: Any = {"ha": "center", "va": "center"}
    for number, (images, names, value) in enumerate(shown):
        left = number * (size + gap) + gap / 2
        for column, (image, name) in enumerate(zip(images, names, strict=True)):
            draw_tile(axes, image, left + column + 0.5, 0.5, frame="#cccccc")
            axes.text(left + column + 0.5, 1.18, short(name, 12), size=7, **middle)
        axes.text(left + size / 2, 1.5, value, size=SMALL, weight="bold", **middle)


def short(name: str, characters: int) -> str:
    """A name that the font can draw, with at most so many characters."""
    name = drawable(name).replace("$", r"\$").replace("_", " ")
    return name if len(name) <= characters else name[: characters - 1] + "…"


def drawable(name: str) -> str:
    """The name; code points in place of characters that matplotlib's font does not have."""
    known = _characters()
    return "".join(c if ord(c) in known else f"U+{ord(c):04X}" for c in name)


@cache
def _characters() -> frozenset[int]:
    path = fonts.findfont(fonts.FontProperties())
    return frozenset(FT2Font(path).get_charmap())
