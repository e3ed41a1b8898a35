"""Paired comparison of the runs of a grid: choices by validation, and differences to a baseline."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.contracts import Metric
from experiments.reporting.entries import Axis, Cells, Grid, Place, Run, Unit, measured, places
from experiments.reporting.statistics import interval


class Choice(NamedTuple):
    """What validation chose at one place."""

    place: Place
    """Labels on the axes that are kept."""
    label: Place
    """Labels on the axes of the choice; the first ones where no run has a validation."""
    validation: float | None
    """Mean over the compared runs of the chosen labels."""
    found: int
    """Compared runs of the chosen labels that have a validation."""
    compared: int
    """Compared runs of the chosen labels."""
    candidates: int
    """Combinations of labels that were tried."""
    seeds: tuple[int, ...]
    """Of the compared runs."""


class Chosen(NamedTuple):
    """A grid without the axes that validation has chosen from."""

    axes: list[Axis]
    runs: list[Run]
    planned: list[Place]
    choices: list[Choice]


def choose(
    axes: Sequence[Axis],
    runs: Sequence[Run],
    planned: Sequence[Place],
    names: Sequence[str],
    *,
    pooled: str = "",
) -> Chosen:
    """Keeps, at every place on the other axes, the labels with the best mean validation.

    The mean is over seeds, and over the labels of the axis `pooled`. Runs are compared only where
    all labels have finished ones, so that more seeds are no advantage. Labels of which fewer of
    these runs have a validation come last: a run that diverged is no advantage either.

    Args:
      axes, runs: The grid.
      planned: The places of the grid.
      names: The axes to choose from.
      pooled: An axis of repetitions, or empty.
    """
    if not names:
        return Chosen(list(axes), list(runs), list(planned), [])
    tried = [i for i, axis in enumerate(axes) if axis.name in names]
    kept = [i for i in range(len(axes)) if i not in tried]
    methods = [i for i in kept if axes[i].name != pooled]
    repeated = [i for i in kept if i not in methods]
    validations: dict[Place, dict[Place, _Validations]] = {}
    for place in planned:
        validations.setdefault(_pick(place, methods), {}).setdefault(_pick(place, tried), {})
    for run in runs:
        value = (run.report["validation"] or {}).get("value")
        repetition = _pick(run.place, repeated), run.report["seed"]
        validations[_pick(run.place, methods)][_pick(run.place, tried)][repetition] = value
    choices = [_choice(place, candidates) for place, candidates in validations.items()]
    best = {choice.place: choice.label for choice in choices}

    def is_chosen(place: Place) -> bool:
        return best[_pick(place, methods)] == _pick(place, tried)

    return Chosen(
        [axes[i] for i in kept],
        [run._replace(place=_pick(run.place, kept)) for run in runs if is_chosen(run.place)],
        list(dict.fromkeys(_pick(place, kept) for place in planned)),
        choices,
    )


def _pick(place: Place, indices: Iterable[int]) -> Place:
    return tuple(place[i] for i in indices)


_Validations = dict[tuple[Place, int], float | None]
"""The validation of every finished run, by its pooled label and seed; None if it has none."""


def _choice(place: Place, planned: Mapping[Place, _Validations]) -> Choice:
    # Labels without a run, which only some of the places have, are no candidates.
    candidates = {label: runs for label, runs in planned.items() if runs} or planned
    compared = set.intersection(*(set(runs) for runs in candidates.values()))
    found = {
        label: [value for run in sorted(compared) if (value := runs[run]) is not None]
        for label, runs in candidates.items()
    }

    def rank(label: Place) -> tuple[int, float]:
        values = found[label]
        return (len(values), statistics.fmean(values)) if values else (0, 0)

    label = max(candidates, key=rank)
    values = found[label]
    return Choice(
        place,
        label,
        statistics.fmean(values) if values else None,
        found=len(values),
        compared=len(compared),
        candidates=len(candidates),
        seeds=tuple(sorted({seed for _, seed in compared})),
    )


def choice_lines(names: Sequence[str], choices: Sequence[Choice]) -> list[str]:
    """What was chosen, in sentences for a caption."""
    if not choices:
        return []
    chosen = [f"{_at(choice.place)}{_label(choice)}" for choice in choices]
    tried = sorted({choice.candidates for choice in choices})
    counts = str(tried[0]) if len(tried) == 1 else "a number of"
    seeds = {choice.seeds for choice in choices}
    common = f" ({_seeds(choices[0])})" if len(seeds) == 1 and choices[0].seeds else ""
    lines = [
        f"{', '.join(names)}: the best of {counts} values by the mean validation over the "
        f"repetitions that all of them have{common}: {'; '.join(chosen)}."
    ]
    if len(seeds) > 1:
        each = "; ".join(f"{_at(choice.place)}{_seeds(choice)}" for choice in choices)
        lines.append(f"Repetitions compared: {each}.")
    if len(tried) > 1:
        numbers = "; ".join(f"{_at(choice.place)}{choice.candidates}" for choice in choices)
        lines.append(f"Values tried: {numbers}.")
    return lines


def _at(place: Place) -> str:
    return f"{', '.join(place)}: " if place else ""


def _seeds(choice: Choice) -> str:
    numbers = ", ".join(map(str, choice.seeds)) or "none"
    return f"seed{'s' * (len(choice.seeds) != 1)} {numbers}"


def _label(choice: Choice) -> str:
    if not choice.compared:
        return "none, because no repetition is finished for all values"
    if not choice.found:
        return "none, because no run has a validation"
    diverged = choice.compared - choice.found
    return ", ".join(choice.label) + (f" ({diverged} of its runs diverged)" if diverged else "")


class Difference(NamedTuple):
    """A metric at one place of a grid minus the same at the baseline, pair by pair."""

    metric: Metric
    values: tuple[float, ...]
    """One for each repetition with a pair: a seed, or a label of the pooled axis, over whose seeds
    the differences are averaged. Fractions if the unit is %."""
    pairs: int
    """Pairs of runs with values."""
    missing: int
    """Pairs of which a run diverged or is not finished."""
    interval: float | None
    """Half the width of the 95 % confidence interval of the mean over the repetitions."""
    episodes_interval: float | None
    """The same over the episodes of a pair; of several pairs the mean."""

    @property
    def mean(self) -> float | None:
        """Over the repetitions."""
        return statistics.fmean(self.values) if self.values else None

    @property
    def half_width(self) -> float | None:
        """Of the interval over repetitions; of a single one, of that over its episodes."""
        return self.episodes_interval if self.interval is None else self.interval

    @property
    def excludes_zero(self) -> bool:
        """If the interval over repetitions does. That over the episodes of a pair does not count:
        it says nothing on other training runs."""
        return (
            self.mean is not None and self.interval is not None and abs(self.mean) > self.interval
        )


Differences = Mapping[Metric, Mapping[Place, Difference]]
"""For each metric, the difference of every place that does not have the baseline's label."""


