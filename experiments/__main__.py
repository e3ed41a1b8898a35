"""The command line: `python -m experiments`."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import tyro

from experiments.benchmark.command import Benchmark
from experiments.config import FewShotConfig, Folders, TrainConfig
from experiments.errors import ConfigError, ExperimentError
from experiments.evaluation.linear_command import Linear
from experiments.files import cache_folder
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
Distributed = Annotated[bool, tyro.conf.FlagCreatePairsOff]

_OF_THE_RUN = "(default: the run's)"
_Number = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint=_OF_THE_RUN)]

GRID_OPTIONS = {
    "--loss.name": "--losses",
    "--sampling.strategy": "--sampling",
    "--seed": "--seeds",
}
"""Options of a run that the cells of a grid differ in, and the option of the grid for each."""


@dataclass(frozen=True)
class Train:
    """Train a preset, evaluate it, and write its report.

    A run that was killed goes on where it was when the same command is given again.
    """

    config: Preset
    directory: Path | None = None
    """Run directory (by default runs/DATA-LOSS-SAMPLING-SEED for few-shot learning, otherwise
    runs/DATA-PROTOCOL-LOSS-SAMPLING-SEED)."""
    parallel: Mode = "pmap"
    """Data-parallel over all devices by jax.pmap, or by a jit over sharded global arrays."""
    distributed: Distributed = False
    """One of several processes that share the run's directory: start the same command in each,
    with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in its environment, or under
    a scheduler that JAX knows (Slurm, Open MPI, cloud TPU)."""
    folders: Annotated[Folders, tyro.conf.arg(name="")] = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Trains, evaluates, prints the report."""
        from experiments.cells import run_cell
        from experiments.reporting.report import run_report

        config: Any = self.config
        assert isinstance(config, TrainConfig)
        protocol = "" if isinstance(config, FewShotConfig) else f"{config.protocol}-"
        name = f"{config.data.name}-{protocol}{config.loss.name.replace(':', '-')}"
        directory = self.directory or Path(
            "runs", f"{name}-{config.sampling.strategy}-seed{config.seed}"
        )
        report = run_cell(
            config,
            directory,
            self.folders,
            command=shlex.join(command),
            parallel_mode=self.parallel,
        )
        print(run_report(report))
        print(f"\n{directory}: config.json, metrics.jsonl, checkpoints, report.md, report.json")
        return 1 if "diverged" in report else 0


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a trained run as its protocol does.

    Everything that is not given is as in the run's own configuration. Ways, shots, queries,
    episodes, seed and distance are for few-shot learning.
    """

    directory: Annotated[Path, tyro.conf.Positional]
    """Run directory, as `train` made it, or its folder of checkpoints."""
    split: Annotated[
        str | None,
        tyro.conf.arg(metavar="SPLIT", help_behavior_hint="(default: the last)"),
    ] = None
    """base, validation or novel classes; or, where classes are not held out, train, validation or
    test images."""
    checkpoint: str = "best"
    """`best` by validation, `latest`, or the number of a step."""
    ways: _Number = None
    """Classes of an episode."""
    shots: Annotated[
        tuple[int, ...] | None,
        tyro.conf.arg(metavar="INT [INT ...]", help_behavior_hint=_OF_THE_RUN),
    ] = None
    """Support images of each class, one evaluation for each number."""
    queries: _Number = None
    """Query images of each class in an episode."""
    episodes: _Number = None
    """Episodes of each evaluation."""
    seed: _Number = None
    """Seed of the episode list."""
    distance: Annotated[
        Literal["euclidean", "cosine"] | None,
        tyro.conf.arg(metavar="{euclidean,cosine}", help_behavior_hint=_OF_THE_RUN),
    ] = None
    """How far a query is from a prototype; a negative margin is evaluated without."""
    folders: Annotated[Folders, tyro.conf.arg(name="")] = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Evaluates, prints and writes the report."""
        from experiments.evaluation.run import evaluate_run, run_directory
        from experiments.reporting.report import evaluation_name, run_report, write_run_report

        settings = ("ways", "shots", "queries", "episodes", "seed", "distance")
        given = {name: getattr(self, name) for name in settings}
        report = evaluate_run(
            self.directory,
            self.folders,
            split=self.split,
            which=self.checkpoint,
            overrides={name: value for name, value in given.items() if value is not None},
        )
        report["command"] = shlex.join(command)
        print(run_report(report))
        folder = run_directory(self.directory)
        paths = write_run_report(folder, report, evaluation_name(report))
        print("\nwrote", ", ".join(str(path) for path in paths))
        return 0


