"""Features projected to two dimensions, with the images drawn in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.reporting.look.tiles import draw_tile, is_drawing, short
from experiments.reporting.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    INK,
    LARGE,
    MEDIUM,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Mark,
    legend_handle,
    new_figure,
)

CLASS_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
"""Colours of the classes of a map, which are at most so many."""
_TILE = 0.34
"""Inches of the side of a tile."""
_OVERLAP = 0.9
"""Tiles are at least this many sides apart, along one axis."""


class Cloud(NamedTuple):
    """The images of one colour."""

    name: str
    points: np.ndarray
    """float64 [n, 2], those that get a tile first."""
    read: Callable[[np.ndarray], np.ndarray]
    """The images uint8 [k, h, w, c] of some points, integers [k]."""


class Panel(NamedTuple):
    """One map."""

    title: str
    clouds: Sequence[Cloud]
    shares: tuple[float, float]
    """The share of the variance along each axis."""
    axis: str = "principal axis"


def map_figure(
    panels: Sequence[Panel],
    *,
    title: str,
    caption: str,
    colors: Sequence[str],
    legends: bool,
    size: float,
    tiles: int,
) -> tuple[Figure, list[int]]:
    """Draws maps side by side; returns the figure and the number of tiles in every panel.

    Every point is a dot. Those whose tile would hide an earlier one have no tile.

    Args:
      panels: The maps.
      title, caption: Of the figure.
      colors: The colour of every cloud of a panel.
      legends: A legend for each panel; else one for all, above them.
      size: Inches of the side of a panel.
      tiles: Largest number of tiles in all panels.
    """
    handles = [
        legend_handle(cloud.name, Mark(color, "s"), line=False)
        for cloud, color in zip(panels[0].clouds, colors, strict=False)
    ]
    figure = new_figure(
        size * len(panels) + 0.5,
        size + 0.4 + 0.6 * legends,
        title=title,
        caption=caption,
        legend=() if legends else handles,
    )
    drawn = []
    for number, panel in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        drawn.append(_draw_map(axes, panel, colors, size, tiles // len(panels)))
        if legends:
            axes.legend(
                handles=[
                    legend_handle(short(cloud.name, 14), Mark(color, "s"), line=False)
                    for cloud, color in zip(panel.clouds, colors, strict=False)
                ],
                loc="upper center",
                bbox_to_anchor=(0.5, -0.06),
                ncols=4,
                frameon=False,
                fontsize=MEDIUM,
                handletextpad=0.1,
                columnspacing=1.0,
            )
    return figure, drawn


def _draw_map(axes: Axes, panel: Panel, colors: Sequence[str], size: float, tiles: int) -> int:
    everything = np.concatenate([cloud.points for cloud in panel.clouds])
    low, high = everything.min(0), everything.max(0)
    middle, half = (low + high) / 2, 0.54 * max(*(high - low), 1e-12)
    axes.set_xlim(middle[0] - half, middle[0] + half)
    axes.set_ylim(middle[1] - half, middle[1] + half)
    axes.set_aspect("equal")
    if panel.title:
        axes.set_title(panel.title, size=LARGE)
    names = ("first", "second")
    labels = [
        f"{name} {panel.axis} ({100 * share:.1f} % of the variance)"
        for name, share in zip(names, panel.shares, strict=True)
    ]
    axes.set_xlabel(labels[0], fontsize=MEDIUM)
    axes.set_ylabel(labels[1], fontsize=MEDIUM)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color("#cccccc")
    side = 2 * half * _TILE / size
    placed = _places([cloud.points for cloud in panel.clouds], side, tiles)
    for cloud, color, rows in zip(panel.clouds, colors, placed, strict=False):
        axes.scatter(*cloud.points.T, s=4, color=color, alpha=0.25, linewidths=0, zorder=1)
        if not rows:
            continue
        images = cloud.read(np.array(rows))
        ink, frame = (color, None) if is_drawing(images) else (INK, color)
        for image, (x, y) in zip(images, cloud.points[rows].tolist(), strict=True):
            draw_tile(axes, image, x, y, side, color=ink, frame=frame)
    return sum(map(len, placed))


def _places(clouds: Sequence[np.ndarray], side: float, most: int) -> list[list[int]]:
    """The points of every cloud that get a tile, turn by turn while there is room."""
    placed: list[list[int]] = [[] for _ in clouds]
    taken = np.empty((most, 2))
    count = 0
    for turn in range(max(map(len, clouds))):
        for points, rows in zip(clouds, placed, strict=True):
            if turn >= len(points) or count == most:
                continue
            apart = np.abs(taken[:count] - points[turn]).max(1)
            if (apart >= _OVERLAP * side).all():
                taken[count] = points[turn]
                count += 1
                rows.append(turn)
    return placed
