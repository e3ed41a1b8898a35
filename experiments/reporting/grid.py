"""The report of a grid of runs: a table of every metric, and a figure of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
    places_of: Any = grid.differences.index if grid.has_differences else ()
    for (name, *place), row in zip(places_of, _records(grid.differences), strict=True):
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
            described = title if name == "figure" else f"{title}: {name}"
            text += f"\n![{described}]({name}.png)\n"
    return [write_atomically(directory / "table.md", text), *paths]


def _records(frame: Frame) -> list[Any]:
    """The rows as JSON types."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def grid_table(grid: Grid, runs: Sequence[Run], *, title: str, notes: Sequence[str] = ()) -> str:
    """The tables of a grid in Markdown, with a caption that explains every symbol.

    With one axis, the metrics are the columns. With more, there is a table for each metric, and the
    combinations of the other axes are the columns. Axes of a single label are in the caption. With
    a baseline, tables of the differences to it follow.

    Args:
      grid: The grid.
      runs: All runs that belong to it, for the caption.
      title: The heading.
      notes: Sentences for the caption.
    """
    caption = [*_mean_lines(grid, runs), *_choice_lines(grid), *notes, *_run_lines(runs)]
    lines = _tables(grid, grid.means, grid.axes, _mean_texts, metric_heading)
    if grid.has_differences and (baseline := grid.comparison.baseline):
        axes, above = without(grid.axes, baseline), "Difference from {} = {}".format(*baseline)
        texts, heading = _difference_texts, difference_heading
        lines += _tables(grid, grid.differences, axes, texts, heading, above)
        caption = [*_difference_lines(grid, *baseline), *caption]
    return "\n".join([f"### {title}", "", *lines, *bullets(caption), ""])


def _tables(
    grid: Grid,
    frame: Frame,
    axes: Sequence[Axis],
    texts: Callable[[Frame, Metric], list[str]],
    heading: Callable[[Metric], str],
    title: str = "",
) -> list[str]:
    """The first axis gives the rows; `texts` are the cells of a column."""
    rows, *others = axes
    tables: dict[str, dict[str, list[str]]] = {}
    for name in frame.index.unique("metric"):
        metric = grid.metrics[name]
        against = f"{bold(heading(metric))} against {', '.join(axis.name for axis in others)}"
        above = ": ".join([*([bold(title)] if title else []), *([against] if others else [])])
        for rest in places(others):
            column = frame.loc[[(name, label, *rest) for label in rows.labels]]
            columns = tables.setdefault(above, {})
            columns[", ".join(rest) or heading(metric)] = texts(column, metric)
    lines = []
    for above, columns in tables.items():
        cells = zip(rows.labels, *columns.values(), strict=True)
        lines += [*([above, ""] if above else []), *table([rows.name, *columns], cells), ""]
    return lines


def _complete(means: Frame) -> Any:
    """Where every run has a value."""
    return (means["found"] > 0) & (means["found"] == means["expected"])


def _mean_texts(column: Frame, metric: Metric) -> list[str]:
    """Means ± deviations. The best values as printed are bold, if all runs have them."""
    complete = _complete(column)
    printed = column["mean"].map(lambda mean: float(format_value(mean, metric.unit)))
    best = printed[complete].agg("max" if metric.higher_is_better else "min")
    is_bold = complete & (printed == best) & (complete.sum() > 1)
    is_bold &= metric.higher_is_better is not None
    texts = []
    for row, whole, in_bold in zip(_records(column), complete, is_bold, strict=True):
        if row["mean"] is None:
            texts.append("diverged" if row["diverged"] else MISSING)
            continue
        text = format_value(row["mean"], metric.unit)
        half_width = row["own"] if row["found"] == 1 else row["deviation"]
        if half_width is not None:
            text += f" ± {format_value(half_width, metric.unit)}"
        text += "" if whole else f" ({row['found']} of {row['expected']})"
        texts.append(bold(text) if in_bold else text)
    return texts


def _difference_texts(column: Frame, metric: Metric) -> list[str]:
    """Mean differences ± intervals; bold where the interval over the repetitions excludes 0."""
    texts = []
    for row in _records(column):
        lacking = row["expected"] - row["found"]
        missing = [f"{lacking} missing"] if lacking else []
        text, details = MISSING, missing
        if row["mean"] is not None:
            text = format_difference(row["mean"], metric.unit)
            details = [f"n = {row['n']}", *missing]
        if row["interval"] is not None:
            text += f" ± {format_difference(row['interval'], metric.unit, signed=False)}"
            text = bold(text) if abs(row["mean"]) > row["interval"] else text
        if row["own"] is not None:
            half_width = format_difference(row["own"], metric.unit, signed=False)
            details.append(f"episodes ± {half_width}")
        texts.append(f"{text} ({', '.join(details)})" if details else text)
    return texts


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds)) or 'none'}"


