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
    repeated: str
    """What the repetitions are, with their values."""
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
        over = self.comparison.pairs_over
        return f"values of {over}" if over else "seeds"


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
      metrics: Names of those to show, in this order; by default all, `VALIDATION` last. One that
        no run has is shown without values.
      comparison: How runs are compared.
      pair_metrics: What every run has in common with that of the baseline, if there is one.
      planned: The places of the grid; by default all combinations of labels.

    Raises:
      ExperimentError: Runs do not agree on the unit or the direction of a metric.
    """
    comparison = comparison or Comparison()
    baseline, unit = comparison.baseline, comparison.pairs_over or "seed"
    finished = {(*run.place, run.report["seed"]): run for run in runs}
    seeds = sorted({run.report["seed"] for run in runs})
    keys = [(*place, seed) for place in planned or places(axes) for seed in seeds]
    table: Frame = pd.DataFrame(keys, columns=[*(axis.name for axis in axes), "seed"])
    table["run"] = pd.Series([finished.get(key) for key in keys], dtype=object)
    table, choices = _choose(table, axes, comparison)
    table = table[table["seed"].isin(table.dropna(subset="run")["seed"])]
    shown = [axis for axis in axes if axis.name not in (unit, *comparison.choose)]
    varied = [shown[0], *(axis for axis in shown[1:] if len(axis.labels) > 1)]
    values, found = _long(table, metrics, baseline, pair_metrics)
    compared = pd.DataFrame()
    if baseline:
        pairs = values[values["paired"]].drop(columns=["value", "own"])
        pairs = pairs.rename(columns={"difference": "value", "own_difference": "own"})
        compared = _summary(pairs, pairs["metric"].unique(), without(varied, baseline), unit)
    repeated = seed_text(sorted(table["seed"].unique().tolist()))
    if pooled := next((axis for axis in axes if axis.name == comparison.pairs_over), None):
        repeated = f"{unit} {', '.join(pooled.labels)}, each a mean of {repeated}"
    return Grid(
        axes=varied,
        constant={axis.name: axis.labels[0] for axis in shown if axis not in varied},
        comparison=comparison,
        repeated=repeated,
        metrics=found,
        means=_summary(values, list(found), varied, unit),
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


def seed_text(seeds: Sequence[int]) -> str:
    """Seeds in words: `seeds 0, 1`."""
    return f"seed{'s' * (len(seeds) != 1)} {', '.join(map(str, seeds)) or 'none'}"


def _measured(run: Run | None) -> dict[str, dict[str, Any]]:
    """The values of a report by the name that a grid gives them."""
    if run is None:
        return {}
    named = {value["name"]: value for value in run.report["metrics"]}
    return named | ({VALIDATION: run.report["validation"]} if run.report["validation"] else {})


def _long(
    table: Frame,
    names: Sequence[str],
    baseline: tuple[str, str] | None,
    pair_metrics: PairMetrics | None,
) -> tuple[Frame, dict[str, Metric]]:
    """A row for every planned run and metric, and the metrics.

    Of the rows that are `paired` with the baseline's run at the same place and seed, `difference`
    and `own_difference` are what `value` and `own`, the interval over its episodes, are of a run.
    """
    records, keys = table.to_dict("records"), [*table.columns.drop("run")]
    at = {tuple(row[key] for key in keys): row["run"] for row in records}
    name, label = baseline or ("", "")
    pairs, found = [], {}
    for row in records:
        place, run = tuple(label if key == name else row[key] for key in keys), row["run"]
        row["paired"] = row.get(name, label) != label and place in at
        row["diverged"] = run and "diverged" in run.report
        other: Any = at[place] if row["paired"] else None
        ours, theirs = _measured(run), _measured(other)
        if pair_metrics and ours and theirs:
            of_pair = pair_metrics.measure(run.report, other.report)
            ours |= {value["name"]: value for value in of_pair}
        pairs.append((run, other, ours, theirs))
        for key, value in ours.items():
            metric = Metric(key, value["unit"], value["higher_is_better"])
            if (known := found.setdefault(key, metric)) != metric:
                raise ExperimentError(f"runs disagree on a unit or direction: {known}, {metric}")
    # Runs that diverged have no metrics; the table still says that they diverged.
    names = names or sorted(found, key=lambda key: key == VALIDATION) or ["Result"]
    without_difference = [metric.name for metric in pair_metrics.metrics] if pair_metrics else []
    rows = []
    for row, (run, other, ours, theirs) in zip(records, pairs, strict=True):
        for name in names:
            value, of_baseline = ours.get(name, {}), theirs.get(name, {})
            rows.append(
                row
                | {
                    "metric": name,
                    "value": value.get("value"),
                    "own": value.get("interval"),
                    "baseline": of_baseline.get("value"),
                    "own_difference": _episode_interval(run, other, name),
                    "paired": row["paired"] and name not in without_difference,
                }
            )
    numbers = ("value", "own", "diverged", "baseline", "own_difference")
    frame: Frame = pd.DataFrame(rows).astype(dict.fromkeys(numbers, float))
    frame["difference"] = frame["value"] - frame["baseline"]
    return frame, {name: found.get(name, Metric(name, "")) for name in names}


def _episode_interval(run: Run | None, baseline: Run | None, metric: str) -> float:
    """Of the differences in single episodes; NaN unless the episodes of both are the same."""
    if run is None or baseline is None:
        return math.nan
    ours, theirs = (np.asarray(r.episodes.get(metric, ()), float) for r in (run, baseline))
    lists, others = (
        {result.get("hash") for result in r.report.get("results", ())} for r in (run, baseline)
    )
    return interval(ours - theirs) if len(ours) == len(theirs) and lists == others else math.nan


def _summary(values: Frame, metrics: Sequence[str], axes: Sequence[Axis], unit: str) -> Frame:
    """A row for each metric and each place on `axes`.

    Args:
      values: As `_long`.
      metrics, axes: The rows.
      unit: The column that tells repetitions apart. Runs of one repetition are averaged first.

    Returns:
      Over the repetitions that have a value: their `values` and number `n`, `mean`, `deviation`
      (n − 1) and the half width of the 95 % confidence interval, `interval`. Of runs: those with
      a value, `found`; all, `expected`; the mean of `own`; and `diverged`: all that are finished.
    """
    keys = ["metric", *(axis.name for axis in axes)]
    # Unlike pandas' own, these round once: printed digits do not depend on the order of sums.
    known = values.dropna(subset="value").groupby([*keys, unit], sort=False)["value"]
    over = known.agg(statistics.fmean).groupby(keys)
    runs = values.groupby(keys)
    columns = {
        "values": over.agg(list),
        "n": over.size(),
        "mean": over.agg(statistics.fmean),
        "deviation": over.agg(lambda of: statistics.stdev(of) if len(of) > 1 else math.nan),
        "interval": over.agg(interval),
        "found": runs["value"].count(),
        "expected": runs.size(),
        "own": runs["own"].mean(),
        "diverged": runs["diverged"].min(),
    }
    index = pd.MultiIndex.from_product([metrics, *(axis.labels for axis in axes)], names=keys)
    frame: Frame = pd.DataFrame({name: column.reindex(index) for name, column in columns.items()})
    types = {"n": int, "found": int, "expected": int, "diverged": bool}
    return frame.fillna(dict.fromkeys(types, 0)).astype(types)


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
    validations = [_measured(run).get(VALIDATION, {}).get("value") for run in table["run"]]
    table = table.assign(
        label=list(table[tried].itertuples(index=False, name=None)),
        validation=pd.Series(validations, table.index, dtype=float),
    )
    kept, choices = [], []
    for place, runs in table.groupby(methods, sort=False):
        # Labels without a run, which only some of the places have, are no candidates.
        finished = runs.dropna(subset="run")
        labels = (runs if finished.empty else finished)["label"].unique()
        in_all = finished.groupby(repetition)["seed"].transform("size") == len(labels)
        compared = finished[in_all]
        known = compared.dropna(subset="validation")
        found = {label: known["validation"][known["label"].isin([label])] for label in labels}
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
        kept.append(runs[runs["label"].isin([label])])
    return pd.concat(kept).drop(columns=[*tried, "label", "validation"]), pd.DataFrame(choices)


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
