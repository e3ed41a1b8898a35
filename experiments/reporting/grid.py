"""The report of a grid of runs: a table of every metric, and a figure of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.contracts import Metric, PairMetrics
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
    Comparison,
    Frame,
    Grid,
    Place,
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
    comparison: Comparison | None = None,
    pair_metrics: PairMetrics | None = None,
    planned: Sequence[Place] | None = None,
) -> list[Path]:
    """Writes table.md, table.json and, if there are values, figure.png; returns their paths.

    With a baseline, differences.png is written, too. The labels of the first axis are the rows of
    the tables. The directory is created if it does not exist.

    Args:
      directory: The folder of the grid.
      title: Of tables and figure.
      command: What was typed last.
      notes: Sentences for the caption of the tables.
      axes, runs, metrics, comparison, pair_metrics, planned: As in `make_grid`.

    Raises:
      ExperimentError: Runs do not agree on the unit or the direction of a metric.
    """
    grid = make_grid(
        axes, runs, metrics, comparison=comparison, pair_metrics=pair_metrics, planned=planned
    )
    text = grid_table(grid, runs, title=title, notes=notes)
    stored = {
        "axes": [axis._asdict() for axis in axes],
        "comparison": grid.comparison._asdict(),
        "choices": _records(grid.choices),
        "differences": _stored(grid),
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


def _stored(grid: Grid) -> list[dict[str, Any]]:
    """The differences as JSON types."""
    stored = []
    index = grid.differences.index if len(grid.differences) else []
    for (name, *place), row in zip(index, _records(grid.differences), strict=True):
        metric = grid.metrics[name]
        meaning = {"unit": metric.unit, "higher_is_better": metric.higher_is_better}
        stored.append({"metric": name, **meaning, "place": place, **row})
    return stored


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
    caption = [*_symbol_lines(grid, runs), *_choice_lines(grid), *notes, *_run_lines(runs)]
    lines = _tables(grid.means, grid.axes, grid.metrics, _mean_texts, metric_heading)
    if not grid.differences.empty and (baseline := grid.comparison.baseline):
        lines += _tables(
            grid.differences,
            without(grid.axes, baseline),
            grid.metrics,
            _difference_texts,
            difference_heading,
            f"Difference from {baseline[0]} = {baseline[1]}",
        )
        caption = [*_difference_lines(grid, *baseline), *caption]
    return "\n".join([f"### {title}", "", *lines, *bullets(caption), ""])


def _tables(
    frame: Frame,
    axes: Sequence[Axis],
    metrics: dict[str, Metric],
    texts: Callable[[Frame, Metric], list[str]],
    heading: Callable[[Metric], str],
    title: str = "",
) -> list[str]:
    """The first axis gives the rows; `texts` are the cells of a column."""
    rows, *others = axes
    tables: dict[str, dict[str, list[str]]] = {}
    for name in frame.index.unique("metric"):
        metric = metrics[name]
        against = f"{bold(heading(metric))} against {', '.join(axis.name for axis in others)}"
        parts = [*([bold(title)] if title else []), *([against] if others else [])]
        for rest in places(others):
            column = frame.loc[[(name, label, *rest) for label in rows.labels]]
            columns = tables.setdefault(": ".join(parts), {})
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


def _occurring(sentences: dict[str, Any]) -> list[str]:
    return [sentence for sentence, occurs in sentences.items() if occurs]


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds)) or 'none'}"


def _difference_lines(grid: Grid, name: str, label: str) -> list[str]:
    """What the tables of differences mean."""
    found = grid.differences
    has_interval, has_own = found["interval"].notna(), found["own"].notna()
    over = _seeds(grid.seeds)
    if grid.pooled:
        over = grid.repetitions
        if len(grid.seeds) > 1:
            over += ", over the seeds of each of which the differences are averaged first"
    sentences = {
        f"Difference from {name} = {label}: the result minus that of the run with {label} that has "
        "the same seed and the same values on the other axes. For % in percentage points.": True,
        f"a ± b (n = k): mean of k differences and half the width of its 95 % confidence interval "
        f"(Student's t) over the {over}.": has_interval.any(),
        "episodes ± c: half the width of the 95 % confidence interval over the episodes of a pair; "
        "of several pairs, the mean.": has_own.any(),
        "m missing: pairs of which a run diverged, is not finished or lacks the metric.": any(
            found["found"] < found["expected"]
        ),
        f"Bold difference: the interval over the {grid.repetitions} excludes 0. Intervals are not "
        "corrected for the number of comparisons.": has_interval.any(),
        "A single pair is never bold: an interval over its episodes does not describe other "
        "training runs.": (has_own & ~has_interval).any(),
    }
    return _occurring(sentences)


def _symbol_lines(grid: Grid, runs: Sequence[Run]) -> list[str]:
    """What the entries and the headings of the tables mean."""
    means, several, seeds = grid.means, len(grid.seeds) > 1, _seeds(grid.seeds)
    complete, known, averaged = _complete(means), means["n"] > 0, bool((means["n"] > 1).any())
    own = means.loc[means["found"] == 1, "own"].notna().any()
    single, repeated, over = "seed", several, f"the {seeds}"
    if grid.pooled:
        single, repeated = "run", several or len(grid.pooled.labels) > 1
        over = f"{grid.pooled.name} {', '.join(grid.pooled.labels)}"
        over += f"; each is the mean of the {seeds}" if several else f", trained with {seeds}"
    counts = " or ".join(map(str, sorted(set(means["expected"][known & ~complete]))))
    of_column = complete.groupby([name for name in means.index.names if name != grid.axes[0].name])
    validations = [run.report["validation"] for run in runs if run.report["validation"]]
    chosen_by = " or ".join(dict.fromkeys(metric["name"] for metric in validations))
    interval = "half the width of its 95 % confidence interval over evaluation episodes"
    sentences = {
        f"a ± b: mean and standard deviation over {over}.": averaged,
        f"a ± b{f' of a single {single}' * averaged}: the value and {interval}.": own,
        f"Trained with {seeds}.": not averaged and not grid.pooled,
        f"(k of {counts}): results of k {single}s; the others diverged, are not finished or have "
        "no such value.": counts,
        f"Bold: the best of a column{f' among entries of all {single}s' * repeated}.": (
            of_column.sum().max() > 1
        ),
        "↓: lower is better.": any(m.higher_is_better is False for m in grid.metrics.values()),
        f"{MISSING}: no result.": (~known & ~means["diverged"]).any(),
        f"{VALIDATION}: {chosen_by} on the validation split, by which the checkpoint was "
        "chosen.": chosen_by and VALIDATION in grid.metrics,
    }
    constant = [f"{name}: {label} in all runs." for name, label in grid.constant.items()]
    return [*_occurring(sentences), *constant]


def _choice_lines(grid: Grid) -> list[str]:
    """What validation chose."""
    choices = grid.choices.to_dict("records")
    if not choices:
        return []

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

    seeds = list(dict.fromkeys(row["seeds"] for row in choices))
    tried = list(dict.fromkeys(row["candidates"] for row in choices))
    common = f" ({_seeds(seeds[0])})" if len(seeds) == 1 and seeds[0] else ""
    sentences = {
        f"{', '.join(grid.comparison.choose)}: the best of "
        f"{tried[0] if len(tried) == 1 else 'a number of'} values by the mean validation over the "
        f"repetitions that all of them have{common}: {each(chosen)}.": True,
        f"Repetitions compared: {each(lambda row: _seeds(row['seeds']))}.": len(seeds) > 1,
        f"Values tried: {each(lambda row: row['candidates'])}.": len(tried) > 1,
    }
    return _occurring(sentences)


def _run_lines(runs: Sequence[Run]) -> list[str]:
    """What is known of all runs: those that diverged, notes, time, code and commands."""

    def names(of: Iterable[Run]) -> str:
        return "; ".join(f"{', '.join(run.place)} (seed {run.report['seed']})" for run in of)

    diverged = [run for run in runs if "diverged" in run.report]
    lines = []
    if diverged:
        reason = "the loss, its gradient or the features are not finite"
        lines = [f"Diverged ({reason}): {names(diverged)}."]
    for note in dict.fromkeys(note for run in runs for note in run.report.get("notes", ())):
        noted = [run for run in runs if note in run.report.get("notes", ())]
        lines.append(f"{'All' if 1 < len(noted) == len(runs) else names(noted)}: {note}")
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
