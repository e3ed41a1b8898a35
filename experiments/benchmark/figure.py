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

_STYLES = {
    "jaxloss": ("jaxloss", Mark(BLUE, "o")),
    "eager": ("PyTorch eager", Mark(VERMILLION, "s", "--")),
    "compile": ("torch.compile", Mark(ORANGE, "D", "--")),
    "metric_learning": ("pytorch-metric-learning", Mark(PURPLE, "^", "--")),
    "optax": ("optax", Mark(GREEN, "v", "--")),
    "floor": ("floor", Mark(GREY, "_", ":")),
}
_COLUMNS = 7
_WIDTH, _HEIGHT = 2.0, 3.2  # Inches of a loss.
_LEAST_WIDTH = 4.6


class _Quantity(NamedTuple):
    """What a panel shows."""

    key: str
    label: str
    factor: float
    least: float
    """Smaller values are drawn here: a few bytes would stretch the axis."""


_TIME = _Quantity("fastest_ms", "time (ms)", 1.0, 0.0)
_MEMORY = _Quantity("temporary_bytes", "memory (MB)", 1e-6, 1e-3)


def benchmark_figure(rows: Sequence[dict[str, Any]], *, title: str) -> Figure:
    """Draw for every loss a panel of time and beneath it one of memory, both log-log.

    Args:
      rows: The losses of a benchmark, one row a size; at least one.
      title: Where it was measured.
    """
    losses = list(dict.fromkeys(row["loss"] for row in rows))
    columns = min(_COLUMNS, len(losses))
    bands = -(-len(losses) // columns)
    names = [name for name in _STYLES if any(_values(row, name, _TIME.key) for row in rows)]
    figure = new_figure(
        max(columns * _WIDTH + 0.4, _LEAST_WIDTH),
        bands * _HEIGHT,
        title=title,
        legend=[legend_handle(*_STYLES[name], line=True) for name in names],
    )
    places = figure.add_gridspec(bands, columns)
    for number, loss in enumerate(losses):
        of_loss = sorted(
            (row for row in rows if row["loss"] == loss), key=lambda row: row["shape"][row["grows"]]
        )
        pair = places[number].subgridspec(2, 1)
        for part, quantity in enumerate((_TIME, _MEMORY)):
            axes = figure.add_subplot(pair[part])
            _draw(axes, of_loss, names, quantity)
            _style(axes, of_loss)
            if number % columns == 0:
                axes.set_ylabel(quantity.label, size=SMALL)
            if quantity is _TIME:
                axes.set_title(loss, size=MEDIUM, pad=4)
                axes.tick_params(axis="x", labelbottom=False)
            else:
                grows = "batch size n" if of_loss[0]["grows"] == "n" else "classes C"
                axes.set_xlabel(grows, size=SMALL, labelpad=1)
    return figure


def _draw(
    axes: Axes, rows: Sequence[dict[str, Any]], names: Sequence[str], quantity: _Quantity
) -> None:
    for name in names:
        points = [
            (row["shape"][row["grows"]], max(quantity.factor * value, quantity.least))
            for row in rows
            if (value := _values(row, name, quantity.key))
            and not (name == "floor" and quantity is _MEMORY)
        ]
        if points:
            mark, own = _STYLES[name][1], name == "jaxloss"
            axes.plot(
                *zip(*points, strict=True),
                color=mark.color,
                marker=mark.marker,
                linestyle=mark.line,
                linewidth=1.3 if own else 1.0,
                markersize=4,
                zorder=4 if own else 3,
            )


def _style(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Logarithmic axes with a tick for every size."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    style_axes(axes)
    sizes = [row["shape"][row["grows"]] for row in rows]
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


def _values(row: dict[str, Any], name: str, key: str) -> float | None:
    return row["forms"].get(name, {}).get(key)