@dataclass(frozen=True)
class Compare:
    """Train and evaluate a grid of losses and samplings; write its table and figure.

    Finished cells are kept: the same command goes on where it was stopped, and one with other
    losses, samplings or seeds adds to the grid. The table shows all finished cells of the folder.
    A cell that diverges is shown as such; the others go on, and the exit status is 1 in the end.
    Of the options of the runs, the grid itself sets --loss.name, --sampling.strategy and --seed.
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
    distributed: Distributed = False
    """One of several processes that share the run's directory: start the same command in each,
    with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in its environment, or under
    a scheduler that JAX knows (Slurm, Open MPI, cloud TPU)."""
    folders: Annotated[Folders, tyro.conf.arg(name="")] = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Runs what is missing of the grid, prints its table."""
        from experiments.cells import Cell, run_cells
        from experiments.compare import cell_directory, finished_cells, grid
        from experiments.reporting.tables import write_report
        from experiments.training.processes import on_first

        for option, instead in GRID_OPTIONS.items():
            if _given(option, command):
                raise ConfigError(f"compare sets {option} itself, in every cell; give {instead}")
        for option, values in (
            ("--losses", self.losses),
            ("--sampling", self.sampling),
            ("--seeds", self.seeds),
        ):
            if not values:
                raise ConfigError(f"{option} needs at least one value")
        config: Any = self.config
        if not isinstance(config, FewShotConfig):
            raise ConfigError(
                f"compare is for few-shot learning, and {config.data.name} has protocol "
                f"{config.protocol} here; sweep compares any options of any protocol"
            )
        root = self.directory or Path("runs", f"compare-{config.data.name}")
        cells = [
            Cell(
                f"{cell.loss.name}, {cell.sampling.strategy}, seed {cell.seed}",
                cell,
                cell_directory(root, cell),
            )
            for cell in grid(config, self.losses, self.sampling, self.seeds)
        ]
        typed = shlex.join(command)
        diverged = run_cells(cells, self.folders, command=typed, parallel_mode=self.parallel)
        paths = on_first(lambda: write_report(root, finished_cells(root, config), command=typed))
        return _close(paths, diverged, of=len(cells))


