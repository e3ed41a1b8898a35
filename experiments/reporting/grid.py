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

ALL = "all"
"""The label of an option that takes everything available."""
VALIDATION = "validation"
"""The name, in a grid, of the metric that chose the checkpoint."""

_FORMS = {"True": "stopped", "False": "as\N{NO-BREAK SPACE}written"}
"""What results call the forms of a direct sum: the values of `stop_gradient`."""

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
    choose: str = ""
    """Name of the axis whose label validation chooses, at every place by itself; or empty."""


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
    choices: dict[Place, str]
    """For each place on the axes that are left, the chosen label."""
    figure_labels: dict[tuple[str, str], str]
    """For the name of an axis and a label: the text that figures show in its place."""

    def shown(self, axis: str, label: str) -> str:
        """The label of an axis, as figures show it."""
        return self.figure_labels.get((axis, label), label)


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
    runs, choices = _choose(axes, runs, comparison) if comparison.choose else (runs, {})
    axes = [axis for axis in axes if axis.name != comparison.choose]
    of_pair = {m.name: m for m in pair_metrics.metrics} if baseline and pair_metrics else {}
    measured = [item for run in runs for item in run.measured.items()]
    known = {name: Metric(name, of["unit"], of["higher_is_better"]) for name, of in measured}
    known |= of_pair
    # Runs that diverged have no metrics; the table still says that they diverged.
    metrics = [*dict.fromkeys(metrics)] or sorted(known, key=VALIDATION.__eq__) or ["Result"]
    shown = [axis for axis in axes if axis.name != unit]
    varied = [shown[0], *(axis for axis in shown[1:] if len(axis.labels) > 1)]
    compared = [
        axis._replace(labels=tuple(at for at in axis.labels if (axis.name, at) != baseline))
        for axis in varied
    ]
    values = _values(axes, runs, metrics, baseline, pair_metrics)
    pairs = values.assign(value=values["difference"], interval=values["own_difference"])
    # The baseline has no metrics of a pair.
    of_run = [name for name in metrics if name not in of_pair] if baseline else []
    seeds = sorted({run.report["seed"] for run in runs})
    repeated = f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds))}"
    for pooled in (axis for axis in axes if axis.name == unit):
        repeated = f"{unit} {', '.join(pooled.labels)}, each a mean of {repeated}"
    return Grid(
        axes=varied,
        compared=compared,
        constant={axis.name: axis.labels[0] for axis in shown if axis not in varied},
        comparison=comparison,
        repeated=repeated,
        metrics={name: known.get(name, Metric(name, "")) for name in metrics},
        means=_summary(values, metrics, varied, unit),
        differences=_summary(pairs, of_run, compared, unit),
        choices=choices,
        figure_labels=_figure_labels(axes, runs),
    )


def places(axes: Sequence[Axis]) -> list[Place]:
    """All combinations of labels."""
    return list(itertools.product(*(axis.labels for axis in axes)))


def _choose(
    axes: Sequence[Axis], runs: Sequence[Run], comparison: Comparison
) -> tuple[list[Run], dict[Place, str]]:
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
    runs: Sequence[Run],
    metrics: Sequence[str],
    baseline: tuple[str, str] | None,
    pair_metrics: PairMetrics | None,
) -> Frame:
    """A row for every place, seed and metric, whether it has been run or not.

    The columns are the `value`, its `interval` over episodes, whether the run `diverged`, and
    `difference` and `own_difference`, the same of the pair with the run of the baseline.
    """
    names = [*(axis.name for axis in axes), "seed"]
    finished: dict[tuple[Any, ...], Run] = {(*r.place, r.report["seed"]): r for r in runs}
    rows = []
    for place, run in finished.items():
        at, measured, other = dict(zip(names, place, strict=True)), run.measured, None
        if baseline and at[baseline[0]] != baseline[1]:
            other = finished.get(tuple((at | dict([baseline])).values()))
        if pair_metrics and other and measured and other.measured:
            of_pair = pair_metrics.measure(run.report, other.report)
            measured |= {value["name"]: value for value in of_pair}
        at["diverged"] = "diverged" in run.report
        for name in metrics:
            own_difference = _episode_interval(run, other, name) if other else math.nan
            row = at | {"metric": name, "own_difference": own_difference}
            rows.append(measured.get(name, {}) | row)
    every = [*(axis.labels for axis in axes), sorted({key[-1] for key in finished}), metrics]
    index = pd.MultiIndex.from_product(every, names=[*names, "metric"])
    columns = [*index.names, "value", "interval", "diverged", "own_difference"]
    frame: Frame = pd.DataFrame(rows, columns=columns).set_index(index.names).astype(float)
    value = frame["value"].reindex(index)
    of_baseline = value.xs(baseline[1], level=baseline[0]) if baseline else value
    return frame.reindex(index).assign(difference=value - of_baseline)


