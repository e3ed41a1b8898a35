"""The command `sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.cli.options import (
    AnyPreset,
    Comparing,
    ComparisonOptions,
    Execution,
    HowToRun,
    run_and_print,
)
from experiments.presets import PRESETS


@dataclass(frozen=True)
class Sweep:
    """Train and evaluate a preset at all combinations of values of some options.

    Writes table.md, table.json and figure.png. Finished runs are kept: the same command continues
    where it was stopped. The table has the values that the command names, at every seed that has
    been run. If a run diverges, the others continue; the table shows which one it was, and the
    exit status is 3.
    """

    config: AnyPreset
    """The preset to start from."""
    over: tuple[str, ...] = ()
    """Axes, the methods first: OPTION=VALUE,VALUE,... such as loss.name=softmax,loose, or options
    that change together: loss.name/optimizer.learning_rate=softmax/0.1,loose/0.3. The numbers of an
    option that takes several are joined by +: optimizer.decay_steps=30+60."""
    seeds: tuple[int, ...] = (0,)
    """Every combination is trained once for each seed."""
    directory: Path | None = None
    """Folder of the sweep (by default runs/sweep-PRESET); its table is that of the last command."""
    title: str = ""
    """Title of the table and figure (by default protocol, data set and, if there is one, loss)."""
    metrics: tuple[str, ...] = ()
    """Metrics that the table and figure show, in this order (by default all)."""
    comparison: Comparing = field(default_factory=ComparisonOptions)
    execution: HowToRun = field(default_factory=Execution)

    def run(self, command: Sequence[str]) -> int:
        """Runs the missing part of the sweep, prints its table."""
        from experiments.errors import ConfigError
        from experiments.grid import check_not_set, parse_axis

        config = self.config
        if not self.over or not self.seeds:
            raise ConfigError("sweep needs at least one axis (--over) and one seed (--seeds)")
        axes = [parse_axis(text, config) for text in self.over]
        swept = {option: "its values in --over" for axis in axes for option in axis.settings[0]}
        check_not_set(config, PRESETS[config.preset].config, {**swept, "seed": "--seeds"})
        report = {"title": self.title, "metrics": self.metrics}
        return run_and_print(self, axes, f"sweep-{config.preset}", command, **report)
