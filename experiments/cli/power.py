"""The verb `power`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

_Number = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]


@dataclass(frozen=True)
class Power:
    """Print how many pairs of runs a paired comparison needs, before they are trained.

    Runs of one seed on two methods are a pair. Give the standard deviation of their differences,
    or the folder of a grid in which it is found.
    """

    deviation: _Number = None
    """Standard deviation of the differences within pairs, for example in percentage points."""
    effect: _Number = None
    """Difference to find, in the same unit: prints how many pairs it needs."""
    pairs: tuple[int, ...] = (3, 5, 8, 10, 15, 20)
    """Numbers of pairs: prints the smallest difference that each of them finds."""
    directory: Path | None = None
    """Folder in which sweep or compare has written differences to a --baseline, instead of
    --deviation."""

    def run(self, command: Sequence[str]) -> int:
        """Prints the numbers."""
        from experiments.errors import ConfigError
        from experiments.reporting.power import grid_power_lines, power_lines

        if (self.deviation is None) == (self.directory is None):
            raise ConfigError("power needs either --deviation or --directory")
        if self.effect == 0:
            raise ConfigError("effect must not be 0: no number of pairs finds it")
        if self.directory is not None:
            lines = grid_power_lines(self.directory, self.effect)
        else:
            if not self.deviation or self.deviation < 0:
                raise ConfigError(f"deviation must be above 0, got {self.deviation}")
            if min(self.pairs, default=0) < 2:
                raise ConfigError("pairs must be at least 2")
            lines = power_lines(self.deviation, self.effect, self.pairs)
        print("\n".join(lines))
        return 0
