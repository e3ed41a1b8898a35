"""The report of a grid of runs: a table of every metric, and a figure of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
from experiments.reporting.results import VALIDATION, Axis, Frame, Grid, Run, make_grid, places
from experiments.reporting.run import version_text
from experiments.storage import write_atomically, write_json, write_picture


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

    With a baseline, differences.png is written, too. The directory is created if it does not exist.

    Args:
      directory: The folder of the grid.
      axes, runs: As in `make_grid`.
      title, command, notes: Of tables and figures: a heading, what was typed last, and sentences.
      arrangement: What else `make_grid` takes: metrics, comparison, pair_metrics.
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
        headings = [difference_heading(grid.metrics[name]) for name in names]
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
        columns, start = (
            [", ".join(place) for place in places(others)],
            f"{title}: " if title else "",
        )
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
    signs = [{True: 1, False: -1, None: math.nan}[metric.higher_is_better] for metric in metrics]
    printed = [format_value(mean, m.unit) for mean, m in zip(means["mean"], metrics, strict=True)]
    score = (means["mean"].where(means["found"] == means["expected"]) * 0 + 1) * signs
    score *= [float(text) for text in printed]
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
