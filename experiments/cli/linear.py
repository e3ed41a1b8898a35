"""The verb `linear`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from experiments.cli.options import DataFolders
from experiments.config import Folders


@dataclass(frozen=True)
class Linear:
    """Evaluate a run by linear classifiers on its frozen features, on any data set (protocol F).

    Softmax classifiers are trained by L-BFGS with 45 L2 penalties; the penalty is chosen on images
    held out of the training images. Writes linear-DATA.md, .json and .png into the run directory.
    """

    directory: Annotated[Path, tyro.conf.Positional]
    """Run directory, or its folder of checkpoints."""
    data: str
    """Data set, as `python -m experiments datasets` lists it. One without a test split, or with
    held-out classes, is split within its classes."""
    checkpoint: str = "best"
    """`best` by validation, `latest`, or the number of a step."""
    holdout: float = 0.2
    """Fraction of each class's training images on which the penalty is chosen."""
    folders: DataFolders = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Evaluates, prints and writes the report."""
        from experiments.reporting.linear import linear_report, write_linear_report
        from experiments.runs import run_directory
        from experiments.transfer import evaluate_run_linear

        report = evaluate_run_linear(
            self.directory,
            self.folders,
            data=self.data,
            holdout=self.holdout,
            which=self.checkpoint,
        )
        print(linear_report(report))
        paths = write_linear_report(
            run_directory(self.directory),
            report,
            self._file_name(report["step"]),
            command=shlex.join(command),
        )
        print("\nwrote", ", ".join(str(path) for path in paths))
        return 0

    def _file_name(self, step: int) -> str:
        """A name with the settings, so that evaluations of a run do not overwrite each other."""
        checkpoint = "" if self.checkpoint == Linear.checkpoint else f"-step{step}"
        holdout = "" if self.holdout == Linear.holdout else f"-holdout{self.holdout}"
        return f"linear-{self.data}{checkpoint}{holdout}"
