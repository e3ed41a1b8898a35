"""How many pairs of runs a paired comparison needs: a two-sided paired t-test at 5 %."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import fdtri, ncfdtr

from experiments.reporting.markdown import table

POWERS = (0.8, 0.9)  # Probabilities of finding a difference.
MOST_PAIRS = 10**9


def paired_power(pairs: int, effect: float, deviation: float) -> float:
    """Probability that the test finds a difference, by the noncentral F distribution of t².

    The differences of n `pairs`, at least 2, have the mean `effect` and this deviation, above 0.
    """
    critical = fdtri(1, pairs - 1, 0.95)
    missed = ncfdtr(1, pairs - 1, pairs * (effect / deviation) ** 2, critical)
    return float(1 - np.nan_to_num(missed))  # SciPy has NaN for some where nothing is missed.


def pairs_needed(effect: float, deviation: float, power: float) -> int:
    """The smallest number of pairs with which `paired_power` is at least `power`; at most 10⁹."""
    return bisect.bisect_left(
        range(MOST_PAIRS), power, lo=2, key=lambda pairs: paired_power(pairs, effect, deviation)
    )


def smallest_effect(pairs: int, deviation: float, power: float) -> float:
    """The mean of the differences that `pairs` pairs find with probability `power`."""
    ratio: Any = brentq(lambda effect: paired_power(pairs, effect, 1.0) - power, 0.0, 100.0)
    return deviation * ratio


def power_lines(deviation: float, effect: float | None, pairs: Sequence[int]) -> list[str]:
    """The number of pairs that an effect needs, and the smallest effects of some numbers of pairs.

    `deviation` is that of the differences between the runs of a pair, `effect` their mean.
    """
    lines = []
    if effect is not None:
        numbers = (pairs_needed(effect, deviation, p) for p in POWERS)
        needed = (
            f"{'at least ' if n == MOST_PAIRS else ''}{n} pairs for a power of {100 * p:.0f} %"
            for n, p in zip(numbers, POWERS, strict=True)
        )
        lines = [f"A two-sided paired t-test at 5 % needs {', and '.join(needed)}.", ""]
    rows = [[n, *(f"{smallest_effect(n, deviation, p):.3g}" for p in POWERS)] for n in pairs]
    headings = [f"smallest difference at {100 * p:.0f} % power" for p in POWERS]
    return [*lines, *table(["pairs", *headings], rows)]
