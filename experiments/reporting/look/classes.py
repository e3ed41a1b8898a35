"""Classes: how similar they are, and how well each one is recognised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D

from experiments.reporting.look.tiles import draw_tile, short, tile_axes
from experiments.reporting.style import (
    GREEN,
    INK,
    LARGE,
    MEDIUM,
    SMALL,
    new_figure,
    style_axes,
)

_COLORS = "cividis"
"""Made for colour-blind readers, too."""
_NAMED = 60
"""Names are written beside a matrix of at most so many classes."""
_MATRIX, _WIDE = 5.4, 7.4
"""Inches of the side of a matrix: of two, and of a single one."""
_INCH = 0.72
"""Of a tile below a panel."""
_WINDOW = 15
"""Classes of a moving mean along a long tail."""
_STRIP_TEXT = 0.75
"""Room for the text below such a tile, in tiles."""


class Matrix(NamedTuple):
    """The similarities of the classes of one split, in the order in which they are drawn."""

    title: str
    names: Sequence[str]
    values: np.ndarray
    """float64 [C, C]."""


class Shown(NamedTuple):
    """A class, or two classes, below a panel."""

    images: np.ndarray
    """uint8 [1 or 2, h, w, c]."""
    names: Sequence[str]
    value: str


class Bars(NamedTuple):
    """A value for every class, in the order in which they are drawn."""

    title: str
    values: np.ndarray
    """float64 [C], in [0, 1]."""
    mean: float
    color: str
    counts: np.ndarray | None = None
    """Integers [C], training images of every class, for a second axis."""


def similarity_figure(
    matrices: Sequence[Matrix],
    pairs: Sequence[Shown],
    *,
    title: str,
    caption: str,
    classes: str,
) -> Figure:
    """Draws matrices of cosines, and the most similar pairs below them.

    `classes` is what they are called: `classes` or `labels`.
    """
    side = _MATRIX if len(matrices) > 1 else _WIDE
    strip = _INCH * (1 + _STRIP_TEXT) + 0.35
    figure = new_figure(
        side * len(matrices) + 0.9, side + strip + 0.2, title=title, caption=caption
    )
    grid = GridSpec(2, len(matrices), figure=figure, height_ratios=[side, strip])
    off_diagonal = [m.values[~np.eye(len(m.values), dtype=bool)] for m in matrices]
    values = np.concatenate(off_diagonal)
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    panels, colors = [], Normalize(low, high)
    for number, matrix in enumerate(matrices):
        axes = figure.add_subplot(grid[0, number])
        axes.imshow(matrix.values, cmap=_COLORS, norm=colors)
        axes.set_title(matrix.title, size=LARGE)
        _name_rows(axes, matrix.names, side, classes)
        panels.append(axes)
    scale = ScalarMappable(colors, _COLORS)
    bar = figure.colorbar(scale, ax=panels, shrink=0.7, pad=0.02)
    bar.set_label("cosine between class means", fontsize=MEDIUM)
    bar.ax.tick_params(labelsize=MEDIUM)
    _draw_strip(figure.add_subplot(grid[1, :]), f"most similar pairs of {classes}", pairs)
    return figure


def _name_rows(axes: Axes, names: Sequence[str], side: float, classes: str) -> None:
    axes.tick_params(length=0)
    if len(names) > _NAMED:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_ylabel(f"{len(names)} {classes}", fontsize=MEDIUM)
        return
    size = min(MEDIUM, 72 * 0.75 * side / len(names))
    texts = [short(name, 14) for name in names]
    axes.set_yticks(range(len(names)), texts, fontsize=size)
    axes.set_xticks(range(len(names)), texts, fontsize=size, rotation=90)


def accuracy_figure(
    panels: Sequence[Bars],
    worst: Sequence[Shown],
    *,
    title: str,
    caption: str,
    measure: str,
    classes: str,
) -> Figure:
    """Draws a bar for every class, and some classes with the lowest values below.

    Args:
      panels: The bars of one split each.
      worst: The classes to show.
      title, caption: Of the figure.
      measure: What a bar is, with its unit.
      classes: `classes` or `labels`.
    """
    height, strip = 3.0, _INCH * (1 + _STRIP_TEXT) + 0.35
    width = 9.6
    legend = []
    if any(bars.counts is not None for bars in panels):
        legend = [
            Line2D(
                [], [], color=INK, linewidth=2, label=f"mean of {_WINDOW} {classes} side by side"
            ),
            Line2D([], [], color=GREEN, linewidth=2, label="training images (right axis)"),
        ]
    figure = new_figure(width, height + strip, title=title, caption=caption, legend=legend)
    grid = GridSpec(2, len(panels), figure=figure, height_ratios=[height, strip])
    for number, bars in enumerate(panels):
        axes = figure.add_subplot(grid[0, number])
        if number == 0:
            axes.set_ylabel(measure)
        _draw_bars(axes, bars, classes)
    _draw_strip(figure.add_subplot(grid[1, :]), f"{classes} with the lowest values", worst)
    return figure


def _draw_bars(axes: Axes, bars: Bars, classes: str) -> None:
    style_axes(axes, grid="y")
    places = np.arange(1, len(bars.values) + 1)
    axes.bar(places, 100 * np.nan_to_num(bars.values), width=0.9, color=bars.color, linewidth=0)
    axes.axhline(100 * bars.mean, color=INK, linewidth=1.1, linestyle="--", zorder=3)
    axes.annotate(
        f"mean {100 * bars.mean:.1f} %",
        (1, 100 * bars.mean),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        xytext=(-2, 4),
        ha="right",
        size=MEDIUM,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.5},
        zorder=5,
    )
    axes.set_xlim(0.3, len(places) + 0.7)
    axes.set_ylim(0, 103)
    axes.set_title(bars.title, size=LARGE)
    if bars.counts is None:
        axes.set_xlabel(f"{len(places)} {classes}, from the highest value")
        return
    axes.set_xlabel(f"{len(places)} {classes}, from the most training images")
    middle = np.convolve(100 * bars.values, np.full(_WINDOW, 1 / _WINDOW), "valid")
    start = 1 + (_WINDOW - 1) / 2
    axes.plot(start + np.arange(len(middle)), middle, color=INK, linewidth=2, zorder=4)
    twin = axes.twinx()
    twin.plot(places, bars.counts, color=GREEN, linewidth=2)
    twin.set_yscale("log")
    low, high = bars.counts.min(), bars.counts.max()
    ticks = [k * 10**e for e in range(7) for k in (1, 2, 5) if low <= k * 10**e <= high]
    twin.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    twin.set_yticks([], minor=True)
    twin.set_ylim(0.9 * low, 1.1 * high)
    twin.set_ylabel("training images", fontsize=MEDIUM)
    twin.tick_params(labelsize=MEDIUM)
    twin.spines["top"].set_visible(False)


def _draw_strip(axes: Axes, heading: str, shown: Sequence[Shown]) -> None:
    """Some classes, or pairs of classes, side by side, each with names and a value."""
    size = max((len(item.images) for item in shown), default=1)
    gap = 0.5 if size > 1 else 0.25
    tile_axes(axes, max(len(shown), 1) * (size + gap), 1 + _STRIP_TEXT)
    axes.set_title(heading, size=LARGE, loc="left")
    for number, item in enumerate(shown):
        left = number * (size + gap) + gap / 2
        for place, image in enumerate(item.images):
            draw_tile(axes, image, left + place + 0.5, 0.5, frame="#cccccc")
        for place, name in enumerate(item.names):
            axes.text(left + place + 0.5, 1.18, short(name, 12), size=7, ha="center", va="center")
        axes.text(
            left + size / 2, 1.5, item.value, size=SMALL, weight="bold", ha="center", va="center"
        )