def _episode_interval(run: Run, baseline: Run, metric: str) -> float:
    """Of the differences in single episodes; NaN unless the episodes of both are the same."""
    ours, theirs = (np.asarray(of.episodes.get(metric, ()), float) for of in (run, baseline))
    lists, others = (
        {result.get("hash") for result in of.report.get("results", ())} for of in (run, baseline)
    )
    same = len(ours) == len(theirs) > 0 and lists == others
    return mean_and_interval(ours - theirs)[1] if same else math.nan


def _summary(values: Frame, metrics: Sequence[str], axes: Sequence[Axis], unit: str) -> Frame:
    """A row for each metric and each place on `axes`, of `_values`.

    Runs of one repetition, which the column `unit` tells apart, are averaged first. Over the
    repetitions that have a value: their `values` and number `n`, `mean`, `deviation` (n − 1) and
    half the width of the 95 % confidence interval by Student's t, `interval`. Of runs: those with a
    value, `found`; all, `expected`; the mean of their intervals over episodes, `own`; and
    `diverged`: all that are finished.
    """
    keys = ["metric", *(axis.name for axis in axes)]
    index = pd.MultiIndex.from_product([metrics, *(axis.labels for axis in axes)], names=keys)
    runs = values.groupby(keys).agg(
        found=("value", "count"),
        expected=("value", "size"),
        own=("interval", "mean"),
        diverged=("diverged", "min"),
    )

    def deviation(values: Frame) -> float:
        return statistics.stdev(values) if len(values) > 1 else math.nan

    # Unlike pandas' own, these round once: printed digits do not depend on the order of sums.
    mean = statistics.fmean
    known = values["value"].dropna().groupby([*keys, unit], sort=False).agg(mean).groupby(keys)
    repetitions = known.agg(values=list, n="size", mean=mean, deviation=deviation)
    quantile = scipy.stats.t.ppf(0.975, repetitions["n"] - 1)
    repetitions["interval"] = quantile * repetitions["deviation"] / np.sqrt(repetitions["n"])
    frame: Frame = runs.join(repetitions).reindex(index)
    return frame.fillna({"n": 0, "diverged": 0}).astype({"n": int, "diverged": bool})


def short_name(axis: str) -> str:
    """The first option of an axis, without its sections: `loss.name/loss.scale` is `loss`."""
    return axis.partition("/")[0].removesuffix(".name").rpartition(".")[2].replace("_", " ")


def _figure_labels(axes: Sequence[Axis], runs: Sequence[Run]) -> dict[tuple[str, str], str]:
    """What figures show in the place of labels.

    A loss has the label of its protocol, if every loss has one. On an axis of several options,
    those that tell positions with the same loss, or the same first option, apart follow: so
    `direct:sce+nca/True/0.1` can be `SCE⊕NCA, stopped, temperature=0.1`.
    """
    found = {}
    for number, axis in enumerate(axes):
        if axis.numbers is not None:
            continue
        options = axis.name.split("/")
        parts = {label: label.split("/", len(options) - 1) for label in axis.labels}
        names = {label: values[0] for label, values in parts.items()}
        if len(options) == 1 or axis.name.startswith("loss."):
            pairs = {(run.place[number], run.report.get("label")) for run in runs}
            of_protocol = {label: name for label, name in pairs if name}
            different = len({*of_protocol.values()}) == len(names) or len(options) > 1
            if len(pairs) == len(of_protocol) == len(names) and different:
                names = of_protocol
        shown = {}
        for label, values in parts.items():
            alike = [parts[at] for at, name in names.items() if name == names[label]]
            settings = [
                _setting(option, value)
                for option, value, *others in zip(options, values, *alike, strict=True)
                if len({*others}) > 1
            ]
            shown[label] = ", ".join([names[label], *filter(None, settings)])
        if len({*shown.values()}) == len(shown):
            found |= {(axis.name, label): text for label, text in shown.items()}
    return found


def _setting(option: str, value: str) -> str:
    """A true option has its name alone, a false one none. Lines do not break within a setting."""
    if option.endswith("stop_gradient") and value in _FORMS:
        return _FORMS[value]
    name = short_name(option).replace(" ", "\N{NO-BREAK SPACE}")
    return {"True": name, "False": ""}.get(value, f"{name}={value}")
