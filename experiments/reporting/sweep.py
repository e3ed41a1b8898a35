"""The table and the figure of a sweep: the first axis are the methods."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.files import write_atomically, write_picture
from experiments.reporting.colors import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION

_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, "#000000", "#999999")
_MARKERS = "osD^vP*X"
_PANELS_IN_A_ROW = 3
ALL = "all"
"""The label of an option that takes all there is."""
VALIDATION = "validation"
"""The metric by which the checkpoint is chosen, on validation images."""


class Axis(NamedTuple):
    """What was varied."""

    name: str
    labels: list[str]

    @property
    def numbers(self) -> list[float] | None:
        """Where its labels stand: as numbers, side by side where one is `all`, or nowhere."""
        try:
            numbers = [float(label) for label in self.labels if label != ALL]
        except ValueError:
            return None
        return numbers if len(numbers) == len(self.labels) else list(range(len(self.labels)))


class Entry(NamedTuple):
    """A metric at a place of the sweep, in the unit that is shown."""

    values: list[float]
    """Of every seed."""
    digits: int = 1
    """Shown behind the point."""

    @property
    def mean(self) -> float:
        """Over the seeds; NaN where there are none."""
        return float(np.mean(self.values)) if self.values else math.nan

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds (n − 1); None of one seed."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    def __str__(self) -> str:
        if not self.values:
            return "–"
        spread = "" if self.deviation is None else f" ± {self.deviation:.{self.digits}f}"
        return f"{self.mean:.{self.digits}f}{spread}"

    @property
    def shown(self) -> float:
        """The mean as it is shown."""
        return round(self.mean, self.digits)


Runs = Sequence[tuple[tuple[str, ...], dict[str, Any]]]
"""The place of a run on every axis, and its report."""


def metrics_of(runs: Runs, wanted: Sequence[str] = ()) -> list[str]:
    """The names of the metrics, in order of appearance; that of the validation last.

    Args:
      runs: places and reports.
      wanted: which, in this order; all where it is empty.

    Returns:
      No name where all runs diverged.
    """
    names = dict.fromkeys(name for _, report in runs for name in report["metrics"])
    if any(report.get(VALIDATION) is not None for _, report in runs):
        names[VALIDATION] = None
    return list(wanted or names) if names else []


def entries(runs: Runs, metric: str) -> dict[tuple[str, ...], Entry]:
    """A metric at every place, over its seeds; those that diverged have none."""
    found: dict[tuple[str, ...], list[float]] = {}
    unit, digits = (1, 2) if _is_ratio(metric) else (100, 1)
    for place, report in runs:
        value = report.get(metric) if metric == VALIDATION else report["metrics"].get(metric)
        found.setdefault(place, []).extend([] if value is None else [unit * value])
    return {place: Entry(values, digits) for place, values in found.items()}


def _numbers_of_seeds(runs: Runs, names: Sequence[str]) -> set[int]:
    """Of how many seeds there are values: the numbers that occur, but for 0."""
    return {len(e.values) for name in names for e in entries(runs, name).values()} - {0}


def sweep_table(
    axes: Sequence[Axis], runs: Runs, *, title: str, command: str, metrics: Sequence[str] = ()
) -> str:
    """The sweep in Markdown: metrics as columns on one axis, else a table for each metric."""
    lines = [f"### {title}", ""]
    if not runs:
        return "\n".join([*lines, "No run has finished yet.", "", f"Command: `{command}`"]) + "\n"
    names = metrics_of(runs, metrics)
    seeds = sorted({report["seed"] for _, report in runs})
    if len(axes) == 1:
        columns = {name: entries(runs, name) for name in names}
        lines += _grid(
            axes[0],
            [_heading(name) for name in names],
            [[columns[name].get((label,)) for label in axes[0].labels] for name in names],
            [_lower(name) for name in names],
            len(seeds),
        )
        lines.append("")
    else:
        places = _product([axis.labels for axis in axes[1:]])
        for name in names:
            found = entries(runs, name)
            lines += [
                f"**{_heading(name)}** against {', '.join(axis.name for axis in axes[1:])}",
                "",
            ]
            lines += _grid(
                axes[0],
                [", ".join(place) for place in places],
                [[found.get((label, *place)) for label in axes[0].labels] for place in places],
                [_lower(name)] * len(places),
                len(seeds),
            )
            lines.append("")
    ratios = ", but for ratios" if any(map(_is_ratio, names)) else ""
    minutes = sum(report.get("seconds") or 0 for _, report in runs) / 60
    diverged = [
        f"{', '.join(place)} (seed {report['seed']})"
        for place, report in runs
        if "diverged" in report
    ]
    lines += [
        f"- In %{ratios}. a ± b: mean and standard deviation over the seeds "
        f"{', '.join(map(str, seeds))}; bold: the best of a column.",
    ]
    if _numbers_of_seeds(runs, names) - {len(seeds)}:
        lines.append(f"- (k of {len(seeds)}): of k seeds; the others diverged or are not done.")
    if VALIDATION in names:
        lines.append("- validation: what the checkpoint was chosen by, on the validation images.")
    if diverged:
        lines.append(f"- Diverged: {'; '.join(diverged)}.")
    commands = dict.fromkeys([report.get("command") or command for _, report in runs])
    lines += [f"- {len(runs)} runs, together {minutes:.0f} minutes"]
    lines += [f"- Command: `{typed}`" for typed in commands]
    return "\n".join(lines) + "\n"


def _grid(
    rows: Axis,
    headings: list[str],
    columns: list[list[Entry | None]],
    lower: list[bool],
    seeds: int,
) -> list[str]:
    lines = [f"| {rows.name} | {' | '.join(headings)} |", f"|:--|{':-:|' * len(headings)}"]
    texts = []
    for column, least in zip(columns, lower, strict=True):
        # What lacks seeds is not compared.
        means = [e.shown if e and len(e.values) == seeds else math.nan for e in column]
        known = [mean for mean in means if not math.isnan(mean)]
        best = (min(known) if least else max(known)) if len(known) > 1 else None
        texts.append(
            [
                f"**{e}**" if mean == best else _told(e, seeds)
                for e, mean in zip(column, means, strict=True)
            ]
        )
    for label, *row in zip(rows.labels, *texts, strict=True):
        lines.append(f"| {label} | {' | '.join(row)} |")
    return lines


def _told(entry: Entry | None, seeds: int) -> str:
    if entry is None or not entry.values:
        return "–"
    there = len(entry.values)
    return str(entry) if there == seeds else f"{entry} ({there} of {seeds})"


def _product(labels: list[list[str]]) -> list[tuple[str, ...]]:
    places: list[tuple[str, ...]] = [()]
    for axis in labels:
        places = [(*place, label) for place in places for label in axis]
    return places


def _lower(metric: str) -> bool:
    return "error" in metric


def _is_ratio(metric: str) -> bool:
    return "discriminability" in metric


def _heading(metric: str) -> str:
    return f"{metric} ↓" if _lower(metric) else metric


def _axis(metric: str) -> str:
    return _heading(metric) if _is_ratio(metric) else f"{_heading(metric)} (%)"


def sweep_figure(
    axes: Sequence[Axis],
    runs: Runs,
    path: Path,
    *,
    title: str,
    command: str,
    metrics: Sequence[str] = (),
) -> None:
    """A panel for each metric: lines against the last axis where it has numbers, else marks."""
    names = metrics_of(runs, metrics)
    last = axes[-1]
    lines = _product([axis.labels for axis in (axes if last.numbers is None else axes[:-1])])
    seeds = _numbers_of_seeds(runs, names)
    told = " to ".join(map(str, sorted({min(seeds), max(seeds)})))
    spread = "One seed. " if told == "1" else f"Mean of {told} seeds; bars: standard deviation. "
    columns = min(_PANELS_IN_A_ROW, len(names))
    rows = -(-len(names) // columns)
    width = 3.6 * columns + 0.4
    caption = textwrap.wrap(f"{spread}Command: {command}", int(16 * width), break_on_hyphens=False)
    in_a_row = int(width / 1.7)
    legend = last.numbers is not None and lines != [()]
    below = 0.14 * len(caption) + 0.1
    above = 0.35 + (0.2 * -(-len(lines) // in_a_row) + 0.1 if legend else 0)
    height = 3.0 * rows + below + above
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, below / height, 1, 1 - (below + above) / height))
    figure.text(0.01, 1 - 0.1 / height, title, weight="bold", size=12, va="top")
    figure.text(0.01, 0.06 / height, "\n".join(caption), size=7, va="bottom")
    panels = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    for place, (panel, name) in enumerate(zip(panels, names, strict=False)):
        found = entries(runs, name)
        if last.numbers is None:
            _draw_marks(panel, lines, found)
            panel.set_xlabel(_axis(name))
            if place % columns == 0:
                panel.set_ylabel(", ".join(axis.name for axis in axes))
        else:
            _draw_lines(panel, lines, last, found)
            panel.set_ylabel(_axis(name))
        panel.grid(alpha=0.3)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    if legend:
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="upper left",
            bbox_to_anchor=(0, 1 - 0.32 / height),
            ncols=in_a_row,
            fontsize=8,
            frameon=False,
        )
    write_picture(path, figure)


def _draw_marks(
    panel: Any, lines: list[tuple[str, ...]], found: dict[tuple[str, ...], Entry]
) -> None:
    for number, line in enumerate(lines):
        entry = found.get(line)
        if entry and entry.values:
            panel.errorbar(
                *(entry.mean, number),
                xerr=entry.deviation or 0,
                fmt="o",
                color=_COLORS[number % len(_COLORS)],
                capsize=3,
            )
    panel.set_yticks(range(len(lines)), [", ".join(line) for line in lines])
    panel.set_ylim(len(lines) - 0.5, -0.5)


def _draw_lines(
    panel: Any, lines: list[tuple[str, ...]], axis: Axis, found: dict[tuple[str, ...], Entry]
) -> None:
    numbers = axis.numbers or []
    for number, line in enumerate(lines):
        there = [found.get((*line, label)) for label in axis.labels]
        known = sorted((x, e) for x, e in zip(numbers, there, strict=True) if e and e.values)
        panel.errorbar(
            [x for x, _ in known],
            [e.mean for _, e in known],
            yerr=[e.deviation or 0 for _, e in known],
            color=_COLORS[number % len(_COLORS)],
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
            capsize=2,
            linewidth=1.2,
            label=", ".join(line) or None,
        )
    if ALL in axis.labels:
        panel.set_xticks(numbers, axis.labels)
    elif min(numbers) > 0 and max(numbers) >= 6 * min(numbers):
        panel.set_xscale("log")
        panel.set_xticks([], minor=True)
        panel.set_xticks(numbers, axis.labels)
    else:
        panel.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    panel.set_xlabel(axis.name)


def write_sweep(
    directory: Path,
    axes: Sequence[Axis],
    runs: Runs,
    *,
    title: str,
    command: str,
    metrics: Sequence[str] = (),
) -> list[Path]:
    """Writes table.md, table.json and, where there are values, figure.png; returns their paths."""
    text = sweep_table(axes, runs, title=title, command=command, metrics=metrics)
    as_json = {
        "axes": [axis._asdict() for axis in axes],
        "runs": [{"place": list(place), "report": report} for place, report in runs],
    }
    paths = [
        write_atomically(directory / "table.md", text),
        write_atomically(
            directory / "table.json", json.dumps(as_json, indent=2, ensure_ascii=False) + "\n"
        ),
    ]
    if _numbers_of_seeds(runs, metrics_of(runs, metrics)):
        path = directory / "figure.png"
        sweep_figure(axes, runs, path, title=title, command=command, metrics=metrics)
        paths.append(path)
    return paths
