"""The report of a grid of runs: a table of every metric, and figures of all of them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.core.storage import write_atomically, write_json, write_picture
from experiments.reporting import markdown as md
from experiments.reporting import style
from experiments.reporting.grid import VALIDATION, Axis, Frame, Grid, GridRun, make_grid
from experiments.reporting.run import version_text


@matplotlib.rc_context(style.STYLE)
def write_grid(
    directory: Path,
    axes: Sequence[Axis],
    runs: Sequence[GridRun],
    *,
    title: str,
    command: str,
    notes: Sequence[str] = (),
    **arrangement: Any,
) -> list[Path]:
    """Writes table.md, table.json, runs.csv and, if there are values, figure.png; returns paths.

    runs.csv has the values of every run, as `experiments/results` takes them. With a baseline,
    differences.png is written, too. Title, command (as typed last) and notes are
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
    paths += [write_atomically(directory / "runs.csv", grid_runs(grid, axes, runs, command))]
    for name, difference in {"figure": False, "differences": True}.items():
        figure = grid_figure(grid, difference=difference, title=title, command=command)
        if figure is not None:
            paths.append(write_picture(directory / f"{name}.png", figure))
            text += f"\n![{md.plain(title)}: {name}]({name}.png)\n"
    return [write_atomically(directory / "table.md", text), *paths]


def grid_runs(grid: Grid, axes: Sequence[Axis], runs: Sequence[GridRun], command: str) -> str:
    """The values of every run in CSV, below lines of how they were made."""
    lines = [f"# baseline: {'='.join(of)}" for of in [grid.comparison.baseline] if of]
    lines += [f"# command: {command}"]
    lines += [f"# code: {code}" for code in dict.fromkeys(version_text(r.report) for r in runs)]
    rows = [
        {axis.name: label for axis, label in zip(axes, run.place, strict=True)}
        | {"seed": run.report["seed"]}
        | {
            md.metric_heading(metric): md.scaled(run.measured[name]["value"], metric.unit)
            for name, metric in grid.metrics.items()
            if run.measured.get(name, {}).get("value") is not None
        }
        for run in runs
    ]
    return "\n".join([*lines, pd.DataFrame(rows).to_csv(index=False, float_format="%.6g")])


def grid_table(
    grid: Grid, runs: Sequence[GridRun], *, title: str, notes: Sequence[str] = ()
) -> str:
    """The tables of a grid in Markdown, with a caption.

    The labels of the first axis are the rows. With one axis, the metrics are the columns. With
    more, there is a table for each metric, and the combinations of the other axes are the columns.
    With a baseline, tables of the differences to it follow. `runs` are all that were tried.
    """
    lines, caption = _means(grid)
    if not grid.differences.empty:
        of_differences = _differences(grid)
        lines, caption = ["**Means**", "", *lines, *of_differences[0]], [caption, of_differences[1]]
    else:
        caption = [caption]
    if any(metric.higher_is_better is False for metric in grid.metrics.values()):
        caption += ["↓: lower is better."]
    if VALIDATION in grid.metrics:
        found = [run.report["validation"] for run in runs if run.report["validation"]]
        of = " or ".join(dict.fromkeys(value["name"] for value in found)) or "the metric"
        caption += [f"{VALIDATION}: {of} on the validation split, which selects the checkpoint."]
    caption += [*grid.notes, *notes, *_run_lines(runs)]
    return "\n".join([md.heading(title), "", *lines, *md.bullets(caption), ""])


