"""Confidence intervals of means, and the power of paired comparisons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

CONFIDENCE = 0.95
"""Of all intervals."""


def interval(values: Sequence[float] | np.ndarray) -> float | None:
    """Half the width of the 95 % confidence interval of the mean, by Student's t.

    Args:
      values: n independent numbers.

    Returns:
      t · s/√n with n − 1 degrees of freedom; None if n < 2.
    """
    if len(values) < 2:
        return None
    # Imported here: this takes a second, which `--help` need not wait for.
    import scipy.stats

    quantile = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def paired_power(pairs: int, effect: float, deviation: float) -> float:
    """Probability that a two-sided paired t-test at 5 % finds a difference.

    Args:
      pairs: Number n of pairs, at least 2.
      effect: Mean of the differences.
      deviation: Standard deviation of the differences, above 0.

    Returns:
      By the noncentral t distribution: n − 1 degrees of freedom, shift √n · effect/deviation.
    """
    import scipy.stats

    shift = math.sqrt(pairs) * abs(effect) / deviation
    critical = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, pairs - 1)
    power = float(scipy.stats.nct.sf(critical, pairs - 1, shift))
    # A significant difference of the wrong sign: below 1e-11 at larger shifts, where SciPy has NaN.
    return power + float(scipy.stats.nct.cdf(-critical, pairs - 1, shift)) if shift < 7 else power


def pairs_needed(effect: float, deviation: float, power: float) -> int:
    """The smallest number of pairs with which `paired_power` is at least `power`.

    Args:
      effect: Mean of the differences, not 0.
      deviation: Their standard deviation, above 0.
      power: Below 1.
    """
    high = 2
    while paired_power(high, effect, deviation) < power:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if paired_power(middle, effect, deviation) >= power else (middle, high)
        )
    return max(high, 2)


def smallest_effect(pairs: int, deviation: float, power: float) -> float:
    """The mean of the differences that `pairs` pairs find with probability `power`.

    Args:
      pairs: At least 2.
      deviation: Standard deviation of the differences, above 0.
      power: Above 0.05 and below 1.
    """
    import scipy.optimize

    def lacking(effect: float) -> float:
        return paired_power(pairs, effect, 1.0) - power

    high = 1.0
    while lacking(high) < 0:
        high *= 2
    ratio: Any = scipy.optimize.brentq(lacking, 0.0, high)
    return deviation * ratio
