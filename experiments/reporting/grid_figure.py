"""The figures of a grid: a panel for each metric, with a mark for every place."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.contracts import Metric
from experiments.reporting.comparison import Difference, Differences, without
from experiments.reporting.entries import Axis, Entry, Grid, Place, places
from experiments.reporting.markdown import difference_heading, metric_heading, scaled
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

_BESIDE = 1 / 60
_BESIDE_ALL = 1 / 10
"""Between two lines at one number, and between the first and the last one at most, as fractions of
the axis."""
_NAME_CHARACTERS = 24
"""In a line beside the rows, which are as high as such a line is long."""
_NUMBER_CHARACTERS = 30
"""Below a panel."""


class Point(NamedTuple):
    """What is drawn at one place, in the unit that is printed."""

    mean: float
    bar: float
    """Half its length."""
    ticks: tuple[float, ...]
    """Single repetitions, if there are several."""
    filled: bool = True


Panels = Mapping[Metric, Mapping[Place, Point]]
"""Panels with at least one point; places without a result have none."""


def grid_figure(grid: Grid, *, title: str, command: str) -> Figure | None:
    """Draws every metric that has values; None if there is no such metric.

    If the labels of the last axis are numbers, lines run along it, one for each combination of the
    other axes. Else every label of the first axis is a row, in which the combinations of the other
    axes have marks of their own.
    """
    panels: dict[Metric, dict[Place, Point]] = {}
    for metric, entries in grid.entries.items():
        for place, entry in entries.items():
            if entry.mean is not None:
                bar = entry.mean_interval or entry.half_width or 0.0
                point = _point(entry.mean, bar, entry.values, metric)
                panels.setdefault(metric, {})[place] = point
    if not panels:
        return None
    known = [entry for entries in grid.entries.values() for entry in entries.values()]
    return _figure(
        _readable(grid),
        grid.axes,
        panels,
        all_axes=grid.axes,
        heading=metric_heading,
        title=title,
        caption=_caption([entry for entry in known if entry.values], repetitions(grid)),
        command=command,
    )


def difference_figure(
    grid: Grid, compared: Differences, baseline: tuple[str, str], *, title: str, command: str
) -> Figure | None:
    """Draws the differences to a baseline in the same way; None if there are none."""
    panels: dict[Metric, dict[Place, Point]] = {}
    for metric, by_place in compared.items():
        for place, difference in by_place.items():
            if difference.mean is not None:
                bar = difference.half_width or 0.0
                point = _point(difference.mean, bar, difference.values, metric)
                point = point._replace(filled=difference.excludes_zero)
                panels.setdefault(metric, {})[place] = point
    if not panels:
        return None
    display = _readable(grid)
    name, label = baseline
    from_baseline = f"{display.names[name]} = {display.label(name, label)}"
    found = [difference for by_place in compared.values() for difference in by_place.values()]
    return _figure(
        display,
        without(grid.axes, baseline),
        panels,
        all_axes=grid.axes,
        heading=difference_heading,
        title=f"{title}: differences from {from_baseline}",
        caption=_difference_caption(found, from_baseline, repetitions(grid)),
        command=command,
        zero=True,
    )


def _point(mean: float, bar: float, values: Sequence[float], metric: Metric) -> Point:
    mean, bar, *ticks = (scaled(value, metric.unit) for value in (mean, bar, *values))
    return Point(mean, bar, tuple(ticks) if len(ticks) > 1 else ())


class _Display(NamedTuple):
    """Names and labels for readers."""

    names: Mapping[str, str]
    labels: Mapping[tuple[str, str], str]
    """Of a label on the axis of a name."""

    def name(self, axis: Axis) -> str:
        return self.names[axis.name]

    def label(self, name: str, label: str) -> str:
        return self.labels.get((name, label), label)


def _readable(grid: Grid) -> _Display:
    """Names of axes without sections, and the protocol's labels of losses, if these are clear.

    `optimizer.weight_decay` becomes `weight decay`, and `loss.name` becomes `loss`.
    """
    names = {axis.name: "/".join(map(_option_words, axis.name.split("/"))) for axis in grid.axes}
    if len(set(names.values())) < len(names):
        names = {name: name for name in names}
    labels: dict[tuple[str, str], str] = {}
    for index, axis in enumerate(grid.axes):
        found = {label: set[str]() for label in axis.labels}
        for place, cells in grid.cells.items():
            reports = [run.report for run in cells.values() if run is not None]
            found[place[index]].update(str(report.get("label", "")) for report in reports)
        own = [next(iter(of)) for of in found.values() if len(of) == 1]
        # One label of the protocol for each label of the axis, and no two the same.
        if axis.numbers is None and len(set(own)) == len(axis.labels) and all(own):
            labels |= {(axis.name, at): text for at, text in zip(axis.labels, own, strict=True)}
    return _Display(names, labels)


def _option_words(option: str) -> str:
    section, _, name = option.rpartition(".")
    return (section if section and name == "name" else name).replace("_", " ")


def _figure(
    display: _Display,
    axes: Sequence[Axis],
    panels: Panels,
    *,
    all_axes: Sequence[Axis],
    heading: Callable[[Metric], str],
    title: str,
    caption: str,
    command: str,
    zero: bool = False,
) -> Figure:
    """A panel for each metric. With `zero`, a line marks 0. `all_axes` have all labels."""
    axis = axes[-1]
    along = axis.numbers is not None and len(axis.labels) > 1
    axis, varied = (axis, axes[:-1]) if along else (axes[0], axes[1:])
    # The same marks with and without a baseline.
    every = [other for other in all_axes if other.name in {shown.name for shown in varied}]
    marks = {place: series_mark(number) for number, place in enumerate(places(every))}
    series = {place: marks[place] for place in places(varied)}
    legend = []
    for at, mark in series.items():
        texts = [display.label(other.name, label) for other, label in zip(varied, at, strict=True)]
        legend.append(legend_handle(", ".join(texts), mark, line=along))
    several = len(marks) > 1
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    pitch = _MARK * len(series) + _BETWEEN_ROWS
    height = _LINES_HEIGHT if along else _AROUND_ROWS + max(_LEAST_ROWS, pitch * len(axis.labels))
    texts = [display.label(axis.name, label) for label in axis.labels]
    beside = 0 if along else _CHARACTER * max(map(len, texts))
    figure = new_figure(
        _AROUND_PANELS + beside + _PANEL_WIDTH * columns,
        rows * height,
        title=title,
        caption=caption,
        command=command,
        legend=legend if several else [],
        legend_title=", ".join(map(display.name, varied)) if several else "",
    )
    for number, (metric, points) in enumerate(panels.items()):
        panel = figure.add_subplot(rows, columns, number + 1)
        panel.set_title(textwrap.fill(heading(metric), 40), size=LARGE)
        panel.locator_params(axis="x", nbins=5, steps=[1, 2, 5, 10])
        name = display.name(axis)
        if along:
            _draw_lines(panel, axis, name, series, points)
        else:
            _draw_rows(panel, axis, name if number % columns == 0 else "", texts, series, points)
        if zero:
            line = panel.axhline if along else panel.axvline
            line(0, color=INK, linewidth=0.9, zorder=1)
    return figure


def repetitions(grid: Grid) -> str:
    """What the repetitions of a grid are."""
    return f"values of {grid.pooled.name}" if grid.pooled else "seeds"


def _caption(entries: Sequence[Entry], repetitions: str) -> str:
    """How many repetitions there are, and what the bars are."""
    counts = sorted({len(entry.values) for entry in entries})
    intervals = any(entry.interval is not None for entry in entries)
    interval = "95 % confidence interval over evaluation episodes"
    if counts[-1] == 1:
        return f"One seed. Bars: {interval}." if intervals else "One seed."
    text = (
        f"Mean of {' to '.join(map(str, dict.fromkeys([counts[0], counts[-1]])))} {repetitions}. "
    )
    bars = {
        f"95 % confidence interval of the mean over the {repetitions}": counts[-1] > 2,
        f"standard deviation over two {repetitions}": 2 in counts,
        f"{interval} (one seed)": intervals,
    }
    text += f"Bars: {'; '.join(bar for bar, occurs in bars.items() if occurs)}. "
    return text + f"Thin ticks: single {repetitions}."


def _difference_caption(found: Iterable[Difference], baseline: str, repetitions: str) -> str:
    known = [difference for difference in found if difference.values]
    several = any(difference.interval is not None for difference in known)
    episodes = any(d.interval is None and d.episodes_interval is not None for d in known)
    text = f"Paired differences from {baseline}"
    bars = {
        f"95 % confidence interval of the mean over the {repetitions}": several,
        "95 % confidence interval over the episodes of one pair": episodes,
    }
    if not (several or episodes):
        return f"{text}, of one pair each: there is no interval."
    text += f". Bars: {'; '.join(bar for bar, occurs in bars.items() if occurs)}. "
    if not several:
        return f"{text}Hollow: there is no interval over the {repetitions}."
    text += f"Filled: the interval over the {repetitions} excludes 0. "
    return f"{text}Thin ticks: single {repetitions}."


def _draw_rows(
    panel: Axes,
    axis: Axis,
    name: str,
    texts: Sequence[str],
    series: Series,
    points: Mapping[Place, Point],
) -> None:
    """A row for each label from the top, in which every series has a height of its own.

    Rows are named if `name` is not empty.
    """
    style_axes(panel, grid="x")
    rows = range(len(axis.labels))
    step = _MARK / (_MARK * len(series) + _BETWEEN_ROWS)
    for row in rows[1::2]:
        panel.axhspan(row - 0.5, row + 0.5, color="#f3f3f3", linewidth=0, zorder=0)
    for number, (place, mark) in enumerate(series.items()):
        offset = step * (number - (len(series) - 1) / 2)
        found = [
            (row + offset, points[at])
            for row in rows
            if (at := (axis.labels[row], *place)) in points
        ]
        _draw_series(panel, mark, found, along=False)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_yticks(rows, [display_text(text) for text in texts])
    panel.tick_params(axis="y", length=0, labelleft=bool(name))
    if name:
        # Names such as loss/learning rate break after a slash.
        lines = textwrap.fill(name.replace("/", "/ "), _NAME_CHARACTERS).replace("/ ", "/")
        panel.set_ylabel(display_text(lines))


def _draw_lines(
    panel: Axes, axis: Axis, name: str, series: Series, points: Mapping[Place, Point]
) -> None:
    """A line along a numeric axis for each series; those of a number are side by side."""
    style_axes(panel)
    numbers = axis.numbers or []
    order = sorted(zip(numbers, axis.labels, strict=True))
    logarithmic = min(numbers) > 0 and max(numbers) >= 6 * min(numbers)
    along = [math.log(number) if logarithmic else number for number in numbers]
    step = (max(along) - min(along)) * min(_BESIDE, _BESIDE_ALL / len(series))
    for index, (place, mark) in enumerate(series.items()):
        offset = step * (index - (len(series) - 1) / 2)
        found = [
            (number * math.exp(offset) if logarithmic else number + offset, points[at])
            for number, label in order
            if (at := (*place, label)) in points
        ]
        _draw_series(panel, mark, found, along=True)
    panel.set_xlabel(display_text(name))
    if logarithmic:
        panel.set_xscale("log")
        panel.set_xticks([], minor=True)
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
    panel: Axes, mark: Mark, found: Sequence[tuple[float, Point]], *, along: bool
) -> None:
    """Means with bars, and a thin tick for each of several repetitions.

    If `along`, positions are along x and the means are joined by a line. Else they are along y.
    """
    means = [(position, point.mean) for position, point in found]
    ticks = [(position, value) for position, point in found for value in point.ticks]
    order = [0, 1] if along else [1, 0]
    panel.errorbar(
        *np.reshape(means, (-1, 2)).T[order],
        **{"yerr" if along else "xerr": [point.bar for _, point in found]},
        **mark.style(line=along),
        markeredgecolor=INK,
        markeredgewidth=0.4,
        elinewidth=1.6,
        zorder=3,
    )
    hollow = [(position, point.mean) for position, point in found if not point.filled]
    panel.plot(
        *np.reshape(hollow, (-1, 2)).T[order],
        **mark.style(line=False),
        markerfacecolor="white",
        markeredgecolor=mark.color,
        zorder=5,
    )
    panel.plot(
        *np.reshape(ticks, (-1, 2)).T[order],
        "_" if along else "|",
        color=INK,
        markersize=4 if along else 6,
        markeredgewidth=0.8,
        zorder=4,
    )
