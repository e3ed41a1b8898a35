"""The command `power`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

_SMALLEST = 1e-50  # Squares of ratios of such numbers are finite.


@dataclass(frozen=True)
class Power:
    """Print how many pairs of runs a paired comparison needs, before they are trained.

    Runs of one seed on two methods are a pair.
    """

    deviation: float
    """Standard deviation of the differences within pairs, for example in percentage points. Of runs
    that sweep or compare has compared with a --baseline, table.json has it."""
    effect: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Difference to find, in the same unit: prints how many pairs it needs."""
    pairs: tuple[int, ...] = (3, 5, 8, 10, 15, 20)
    """Numbers of pairs: prints the smallest difference that each of them finds."""

    def run(self, command: Sequence[str]) -> int:
        """Prints the numbers."""
        from experiments.core.errors import ConfigError
        from experiments.reporting.power import MOST_PAIRS, power_lines

        if not 0 < self.deviation < math.inf:
            raise ConfigError(f"--deviation must be finite and above 0, got {self.deviation:g}")
        if self.effect == 0:
            raise ConfigError("--effect must not be 0: no number of pairs finds it")
        if self.effect is not None and not math.isfinite(self.effect):
            raise ConfigError(f"--effect must be finite, got {self.effect:g}")
        for name, value in {"deviation": self.deviation, "effect": self.effect or 1}.items():
            if not _SMALLEST < abs(value) < 1 / _SMALLEST:
                raise ConfigError(f"--{name} must be a number of an ordinary size, got {value:g}")
        if min(self.pairs, default=0) < 2:
            raise ConfigError(f"--pairs must be numbers of at least 2, got {self.pairs}")
        if max(self.pairs) > MOST_PAIRS or len(self.pairs) > 1000:
            raise ConfigError(f"--pairs must be at most 1000 numbers of at most {MOST_PAIRS}")
        print("\n".join(power_lines(self.deviation, self.effect, self.pairs)))
        return 0
