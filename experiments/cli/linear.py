"""The command `linear`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from experiments.cli.options import DataFolders, print_written
from experiments.config import Folders


@dataclass(frozen=True)
class Linear:
    """Evaluate runs by linear classifiers on their frozen features, on any data set (protocol F).

    Softmax classifiers are trained by L-BFGS with 45 L2 penalties; the penalty is chosen on images
    held out of the training images. Writes linear-DATA.md, .json and .png into each run directory;
    of several runs, also a table and a figure, with one row for each loss.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Run directories, or their folders of checkpoints."""
    data: str
    """Data set, as `python -m experiments datasets` lists it. One without a test split, or with
    held-out classes, is split within its classes."""
    split: Literal["all", "base", "validation", "novel"] = "all"
    """Classes of a data set that holds classes out: all, or those of one split."""
    checkpoint: str = "best"
    """`best` by validation, `latest`, or the number of a step."""
    holdout: float = 0.2
    """Fraction of each class's training images on which the penalty is chosen."""
    baseline: str = ""
    """With several runs: a loss by its label, as Two-way; adds the paired differences to it."""
    directory: Path | None = None
    """With several runs: folder of the table (by default runs/linear-DATA)."""
    folders: DataFolders = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Evaluates, prints and writes the reports."""
        from experiments.protocols.classification import ClassificationData
        from experiments.transfer import evaluate_runs_linear

        paths = evaluate_runs_linear(
            self.runs,
            self.folders,
            ClassificationData(name=self.data, class_split=self.split, holdout=self.holdout),
            which=self.checkpoint,
            directory=self.directory,
            baseline=self.baseline,
            command=shlex.join(command),
        )
        print_written(paths)
        return 0
