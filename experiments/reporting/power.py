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


def power_lines(deviation: float, effect: float | None, pairs: Sequence[int]) -> list[str]:
    """The number of pairs that an effect needs, and the smallest effects of some numbers of pairs.

    `deviation` is that of the differences between the runs of a pair, `effect` their mean.
    """
    lines = []
    if effect is not None:
        needed = []
        for power in POWERS:
            found = bisect.bisect_left(
                range(MOST_PAIRS), power, lo=2, key=lambda n: paired_power(n, effect, deviation)
            )
            least = "at least " if found == MOST_PAIRS else ""
            needed.append(f"{least}{found} pairs for a power of {100 * power:.0f} %")
        lines = [f"A two-sided paired t-test at 5 % needs {', and '.join(needed)}.", ""]

    def smallest(n: int, power: float) -> str:
        ratio: Any = brentq(lambda effect: paired_power(n, effect, 1.0) - power, 0.0, 100.0)
        return f"{deviation * ratio:.3g}"

    rows = [[n, *(smallest(n, power) for power in POWERS)] for n in pairs]
    headings = [f"smallest difference at {100 * power:.0f} % power" for power in POWERS]
    return [*lines, *table(["pairs", *headings], rows)]
