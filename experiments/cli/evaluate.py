"""The commands on trained runs: `evaluate`, `linear` and `look`."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.cli.options import DataFolders, print_written
from experiments.core.config import Folders, TrainConfig, evaluation_sections
from experiments.core.errors import ConfigError, ExperimentError
from experiments.core.storage import component, is_remote, storage_path


@dataclass(frozen=True)
class OfCheckpoint:
    """A checkpoint of a trained run, and the split that it is used on."""

    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory, or its folder of checkpoints."""
    split: Annotated[
        str | None, tyro.conf.arg(metavar="SPLIT", help_behavior_hint="(default: novel or test)")
    ] = None
    """base, validation or novel classes; without held-out classes: train, validation or test."""
    checkpoint: str = "best"
    """`best` by validation (of equal ones, the latest), `latest`, or the number of a step."""


@dataclass(frozen=True)
class Evaluate(OfCheckpoint):
    """Evaluate a trained run as its protocol does.

    The options of its evaluation are those of `train`, and keep the values of the run unless they
    are given: `evaluate RUN --help` lists them.
    """

    over: tuple[str, ...] = ()
    """Evaluate at all combinations of values of evaluation options, as the axes of `sweep`:
    fine_tuning.margin=-0.1,0,0.1. Writes a table and a figure into RUN/evaluations."""
    metrics: tuple[str, ...] = ()
    """With --over: metrics that the table and figure show, in this order (by default all)."""
    baseline: str = ""
    """With --over: OPTION=VALUE of an axis, as fine_tuning.margin=0; adds the differences to it."""
    folders: DataFolders = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Evaluates, prints and writes the report."""
        from experiments.papers import build_protocol
        from experiments.reporting.run import write_report
        from experiments.run import evaluate, load_run, with_evaluation
        from experiments.sweeps.grid import evaluate_over, setting_names

        table: Any = {"metrics": self.metrics, "baseline": self.baseline}
        for option, given in table.items():
            if given and not self.over:
                raise ConfigError(f"--{option} is for a table of evaluations; it needs --over")
        changed, typed = self._changed(), shlex.join(command)
        if self.over:
            of: Any = {"split": self.split, "checkpoint": self.checkpoint, "overrides": changed}
            options = {**of, **table, "command": typed}
            print_written(evaluate_over(self.directory, self.folders, self.over, **options))
            return 0
        run = load_run(self.directory, self.checkpoint)
        print(f"{self.directory}: features, then the evaluation …", flush=True)
        report = evaluate(run, changed, split=self.split, folders=self.folders)
        report["command"] = typed
        # A name with the settings, so that evaluations of a run do not overwrite each other.
        checkpoint = f"evaluation-{report['split']}-step{report['step']}"
        name = component(",".join([checkpoint, *setting_names(changed)]))
        protocol = build_protocol(with_evaluation(run.plan.config, changed))
        print_written(write_report(run.directory, protocol, report, name))
        return 0

    def _changed(self) -> dict[str, Any]:
        """The evaluation options that do not have the run's value."""
        own = {field.name for field in dataclasses.fields(Evaluate)}
        return {
            f"{part.name}.{option}": value
            for part in dataclasses.fields(self)
            if part.name not in own
            for option, value in vars(vars(self)[part.name]).items()
            if value != vars(part.default)[option]
        }


def evaluate_command(config: TrainConfig | None) -> type[Evaluate]:
    """The command with the evaluation options of a run, whose values are the defaults."""
    if config is None:
        return Evaluate
    sections = [
        (name, type(section), field(default=section))
        for name, section in evaluation_sections(config).items()
    ]
    namespace = {"__doc__": Evaluate.__doc__}
    return dataclasses.make_dataclass(
        "Evaluate", sections, bases=(Evaluate,), frozen=True, namespace=namespace
    )


def config_of_arguments(arguments: Sequence[str]) -> TrainConfig | None:
    """The configuration of the run that the arguments of `evaluate` name; None if there is none.

    Raises:
      ConfigError: There is none, and options of an evaluation are given.
    """
    from experiments.run import config_of_run

    refused = ""
    for word in arguments:
        try:
            if is_remote(path := storage_path(word)) or path.is_dir():
                return config_of_run(path)
        except ExperimentError as error:  # No path; a folder of data; or a run of another version.
            refused += f"\n  {word}: {error}"
    if any(word.startswith(("--evaluation.", "--fine-tuning.")) for word in arguments):
        raise ConfigError(
            "options of an evaluation need the directory of a trained run, which none of the "
            f"arguments is: {' '.join(arguments)}{refused}"
        )
    return None


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

    def run(self, command: Sequence[str]) -> int:
        """Evaluates, prints and writes the reports."""
        from experiments.papers.classification import ClassificationData
        from experiments.sweeps.linear import evaluate_runs_linear

        paths = evaluate_runs_linear(
            self.runs,
            self.folders,
            ClassificationData(name=self.data, class_split=self.split, holdout=self.holdout),
            checkpoint=self.checkpoint,
            directory=self.directory,
            baseline=self.baseline,
            command=shlex.join(command),
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

    folders: DataFolders = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Draws the pictures and prints where the page is."""
        from experiments.look import look_at_run

        page, *others = look_at_run(
            self.directory,
            self.folders,
            split=self.split,
            checkpoint=self.checkpoint,
            command=shlex.join(command),
        )
        print(f"wrote {page}, which contains all pictures; and, in its folder:")
        print(", ".join(path.name for path in others))
        return 0
