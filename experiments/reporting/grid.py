"""The report of a grid of runs: a table of every metric, and a figure of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.contracts import Metric
from experiments.files import write_atomically, write_json, write_picture
from experiments.reporting.entries import (
    Axis,
    Entry,
    Found,
    Place,
    Run,
    available_metrics,
    check_runs,
    drop_constant_axes,
    entries,
    seeds_of,
    select_metrics,
)
from experiments.reporting.grid_caption import run_lines, symbol_lines
from experiments.reporting.grid_figure import grid_figure
from experiments.reporting.markdown import (
    MISSING,
    bold,
    bullets,
    code,
    format_value,
    metric_heading,
    table,
)

__all__ = ["Axis", "Run", "available_metrics", "grid_table", "select_metrics", "write_grid"]

_DIVERGED = "diverged"


def write_grid(
    directory: Path,
    axes: Sequence[Axis],
    runs: Sequence[Run],
    *,
    title: str,
    command: str,
    metrics: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> list[Path]:
    """Write table.md, table.json and, if there are values, figure.png; replaces such files.

    Args:
      directory: Where to write; created if it does not exist.
      axes: What was varied; the labels of the first are the rows of the tables.
      runs: The finished runs, of any seeds.
      title: Title of the tables and the figure.
      command: What was typed last, for runs that do not state their own command.
      metrics: Names of the metrics to show, in this order; by default all.
      notes: Sentences that the caption of the table ends with, such as what a symbol means.

    Returns:
      The paths written.

    Raises:
      ValueError: A run is not on the axes, or two have the same place and seed.
      ExperimentError: Runs do not agree on the unit or the direction of a metric.
    """
    check_runs(axes, runs)
    directory.mkdir(parents=True, exist_ok=True)
    text = grid_table(axes, runs, title=title, command=command, metrics=metrics, notes=notes)
    as_json = {
        "axes": [axis._asdict() for axis in axes],
        "runs": [run._asdict() for run in runs],
    }
    paths = [write_json(directory / "table.json", as_json)]
    varied, placed, _ = drop_constant_axes(axes, runs)
    shown = [metric for metric in select_metrics(runs, metrics) if _has_values(runs, metric)]
    if shown:
        figure = grid_figure(varied, placed, shown, title=title, command=command)
        paths.append(write_picture(directory / "figure.png", figure))
        text += f"\n![{title}](figure.png)\n"
    return [write_atomically(directory / "table.md", text), *paths]


def grid_table(
    axes: Sequence[Axis],
    runs: Sequence[Run],
    *,
    title: str,
    command: str,
    metrics: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """The tables of a grid in Markdown, with a caption that explains every symbol.

    With one axis, the metrics are the columns. With more, there is a table for each metric, and the
    combinations of the other axes are the columns. Axes of a single label are in the caption. The
    arguments are those of `write_grid`.
    """
    lines = [f"### {title}", ""]
    if not runs:
        return "\n".join([*lines, "No run has finished yet.", "", f"Command: {code(command)}", ""])
    varied, placed, constant = drop_constant_axes(axes, runs)
    shown = select_metrics(placed, metrics) or [Metric("Result", "")]
    found = {metric: entries(placed, metric) for metric in shown}
    caption = [
        *symbol_lines(varied, placed, found),
        *(f"{name}: {label} in all runs." for name, label in constant.items()),
        *notes,
        *run_lines(runs, command),
    ]
    tables = _tables(varied, found, len(seeds_of(placed)))
    return "\n".join([*lines, *tables, *bullets(caption), ""])


class _Column(NamedTuple):
    """A column of a table."""

    heading: str
    cells: list[str]
    """One for each label of the first axis."""


def _tables(axes: Sequence[Axis], found: Found, num_seeds: int) -> list[str]:
    """One table with the metrics as columns; with more axes than one, a table for each metric."""
    rows, *others = axes
    if not others:
        columns = [
            _column(metric_heading(metric), rows, (), values, num_seeds)
            for metric, values in found.items()
        ]
        return [*_rows(rows, columns), ""]
    places = list(itertools.product(*(axis.labels for axis in others)))
    names = ", ".join(axis.name for axis in others)
    lines = []
    for metric, values in found.items():
        columns = [_column(", ".join(place), rows, place, values, num_seeds) for place in places]
        heading = f"{bold(metric_heading(metric))} against {names}"
        lines += [heading, "", *_rows(rows, columns), ""]
    return lines


def _rows(rows: Axis, columns: Sequence[_Column]) -> list[str]:
    cells = zip(rows.labels, *(column.cells for column in columns), strict=True)
    return table([rows.name, *(column.heading for column in columns)], cells)


def _column(
    heading: str,
    rows: Axis,
    rest: Place,
    values: Mapping[Place, Entry],
    num_seeds: int,
) -> _Column:
    """A metric at one combination of the other axes: its best entries are bold."""
    column = [values.get((label, *rest)) for label in rows.labels]
    best = _best(column, num_seeds)
    texts = [_text(entry, num_seeds) for entry in column]
    return _Column(
        heading,
        [bold(text) if row in best else text for row, text in enumerate(texts)],
    )


def _best(column: Sequence[Entry | None], num_seeds: int) -> set[int]:
    """The rows with the best of the values as printed; entries that lack seeds do not compete."""
    shown = {
        row: (float(format_value(entry.mean, entry.metric.unit)), entry.metric.higher_is_better)
        for row, entry in enumerate(column)
        if entry and len(entry.values) == num_seeds
    }
    if len(shown) < 2:
        return set()
    values = [value for value, _ in shown.values()]
    return {
        row
        for row, (value, higher_is_better) in shown.items()
        if value == (max(values) if higher_is_better else min(values))
    }


def _text(entry: Entry | None, num_seeds: int) -> str:
    if entry is None or not entry.values:
        return _DIVERGED if entry and entry.diverged else MISSING
    unit = entry.metric.unit
    text = format_value(entry.mean, unit)
    if entry.half_width is not None:
        text += f" ± {format_value(entry.half_width, unit)}"
    missing = len(entry.values) < num_seeds
    return f"{text} ({len(entry.values)} of {num_seeds})" if missing else text


def _has_values(runs: Sequence[Run], metric: Metric) -> bool:
    return any(entry.values for entry in entries(runs, metric).values())
