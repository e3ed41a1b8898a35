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

from experiments.contracts import Metric, PairMetrics, mean_and_interval

ALL = "all"
"""The label of an option that takes everything available."""
VALIDATION = "validation"
"""The name, in a grid, of the metric that chose the checkpoint."""

Place = tuple[str, ...]
"""A label on each axis."""
Frame = Any
"""A pandas DataFrame, whose columns type checkers do not know."""


class Axis(NamedTuple):
    """What was varied."""

    name: str
    labels: tuple[str, ...]
    settings: tuple[Mapping[str, Any], ...] = ()
    """For each label, values by option."""

    @property
    def numbers(self) -> list[float] | None:
        """Positions of the labels if they are numbers; with `all`, which is last, their ranks."""
        try:
            values = [math.inf if label == ALL else float(label) for label in self.labels]
        except ValueError:
            return None
        return [float(sorted(values).index(at)) for at in values] if ALL in self.labels else values


class Run(NamedTuple):
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
    choose: tuple[str, ...] = ()
    """Names of the axes of which validation chooses the labels, at every place by itself."""


class Grid(NamedTuple):
    """What tables and figures show of the runs."""

    axes: list[Axis]
    """The first axis, and the others that have several labels."""
    compared: list[Axis]
    """The same without the label of the baseline."""
    constant: dict[str, str]
    """The label of every other axis."""
    comparison: Comparison
    repeated: str
    """What the repetitions are, with their values."""
    metrics: dict[str, Metric]
    """Those that are shown, by name."""
    means: Frame
    """As `_summary`."""
    differences: Frame
    """As `_summary`, of the differences to the baseline; empty if there is none."""
    choices: list[dict[str, Any]]
    """For each `place` on the axes that are left, the chosen `label`."""
    labels: dict[tuple[str, str], str]
    """For the name of an axis and a label: the protocol's label, where it tells them apart."""

    def shown(self, axis: str, label: str) -> str:
        """The label of an axis, as figures show it."""
        return self.labels.get((axis, label), label)


def make_grid(
    axes: Sequence[Axis],
    runs: Sequence[Run],
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
    baseline, unit = comparison.baseline, comparison.pairs_over or "seed"
    runs, choices = _choose(axes, runs, comparison)
    axes = [axis for axis in axes if axis.name not in comparison.choose]
    found = {
        name: Metric(name, value["unit"], value["higher_is_better"])
        for run in runs
        for name, value in run.measured.items()
    }
    of_pair = {metric.name: metric for metric in (pair_metrics.metrics if pair_metrics else ())}
    found |= of_pair if baseline else {}
    # Runs that diverged have no metrics; the table still says that they diverged.
    metrics = [*dict.fromkeys(metrics)] or sorted(found, key=lambda name: name == VALIDATION)
    metrics = metrics or ["Result"]
    values = _values(axes, runs, metrics, baseline, pair_metrics)
    shown = [axis for axis in axes if axis.name != unit]
    varied = [shown[0], *(axis for axis in shown[1:] if len(axis.labels) > 1)]
    compared = [
        axis._replace(labels=tuple(at for at in axis.labels if (axis.name, at) != baseline))
        for axis in varied
    ]
    own = [name for name in metrics if name not in of_pair]
    pairs = values.assign(value=values["difference"], own=values["own_difference"])
    seeds = sorted({run.report["seed"] for run in runs})
    repeated = f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds))}"
    if pooled := [axis for axis in axes if axis.name == unit]:
        repeated = f"{unit} {', '.join(pooled[0].labels)}, each a mean of {repeated}"
    return Grid(
        axes=varied,
        compared=compared,
        constant={axis.name: axis.labels[0] for axis in shown if axis not in varied},
        comparison=comparison,
        repeated=repeated,
        metrics={name: found.get(name, Metric(name, "")) for name in metrics},
        means=_summary(values, metrics, varied, unit),
        differences=_summary(pairs, own, compared, unit) if baseline else pd.DataFrame(),
        choices=choices,
        labels=_protocol_labels(axes, runs),
    )