@dataclass(frozen=True)
class Sweep:
    """Train and evaluate a preset at all combinations of values of some options.

    Writes table.md, table.json and figure.png. Finished runs are kept: the same command goes on
    where it was stopped. The table shows the values that the command names, at every seed that has
    been run. One that diverges is shown as such; the others go on, and the exit status is then 1.
    """

    config: Preset
    over: tuple[str, ...] = ()
    """Axes, the methods first: OPTION=VALUE,VALUE,... such as loss.name=softmax,loose, or options
    that change together: loss.name/optimizer.learning_rate=softmax/0.1,loose/0.3. The numbers of an
    option that has several are joined by +: optimizer.decay_steps=30+60."""
    seeds: tuple[int, ...] = (0,)
    """Every combination is trained once for each seed."""
    directory: Path | None = None
    """Folder of the sweep (by default runs/sweep-PRESET). Its table and figure are those of the
    last command; the runs are kept, so that each command gives its own again."""
    title: str = ""
    """Title of table and figure."""
    metrics: tuple[str, ...] = ()
    """Which metrics the table and the figure show, in this order (by default all; a name that there
    is not is refused at once, with those that there are)."""
    parallel: Mode = "pmap"
    """Data-parallel over all devices by jax.pmap, or by a jit over sharded global arrays."""
    distributed: Distributed = False
    """One of several processes that share the run's directory, as in `train`."""
    folders: Annotated[Folders, tyro.conf.arg(name="")] = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Runs what is missing of the sweep, prints its table."""
        from experiments.cells import run_cells
        from experiments.reporting.sweep import Axis, write_sweep
        from experiments.sweep import cells, check_metrics, finished, parse_axis
        from experiments.training.processes import on_first

        config: Any = self.config
        if not self.over or not self.seeds:
            raise ConfigError("sweep needs at least one axis (--over) and one seed (--seeds)")
        axes = [parse_axis(text, config) for text in self.over]
        for option in ("seed", *(option for axis in axes for option in axis.options)):
            if _given(name := f"--{option.replace('_', '-')}", command):
                instead = "--seeds" if option == "seed" else "its values to --over alone"
                raise ConfigError(f"sweep sets {name} itself, in every run; give {instead}")
        preset = next(word for word in command if word in PRESETS)
        root = self.directory or Path("runs", f"sweep-{preset}")
        todo = cells(config, axes, self.seeds, root)
        check_metrics(self.metrics, todo)
        typed = shlex.join(command)
        diverged = run_cells(todo, self.folders, command=typed, parallel_mode=self.parallel)
        paths = on_first(
            lambda: write_sweep(
                root,
                [Axis(axis.name, axis.labels()) for axis in axes],
                finished(config, axes, root),
                title=self.title or f"{config.protocol} on {config.data.name}",
                metrics=self.metrics,
                command=typed,
            )
        )
        return _close(paths, diverged, of=len(todo))


@dataclass(frozen=True)
class Datasets:
    """List the data sets: what is ready, and what each of the others needs."""

    folders: Annotated[Folders, tyro.conf.arg(name="")] = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Prints the list."""
        from experiments.data.builders import dataset_status

        for status in dataset_status(self.folders.data_dir, self.folders.manual_dir):
            print(status)
        return 0


COMMANDS = (
    Annotated[Train, tyro.conf.subcommand("train"), tyro.conf.CascadeSubcommandArgs]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Linear, tyro.conf.subcommand("linear")]
    | Annotated[Compare, tyro.conf.subcommand("compare"), tyro.conf.CascadeSubcommandArgs]
    | Annotated[Sweep, tyro.conf.subcommand("sweep"), tyro.conf.CascadeSubcommandArgs]
    | Annotated[Datasets, tyro.conf.subcommand("datasets")]
    | Annotated[Benchmark, tyro.conf.subcommand("benchmark")]
)


def _given(option: str, command: Sequence[str]) -> bool:
    """Whether an option such as `--loss.name` was typed, with - or _, with = or without."""
    return any(word.replace("_", "-").partition("=")[0] == option for word in command)


def _close(paths: Sequence[Path], diverged: Sequence[str], *, of: int) -> int:
    """Prints the table of several runs, which the first path holds; the exit status."""
    print("\n" + paths[0].read_text(encoding="utf-8"))
    print("wrote", ", ".join(str(path) for path in paths))
    if diverged:
        print(
            f"{len(diverged)} of {of} cells diverged (delete a cell's folder to train it again):",
            *diverged,
            sep="\n  ",
        )
    return 1 if diverged else 0


def _output(command: Any) -> TextIO | None:
    """Where a command prints: of several processes, only the first does."""
    if not getattr(command, "distributed", False):
        return sys.stdout
    from experiments.training import processes

    processes.initialize()
    return sys.stdout if processes.is_first() else None


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; an error that its user can mend is a message, not a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder("xla")))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    command: Any = tyro.cli(
        COMMANDS,  # pyright: ignore[reportArgumentType]
        prog="python -m experiments",
        description="The papers' experiments on losses that shape a feature space.",
        args=arguments,
    )

    from experiments.training.loop import Interrupted

    try:
        with contextlib.redirect_stdout(_output(command)):
            return command.run(["python", "-m", "experiments", *arguments])
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return 128 + stop.signal_number
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 128 + signal.SIGINT
    except ExperimentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # A full disk, a folder that is a file; without a file, a mistake.
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
