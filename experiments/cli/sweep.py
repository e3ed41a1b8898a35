"""The commands `sweep` and `compare`: grids of runs, and their table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from experiments.cli.options import AnyPreset, Execution, HowToRun, preset_choice, print_written
from experiments.core.errors import ConfigError
from experiments.papers import integration
from experiments.papers.few_shot import FewShotConfig
from experiments.papers.integration import Name
from experiments.papers.presets import PRESETS
from experiments.papers.presets.few_shot import PRESETS as FEW_SHOT

if TYPE_CHECKING:
    from experiments.reporting.grid import Axis

    _FewShotPreset = FewShotConfig
else:
    _FewShotPreset = preset_choice({name: PRESETS[name] for name in FEW_SHOT})

_DEFAULT_LOSSES: tuple[Any, ...] = tuple(
    name for name in integration.PAPER_NAMES if not name.startswith("spectral")
)


@dataclass(frozen=True)
class GridOptions:
    """The runs of a grid, and how they are compared."""

    seeds: tuple[int, ...] = (0,)
    """Every combination is trained once for each seed."""
    directory: Path | None = None
    """Folder of the runs and the table (by default runs/sweep-PRESET, runs/compare-PRESET); the
    table is that of the last command."""
    baseline: str = ""
    """OPTION=VALUE of an axis, as loss.name=softmax: adds tables of paired differences to it."""
    pairs_over: str = ""
    """Option whose values are repetitions, as data.subset_seed; each is the mean of its seeds."""
    choose: str = ""
    """Option with its own --over, whose value validation chooses at every combination."""


OfGrid = Annotated[GridOptions, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Sweep:
    """Train and evaluate a preset at all combinations of values of some options.

    Writes table.md, table.json and figure.png. Finished runs are kept: the same command continues
    where it was stopped. The table has the values and seeds that the command names. If a run
    diverges, the others continue; the table shows which one it was, and the exit status is 3.
    """

    config: AnyPreset
    """The preset to start from."""
    over: tuple[str, ...] = ()
    """Axes, the methods first: OPTION=VALUE,VALUE,... such as loss.name=softmax,loose, or options
    that change together: loss.name/optimizer.learning_rate=softmax/0.1,loose/0.3. The numbers of an
    option that takes several are joined by +: optimizer.decay_steps=30+60."""
    title: str = ""
    """Title of the table and figure (by default protocol, data set and, if there is one, loss)."""
    metrics: tuple[str, ...] = ()
    """Metrics that the table and figure show, in this order (by default all)."""
    grid: OfGrid = field(default_factory=GridOptions)
    execution: HowToRun = field(default_factory=Execution)

    def run(self, command: Sequence[str]) -> int:
        """Runs the missing part of the sweep, prints its table."""
        from experiments.sweeps.grid import check_not_set, parse_axis

        if not self.over or not self.grid.seeds:
            raise ConfigError("sweep needs at least one axis (--over) and one seed (--seeds)")
        config = self.config
        axes = [parse_axis(text, config) for text in self.over]
        swept = {option: "its values in --over" for axis in axes for option in axis.settings[0]}
        check_not_set(config, PRESETS[config.preset].config, {**swept, "seed": "--seeds"})
        report = {"title": self.title, "metrics": self.metrics}
        return run_and_print(self, axes, f"sweep-{config.preset}", command, **report)


@dataclass(frozen=True)
class Compare:
    """Compare losses and samplings of few-shot transfer; write their table and figure.

    Finished runs are kept: the same command continues where it was stopped, and a command with
    other losses, samplings or seeds reuses the runs that it shares. If a run diverges, the others
    continue; the table shows which one it was, and the exit status is 3.
    """

    config: _FewShotPreset
    """The preset to start from."""
    losses: tuple[Name, ...] = _DEFAULT_LOSSES
    """Losses such as sce, sce+nca (sum), direct:sce+nca (direct sum) and spectral:sce+nca; by
    default the paper's, without spectral sums."""
    sampling: tuple[str, ...] = ("random",)
    """`random`, or NxK for N classes with K images each."""
    grid: OfGrid = field(default_factory=GridOptions)
    execution: HowToRun = field(default_factory=Execution)

    def run(self, command: Sequence[str]) -> int:
        """Runs the missing part of the comparison, prints its table."""
        from experiments.data.sampling import describe_strategy
        from experiments.reporting.grid import Axis
        from experiments.sweeps.grid import check_not_set

        if not (self.losses and self.sampling and self.grid.seeds):
            raise ConfigError("--losses, --sampling and --seeds need at least one value each")
        config = self.config
        flags = {"loss.name": "--losses", "sampling.strategy": "--sampling", "seed": "--seeds"}
        check_not_set(config, PRESETS[config.preset].config, flags)
        losses = [name for name in integration.NAMES if name in self.losses]
        sampling = tuple(dict.fromkeys(self.sampling))
        axes = [
            Axis(name, tuple(map(label, values)), tuple({option: value} for value in values))
            for name, option, label, values in (
                ("loss", "loss.name", integration.label, losses),
                ("training batches", "sampling.strategy", describe_strategy, sampling),
            )
        ]
        title = f"Few-shot accuracy on {config.data.name}"
        report = {"title": title, "notes": integration.notation(losses, config.loss)}
        return run_and_print(self, axes, f"compare-{config.preset}", command, **report)


def run_and_print(
    grid: Compare | Sweep, axes: Sequence[Axis], folder: str, command: Sequence[str], **report: Any
) -> int:
    """Runs the missing part of a grid and prints its table; returns the exit status.

    Its directory is runs/FOLDER by default; `report` is what else `run_grid` takes for the report.
    """
    from experiments.run import complete_run
    from experiments.sweeps.grid import parse_comparison, run_grid

    typed, comparison = shlex.join(command), vars(grid.grid).copy()
    seeds, directory = comparison.pop("seeds"), comparison.pop("directory")
    paths, diverged = run_grid(
        grid.config,
        axes,
        seeds,
        directory or Path("runs", folder),
        grid.execution.folders,
        partial(complete_run, command=typed, **grid.execution.run_arguments()),
        comparison=parse_comparison(axes, grid.config, **comparison),
        command=typed,
        **report,
    )
    if paths:
        print_written(paths)
    if diverged:
        runs = "1 run" if len(diverged) == 1 else f"{len(diverged)} runs"
        message = f"{runs} diverged (delete the folder of one to train it again):"
        print(message, *diverged, sep="\n  ")
    return 3 if diverged else 0