def deviation(values: Sequence[float] | np.ndarray) -> float:
    """The standard deviation of n numbers, with n − 1 degrees of freedom; NaN if n < 2."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def interval(values: Sequence[float] | np.ndarray) -> float:
    """Half the width of the 95 % confidence interval of the mean of n repetitions, as of seeds.

    By Student's t with n − 1 degrees of freedom; NaN if n < 2.
    """
    quantile = float(scipy.stats.t.ppf(0.975, len(values) - 1))
    return quantile * deviation(values) / math.sqrt(len(values))


def places(axes: Sequence[Axis]) -> list[Place]:
    """All combinations of labels."""
    return list(itertools.product(*(axis.labels for axis in axes)))


def _choose(
    axes: Sequence[Axis], runs: Sequence[Run], comparison: Comparison
) -> tuple[Sequence[Run], list[dict[str, Any]]]:
    """Keeps, at every place on the other axes, the runs of the label with the best validation.

    Its mean is over the repetitions that are finished with all labels, so that more seeds are no
    advantage. Labels of which more of these runs diverged come last. Places lose the axes of the
    choice.
    """
    tried, names = [*comparison.choose], [axis.name for axis in axes]
    if not tried:
        return runs, []
    table: Frame = pd.DataFrame([run.place for run in runs], columns=names).assign(
        seed=[run.report["seed"] for run in runs],
        run=pd.Series([*runs], dtype=object),
        validation=[run.measured.get(VALIDATION, {}).get("value", -math.inf) for run in runs],
    )
    table["label"] = table[tried].agg(", ".join, axis=1)
    rest = [name for name in names if name not in tried]
    repetition = [name for name in (*rest, "seed") if name in (comparison.pairs_over, "seed")]
    kept, choices = [], []
    for place, found in table.groupby([n for n in rest if n not in repetition], sort=False):
        compared = found.pivot(index=repetition, columns="label", values="validation").dropna()
        known = compared.where(compared > -math.inf).agg(["count", "mean"]).T
        label = known.sort_values(["count", "mean"], ascending=False, kind="stable").index[0]
        choices.append({"place": place, "label": label if known["count"].any() else "none"})
        of_label = found[found["label"] == label]
        at_places = of_label[rest].itertuples(index=False, name=None)
        kept += [run._replace(place=at) for run, at in zip(of_label["run"], at_places, strict=True)]
    return kept, choices


def _values(
    axes: Sequence[Axis],
    runs: Sequence[Run],
    metrics: Iterable[str],
    baseline: tuple[str, str] | None,
    pair_metrics: PairMetrics | None,
) -> Frame:
    """A row for every place, seed and metric, whether it has been run or not.

    The columns are the `value`, its `own` interval over episodes, whether the run `diverged`, and
    `difference` and `own_difference`, the same of the pair with the run of the baseline.
    """
    names = [*(axis.name for axis in axes), "seed"]
    finished: dict[tuple[Any, ...], Run] = {(*r.place, r.report["seed"]): r for r in runs}
    rows = []
    for place, run in finished.items():
        row, other = dict(zip(names, place, strict=True)), None
        if baseline and row[baseline[0]] != baseline[1]:
            other = finished.get(tuple((row | dict([baseline])).values()))
        ours, theirs = run.measured, other.measured if other else {}
        if pair_metrics and other and ours and theirs:
            of_pair = pair_metrics.measure(run.report, other.report)
            ours |= {value["name"]: value for value in of_pair}
        row["diverged"] = "diverged" in run.report
        for name in metrics:
            value, of_baseline = ours.get(name, {}), theirs.get(name, {})
            found = {key: value.get(of) for key, of in (("value", "value"), ("own", "interval"))}
            own_difference = _episode_interval(run, other, name) if other else None
            found |= {"baseline": of_baseline.get("value"), "own_difference": own_difference}
            rows.append(row | {"metric": name} | found)
    every = [*(axis.labels for axis in axes), sorted({key[-1] for key in finished}), metrics]
    index = pd.MultiIndex.from_product(every, names=[*names, "metric"])
    frame: Frame = pd.DataFrame(rows).set_index(index.names).astype(float).reindex(index)
    return frame.assign(difference=frame["value"] - frame["baseline"])


def _episode_interval(run: Run, baseline: Run, metric: str) -> float:
    """Of the differences in single episodes; NaN unless the episodes of both are the same."""
    ours, theirs = (np.asarray(of.episodes.get(metric, ()), float) for of in (run, baseline))
    lists, others = (
        {result.get("hash") for result in of.report.get("results", ())} for of in (run, baseline)
    )
    same = len(ours) == len(theirs) > 0 and lists == others
    return mean_and_interval(ours - theirs)[1] if same else math.nan


def _summary(values: Frame, metrics: Iterable[str], axes: Sequence[Axis], unit: str) -> Frame:
    """A row for each metric and each place on `axes`, of `_values`.

    Runs of one repetition, which the column `unit` tells apart, are averaged first. Over the
    repetitions that have a value: their `values` and number `n`, `mean`, `deviation` (n − 1) and
    the half width of the 95 % confidence interval, `interval`. Of runs: those with a value,
    `found`; all, `expected`; the mean of `own`; and `diverged`: all that are finished.
    """
    keys = ["metric", *(axis.name for axis in axes)]
    index = pd.MultiIndex.from_product([metrics, *(axis.labels for axis in axes)], names=keys)
    runs = values.groupby(keys).agg(
        found=("value", "count"),
        expected=("value", "size"),
        own=("own", "mean"),
        diverged=("diverged", "min"),
    )
    # Unlike pandas' own, these round once: printed digits do not depend on the order of sums.
    known = values.dropna(subset="value").groupby([*keys, unit], sort=False)["value"]
    over = known.agg(statistics.fmean).groupby(keys)
    repetitions = over.agg(
        values=list, n="size", mean=statistics.fmean, interval=interval, deviation=deviation
    )
    frame: Frame = runs.join(repetitions).reindex(index)
    return frame.fillna({"n": 0, "diverged": 0}).astype({"n": int, "diverged": bool})


def _protocol_labels(axes: Sequence[Axis], runs: Sequence[Run]) -> dict[tuple[str, str], str]:
    """The protocol's labels of an axis, if each of its labels has one, and no two the same."""
    found: dict[tuple[str, str], str] = {}
    for number, axis in enumerate(axes):
        pairs = {(run.place[number], run.report.get("label", "")) for run in runs}
        names = {name for _, name in pairs if name}
        if axis.numbers is None and len(pairs) == len(names) == len(axis.labels):
            found |= {(axis.name, at): name for at, name in pairs}
    return found
