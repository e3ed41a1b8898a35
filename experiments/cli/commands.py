"""The commands: each declares its options; `run` prints, and returns the exit status."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.core.config import (
    MOST,
    Folders,
    ParallelMode,
    Positive,
    Several,
    TrainConfig,
    Weight,
    check_config,
)
from experiments.core.errors import ConfigError
from experiments.core.storage import component, storage_path

# Their options have no prefix.
Preset = Annotated[TrainConfig, tyro.conf.arg(name="")]
DataFolders = Annotated[Folders, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Execution:
    """How runs are trained."""

    parallel: ParallelMode = "pmap"
    """Spread the batch by jax.pmap (faster on CPUs), or by jax.jit with sharded arrays."""
    distributed: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Train with several processes. Start the same command in each, under a scheduler that JAX
    knows (Slurm, Open MPI, Kubernetes, cloud TPU) or with JAX_COORDINATOR_ADDRESS (HOST:PORT),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID in the environment."""
    stuck_after: Weight = 30.0
    """Minutes without a training step, validation and compilation included, after which a process
    prints the stacks of its threads and ends with status 1; 0: never."""
    folders: DataFolders = field(default_factory=Folders)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `train` and `complete_run`."""
        check_config(self)
        return {"folders": self.folders, "mode": self.parallel, "stuck_after": self.stuck_after}


HowToRun = Annotated[Execution, tyro.conf.arg(name="")]


def print_written(paths: Sequence[Path]) -> None:
    """Prints the first file, which is Markdown, without its pictures; then the names of all."""
    text = re.sub(r"(?m)^!\[.*\n\n?", "", paths[0].read_text(encoding="utf-8"))
    print(f"\n{text.rstrip()}\n\nwrote {', '.join(map(str, paths))}")


@dataclass(frozen=True)
class Train:
    """Train a preset, evaluate it, and write its report.

    To continue a run that was stopped or killed, run the same command again. More --steps go on in
    the same directory, except with the cosine schedule. --model.weights RUN starts from another
    run's backbone, and from its classifier where that fits.
    """

    config: Preset
    directory: Path | None = None
    """Run directory, or gs://BUCKET/PATH (by default runs/PRESET-LOSS-SAMPLING-seedSEED)."""
    execution: HowToRun = field(default_factory=Execution)

    def run(self, typed: str) -> int:
        """Trains, evaluates, prints the report."""
        # Imports are here because `--help` need not wait for Orbax and TensorBoard.
        from experiments.papers import build_protocol
        from experiments.reporting.run import report_text
        from experiments.run import train

        config, how = self.config, self.execution.arguments()
        name = f"{config.preset}-{config.loss.name}-{config.sampling.strategy}-seed{config.seed}"
        directory = storage_path(str(self.directory or Path("runs", component(name))))
        report = train(config, directory=directory, command=typed, **how)
        print(report_text(build_protocol(config), report))
        print(f"\nreport: {directory / 'report.md'}")
        if "diverged" not in report:
            print(f"pictures: python -m experiments look {shlex.quote(str(directory))}")
        return 3 if "diverged" in report else 0


@dataclass(frozen=True)
class Sweep:
    """Train and evaluate a preset at all combinations of values of some options.

    Writes table.md, table.json, runs.csv and figure.png. Finished runs are kept: the same command
    continues where it was stopped. The table has the values and seeds that the command names. If a
    run diverges, the others continue; the table shows which one it was, and the exit status is 3.
    """

    config: Preset
    over: tuple[str, ...] = ()
    """Axes, the methods first: OPTION=VALUE,VALUE,... such as loss.name=softmax,loose, or options
    that change together: loss.name/optimizer.learning_rate=softmax/0.1,loose/0.3. The numbers of an
    option that takes several are joined by +: optimizer.decay_steps=30+60."""
    seeds: tuple[int, ...] = (0,)
    """Every combination is trained once for each seed."""
    directory: Path | None = None
    """Folder of the runs and the table (by default runs/sweep-PRESET); the table is that of the
    last command."""
    baseline: str = ""
    """OPTION=VALUE of an axis, as loss.name=softmax: adds tables of paired differences to it."""
    pairs_over: str = ""
    """Option whose values are repetitions, as data.subset_seed; each is the mean of its seeds."""
    choose: str = ""
    """Option with its own --over, whose value validation chooses at every combination."""
    title: str = ""
    """Title of the table and figure (by default protocol, data set and, if there is one, loss)."""
    metrics: tuple[str, ...] = ()
    """Metrics that the table and figure show, in this order (by default all)."""
    execution: HowToRun = field(default_factory=Execution)

    def run(self, typed: str) -> int:
        """Runs the missing part of the sweep, prints its table."""
        from experiments.papers.presets import PRESETS
        from experiments.sweeps.grid import check_not_set, parse_axis, parse_comparison, run_grid

        config, how = self.config, self.execution.arguments()
        if not self.over or not self.seeds:
            raise ConfigError("sweep needs at least one axis (--over) and one seed (--seeds)")
        axes = [parse_axis(text, config) for text in self.over]
        swept = {option: "its values in --over" for axis in axes for option in axis.settings[0]}
        check_not_set(config, PRESETS[config.preset].config, {**swept, "seed": "--seeds"})
        chosen = self.baseline, self.pairs_over, self.choose
        comparison = parse_comparison(axes, config, *chosen)
        paths, diverged = run_grid(
            config,
            axes,
            self.seeds,
            storage_path(str(self.directory or Path("runs", f"sweep-{config.preset}"))),
            comparison=comparison,
            title=self.title,
            metrics=self.metrics,
            command=typed,
            **how,
        )
        if paths:
            print_written(paths)
        if diverged:
            runs = "1 run" if len(diverged) == 1 else f"{len(diverged)} runs"
            message = f"{runs} diverged (delete the folder of one to train it again):"
            print(message, *diverged, sep="\n  ")
        return 3 if diverged else 0


