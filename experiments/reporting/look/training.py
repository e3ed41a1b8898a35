"""What changed during training: the numbers of the metrics log, and the assignment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.contracts import Metric
from experiments.reporting.markdown import scaled, with_unit
from experiments.reporting.style import (
    BLUE,
    INK,
    LARGE,
    MEDIUM,
    ORANGE,
    new_figure,
    series_mark,
    style_axes,
)

_COLUMNS = 3
_SHORT = 13
"""Characters of names of which two fit side by side in the legend of a panel."""
_LOSS, _VALIDATION = "loss", "validation"


def log_series(
    rows: Sequence[Mapping[str, Any]], *, without: Sequence[str] = ()
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The numbers of a metrics log by name: steps and values; those that are not finite are NaN.

    Args:
      rows: The lines of the log.
      without: Names that are left out.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and name not in without:
                number = float(value)
                found.setdefault(name, []).append(
                    (row["step"], number if math.isfinite(number) else math.nan)
                )
    return {
        name: (np.array([s for s, _ in pairs]), np.array([v for _, v in pairs]))
        for name, pairs in found.items()
    }


def curves_figure(
    series: Mapping[str, tuple[np.ndarray, np.ndarray]],
    validation: Metric,
    *,
    checkpoint: int,
    title: str,
    caption: str,
) -> Figure:
    """Draws every number of the log against the steps.

    Numbers whose names end with the same word share a panel: so do several losses.

    Args:
      series: As `log_series` gives them.
      validation: What the entry `validation` is.
      checkpoint: The step of the checkpoint, which is marked.
      title, caption: Of the figure.
    """
    panels: dict[str, list[str]] = {}
    for name in sorted(series, key=_place):
        panels.setdefault(name.rpartition("_")[2], []).append(name)
    columns = 2 if len(panels) == 4 else min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(3.4 * columns, 2.7 * rows, title=title, caption=caption)
    last = max(int(steps[-1]) for steps, _ in series.values())
    for number, (word, names) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, number + 1)
        style_axes(axes)
        for place, name in enumerate(names):
            steps, values = series[name]
            if name == _VALIDATION:
                values = np.array([scaled(value, validation.unit) for value in values])
            dots = "o-" if len(steps) <= 30 else "-"
            mark = series_mark(place)
            axes.plot(
                steps,
                values,
                dots,
                color=mark.color,
                markersize=3.5,
                # It may be the same as one of the others, which are drawn on top of it.
                linewidth=4 if name == _LOSS and len(names) > 1 else 1.3,
                label=name.replace("_", " "),
            )
        axes.axvline(checkpoint, color=INK, linewidth=0.9, linestyle=":")
        axes.set_xlim(0, 1.03 * last)
        axes.set_xlabel("step")
        if names == [_VALIDATION]:
            heading = with_unit(f"validation: {validation.name}", validation.unit)
        else:
            heading = word if len(names) > 1 else names[0].replace("_", " ")
        axes.set_title(heading, size=LARGE)
        if len(names) > 1:
            columns_inside = 2 if max(map(len, names)) <= _SHORT else 1
            low, high = axes.get_ylim()
            room = 0.17 * -(-len(names) // columns_inside)  # For the legend.
            axes.set_ylim(low, high + room * (high - low))
            axes.legend(loc="upper right", ncols=columns_inside, frameon=False, fontsize=MEDIUM)
    return figure


def _place(name: str) -> tuple[int, str]:
    """The loss first, then the validation."""
    first = (_LOSS, _VALIDATION)
    return (first.index(name) if name in first else len(first), name)


def assignment_figure(
    reassigned: np.ndarray, alignment: np.ndarray, *, classes: int, title: str, caption: str
) -> Figure:
    """Draws how many classes changed their prototype after every epoch, and the alignment.

    Args:
      reassigned: Integers [e], after each epoch.
      alignment: Floats [e], the mean cosine of class means and their prototypes.
      classes: Number of classes C.
      title, caption: Of the figure.
    """
    figure = new_figure(7.2, 3.6, title=title, caption=caption)
    axes = figure.add_subplot()
    style_axes(axes)
    epochs = np.arange(1, len(reassigned) + 1)
    axes.bar(epochs, reassigned, width=0.85, color=BLUE, linewidth=0)
    axes.axhline(classes, color=INK, linewidth=0.9, linestyle=":")
    axes.set_ylim(0, 1.08 * classes)
    axes.set_xlim(0.3, len(epochs) + 0.7)
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"classes with a new prototype, of {classes} (bars)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    twin = axes.twinx()
    twin.plot(epochs, alignment, "o-", color=ORANGE, markersize=4, linewidth=2)
    twin.set_ylim(min(0, float(alignment.min())), 1)
    twin.set_ylabel("cosine of class means and prototypes (line)", fontsize=MEDIUM)
    twin.tick_params(labelsize=MEDIUM)
    twin.spines["top"].set_visible(False)
    return figure
