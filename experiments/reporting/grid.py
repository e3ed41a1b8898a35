"""The report of a grid of runs: a table of every metric, and figures of all of them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.reporting.markdown import (
    MISSING,
    bold,
    bullets,
    format_difference,
    format_value,
    metric_heading,
    scaled,
    table,
)
from experiments.reporting.results import VALIDATION, Axis, Frame, Grid, Run, make_grid, places
from experiments.reporting.run import version_text
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
from experiments.storage import write_atomically, write_json, write_picture

_COLUMNS = 3
# Inches: a panel, a character beside the rows, a mark, and the space between the rows.
_PANEL_WIDTH, _CHARACTER, _MARK, _BETWEEN_ROWS = 3.3, 0.085, 0.14, 0.18
# Characters below a panel, and in a line beside the rows.
_NUMBER_CHARACTERS, _NAME_CHARACTERS = 30, 24


def write_grid(
    directory: Path,
    axes: Sequence[Axis],
    runs: Sequence[Run],
    *,
    title: str,
    command: str,
    notes: Sequence[str] = (),
    **arrangement: Any,
) -> list[Path]:
    """Writes table.md, table.json and, if there are values, figure.png; returns their paths.

    With a baseline, differences.png is written, too. Title, command (as typed last) and notes are
    those of tables and figures. `arrangement` is what else `make_grid` takes.
    """
    grid = make_grid(axes, runs, **arrangement)
    text = grid_table(grid, runs, title=title, notes=notes)
    rows = grid.differences.astype(object).where(grid.differences.notna(), None)
    differences = [
        {"metric": name, "unit": unit, "higher_is_better": higher, "place": place, **row}
        for (name, *place), row in zip(rows.index, rows.to_dict("records"), strict=True)
        for _, unit, higher in [grid.metrics[name]]
    ]
    stored = {
        "axes": [{"name": axis.name, "labels": axis.labels} for axis in axes],
        "comparison": grid.comparison._asdict(),
        "choices": grid.choices,
        "differences": differences,
        "runs": [{"place": run.place, "report": run.report} for run in runs],
    }
    directory.mkdir(parents=True, exist_ok=True)
    paths = [write_json(directory / "table.json", stored)]
    for name, draw in (("figure", mean_figure), ("differences", difference_figure)):
        if (figure := draw(grid, title=title, command=command)) is not None:
            paths.append(write_picture(directory / f"{name}.png", figure))
            text += f"\n![{title}: {name}]({name}.png)\n"
    return [write_atomically(directory / "table.md", text), *paths]


def grid_table(grid: Grid, runs: Sequence[Run], *, title: str, notes: Sequence[str] = ()) -> str:
    """The tables of a grid in Markdown, with a caption.

    The labels of the first axis are the rows. With one axis, the metrics are the columns. With
    more, there is a table for each metric, and the combinations of the other axes are the columns.
    With a baseline, tables of the differences to it follow. `runs` are all that were tried.
    """
    headings = [metric_heading(metric) for metric in grid.metrics.values()]
    compares = grid.comparison.baseline is not None and not grid.differences.empty
    texts = _mean_texts(grid, best_in_bold=not compares)
    lines = _tables(grid.axes, headings, texts, bold("Means") if compares else "")
    caption = [("Means: " if compares else "") + _mean_caption(grid, texts)]
    if compares:
        above = "Difference from {} = {}".format(*grid.comparison.baseline or ())
        names = grid.differences.index.unique("metric")
        headings = [metric_heading(grid.metrics[name], difference=True) for name in names]
        texts = _difference_texts(grid)
        lines += _tables(grid.compared, headings, texts, bold(above))
        same = " and ".join(filter(None, ("seed", grid.comparison.pairs_over)))
        above += f" between runs of the same {same}, in percentage points for %"
        caption += [f"{above}: {_difference_caption(grid, texts)}"]
    if any(metric.higher_is_better is False for metric in grid.metrics.values()):
        caption += ["↓: lower is better."]
    if VALIDATION in grid.metrics:
        found = [run.report["validation"] for run in runs if run.report["validation"]]
        of = " or ".join(dict.fromkeys(value["name"] for value in found)) or "the metric"
        caption += [f"{VALIDATION}: {of} on the validation split, which selects the checkpoint."]
    caption += [f"{name}: {label} in all runs." for name, label in grid.constant.items()]
    if grid.choices:
        chosen = [f"{', '.join(row['place'])}: {row['label']}" for row in grid.choices]
        names = ", ".join(grid.comparison.choose)
        caption += [f"{names}: the best mean validation. {'; '.join(chosen)}."]
    return "\n".join(
        [f"### {title}", "", *lines, *bullets([*caption, *notes, *_run_lines(runs)]), ""]
    )


def _tables(
    axes: Sequence[Axis], headings: Sequence[str], texts: Sequence[str], title: str = ""
) -> list[str]:
    """The tables; `texts` are the entries by metric and place on the axes."""
    rows, *others = axes
    entries = np.array(texts, object).reshape(len(headings), len(rows.labels), -1)
    tables = [(title, headings, entries[..., 0].T)]
    if others:
        columns = [", ".join(place) for place in places(others)]
        start = f"{title}: " if title else ""
        against = ", ".join(axis.name for axis in others)
        tables = [
            (f"{start}{bold(heading)} against {against}", columns, of_metric)
            for heading, of_metric in zip(headings, entries, strict=True)
        ]
    lines = []
    for above, columns, body in tables:
        named = ([label, *row] for label, row in zip(rows.labels, body, strict=True))
        lines += [*([above, ""] if above else []), *table([rows.name, *columns], named), ""]
    return lines


def _mean_caption(grid: Grid, texts: Sequence[str]) -> str:
    """Sentences on the marks that the tables of means have."""
    rows: Frame = grid.means.dropna(subset="mean")
    several = ((rows["found"] > 1) & rows["deviation"].notna()).any()
    lacking = (rows["found"] < rows["expected"]).any()
    best = "best in its column" + (", among entries with all runs" if lacking else "")
    sentences = {
        f"{'±: standard deviation over' if several else 'Values of'} {grid.repeated}.": True,
        "± of one run: 95 % interval over its episodes.": rows["own"][rows["found"] == 1].any(),
        "(k of n): k of n runs have a value.": lacking,
        f"Bold: {best}.": "**" in "".join(texts),
    }
    return " ".join(sentence for sentence, holds in sentences.items() if holds)


def _difference_caption(grid: Grid, texts: Sequence[str]) -> str:
    """The same for the tables of differences."""
    numbers = grid.differences["n"][grid.differences["n"] > 0].unique()
    text = f"{grid.repeated}."
    if (numbers > 1).any():
        n = f", n = {numbers[0]}" if len(numbers) == 1 else ""
        text = f"mean ± 95 % interval (Student's t) over {grid.repeated}{n}. "
        text += "Bold: the interval excludes 0 (not corrected for the number of comparisons)."
    if "episodes" in "".join(texts):
        text += " episodes ±: 95 % interval over episodes; it does not cover other seeds."
    return text


def _mean_texts(grid: Grid, *, best_in_bold: bool) -> list[str]:
    """Means ± deviations. The best values as printed may be bold, if all runs have them."""
    means: Frame = grid.means
    metrics = [grid.metrics[name] for name in means.index.get_level_values("metric")]
    complete = means["found"] == means["expected"]
    signs = [{True: 1, False: -1, None: math.nan}[metric.higher_is_better] for metric in metrics]
    printed = [format_value(mean, m.unit) for mean, m in zip(means["mean"], metrics, strict=True)]
    score: Any = (pd.Series(printed, means.index).astype(float) * signs).where(complete)
    of_column = score.groupby([n for n in means.index.names if n != grid.axes[0].name])
    best = (score == of_column.transform("max")) & (of_column.transform("count") > 1)
    texts = []
    for row, metric, text, in_bold in zip(means.itertuples(), metrics, printed, best, strict=True):
        if math.isnan(row.mean):
            texts.append("diverged" if row.diverged else MISSING)
            continue
        half_width = row.own if row.found == 1 else row.deviation
        if not math.isnan(half_width):
            text += f" ± {format_value(half_width, metric.unit)}"
        if row.found < row.expected:
            text += f" ({row.found} of {row.expected})"
        texts.append(bold(text) if in_bold and best_in_bold else text)
    return texts


def _difference_texts(grid: Grid) -> list[str]:
    """Mean differences ± intervals; bold where the interval over the repetitions excludes 0."""
    texts, several_n = [], grid.differences["n"].replace(0, np.nan).nunique() > 1
    for row in grid.differences.itertuples():
        unit, lacking = grid.metrics[row.Index[0]].unit, row.expected - row.found
        text, details = MISSING, [f"{lacking} missing"] if lacking else []
        if row.n:
            text = format_difference(row.mean, unit)
            details = [*([f"n = {row.n}"] if several_n else []), *details]
        if row.n > 1:
            text += f" ± {format_difference(row.interval, unit, signed=False)}"
            text = bold(text) if abs(row.mean) > row.interval else text
        if row.n == 1 and not math.isnan(row.own):
            details.append(f"episodes ± {format_difference(row.own, unit, signed=False)}")
        texts.append(f"{text} ({', '.join(details)})" if details else text)
    return texts


def _run_lines(runs: Sequence[Run]) -> Iterator[str]:
    """What is known of all runs: those that diverged, notes, time, code and commands."""

    def names(of: Iterable[Run]) -> str:
        return "; ".join(f"{', '.join(run.place)} (seed {run.report['seed']})" for run in of)

    reports = [run.report for run in runs]
    if diverged := [run for run in runs if "diverged" in run.report]:
        yield f"Diverged: {names(diverged)}."
    for note in dict.fromkeys(note for report in reports for note in report.get("notes", ())):
        noted = [run for run in runs if note in run.report.get("notes", ())]
        yield f"{'All' if 1 < len(noted) == len(runs) else names(noted)}: {note}"
    # Reports of evaluations have no time.
    minutes = sum(report.get("seconds", 0) for report in reports) / 60
    time = f", {minutes:.1f} minutes of training" if minutes else ""
    yield f"{len(runs)} run{'s' * (len(runs) != 1)}{time}."
    yield f"Code: {'; '.join(dict.fromkeys(map(version_text, reports)))}."
    yield from (f"Command: `{c}`" for c in dict.fromkeys(report["command"] for report in reports))


def mean_figure(grid: Grid, **texts: Any) -> Figure | None:
    """Draws the means of every metric that has values; None if there is no such metric.

    If the labels of the last axis are numbers, lines run along it, one for each combination of the
    other axes. Else every label of the first axis is a row, in which the combinations of the other
    axes have marks of their own. `texts` are the title and the command.
    """
    means = grid.means
    bars = means["interval"].where(means["n"] > 2, means["deviation"])
    frame = means.assign(bar=bars.fillna(means["own"].where(means["found"] == 1)), filled=True)
    caption = (
        f"Means over {grid.repeated}. Bars: 95 % interval; for two runs, the standard deviation; "
        "for one run, the 95 % interval over its episodes."
    )
    return _figure(grid, frame, grid.axes, caption, **texts)


def difference_figure(grid: Grid, *, title: str, command: str) -> Figure | None:
    """Draws the differences to the baseline in the same way; None if there are none."""
    found, baseline = grid.differences, grid.comparison.baseline
    if baseline is None or found.empty:
        return None
    title += f": differences from {_short(baseline[0])} = {grid.shown(*baseline)}"
    frame = found.assign(
        bar=found["interval"].fillna(found["own"]), filled=found["mean"].abs() > found["interval"]
    )
    caption = (
        f"Paired differences over {grid.repeated}. Bars: 95 % interval; for one pair, over its "
        "episodes. Filled: the interval over several pairs excludes 0."
    )
    texts: Any = {"caption": caption, "title": title, "command": command}
    figure = _figure(grid, frame, grid.compared, difference=True, **texts)
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
    caption: str,
    *,
    difference: bool = False,
    **texts: Any,
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
    labels = [grid.shown(axis.name, label) for label in axis.labels]
    names = [other.name for other in varied]
    legend = [
        legend_handle(", ".join(map(grid.shown, names, place)), mark, line=along)
        for place, mark in series.items()
        if len(every) > 1
    ]
    columns = min(_COLUMNS, len(metrics))
    rows = -(-len(metrics) // columns)
    pitch = _MARK * len(series) + _BETWEEN_ROWS
    beside = 0 if along else _CHARACTER * max(map(len, labels))
    over = grid.comparison.pairs_over
    figure = new_figure(
        0.6 + beside + _PANEL_WIDTH * columns,
        rows * (2.9 if along else 0.75 + max(0.9, pitch * len(labels))),
        caption=f"{caption} Thin ticks: single {f'values of {over}' if over else 'seeds'}.",
        legend=legend,
        legend_title=", ".join(map(_short, names)) if legend else "",
        **texts,
    )
    # Side by side around the label.
    steps = np.arange(len(series)) - (len(series) - 1) / 2
    for number, name in enumerate(metrics):
        metric = grid.metrics[name]
        panel = figure.add_subplot(rows, columns, number + 1)
        panel.set_title(
            textwrap.fill(metric_heading(metric, difference=difference), 40), size=LARGE
        )
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
