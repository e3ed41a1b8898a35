"""The report of a grid of runs: a table of every metric, and a figure of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.contracts import Metric
from experiments.reporting.grid_figure import difference_figure, mean_figure
from experiments.reporting.markdown import (
    MISSING,
    bold,
    bullets,
    difference_heading,
    format_difference,
    format_value,
    metric_heading,
    table,
)
from experiments.reporting.results import (
    VALIDATION,
    Axis,
    Frame,
    Grid,
    Run,
    make_grid,
    places,
    seed_text,
    without,
)
from experiments.reporting.run import code_version
from experiments.storage import write_atomically, write_json, write_picture


def write_grid(
    directory: Path,
    axes: Sequence[Axis],
    runs: Sequence[Run],
    *,
    title: str,
    command: str,
    metrics: Sequence[str] = (),
    notes: Sequence[str] = (),
    **arrangement: Any,
) -> list[Path]:
    """Writes table.md, table.json and, if there are values, figure.png; returns their paths.

    With a baseline, differences.png is written, too. The labels of the first axis are the rows of
    the tables. The directory is created if it does not exist.

    Args:
      directory: The folder of the grid.
      axes, runs, metrics: As in `make_grid`.
      title: Of tables and figure.
      command: What was typed last.
      notes: Sentences for the caption of the tables.
      arrangement: What else `make_grid` takes.

    Raises:
      ExperimentError: Runs do not agree on the unit or the direction of a metric.
    """
    grid = make_grid(axes, runs, metrics, **arrangement)
    text = grid_table(grid, runs, title=title, notes=notes)
    differences = []
    for (name, *place), row in zip(grid.differences.index, _records(grid.differences), strict=True):
        _, unit, higher_is_better = grid.metrics[name]
        meaning = {"metric": name, "unit": unit, "higher_is_better": higher_is_better}
        differences.append({**meaning, "place": place, **row})
    stored = {
        "axes": [{"name": axis.name, "labels": axis.labels} for axis in axes],
        "comparison": grid.comparison._asdict(),
        "choices": _records(grid.choices),
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


def _records(frame: Frame) -> list[Any]:
    """The rows as JSON types."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def grid_table(grid: Grid, runs: Sequence[Run], *, title: str, notes: Sequence[str] = ()) -> str:
    """The tables of a grid in Markdown, with a caption.

    With one axis, the metrics are the columns. With more, there is a table for each metric, and the
    combinations of the other axes are the columns. Axes of a single label are in the caption. With
    a baseline, tables of the differences to it follow.

    Args:
      grid: The grid.
      runs: All runs that belong to it, for the caption.
      title: The heading.
      notes: Sentences for the caption.
    """
    lines = _tables(grid, grid.axes, grid.means, _mean_texts(grid), metric_heading)
    caption = [
        f"a ± b: mean and standard deviation over {grid.repeated}; of a single run, its value and "
        "95 % interval over its episodes. (k of n): k of n runs have a value. Bold: the best of a "
        "column, among entries whose runs all have a value. ↓: lower is better."
    ]
    if (baseline := grid.comparison.baseline) and not grid.differences.empty:
        axes, above = without(grid.axes, baseline), "Difference from {} = {}".format(*baseline)
        texts, frame = _difference_texts(grid), grid.differences
        lines += _tables(grid, axes, frame, texts, difference_heading, f"{bold(above)}: ")
        caption += [
            f"{above}, of runs of the same seed and other settings, in percentage points for %: "
            f"mean ± 95 % interval (Student's t) over {grid.repeated}; bold: it excludes 0, not "
            "corrected for the number of comparisons. episodes ±: mean 95 % interval over the "
            "episodes of a pair, which does not describe other training runs."
        ]
    if VALIDATION in grid.metrics:
        caption += [f"{VALIDATION}: on the validation split, by which checkpoints were chosen."]
    caption += [f"{name}: {label} in all runs." for name, label in grid.constant.items()]
    if chosen := grid.choices.to_dict("records"):
        at_places = "; ".join(map(_choice_text, chosen))
        chosen_axes = ", ".join(grid.comparison.choose)
        caption += [f"{chosen_axes}: the best mean validation. {at_places}."]
    return "\n".join(
        [f"### {title}", "", *lines, *bullets([*caption, *notes, *_run_lines(runs)]), ""]
    )


