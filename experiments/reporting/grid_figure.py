"""The figure of a grid: a panel for each metric, with a mark for every place."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from experiments.contracts import Metric
from experiments.reporting.entries import ALL, Axis, Entry, Place, Run, entries
from experiments.reporting.markdown import metric_heading, scaled
from experiments.reporting.style import (
    INK,
    LARGE,
    SHADE,
    display_text,
    error_bars,
    legend_handle,
    new_figure,
    series_mark,
    style_axes,
    text_width,
)

_COLUMNS = 3

# Inches.
_PANEL_WIDTH = 3.3
_LINES_HEIGHT = 2.9
_AROUND_ROWS = 0.75
_LEAST_ROWS = 0.9
_MARK = 0.14
_BETWEEN_ROWS = 0.18
_BESIDE_LABELS = 0.7
_LEAST_WIDTH = 5.5
_BETWEEN_NUMBERS = 0.03

_NAME_CHARACTERS = 24
"""In a line beside the rows, which are as high as such a line is long."""


def grid_figure(
    axes: Sequence[Axis],
    runs: Sequence[Run],
    metrics: Sequence[Metric],
    *,
    title: str,
    command: str = "",
) -> Figure:
    """Draw every metric of a grid.

    If the labels of the last axis are numbers, lines run along it, one for each combination of the
    other axes. Else every label of the first axis is a row, in which the combinations of the other
    axes have marks of their own.

    Args:
      axes: What was varied.
      runs: Their places are on the axes.
      metrics: At least one.
      title: What is compared.
      command: What was typed to get it; stands below the figure.

    Raises:
      ValueError: There is no metric or no run.
    """
    if not metrics or not runs:
        raise ValueError("a figure needs at least one run and one metric")
    found = [entries(runs, metric) for metric in metrics]
    along = _is_numeric(axes[-1])
    varied = axes[:-1] if along else axes[1:]
    series = list(itertools.product(*(axis.labels for axis in varied)))
    columns = min(_COLUMNS, len(metrics))
    rows = -(-len(metrics) // columns)
    width = _width(columns, [] if along else axes[0].labels)
    figure = new_figure(
        width,
        rows * (_LINES_HEIGHT if along else _rows_height(axes[0], series)),
        title=title,
        caption=_caption(found),
        command=command,
        legend=_legend(series, line=along),
        legend_title=", ".join(axis.name for axis in varied),
    )
    places = figure.add_gridspec(rows, columns)
    for number, (metric, values) in enumerate(zip(metrics, found, strict=True)):
        panel = figure.add_subplot(places[number])
        panel.set_title(textwrap.fill(metric_heading(metric), 40), size=LARGE)
        if along:
            _draw_lines(panel, series, axes[-1], values)
            _set_scale(panel, axes[-1], width / columns - _BESIDE_LABELS)
        else:
            _draw_rows(panel, axes[0], series, values)
            _name_rows(panel, axes[0], shown=number % columns == 0)
    return figure


def _is_numeric(axis: Axis) -> bool:
    return axis.numbers is not None and len(axis.labels) > 1


def _width(columns: int, labels: Sequence[str]) -> float:
    """Of a figure, in inches: its panels side by side, and the labels of rows at their left."""
    beside = max((text_width(display_text(label)) for label in labels), default=0.0)
    return max(_LEAST_WIDTH, beside + _BESIDE_LABELS + _PANEL_WIDTH * columns)


def _rows_height(axis: Axis, series: Sequence[Place]) -> float:
    pitch = _MARK * len(series) + _BETWEEN_ROWS
    return _AROUND_ROWS + max(_LEAST_ROWS, pitch * len(axis.labels))


def _caption(found: Sequence[Mapping[Place, Entry]]) -> str:
    """How many seeds there are, and what the bars are."""
    known = [entry for values in found for entry in values.values() if entry.values]
    seeds = {len(entry.values) for entry in known}
    several, intervals = max(seeds, default=1) > 1, any(e.interval is not None for e in known)
    interval = "95 % confidence interval over evaluation episodes"
    if not several:
        return f"One seed. Bars: {interval}." if intervals else "One seed."
    text = f"Mean of {' to '.join(map(str, sorted({min(seeds), max(seeds)})))} seeds. "
    text += "Bars: standard deviation over the seeds; thin ticks: single seeds."
    return text + (f" Bars of one seed: {interval}." if intervals else "")


def _legend(series: Sequence[Place], *, line: bool) -> list[Line2D]:
    """An entry for each series; none for a single one."""
    if len(series) == 1:
        return []
    return [
        legend_handle(", ".join(labels), series_mark(number), line=line)
        for number, labels in enumerate(series)
    ]


def _draw_rows(
    panel: Axes, axis: Axis, series: Sequence[Place], found: Mapping[Place, Entry]
) -> None:
    """Horizontal marks: a row for each label, in which every series has a height of its own."""
    style_axes(panel, grid="x")
    step = _MARK / (_MARK * len(series) + _BETWEEN_ROWS)
    for row in range(1, len(axis.labels), 2):
        panel.axhspan(row - 0.5, row + 0.5, color=SHADE, linewidth=0, zorder=0)
    for number, rest in enumerate(series):
        offset = step * (number - (len(series) - 1) / 2)
        known = [
            (row + offset, entry)
            for row, label in enumerate(axis.labels)
            if (entry := found.get((label, *rest))) and entry.values
        ]
        heights = [height for height, _ in known]
        means, bars = _means_and_bars([entry for _, entry in known])
        error_bars(panel, means, heights, series_mark(number), xerr=bars)
        ticks = [(x, height) for height, entry in known for x in _seed_values(entry)]
        _draw_ticks(panel, ticks, "|")
    panel.margins(x=0.06)
    panel.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _name_rows(panel: Axes, axis: Axis, *, shown: bool) -> None:
    """The labels of the rows, in their order from the top; panels beside others show none."""
    panel.set_ylim(len(axis.labels) - 0.5, -0.5)
    panel.set_yticks(range(len(axis.labels)), [display_text(label) for label in axis.labels])
    panel.tick_params(axis="y", length=0, labelleft=shown)
    if shown:
        # Names such as loss.name/optimizer.learning_rate break after a slash.
        name = textwrap.fill(axis.name.replace("/", "/ "), _NAME_CHARACTERS).replace("/ ", "/")
        panel.set_ylabel(display_text(name))


def _draw_lines(
    panel: Axes, series: Sequence[Place], axis: Axis, found: Mapping[Place, Entry]
) -> None:
    """Lines along a numeric axis, one for each series."""
    style_axes(panel)
    positions = dict(zip(axis.labels, axis.numbers or [], strict=True))
    for number, rest in enumerate(series):
        known = [
            (positions[label], entry)
            for label in sorted(axis.labels, key=positions.__getitem__)
            if (entry := found.get((*rest, label))) and entry.values
        ]
        means, bars = _means_and_bars([entry for _, entry in known])
        mark = series_mark(number)
        error_bars(panel, [x for x, _ in known], means, mark, yerr=bars, line=True)
        _draw_ticks(panel, [(x, y) for x, entry in known for y in _seed_values(entry)], "_")
    panel.set_xlabel(display_text(axis.name))


def _set_scale(panel: Axes, axis: Axis, width: float) -> None:
    """Logarithmic if the numbers are positive and the largest is six times the smallest.

    Args:
      panel: Where the lines are drawn.
      axis: What they run along.
      width: Of the panel, in inches.
    """
    numbers = axis.numbers or []
    logarithmic = min(numbers) > 0 and max(numbers) >= 6 * min(numbers)
    if logarithmic:
        panel.set_xscale("log")
        panel.set_xticks([], minor=True)
    if logarithmic or ALL in axis.labels:
        along = np.log(numbers) if logarithmic else np.asarray(numbers)
        margin = 2 * panel.get_xmargin()
        inches = width / (1 + margin) * (along - along.min()) / np.ptp(along)
        panel.set_xticks(numbers, _labels_that_fit(axis.labels, inches.tolist()))
    else:
        panel.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _labels_that_fit(labels: Sequence[str], inches: Sequence[float]) -> list[str]:
    """The labels of ticks at these positions; an empty one for each that would touch the next."""
    texts = list(labels)
    left_end = np.inf
    for number in sorted(range(len(texts)), key=inches.__getitem__, reverse=True):
        half = text_width(texts[number]) / 2 + _BETWEEN_NUMBERS
        if inches[number] + half > left_end:
            texts[number] = ""
        else:
            left_end = inches[number] - half
    return texts


def _means_and_bars(known: Sequence[Entry]) -> tuple[list[float], list[float]]:
    """In the unit that is printed; a bar of no length for an entry that has none."""
    means = [scaled(entry.mean or 0.0, entry.metric.unit) for entry in known]
    return means, [scaled(entry.half_width or 0.0, entry.metric.unit) for entry in known]


def _seed_values(entry: Entry) -> list[float]:
    """The values of the seeds if there are several, in the unit that is printed."""
    several = len(entry.values) > 1
    return [scaled(value, entry.metric.unit) for value in entry.values] if several else []


def _draw_ticks(panel: Axes, points: Sequence[tuple[float, float]], marker: str) -> None:
    """A thin tick for each seed."""
    x, y = [x for x, _ in points], [y for _, y in points]
    panel.plot(x, y, marker, color=INK, markersize=6, markeredgewidth=0.8, zorder=4)
