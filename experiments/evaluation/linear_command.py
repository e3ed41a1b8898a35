"""The subcommand `linear` of `python -m experiments`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from experiments.config import Folders


@dataclass(frozen=True)
class Linear:
    """Transfer of a run's features to a data set: linear classifiers, 45 weights (protocol F).

    The backbone is frozen. Softmax classifiers on its features are trained by L-BFGS; the weight of
    their L2 regularisation is the best on images held out of the training images. Writes
    linear-DATA.md, .json and .png into the run directory; a checkpoint other than the best and
    another hold-out stand behind DATA.
    """

    directory: Annotated[Path, tyro.conf.Positional]
    """Run directory, as `train` made it, or its folder of checkpoints."""
    data: str
    """Data set, as `python -m experiments datasets` lists it; one without a test split, or with
    held-out classes, is split within its classes."""
    checkpoint: str = "best"
    """`best` by validation, `latest`, or the number of a step."""
    holdout: float = 0.2
    """Share of each class's training images that chooses the weight."""
    folders: Annotated[Folders, tyro.conf.arg(name="")] = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Evaluates, prints and writes the report."""
        from experiments.evaluation.linear_run import evaluate_run_linear
        from experiments.evaluation.run import run_directory
        from experiments.reporting.linear import linear_report, write_linear_report

        report = evaluate_run_linear(
            self.directory,
            self.folders,
            data=self.data,
            holdout=self.holdout,
            which=self.checkpoint,
        )
        print(linear_report(report))
        folder = run_directory(self.directory)
        name = self._name(report["step"])
        paths = write_linear_report(folder, report, name, command=shlex.join(command))
        print("\nwrote", ", ".join(str(path) for path in paths))
        return 0

    def _name(self, step: int) -> str:
        """A file name by which two evaluations of a run do not overwrite each other."""
        checkpoint = "" if self.checkpoint == Linear.checkpoint else f"-step{step}"
        holdout = "" if self.holdout == Linear.holdout else f"-holdout{self.holdout}"
        return f"linear-{self.data}{checkpoint}{holdout}"
