"""How many pairs of runs a paired comparison needs, as text."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.contracts import Metric
from experiments.errors import ConfigError
from experiments.reporting.comparison import Difference, choose, differences, same_label
from experiments.reporting.entries import Axis, Run, make_grid, places
from experiments.reporting.markdown import bullets, difference_heading, scaled, table
from experiments.reporting.statistics import pairs_needed, smallest_effect

POWERS = (0.8, 0.9)
"""Probabilities of finding a difference."""
_TEST = "two-sided paired t-test at 5 %"


def power_lines(deviation: float, effect: float | None, pairs: Sequence[int]) -> list[str]:
    """The number of pairs that an effect needs, and the smallest effects of some numbers of pairs.

    Args:
      deviation: Standard deviation of the differences between the runs of a pair.
      effect: Mean of the differences, in the same unit; None: unknown.
      pairs: Numbers of pairs.
    """
    lines = []
    if effect is not None:
        needed = [f"{pairs_needed(effect, deviation, p)} for {100 * p:.0f} %" for p in POWERS]
        lines = [
            f"Pairs needed to find a difference of {effect:g} whose standard deviation over pairs "
            f"is {deviation:g}, by power: {', '.join(needed)} ({_TEST}).",
            "",
        ]
    rows = [[n, *(f"{smallest_effect(n, deviation, p):.3g}" for p in POWERS)] for n in pairs]
    headings = [f"smallest difference at {100 * p:.0f} % power" for p in POWERS]
    return [*lines, *table(["pairs", *headings], rows)]


def grid_power_lines(directory: Path, baseline: str, effect: float | None) -> list[str]:
    """The same for every difference in a grid, from the deviation that is found there.

    Args:
      directory: The folder of a grid, with its table.json.
      baseline: NAME=LABEL of one of its axes; empty: that of its last command.
      effect: A difference of interest, in percentage points for metrics in %; None: unknown.

    Raises:
      ConfigError: There is no such grid or baseline, or no place has two pairs.
    """
    found = _grid_differences(directory, baseline)
    rows = [
        [", ".join(place), difference_heading(metric), *_numbers(difference, effect)]
        for metric, by_place in found.items()
        for place, difference in by_place.items()
        if len(difference.values) > 1
    ]
    if not rows:
        raise ConfigError(f"{directory} has no two pairs of runs; train at least two seeds")
    headings = [
        "place",
        "difference of",
        "pairs",
        "mean",
        "deviation",
        f"smallest difference at {100 * POWERS[0]:.0f} % power",
        *(f"pairs for {effect:g} at {100 * p:.0f} %" for p in POWERS if effect is not None),
    ]
    notes = [
        f"Power of a {_TEST}, with the standard deviation over the pairs found here.",
        "A deviation of few pairs is uncertain: that of three can be half of the true one.",
    ]
    return [*table(headings, rows), *bullets(notes)]


def _numbers(difference: Difference, effect: float | None) -> list[Any]:
    values = [scaled(value, difference.metric.unit) for value in difference.values]
    count, deviation = len(values), statistics.stdev(values)
    numbers: list[Any] = [count, f"{statistics.fmean(values):+.2f}", f"{deviation:.2f}"]
    # Runs that do not differ at all need no more than two pairs.
    numbers.append(f"{smallest_effect(count, deviation, POWERS[0]):.2f}" if deviation else "0")
    if effect is not None:
        numbers += [pairs_needed(effect, deviation, p) if deviation else 2 for p in POWERS]
    return numbers


def _grid_differences(
    directory: Path, baseline: str
) -> dict[Metric, dict[tuple[str, ...], Difference]]:
    path = directory / "table.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        comparison = stored["comparison"]
        axes = [Axis(axis["name"], tuple(axis["labels"])) for axis in stored["axes"]]
        runs = [Run(tuple(run["place"]), run["report"]) for run in stored["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not the table of a grid ({type(error).__name__}: {error}); name a folder "
            "that sweep or compare has written"
        ) from error
    pooled = comparison["pairs_over"]
    kept = choose(axes, runs, places(axes), comparison["choose"], pooled=pooled)
    named = _baseline(baseline, kept.axes, pooled) if baseline else comparison["baseline"]
    if named is None:
        raise ConfigError(f"{directory} was written without a baseline; set --baseline NAME=LABEL")
    grid = make_grid(kept.axes, kept.runs, pooled=pooled, planned=kept.planned)
    found = differences(grid, (named[0], named[1]))
    return {metric: dict(by_place) for metric, by_place in found.items()}


def _baseline(text: str, axes: Sequence[Axis], pooled: str) -> tuple[str, str]:
    name, _, label = text.partition("=")
    varied = [axis for axis in axes if axis.name != pooled and len(axis.labels) > 1]
    for axis in varied:
        for known in axis.labels if axis.name == name else ():
            if same_label(label, known):
                return name, known
    available = "; ".join(f"{axis.name}={','.join(axis.labels)}" for axis in varied)
    raise ConfigError(f"--baseline {text}: the grid has {available or 'no axis to compare along'}")
