"""The one style of all figures: colours and markers, sizes in inches, axes and error bars."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath

# Okabe and Ito's colours, which colour-blind people can tell apart.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
BLACK = "#000000"
GREY = "#888888"

INK = "#333333"
"""Captions, edges of markers and ticks of single seeds."""
SHADE = "#f3f3f3"
"""Behind every second row."""
SMALL, MEDIUM, LARGE = 8, 9, 10
"""Font sizes in points: captions; numbers and legends; titles of panels."""

LineStyle = Literal["-", "--", ":", "-."]

_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
_MARKERS = "osD^vP*X"
_LINES: tuple[LineStyle, ...] = ("-", "--", ":", "-.")
_GRID = "#dddddd"
_DPI = 150
_TITLE = 13

# Inches.
_MARGIN = 0.15
_TITLE_LINE = 0.25
_LEGEND_LINE = 0.2
_LEGEND_HANDLE = 0.65
_CAPTION_LINE = 0.165
_GAP = 0.1

# Characters in an inch of text: few enough for lines of wide letters.
_TITLE_CHARACTERS = 8.5
_CAPTION_CHARACTERS = 14.5


class Mark(NamedTuple):
    """How one series is drawn."""

    color: str
    marker: str
    line: LineStyle = "-"


def series_mark(number: int) -> Mark:
    """The mark of the series with this number: no two of the first 64 are alike."""
    cycle, place = divmod(number, len(_COLORS))
    return Mark(
        _COLORS[place], _MARKERS[(place + cycle) % len(_MARKERS)], _LINES[cycle % len(_LINES)]
    )


def legend_handle(label: str, mark: Mark, *, line: bool) -> Line2D:
    """An entry of a legend, with or without a line through its marker."""
    return Line2D(
        [],
        [],
        color=mark.color,
        marker=mark.marker,
        linestyle=mark.line if line else "None",
        markersize=5,
        linewidth=1.3,
        label=display_text(label),
    )


def new_figure(
    width: float,
    height: float,
    *,
    title: str,
    caption: str = "",
    command: str = "",
    legend: Sequence[Line2D] = (),
    legend_title: str = "",
) -> Figure:
    """An empty figure: title and legend above, room for panels, and the caption below.

    Args:
      width: Of the figure, in inches.
      height: Of the room for panels, in inches. Panels of a grid are laid out to fill it.
      title: Wrapped if it is long.
      caption: Wrapped if it is long.
      command: What was typed to get the figure; a paragraph below the caption.
      legend: Entries of the legend.
      legend_title: What the entries of the legend are.
    """
    inner = width - 2 * _MARGIN
    heading = textwrap.wrap(title, int(inner * _TITLE_CHARACTERS))
    notes = textwrap.wrap(caption, int(inner * _CAPTION_CHARACTERS))
    typed = f"Command: {command}" if command else ""
    notes += textwrap.wrap(typed, int(inner * _CAPTION_CHARACTERS), break_on_hyphens=False)
    columns, rows = _legend_shape(legend, inner)
    rows += bool(legend_title)

    below = _MARGIN + _CAPTION_LINE * len(notes) + (_GAP if notes else 0)
    above = _MARGIN + _TITLE_LINE * len(heading) + _LEGEND_LINE * rows + _GAP
    total = below + height + above
    figure = Figure(figsize=(width, total), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    engine: Any = figure.get_layout_engine()
    engine.set(
        rect=(_MARGIN / width, below / total, inner / width, height / total),
        w_pad=0.06,
        h_pad=0.06,
    )
    _write_text(figure, heading, notes)
    if legend:
        top = 1 - (_MARGIN + _TITLE_LINE * len(heading)) / total
        _add_legend(figure, legend, legend_title, top=top, columns=columns)
    return figure


def style_axes(axes: Axes, *, grid: Literal["both", "x", "y"] = "both") -> None:
    """A light grid behind the data, no frame above and at the right, small numbers."""
    axes.grid(axis=grid, color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=MEDIUM)
    axes.xaxis.label.set_fontsize(MEDIUM)
    axes.yaxis.label.set_fontsize(MEDIUM)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def error_bars(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    mark: Mark,
    *,
    xerr: Sequence[float] | None = None,
    yerr: Sequence[float] | None = None,
    line: bool = False,
) -> None:
    """Points with error bars.

    Args:
      axes: Where to draw.
      x: Positions [n].
      y: Positions [n].
      mark: Colour, marker and line.
      xerr: Half the lengths of horizontal bars [n].
      yerr: Half the lengths of vertical bars [n].
      line: Join the points.
    """
    axes.errorbar(
        x,
        y,
        xerr=xerr,
        yerr=yerr,
        color=mark.color,
        marker=mark.marker,
        linestyle=mark.line if line else "None",
        linewidth=1.3,
        markersize=5,
        markeredgecolor=INK,
        markeredgewidth=0.4,
        elinewidth=1.6,
        zorder=3,
    )


def display_text(text: str) -> str:
    """Text for matplotlib: dollar signs as they are, and the tilde of ⊕̃ on top of it."""
    # The font sets a combining tilde beside its ⊕; the accent of TeX sits on top.
    return text.replace("$", r"\$").replace("⊕\N{COMBINING TILDE}", r"$\tilde{\oplus}$")


def text_width(text: str, size: float = MEDIUM) -> float:
    """The width in inches of a text that comes from `display_text`."""
    return TextPath((0, 0), text, size=size).get_extents().width / 72 if text.strip() else 0.0


def _write_text(figure: Figure, heading: Sequence[str], notes: Sequence[str]) -> None:
    width, total = figure.get_size_inches()
    figure.text(
        _MARGIN / width,
        1 - _MARGIN / total,
        display_text("\n".join(heading)),
        size=_TITLE,
        weight="bold",
        va="top",
    )
    figure.text(
        _MARGIN / width,
        _MARGIN / total,
        display_text("\n".join(notes)),
        size=SMALL,
        color=INK,
        va="bottom",
        linespacing=1.3,
    )


def _add_legend(
    figure: Figure, handles: Sequence[Line2D], title: str, *, top: float, columns: int
) -> None:
    figure.legend(
        handles=list(handles),
        title=display_text(title) or None,
        loc="upper left",
        bbox_to_anchor=(_MARGIN / figure.get_figwidth(), top),
        ncols=columns,
        alignment="left",
        borderpad=0,
        borderaxespad=0,
        frameon=False,
        fontsize=MEDIUM,
        title_fontsize=MEDIUM,
    )


def _legend_shape(legend: Sequence[Line2D], width: float) -> tuple[int, int]:
    """Columns and rows of a legend that is at most `width` inches wide."""
    if not legend:
        return 1, 0
    widest = max(text_width(str(handle.get_label())) for handle in legend)
    columns = max(1, min(len(legend), int(width / (widest + _LEGEND_HANDLE))))
    return columns, -(-len(legend) // columns)
