"""Time and temporary memory of every loss against its batch size or number of classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from experiments.reporting.style import (
    BLUE,
    GREEN,
    GREY,
    MEDIUM,
    ORANGE,
    PURPLE,
    SMALL,
    VERMILLION,
    Mark,
    legend_handle,
    new_figure,
    style_axes,
)


class Style(NamedTuple):
    """How tables and figures show a form."""

    label: str
    mark: Mark


STYLES = {
    "jaxloss": Style("jaxloss", Mark(BLUE, "o")),
    "eager": Style("PyTorch eager", Mark(VERMILLION, "s", "--")),
    "compile": Style("torch.compile", Mark(ORANGE, "D", "--")),
    "metric_learning": Style("pytorch-metric-learning", Mark(PURPLE, "^", "--")),
    "composition": Style("composition", Mark(BLUE, "x", "--")),
    "optax": Style("optax", Mark(GREEN, "v", "--")),
    "floor": Style("floor", Mark(GREY, "_", ":")),
}
"""All forms of a loss, in the order of columns and legends."""

_COLUMNS = 7
_WIDTH, _HEIGHT = 2.0, 3.2  # Inches of a loss.
_LEAST_WIDTH = 4.6
_LEAST_MEGABYTES = 1e-3  # Smaller values are drawn here: a few bytes would stretch the axis.


def benchmark_figure(rows: Sequence[dict[str, Any]], *, title: str) -> Figure:
    """Draws for every loss a panel of time and beneath it one of memory, both log-log.

    Args:
      rows: The losses of a benchmark, one row for each size; at least one.
      title: Where it was measured.
    """
    losses = list(dict.fromkeys(row["loss"] for row in rows))
    columns = min(_COLUMNS, len(losses))
    bands = -(-len(losses) // columns)
    names = [
        name for name in STYLES if any("fastest_ms" in row["forms"].get(name, {}) for row in rows)
    ]
    figure = new_figure(
        max(columns * _WIDTH + 0.4, _LEAST_WIDTH),
        bands * _HEIGHT,
        title=title,
        legend=[legend_handle(*STYLES[name], line=True) for name in names],
    )
    places = figure.add_gridspec(bands, columns)
    for number, loss in enumerate(losses):
        of_loss = sorted((row for row in rows if row["loss"] == loss), key=_grown)
        time, memory = (figure.add_subplot(p) for p in places[number].subgridspec(2, 1))
        for name in names:
            _draw(time, of_loss, name, "fastest_ms")
            if name != "floor":
                _draw(memory, of_loss, name, "temporary_bytes")
        sizes = [_grown(row) for row in of_loss]
        _style(time, sizes)
        _style(memory, sizes)
        time.set_title(loss, size=MEDIUM, pad=4)
        time.tick_params(axis="x", labelbottom=False)
        grows = "batch size n" if of_loss[0]["grows"] == "n" else "classes C"
        memory.set_xlabel(grows, size=SMALL, labelpad=1)
        if number % columns == 0:
            time.set_ylabel("time (ms)", size=SMALL)
            memory.set_ylabel("memory (MB)", size=SMALL)
    return figure


def _grown(row: dict[str, Any]) -> int:
    """What differs between the sizes of a loss."""
    return row["shape"][row["grows"]]


def _draw(axes: Axes, rows: Sequence[dict[str, Any]], name: str, key: str) -> None:
    points = [
        (_grown(row), max(1e-6 * value, _LEAST_MEGABYTES) if key == "temporary_bytes" else value)
        for row in rows
        if (value := row["forms"].get(name, {}).get(key))
    ]
    if points:
        mark, own = STYLES[name].mark, name == "jaxloss"
        axes.plot(
            *zip(*points, strict=True),
            color=mark.color,
            marker=mark.marker,
            linestyle=mark.line,
            linewidth=1.3 if own else 1.0,
            markersize=4,
            zorder=4 if own else 3,
        )


def _style(axes: Axes, sizes: Sequence[int]) -> None:
    """Logarithmic axes with a tick for every size."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    style_axes(axes)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_xlim(min(sizes) / 1.35, max(sizes) * 1.35)
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = axes.get_ylim()
    least = 100**0.5  # At least two decades, so that there are ticks and noise stays small.
    centre = (low * high) ** 0.5
    axes.set_ylim(min(low, centre / least), max(high, centre * least))
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.tick_params(labelsize=SMALL, pad=2)
