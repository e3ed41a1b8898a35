"""The verb `sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.cli.options import (
    AnyPreset,
    Comparing,
    Comparison,
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
    been run. A run that diverges is shown as such; the others continue, and the exit status is
    3 in the end.
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
    """Folder of the sweep (by default runs/sweep-PRESET). Its table and figure are those of the
    last command."""
    title: str = ""
    """Title of the table and figure."""
    metrics: tuple[str, ...] = ()
    """Metrics that the table and figure show, in this order (by default all)."""
    comparison: Comparing = field(default_factory=Comparison)
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
        return run_and_print(
            config,
            axes,
            self.seeds,
            self.directory or Path("runs", f"sweep-{config.preset}"),
            self.execution,
            self.comparison,
            command,
            title=self.title or f"{config.protocol} on {config.data.name}",
            metrics=self.metrics,
        )
