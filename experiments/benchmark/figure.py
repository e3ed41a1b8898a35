"""Time and temporary memory of every loss against its batch size or number of classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from experiments.files import write_picture
from experiments.reporting.colors import BLUE, GREEN, ORANGE, PURPLE, VERMILLION

_STYLES: dict[str, tuple[str, str, str, Any]] = {
    "jaxloss": ("jaxloss", BLUE, "o", "-"),
    "eager": ("PyTorch eager", VERMILLION, "s", "--"),
    "compile": ("torch.compile", ORANGE, "D", "--"),
    "metric_learning": ("pytorch-metric-learning", PURPLE, "^", "--"),
    "optax": ("optax", GREEN, "v", "--"),
    "floor": ("floor", "#888888", "", ":"),
}
_LEAST = {"fastest_ms": 0.0, "temporary_bytes": 1e-3}  # A few bytes would stretch the axis.
_COLUMNS = 7
_WIDTH, _HEIGHT = 2.0, 1.3  # Inches from a panel to the next.
_HEAD, _BAND = 1.0, 3.3  # Inches of title and legend, and of a row of losses.


def benchmark_figure(rows: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Draw for every loss a panel of time and beneath it one of memory, both log-log.

    Args:
      rows: The losses of a benchmark, one row a size; at least one.
      path: The PNG file to write.
      title: Where it was measured.
    """
    losses = list(dict.fromkeys(row["loss"] for row in rows))
    columns = min(_COLUMNS, len(losses))
    bands = -(-len(losses) // columns)
    width = max(columns * _WIDTH + 0.45, 4.3)
    height = bands * _BAND + _HEAD - 0.1
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    figure.text(0.1 / width, 1 - 0.1 / height, title, size=11, weight="bold", va="top")
    names = [name for name in _STYLES if any(_values(row, name, "fastest_ms") for row in rows)]
    figure.legend(
        handles=[_handle(name) for name in names],
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - 0.32 / height),
        ncols=max(3, min(len(names), columns)),
        frameon=False,
        fontsize=8,
        handlelength=2.4,
    )
    for number, loss in enumerate(losses):
        band, column = divmod(number, columns)
        of_loss = sorted(
            (row for row in rows if row["loss"] == loss), key=lambda row: row["shape"][row["grows"]]
        )
        grows = of_loss[0]["grows"]
        top = height - _HEAD - 0.1 - band * _BAND
        for part, (key, factor, unit) in enumerate(
            (("fastest_ms", 1.0, "time (ms)"), ("temporary_bytes", 1e-6, "memory (MB)"))
        ):
            corner = (0.6 + column * _WIDTH, top - (part + 1) * _HEIGHT)
            axes = figure.add_axes(
                (
                    corner[0] / width,
                    corner[1] / height,
                    (_WIDTH - 0.5) / width,
                    (_HEIGHT - 0.15) / height,
                )
            )
            _draw(axes, of_loss, names, key, factor)
            axes.set_ylabel(unit if column == 0 else "", size=8)
            if part == 0:
                axes.set_title(loss, size=9, pad=4)
                axes.tick_params(axis="x", labelbottom=False)
            else:
                axes.set_xlabel("batch size n" if grows == "n" else "classes C", size=8, labelpad=1)
    write_picture(path, figure)


def _draw(
    axes: Axes, rows: list[dict[str, Any]], names: list[str], key: str, factor: float
) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = [row["shape"][row["grows"]] for row in rows]
    for name in names:
        points = [
            (size, max(factor * value, _LEAST[key]))
            for size, row in zip(sizes, rows, strict=True)
            if (value := _values(row, name, key)) and not (name == "floor" and key != "fastest_ms")
        ]
        if points:
            _, color, marker, line = _STYLES[name]
            axes.plot(
                *zip(*points, strict=True),
                color=color,
                marker=marker or "_",
                linestyle=line,
                linewidth=1.3 if name == "jaxloss" else 1.0,
                markersize=4,
                zorder=4 if name == "jaxloss" else 3,
            )
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
    axes.tick_params(labelsize=7, pad=2)
    axes.grid(color="#e4e4e4", linewidth=0.5, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _values(row: dict[str, Any], name: str, key: str) -> float | None:
    return row["forms"].get(name, {}).get(key)


def _handle(name: str) -> Line2D:
    label, color, marker, line = _STYLES[name]
    return Line2D(
        *([], []),
        color=color,
        marker=marker or "_",
        linestyle=line,
        markersize=4,
        linewidth=1.3,
        label=label,
    )
