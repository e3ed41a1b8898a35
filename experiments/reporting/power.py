"""How many pairs of runs a paired comparison needs."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

import scipy.optimize
import scipy.stats

from experiments.reporting.markdown import table

POWERS = (0.8, 0.9)
"""Probabilities of finding a difference."""


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
    """The smallest number of pairs, 2 to 10⁹, with which `paired_power` is at least `power`."""
    return bisect.bisect_left(
        range(10**9), power, lo=2, key=lambda pairs: paired_power(pairs, effect, deviation)
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
        needed = (
            f"{pairs_needed(effect, deviation, p)} pairs for a power of {100 * p:.0f} %"
            for p in POWERS
        )
        lines = [f"A two-sided paired t-test at 5 % needs {', and '.join(needed)}.", ""]
    rows = [[n, *(f"{smallest_effect(n, deviation, p):.3g}" for p in POWERS)] for n in pairs]
    headings = [f"smallest difference at {100 * p:.0f} % power" for p in POWERS]
    return [*lines, *table(["pairs", *headings], rows)]
