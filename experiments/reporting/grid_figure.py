"""The figure of a grid: a panel for each metric, with a mark for every place."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.reporting.entries import ALL, Axis, Entry, Grid, Place, places
from experiments.reporting.markdown import metric_heading, scaled
from experiments.reporting.style import (
    INK,
    LARGE,
    Mark,
    display_text,
    legend_handle,
    new_figure,
    series_mark,
    style_axes,
)

Series = Mapping[Place, Mark]
"""How each combination of labels is drawn."""

_COLUMNS = 3

# Inches.
_PANEL_WIDTH = 3.3
_AROUND_PANELS = 0.6
_LINES_HEIGHT = 2.9
_AROUND_ROWS = 0.75
_LEAST_ROWS = 0.9
_MARK = 0.14
_BETWEEN_ROWS = 0.18
_CHARACTER = 0.085

_NAME_CHARACTERS = 24
"""In a line beside the rows, which are as high as such a line is long."""
_NUMBER_CHARACTERS = 30
"""Below a panel."""


def grid_figure(grid: Grid, *, title: str, command: str) -> Figure | None:
    """Draws every metric that has values; None if there is no such metric.

    If the labels of the last axis are numbers, lines run along it, one for each combination of the
    other axes. Else every label of the first axis is a row, in which the combinations of the other
    axes have marks of their own.
    """
    found = {m: e for m, e in grid.entries.items() if any(entry.values for entry in e.values())}
    if not found:
        return None
    axis = grid.axes[-1]
    along = axis.numbers is not None and len(axis.labels) > 1
    axis, varied = (axis, grid.axes[:-1]) if along else (grid.axes[0], grid.axes[1:])
    series = {place: series_mark(number) for number, place in enumerate(places(varied))}
    legend = [legend_handle(", ".join(at), mark, line=along) for at, mark in series.items()]
    several = len(series) > 1
    columns = min(_COLUMNS, len(found))
    rows = -(-len(found) // columns)
    pitch = _MARK * len(series) + _BETWEEN_ROWS
    height = _LINES_HEIGHT if along else _AROUND_ROWS + max(_LEAST_ROWS, pitch * len(axis.labels))
    beside = 0 if along else _CHARACTER * max(map(len, axis.labels))
    figure = new_figure(
        _AROUND_PANELS + beside + _PANEL_WIDTH * columns,
        rows * height,
        title=title,
        caption=_caption([entry for entries in found.values() for entry in entries.values()]),
        command=command,
        legend=legend if several else [],
        legend_title=", ".join(axis.name for axis in varied) if several else "",
    )
    for number, (metric, entries) in enumerate(found.items()):
        panel = figure.add_subplot(rows, columns, number + 1)
        panel.set_title(textwrap.fill(metric_heading(metric), 40), size=LARGE)
        panel.locator_params(axis="x", nbins=5, steps=[1, 2, 5, 10])
        if along:
            _draw_lines(panel, axis, series, entries)
        else:
            _draw_rows(panel, axis, series, entries, named=number % columns == 0)
    return figure


def _caption(entries: Iterable[Entry]) -> str:
    """How many seeds there are, and what the bars are."""
    known = [entry for entry in entries if entry.values]
    seeds = sorted({len(entry.values) for entry in known})
    intervals = any(entry.interval is not None for entry in known)
    interval = "95 % confidence interval over evaluation episodes"
    if seeds[-1] == 1:
        return f"One seed. Bars: {interval}." if intervals else "One seed."
    text = f"Mean of {' to '.join(map(str, dict.fromkeys([seeds[0], seeds[-1]])))} seeds. "
    text += "Bars: standard deviation over the seeds; thin ticks: single seeds."
    return text + (f" Bars of one seed: {interval}." if intervals else "")


def _draw_rows(
    panel: Axes, axis: Axis, series: Series, entries: Mapping[Place, Entry], *, named: bool
) -> None:
    """A row for each label from the top, in which every series has a height of its own."""
    style_axes(panel, grid="x")
    rows = range(len(axis.labels))
    step = _MARK / (_MARK * len(series) + _BETWEEN_ROWS)
    for row in rows[1::2]:
        panel.axhspan(row - 0.5, row + 0.5, color="#f3f3f3", linewidth=0, zorder=0)
    for number, (place, mark) in enumerate(series.items()):
        offset = step * (number - (len(series) - 1) / 2)
        found = [(row + offset, entries[axis.labels[row], *place]) for row in rows]
        _draw_series(panel, mark, found, along=False)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_yticks(rows, [display_text(label) for label in axis.labels])
    panel.tick_params(axis="y", length=0, labelleft=named)
    if named:
        # Names such as loss.name/optimizer.learning_rate break after a slash.
        name = textwrap.fill(axis.name.replace("/", "/ "), _NAME_CHARACTERS).replace("/ ", "/")
        panel.set_ylabel(display_text(name))


def _draw_lines(panel: Axes, axis: Axis, series: Series, entries: Mapping[Place, Entry]) -> None:
    """A line along a numeric axis for each series."""
    style_axes(panel)
    numbers = axis.numbers or []
    points = sorted(zip(numbers, axis.labels, strict=True))
    for place, mark in series.items():
        found = [(number, entries[*place, label]) for number, label in points]
        _draw_series(panel, mark, found, along=True)
    panel.set_xlabel(display_text(axis.name))
    logarithmic = min(numbers) > 0 and max(numbers) >= 6 * min(numbers)
    if logarithmic:
        panel.set_xscale("log")
        panel.set_xticks([], minor=True)
    if logarithmic or ALL in axis.labels:
        along = [math.log(number) if logarithmic else number for number in numbers]
        panel.set_xticks(numbers, _labels_that_fit(axis.labels, along))


def _labels_that_fit(labels: Sequence[str], positions: Sequence[float]) -> list[str]:
    """The labels of ticks; an empty one for each that would touch the next larger one."""
    character = (max(positions) - min(positions)) / _NUMBER_CHARACTERS
    texts = list(labels)
    left_end = math.inf
    for position, number in sorted(zip(positions, range(len(texts)), strict=True), reverse=True):
        half = character * (len(texts[number]) + 1) / 2
        if position + half > left_end:
            texts[number] = ""
        else:
            left_end = position - half
    return texts


def _draw_series(
    panel: Axes, mark: Mark, found: Iterable[tuple[float, Entry]], *, along: bool
) -> None:
    """Means with bars, and a thin tick for each of several seeds, in the unit that is printed.

    If `along`, positions are along x and the means are joined by a line. Else they are along y.
    """
    means, bars, ticks = [], [], []
    for position, entry in found:
        values = [scaled(value, entry.metric.unit) for value in entry.values]
        if values:
            means.append((position, statistics.fmean(values)))
            bars.append(scaled(entry.half_width or 0.0, entry.metric.unit))
        if len(values) > 1:
            ticks += [(position, value) for value in values]
    order = [0, 1] if along else [1, 0]
    panel.errorbar(
        *np.reshape(means, (-1, 2)).T[order],
        **{"yerr" if along else "xerr": bars},
        **mark.style(line=along),
        markeredgecolor=INK,
        markeredgewidth=0.4,
        elinewidth=1.6,
        zorder=3,
    )
    panel.plot(
        *np.reshape(ticks, (-1, 2)).T[order],
        "_" if along else "|",
        color=INK,
        markersize=6,
        markeredgewidth=0.8,
        zorder=4,
    )
