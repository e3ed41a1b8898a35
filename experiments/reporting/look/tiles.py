"""Images as small tiles of a figure, and names that its font can draw."""

from __future__ import annotations

from functools import cache

import matplotlib.font_manager as fonts
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ft2font import FT2Font
from matplotlib.patches import Rectangle
from PIL import Image

from experiments.reporting.style import BLUE, INK, VERMILLION

WRONG = VERMILLION
"""The colour of frames around mistakes."""

TRAINED, OTHERS = BLUE, VERMILLION
"""The colours of training images and of others."""

_SIDE = 96
"""Pixels of the longer side of a tile; larger images are reduced."""


def tile(image: np.ndarray, color: str = INK) -> np.ndarray:
    """An image as it is drawn: float32 RGBA [h, w, 4].

    Grey images become ink of one colour on a transparent ground; colours of other images stay.

    Args:
      image: uint8 [h, w, 1], light on dark (see `is_dark_on_light`), or [h, w, 3].
      color: The ink.
    """
    image = _reduced(image)
    height, width, channels = image.shape
    rgba = np.ones((height, width, 4), np.float32)
    if channels == 3:
        rgba[..., :3] = image / np.float32(255)
        return rgba
    rgba[..., :3] = to_rgb(color)
    rgba[..., 3] = image[..., 0] / np.float32(255)
    return rgba


def is_dark_on_light(images: np.ndarray) -> bool:
    """Whether grey images uint8 [n, h, w, 1] have a light ground, by their borders."""
    if images.shape[-1] != 1:
        return False
    sides = (images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1])
    return bool(np.median(np.concatenate(sides, axis=1)) >= 128)


def _reduced(image: np.ndarray) -> np.ndarray:
    longest = max(image.shape[:2])
    if longest <= _SIDE:
        return image
    size = [max(1, round(side * _SIDE / longest)) for side in image.shape[1::-1]]
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    small = np.asarray(picture.resize((size[0], size[1]), Image.Resampling.LANCZOS))
    return small.reshape(size[1], size[0], image.shape[2])


def is_drawing(images: np.ndarray) -> bool:
    """Whether tiles of the images uint8 [..., h, w, c] take a colour."""
    return images.shape[-1] == 1


def draw_tile(
    axes: Axes,
    image: np.ndarray,
    x: float,
    y: float,
    size: float = 1.0,
    *,
    color: str = INK,
    frame: str | None = None,
    zorder: float = 3,
) -> None:
    """Draws an image in the square with centre (x, y), with a frame of a colour if one is given.

    The limits of the axes must be set, and one unit of x must be as long as one of y.
    """
    half, pad = size / 2, 0.06 * size
    edge = half - pad
    if frame is not None:
        axes.add_patch(
            Rectangle(
                (x - half + pad / 2, y - half + pad / 2),
                size - pad,
                size - pad,
                facecolor="white",
                edgecolor=frame,
                linewidth=1.6,
                zorder=zorder,
            )
        )
    downwards = axes.yaxis_inverted()
    bottom, top = (y + edge, y - edge) if downwards else (y - edge, y + edge)
    axes.imshow(
        tile(image, color),
        extent=(x - edge, x + edge, bottom, top),
        interpolation="antialiased",
        aspect="equal",
        zorder=zorder + 0.1,
        clip_on=True,
    )


def tile_axes(axes: Axes, width: float, height: float) -> None:
    """Empties axes for tiles of size 1: x from 0 to width, y from 0 downwards to height."""
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_aspect("equal")
    axes.axis("off")


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
