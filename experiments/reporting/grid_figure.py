"""The figures of a grid: a panel for each metric, with a mark for every place."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.contracts import Metric
from experiments.reporting.markdown import difference_heading, metric_heading, scaled
from experiments.reporting.results import Axis, Frame, Grid, places
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
# Inches: a panel, a character beside the rows, a mark, and the space between the rows.
_PANEL_WIDTH, _CHARACTER, _MARK, _BETWEEN_ROWS = 3.3, 0.085, 0.14, 0.18
# Characters below a panel, and in a line beside the rows.
_NUMBER_CHARACTERS, _NAME_CHARACTERS = 30, 24


def mean_figure(grid: Grid, *, title: str, command: str) -> Figure | None:
    """Draws the means of every metric that has values; None if there is no such metric.

    If the labels of the last axis are numbers, lines run along it, one for each combination of the
    other axes. Else every label of the first axis is a row, in which the combinations of the other
    axes have marks of their own.
    """
    means = grid.means
    bars = means["interval"].where(means["n"] > 2, means["deviation"])
    frame = means.assign(bar=bars.fillna(means["own"].where(means["found"] == 1)), filled=True)
    caption = (
        f"Means over {grid.repeated}. Bars: 95 % interval; for two runs, the standard deviation; "
        "for one run, the 95 % interval over its episodes."
    )
    return _figure(grid, frame, grid.axes, metric_heading, title, caption, command)


def difference_figure(grid: Grid, *, title: str, command: str) -> Figure | None:
    """Draws the differences to the baseline in the same way; None if there are none."""
    found, baseline = grid.differences, grid.comparison.baseline
    if baseline is None or found.empty:
        return None
    title += f": differences from {_short(baseline[0])} = "
    title += grid.labels.get(baseline, baseline[1])
    frame = found.assign(
        bar=found["interval"].fillna(found["own"]), filled=found["mean"].abs() > found["interval"]
    )
    caption = (
        f"Paired differences over {grid.repeated}. Bars: 95 % interval; for one pair, over its "
        "episodes. Filled: the interval over several pairs excludes 0."
    )
    figure = _figure(grid, frame, grid.compared, difference_heading, title, caption, command)
    for panel in figure.axes if figure else ():
        line = panel.axhline if _runs_along(grid.compared[-1]) else panel.axvline
        line(0, color=INK, linewidth=0.9, zorder=1)
    return figure


def _runs_along(axis: Axis) -> bool:
    return axis.numbers is not None and len(axis.labels) > 1


def _short(name: str) -> str:
    """An axis without sections: `optimizer.weight_decay` is `weight decay`, `loss.name` `loss`."""
    options = [option.removesuffix(".name").rpartition(".")[2] for option in name.split("/")]
    return "/".join(options).replace("_", " ")


def _figure(
    grid: Grid,
    frame: Frame,
    axes: Sequence[Axis],
    heading: Callable[[Metric], str],
    title: str,
    caption: str,
    command: str,
) -> Figure | None:
    """A panel for each metric that has values; None if there is none.

    `frame` has, for each metric and place on `axes`: `mean`, `bar`, single `values`, and `filled`.
    """
    metrics = frame["mean"].dropna().index.unique("metric")
    if metrics.empty:
        return None
    along = _runs_along(axes[-1])
    axis, varied = (axes[-1], axes[:-1]) if along else (axes[0], axes[1:])
    # The same marks with and without a baseline.
    every = places([other for other in grid.axes if other.name in {v.name for v in varied}])
    series = {place: series_mark(every.index(place)) for place in places(varied)}
    labels = [grid.labels.get((axis.name, label), label) for label in axis.labels]
    legend = []
    for place, mark in series.items() if len(every) > 1 else ():
        texts = [grid.labels.get((a.name, at), at) for a, at in zip(varied, place, strict=True)]
        legend.append(legend_handle(", ".join(texts), mark, line=along))
    columns = min(_COLUMNS, len(metrics))
    rows = -(-len(metrics) // columns)
    pitch = _MARK * len(series) + _BETWEEN_ROWS
    beside = 0 if along else _CHARACTER * max(map(len, labels))
    over = grid.comparison.pairs_over
    figure = new_figure(
        0.6 + beside + _PANEL_WIDTH * columns,
        rows * (2.9 if along else 0.75 + max(0.9, pitch * len(labels))),
        title=title,
        caption=f"{caption} Thin ticks: single {f'values of {over}' if over else 'seeds'}.",
        command=command,
        legend=legend,
        legend_title=", ".join(_short(other.name) for other in varied) if legend else "",
    )
    # Side by side around the label.
    steps = np.arange(len(series)) - (len(series) - 1) / 2
    for number, name in enumerate(metrics):
        metric = grid.metrics[name]
        panel = figure.add_subplot(rows, columns, number + 1)
        panel.set_title(textwrap.fill(heading(metric), 40), size=LARGE)
        panel.locator_params(axis="x", nbins=5, steps=[1, 2, 5, 10])
        style_axes(panel, grid="both" if along else "x")
        if along:
            positions = _place_numbers(panel, np.array(axis.numbers), labels, steps)
            panel.set_xlabel(display_text(_short(axis.name)))
        else:
            _place_rows(panel, labels, _short(axis.name) if number % columns == 0 else "")
            positions = [np.arange(len(labels)) + _MARK / pitch * step for step in steps]
        values = frame.loc[[name]].fillna({"bar": 0})
        order = np.arange(len(values))
        order = order.reshape(-1, len(labels)) if along else order.reshape(len(labels), -1).T
        for mark, at, of_series in zip(series.values(), positions, order, strict=True):
            found = values.iloc[of_series].assign(at=at).dropna(subset="mean").sort_values("at")
            _draw_series(panel, mark, found, metric.unit, along=along)
    return figure


def _place_rows(panel: Axes, labels: Sequence[str], name: str) -> None:
    """A row for each label from the top, named if `name` is not empty."""
    for row in range(1, len(labels), 2):
        panel.axhspan(row - 0.5, row + 0.5, color="#f3f3f3", linewidth=0, zorder=0)
    panel.set_ylim(len(labels) - 0.5, -0.5)
    panel.set_yticks(range(len(labels)), [display_text(text) for text in labels])
    panel.tick_params(axis="y", length=0, labelleft=bool(name))
    # Names such as loss/learning rate break after a slash.
    lines = textwrap.fill(name.replace("/", "/ "), _NAME_CHARACTERS).replace("/ ", "/")
    panel.set_ylabel(display_text(lines))


def _place_numbers(
    panel: Axes, numbers: np.ndarray, labels: Sequence[str], steps: np.ndarray
) -> list[np.ndarray]:
    """A number along x for each label; returns those of every series, which are side by side."""
    logarithmic = numbers.min() > 0 and numbers.max() >= 6 * numbers.min()
    along = np.log(numbers) if logarithmic else numbers
    if logarithmic:
        panel.set_xscale("log")
        panel.set_xticks([], minor=True)
    narrowest = _NUMBER_CHARACTERS * np.diff(np.sort(along)).min() / np.ptp(along)
    upright = narrowest < max(map(len, labels)) + 1
    panel.set_xticks(numbers, labels, rotation=90 if upright else 0)
    beside = along + np.ptp(along) * min(1 / 60, 1 / (10 * len(steps))) * steps[:, None]
    return [*(np.exp(beside) if logarithmic else beside)]


def _draw_series(panel: Axes, mark: Mark, found: Frame, unit: str, *, along: bool) -> None:
    """Means with bars, and a thin tick for each of several repetitions.

    If `along`, positions are along x and the means are joined by a line. Else they are along y.
    """

    def xy(rows: Frame, column: str = "mean") -> list[Any]:
        points = [rows["at"].to_numpy(), scaled(rows[column].to_numpy(float), unit)]
        return points if along else points[::-1]

    bars = {"yerr" if along else "xerr": scaled(found["bar"].to_numpy(), unit)}
    edge = {"markeredgecolor": INK, "markeredgewidth": 0.4}
    panel.errorbar(*xy(found), **bars, **mark.style(line=along), **edge, elinewidth=1.6, zorder=3)
    hollow: Any = {"markerfacecolor": "white", "markeredgecolor": mark.color}
    rows = found[~found["filled"].astype(bool)]
    panel.plot(*xy(rows), **mark.style(line=False), **hollow, zorder=5)
    tick = {"color": INK, "markersize": 4 if along else 6, "markeredgewidth": 0.8}
    rows = found[found["n"] > 1].explode("values")
    panel.plot(*xy(rows, "values"), "_" if along else "|", **tick, zorder=4)
