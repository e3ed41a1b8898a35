"""How many pairs of runs a paired comparison needs."""

from __future__ import annotations

import bisect
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scipy.optimize
import scipy.stats

from experiments.contracts import Metric
from experiments.errors import ConfigError
from experiments.reporting.markdown import bullets, difference_heading, scaled, table

POWERS = (0.8, 0.9)
"""Probabilities of finding a difference."""
_TEST = "two-sided paired t-test at 5 %"


def paired_power(pairs: int, effect: float, deviation: float) -> float:
    """Probability that a two-sided paired t-test at 5 % finds a difference.

    By the noncentral t distribution: n − 1 degrees of freedom, shift √n · effect/deviation, for n
    `pairs`, at least 2, whose differences have the mean `effect` and this deviation, above 0.
    """
    shift = math.sqrt(pairs) * abs(effect) / deviation
    critical = scipy.stats.t.ppf(0.975, pairs - 1)
    power = float(scipy.stats.nct.sf(critical, pairs - 1, shift))
    # A significant difference of the wrong sign: below 1e-11 at larger shifts, where SciPy has NaN.
    return power + float(scipy.stats.nct.cdf(-critical, pairs - 1, shift)) if shift < 7 else power


def pairs_needed(effect: float, deviation: float, power: float) -> int:
    """The smallest number of pairs, at least 2, with which `paired_power` is at least `power`.

    At most a billion.
    """
    return bisect.bisect_left(
        range(10**9),
        power,
        lo=2,
        key=lambda pairs: paired_power(pairs, effect, deviation) if deviation else 1.0,
    )


def smallest_effect(pairs: int, deviation: float, power: float) -> float:
    """The mean of the differences that `pairs` pairs find with probability `power`."""
    ratio: Any = scipy.optimize.brentq(lambda e: paired_power(pairs, e, 1.0) - power, 0.0, 100.0)
    return deviation * ratio


def power_lines(deviation: float, effect: float | None, pairs: Sequence[int]) -> list[str]:
    """The number of pairs that an effect needs, and the smallest effects of some numbers of pairs.

    `deviation` is that of the differences between the runs of a pair, `effect` their mean.
    """
    lines = []
    if effect is not None:
        needed = [f"{pairs_needed(effect, deviation, p)} for {100 * p:.0f} %" for p in POWERS]
        lines = [f"Pairs needed by power, {_TEST}: {', '.join(needed)}.", ""]
    rows = [[n, *(f"{smallest_effect(n, deviation, p):.3g}" for p in POWERS)] for n in pairs]
    headings = [f"smallest difference at {100 * p:.0f} % power" for p in POWERS]
    return [*lines, *table(["pairs", *headings], rows)]


def grid_power_lines(directory: Path, effect: float | None) -> list[str]:
    """The same for every difference in a grid, from the deviation that is found there.

    Args:
      directory: The folder of a grid, with its table.json.
      effect: A difference of interest, in percentage points for metrics in %; None: unknown.

    Raises:
      ConfigError: There is no such grid, or no place has two pairs with the baseline.
    """
    path = directory / "table.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["differences"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{path} is not the table of a grid, as sweep and compare write it: {error}"
        ) from error
    rows, powers = [], POWERS if effect is not None else ()
    for row in found:
        if row["n"] < 2:
            continue
        metric = Metric(row["metric"], row["unit"], row["higher_is_better"])
        values = [scaled(value, metric.unit) for value in row["values"]]
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        smallest = smallest_effect(row["n"], deviation, POWERS[0])
        numbers = [f"{mean:+.2f}", f"{deviation:.2f}", f"{smallest:.2f}"]
        needed = [pairs_needed(effect or 0.0, deviation, power) for power in powers]
        place = ", ".join(row["place"])
        rows.append([place, difference_heading(metric), row["n"], *numbers, *needed])
    if not rows:
        raise ConfigError(
            f"{path} has no differences of two pairs of runs; give sweep or compare a --baseline "
            "and at least two --seeds"
        )
    headings = ["place", "difference of", "pairs", "mean", "deviation"]
    headings += [f"smallest difference at {100 * POWERS[0]:.0f} % power"]
    headings += [f"pairs for {effect:g} at {100 * p:.0f} %" for p in powers]
    note = f"{_TEST}; a deviation of three pairs can be half of the true one."
    return [*table(headings, rows), *bullets([note])]