@dataclass(frozen=True)
class OfRun:
    """A checkpoint of a trained run."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory, or its folder of checkpoints."""
    checkpoint: str = "best"
    """`best` by validation (of equal ones, the latest), `latest`, or the number of a step."""
    folders: DataFolders = field(default_factory=Folders)


@dataclass(frozen=True)
class OfCheckpoint(OfRun):
    """A checkpoint of a trained run, and the split that it is used on."""

    split: Annotated[
        str | None, tyro.conf.arg(metavar="SPLIT", help_behavior_hint="(default: novel or test)")
    ] = None
    """base, validation or novel classes; without held-out classes: train, validation or test."""


@dataclass(frozen=True)
class Evaluate(OfCheckpoint):
    """Evaluate a trained run as its protocol does."""

    options: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="OPTION=VALUE ...")] = ()
    """Options of the evaluation that differ from the run's, as evaluation.ways=10. They are those
    of `train PRESET --help` that begin with evaluation or fine-tuning; the values of an option that
    takes several are joined by +: evaluation.shots=1+5."""
    over: tuple[str, ...] = ()
    """Evaluate at all combinations of values of evaluation options, as the axes of `sweep`:
    fine_tuning.margin=-0.1,0,0.1. Writes a table and a figure into RUN/evaluations."""
    metrics: tuple[str, ...] = ()
    """With --over: metrics that the table and figure show, in this order (by default all)."""
    baseline: str = ""
    """With --over: OPTION=VALUE of an axis, as fine_tuning.margin=0; adds the differences to it."""

    def run(self, typed: str) -> int:
        """Evaluates, prints and writes the report."""
        from experiments.papers import build_protocol
        from experiments.reporting.run import write_report
        from experiments.run import evaluate, load_run, with_evaluation
        from experiments.sweeps.grid import evaluate_over, setting_names

        parts = (text.partition("=") for text in self.options)
        options = {name.replace("-", "_"): value for name, _, value in parts}
        if self.over:
            paths = evaluate_over(
                self.directory,
                self.folders,
                self.over,
                split=self.split,
                checkpoint=self.checkpoint,
                overrides=options,
                metrics=self.metrics,
                baseline=self.baseline,
                command=typed,
            )
            print_written(paths)
            return 0
        if self.metrics or self.baseline:
            raise ConfigError("--metrics and --baseline are for a table of evaluations, by --over")
        run = load_run(self.directory, self.checkpoint)
        print(f"{run.directory}: features, then the evaluation …", flush=True)
        report = evaluate(run, options, split=self.split, folders=self.folders)
        # A name with the options, so that evaluations of a run do not overwrite each other.
        checkpoint = f"evaluation-{report['split']}-step{report['step']}"
        name = component(",".join([checkpoint, *setting_names(options)]))
        protocol = build_protocol(with_evaluation(run.plan.config, options))
        print_written(write_report(run.directory, protocol, report | {"command": typed}, name))
        return 0


