"""The runs of a grid put together: its axes, its metrics, and an entry for every place."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.contracts import Metric
from experiments.errors import ExperimentError
from experiments.reporting.statistics import interval

ALL = "all"
"""The label of an option that takes everything available."""
VALIDATION = "validation"
"""The name, in a grid, of the metric that chose the checkpoint."""

Place = tuple[str, ...]
"""A label on each axis."""


class Axis(NamedTuple):
    """What was varied."""

    name: str
    labels: tuple[str, ...]

    @property
    def numbers(self) -> list[float] | None:
        """Positions of the labels if they are numbers; with `all`, which is last, their ranks."""
        try:
            values = [math.inf if label == ALL else float(label) for label in self.labels]
        except ValueError:
            return None
        if ALL in self.labels:
            return [float(sorted(values).index(value)) for value in values]
        return values if all(map(math.isfinite, values)) else None


class Run(NamedTuple):
    """A finished run of a grid: its place, its report.json and its episodes.npz."""

    place: Place
    report: dict[str, Any]
    episodes: Mapping[str, Sequence[float] | np.ndarray] = {}
    """For each metric that is a mean over episodes, its value in every episode."""


Unit = str | int
"""A repetition: a seed, or a label of the axis over which runs are pooled."""
Cells = Mapping[tuple[Unit, int], Run | None]
"""The runs of one place by repetition and seed; None if a run is not finished."""


class Entry(NamedTuple):
    """A metric at one place of a grid."""

    metric: Metric
    values: tuple[float, ...]
    """One for each repetition that has a value: of a seed, or the mean over the seeds of a label
    of the pooled axis. Fractions if the unit is %."""
    interval: float | None
    """Of a single run: half the width of its 95 % confidence interval, if there is one."""
    diverged: bool
    """There are runs at this place, and all of them diverged."""
    found: int
    """Runs with a value."""
    expected: int
    """Runs of the grid at this place."""

    @property
    def complete(self) -> bool:
        """Every run has a value."""
        return 0 < self.found == self.expected

    @property
    def mean(self) -> float | None:
        """Over the repetitions."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def half_width(self) -> float | None:
        """What follows the ±: the deviation (n − 1) over repetitions, or the interval of a run."""
        return statistics.stdev(self.values) if len(self.values) > 1 else self.interval

    @property
    def mean_interval(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean, of three repetitions on."""
        return interval(self.values) if len(self.values) > 2 else None


class Grid(NamedTuple):
    """What tables and figures show of the runs."""

    axes: list[Axis]
    """The first axis, and the others that have several labels."""
    constant: dict[str, str]
    """The label of every other axis."""
    pooled: Axis | None
    """The axis whose labels are repetitions."""
    seeds: list[int]
    entries: dict[Metric, dict[Place, Entry]]
    """For each metric that is shown, an entry for every place on `axes`."""
    cells: dict[Place, Cells]
    """The runs at every place on `axes`."""

    def columns(self) -> Iterator[tuple[Metric, Place, list[Entry]]]:
        """The entries along the first axis, for each metric and each place on the other axes."""
        rows, *others = self.axes
        for (metric, entries), rest in itertools.product(self.entries.items(), places(others)):
            yield metric, rest, [entries[label, *rest] for label in rows.labels]


def make_grid(
    axes: Sequence[Axis],
    runs: Sequence[Run],
    metrics: Sequence[str] = (),
    *,
    pooled: str = "",
    planned: Sequence[Place] | None = None,
) -> Grid:
    """Arranges runs; no two of them have the same place and seed.

    Args:
      axes: At least one beside `pooled`.
      runs: The finished runs.
      metrics: Names of those to show, in this order; by default all.
      pooled: The axis whose labels are repetitions, or empty.
      planned: The places of the grid; by default all combinations of labels.
    """
    shown_axes = [i for i, axis in enumerate(axes) if axis.name != pooled]
    kept = [i for n, i in enumerate(shown_axes) if n == 0 or len(axes[i].labels) > 1]
    constant = {axes[i].name: axes[i].labels[0] for i in shown_axes if i not in kept}
    repeated = [i for i, axis in enumerate(axes) if axis.name == pooled]
    seeds = sorted({run.report["seed"] for run in runs})
    varied = [axes[i] for i in kept]
    cells: dict[Place, dict[tuple[Unit, int], Run | None]] = {place: {} for place in places(varied)}

    def key(place: Place, seed: int) -> tuple[Unit, int]:
        return (place[repeated[0]] if repeated else seed), seed

    for place in places(axes) if planned is None else planned:
        for seed in seeds:
            cells[tuple(place[i] for i in kept)][key(place, seed)] = None
    for run in runs:
        cells[tuple(run.place[i] for i in kept)][key(run.place, run.report["seed"])] = run
    # Runs that diverged have no metrics; the table still says that they diverged.
    shown = select_metrics(runs, metrics) or [Metric("Result", "")]
    entries = {
        metric: {place: _entry(metric, of_place) for place, of_place in cells.items()}
        for metric in shown
    }
    return Grid(
        varied, constant, axes[repeated[0]] if repeated else None, seeds, entries, dict(cells)
    )


def places(axes: Sequence[Axis]) -> list[Place]:
    """All combinations of labels."""
    return list(itertools.product(*(axis.labels for axis in axes)))


def select_metrics(runs: Iterable[Run], names: Sequence[str] = ()) -> list[Metric]:
    """The metrics of these names, in this order; by default all, the one named `VALIDATION` last.

    A name that no run has gives a metric without values: runs that diverged have no metrics.

    Raises:
      ExperimentError: Runs give a metric another unit or direction.
    """
    found: dict[str, Metric] = {}
    for run in runs:
        for name, value in measured(run.report).items():
            metric = Metric(name, value["unit"], value["higher_is_better"])
            if (same := found.setdefault(name, metric)) != metric:
                raise ExperimentError(
                    f"runs do not agree on the unit or the direction of {name}: {same}, {metric}"
                )
    names = names or sorted(found, key=lambda name: name == VALIDATION)
    return [found.get(name, Metric(name, "")) for name in names]


def _entry(metric: Metric, cells: Cells) -> Entry:
    finished = [run.report for run in cells.values() if run is not None]
    units: dict[Unit, list[dict[str, Any]]] = {}
    for (unit, _), run in cells.items():
        value = measured(run.report).get(metric.name) if run else None
        if value and value["value"] is not None:
            units.setdefault(unit, []).append(value)
    known = [value for values in units.values() for value in values]
    return Entry(
        metric,
        tuple(statistics.fmean(value["value"] for value in values) for values in units.values()),
        interval=known[0].get("interval") if len(known) == 1 else None,
        diverged=bool(finished) and all("diverged" in report for report in finished),
        found=len(known),
        expected=len(cells),
    )


def measured(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The values of a report by the name that a grid gives them."""
    named = {value["name"]: value for value in report["metrics"]}
    return named | ({VALIDATION: report["validation"]} if report["validation"] else {})
