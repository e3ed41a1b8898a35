"""The report of a grid of runs: a table of every metric, and a figure of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.contracts import PairMetrics
from experiments.files import write_atomically, write_json, write_picture
from experiments.reporting.comparison import (
    Difference,
    Differences,
    add_pair_metrics,
    as_json,
    choice_lines,
    choose,
    differences,
    without,
)
from experiments.reporting.entries import (
    VALIDATION,
    Axis,
    Entry,
    Grid,
    Place,
    Run,
    make_grid,
    places,
)
from experiments.reporting.grid_figure import difference_figure, grid_figure, repetitions
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
from experiments.reporting.run import code_version

__all__ = ["Axis", "Comparison", "Run", "grid_table", "write_grid"]

_INTERVAL = "half the width of its 95 % confidence interval over evaluation episodes"


class Comparison(NamedTuple):
    """How the runs of a grid are compared."""

    baseline: tuple[str, str] | None = None
    """Name and label of an axis; the table gets the differences of the other labels to it."""
    pairs_over: str = ""
    """Name of the axis whose labels are repetitions, or empty."""
    choose: tuple[str, ...] = ()
    """Names of the axes of which validation chooses the labels, at every place by itself."""


MEANS_ONLY = Comparison()
"""Nothing is compared, pooled or chosen."""


def write_grid(
    directory: Path,
    axes: Sequence[Axis],
    runs: Sequence[Run],
    *,
    title: str,
    command: str,
    metrics: Sequence[str] = (),
    notes: Sequence[str] = (),
    comparison: Comparison = MEANS_ONLY,
    pair_metrics: PairMetrics | None = None,
    planned: Sequence[Place] | None = None,
) -> list[Path]:
    """Writes table.md, table.json and, if there are values, figure.png; returns their paths.

    With a baseline, differences.png is written, too. The labels of the first axis are the rows of
    the tables. The directory is created if it does not exist.

    Args:
      directory: The folder of the grid.
      axes: What was varied.
      runs: The finished runs.
      title: Of tables and figure.
      command: What was typed last.
      metrics: Names of those to show, in this order; by default all.
      notes: Sentences for the caption of the tables.
      comparison: How runs are compared.
      pair_metrics: What every run has in common with that of the baseline, if there is one.
      planned: The places of the grid; by default all combinations of labels.

    Raises:
      ExperimentError: Runs do not agree on the unit or the direction of a metric.
    """
    planned = places(axes) if planned is None else planned
    kept = choose(axes, runs, planned, comparison.choose, pooled=comparison.pairs_over)
    compared_runs = kept.runs
    if comparison.baseline and pair_metrics:
        compared_runs = add_pair_metrics(
            kept.axes, kept.runs, comparison.baseline, pair_metrics.measure
        )
    grid = make_grid(
        kept.axes, compared_runs, metrics, pooled=comparison.pairs_over, planned=kept.planned
    )
    found = differences(grid, comparison.baseline) if comparison.baseline else {}
    if pair_metrics:  # The baseline has none of them.
        found = {metric: d for metric, d in found.items() if metric not in pair_metrics.metrics}
    notes = [*choice_lines(comparison.choose, kept.choices), *notes]
    text = grid_table(
        grid, runs, title=title, notes=notes, compared=found, baseline=comparison.baseline
    )
    stored = {
        "axes": [axis._asdict() for axis in axes],
        "comparison": comparison._asdict(),
        "choices": [choice._asdict() for choice in kept.choices],
        "differences": list(as_json(found)),
        "runs": [{"place": run.place, "report": run.report} for run in runs],
    }
    directory.mkdir(parents=True, exist_ok=True)
    paths = [write_json(directory / "table.json", stored)]
    if (figure := grid_figure(grid, title=title, command=command)) is not None:
        paths.append(write_picture(directory / "figure.png", figure))
        text += f"\n![{title}](figure.png)\n"
    if comparison.baseline is not None:
        figure = difference_figure(grid, found, comparison.baseline, title=title, command=command)
        if figure is not None:
            paths.append(write_picture(directory / "differences.png", figure))
            text += f"\n![{title}: differences](differences.png)\n"
    return [write_atomically(directory / "table.md", text), *paths]


def grid_table(
    grid: Grid,
    runs: Sequence[Run],
    *,
    title: str,
    notes: Sequence[str] = (),
    compared: Differences | None = None,
    baseline: tuple[str, str] | None = None,
) -> str:
    """The tables of a grid in Markdown, with a caption that explains every symbol.

    With one axis, the metrics are the columns. With more, there is a table for each metric, and the
    combinations of the other axes are the columns. Axes of a single label are in the caption. With
    a baseline, tables of the differences to it follow.

    Args:
      grid: The grid.
      runs: All runs that belong to it, for the caption.
      title: The heading.
      notes: Sentences for the caption.
      compared: The differences to the baseline.
      baseline: Name and label of an axis.
    """
    caption = bullets([*_symbol_lines(grid, runs), *notes, *_run_lines(runs)])
    lines = [f"### {title}", "", *_tables(grid)]
    if compared and baseline:
        lines += _difference_tables(grid, compared, baseline)
        caption = bullets(_difference_lines(grid, compared, baseline)) + caption
    return "\n".join([*lines, *caption, ""])


def _tables(grid: Grid) -> list[str]:
    rows, *others = grid.axes
    names = ", ".join(axis.name for axis in others)
    # The columns of every table by its title.
    tables: dict[str, dict[str, list[str]]] = {}
    for metric, rest, column in grid.columns():
        heading = metric_heading(metric)
        title = f"{bold(heading)} against {names}" if others else ""
        tables.setdefault(title, {})[", ".join(rest) or heading] = _cells(column)
    lines = []
    for title, columns in tables.items():
        cells = zip(rows.labels, *columns.values(), strict=True)
        lines += [*([title, ""] if title else []), *table([rows.name, *columns], cells), ""]
    return lines


def _cells(column: Sequence[Entry]) -> list[str]:
    """A column as text. The best values as printed are bold, if all runs have them."""
    printed = {
        row: float(format_value(entry.mean, entry.metric.unit))
        for row, entry in enumerate(column)
        if entry.complete
    }
    best = max if column[0].metric.higher_is_better else min
    bold_rows = [row for row, value in printed.items() if value == best(printed.values())]
    return [
        bold(text) if row in bold_rows and len(printed) > 1 else text
        for row, text in enumerate(map(_text, column))
    ]


def _text(entry: Entry) -> str:
    if not entry.values:
        return "diverged" if entry.diverged else MISSING
    text = format_value(entry.mean, entry.metric.unit)
    if entry.half_width is not None:
        text += f" ± {format_value(entry.half_width, entry.metric.unit)}"
    return text if entry.complete else f"{text} ({entry.found} of {entry.expected})"


def _difference_tables(grid: Grid, compared: Differences, baseline: tuple[str, str]) -> list[str]:
    """As `_tables`, without the label of the baseline."""
    name, label = baseline
    rows, *others = without(grid.axes, baseline)
    names = f" against {', '.join(axis.name for axis in others)}" if others else ""
    tables: dict[str, dict[str, list[str]]] = {}
    for metric, by_place in compared.items():
        heading = difference_heading(metric)
        title = bold(f"Difference from {name} = {label}")
        title += f": {bold(heading)}{names}" if others else ""
        for rest in places(others):
            column = [_difference_text(by_place[row, *rest]) for row in rows.labels]
            tables.setdefault(title, {})[", ".join(rest) or heading] = column
    lines = []
    for title, columns in tables.items():
        cells = zip(rows.labels, *columns.values(), strict=True)
        lines += [title, "", *table([rows.name, *columns], cells), ""]
    return lines


def _difference_text(difference: Difference) -> str:
    mean, unit = difference.mean, difference.metric.unit
    missing = [f"{difference.missing} missing"] if difference.missing else []
    if mean is None:
        return f"{MISSING} ({missing[0]})" if missing else MISSING
    text = format_difference(mean, unit)
    if difference.interval is not None:
        text += f" ± {format_difference(difference.interval, unit, signed=False)}"
    details = [f"n = {len(difference.values)}", *missing]
    if difference.episodes_interval is not None:
        half_width = format_difference(difference.episodes_interval, unit, signed=False)
        details.append(f"episodes ± {half_width}")
    return f"{bold(text) if difference.excludes_zero else text} ({', '.join(details)})"


def _difference_lines(grid: Grid, compared: Differences, baseline: tuple[str, str]) -> list[str]:
    """What the tables of differences mean."""
    found = [difference for by_place in compared.values() for difference in by_place.values()]
    name, label = baseline
    several = any(difference.interval is not None for difference in found)
    episodes = any(difference.episodes_interval is not None for difference in found)
    single = any(d.interval is None and d.episodes_interval is not None for d in found)
    unit = repetitions(grid)
    over = f"seeds {', '.join(map(str, grid.seeds))}"
    if grid.pooled:
        over = unit
        if len(grid.seeds) > 1:
            over += ", over the seeds of each of which the differences are averaged first"
    sentences = {
        f"Difference from {name} = {label}: the result minus that of the run with {label} that has "
        "the same seed and the same values on the other axes. For % in percentage points.": True,
        f"a ± b (n = k): mean of k differences and half the width of its 95 % confidence interval "
        f"(Student's t) over the {over}.": several,
        "episodes ± c: half the width of the 95 % confidence interval over the episodes of a pair; "
        "of several pairs, the mean.": episodes,
        "m missing: pairs of which a run diverged, is not finished or lacks the metric.": any(
            difference.missing for difference in found
        ),
        f"Bold difference: the interval over the {unit} excludes 0. Intervals are not corrected "
        "for the number of comparisons.": several,
        "A single pair is never bold: an interval over its episodes does not describe other "
        "training runs.": single,
    }
    return [sentence for sentence, occurs in sentences.items() if occurs]


def _symbol_lines(grid: Grid, runs: Sequence[Run]) -> list[str]:
    """What the entries and the headings of the tables mean."""
    columns = [column for _, _, column in grid.columns()]
    entries = [entry for column in columns for entry in column]
    known = [entry for entry in entries if entry.values]
    means = any(len(entry.values) > 1 for entry in known)
    intervals = any(entry.interval is not None for entry in known)
    compared = any(sum(entry.complete for entry in column) > 1 for column in columns)
    several = len(grid.seeds) > 1
    seeds = f"seed{'s' * several} {', '.join(map(str, grid.seeds))}"
    repeated, over = several, f"the {seeds}"
    if grid.pooled:
        repeated = several or len(grid.pooled.labels) > 1
        over = f"{grid.pooled.name} {', '.join(grid.pooled.labels)}"
        over += f"; each is the mean of the {seeds}" if several else f", trained with {seeds}"
    single = "run" if grid.pooled else "seed"
    counts = sorted({entry.expected for entry in known if not entry.complete})
    of_all = " or ".join(map(str, counts))
    lacking = f"results of k {single}s; the others diverged, are not finished or have no such value"
    validations = [run.report["validation"] for run in runs if run.report["validation"]]
    chosen_by = " or ".join(dict.fromkeys(metric["name"] for metric in validations))
    split = "on the validation split, by which the checkpoint was chosen"
    sentences = {
        f"a ± b: mean and standard deviation over {over}.": means,
        f"a ± b of a single {single}: the value and {_INTERVAL}.": means and intervals,
        f"a ± b: the value and {_INTERVAL}.": intervals and not means,
        f"Trained with {seeds}.": not means and not grid.pooled,
        f"(k of {of_all}): {lacking}.": bool(counts),
        f"Bold: the best of a column{f' among entries of all {single}s' * repeated}.": compared,
        "↓: lower is better.": not all(metric.higher_is_better for metric in grid.entries),
        f"{MISSING}: no result.": any(not entry.values and not entry.diverged for entry in entries),
        f"{VALIDATION}: {chosen_by} {split}.": chosen_by
        and any(metric.name == VALIDATION for metric in grid.entries),
    }
    constant = [f"{name}: {label} in all runs." for name, label in grid.constant.items()]
    return [*(sentence for sentence, occurs in sentences.items() if occurs), *constant]


def _run_lines(runs: Sequence[Run]) -> list[str]:
    """What is known of all runs: those that diverged, notes, time, code and commands."""
    diverged = [_name(run) for run in runs if "diverged" in run.report]
    noted: dict[str, list[str]] = {}
    for run in runs:
        for note in dict.fromkeys(run.report.get("notes", ())):
            noted.setdefault(note, []).append(_name(run))
    lines = [
        f"{'All' if 1 < len(names) == len(runs) else '; '.join(names)}: {note}"
        for note, names in noted.items()
    ]
    if diverged:
        reason = "the loss, its gradient or the features are not finite"
        lines.insert(0, f"Diverged ({reason}): {'; '.join(diverged)}.")
    # Reports of training alone have a time.
    seconds = [run.report["seconds"] for run in runs if "seconds" in run.report]
    minutes = sum(seconds) / 60
    kind = "evaluation" if runs and not (seconds or diverged) else "run"
    took = f", {minutes:.{0 if minutes >= 10 else 1}f} minutes in total" if seconds else ""
    versions = dict.fromkeys(code_version(run.report) for run in runs)
    commands = dict.fromkeys(run.report["command"] for run in runs)
    return [
        *lines,
        f"{len(runs)} {kind}{'s' * (len(runs) > 1)}{took}.",
        f"Code: {'; '.join(versions)}.",
        *(f"Command: `{command}`" for command in commands),
    ]


def _name(run: Run) -> str:
    return f"{', '.join(run.place)} (seed {run.report['seed']})"
