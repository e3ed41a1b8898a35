"""The report of a grid of runs: a table of every metric, and a figure of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.files import write_atomically, write_json, write_picture
from experiments.reporting.entries import VALIDATION, Axis, Entry, Grid, Run, make_grid
from experiments.reporting.grid_figure import grid_figure
from experiments.reporting.markdown import (
    MISSING,
    bold,
    bullets,
    format_value,
    metric_heading,
    table,
)
from experiments.reporting.run import code_version

__all__ = ["Axis", "Run", "grid_table", "write_grid"]

_INTERVAL = "half the width of its 95 % confidence interval over evaluation episodes"


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
    """Writes table.md, table.json and, if there are values, figure.png; returns their paths.

    The labels of the first axis are the rows of the tables. `metrics` names those to show, in this
    order; by default all. `command` is what was typed last, and `notes` are sentences for the
    caption of the tables. The directory is created if it does not exist.

    Raises:
      ExperimentError: Runs do not agree on the unit or the direction of a metric.
    """
    grid = make_grid(axes, runs, metrics)
    text = grid_table(grid, runs, title=title, notes=notes)
    as_json = {
        "axes": [axis._asdict() for axis in axes],
        "runs": [run._asdict() for run in runs],
    }
    directory.mkdir(parents=True, exist_ok=True)
    paths = [write_json(directory / "table.json", as_json)]
    if (figure := grid_figure(grid, title=title, command=command)) is not None:
        paths.append(write_picture(directory / "figure.png", figure))
        text += f"\n![{title}](figure.png)\n"
    return [write_atomically(directory / "table.md", text), *paths]


def grid_table(grid: Grid, runs: Sequence[Run], *, title: str, notes: Sequence[str] = ()) -> str:
    """The tables of a grid in Markdown, with a caption that explains every symbol.

    With one axis, the metrics are the columns. With more, there is a table for each metric, and the
    combinations of the other axes are the columns. Axes of a single label are in the caption.
    """
    caption = bullets([*_symbol_lines(grid, runs), *notes, *_run_lines(runs)])
    return "\n".join([f"### {title}", "", *_tables(grid), *caption, ""])


def _tables(grid: Grid) -> list[str]:
    rows, *others = grid.axes
    names = ", ".join(axis.name for axis in others)
    # The columns of every table by its title.
    tables: dict[str, dict[str, list[str]]] = {}
    for metric, rest, column in grid.columns():
        heading = metric_heading(metric)
        title = f"{bold(heading)} against {names}" if others else ""
        tables.setdefault(title, {})[", ".join(rest) or heading] = _cells(column, len(grid.seeds))
    lines = []
    for title, columns in tables.items():
        cells = zip(rows.labels, *columns.values(), strict=True)
        lines += [*([title, ""] if title else []), *table([rows.name, *columns], cells), ""]
    return lines


def _cells(column: Sequence[Entry], num_seeds: int) -> list[str]:
    """A column as text. The best values as printed are bold, if all seeds have them."""
    printed = {
        row: float(format_value(entry.mean, entry.metric.unit))
        for row, entry in enumerate(column)
        if entry.complete
    }
    best = max if column[0].metric.higher_is_better else min
    bold_rows = [row for row, value in printed.items() if value == best(printed.values())]
    return [
        bold(text) if row in bold_rows and len(printed) > 1 else text
        for row, text in enumerate(_text(entry, num_seeds) for entry in column)
    ]


def _text(entry: Entry, num_seeds: int) -> str:
    if not entry.values:
        return "diverged" if entry.diverged else MISSING
    text = format_value(entry.mean, entry.metric.unit)
    if entry.half_width is not None:
        text += f" ± {format_value(entry.half_width, entry.metric.unit)}"
    return text if entry.complete else f"{text} ({len(entry.values)} of {num_seeds})"


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
    lacking = "results of k seeds; the others diverged or are not finished"
    validations = [run.report["validation"] for run in runs if run.report["validation"]]
    chosen_by = " or ".join(dict.fromkeys(metric["name"] for metric in validations))
    split = "on the validation split, by which the checkpoint was chosen"
    sentences = {
        f"a ± b: mean and standard deviation over the {seeds}.": means,
        f"a ± b of a single seed: the value and {_INTERVAL}.": means and intervals,
        f"a ± b: the value and {_INTERVAL}.": intervals and not means,
        f"Trained with {seeds}.": not means,
        f"(k of {len(grid.seeds)}): {lacking}.": not all(entry.complete for entry in known),
        f"Bold: the best of a column{' among entries of all seeds' * several}.": compared,
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
    lines = [f"{_name(run)}: {note}" for run in runs for note in run.report.get("notes", ())]
    if diverged:
        reason = "the loss, its gradient or the features are not finite"
        lines.insert(0, f"Diverged ({reason}): {'; '.join(diverged)}.")
    minutes = sum(run.report.get("seconds", 0) for run in runs) / 60
    digits = 0 if minutes >= 10 else 1
    number = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    versions = dict.fromkeys(code_version(run.report) for run in runs)
    commands = dict.fromkeys(run.report["command"] for run in runs)
    return [
        *lines,
        f"{number}, {minutes:.{digits}f} minutes in total.",
        f"Code: {'; '.join(versions)}.",
        *(f"Command: `{command}`" for command in commands),
    ]


def _name(run: Run) -> str:
    return f"{', '.join(run.place)} (seed {run.report['seed']})"