@dataclass(frozen=True)
class Linear:
    """Evaluate runs by linear classifiers on their frozen features, on any data set (protocol F).

    Softmax classifiers are trained by L-BFGS with 45 L2 penalties; the penalty is chosen on images
    held out of the training images. Writes linear-DATA.md and .json into each run directory; of
    several runs, also a table and a figure, with one row for each loss.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Run directories, or their folders of checkpoints."""
    data: str
    """Data set, as `python -m experiments datasets` lists it. One without a test split, or with
    held-out classes, is split within its classes."""
    split: Literal["all", "base", "validation", "novel"] = "all"
    """Classes of a data set that holds classes out: all, or those of one split."""
    checkpoint: str = "best"
    """`best` by validation (of equal ones, the latest), `latest`, or the number of a step."""
    holdout: float = 0.2
    """Fraction of each class's training images on which the penalty is chosen."""
    baseline: str = ""
    """With several runs: a loss by its label, as Two-way; adds the paired differences to it."""
    directory: Path | None = None
    """With several runs: folder of the table (by default runs/linear-DATA)."""
    folders: DataFolders = field(default_factory=Folders)

    def run(self, typed: str) -> int:
        """Evaluates, prints and writes the reports."""
        from experiments.papers.classification import ClassificationData
        from experiments.sweeps.linear import evaluate_runs_linear

        paths = evaluate_runs_linear(
            [storage_path(str(run)) for run in self.runs],
            self.folders,
            ClassificationData(name=self.data, class_split=self.split, holdout=self.holdout),
            checkpoint=self.checkpoint,
            directory=self.directory and storage_path(str(self.directory)),
            baseline=self.baseline,
            command=typed,
        )
        print_written(paths)
        return 0


@dataclass(frozen=True)
class Look(OfCheckpoint):
    """Draw what a run did to the feature space: a page of pictures.

    Writes look/index.html into the run directory, which needs no other file, and the pictures as
    PNG: maps of the features, nearest neighbours, similarity and accuracy of the classes, training
    curves; and, where they apply, the hardest episodes, the spectrum of the classifier and the
    reliability diagram.
    """

    def run(self, typed: str) -> int:
        """Draws the pictures and prints where the page is."""
        from experiments.look import look_at_run

        page, *others = look_at_run(
            self.directory,
            self.folders,
            split=self.split,
            checkpoint=self.checkpoint,
            command=typed,
        )
        print(f"wrote {page}, which contains all pictures; and, in its folder:")
        print(", ".join(path.name for path in others))
        return 0


@dataclass(frozen=True)
class Predict(OfRun):
    """Print the most probable classes of new images, or the training images that are nearest.

    A line for each image: the three most probable classes; of several labels, those of the largest
    logits; of runs for new classes, or without a classifier, the three training images of the
    largest cosine, and their classes.
    """

    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = ()
    """Images, or folders with images."""

    def run(self, typed: str) -> int:
        """Prints a line for each image."""
        from experiments.run import load_run, predict

        run = load_run(self.directory, self.checkpoint)
        for line in predict(run, self.images, folders=self.folders):
            print(line)
        return 0


@dataclass(frozen=True)
class Power:
    """Print how many pairs of runs a paired comparison needs, before they are trained.

    Runs of one seed on two methods are a pair.
    """

    deviation: Positive
    """Standard deviation of the differences within pairs, for example in percentage points. Of runs
    that sweep has compared with a --baseline, table.json has it."""
    effect: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """Difference to find, in the same unit: prints how many pairs it needs."""
    pairs: tuple[Several, ...] = (3, 5, 8, 10, 15, 20)
    """Numbers of pairs: prints the smallest difference that each of them finds."""

    def run(self, typed: str) -> int:
        """Prints the numbers."""
        from experiments.reporting.power import power_lines

        check_config(self)
        if self.effect == 0:
            raise ConfigError("--effect must not be 0: no number of pairs finds it")
        print("\n".join(power_lines(self.deviation, self.effect, self.pairs)))
        return 0


@dataclass(frozen=True)
class Datasets:
    """List the data sets: which are prepared, or can be; with names, what each of these needs."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Data sets to describe; by default all, with a line each."""
    folders: DataFolders = field(default_factory=Folders)

    def run(self, typed: str) -> int:
        """Prints the list."""
        from experiments.datasets import describe, overview

        found = [str(describe(name, **vars(self.folders))) for name in self.names]
        print("\n".join(found or overview(**vars(self.folders))))
        return 0


@dataclass(frozen=True)
class Prepare:
    """Prepare data sets now, for example before they are copied to an object store."""

    names: tyro.conf.Positional[tuple[str, ...]]
    """The data sets, as `datasets` lists them; NAME@SIZE stores photographs at another size."""
    folders: DataFolders = field(default_factory=Folders)

    def run(self, typed: str) -> int:
        """Prepares them, and prints their folders."""
        from experiments.datasets import lookup
        from experiments.datasets.preparation import prepare

        if not self.names:
            raise ConfigError("prepare needs the name of a data set, as `datasets` lists them")
        datasets = [lookup(name) for name in self.names]  # Before the first is prepared.
        for dataset in datasets:
            print(prepare(dataset, **vars(self.folders)).data_dir)
        return 0


