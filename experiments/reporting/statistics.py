"""Confidence intervals of means, and the power of paired comparisons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95
"""Of all intervals."""


def interval(values: Sequence[float]) -> float | None:
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
