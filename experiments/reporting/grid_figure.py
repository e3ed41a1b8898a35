"""The figures of a grid: a panel for each metric, with a mark for every place."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.contracts import Metric
from experiments.reporting.markdown import difference_heading, metric_heading, scaled
from experiments.reporting.results import Axis, Frame, Grid, Place, places, without
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

_COLUMNS = 3
# Inches.
_PANEL_WIDTH, _AROUND_PANELS, _CHARACTER = 3.3, 0.6, 0.085
_LINES_HEIGHT, _AROUND_ROWS, _LEAST_ROWS = 2.9, 0.75, 0.9
_MARK, _BETWEEN_ROWS = 0.14, 0.18
# Between two lines at one number, and the first and the last one at most: fractions of the axis.
_BESIDE, _BESIDE_ALL = 1 / 60, 1 / 10
_NAME_CHARACTERS = 24
"""In a line beside the rows, which are as high as such a line is long."""
_NUMBER_CHARACTERS = 30
"""Below a panel."""


def mean_figure(grid: Grid, *, title: str, command: str) -> Figure | None:
    """Draws the means of every metric that has values; None if there is no such metric.

    If the labels of the last axis are numbers, lines run along it, one for each combination of the
    other axes. Else every label of the first axis is a row, in which the combinations of the other
    axes have marks of their own.
    """
    means = grid.means
    bars = means["interval"].where(means["n"] > 2, means["deviation"])
    bars = bars.fillna(means["own"].where(means["found"] == 1))
    counts, over = sorted(set(means["n"][means["n"] > 0])), grid.repetitions
    if not counts:
        return None
    numbers = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    drawn = {
        f"95 % confidence interval of the mean over the {over}": counts[-1] > 2,
        f"standard deviation over two {over}": 2 in counts,
        "95 % confidence interval over evaluation episodes (of one run)": any(
            means["own"][means["found"] == 1].notna()
        ),
    }
    caption = [f"Mean of {numbers} {over}." if counts[-1] > 1 else "One seed.", _bars(drawn)]
    caption += [f"Thin ticks: single {over}."] if counts[-1] > 1 else []
    frame = means.assign(bar=bars, filled=True)
    return _figure(grid, frame, grid.axes, metric_heading, title, caption, command)


def difference_figure(grid: Grid, *, title: str, command: str) -> Figure | None:
    """Draws the differences to the baseline in the same way; None if there are none."""
    found, over = grid.differences, grid.repetitions
    if grid.comparison.baseline is None or found.empty or not found["n"].any():
        return None
    name, label = grid.comparison.baseline
    baseline = f"{_names(grid)[name]} = {grid.labels.get((name, label), label)}"
    several = found["interval"].notna()
    drawn = {
        f"95 % confidence interval of the mean over the {over}": several.any(),
        "95 % confidence interval over the episodes of one pair": found["own"][~several].any(),
    }
    filled = f"Filled: the interval over the {over} excludes 0. Thin ticks: single {over}."
    hollow = f"Hollow: there is no interval over the {over}."
    caption = [f"Paired differences from {baseline}.", _bars(drawn)]
    caption += [filled if several.any() else hollow]
    frame = found.assign(
        bar=found["interval"].fillna(found["own"]), filled=found["mean"].abs() > found["interval"]
    )
    axes, title = without(grid.axes, (name, label)), f"{title}: differences from {baseline}"
    figure = _figure(grid, frame, axes, difference_heading, title, caption, command)
    for panel in figure.axes:
        line = panel.axhline if _runs_along(axes[-1]) else panel.axvline
        line(0, color=INK, linewidth=0.9, zorder=1)
    return figure


def _bars(drawn: Mapping[str, Any]) -> str:
    kinds = "; ".join(bar for bar, occurs in drawn.items() if occurs)
    return f"Bars: {kinds}." if kinds else ""


def _runs_along(axis: Axis) -> bool:
    return axis.numbers is not None and len(axis.labels) > 1


def _names(grid: Grid) -> dict[str, str]:
    """Names of axes without sections, if these are clear.

    `optimizer.weight_decay` becomes `weight decay`, and `loss.name` becomes `loss`.
    """

    def words(option: str) -> str:
        section, _, name = option.rpartition(".")
        return (section if section and name == "name" else name).replace("_", " ")

    names = {axis.name: "/".join(map(words, axis.name.split("/"))) for axis in grid.axes}
    return names if len(set(names.values())) == len(names) else {name: name for name in names}


def _figure(
    grid: Grid,
    frame: Frame,
    axes: Sequence[Axis],
    heading: Callable[[Metric], str],
    title: str,
    caption: Sequence[str],
    command: str,
) -> Figure:
    """A panel for each metric.

    Args:
      grid: The grid.
      frame: For each metric and place on `axes`: `mean`, `bar`, single `values`, and `filled`.
      axes: Those of the grid, perhaps without the label of a baseline.
      heading: The title of a panel.
      title, caption, command: As in `new_figure`.
    """
    along, names = _runs_along(axes[-1]), _names(grid)
    axis, varied = (axes[-1], axes[:-1]) if along else (axes[0], axes[1:])
    # The same marks with and without a baseline.
    shown = {other.name for other in varied}
    every = places([other for other in grid.axes if other.name in shown])
    series = {place: series_mark(every.index(place)) for place in places(varied)}

    def texts(of: Sequence[Axis], place: Place) -> list[str]:
        return [grid.labels.get((a.name, at), at) for a, at in zip(of, place, strict=True)]

    legend = [
        legend_handle(", ".join(texts(varied, place)), mark, line=along)
        for place, mark in series.items()
    ]
    labels = [text for label in axis.labels for text in texts([axis], (label,))]
    metrics = frame["mean"].dropna().index.unique("metric")
    columns = min(_COLUMNS, len(metrics))
    rows = -(-len(metrics) // columns)
    pitch = _MARK * len(series) + _BETWEEN_ROWS
    height = _LINES_HEIGHT if along else _AROUND_ROWS + max(_LEAST_ROWS, pitch * len(labels))
    beside = 0 if along else _CHARACTER * max(map(len, labels))
    figure = new_figure(
        _AROUND_PANELS + beside + _PANEL_WIDTH * columns,
        rows * height,
        title=title,
        caption=" ".join(filter(None, caption)),
        command=command,
        legend=legend if len(every) > 1 else [],
        legend_title=", ".join(names[other.name] for other in varied) if len(every) > 1 else "",
    )
    for number, name in enumerate(metrics):
        metric = grid.metrics[name]
        panel = figure.add_subplot(rows, columns, number + 1)
        panel.set_title(textwrap.fill(heading(metric), 40), size=LARGE)
        panel.locator_params(axis="x", nbins=5, steps=[1, 2, 5, 10])
        style_axes(panel, grid="both" if along else "x")
        name_shown = names[axis.name] if along or number % columns == 0 else ""
        place_series = _place_numbers if along else _place_rows
        positions = place_series(panel, axis, labels, name_shown, len(series))
        values = frame.loc[[name]].dropna(subset="mean").fillna({"bar": 0})
        points = {
            place: row
            for (_, *labels_at), row in zip(values.index, values.to_dict("records"), strict=True)
            for place in [tuple(labels_at)]
        }
        for (place, mark), at in zip(series.items(), positions, strict=True):
            keys = [(*place, label) if along else (label, *place) for label in axis.labels]
            found = [(x, points[key]) for x, key in zip(at, keys, strict=True) if key in points]
            found.sort(key=lambda point: point[0])
            _draw_series(panel, mark, found, metric.unit, along=along)
    return figure


def _place_rows(
    panel: Axes, axis: Axis, labels: Sequence[str], name: str, num_series: int
) -> list[np.ndarray]:
    """A row for each label from the top; returns the heights of every series.

    Rows are named if `name` is not empty.
    """
    rows = np.arange(len(labels))
    for row in rows[1::2]:
        panel.axhspan(row - 0.5, row + 0.5, color="#f3f3f3", linewidth=0, zorder=0)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_yticks(rows, [display_text(text) for text in labels])
    panel.tick_params(axis="y", length=0, labelleft=bool(name))
    if name:
        # Names such as loss/learning rate break after a slash.
        lines = textwrap.fill(name.replace("/", "/ "), _NAME_CHARACTERS).replace("/ ", "/")
        panel.set_ylabel(display_text(lines))
    step = _MARK / (_MARK * num_series + _BETWEEN_ROWS)
    return [rows + step * (number - (num_series - 1) / 2) for number in range(num_series)]


def _place_numbers(
    panel: Axes, axis: Axis, labels: Sequence[str], name: str, num_series: int
) -> list[np.ndarray]:
    """A number along x for each label; returns those of every series, which are side by side."""
    numbers = np.array(axis.numbers)
    logarithmic = numbers.min() > 0 and numbers.max() >= 6 * numbers.min()
    along = np.log(numbers) if logarithmic else numbers
    panel.set_xlabel(display_text(name))
    if logarithmic:
        panel.set_xscale("log")
        panel.set_xticks([], minor=True)
    panel.set_xticks(numbers, _labels_that_fit(labels, along))
    step = np.ptp(along) * min(_BESIDE, _BESIDE_ALL / num_series)
    beside = [along + step * (number - (num_series - 1) / 2) for number in range(num_series)]
    return [np.exp(places) for places in beside] if logarithmic else beside


def _labels_that_fit(labels: Sequence[str], positions: np.ndarray) -> list[str]:
    """The labels of ticks; an empty one for each that would touch the next larger one."""
    character = np.ptp(positions) / _NUMBER_CHARACTERS
    texts, left_end = list(labels), math.inf
    for number in np.argsort(-positions):
        half = character * (len(texts[number]) + 1) / 2
        if positions[number] + half > left_end:
            texts[number] = ""
        else:
            left_end = positions[number] - half
    return texts


def _draw_series(
    panel: Axes,
    mark: Mark,
    found: Sequence[tuple[float, Mapping[str, Any]]],
    unit: str,
    *,
    along: bool,
) -> None:
    """Means with bars, and a thin tick for each of several repetitions.

    If `along`, positions are along x and the means are joined by a line. Else they are along y.
    """

    def xy(points: Sequence[tuple[float, float]]) -> np.ndarray:
        of_unit = [(position, scaled(value, unit)) for position, value in points]
        return np.reshape(of_unit, (-1, 2)).T[[0, 1] if along else [1, 0]]

    panel.errorbar(
        *xy([(at, row["mean"]) for at, row in found]),
        **{"yerr" if along else "xerr": [scaled(row["bar"], unit) for _, row in found]},
        **mark.style(line=along),
        markeredgecolor=INK,
        markeredgewidth=0.4,
        elinewidth=1.6,
        zorder=3,
    )
    panel.plot(
        *xy([(at, row["mean"]) for at, row in found if not row["filled"]]),
        **mark.style(line=False),
        markerfacecolor="white",
        markeredgecolor=mark.color,
        zorder=5,
    )
    panel.plot(
        *xy([(at, value) for at, row in found if row["n"] > 1 for value in row["values"]]),
        "_" if along else "|",
        color=INK,
        markersize=4 if along else 6,
        markeredgewidth=0.8,
        zorder=4,
    )