def _tables(
    grid: Grid,
    axes: Sequence[Axis],
    frame: Frame,
    texts: Sequence[str],
    heading: Callable[[Metric], str],
    title: str = "",
) -> list[str]:
    """The first axis gives the rows; `texts` are the cells of the rows of `frame`."""
    rows, *others = axes
    metrics = [heading(grid.metrics[name]) for name in frame.index.unique("metric")]
    cells = np.array(texts, object).reshape(len(metrics), len(rows.labels), -1)
    tables = [(title.removesuffix(": "), metrics, cells[..., 0].T)]
    if others:
        against, columns = ", ".join(axis.name for axis in others), map(", ".join, places(others))
        headings = [*columns]
        above = [f"{title}{bold(metric)} against {against}" for metric in metrics]
        tables = [(text, headings, own) for text, own in zip(above, cells, strict=True)]
    lines = []
    for above, headings, body in tables:
        named = ([label, *row] for label, row in zip(rows.labels, body, strict=True))
        lines += [*([above, ""] if above else []), *table([rows.name, *headings], named), ""]
    return lines


def _mean_texts(grid: Grid) -> list[str]:
    """Means ± deviations. The best values as printed are bold, if all runs have them."""
    means, metrics = (
        grid.means,
        [grid.metrics[name] for name in grid.means.index.get_level_values(0)],
    )
    signs = [{True: 1, False: -1, None: np.nan}[metric.higher_is_better] for metric in metrics]
    complete = (means["found"] > 0) & (means["found"] == means["expected"])
    pairs = zip(_records(means), metrics, strict=True)
    printed = [float(format_value(row["mean"] or 0, metric.unit)) for row, metric in pairs]
    score = (complete.where(complete) * printed * signs).astype(float)
    of_column = score.groupby([n for n in means.index.names if n != grid.axes[0].name])
    is_bold = (score == of_column.transform("max")) & (of_column.transform("count") > 1)
    texts = []
    for row, metric, in_bold in zip(_records(means), metrics, is_bold, strict=True):
        if row["mean"] is None:
            texts.append("diverged" if row["diverged"] else MISSING)
            continue
        text = format_value(row["mean"], metric.unit)
        half_width = row["own"] if row["found"] == 1 else row["deviation"]
        if half_width is not None:
            text += f" ± {format_value(half_width, metric.unit)}"
        if row["found"] < row["expected"]:
            text += f" ({row['found']} of {row['expected']})"
        texts.append(bold(text) if in_bold else text)
    return texts


def _difference_texts(grid: Grid) -> list[str]:
    """Mean differences ± intervals; bold where the interval over the repetitions excludes 0."""
    texts = []
    for name, row in zip(grid.differences.index, _records(grid.differences), strict=True):
        unit, lacking = grid.metrics[name[0]].unit, row["expected"] - row["found"]
        text, details = MISSING, [f"{lacking} missing"] if lacking else []
        if row["mean"] is not None:
            text = format_difference(row["mean"], unit)
            details = [f"n = {row['n']}", *details]
        if row["interval"] is not None:
            text += f" ± {format_difference(row['interval'], unit, signed=False)}"
            text = bold(text) if abs(row["mean"]) > row["interval"] else text
        if row["own"] is not None:
            details.append(f"episodes ± {format_difference(row['own'], unit, signed=False)}")
        texts.append(f"{text} ({', '.join(details)})" if details else text)
    return texts


def _choice_text(row: dict[str, Any]) -> str:
    """What validation chose at a place, and from what."""
    label = ", ".join(row["label"]) if row["found"] else "none"
    lost = row["compared"] - row["found"]
    diverged = f", {lost} diverged" if lost else ""
    over = f"{row['candidates']} values, {seed_text(row['seeds'])}{diverged}"
    return f"{', '.join(row['place'])}: {label} (of {over})"


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
    yield f"Runs: {len(runs)}" + (f", {minutes:.1f} minutes in total." if minutes else ".")
    yield f"Code: {'; '.join(dict.fromkeys(map(code_version, reports)))}."
    yield from (f"Command: `{c}`" for c in dict.fromkeys(report["command"] for report in reports))
