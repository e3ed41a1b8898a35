"""The runs of a grid as data frames: means over repetitions, paired differences, choices."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.stats

from experiments.contracts import Metric, PairMetrics
from experiments.errors import ExperimentError

ALL = "all"
"""The label of an option that takes everything available."""
VALIDATION = "validation"
"""The name, in a grid, of the metric that chose the checkpoint."""

Place = tuple[str, ...]
"""A label on each axis."""
Frame = Any
"""A pandas DataFrame, whose columns type checkers do not know."""


class Axis(NamedTuple):
    """What was varied, with a label for each combination of the values of some options."""

    name: str
    labels: tuple[str, ...]
    options: tuple[str, ...] = ()
    values: tuple[tuple[Any, ...], ...] = ()
    """The values of the options, label by label."""

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


class Comparison(NamedTuple):
    """How the runs of a grid are compared."""

    baseline: tuple[str, str] | None = None
    """Name and label of an axis; the table gets the differences of the other labels to it."""
    pairs_over: str = ""
    """Name of the axis whose labels are repetitions, or empty: seeds are."""
    choose: tuple[str, ...] = ()
    """Names of the axes of which validation chooses the labels, at every place by itself."""


class Grid(NamedTuple):
    """What tables and figures show of the runs."""

    axes: list[Axis]
    """The first axis, and the others that have several labels."""
    constant: dict[str, str]
    """The label of every other axis."""
    comparison: Comparison
    pooled: Axis | None
    """The axis whose labels are repetitions."""
    seeds: list[int]
    metrics: dict[str, Metric]
    """Those that are shown, by name."""
    means: Frame
    """As `_summary`."""
    differences: Frame
    """As `_summary`, of the differences to the baseline; empty if there is none."""
    choices: Frame
    """As `_choose`."""
    labels: dict[tuple[str, str], str]
    """For the name of an axis and a label: the protocol's label, where it tells them apart."""

    @property
    def repetitions(self) -> str:
        """What the repetitions are."""
        return f"values of {self.pooled.name}" if self.pooled else "seeds"

    @property
    def has_differences(self) -> bool:
        """Whether there is a baseline, and another label."""
        return not self.differences.empty


def make_grid(
    axes: Sequence[Axis],
    runs: Sequence[Run],
    metrics: Sequence[str] = (),
    *,
    comparison: Comparison | None = None,
    pair_metrics: PairMetrics | None = None,
    planned: Sequence[Place] | None = None,
) -> Grid:
    """Arranges runs; no two of them have the same place and seed.

    Args:
      axes: What was varied.
      runs: The finished runs.
      metrics: Names of those to show, in this order; by default all.
      comparison: How runs are compared.
      pair_metrics: What every run has in common with that of the baseline, if there is one.
      planned: The places of the grid; by default all combinations of labels.

    Raises:
      ExperimentError: Runs do not agree on the unit or the direction of a metric.
    """
    comparison = comparison or Comparison()
    baseline, pooled = comparison.baseline, comparison.pairs_over
    finished = {(*run.place, run.report["seed"]): run for run in runs}
    seeds = sorted({run.report["seed"] for run in runs})
    keys = [(*place, seed) for place in planned or places(axes) for seed in seeds]
    table: Frame = pd.DataFrame(keys, columns=[*(axis.name for axis in axes), "seed"])
    table["run"] = pd.Series([finished.get(key) for key in keys], dtype=object)
    table, choices = _choose(table, axes, comparison)
    if baseline and pair_metrics:
        table = _with_pair_metrics(table, baseline, pair_metrics)
    table = table[table["seed"].isin(table.dropna(subset="run")["seed"])]
    shown = [axis for axis in axes if axis.name not in (pooled, *comparison.choose)]
    varied = [shown[0], *(axis for axis in shown[1:] if len(axis.labels) > 1)]
    # Runs that diverged have no metrics; the table still says that they diverged.
    found = select_metrics(table["run"].dropna(), metrics) or [Metric("Result", "")]
    rows = [
        row | {"metric": metric.name, "value": value.get("value"), "own": value.get("interval")}
        for row in table.to_dict("records")
        for metric in found
        for value in [_measured(row["run"]).get(metric.name, {})]
    ]
    values: Frame = pd.DataFrame(rows).astype({"value": float, "own": float})
    compared = pd.DataFrame()
    if baseline:  # It has no pair metrics.
        left_out = pair_metrics.metrics if pair_metrics else ()
        others = [metric for metric in found if metric not in left_out]
        axes_left = without(varied, baseline)
        compared = _summary(_pairs(values, baseline), others, axes_left, pooled or "seed")
    return Grid(
        axes=varied,
        constant={axis.name: axis.labels[0] for axis in shown if axis not in varied},
        comparison=comparison,
        pooled=next((axis for axis in axes if axis.name == pooled), None),
        seeds=sorted(table["seed"].unique().tolist()),
        metrics={metric.name: metric for metric in found},
        means=_summary(values, found, varied, pooled or "seed"),
        differences=compared,
        choices=choices,
        labels=_protocol_labels(table, varied),
    )