def same_label(text: str, label: str) -> bool:
    """Whether the texts are equal, or equal but for how their numbers are written.

    Both are joined by `/`, as the values of several options are: softmax/0 is softmax/0.0.
    """
    parts, others = text.split("/"), label.split("/")
    return text == label or (len(parts) == len(others) and all(map(_same_value, parts, others)))


def _same_value(text: str, other: str) -> bool:
    with contextlib.suppress(ValueError):
        return float(text) == float(other)
    return text == other


def without(axes: Sequence[Axis], baseline: tuple[str, str]) -> list[Axis]:
    """The axes without the label of the baseline."""
    name, label = baseline
    return [
        axis._replace(labels=tuple(at for at in axis.labels if at != label))
        if axis.name == name
        else axis
        for axis in axes
    ]


def add_pair_metrics(
    axes: Sequence[Axis],
    runs: Sequence[Run],
    baseline: tuple[str, str],
    measure: Callable[[dict[str, Any], dict[str, Any]], list[dict[str, Any]]],
) -> list[Run]:
    """The runs, with the metrics that each and the baseline's run of its seed give together.

    Args:
      axes: What was varied.
      runs: The finished runs.
      baseline: Name and label of an axis.
      measure: As in `PairMetrics`.
    """
    index = [axis.name for axis in axes].index(baseline[0])
    reports = {(run.place, run.report["seed"]): run.report for run in runs}
    added = []
    for run in runs:
        place = (*run.place[:index], baseline[1], *run.place[index + 1 :])
        pair = run.report, reports.get((place, run.report["seed"]), {"metrics": []})
        if place != run.place and all(report["metrics"] for report in pair):
            metrics = [*run.report["metrics"], *measure(*pair)]
            run = run._replace(report=run.report | {"metrics": metrics})
        added.append(run)
    return added