def _difference_lines(grid: Grid, name: str, label: str) -> Iterator[str]:
    """What the tables of differences mean."""
    found = grid.differences
    has_interval, has_own = found["interval"].notna(), found["own"].notna()
    over = _seeds(grid.seeds)
    if grid.pooled:
        over = grid.repetitions
        if len(grid.seeds) > 1:
            over += ", over the seeds of each of which the differences are averaged first"
    yield (
        f"Difference from {name} = {label}: the result minus that of the run with {label} that has "
        "the same seed and the same values on the other axes. For % in percentage points."
    )
    if has_interval.any():
        yield (
            "a ± b (n = k): mean of k differences and half the width of its 95 % confidence "
            f"interval (Student's t) over the {over}."
        )
    if has_own.any():
        yield (
            "episodes ± c: half the width of the 95 % confidence interval over the episodes of a "
            "pair; of several pairs, the mean."
        )
    if (found["found"] < found["expected"]).any():
        yield "m missing: pairs of which a run diverged, is not finished or lacks the metric."
    if has_interval.any():
        yield (
            f"Bold difference: the interval over the {grid.repetitions} excludes 0. Intervals are "
            "not corrected for the number of comparisons."
        )
    if (has_own & ~has_interval).any():
        yield (
            "A single pair is never bold: an interval over its episodes does not describe other "
            "training runs."
        )


def _mean_lines(grid: Grid, runs: Sequence[Run]) -> Iterator[str]:
    """What the entries and the headings of the tables of means are."""
    means, several, seeds = grid.means, len(grid.seeds) > 1, _seeds(grid.seeds)
    complete, known = _complete(means), means["n"] > 0
    averaged, single, repeated, over = (means["n"] > 1).any(), "seed", several, f"the {seeds}"
    if grid.pooled:
        single, repeated = "run", several or len(grid.pooled.labels) > 1
        over = f"{grid.pooled.name} {', '.join(grid.pooled.labels)}"
        over += f"; each is the mean of the {seeds}" if several else f", trained with {seeds}"
    if averaged:
        yield f"a ± b: mean and standard deviation over {over}."
    if means.loc[means["found"] == 1, "own"].notna().any():
        yield (
            f"a ± b{f' of a single {single}' if averaged else ''}: the value and half the width of "
            "its 95 % confidence interval over evaluation episodes."
        )
    if not averaged and not grid.pooled:
        yield f"Trained with {seeds}."
    if counts := sorted(set(means["expected"][known & ~complete])):
        yield (
            f"(k of {' or '.join(map(str, counts))}): results of k {single}s; the others diverged, "
            "are not finished or have no such value."
        )
    column = [name for name in means.index.names if name != grid.axes[0].name]
    if complete.groupby(column).sum().max() > 1:
        yield f"Bold: the best of a column{f' among entries of all {single}s' * repeated}."
    if any(metric.higher_is_better is False for metric in grid.metrics.values()):
        yield "↓: lower is better."
    if (~known & ~means["diverged"]).any():
        yield f"{MISSING}: no result."
    validations = [run.report["validation"]["name"] for run in runs if run.report["validation"]]
    if validations and VALIDATION in grid.metrics:
        yield (
            f"{VALIDATION}: {' or '.join(dict.fromkeys(validations))} on the validation split, by "
            "which the checkpoint was chosen."
        )
    for name, label in grid.constant.items():
        yield f"{name}: {label} in all runs."


def _choice_lines(grid: Grid) -> Iterator[str]:
    """What validation chose."""
    choices = grid.choices.to_dict("records")
    if not choices:
        return

    def each(text: Callable[[dict[str, Any]], Any]) -> str:
        return "; ".join(f"{', '.join(row['place'])}: {text(row)}" for row in choices)

    def chosen(row: dict[str, Any]) -> str:
        if not row["compared"]:
            return "none, because no repetition is finished for all values"
        if not row["found"]:
            return "none, because no run has a validation"
        diverged = row["compared"] - row["found"]
        lost = f" ({diverged} of its runs diverged)" if diverged else ""
        return ", ".join(row["label"]) + lost

    seeds, tried = ({row[key] for row in choices} for key in ("seeds", "candidates"))
    (common,) = seeds if len(seeds) == 1 else [()]
    yield (
        f"{', '.join(grid.comparison.choose)}: the best of "
        f"{'a number of' if len(tried) > 1 else choices[0]['candidates']} values by the mean "
        "validation over the repetitions that all of them have"
        f"{f' ({_seeds(common)})' if common else ''}: {each(chosen)}."
    )
    if len(seeds) > 1:
        yield f"Repetitions compared: {each(lambda row: _seeds(row['seeds']))}."
    if len(tried) > 1:
        yield f"Values tried: {each(lambda row: row['candidates'])}."


def _run_lines(runs: Sequence[Run]) -> Iterator[str]:
    """What is known of all runs: those that diverged, notes, time, code and commands."""

    def names(of: Iterable[Run]) -> str:
        return "; ".join(f"{', '.join(run.place)} (seed {run.report['seed']})" for run in of)

    reports = [run.report for run in runs]
    if diverged := [run for run in runs if "diverged" in run.report]:
        reason = "the loss, its gradient or the features are not finite"
        yield f"Diverged ({reason}): {names(diverged)}."
    for note in dict.fromkeys(note for report in reports for note in report.get("notes", ())):
        noted = [run for run in runs if note in run.report.get("notes", ())]
        yield f"{'All' if 1 < len(noted) == len(runs) else names(noted)}: {note}"
    # Reports of training alone have a time.
    seconds = [report["seconds"] for report in reports if "seconds" in report]
    minutes = sum(seconds) / 60
    kind = "evaluation" if runs and not (seconds or diverged) else "run"
    took = f", {minutes:.{0 if minutes >= 10 else 1}f} minutes in total" if seconds else ""
    yield f"{len(runs)} {kind}{'s' * (len(runs) > 1)}{took}."
    yield f"Code: {'; '.join(dict.fromkeys(map(code_version, reports)))}."
    yield from (f"Command: `{c}`" for c in dict.fromkeys(report["command"] for report in reports))