def interval(values: Sequence[float] | np.ndarray) -> float:
    """Half the width of the 95 % confidence interval of the mean of n independent numbers.

    By Student's t with n − 1 degrees of freedom; NaN if n < 2.
    """
    if len(values) < 2:
        return math.nan
    quantile = float(scipy.stats.t.ppf(0.975, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def places(axes: Sequence[Axis]) -> list[Place]:
    """All combinations of labels."""
    return list(itertools.product(*(axis.labels for axis in axes)))


def without(axes: Sequence[Axis], baseline: tuple[str, str]) -> list[Axis]:
    """The axes without the label of the baseline."""
    return [
        axis._replace(labels=tuple(at for at in axis.labels if (axis.name, at) != baseline))
        for axis in axes
    ]


def select_metrics(runs: Iterable[Run], names: Sequence[str] = ()) -> list[Metric]:
    """The metrics of these names, in this order; by default all, the one named `VALIDATION` last.

    A name that no run has gives a metric without values: runs that diverged have no metrics.

    Raises:
      ExperimentError: Runs give a metric another unit or direction.
    """
    found: dict[str, Metric] = {}
    for run in runs:
        for name, value in _measured(run).items():
            metric = Metric(name, value["unit"], value["higher_is_better"])
            if (same := found.setdefault(name, metric)) != metric:
                raise ExperimentError(
                    f"runs do not agree on the unit or the direction of {name}: {same}, {metric}"
                )
    names = names or sorted(found, key=lambda name: name == VALIDATION)
    return [found.get(name, Metric(name, "")) for name in names]


def _measured(run: Run | None) -> dict[str, dict[str, Any]]:
    """The values of a report by the name that a grid gives them."""
    if run is None:
        return {}
    named = {value["name"]: value for value in run.report["metrics"]}
    return named | ({VALIDATION: run.report["validation"]} if run.report["validation"] else {})


def _summary(values: Frame, metrics: Sequence[Metric], axes: Sequence[Axis], unit: str) -> Frame:
    """A row for each metric and each place on `axes`.

    Args:
      values: For every metric and planned run, or pair of runs: its `value` and the half width of
        the interval over its episodes, `own`, both NaN where there is none; and the `run`.
      metrics, axes: The rows.
      unit: The column that tells repetitions apart. Runs of one repetition are averaged first.

    Returns:
      Over the repetitions that have a value: their `values` and number `n`, `mean`, `deviation`
      (n − 1) and the half width of the 95 % confidence interval, `interval`. Of runs: those with
      a value, `found`; all, `expected`; the mean of `own`; and `diverged`: all that are finished.
    """
    keys = ["metric", *(axis.name for axis in axes)]
    known, runs = values.dropna(subset="value"), values.groupby(keys)
    # Unlike pandas' own, these round once: printed digits do not depend on the order of sums.
    repetitions = known.groupby([*keys, unit], sort=False)["value"].agg(statistics.fmean)
    of_place = repetitions.groupby(keys)
    finished = values.dropna(subset="run")
    diverged = finished["run"].map(lambda run: "diverged" in run.report)
    columns = {
        "values": of_place.agg(list),
        "n": of_place.size(),
        "mean": of_place.agg(statistics.fmean),
        "deviation": of_place.agg(lambda of: statistics.stdev(of) if len(of) > 1 else math.nan),
        "interval": of_place.agg(interval),
        "found": runs["value"].count(),
        "expected": runs.size(),
        "own": runs["own"].mean(),
        "diverged": diverged.groupby([finished[key] for key in keys]).all(),
    }
    names = [metric.name for metric in metrics]
    index = pd.MultiIndex.from_product([names, *(axis.labels for axis in axes)], names=keys)
    frame: Frame = pd.DataFrame({name: column.reindex(index) for name, column in columns.items()})
    types = {"n": int, "found": int, "expected": int, "diverged": bool}
    return frame.fillna(dict.fromkeys(types, 0)).astype(types)


def _pairs(values: Frame, baseline: tuple[str, str]) -> Frame:
    """Every run minus the baseline's run at the same place and seed, metric by metric."""
    name, label = baseline
    is_baseline = values[name] == label
    theirs = values[is_baseline].drop(columns=[name, "own"])
    same = [column for column in theirs if column not in ("run", "value")]
    pairs = values[~is_baseline].merge(theirs, on=same, suffixes=("", "_baseline"))
    columns = (pairs[column] for column in ("run", "run_baseline", "metric"))
    own = [_episode_interval(*pair) for pair in zip(*columns, strict=True)]
    return pairs.assign(value=pairs["value"] - pairs["value_baseline"], own=own)


def _episode_interval(run: Run | None, baseline: Run | None, metric: str) -> float:
    """Of the differences in single episodes; NaN unless the episodes of both are the same."""
    if run is None or baseline is None:
        return math.nan
    pair = (run, baseline)
    ours, theirs = (np.asarray(each.episodes.get(metric, ()), float) for each in pair)
    lists, others = (
        {result["hash"] for result in each.report.get("results", ()) if "hash" in result}
        for each in pair
    )
    return interval(ours - theirs) if len(ours) == len(theirs) and lists == others else math.nan


def _with_pair_metrics(table: Frame, baseline: tuple[str, str], pair_metrics: PairMetrics) -> Frame:
    """The runs, with the metrics that each and the baseline's run of its place and seed give."""
    keys = [*table.columns.drop("run")]
    of_baseline = table[keys].assign(**{baseline[0]: baseline[1]}).merge(table, how="left")["run"]
    added = []
    for run, other, label in zip(table["run"], of_baseline, table[baseline[0]], strict=True):
        reports = [each.report for each in (run, other) if isinstance(each, Run)]
        measured = all(report["metrics"] for report in reports) and len(reports) == 2
        if measured and label != baseline[1]:
            metrics = [*reports[0]["metrics"], *pair_metrics.measure(*reports)]
            run = run._replace(report=reports[0] | {"metrics": metrics})
        added.append(run)
    return table.assign(run=pd.Series(added, index=table.index, dtype=object))


def _choose(table: Frame, axes: Sequence[Axis], comparison: Comparison) -> tuple[Frame, Frame]:
    """Keeps, at every place on the other axes, the labels with the best mean validation.

    The mean is over seeds, and over the labels of the pooled axis. Runs are compared only where
    all labels have finished ones, so that more seeds are no advantage. Labels of which fewer of
    these runs have a validation come last: a run that diverged is no advantage either.

    Returns:
      The runs that are kept, without the columns of the choice, and a row for every choice: the
      `place`, the chosen `label`, its mean `validation`, the numbers of its `compared` runs and of
      those of them with a validation, `found`, the number of `candidates`, and the `seeds`.
    """
    tried = list(comparison.choose)
    if not tried:
        return table, pd.DataFrame()
    repetition = [name for name in (comparison.pairs_over, "seed") if name]
    methods = [axis.name for axis in axes if axis.name not in (*tried, *repetition)]
    kept, choices = [], []
    for place, runs in table.groupby(methods, sort=False):
        # Labels without a run, which only some of the places have, are no candidates.
        finished = runs.dropna(subset="run")
        candidates = runs if finished.empty else finished
        labels = list(dict.fromkeys(candidates[tried].itertuples(index=False, name=None)))
        in_all = finished.groupby(repetition)["seed"].transform("size") == len(labels)
        compared = finished[in_all]
        validations: Any = pd.Series(
            [_measured(run).get(VALIDATION, {}).get("value") for run in compared["run"]],
            compared.index,
            dtype=float,
        )
        found: dict[Any, Any] = {
            label: validations[(compared[tried] == list(label)).all(axis=1)].dropna()
            for label in labels
        }
        label = max(found, key=lambda label: (found[label].size, found[label].mean()))
        choices.append(
            {
                "place": place,
                "label": label,
                "validation": found[label].mean(),
                "found": found[label].size,
                "compared": len(compared) // len(labels),
                "candidates": len(labels),
                "seeds": tuple(sorted(compared["seed"].unique().tolist())),
            }
        )
        kept.append(runs[(runs[tried] == list(label)).all(axis=1)])
    return pd.concat(kept).drop(columns=tried), pd.DataFrame(choices)


def _protocol_labels(table: Frame, axes: Sequence[Axis]) -> dict[tuple[str, str], str]:
    """The protocol's labels of an axis, if each of its labels has one, and no two the same."""
    runs = table.dropna(subset="run")
    texts = runs["run"].map(lambda run: str(run.report.get("label", "")))
    found: dict[tuple[str, str], str] = {}
    for axis in axes:
        own = texts.groupby(runs[axis.name]).agg(set)
        names = {str(at): name for at, of in own.items() if len(of) == 1 for name in of if name}
        if axis.numbers is None and len(set(names.values())) == len(axis.labels):
            found |= {(axis.name, label): name for label, name in names.items()}
    return found
