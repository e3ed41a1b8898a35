"""The runs of a grid as data frames: means over repetitions, paired differences, choices."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.stats

from experiments.core.protocol import Metric, PairMetrics, mean_and_interval

ALL = "all"  # The label of an option that takes everything available.
VALIDATION = "validation"  # The name, in a grid, of the metric that chose the checkpoint.

Place = tuple[str, ...]  # A label on each axis.
Frame = Any  # A pandas DataFrame, whose columns type checkers do not know.


class Axis(NamedTuple):
    """What was varied."""

    name: str
    labels: tuple[str, ...]
    settings: tuple[Mapping[str, Any], ...] = ()  # For each label, values by option.


class GridRun(NamedTuple):
    """A finished run of a grid: its place, its report.json and its episodes.npz."""

    place: Place
    report: dict[str, Any]
    episodes: Mapping[str, Sequence[float] | np.ndarray] = {}
    """For each metric that is a mean over episodes, its value in every episode."""

    @property
    def measured(self) -> dict[str, dict[str, Any]]:
        """The values of its report by the name that a grid gives them."""
        named = {value["name"]: value for value in self.report["metrics"]}
        validation = self.report["validation"]
        return named | {VALIDATION: validation} if validation else named


class Comparison(NamedTuple):
    """How the runs of a grid are compared."""

    baseline: tuple[str, str] | None = None
    """Name and label of an axis; the table gets the differences of the other labels to it."""
    pairs_over: str = ""
    """Name of the axis whose labels are repetitions, or empty: seeds are."""
    choose: str = ""
    """Name of the axis whose label validation chooses, at every place by itself; or empty."""


class Grid(NamedTuple):
    """What tables and figures show of the runs."""

    axes: list[Axis]
    """The first axis, and the others that have several labels."""
    comparison: Comparison
    metrics: dict[str, Metric]  # Those that are shown, by name.
    means: Frame  # As `_summary`.
    differences: Frame
    """As `_summary`, of the differences to the baseline; empty if there is none."""
    choices: dict[Place, str]  # For each place on the axes that are left, the chosen label.
    repeated: str  # What the repetitions are, with their values.
    notes: list[str]  # The labels that all runs have, and those that were chosen.


def make_grid(
    axes: Sequence[Axis],
    runs: Sequence[GridRun],
    metrics: Sequence[str] = (),
    *,
    comparison: Comparison | None = None,
    pair_metrics: PairMetrics | None = None,
) -> Grid:
    """Arranges the finished runs, of which no two have the same place and seed.

    `metrics` are the names of those to show, in this order; by default all, `VALIDATION` last. One
    that no run has is shown without values. `pair_metrics` are what every run has in common with
    that of the baseline, if there is one.
    """
    comparison = comparison or Comparison()
    (baseline, pairs_over, choose), choices, notes = comparison, {}, []
    unit, pair_metrics = pairs_over or "seed", pair_metrics if baseline else None
    if choose:
        runs, choices = _choose(axes, runs, comparison)
        axes = [axis for axis in axes if axis.name != choose]
        chosen = "; ".join(f"{', '.join(place)}: {label}" for place, label in choices.items())
        notes = [f"{choose}: the best mean validation. {chosen}."]
    if any("data.subset_seed" in axis.name.split("/") for axis in axes):
        notes += ["Subsets of data.subset_seed overlap: intervals over them are not over new data."]
    of_pair = {metric.name: metric for metric in pair_metrics.metrics} if pair_metrics else {}
    measured = [item for run in runs for item in run.measured.items()]
    known = {name: Metric(name, of["unit"], of["higher_is_better"]) for name, of in measured}
    known |= of_pair
    # Runs that diverged have no metrics; the table still says that they diverged.
    metrics = [*dict.fromkeys(metrics)] or sorted(known, key=VALIDATION.__eq__) or ["Result"]
    shown = [axis for axis in axes if axis.name != unit]
    varied = [shown[0], *(axis for axis in shown[1:] if len(axis.labels) > 1)]
    constant = [axis for axis in shown if axis not in varied]
    seeds = sorted({run.report["seed"] for run in runs})
    repeated = f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds))}"
    for axis in axes:
        if axis.name == unit:
            repeated = f"{unit} {', '.join(axis.labels)}, each a mean of {repeated}"
    values = _values(axes, runs, seeds, metrics, baseline, pair_metrics)
    compared = values[values[baseline[0]] != baseline[1]] if baseline else values[:0]
    # The baseline has no metrics of a pair.
    compared = compared[~compared["metric"].isin([*of_pair])]
    keys = ["metric", *(axis.name for axis in varied)]
    return Grid(
        axes=varied,
        comparison=comparison,
        metrics={name: known.get(name, Metric(name, "")) for name in metrics},
        means=_summary(values, keys, unit, "value", "interval"),
        differences=_summary(compared, keys, unit, "difference", "own_difference"),
        choices=choices,
        repeated=repeated,
        notes=[*(f"{axis.name}: {axis.labels[0]} in all runs." for axis in constant), *notes],
    )


def _choose(
    axes: Sequence[Axis], runs: Sequence[GridRun], comparison: Comparison
) -> tuple[list[GridRun], dict[Place, str]]:
    """Keeps, at every place on the other axes, the runs of the label with the best mean validation.

    Labels of which more runs diverged come last. Places lose the axis of the choice.
    """
    names, choose = [axis.name for axis in axes], comparison.choose
    table: Frame = pd.DataFrame([run.place for run in runs], columns=names)
    table["validation"] = [run.measured.get(VALIDATION, {}).get("value") for run in runs]
    rest = [name for name in names if name not in (choose, comparison.pairs_over)]
    kept, choices, column = [], {}, names.index(choose)
    for place, found in table.groupby(rest, sort=False):
        known = found.groupby(choose, sort=False)["validation"].agg(["count", "mean"])
        label = known.sort_values(["count", "mean"], ascending=False, kind="stable").index[0]
        choices[place] = label if known["count"].any() else "none"
        kept += [runs[number] for number in found.index[found[choose] == label]]
    return [r._replace(place=r.place[:column] + r.place[column + 1 :]) for r in kept], choices


def _values(
    axes: Sequence[Axis],
    runs: Sequence[GridRun],
    seeds: Sequence[int],
    metrics: Sequence[str],
    baseline: tuple[str, str] | None,
    pair_metrics: PairMetrics | None,
) -> Frame:
    """A row for every metric, place and seed, whether it has been run or not.

    The other columns are the `value`, its `interval` over episodes, whether the run `diverged`, and
    `difference` and `own_difference`, the same of the pair with the run of the baseline.
    """
    names, rows = [*(axis.name for axis in axes), "seed"], []
    finished: dict[tuple[Any, ...], GridRun] = {(*r.place, r.report["seed"]): r for r in runs}
    for key in itertools.product(*(axis.labels for axis in axes), seeds):
        at, run, other = dict(zip(names, key, strict=True)), finished.get(key), None
        if baseline and run and at[baseline[0]] != baseline[1]:
            other = finished.get(tuple((at | dict([baseline])).values()))
        measured, of_baseline = run.measured if run else {}, other.measured if other else {}
        if pair_metrics and run and other and measured and of_baseline:
            of_pair = pair_metrics.measure(run.report, other.report)
            measured |= {value["name"]: value for value in of_pair}
        for name in metrics:
            own, theirs = measured.get(name, {}), of_baseline.get(name, {})
            value, base = own.get("value"), theirs.get("value")
            row: dict[str, Any] = {
                **at,
                "metric": name,
                "value": value,
                "interval": own.get("interval"),
                "diverged": "diverged" in run.report if run else None,
                "difference": None if value is None or base is None else value - base,
                "own_difference": _episode_interval(run, other, name) if run and other else None,
            }
            rows.append(row)
    columns = ["value", "interval", "diverged", "difference", "own_difference"]
    frame: Frame = pd.DataFrame(rows, columns=[*names, "metric", *columns])
    order = pd.Categorical(frame["metric"], metrics)
    return frame.astype(dict.fromkeys(columns, float)).iloc[np.argsort(order.codes, kind="stable")]


def _episode_interval(run: GridRun, baseline: GridRun, metric: str) -> float | None:
    """Of the differences in single episodes; None unless the episodes of both are the same."""
    ours, theirs = (np.asarray(of.episodes.get(metric, ()), float) for of in (run, baseline))
    lists, others = (
        {result.get("hash") for result in of.report.get("results", ())} for of in (run, baseline)
    )
    same = len(ours) == len(theirs) > 0 and lists == others
    return mean_and_interval(ours - theirs)[1] if same else None


def _summary(values: Frame, keys: list[str], unit: str, of: str, own: str) -> Frame:
    """A row for each of the `keys`, a metric and a place, in the order of the rows of `_values`.

    Runs of one repetition, which the column `unit` tells apart, are averaged first. Over the
    repetitions that have a value: their `values` and number `n`, `mean`, `deviation` (n − 1) and
    half the width of the 95 % confidence interval by Student's t, `interval`. Of runs: those with a
    value, `found`; all, `expected`; the mean of their intervals over episodes, `own`; and
    `diverged`: all that are finished.
    """
    runs = values.groupby(keys, sort=False).agg(
        found=(of, "count"), expected=(of, "size"), own=(own, "mean"), diverged=("diverged", "min")
    )

    def deviation(values: Frame) -> float:
        return statistics.stdev(values) if len(values) > 1 else math.nan

    # Unlike pandas' own, these round once: printed digits do not depend on the order of sums.
    mean, known = statistics.fmean, values.dropna(subset=of)
    known = known.groupby([*keys, unit], sort=False)[of].agg(mean).groupby(keys, sort=False)
    repetitions = known.agg(values=list, n="size", mean=mean, deviation=deviation)
    quantile = scipy.stats.t.ppf(0.975, repetitions["n"] - 1)
    repetitions["interval"] = quantile * repetitions["deviation"] / np.sqrt(repetitions["n"])
    frame: Frame = runs.join(repetitions)
    return frame.fillna({"n": 0, "diverged": 0}).astype({"n": int, "diverged": bool})