@dataclass(frozen=True)
class Benchmark:
    """Measure time and memory of every loss against PyTorch, optax and matrix products.

    All forms of a loss run in one process on the same arrays, in turns, after a check that their
    values and gradients agree. Needs the extra `benchmark`, and a C++ compiler for torch.compile.
    All sizes together take twenty to forty minutes on one CPU core. On a GPU or a TPU, measure
    large batches: `--size accelerator --minutes 5`.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = ()
    """Such as `softmax nca direct_sum`; default: all."""
    size: Literal["paper", "large", "own", "accelerator", "all"] = "paper"
    """The size of each loss's paper, ten times larger, further sizes of single losses, the three,
    or large batches and many classes, in float32 and bfloat16, for an accelerator."""
    dtype: Literal["", "float32", "bfloat16", "mixed"] = ""
    """Measure only the rows of this dtype."""
    minutes: float = float("inf")
    """Start no row after so many minutes."""
    out: Path = Path("runs", "benchmark")
    """Folder for benchmark.md."""
    allow_load: bool = False
    """Measure although other programs use the machine; the report then starts with a warning."""
    cycles: str = ""
    """A TPU topology such as v5e:2x2: measure nothing, but print for losses of `--size accelerator`
    how long one chip takes by the estimate of its compiler. Needs the extra `tpu`, but no TPU."""
    precisions: bool = False
    """With --cycles, compare the settings of `jax.default_matmul_precision`: for losses that
    multiply matrices, the estimate and the errors of the value and of the gradients."""

    def run(self, typed: str) -> int:
        """Measures, prints the table, writes it."""
        from experiments.benchmark.cases import problems_of
        from experiments.benchmark.cycles import cycles_report
        from experiments.benchmark.precision import precision_report
        from experiments.benchmark.run import run_benchmark

        if self.precisions and not self.cycles:
            raise ConfigError("--precisions needs --cycles, such as v5e:2x2")
        if self.cycles:
            problems = problems_of(self.names, "accelerator", self.dtype or "bfloat16")
            print((precision_report if self.precisions else cycles_report)(problems, self.cycles))
            return 0
        for package in ("torch", "pytorch_metric_learning"):
            if find_spec(package) is None and self.size != "accelerator":
                raise ConfigError(f'no {package}; run pip install -e ".[benchmark]"')
        problems, path = problems_of(self.names, self.size, self.dtype), self.out / "benchmark.md"
        text = run_benchmark(
            problems,
            command=typed,
            seconds=60 * self.minutes,
            output=path,
            allow_load=self.allow_load,
        )
        print(f"\n{text}\nwrote {path}")
        return 0


@dataclass(frozen=True)
class Compile:
    """Compile a preset's training step for a TPU pod, and print what a chip needs.

    No TPU and no data are needed, but the extra `tpu` (pip install -e ".[tpu]"). If a step does not
    fit into the memory of a chip, the exit status is 1.
    """

    config: Preset
    topology: str = "v5e:2x2"
    """Kind and arrangement of the chips, such as v5e:16x16 for 256 of them."""
    parallel: ParallelMode = "pmap"
    """Data parallelism: jax.pmap, or jax.jit with sharded arrays."""
    classes: int = 0
    """Number of classes to assume; 0: that of the data set."""

    def run(self, typed: str) -> int:
        """Prints the report."""
        import jax

        jax.config.update("jax_platforms", "cpu")
        from experiments.benchmark.compilation import compilation_lines, compile_step
        from experiments.benchmark.topologies import tpu_devices

        if not 0 <= self.classes <= MOST:
            raise ConfigError(f"--classes must be at least 0 and at most {MOST}")
        devices = tpu_devices(self.topology)
        heading = f"# {self.config.preset} on {self.topology}, by {self.parallel}"
        try:
            step = compile_step(self.config, devices, mode=self.parallel, classes=self.classes)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(f"{heading}\n\nThe step does not fit. Compiler message:\n\n{error}")
            return 1
        print("\n".join([heading, "", *compilation_lines(step)]))
        return 1 if step.fits is False else 0


COMMANDS: dict[str, Any] = {
    kind.__name__.lower(): kind
    for kind in (
        *(Train, Evaluate, Linear, Look, Predict, Sweep, Power, Datasets, Prepare, Benchmark),
        Compile,
    )
}
"""The type of every command."""
