"""The one style of all figures: colours and markers, title, legend and caption, axes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from experiments.core.terminal import printable

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
SMALL, MEDIUM, LARGE = 8, 9, 10
"""Font sizes in points: captions; numbers and legends; titles of panels."""

FONTS: Any = {
    "font.size": SMALL,
    "axes.titlesize": LARGE,
    **{f"{part}.labelsize": MEDIUM for part in ("axes", "xtick", "ytick")},
    "legend.fontsize": MEDIUM,
    "legend.frameon": False,
}
"""What matplotlib is set to while the pictures of a run are drawn."""

_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
_MARKERS, _LINES = "osD^vP*X", ("-", "--", ":", "-.")
# Inches: between title, legend, panels and caption, and a line of the legend.
_GAP, _LEGEND_LINE = 0.08, 0.2
# Characters in an inch of title, legend and caption: few enough for lines of wide letters.
_TITLE, _LEGEND, _CAPTION = 8.5, 12, 14.5


class Mark(NamedTuple):
    """How one series is drawn."""

    color: str
    marker: str
    line: str = "-"

    def style(self, *, line: bool) -> dict[str, Any]:
        """Arguments of matplotlib, with or without a line through the markers."""
        style = self.line if line else "None"
        shape = {"color": self.color, "marker": self.marker, "linestyle": style}
        return {**shape, "linewidth": 1.3, "markersize": 5}


def series_mark(number: int) -> Mark:
    """The mark of the series with this number: no two of the first 64 are alike."""
    cycle, place = divmod(number, len(_COLORS))
    marker = _MARKERS[(place + cycle) % len(_MARKERS)]
    return Mark(_COLORS[place], marker, _LINES[cycle % len(_LINES)])


def legend_handle(label: str, mark: Mark, *, line: bool) -> Line2D:
    """An entry of a legend, with or without a line through its marker."""
    return Line2D([], [], label=display_text(label), **mark.style(line=line))


def new_figure(
    width: float,
    height: float,
    *,
    title: str = "",
    caption: str = "",
    command: str = "",
    legend: Sequence[Line2D] = (),
    legend_title: str = "",
) -> Figure:
    """An empty figure with a title and a legend above the panels, and a caption below them.

    Width and height are those of the room for panels, in inches. Title, legend and caption are
    outside of it; `write_picture` saves all that is drawn.
    """
    longest = max((len(str(handle.get_label())) for handle in legend), default=0)
    # Beside its text, an entry has a marker and a gap, which are as wide as eight characters.
    columns = max(1, min(len(legend), int(width * _LEGEND / (longest + 8))))
    above = _LEGEND_LINE * (-(-len(legend) // columns) + bool(legend_title)) + _GAP
    characters = int(width * _CAPTION)
    notes = textwrap.wrap(caption, characters)
    if command:
        notes += textwrap.wrap(f"Command: {command}", characters, break_on_hyphens=False)
    heading = display_text(textwrap.fill(title, int(width * _TITLE)))
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(width, height), dpi=200, layout=layout)
    figure.text(0, 1 + above / height, heading, size=13, weight="bold", va="bottom")
    small: Any = {"size": SMALL, "color": INK, "linespacing": 1.3}
    figure.text(0, -_GAP / height, display_text("\n".join(notes)), va="top", **small)
    figure.legend(
        handles=list(legend),
        title=display_text(legend_title) or None,
        loc="lower left",
        bbox_to_anchor=(0, 1 + _GAP / height),
        bbox_transform=figure.transFigure,
        ncols=columns,
        alignment="left",
        borderpad=0,
        borderaxespad=0,
        frameon=False,
        fontsize=MEDIUM,
        title_fontsize=MEDIUM,
    )
    return figure


def style_axes(axes: Axes, *, grid: Literal["both", "x", "y"] = "both") -> None:
    """A light grid behind the data, no frame above and at the right, small numbers."""
    axes.grid(axis=grid, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=MEDIUM)
    axes.xaxis.label.set_fontsize(MEDIUM)
    axes.yaxis.label.set_fontsize(MEDIUM)
    axes.spines[["top", "right"]].set_visible(False)


def display_text(text: str) -> str:
    """Text for matplotlib: dollar signs as they are, and the tilde of ⊕̃ on top of it."""
    # The font sets a combining tilde beside its ⊕; the accent of TeX sits on top.
    text = printable(text).replace("$", r"\$")
    return text.replace("⊕\N{COMBINING TILDE}", r"$\tilde{\oplus}$")
