"""The report of a grid of runs: a table of every metric, and figures of all of them."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.core.storage import write_atomically, write_json, write_picture
from experiments.reporting import markdown as md
from experiments.reporting import style
from experiments.reporting.grid import (
    VALIDATION,
    Axis,
    Frame,
    Grid,
    Run,
    make_grid,
    places,
    short_name,
)
from experiments.reporting.run import version_text

_COLUMNS = 3
# Inches: a panel, a character and a line of a label, a mark, and the space between the rows.
_PANEL_WIDTH, _CHARACTER, _LINE, _MARK, _BETWEEN_ROWS = 3.3, 0.085, 0.14, 0.14, 0.18
# Characters below a panel, and in a line of a label.
_NUMBER_CHARACTERS, _LABEL_CHARACTERS = 30, 36


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
    differences = grid.differences.assign(place=[[*key[1:]] for key in grid.differences.index])
    records = differences.reset_index("metric").to_json(orient="records", double_precision=15)
    stored = {
        "axes": [{"name": axis.name, "labels": axis.labels} for axis in axes],
        "comparison": grid.comparison._asdict(),
        "choices": [{"place": place, "label": label} for place, label in grid.choices.items()],
        "differences": json.loads(records),
        "runs": [{"place": run.place, "report": run.report} for run in runs],
    }
    directory.mkdir(parents=True, exist_ok=True)
    paths = [write_json(directory / "table.json", stored)]
    for name, difference in {"figure": False, "differences": True}.items():
        figure = grid_figure(grid, difference=difference, title=title, command=command)
        if figure is not None:
            paths.append(write_picture(directory / f"{name}.png", figure))
            text += f"\n![{md.plain(title)}: {name}]({name}.png)\n"
    return [write_atomically(directory / "table.md", text), *paths]


def grid_table(grid: Grid, runs: Sequence[Run], *, title: str, notes: Sequence[str] = ()) -> str:
    """The tables of a grid in Markdown, with a caption.

    The labels of the first axis are the rows. With one axis, the metrics are the columns. With
    more, there is a table for each metric, and the combinations of the other axes are the columns.
    With a baseline, tables of the differences to it follow. `runs` are all that were tried.
    """
    compares = not grid.differences.empty
    parts = [_means(grid, "Means" if compares else ""), *([_differences(grid)] if compares else [])]
    lines = [line for of_part, _ in parts for line in of_part]
    caption = [sentences for _, sentences in parts]
    if any(metric.higher_is_better is False for metric in grid.metrics.values()):
        caption += ["↓: lower is better."]
    if VALIDATION in grid.metrics:
        found = [run.report["validation"] for run in runs if run.report["validation"]]
        of = " or ".join(dict.fromkeys(value["name"] for value in found)) or "the metric"
        caption += [f"{VALIDATION}: {of} on the validation split, which selects the checkpoint."]
    caption += [f"{name}: {label} in all runs." for name, label in grid.constant.items()]
    if grid.choices:
        chosen = "; ".join(f"{', '.join(place)}: {label}" for place, label in grid.choices.items())
        caption += [f"{grid.comparison.choose}: the best mean validation. {chosen}."]
    caption += [*notes, *_run_lines(runs)]
    return "\n".join([md.heading(title), "", *lines, *md.bullets(caption), ""])


def _means(grid: Grid, title: str) -> tuple[list[str], str]:
    """The tables of means ± deviations, and a caption.

    Without a title, the best values as printed are bold, if all runs have them.
    """
    means: Frame = grid.means
    metrics = [grid.metrics[name] for name in means.index.get_level_values("metric")]
    printed = [
        md.format_value(mean, m.unit) for mean, m in zip(means["mean"], metrics, strict=True)
    ]
    signs = [{True: 1, False: -1, None: math.nan}[metric.higher_is_better] for metric in metrics]
    score: Any = pd.Series(printed, means.index).astype(float) * signs
    score = score.where(means["found"] == means["expected"])
    of_column = score.groupby([n for n in means.index.names if n != grid.axes[0].name])
    best = (score == of_column.transform("max")) & (of_column.transform("count") > 1) & (not title)
    half = means["own"].where(means["found"] == 1, means["deviation"])
    texts = []
    rows = means.assign(printed=printed, best=best, half=half).itertuples()
    for row, metric in zip(rows, metrics, strict=True):
        text = row.printed
        if not math.isnan(row.half):
            text += f" ± {md.format_value(row.half, metric.unit)}"
        if row.found < row.expected:
            text += f" ({row.found} of {row.expected})"
        if not row.found:
            text = "diverged" if row.diverged else md.MISSING
        texts.append(md.bold(text) if row.best else text)
    known = means[means["found"] > 0]
    several = ((known["found"] > 1) & known["deviation"].notna()).any()
    lacking = (known["found"] < known["expected"]).any()
    among = ", among entries with all runs" if lacking else ""
    sentences = {
        f"{'±: standard deviation over' if several else 'Values of'} {grid.repeated}.": True,
        "± of one run: 95 % interval over its episodes.": known["own"][known["found"] == 1].any(),
        "(k of n): k of n runs have a value.": lacking,
        f"Bold: best in its column{among}.": best.any(),
    }
    caption = " ".join(sentence for sentence, holds in sentences.items() if holds)
    lines = _tables(grid.axes, [*map(md.metric_heading, grid.metrics.values())], texts, title)
    return lines, f"{title}: {caption}" if title else caption


def _differences(grid: Grid) -> tuple[list[str], str]:
    """The tables of mean differences ± intervals, and a caption.

    Bold where the interval over the repetitions excludes 0.
    """
    found, texts = grid.differences, []
    n = found["n"][found["n"] > 0].unique()
    for row in found.itertuples():
        form = partial(md.format_difference, unit=grid.metrics[row.Index[0]].unit)
        text = form(row.mean) if row.n else md.MISSING
        if row.n > 1:
            text += f" ± {form(row.interval, signed=False)}"
            text = md.bold(text) if abs(row.mean) > row.interval else text
        details = {
            f"n = {row.n}": row.n and len(n) > 1,
            f"{row.expected - row.found} missing": row.found < row.expected,
            f"episodes ± {form(row.own, signed=False)}": row.n == 1 and not math.isnan(row.own),
        }
        shown = ", ".join(detail for detail, holds in details.items() if holds)
        texts.append(f"{text} ({shown})" if shown else text)
    caption = f"{grid.repeated}."
    if (n > 1).any():
        caption = f"mean ± 95 % interval (Student's t) over {grid.repeated}"
        caption += f", n = {n[0]}. " if len(n) == 1 else ". "
        caption += "Bold: the interval excludes 0 (not corrected for the number of comparisons)."
    if "episodes" in "".join(texts):
        caption += " episodes ±: 95 % interval over episodes; it does not cover other seeds."
    title = f"Difference from {' = '.join(grid.comparison.baseline or ())}"
    same = " and ".join(filter(None, ("seed", grid.comparison.pairs_over)))
    between = f"{title} between runs of the same {same}, in percentage points for %"
    names = found.index.unique("metric")
    headings = [md.metric_heading(grid.metrics[name], difference=True) for name in names]
    return _tables(grid.compared, headings, texts, title), f"{between}: {caption}"


def _tables(
    axes: Sequence[Axis], headings: Sequence[str], texts: Sequence[str], title: str
) -> list[str]:
    """The tables; `texts` are the entries by metric and place on the axes."""
    rows, *others = axes
    entries = np.array(texts, object).reshape(len(headings), len(rows.labels), -1)
    title = md.bold(md.plain(title)) if title else ""
    tables = {title: (headings, entries[..., 0].T)}
    if others:
        columns = [", ".join(place) for place in places(others)]
        against = f"against {', '.join(axis.name for axis in others)}"
        tables = {
            f"{title}{': ' if title else ''}{md.bold(md.plain(heading))} {md.plain(against)}": (
                columns,
                of_metric,
            )
            for heading, of_metric in zip(headings, entries, strict=True)
        }
    lines = []
    for above, (columns, body) in tables.items():
        lines += [above, ""] if above else []
        lines += [*md.table([rows.name, *columns], np.c_[rows.labels, body].tolist()), ""]
    return lines


def _run_lines(runs: Sequence[Run]) -> Iterator[str]:
    """What is known of all runs: those that diverged, notes, time, code and commands."""

    def names(of: Sequence[Run]) -> str:
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


def grid_figure(grid: Grid, *, difference: bool, title: str, command: str) -> Figure | None:
    """Draws means, or differences to the baseline, in a panel for each metric that has values.

    If the labels of the last axis are numbers, lines run along it, one for each combination of the
    other axes. Else every label of the first axis is a row, in which the combinations of the other
    axes have marks of their own. None if there are no values.
    """
    frame = grid.differences if difference else grid.means
    metrics = frame["mean"].dropna().index.unique("metric")
    if metrics.empty:
        return None
    if difference:
        (name, label), axes = grid.comparison.baseline or ("", ""), grid.compared
        title += f": differences from {short_name(name)} = {grid.shown(name, label)}"
        bars, filled = frame["interval"].fillna(frame["own"]), frame["mean"].abs() > frame.interval
        caption = (
            f"Paired differences over {grid.repeated}. Bars: 95 % interval; for one pair, over its "
            "episodes. Filled: the interval over several pairs excludes 0."
        )
    else:
        axes, filled = grid.axes, True
        bars = frame["interval"].where(frame["n"] > 2, frame["deviation"])
        bars = bars.fillna(frame["own"].where(frame["found"] == 1))
        caption = (
            f"Means over {grid.repeated}. Bars: 95 % interval; for two runs, the standard "
            "deviation; for one run, the 95 % interval over its episodes."
        )
    frame = frame.assign(bar=bars.fillna(0), filled=filled)
    along = axes[-1].numbers is not None and len(axes[-1].labels) > 1
    axis, varied = (axes[-1], slice(-1)) if along else (axes[0], slice(1, None))
    names, series = [other.name for other in axes[varied]], places(axes[varied])
    # The same marks with and without a baseline.
    every = places(grid.axes[varied])
    marks = [style.series_mark(every.index(place)) for place in series]
    labels = [textwrap.fill(grid.shown(axis.name, at), _LABEL_CHARACTERS) for at in axis.labels]
    lines = [line for label in labels for line in label.splitlines()]
    legend = [
        style.legend_handle(", ".join(map(grid.shown, names, place)), mark, line=along)
        for place, mark in zip(series, marks, strict=True)
        if len(every) > 1
    ]
    columns = min(_COLUMNS, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    highest = max(label.count("\n") + 1 for label in labels)
    pitch = max(_MARK * len(series), _LINE * highest) + _BETWEEN_ROWS
    over = grid.comparison.pairs_over
    figure = style.new_figure(
        0.6 + (0 if along else _CHARACTER * max(map(len, lines))) + _PANEL_WIDTH * columns,
        rows * (2.9 if along else 0.75 + max(0.9, pitch * len(labels))),
        title=title,
        caption=f"{caption} Thin ticks: single {f'values of {over}' if over else 'seeds'}.",
        command=command,
        legend=legend,
        legend_title=", ".join(map(short_name, names)) if legend else "",
    )
    # Side by side around the label, in the order of the rows of the frame.
    steps = np.arange(len(series)) - (len(series) - 1) / 2
    order = (np.repeat if along else np.tile)(np.arange(len(series)), len(labels))
    for number, name in enumerate(metrics):
        metric, panel = grid.metrics[name], figure.add_subplot(rows, columns, number + 1)
        heading = md.metric_heading(metric, difference=difference)
        panel.set_title(textwrap.fill(heading, 40), size=style.LARGE)
        panel.locator_params(axis="x", nbins=5, steps=[1, 2, 5, 10])
        style.style_axes(panel, grid="both" if along else "x")
        if along:
            positions = _place_numbers(panel, axis, labels, steps)
        else:
            row_name = short_name(axis.name) if number % columns == 0 else ""
            positions = _place_rows(panel, labels, row_name, _MARK / pitch * steps)
        found = frame.loc[[name]].assign(at=positions.ravel(), series=order)
        found = found.dropna(subset="mean").sort_values("at")
        for series_number, of_series in found.groupby("series"):
            _draw_series(panel, marks[series_number], of_series, metric.unit, along=along)
        if difference:
            line = panel.axhline if along else panel.axvline
            line(0, color=style.INK, linewidth=0.9, zorder=1)
    return figure


def _place_rows(panel: Axes, labels: Sequence[str], name: str, steps: np.ndarray) -> np.ndarray:
    """A row for each of L labels from the top, named if `name` is not empty.

    Returns positions [L, S] of S series at distances `steps` from the middle of each row.
    """
    for row in range(1, len(labels), 2):
        panel.axhspan(row - 0.5, row + 0.5, color="#f3f3f3", linewidth=0, zorder=0)
    panel.set_ylim(len(labels) - 0.5, -0.5)
    panel.set_yticks(range(len(labels)), [style.display_text(text) for text in labels])
    panel.tick_params(axis="y", length=0, labelleft=bool(name))
    panel.set_ylabel(style.display_text(textwrap.fill(name, _LABEL_CHARACTERS)))
    return np.arange(len(labels))[:, None] + steps


def _place_numbers(panel: Axes, axis: Axis, labels: Sequence[str], steps: np.ndarray) -> np.ndarray:
    """A number along x for each of L labels; returns positions [S, L] of S series side by side."""
    numbers = np.array(axis.numbers)
    logarithmic = numbers.min() > 0 and numbers.max() >= 6 * numbers.min()
    along = np.log(numbers) if logarithmic else numbers
    if logarithmic:
        panel.set_xscale("log")
        panel.set_xticks([], minor=True)
    narrowest = _NUMBER_CHARACTERS * np.diff(np.sort(along)).min() / np.ptp(along)
    upright = narrowest < max(map(len, labels)) + 1
    panel.set_xticks(numbers, labels, rotation=90 if upright else 0)
    panel.set_xlabel(style.display_text(short_name(axis.name)))
    beside = along + np.ptp(along) * min(1 / 60, 1 / (10 * len(steps))) * steps[:, None]
    return np.exp(beside) if logarithmic else beside


def _draw_series(panel: Axes, mark: style.Mark, found: Frame, unit: str, *, along: bool) -> None:
    """Means with bars, and a thin tick for each of several repetitions.

    If `along`, positions are along x and the means are joined by a line. Else they are along y.
    """

    def xy(rows: Frame, column: str = "mean") -> list[Any]:
        points = [rows["at"].to_numpy(), md.scaled(rows[column].to_numpy(float), unit)]
        return points if along else points[::-1]

    bars = {
        "yerr" if along else "xerr": md.scaled(found["bar"].to_numpy(), unit),
        "elinewidth": 1.6,
    }
    edge = {"markeredgecolor": style.INK, "markeredgewidth": 0.4}
    panel.errorbar(*xy(found), **bars, **mark.style(line=along), **edge, zorder=3)
    hollow: Any = {"markerfacecolor": "white", "markeredgecolor": mark.color}
    panel.plot(*xy(found[~found["filled"]]), **mark.style(line=False), **hollow, zorder=5)
    tick = {"color": style.INK, "markersize": 4 if along else 6, "markeredgewidth": 0.8}
    values = found[found["n"] > 1].explode("values")
    panel.plot(*xy(values, "values"), "_" if along else "|", **tick, zorder=4)