def _means(grid: Grid) -> tuple[list[str], str]:
    """The tables of means ± deviations, and a caption.

    Without a baseline, the best values as printed are bold, if all runs have them.
    """
    means: Frame = grid.means
    metrics = [grid.metrics[name] for name in means.index.get_level_values("metric")]
    printed = [md.format_value(of, m.unit) for of, m in zip(means["mean"], metrics, strict=True)]
    signs = [{True: 1, False: -1, None: math.nan}[metric.higher_is_better] for metric in metrics]
    score: Any = pd.Series(printed, means.index).astype(float) * signs
    score = score.where(means["found"] == means["expected"])
    of_column = score.groupby([n for n in means.index.names if n != grid.axes[0].name])
    best = (score == of_column.transform("max")) & (of_column.transform("count") > 1)
    best &= grid.differences.empty
    half, texts = means["own"].where(means["found"] == 1, means["deviation"]), []
    rows = means.assign(printed=printed, best=best, half=half).itertuples()
    for row, metric in zip(rows, metrics, strict=True):
        text = row.printed
        if not math.isnan(row.half):
            text += f" ± {md.format_value(row.half, metric.unit)}"
        if row.found < row.expected:
            text += f" ({row.found} of {row.expected})"
        if not row.found:
            text = "diverged" if row.diverged else md.MISSING
        texts.append(f"**{text}**" if row.best else text)
    known = means[means["found"] > 0]
    lacking = bool((known["found"] < known["expected"]).any())
    sentences = {
        f"Means over {grid.repeated}.": True,
        "±: standard deviation; of one run, the 95 % interval over its episodes.": half.any(),
        "(k of n): k of n runs have a value.": lacking,
        f"Bold: best in its column{', among entries with all runs' * lacking}.": best.any(),
    }
    lines = _tables(grid.axes, [*map(md.metric_heading, grid.metrics.values())], texts)
    return lines, " ".join(sentence for sentence, holds in sentences.items() if holds)


def _differences(grid: Grid) -> tuple[list[str], str]:
    """The tables of mean differences ± intervals, and a caption.

    Bold where the interval over the repetitions excludes 0.
    """
    found, texts = grid.differences, []
    for row in found.itertuples():
        unit = grid.metrics[row.Index[0]].unit
        text = md.format_difference(row.mean, unit) if row.n else md.MISSING
        if row.n > 1:
            text += f" ± {md.format_difference(row.interval, unit, sign='-')}"
            text = f"**{text}**" if abs(row.mean) > row.interval else text
        elif not math.isnan(row.own):
            text += f" (episodes ± {md.format_difference(row.own, unit, sign='-')})"
        missing = row.expected - row.found
        texts.append(text + (f" (n = {row.n}, {missing} missing)" if missing else ""))
    name, label = grid.comparison.baseline or ("", "")
    title = f"Difference from {name} = {label}"
    same = " and ".join(filter(None, ("seed", grid.comparison.pairs_over)))
    caption = f"{title} between runs of the same {same}, in percentage points for %: mean ± 95 % "
    caption += f"interval (Student's t) over {grid.repeated}. Bold: the interval excludes 0 (not "
    caption += "corrected for the number of comparisons)."
    if "episodes" in "".join(texts):
        caption += " episodes ±: 95 % interval over episodes; it does not cover other seeds."
    metrics = [grid.metrics[metric] for metric in found.index.unique("metric")]
    headings = [md.metric_heading(metric, difference=True) for metric in metrics]
    return _tables(_compared(grid), headings, texts, title), caption


def _compared(grid: Grid) -> list[Axis]:
    """The axes without the label of the baseline."""
    baseline = grid.comparison.baseline
    return [
        axis._replace(labels=tuple(at for at in axis.labels if (axis.name, at) != baseline))
        for axis in grid.axes
    ]


def _tables(
    axes: Sequence[Axis], headings: Sequence[str], texts: Sequence[str], title: str = ""
) -> list[str]:
    """The tables; `texts` are the entries by metric and place on the axes."""
    rows, *others = axes
    entries = np.array(texts, object).reshape(len(headings), len(rows.labels), -1)
    above, against = [f"**{md.plain(title)}**"] if title else [], ""
    tables = [(above, headings, entries[..., 0].T)]
    if others:
        columns = [", ".join(place) for place in _places(others)]
        against = f" against {md.plain(', '.join(axis.name for axis in others))}"
        tables = [
            ([": ".join([*above, f"**{md.plain(heading)}**"]) + against], columns, of_metric)
            for heading, of_metric in zip(headings, entries, strict=True)
        ]
    lines = []
    for above, columns, body in tables:
        lines += [*above, ""] if above else []
        lines += [*md.table([rows.name, *columns], np.c_[rows.labels, body].tolist()), ""]
    return lines


