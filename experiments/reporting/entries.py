"""The runs of a grid put together: its axes, its metrics, and an entry for every place."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from experiments.contracts import Metric
from experiments.errors import ExperimentError

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
    """A finished run of a grid: its place and its report.json."""

    place: Place
    report: dict[str, Any]


class Entry(NamedTuple):
    """A metric at one place of a grid."""

    metric: Metric
    values: tuple[float, ...]
    """One for each seed that has a value; fractions if the unit is %."""
    interval: float | None
    """Of a single seed: half the width of its 95 % confidence interval, if there is one."""
    diverged: bool
    """There are runs at this place, and all of them diverged."""
    complete: bool
    """Every seed of the grid has a value."""

    @property
    def mean(self) -> float | None:
        """Over the seeds."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def half_width(self) -> float | None:
        """What follows the ±: the deviation (n − 1) over seeds, or the interval of a single one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else self.interval


class Grid(NamedTuple):
    """What tables and figures show of the runs."""

    axes: list[Axis]
    """The first axis, and the others that have several labels."""
    constant: dict[str, str]
    """The label of every other axis."""
    seeds: list[int]
    entries: dict[Metric, dict[Place, Entry]]
    """For each metric that is shown, an entry for every place on `axes`."""

    def columns(self) -> Iterator[tuple[Metric, Place, list[Entry]]]:
        """The entries along the first axis, for each metric and each place on the other axes."""
        rows, *others = self.axes
        for (metric, entries), rest in itertools.product(self.entries.items(), places(others)):
            yield metric, rest, [entries[label, *rest] for label in rows.labels]


def make_grid(axes: Sequence[Axis], runs: Sequence[Run], metrics: Sequence[str] = ()) -> Grid:
    """Arranges runs; no two of them have the same place and seed."""
    kept = [i for i, axis in enumerate(axes) if i == 0 or len(axis.labels) > 1]
    constant = {axis.name: axis.labels[0] for i, axis in enumerate(axes) if i not in kept}
    seeds = sorted({run.report["seed"] for run in runs})
    varied = [axes[i] for i in kept]
    reports: dict[Place, list[dict[str, Any]]] = {place: [] for place in places(varied)}
    for run in sorted(runs, key=lambda run: run.report["seed"]):
        reports[tuple(run.place[i] for i in kept)].append(run.report)
    # Runs that diverged have no metrics; the table still says that they diverged.
    shown = select_metrics(runs, metrics) or [Metric("Result", "")]
    entries = {
        metric: {place: _entry(metric, reports[place], len(seeds)) for place in reports}
        for metric in shown
    }
    return Grid(varied, constant, seeds, entries)


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
        for name, value in _measured(run.report).items():
            metric = Metric(name, value["unit"], value["higher_is_better"])
            if (same := found.setdefault(name, metric)) != metric:
                raise ExperimentError(
                    f"runs do not agree on the unit or the direction of {name}: {same}, {metric}"
                )
    names = names or sorted(found, key=lambda name: name == VALIDATION)
    return [found.get(name, Metric(name, "")) for name in names]


def _entry(metric: Metric, reports: Sequence[dict[str, Any]], num_seeds: int) -> Entry:
    found = [_measured(report).get(metric.name) for report in reports]
    known = [value for value in found if value and value["value"] is not None]
    return Entry(
        metric,
        tuple(value["value"] for value in known),
        interval=known[0].get("interval") if len(known) == 1 else None,
        diverged=bool(reports) and all("diverged" in report for report in reports),
        complete=0 < len(known) == num_seeds,
    )


def _measured(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The values of a report by the name that a grid gives them."""
    named = {value["name"]: value for value in report["metrics"]}
    return named | ({VALIDATION: report["validation"]} if report["validation"] else {})
