"""The command line: `python -m experiments`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.benchmark.command import Benchmark
from experiments.config import EvaluationConfig, Folders, TrainConfig
from experiments.presets import PRESETS

Preset = Annotated[
    tyro.extras.subcommand_type_from_defaults(
        {name: preset.config for name, preset in PRESETS.items()},
        {name: preset.description for name, preset in PRESETS.items()},
    ),
    tyro.conf.arg(name=""),
]
"""A preset as a positional word, followed by overrides of its values."""

INTEGRATED = tuple(
    f"{integration}{first}+{second}"
    for integration in ("", "direct:")
    for first in ("sce", "bce")
    for second in ("nca", "proto")
)
Mode = Literal["pmap", "jit"]


@dataclass(frozen=True)
class Train:
    """Train a preset, evaluate it on the novel classes, and write its report.

    A run that was killed goes on where it was when the same command is given again.
    """

    config: Preset
    directory: Path | None = None
    """Run directory (by default runs/DATA-LOSS-SAMPLING-SEED)."""
    parallel: Mode = "pmap"
    """Data-parallel over all devices by jax.pmap, or by a jit over sharded global arrays."""
    folders: Annotated[Folders, tyro.conf.arg(name="")] = field(default_factory=Folders)

    def run(self) -> None:
        """Trains, evaluates, prints the report."""
        from experiments.compare import run_cell
        from experiments.reporting.report import run_report

        config: Any = self.config
        assert isinstance(config, TrainConfig)
        name = f"{config.data.name}-{config.loss.name.replace(':', '-')}"
        directory = self.directory or Path(
            "runs", f"{name}-{config.sampling.strategy}-seed{config.seed}"
        )
        report = run_cell(config, directory, self.folders, parallel_mode=self.parallel)
        print(run_report(report))
        print(f"\n{directory}: config.json, metrics.jsonl, checkpoints, report.md, report.json")


@dataclass(frozen=True)
class Evaluate:
    """Few-shot accuracy of a trained run: nearest prototype on features computed once."""

    directory: Annotated[Path, tyro.conf.Positional]
    """Run directory, as `train` made it."""
    split: Literal["novel", "validation", "base"] = "novel"
    """Which classes."""
    checkpoint: str = "best"
    """`best` by validation accuracy, `latest`, or the number of a step."""
    evaluation: Annotated[EvaluationConfig, tyro.conf.arg(name="")] = field(
        default_factory=EvaluationConfig
    )
    folders: Annotated[Folders, tyro.conf.arg(name="")] = field(default_factory=Folders)

    def run(self) -> None:
        """Evaluates, prints and writes the report."""
        from experiments.evaluation.run import evaluate_run
        from experiments.reporting.report import run_report, write_run_report

        report = evaluate_run(
            self.directory,
            self.folders,
            split=self.split,
            which=self.checkpoint,
            evaluation=self.evaluation,
        )
        print(run_report(report))
        name = f"evaluation-{self.split}-step{report['step']}"
        paths = write_run_report(self.directory, report, name)
        print("\nwrote", ", ".join(str(path) for path in paths))


@dataclass(frozen=True)
class Compare:
    """Train and evaluate a grid of losses and samplings; write its table and figure.

    Finished cells are kept: the same command goes on where it was stopped, and one with other
    losses, samplings or seeds adds to the grid. The table shows all finished cells of the folder.
    """

    config: Preset
    losses: tuple[str, ...] = ("sce", "bce", "nca", "proto", *INTEGRATED)
    """sce, bce, nca, proto, sums as sce+nca, and direct:sce+nca, spectral:sce+nca."""
    sampling: tuple[str, ...] = ("random",)
    """`random`, or NxK for N classes with K images each."""
    seeds: tuple[int, ...] = (0,)
    """Every cell is trained once for each seed."""
    directory: Path | None = None
    """Folder of the grid (by default runs/compare-DATA)."""
    parallel: Mode = "pmap"
    """Data-parallel over all devices by jax.pmap, or by a jit over sharded global arrays."""
    folders: Annotated[Folders, tyro.conf.arg(name="")] = field(default_factory=Folders)

    def run(self) -> None:
        """Runs what is missing of the grid, prints its table."""
        from experiments.compare import cell_directory, finished_cells, grid, run_cell
        from experiments.reporting.tables import write_report

        config: Any = self.config
        assert isinstance(config, TrainConfig)
        root = self.directory or Path("runs", f"compare-{config.data.name}")
        cells = grid(config, self.losses, self.sampling, self.seeds)
        for number, cell in enumerate(cells, start=1):
            print(
                f"[{number}/{len(cells)}] {cell.loss.name}, {cell.sampling.strategy}, "
                f"seed {cell.seed}",
                flush=True,
            )
            directory = cell_directory(root, cell)
            run_cell(cell, directory, self.folders, parallel_mode=self.parallel)
        command = shlex.join(["python", "-m", "experiments", *sys.argv[1:]])
        paths = write_report(root, finished_cells(root, config), command=command)
        print("\n" + paths[0].read_text(encoding="utf-8"))
        print("wrote", ", ".join(str(path) for path in paths))


@dataclass(frozen=True)
class Datasets:
    """List the data sets: what is ready, and what each of the others needs."""

    folders: Annotated[Folders, tyro.conf.arg(name="")] = field(default_factory=Folders)

    def run(self) -> None:
        """Prints the list."""
        from experiments.data.builders import dataset_status

        for status in dataset_status(self.folders.data_dir, self.folders.manual_dir):
            print(status)


COMMANDS = (
    Annotated[Train, tyro.conf.subcommand("train"), tyro.conf.CascadeSubcommandArgs]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Compare, tyro.conf.subcommand("compare"), tyro.conf.CascadeSubcommandArgs]
    | Annotated[Datasets, tyro.conf.subcommand("datasets")]
    | Annotated[Benchmark, tyro.conf.subcommand("benchmark")]
)


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; an error that its user can mend is a message, not a traceback."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "jaxloss", "xla")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    command: Any = tyro.cli(
        COMMANDS,  # pyright: ignore[reportArgumentType]
        prog="python -m experiments",
        description="The papers' experiments on losses that shape a feature space.",
        args=arguments,
    )

    from experiments.training.checkpoints import CheckpointError, ConfigMismatchError
    from experiments.training.loop import Interrupted

    try:
        command.run()
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 128 + signal.SIGINT
    except (
        CheckpointError,
        ConfigMismatchError,
        FileNotFoundError,
        ValueError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