def _places(axes: Sequence[Axis]) -> list[tuple[str, ...]]:
    """All combinations of labels."""
    return list(itertools.product(*(axis.labels for axis in axes)))


def _run_lines(runs: Sequence[GridRun]) -> Iterator[str]:
    """What is known of all runs: those that diverged, notes, time, code and commands."""

    def names(of: Sequence[GridRun]) -> str:
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

    Every label of the first axis is a row, in which the combinations of the other axes have marks
    of their own, with a thin tick for each of several repetitions. None if there are no values.
    """
    frame = grid.differences if difference else grid.means
    metrics = frame["mean"].dropna().index.unique("metric")
    if metrics.empty:
        return None
    if difference:
        axis, filled = _compared(grid)[0], frame["mean"].abs() > frame["interval"]
        title += f": differences from {' = '.join(grid.comparison.baseline or ())}"
        bars = frame["interval"].fillna(frame["own"])
        caption = "Paired differences over {}. Bars: 95 % interval; for one pair, over its "
        caption += "episodes. Filled: the interval over several pairs excludes 0."
    else:
        axis, filled = grid.axes[0], True
        bars = frame["interval"].where(frame["n"] > 2, frame["deviation"])
        bars = bars.fillna(frame["own"].where(frame["found"] == 1))
        caption = "Means over {}. Bars: 95 % interval; for two runs, the standard deviation; for "
        caption += "one run, the 95 % interval over its episodes."
    caption = f"{caption.format(grid.repeated)} Thin ticks: single repetitions. Command: {command}"
    # The same marks with and without a baseline.
    names, every = [other.name for other in grid.axes[1:]], _places(grid.axes[1:])
    columns = min(3, len(metrics))
    rows = -(-len(metrics) // columns)
    height = (0.8 + (0.2 + 0.14 * len(every)) * len(axis.labels)) * rows
    figure = style.new_figure(3.6 * columns + 1, height, title=title, caption=caption)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    at = frame.index.get_level_values(axis.name).map(axis.labels.index)
    frame = frame.assign(bar=bars.fillna(0), filled=filled, at=at).dropna(subset="mean")
    for panel, name in itertools.zip_longest(panels, metrics):
        if name is None:
            panel.remove()
            continue
        unit, found = grid.metrics[name].unit, frame.loc[[name]]
        panel.set_title(md.metric_heading(grid.metrics[name], difference=difference), wrap=True)
        panel.grid(visible=False, axis="y")
        for series, of in found.groupby(level=names) if names else [((), found)]:
            number = every.index(series)
            mark = style.series_mark(number) | {"linestyle": "None"}
            of = of.assign(at=of["at"] + 0.5 * (number + 0.5) / len(every) - 0.25)
            bar, text = md.scaled(of["bar"].to_numpy(), unit), ", ".join(series)
            panel.errorbar(md.scaled(of["mean"], unit), of["at"], xerr=bar, **mark, label=text)
            hollow, several = of[~of["filled"]], of[of["n"] > 1].explode("values")
            mark |= {"markerfacecolor": "white", "zorder": 5}
            panel.plot(md.scaled(hollow["mean"], unit), hollow["at"], **mark)
            panel.plot(md.scaled(several["values"], unit), several["at"], "|", color=style.INK)
        if difference:
            panel.axvline(0, color=style.INK, linewidth=0.9)
    panels[0].set_yticks(range(len(axis.labels)), axis.labels)
    panels[0].set(ylim=(len(axis.labels) - 0.5, -0.5), ylabel=axis.name)
    if len(every) > 1:
        handles, texts = panels[0].get_legend_handles_labels()
        figure.legend(handles, texts, title=", ".join(names), loc="outside right upper")
    return figure