def differences(grid: Grid, baseline: tuple[str, str]) -> Differences:
    """For each metric, the difference of every place to the place with the baseline's label.

    Args:
      grid: The grid.
      baseline: Name and label of an axis of `grid`.
    """
    index = [axis.name for axis in grid.axes].index(baseline[0])
    found: dict[Metric, dict[Place, Difference]] = {}
    for metric in grid.entries:
        for place in places(grid.axes):
            if place[index] != baseline[1]:
                other = (*place[:index], baseline[1], *place[index + 1 :])
                difference = _difference(metric, grid.cells[place], grid.cells[other])
                found.setdefault(metric, {})[place] = difference
    return found


def _difference(metric: Metric, method: Cells, baseline: Cells) -> Difference:
    units: dict[Unit, list[float]] = {}
    intervals: list[float] = []
    planned = [key for key in method if key in baseline]
    for key in planned:
        pair = method[key], baseline[key]
        ours, theirs = (_value(run, metric) for run in pair)
        if ours is None or theirs is None:
            continue
        units.setdefault(key[0], []).append(ours - theirs)
        by_episode = episode_differences(*pair, metric)
        if by_episode is not None and (half_width := interval(by_episode)) is not None:
            intervals.append(half_width)
    values = tuple(statistics.fmean(of_unit) for of_unit in units.values())
    pairs = sum(map(len, units.values()))
    return Difference(
        metric,
        values,
        pairs,
        missing=len(planned) - pairs,
        interval=interval(values),
        episodes_interval=statistics.fmean(intervals) if intervals else None,
    )


def episode_differences(
    run: Run | None, baseline: Run | None, metric: Metric
) -> list[float] | None:
    """The differences of two runs in every episode; None unless their episodes are the same."""
    if run is None or baseline is None:
        return None
    ours, theirs = run.episodes.get(metric.name), baseline.episodes.get(metric.name)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return None
    if _episode_lists(run.report) != _episode_lists(baseline.report):
        return None
    return [float(a) - float(b) for a, b in zip(ours, theirs, strict=True)]


def _episode_lists(report: Mapping[str, Any]) -> set[str]:
    """The identifiers of the lists of episodes of a report."""
    return {result["hash"] for result in report.get("results", ()) if "hash" in result}


def _value(run: Run | None, metric: Metric) -> float | None:
    value = None if run is None else measured(run.report).get(metric.name)
    return None if value is None else value["value"]


def as_json(found: Differences) -> Iterable[dict[str, Any]]:
    """Differences as JSON types, one object a metric and place."""
    for metric, by_place in found.items():
        for place, difference in by_place.items():
            yield {
                "metric": metric.name,
                "unit": metric.unit,
                "higher_is_better": metric.higher_is_better,
                "place": list(place),
                "mean": difference.mean,
                **{k: v for k, v in difference._asdict().items() if k != "metric"},
            }
