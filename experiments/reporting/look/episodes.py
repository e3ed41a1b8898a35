"""Few-shot episodes: support images, queries, and what the queries are mistaken for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.reporting.look.maps import CLASS_COLORS
from experiments.reporting.look.tiles import draw_tile, short, tile_axes
from experiments.reporting.style import INK, LARGE, SMALL, new_figure

_INCH = 0.36
"""Of a tile."""
_NAME = 2.6
"""Tiles of room for the name of a class."""
_GAP = 0.6
"""Between support and queries, in tiles."""
_MORE = 1.0
"""Room for the number of mistakes that are not drawn, in tiles."""
_COLUMNS = 2
_QUERIES = 10
"""Queries of a class that are drawn, the wrong ones first."""


class Episode(NamedTuple):
    """An episode with N classes, K support images and Q queries per class."""

    title: str
    names: Sequence[str]
    """Of the N classes."""
    support: np.ndarray
    """uint8 [N, K, h, w, c]."""
    queries: np.ndarray
    """uint8 [N, Q, h, w, c]."""
    predictions: np.ndarray
    """Integers [N, Q] from 0 to N−1."""


def episodes_figure(episodes: Sequence[Episode], *, title: str, caption: str) -> Figure:
    """Draws episodes in two columns, with a row for every class."""
    columns = min(_COLUMNS, len(episodes))
    lines = -(-len(episodes) // columns)
    ways, shots = episodes[0].support.shape[:2]
    width = _NAME + shots + _GAP + min(_QUERIES, episodes[0].queries.shape[1]) + _MORE
    figure = new_figure(
        _INCH * width * columns + 0.3,
        (_INCH * ways + 0.35) * lines + 0.2,
        title=title,
        caption=caption,
    )
    for number, episode in enumerate(episodes):
        axes = figure.add_subplot(lines, columns, number + 1)
        tile_axes(axes, width, ways)
        axes.set_title(episode.title, size=LARGE, loc="left")
        for way in range(ways):
            _draw_class(axes, episode, way)
    return figure


def _draw_class(axes: Axes, episode: Episode, way: int) -> None:
    y, color = way + 0.5, _color(way)
    axes.text(0.4, y, f"{way + 1}", size=SMALL, weight="bold", ha="right", va="center", c=color)
    name = short(episode.names[way], 14)
    axes.text(_NAME - 0.1, y, name, size=7, ha="right", va="center", c=INK)
    for place, image in enumerate(episode.support[way]):
        draw_tile(axes, image, _NAME + place + 0.5, y, frame=color)
    start = _NAME + len(episode.support[way]) + _GAP
    wrong = episode.predictions[way] != way
    order = np.argsort(~wrong, kind="stable")[:_QUERIES]
    if hidden := int(wrong.sum() - wrong[order].sum()):
        x = start + len(order) + 0.1
        axes.text(x, y, f"+{hidden}", size=SMALL, ha="left", va="center", c=INK)
    for place, query in enumerate(order):
        predicted = int(episode.predictions[way, query])
        x = start + place + 0.5
        frame = _color(predicted) if wrong[query] else None
        draw_tile(axes, episode.queries[way, query], x, y, frame=frame)
        if frame:
            axes.text(
                x + 0.36,
                y - 0.34,
                f"{predicted + 1}",
                size=6,
                weight="bold",
                ha="center",
                va="center",
                c="white",
                bbox={"facecolor": frame, "edgecolor": "none", "pad": 0.8},
                zorder=6,
            )


def _color(way: int) -> str:
    return CLASS_COLORS[way % len(CLASS_COLORS)]
