"""The runs of a grid put together: its axes, its metrics, and an entry for every place."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
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
        """The positions of the labels if they are numbers; evenly spaced if one of them is `all`.

        The label `all` comes last.
        """
        try:
            values = [math.inf if label == ALL else float(label) for label in self.labels]
        except ValueError:
            return None
        if ALL not in self.labels:
            return values if all(map(math.isfinite, values)) else None
        return [float(sorted(values).index(value)) for value in values]


class Run(NamedTuple):
    """A finished run of a grid."""

    place: Place
    """Its label on each axis."""
    report: dict[str, Any]
    """Its report.json."""


class Entry(NamedTuple):
    """A metric at one place of a grid."""

    metric: Metric
    values: tuple[float, ...] = ()
    """One for each seed that has a value; fractions if the unit is %."""
    interval: float | None = None
    """Of a single seed: half the width of its 95 % confidence interval, if there is one."""
    diverged: bool = False
    """All runs at this place diverged."""

    @property
    def mean(self) -> float | None:
        """Over the seeds."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds (n − 1); None for fewer than two."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def half_width(self) -> float | None:
        """What follows the ±: the deviation over seeds, or the interval of a single seed."""
        return self.deviation if len(self.values) > 1 else self.interval


Found = Mapping[Metric, Mapping[Place, Entry]]
"""For each metric that is shown, the entries by place."""


def check_runs(axes: Sequence[Axis], runs: Iterable[Run]) -> None:
    """Check that every run is on the axes, and that no two have the same place and seed.

    Raises:
      ValueError: They are not.
    """
    seen = set()
    for place, report in runs:
        where = f"{', '.join(place)}, seed {report['seed']}"
        on_axes = len(place) == len(axes) and all(
            label in axis.labels for label, axis in zip(place, axes, strict=True)
        )
        if not on_axes:
            raise ValueError(f"the run {where} is not on the axes {axes}")
        if (place, report["seed"]) in seen:
            raise ValueError(f"two runs have the place {where}")
        seen.add((place, report["seed"]))


def drop_constant_axes(
    axes: Sequence[Axis], runs: Iterable[Run]
) -> tuple[list[Axis], list[Run], dict[str, str]]:
    """Remove the axes, except for the first, that have a single label.

    Returns:
      The axes that remain, the runs with their places on them, and the label of each axis removed.
    """
    kept = [i for i, axis in enumerate(axes) if i == 0 or len(axis.labels) > 1]
    removed = {axis.name: axis.labels[0] for i, axis in enumerate(axes) if i not in kept}
    shorter = [Run(tuple(run.place[i] for i in kept), run.report) for run in runs]
    return [axes[i] for i in kept], shorter, removed


def seeds_of(runs: Iterable[Run]) -> list[int]:
    """The seeds of the runs, in order."""
    return sorted({run.report["seed"] for run in runs})


def available_metrics(runs: Iterable[Run]) -> list[Metric]:
    """The metrics of the runs in order of appearance, then that of the validation.

    Returns:
      Metrics; the one that chose the checkpoint is named `VALIDATION`.

    Raises:
      ExperimentError: Runs give a metric another unit or direction.
    """
    found: dict[str, Metric] = {}
    validation: dict[str, Metric] = {}
    for run in runs:
        for name, value in _measured(run.report).items():
            metric = Metric(name, value["unit"], value["higher_is_better"])
            same = (validation if name == VALIDATION else found).setdefault(name, metric)
            if same != metric:
                raise ExperimentError(
                    f"runs do not agree on the unit or the direction of {name}: {same}, {metric}"
                )
    return [*found.values(), *validation.values()]


def select_metrics(runs: Sequence[Run], names: Sequence[str] = ()) -> list[Metric]:
    """The metrics of these names, in this order; all available ones if there is no name.

    A name that no run has gives a metric without values: runs that diverged have no metrics.
    """
    available = available_metrics(runs)
    by_name = {metric.name: metric for metric in available}
    return [by_name.get(name, Metric(name, "")) for name in names] if names else available


def entries(runs: Iterable[Run], metric: Metric) -> dict[Place, Entry]:
    """A metric at every place that has a run."""
    at_place: dict[Place, list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run.report["seed"]):
        at_place.setdefault(run.place, []).append(run.report)
    return {place: _entry(reports, metric) for place, reports in at_place.items()}


def _entry(reports: Sequence[dict[str, Any]], metric: Metric) -> Entry:
    found = [_measured(report).get(metric.name) for report in reports]
    known = [value for value in found if value and value["value"] is not None]
    return Entry(
        metric,
        tuple(value["value"] for value in known),
        known[0].get("interval") if len(known) == 1 else None,
        all("diverged" in report for report in reports),
    )


def _measured(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The values of a report by the name that a grid gives them; that of the validation last."""
    named = {value["name"]: value for value in report["metrics"]}
    validation = report.get("validation")
    return named | ({VALIDATION: validation} if validation else {})
