"""The one style of all figures: settings of matplotlib, colours, and marks of series."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people can tell apart.
BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#888888"
COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
INK = "#333333"  # Captions, edges of markers, and ticks of single seeds.
SMALL, MEDIUM, LARGE = 8, 9, 10  # Points: captions; numbers and legends; titles of panels.

STYLE: Any = {
    "figure.dpi": 200,
    "font.size": SMALL,
    "axes.titlesize": LARGE,
    **{f"{part}.labelsize": MEDIUM for part in ("axes", "xtick", "ytick")},
    **{f"axes.spines.{side}": False for side in ("top", "right")},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": "#dddddd", "grid.linewidth": 0.6},
    **{"legend.fontsize": MEDIUM, "legend.frameon": False},
    "text.parse_math": False,  # Names that others chose may have dollar signs.
}
"""For `matplotlib.rc_context`, in which figures are drawn and written."""


def series_mark(number: int) -> dict[str, Any]:
    """How the series with this number is drawn: no two of the first 64 are alike."""
    cycle, place = divmod(number, len(COLORS))
    return {
        "color": COLORS[place],
        "marker": "osD^vP*X"[(place + cycle) % 8],
        "linestyle": ("-", "--", ":", "-.")[cycle % 4],
        **{"linewidth": 1.3, "markersize": 5},
    }


def new_figure(width: float, height: float, *, title: str = "", caption: str = "") -> Figure:
    """An empty figure with so many inches for panels, below a title and above a caption."""
    lines = textwrap.wrap(caption, int(14 * width), break_on_hyphens=False)
    heading = textwrap.wrap(title, int(8 * width))
    figure = Figure((width, height + 0.25 * len(heading) + 0.15 * len(lines)), layout="constrained")
    left: Any = {"x": 0.01, "ha": "left"}
    if heading:
        figure.suptitle("\n".join(heading), size=13, weight="bold", **left)
    if lines:
        figure.supxlabel("\n".join(lines), size=SMALL, color=INK, **left)
    return figure
