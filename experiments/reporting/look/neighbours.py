"""Rows of images: a query and its nearest neighbours."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from experiments.reporting.look.tiles import WRONG, draw_tile, short, tile_axes
from experiments.reporting.style import INK, LARGE, SMALL, new_figure

_INCH = 0.5
"""Of a tile."""
_NAME = 2.2
"""Tiles of room for the name of a query."""
_GAP = 0.35
"""Between a query and its neighbours, in tiles."""
_LINE = 0.32
"""Room for a line of text below a tile, in tiles."""
_COLUMNS = 2


class Row(NamedTuple):
    """A query and its neighbours."""

    name: str
    """The class of the query; several labels are joined by commas."""
    images: np.ndarray
    """uint8 [1 + k, h, w, c], the query first."""
    names: Sequence[str]
    """Below each neighbour."""
    wrong: Sequence[bool]
    """Whether each neighbour has a frame."""


def neighbours_figure(rows: Sequence[Row], *, title: str, caption: str) -> Figure:
    """Draws the rows in two columns."""
    columns = min(_COLUMNS, len(rows))
    lines = -(-len(rows) // columns)
    neighbours = max(len(row.wrong) for row in rows)
    width, pitch = _NAME + 1 + _GAP + neighbours, 1 + _LINE
    figure = new_figure(
        _INCH * width * columns + 0.3, _INCH * pitch * lines + 0.3, title=title, caption=caption
    )
    for column in range(columns):
        axes = figure.add_subplot(1, columns, column + 1)
        tile_axes(axes, width, pitch * lines)
        if column == 0:
            axes.set_title("query, then neighbours from the nearest", size=LARGE, loc="left")
        for line, row in enumerate(rows[column * lines : (column + 1) * lines]):
            y = pitch * line + 0.5
            name = textwrap.fill(short(row.name, 40), 14, max_lines=3, placeholder=" …")
            axes.text(_NAME - 0.1, y, name, size=SMALL, ha="right", va="center")
            draw_tile(axes, row.images[0], _NAME + 0.5, y, frame=INK)
            parts = zip(row.images[1:], row.names, row.wrong, strict=True)
            for place, (image, name, wrong) in enumerate(parts):
                x = _NAME + 1.5 + _GAP + place
                draw_tile(axes, image, x, y, frame=WRONG if wrong else None)
                text = short(name, 11)
                color = WRONG if wrong else INK
                axes.text(x, y + 0.5 + _LINE / 2, text, size=6, ha="center", va="center", c=color)
    return figure
